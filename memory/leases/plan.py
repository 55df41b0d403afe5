"""From a lease request and the ledger to a plan: who is drained, which tags leave, which come back, who resumes.

If no plan exists the result is a `Shortage` with the reason. Tags leave whole, the cheapest that suffice, and no byte
more than needed. Cost per byte freed, lowest first: contents without further use (discard), contents with a valid host
copy (clean), contents that their owner can compute again (rematerialise), contents that must be copied (dirty backup):
first those that come back while their owner already computes, then those that it waits for.

Choosing the cheapest set that covers a need is a knapsack. There are few classes and a few dozen tags a device, so the
last class needed is solved exactly where it is small, and what another device or class made needless stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from ...core.device_memory import OPTIMIZER_PARTS, Holder, LeaseRequest, Tag, TagReport
from .lease_ledger import Incarnation, LeaseLedger
from .tenant_states import can_leave, copies_when_leaving, is_mapped

EXACT_UP_TO = 12
"""Tags of one class: 4096 subsets at most."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A tag that could leave."""

    tenant: str
    gang: str
    tag: Tag
    num_bytes: int
    rank: int
    """Cost per byte, as a class; see `rank_of`."""


def rank_of(tag: TagReport) -> int:
    """0 discard, 1 clean, 2 rematerialise, 3 dirty backup that is not waited for at first, 4 other dirty backup."""
    if tag.policy == "discard":
        return 0
    if tag.policy == "rematerialise":
        return 2
    if not copies_when_leaving(tag):
        return 1
    return 3 if tag.tag in OPTIMIZER_PARTS else 4


def choose(candidates: Iterable[Candidate], short_bytes: int) -> tuple[Candidate, ...] | None:
    """The cheapest classes, and of the last one the least, that free `short_bytes` of one device; None if all of them
    together do not."""
    if short_bytes <= 0:
        return ()
    classes: dict[int, list[Candidate]] = {}
    for each in sorted((c for c in candidates if c.num_bytes), key=lambda c: (-c.num_bytes, c.tenant, c.tag)):
        classes.setdefault(each.rank, []).append(each)
    chosen: list[Candidate] = []
    missing = short_bytes
    for key in sorted(classes):
        members = classes[key]
        if sum(c.num_bytes for c in members) < missing:
            chosen += members
            missing -= sum(c.num_bytes for c in members)
            continue
        return (*chosen, *_smallest_cover(members, missing))
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
    return tuple(taken)


COLLECTIVE: tuple[Tag, ...] = ("nccl",)
"""Tags that all members of a gang release or restore together."""


@dataclass(frozen=True, slots=True)
class SwitchPlan:
    """Steps in this order; a step begins when all tenants of the one before are done."""

    drain: tuple[str, ...] = ()
    release: Mapping[str, tuple[Tag, ...]] = field(default_factory=dict[str, tuple[Tag, ...]])
    restore: Mapping[str, tuple[Tag, ...]] = field(default_factory=dict[str, tuple[Tag, ...]])
    commit: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Nothing to do."""
        return not (self.drain or self.release or self.restore or self.commit)

    @property
    def touched(self) -> frozenset[str]:
        """All tenants that get a command."""
        return frozenset(self.drain) | self.release.keys() | self.restore.keys() | frozenset(self.commit)


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why a lease cannot be had now."""

    reason: str
    holders: tuple[Holder, ...] = ()
    may_pass: bool = False
    """Memory that is about to become free, or a measurement that lags, would cure it."""


def missing_tags(tenant: Incarnation, tags: tuple[Tag, ...]) -> tuple[Tag, ...]:
    """Of `tags`, which it has and does not hold on the device."""
    return tuple(tag.tag for tag in tenant.report.tags if tag.tag in tags and not is_mapped(tag))


def asked_bytes(ledger: LeaseLedger, restore: Mapping[str, tuple[Tag, ...]]) -> dict[str, int]:
    """Device -> what a restore of these will take from it."""
    asked: dict[str, int] = {}
    for name, tags in restore.items():
        tenant = ledger.tenants.get(name)
        if tenant is None or not tenant.is_usable:
            continue
        num_bytes = sum(t.num_bytes for t in tenant.report.tags if t.tag in tags and not is_mapped(t))
        for device in tenant.report.devices if num_bytes else ():
            asked[device] = asked.get(device, 0) + num_bytes
    return asked


def build(ledger: LeaseLedger, request: LeaseRequest) -> SwitchPlan | Shortage:
    """The least that grants `request`."""
    members = ledger.gang(request.gang)
    if (wrong := _wrong_with(request, members)) is not None:
        return wrong
    restore = {m.name: missing for m in members if (missing := missing_tags(m, request.tags))}
    evicted = _evict(ledger, request, restore)
    if isinstance(evicted, Shortage):
        return evicted
    together = _disagreeing(members, request)
    for name, tags in together.items():
        restore[name] = (*restore.get(name, ()), *tags)
    release = {**_by_tenant(ledger, evicted), **together}
    disturbed = {ledger.tenants[name].report.gang for name in release} - {request.gang} | set(request.quiet)
    drain = {t.name for gang in disturbed for t in ledger.gang(gang) if t.is_usable and t.report.state == "active"}
    drain |= {m.name for m in members if m.report.state == "active" and (m.name in restore or not request.is_active)}
    commit = {m.name for m in members if request.is_active and (m.report.state != "active" or m.name in drain)}
    return SwitchPlan(tuple(sorted(drain)), release, restore, tuple(sorted(commit)))


def _wrong_with(request: LeaseRequest, members: tuple[Incarnation, ...]) -> Shortage | None:
    if not members:
        return Shortage(f"refused: no tenant of gang {request.gang!r} is registered", may_pass=True)
    if request.gang in request.quiet:
        return Shortage(f"refused: gang {request.gang!r} asks for memory and to be quiet itself")
    for member in members:
        if not member.is_usable:
            return Shortage(f"refused: {member.name} is fenced ({member.fenced})", may_pass=True)
        lost = [tag.tag for tag in member.report.tags if tag.tag in request.tags and tag.backing == "poisoned"]
        if lost:
            return Shortage(f"refused: {member.name} lost the contents of {', '.join(lost)}; it has to be restarted")
    return None


def _evict(
    ledger: LeaseLedger, request: LeaseRequest, restore: Mapping[str, tuple[Tag, ...]]
) -> tuple[Candidate, ...] | Shortage:
    """What has to leave, over all devices. A tag that leaves one device leaves all of its tenant's."""
    asked = asked_bytes(ledger, restore)
    chosen: list[Candidate] = []
    for device in asked:
        picked = _pick(ledger, device, asked[device], _candidates(ledger, request, device), chosen)
        if isinstance(picked, Shortage):
            return picked
        chosen += picked
    return _collective(
        ledger, _spared(ledger, chosen, {device: asked[device] - ledger.room(device) for device in asked})
    )


def _candidates(ledger: LeaseLedger, request: LeaseRequest, device: str) -> list[Candidate]:
    """Tags of other gangs that could leave that device."""
    return [
        Candidate(t.name, t.report.gang, tag.tag, tag.num_bytes, rank_of(tag))
        for t in ledger.on(device)
        if t.is_usable and t.report.gang != request.gang
        for tag in t.report.tags
        if can_leave(tag) and _is_free_to_go(ledger, t, tag.tag)
    ]


def _pick(
    ledger: LeaseLedger, device: str, asked: int, candidates: list[Candidate], chosen: Sequence[Candidate]
) -> tuple[Candidate, ...] | Shortage:
    """Of one device's candidates; what was chosen for another device may have made room here, too."""
    left = [c for c in candidates if c not in chosen]
    short = asked - ledger.room(device) - _num_bytes(c for c in candidates if c in chosen)
    picked = choose(left, short)
    if picked is not None:
        return picked
    books = ledger.capacity(device) - ledger.reserve_bytes - ledger.held(device) + _num_bytes(candidates)
    is_full = asked > books  # whatever will be measured
    if any(c.num_bytes == 0 for c in left) and not is_full:
        return tuple(left)  # some do not report their size: all of them leave, and the measurement decides
    may_pass = bool(ledger.unproven_on([device])) or not is_full
    return Shortage(ledger.short_words(device, short - _num_bytes(left)), ledger.holders(device), may_pass)


def _spared(ledger: LeaseLedger, chosen: Sequence[Candidate], short: Mapping[str, int]) -> list[Candidate]:
    """Without those that are not needed on any device, the costliest first: a tag that was chosen for one device may
    have made others, chosen before it for another one, superfluous."""
    counts = {c: [device for device in short if ledger.tenants[c.tenant].counts_on(device)] for c in chosen}
    surplus = {
        device: _num_bytes(c for c in chosen if device in counts[c]) - num_bytes for device, num_bytes in short.items()
    }
    kept = list(chosen)
    for each in sorted(chosen, key=lambda c: (c.rank, c.num_bytes), reverse=True):
        if each.num_bytes and all(each.num_bytes <= surplus[device] for device in counts[each]):
            kept.remove(each)
            for device in counts[each]:
                surplus[device] -= each.num_bytes
    return kept


def _num_bytes(candidates: Iterable[Candidate]) -> int:
    return sum(c.num_bytes for c in candidates)


def _is_free_to_go(ledger: LeaseLedger, tenant: Incarnation, tag: Tag) -> bool:
    """What leaves by common action cannot leave while a member takes no commands."""
    return tag not in COLLECTIVE or all(member.is_usable for member in ledger.gang(tenant.report.gang))


def _disagreeing(members: tuple[Incarnation, ...], request: LeaseRequest) -> dict[str, tuple[Tag, ...]]:
    """Tags that only the whole gang can restore, and that some members hold from an older epoch than others, or alone:
    those members release them, so that all restore them together."""
    held: dict[str, tuple[Tag, ...]] = {}
    for tag in COLLECTIVE:
        if tag not in request.tags:
            continue
        found = {m.name: (report, m.report.comm_epoch) for m in members if (report := m.tag(tag)) is not None}
        epochs = {epoch if is_mapped(report) else -1 for report, epoch in found.values()}
        if len(epochs) > 1:
            for name, (report, _) in found.items():
                if can_leave(report):
                    held[name] = (*held.get(name, ()), tag)
    return held


def _collective(ledger: LeaseLedger, chosen: list[Candidate]) -> tuple[Candidate, ...]:
    """With the same tag of all other members of a gang, where the members can only release it together."""
    extra: list[Candidate] = []
    together: set[tuple[str, Tag]] = {(c.gang, c.tag) for c in chosen if c.tag in COLLECTIVE}
    for gang, tag in sorted(together):
        have = {c.tenant for c in chosen if c.tag == tag}
        for member in ledger.gang(gang):
            report = member.tag(tag)
            if member.name not in have and report is not None and member.is_usable and can_leave(report):
                extra.append(Candidate(member.name, gang, tag, report.num_bytes, rank_of(report)))
    return (*chosen, *extra)


def _by_tenant(ledger: LeaseLedger, chosen: tuple[Candidate, ...]) -> dict[str, tuple[Tag, ...]]:
    """In the order in which each tenant lists its tags."""
    picked: dict[str, set[Tag]] = {}
    for each in chosen:
        picked.setdefault(each.tenant, set()).add(each.tag)
    return {
        name: tuple(tag.tag for tag in ledger.tenants[name].report.tags if tag.tag in tags)
        for name, tags in sorted(picked.items())
    }
