"""The life of a tenant as a table, and what each state allows.

cold      registered, holds nothing yet                active     may run; holds its leased tags
draining  finishes what runs                           quiesced   gate closed, nothing runs
releasing tags leave                                   released   gate closed, no tag is left that could leave
granted   leased while cold: free to load              restoring  tags come back
fenced    ignored by the manager until proven          dead       its process ended
"""

from __future__ import annotations

from types import MappingProxyType

from ...core.device_memory import Backing, CommandKind, Tag, TagReport, TenantReport, TenantState
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
        raise MemoryFault(f"{place}: a tenant cannot go from {now} to {to}", remedy="a bug; see memory/ledger")
    return to


def is_mapped(tag: TagReport) -> bool:
    """Whether it holds device memory now. A poisoned tag is taken to hold it: nobody knows."""
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
