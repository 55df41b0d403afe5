"""What a tenant does with a command: obey, answer again, or refuse. Sans-IO; `actors/tenancy/tenant.py` does the work.

Commands may come twice, late, or out of order. Three rules make that harmless: the same id is carried out once and gets
the same reply for ever; an epoch older than the newest one seen is answered, not obeyed; one command at a time.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

from ...core.device_memory import MemoryCommand, MemoryReply, TenantState
from .tenant_states import AT_WORK, STARTS_FROM, move

MAX_REPLIES = 256
"""Remembered; a command is repeated within seconds, not after so many others."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """run: carry it out, then say `finished`. again: it was, give `reply`. join: it is running. refuse: `reason`.
    wait: another one is running, decide again after it."""

    do: Literal["run", "again", "join", "refuse", "wait"]
    reply: MemoryReply | None = None
    reason: str = ""


class TenantMachine:
    """One tenant of one process incarnation."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.state: TenantState = "cold"
        self.epoch = 0
        """The newest seen."""
        self.done_epoch = 0
        """The newest carried out."""
        self.running: MemoryCommand | None = None
        self._replies: OrderedDict[str, MemoryReply] = OrderedDict()

    def decide(self, command: MemoryCommand) -> Verdict:
        """What to do with it; after "run" the machine is at work until `finished`."""
        if (reply := self._replies.get(command.command_id)) is not None:
            return Verdict("again", reply)
        if self.running is not None and self.running.command_id == command.command_id:
            return Verdict("join")
        if command.epoch < self.epoch:
            return Verdict("refuse", reason=f"epoch {command.epoch} is over; {self._name} has seen {self.epoch}")
        self.epoch = command.epoch
        if self.running is not None:
            return Verdict("wait")
        if self.state not in STARTS_FROM[command.kind]:
            return Verdict("refuse", reason=f"{self._name} is {self.state}: {command.kind} is not possible")
        self.running = command
        if command.kind == "drain" and self.state != "active":
            return Verdict("run")  # nothing runs: nothing changes but the epoch
        if (at_work := AT_WORK.get(command.kind)) is not None:
            self.state = move(self._name, self.state, at_work)
        return Verdict("run")

    def rest(self, state: TenantState) -> None:
        """The command's work is over; before its reply is made."""
        self.state = move(self._name, self.state, state)

    def finished(self, reply: MemoryReply) -> None:
        """Remember what was answered. A command that failed is remembered too: the manager chooses a new id."""
        command = self.running
        self.running = None
        if command is None:
            return
        if reply.accepted:
            self.done_epoch = max(self.done_epoch, command.epoch)
        self.remember(reply)

    def remember(self, reply: MemoryReply) -> None:
        """A refusal is a reply like any other: what was refused once stays refused."""
        self._replies[reply.command_id] = reply
        while len(self._replies) > MAX_REPLIES:
            self._replies.popitem(last=False)
