"""Which tags leave a device when a lease needs room: the cheapest that suffice, and no byte more than needed.

Cost per byte freed, lowest first: bytes nobody keeps (discard), bytes whose copy on the host is still good (clean),
bytes their owner can compute again (rematerialise), bytes that must be copied (dirty backup): first those that come
back while their owner computes already, then those it has to wait for. A gang that runs and was
not told to be quiet is disturbed only if those of quiet gangs do not suffice. Tags leave whole.

Choosing the cheapest set that covers a need is a knapsack; the classes are few and the tags of a device few dozens, so
the last class needed is solved exactly where it is small and the earlier ones are thinned afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from ...core.device_memory import OPTIMIZER_PARTS, Tag, TagReport
from .tenant_states import can_leave, copies_when_leaving

EXACT_UP_TO = 12
"""Tags of one class: 4096 subsets at most."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A tag that could leave."""

    tenant: str
    gang: str
    tag: Tag
    num_bytes: int
    disturbs: bool
    """Its gang runs now and would have to stop for it."""
    rank: int
    """Cost per byte, as a class; see `rank_of`."""
    copied_bytes: int


def rank_of(tag: TagReport) -> int:
    """0 discard, 1 clean, 2 rematerialise, 3 dirty backup that nobody waits for at first, 4 other dirty backup."""
    if tag.policy == "discard":
        return 0
    if tag.policy == "rematerialise":
        return 2
    if not copies_when_leaving(tag):
        return 1
    return 3 if tag.tag in OPTIMIZER_PARTS else 4


def candidate(tenant: str, gang: str, tag: TagReport, *, disturbs: bool) -> Candidate | None:
    """None for what cannot leave."""
    if not can_leave(tag):
        return None
    copied = tag.num_bytes if copies_when_leaving(tag) else 0
    return Candidate(tenant, gang, tag.tag, tag.num_bytes, disturbs, rank_of(tag), copied)


def choose(candidates: Iterable[Candidate], short_bytes: int) -> tuple[Candidate, ...] | None:
    """The cheapest set that frees at least `short_bytes` of one device; None if all of them together do not.

    No member of the result could be left out."""
    if short_bytes <= 0:
        return ()
    classes: dict[tuple[bool, int], list[Candidate]] = {}
    for each in sorted((c for c in candidates if c.num_bytes), key=lambda c: (-c.num_bytes, c.tenant, c.tag)):
        classes.setdefault((each.disturbs, each.rank), []).append(each)
    chosen: list[Candidate] = []
    missing = short_bytes
    for key in sorted(classes):
        members = classes[key]
        if sum(c.num_bytes for c in members) < missing:
            chosen += members
            missing -= sum(c.num_bytes for c in members)
            continue
        chosen += _smallest_cover(members, missing)
        return _thinned(chosen, short_bytes)
    return None


def _smallest_cover(members: Sequence[Candidate], need: int) -> tuple[Candidate, ...]:
    """Of one class, which together suffices: fewest bytes, then fewest tags."""
    if len(members) <= EXACT_UP_TO:
        covers = (
            subset
            for size in range(1, len(members) + 1)
            for subset in combinations(members, size)
            if sum(c.num_bytes for c in subset) >= need
        )
        return min(covers, key=lambda subset: (sum(c.num_bytes for c in subset), len(subset)))
    taken: list[Candidate] = []
    for each in members:  # largest first
        if sum(c.num_bytes for c in taken) < need:
            taken.append(each)
    return _thinned(taken, need)


def _thinned(chosen: Sequence[Candidate], need: int) -> tuple[Candidate, ...]:
    """Without what can be left out, the costliest first."""
    kept = list(chosen)
    surplus = sum(c.num_bytes for c in kept) - need
    for each in sorted(chosen, key=lambda c: (c.disturbs, c.rank, c.num_bytes), reverse=True):
        if each.num_bytes <= surplus:
            kept.remove(each)
            surplus -= each.num_bytes
    return tuple(kept)
