"""Pieces of `myxa top`: what threads tell the application, the body of each page, tables that keep their cursor."""

from __future__ import annotations

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.message import Message
from textual.widgets import DataTable, Static

from ..views.picture import RunView


class Seen(Message):
    """A thread took a look."""

    def __init__(self, picture: RunView) -> None:
        super().__init__()
        self.picture = picture


class Read(Message):
    """A thread read a text for one of the pages."""

    def __init__(self, page: str, actor: str, text: str) -> None:
        super().__init__()
        self.page = page
        self.actor = actor
        self.text = text


def page_body(name: str) -> ComposeResult:
    """Widgets of one page."""
    if name in ("knobs", "history"):
        table: DataTable[str] = DataTable(id={"knobs": "knob-table", "history": "history-table"}[name])
        table.cursor_type = "row"
        yield table
        return
    with VerticalScroll(id=f"{name}-scroll", can_focus=False):
        yield Static(id=f"{name}-text")


def fill(table: DataTable[str], lines: list[tuple[str, ...]]) -> None:
    """New content; the cursor stays on the row that it was on. Keys are the first cell without its mark."""
    wanted = {line[0].strip(" *"): line for line in lines}
    if list(wanted) == [str(key.value) for key in table.rows]:
        for key, line in wanted.items():
            if [str(cell) for cell in table.get_row(key)] != list(line):
                for column, cell in zip(table.columns, line, strict=True):
                    table.update_cell(key, column, Text(cell), update_width=True)  # pyright: ignore[reportArgumentType]
        return
    kept = table.cursor_row
    table.clear()
    for key, line in wanted.items():
        table.add_row(*(Text(cell) for cell in line), key=key)  # pyright: ignore[reportArgumentType]
    table.move_cursor(row=min(kept, max(0, len(wanted) - 1)))
