"""States of a tenant as a table, and the machine that decides about its commands. Sans-IO.

cold      registered, holds nothing yet                active     may run; holds its leased tags
draining  finishes what runs                           quiesced   gate closed, nothing runs
releasing tags leave                                   released   gate closed, no tag is left that could leave
granted   leased while cold: free to load              restoring  tags come back
fenced    ignored by the manager until proven          dead       its process ended

Commands may come twice, late, or out of order. Three rules make that harmless: the same id is carried out once and gets
the same reply every time; an epoch older than the newest one seen is answered but not obeyed; one command at a time.
`actors/tenancy/tenant.py` carries the commands out.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from ...core.device_memory import (
    Backing,
    CommandKind,
    MemoryCommand,
    MemoryReply,
    Tag,
    TagReport,
    TenantReport,
    TenantState,
)
from ...core.errors import MemoryFault

ALLOWED: MappingProxyType[TenantState, frozenset[TenantState]] = MappingProxyType(
    {
        "cold": frozenset({"releasing", "granted", "restoring", "active", "fenced", "dead"}),
        "active": frozenset({"draining", "fenced", "dead"}),
        "draining": frozenset({"quiesced", "active", "fenced", "dead"}),
        "quiesced": frozenset({"releasing", "restoring", "active", "fenced", "dead"}),
        "releasing": frozenset({"released", "quiesced", "granted", "fenced", "dead"}),
        "released": frozenset({"releasing", "granted", "restoring", "active", "fenced", "dead"}),
        "granted": frozenset({"quiesced", "restoring", "releasing", "active", "fenced", "dead"}),
        "restoring": frozenset({"quiesced", "released", "granted", "fenced", "dead"}),
        "fenced": frozenset({"active", "quiesced", "released", "granted", "cold", "dead"}),
        "dead": frozenset(),
    }
)
"""From -> to."""

AT_WORK: MappingProxyType[CommandKind, TenantState] = MappingProxyType(
    {"drain": "draining", "release": "releasing", "restore": "restoring"}
)
"""While the command is being carried out."""

STARTS_FROM: MappingProxyType[CommandKind, frozenset[TenantState]] = MappingProxyType(
    {
        "drain": frozenset({"active", "quiesced", "released", "granted", "cold"}),
        "release": frozenset({"quiesced", "released", "granted", "cold"}),
        "restore": frozenset({"quiesced", "released", "granted", "cold"}),
        "commit": frozenset({"active", "quiesced", "released", "granted", "cold"}),
    }
)
"""Where a command may find a tenant. A release or a restore while it runs would pull memory from under it."""

STABLE: frozenset[TenantState] = frozenset({"cold", "active", "quiesced", "released", "granted"})
MAPPED: frozenset[Backing] = frozenset({"mapped_dirty", "mapped_clean", "copy_out", "copy_in"})
"""Backings that hold device memory."""


COUNTED_ONLY: frozenset[Tag] = frozenset({"workspace"})
"""Tags that are room, not memory: how much of it is taken, the tenant does not say."""


def move(place: str, now: TenantState, to: TenantState) -> TenantState:
    """`to`, if the table has it. MemoryFault otherwise."""
    if to != now and to not in ALLOWED[now]:
        raise MemoryFault(f"{place}: a tenant cannot go from {now} to {to}", remedy="a bug; see memory/leases")
    return to


def is_mapped(tag: TagReport) -> bool:
    """Whether it holds device memory now. A poisoned tag counts as holding it: its true state is unknown."""
    return tag.backing in MAPPED or tag.backing == "poisoned"


def can_leave(tag: TagReport) -> bool:
    """Whether a release would take it off the device. Contents that are lost are not moved again."""
    return is_mapped(tag) and tag.policy != "keep" and tag.backing != "poisoned"


def copies_when_leaving(tag: TagReport) -> bool:
    """Whether a release would copy it to the host."""
    return can_leave(tag) and tag.policy == "backup" and tag.backing not in ("mapped_clean", "copy_in")


def held_bytes(report: TenantReport) -> int:
    """Of the device: mapped tags and what stays after them."""
    return report.residue_bytes + sum(tag.num_bytes for tag in report.tags if is_mapped(tag))


def resting_state(report_tags: tuple[TagReport, ...]) -> TenantState:
    """Where a tenant with a closed gate rests: released once nothing is left that could leave."""
    return "quiesced" if any(can_leave(tag) for tag in report_tags) else "released"


MAX_REPLIES = 256
"""Remembered; a command is repeated within seconds, not after so many others."""


@dataclass(frozen=True, slots=True)
class CommandDecision:
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

    def decide(self, command: MemoryCommand) -> CommandDecision:
        """What to do with it; after "run" the machine is at work until `finished`."""
        if (reply := self._replies.get(command.command_id)) is not None:
            return CommandDecision("again", reply)
        if self.running is not None and self.running.command_id == command.command_id:
            return CommandDecision("join")
        if command.epoch < self.epoch:
            return CommandDecision(
                "refuse", reason=f"epoch {command.epoch} is over; {self._name} has seen {self.epoch}"
            )
        self.epoch = command.epoch
        if self.running is not None:
            return CommandDecision("wait")
        if self.state not in STARTS_FROM[command.kind]:
            return CommandDecision("refuse", reason=f"{self._name} is {self.state}: {command.kind} is not possible")
        self.running = command
        if command.kind == "drain" and self.state != "active":
            return CommandDecision("run")  # nothing runs: nothing changes but the epoch
        if (at_work := AT_WORK.get(command.kind)) is not None:
            self.state = move(self._name, self.state, at_work)
        return CommandDecision("run")

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
