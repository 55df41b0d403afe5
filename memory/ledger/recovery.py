"""Taking fenced tenants back. Sans-IO.

A fenced tenant that lives is asked for a report until it stands still. Then it gets one command of a new epoch that
changes nothing about it (an active one commits, another one drains): once it has answered that, no older command can
have any effect on it, its report is the truth, and it may be told things again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...core.device_memory import MemoryCommand, MemoryReply
from .book import Book
from .instructions import Ask, Instruction, Send, Told
from .refusal import place_of
from .tenant_states import STABLE

ASK_S = 0.5
COMMAND_S = 5.0
_FOR_EVER = float("inf")


@dataclass(slots=True)
class _Watched:
    due: float
    command: MemoryCommand | None = None


class Recovery:
    """See the module's head."""

    def __init__(self, book: Book, next_epoch: Callable[[], int], emit: Callable[[Instruction], None]) -> None:
        self._book = book
        self._next_epoch = next_epoch
        self._emit = emit
        self._watched: dict[str, _Watched] = {}

    def watch(self, tenant: str, now: float) -> None:
        """It is fenced from now on."""
        self._watched.setdefault(tenant, _Watched(now))

    def forget(self, tenant: str) -> None:
        """It died."""
        self._watched.pop(tenant, None)

    def reported(self, tenant: str, now: float) -> None:
        """It told how it stands."""
        watched, known = self._watched.get(tenant), self._book.tenants.get(tenant)
        if watched is None or known is None or watched.command is not None or known.report.state not in STABLE:
            return
        kind = "commit" if known.report.state == "active" else "drain"
        epoch = self._next_epoch()
        watched.command = MemoryCommand(
            command_id=f"recover.{epoch}.{tenant}",
            epoch=epoch,
            kind=kind,
            deadline_s=COMMAND_S,
            tenant_epoch=known.report.epoch,
        )
        watched.due = now + COMMAND_S
        self._emit(Send(tenant, known.report.epoch, watched.command))

    def replied(self, reply: MemoryReply, now: float) -> None:
        """Perhaps to a command of ours; the report is in the books."""
        name = reply.report.tenant
        watched, known = self._watched.get(name), self._book.tenants.get(name)
        if watched is None or watched.command is None or known is None:
            return
        if watched.command.command_id != reply.command_id:
            return
        watched.command = None
        watched.due = now + ASK_S
        if reply.accepted and reply.report.state in STABLE:
            known.fenced = ""
            known.promised.clear()
            del self._watched[name]
            self._emit(Told(place_of(reply.report), name, "taken back", f"it is {reply.report.state}"))

    def tick(self, now: float) -> None:
        """Ask again those who are due."""
        for name, watched in list(self._watched.items()):
            known = self._book.tenants.get(name)
            if known is None or known.is_dead or not known.fenced:
                del self._watched[name]
            elif now >= watched.due:
                watched.command = None
                watched.due = now + ASK_S
                self._emit(Ask(name))

    def wakes_at(self) -> float:
        """When `tick` has something to do."""
        return min((w.due for w in self._watched.values()), default=_FOR_EVER)
