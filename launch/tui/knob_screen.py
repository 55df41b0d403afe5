"""The window that sets one knob: what it is, a new value, a reason, for how long.

It asks the run through a function, which it calls in a thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import ClassVar

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.message import Message
from textual.screen import ModalScreen
from textual.widgets import Input, Label, Static

from ...core.errors import MyxaError
from ...core.knobs import ChangeReply, ChangeRequest, KnobValue
from ..views.changes import value_text
from ..views.knob_table import KnobRow, reply_text, typed_value


class KnobAnswered(Message):
    """The run answered."""

    def __init__(self, text: str, *, is_done: bool) -> None:
        super().__init__()
        self.text = text
        self.is_done = is_done


class KnobScreen(ModalScreen[str]):
    """Closes with a sentence about what was changed, or with nothing."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "leave", "leave"), Binding("ctrl+f", "force", "force")]
    CSS = """
    KnobScreen { align: center middle; }
    #box { width: 72; max-width: 96%; height: auto; max-height: 96%; }
    #box { border: solid $primary; padding: 0 1; background: $surface; }
    #box Input { border: none; height: 1; padding: 0; background: $boost; }
    #box Input:focus { text-style: bold; background: $primary-background; }
    #box Label { text-style: bold; margin-top: 1; }
    #said { margin-top: 1; }
    """

    def __init__(self, row: KnobRow, turn: Callable[[ChangeRequest], ChangeReply]) -> None:
        super().__init__()
        self._row = row
        self._turn = turn
        self._is_asking = False

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="box", can_focus=False):
            yield Static(self._facts())
            yield Label("new value")
            yield Input(value_text(self._row.values[0]), id="value")
            yield Label("reason (may be empty)")
            yield Input(id="reason", max_length=500)
            yield Label("go back after so many steps (empty: it stays)")
            yield Input(id="steps", max_length=9)
            yield Static("Enter moves to the reason, Enter again sets it; Tab next field, Escape leaves", id="said")

    def on_mount(self) -> None:
        self.query_one("#value", Input).focus()

    def _facts(self) -> Text:
        tunable = self._row.tunable
        unit = f" {tunable.unit}" if tunable.unit else ""
        text = Text(self._row.name, style="bold")
        text.append(f" = {self._row.value}{unit}\n", style="not bold")
        text.append(f"{tunable.help}\n", style="not bold")
        when = {"now": "at once", "request": "for the next request"}.get(
            tunable.boundary, f"at the next {tunable.boundary}"
        )
        text.append(
            f"takes {tunable.range_text()}; used {when}; the run file said {value_text(self._row.first)}",
            style="not bold",
        )
        return text

    def action_leave(self) -> None:
        self.dismiss("")

    @on(Input.Submitted, "#value")
    def next_field(self) -> None:
        """Move from the value to the reason, if the value is valid."""
        if self._value() is not None:
            self.query_one("#reason", Input).focus()

    @on(Input.Submitted, "#reason, #steps")
    def send(self) -> None:
        self._send(force=False)

    def action_force(self) -> None:
        self._send(force=True)

    def _send(self, *, force: bool) -> None:
        value = None if self._is_asking else self._value()
        if value is None:
            return
        steps = self.query_one("#steps", Input).value.strip()
        if steps and not steps.isdecimal():
            self._say(f"go back after {steps!r} steps: must be a whole number, or empty", is_bad=True)
            return
        self._is_asking = True
        self._say("asking the run ...")
        reason = self.query_one("#reason", Input).value.strip()
        asked = ChangeRequest(values={self._row.name: value}, reason=reason, for_steps=int(steps or 0), force=force)
        threading.Thread(target=self._ask, args=(asked,), daemon=True, name="set").start()

    def _value(self) -> KnobValue | None:
        """The typed value; None if the knob does not take it, and the error is shown."""
        try:
            return typed_value(self._row.tunable, self.query_one("#value", Input).value)
        except MyxaError as error:
            self._say(str(error), is_bad=True)
            return None

    def _ask(self, request: ChangeRequest) -> None:
        try:
            reply = self._turn(request)
        except (MyxaError, OSError, ValueError) as error:
            self.post_message(KnobAnswered(str(error), is_done=False))
        else:
            self.post_message(KnobAnswered(reply_text(reply), is_done=not reply.refused))

    @on(KnobAnswered)
    def answered(self, event: KnobAnswered) -> None:
        """A done change closes the window; a refusal keeps it open."""
        self._is_asking = False
        if event.is_done and self.is_current:
            self.dismiss(event.text)
        else:
            self._say(event.text.replace("--force", "--force (here: Ctrl-F)"), is_bad=not event.is_done)

    def _say(self, text: str, *, is_bad: bool = False) -> None:
        self.query_one("#said", Static).update(Text(text, style="bold red" if is_bad else ""))
