"""`myxa top`: the run in a terminal, to look at and to set knobs.

Whatever may block runs in threads, which send messages to the application.
"""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Sequence
from typing import ClassVar, cast

from rich.text import Text
from textual import on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.message import Message
from textual.widgets import DataTable, Footer, Input, Static, TabbedContent, TabPane

from ...core.errors import MyxaError
from ...core.knobs import AuditRecord
from ..commands.knobs import set_arguments
from ..views.changes import changes_of, clock_text, value_text
from ..views.knob_table import KNOB_COLUMNS, KnobRow, knob_rows, reply_text
from ..views.numbers import clean, duration, short, time_parts
from ..views.run_page import add_fact, run_page
from ..views.run_view import RunView, notice_text, title_text
from ..views.textplot import bar
from .feed import Feed

ACTOR_COLUMNS = ("actor", "state", "node", "its last minute")
HISTORY_COLUMNS = ("no.", "time", "step", "what", "who", "result", "reason")


def actor_rows(view: RunView) -> list[tuple[str, ...]]:
    shares = view.shares()
    return [
        (
            clean(actor.name),
            actor.state or "?",
            f"{actor.node} {clean(actor.host)}",
            "  ".join(["".join(letters for letters, _ in bar(kinds, 8)), *time_parts(kinds, 0)[:1]]),
        )
        for actor in view.actors
        for kinds in [shares.get(actor.name, {})]
    ]


def actor_page(view: RunView, name: str) -> Text:
    """One actor: its process, where its time went, its metrics."""
    page, actor = Text(), next((actor for actor in view.actors if actor.name == name), None)
    if actor is None:
        add_fact(page, "actor", f"{name} is not in the run any more")
        return page
    place = f"pid {actor.pid or '?'}, node {actor.node} {actor.host}, attempt {actor.attempt}"
    add_fact(page, "process", clean(f"{actor.state or 'state unknown'}, {place}"))
    age_s, values = view.snapshot.get("age_s", {}).get(name), sorted(view.snapshot.get(name, {}).items())
    heard = [f"{duration(age_s)} ago"] if age_s is not None else []
    metrics = [f"{short(value):>9}  {clean(key)}" for key, value in values[:60]]
    for label, lines in (("heard", heard), ("time", time_parts(view.shares().get(name, {}))), ("metrics", metrics)):
        for index, line in enumerate(lines):
            add_fact(page, "" if index else label, clean(line))
    return page


def history_rows(records: Sequence[AuditRecord]) -> list[tuple[str, ...]]:
    rows = [
        (
            str(change.number),
            clock_text(change.wall_s),
            str(change.step) if change.step >= 0 else "",
            clean(change.what),
            clean(change.who),
            clean(change.result + (f": {change.detail}" if change.detail and not change.is_done else "")),
            clean(change.reason),
        )
        for change in changes_of(records)
    ]
    return rows[::-1] or [("", "", "", "nothing was changed", "", "", "")]


class Seen(Message):
    """A thread took a look."""

    def __init__(self, view: RunView) -> None:
        super().__init__()
        self.view = view


class Answered(Message):
    """The run answered a change."""

    def __init__(self, text: str, *, is_done: bool) -> None:
        super().__init__()
        self.text = text
        self.is_done = is_done


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


LOOK_EVERY_S = 1.0
_TABS = ("run", "actors", "knobs", "history")
_TABLES = {"actors": ACTOR_COLUMNS, "knobs": (*KNOB_COLUMNS, "what it does"), "history": HISTORY_COLUMNS}


class TopApp(App[None]):
    """The application: title and verdict, four pages."""

    TITLE = "myxa top"
    ENABLE_COMMAND_PALETTE = False
    AUTO_FOCUS = ""
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(number), f"page('{name}')", name) for number, name in enumerate(_TABS, 1)),
        Binding("r", "refresh", "refresh"),
        Binding("q", "quit", "quit"),
        Binding("escape", "leave", "leave", show=False),
    ]
    CSS = """
    #title { height: 1; padding: 0 1; text-style: bold; }
    #why { height: auto; max-height: 3; padding: 0 1; text-style: italic; }
    #notice { height: auto; max-height: 2; padding: 0 1; color: $warning; text-style: bold; }
    #tabs { height: 1fr; }
    #about { height: auto; max-height: 5; padding: 0 1; }
    #change { border: none; height: 1; padding: 0 1; background: $boost; }
    TabPane { padding: 0 1; }
    DataTable { height: 1fr; background: transparent; }
    DataTable > .datatable--cursor { text-style: reverse; }
    """

    def __init__(self, feed: Feed) -> None:
        super().__init__()
        self._feed = feed
        self._run_view: RunView | None = None
        self._actor = ""
        self._knob_rows: dict[str, KnobRow] = {}

    def compose(self) -> ComposeResult:
        yield Static("myxa top: asking the run ...", id="title")
        yield Static(id="why")
        yield Static(id="notice")
        with TabbedContent(id="tabs"):
            for name in _TABS:
                with TabPane(name.title(), id=name):
                    if name in _TABLES:
                        yield DataTable(id=f"{name}-table", cursor_type="row")
                    if name in ("run", "actors"):
                        with VerticalScroll(id=f"{name}-scroll"):
                            yield Static(id=f"{name}-text")
        yield Static(id="about")
        yield Input(id="change")
        yield Footer()

    def on_mount(self) -> None:
        self._show_change(is_shown=False)
        for name, columns in _TABLES.items():
            self._table(name).add_columns(*columns)
        # Not textual's thread workers: those are waited for at the end, also when the run that they ask hangs.
        threading.Thread(target=self._look_forever, daemon=True, name="myxa-top").start()

    def on_unmount(self) -> None:
        self._feed.close()

    def _look_forever(self) -> None:
        while not self._feed.is_closed:
            started_s = time.monotonic()
            view = self._feed.look()
            self.post_message(Seen(view))
            self._feed.wait(max(0.0, LOOK_EVERY_S - (time.monotonic() - started_s)))

    @on(Seen)
    def seen(self, event: Seen) -> None:
        if not self.is_running:  # the widgets are being taken away: this may have waited in the queue
            return
        self._run_view = view = event.view
        self._say("title", Text(title_text(view)))
        self._say("why", Text(clean(view.why)))
        notice = notice_text(view)
        self._say("notice", Text(notice)).display = bool(notice)
        self._knob_rows = {row.name: row for row in knob_rows(view.knobs)}
        fill(self._table("knobs"), [(*row.cells(), clean(row.tunable.help)) for row in self._knob_rows.values()])
        fill(self._table("history"), history_rows(view.history))
        fill(self._table("actors"), actor_rows(view))
        self._show_texts()

    def _table(self, name: str) -> DataTable[str]:
        return cast("DataTable[str]", self.query_one(f"#{name}-table"))

    def _say(self, name: str, text: Text) -> Static:
        line = self.query_one(f"#{name}", Static)
        line.update(text)
        return line

    def _show_texts(self) -> None:
        if self._run_view is not None and self.is_running:
            self._say("run-text", run_page(self._run_view, max(40, self.size.width - 5)))
            self._say("actors-text", actor_page(self._run_view, self._actor))

    @on(DataTable.RowHighlighted, "#actors-table")
    def choose(self, event: DataTable.RowHighlighted) -> None:
        if self.is_running:
            self._actor = str(event.row_key.value)
            self._show_texts()

    def action_page(self, name: str) -> None:
        self.query_one("#tabs", TabbedContent).active = name

    @on(TabbedContent.TabActivated)
    def activated(self) -> None:
        """The arrow keys move in the page; after the refresh: a widget that is not displayed takes no focus."""
        self.call_after_refresh(self._give_focus)

    def _give_focus(self) -> None:
        if self.is_running and (pane := self.query_one("#tabs", TabbedContent).active_pane) is not None:
            pane.query("DataTable, VerticalScroll").first().focus()

    def on_resize(self) -> None:
        self.call_after_refresh(self._show_texts)

    def action_refresh(self) -> None:
        self._feed.wake()

    # -- setting a knob

    @on(DataTable.RowSelected, "#knobs-table")
    def turn(self, event: DataTable.RowSelected) -> None:
        row = self._knob_rows.get(str(event.row_key.value))
        if row is None or self._run_view is None:
            return
        if self._run_view.has_ended:
            self.notify("the run has ended: nothing can be set any more", severity="warning")
        elif self._feed.reader_only:
            self.notify(
                "only the read-only socket is within reach: ask the user that started the run", severity="warning"
            )
        else:
            knob = row.tunable
            about = f"{knob.help} It takes {knob.range_text()}; the run file said {value_text(row.first)}."
            words = "Enter sets it, Escape leaves. As `myxa set`: -m 'why', --for 50steps, --at N, --force."
            self._show_change(is_shown=True)
            self._say("about", Text(f"{about}\n{words}"))
            line = self.query_one("#change", Input)
            line.value = shlex.join([f"{row.name}={value_text(row.values[0])}"])
            line.focus()

    def _show_change(self, *, is_shown: bool) -> None:
        self.query_one("#about").display = self.query_one("#change").display = is_shown

    def action_leave(self) -> None:
        self._show_change(is_shown=False)
        self._give_focus()

    @on(Input.Submitted, "#change")
    def send(self, event: Input.Submitted) -> None:
        self._say("about", Text("asking the run ..."))
        threading.Thread(target=self._ask, args=(event.value,), daemon=True, name="myxa-top-set").start()

    def _ask(self, line: str) -> None:
        try:
            reply = self._feed.set(**set_arguments(line))
        except (MyxaError, OSError, ValueError) as error:
            self.post_message(Answered(str(error), is_done=False))
        else:
            self.post_message(Answered(reply_text(reply), is_done=not reply.refused))

    @on(Answered)
    def answered(self, event: Answered) -> None:
        """A refusal keeps the line."""
        if not self.is_running:
            return
        if event.is_done:
            self.action_leave()
            self.notify(event.text, timeout=8)
        else:
            self._say("about", Text(event.text, style="bold red"))
        self._feed.wake()
