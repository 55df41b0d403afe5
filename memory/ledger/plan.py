"""From a lease request and the ledger to a plan: who is drained, what leaves, what comes, who goes on. Or why not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ...core.device_memory import Holder, LeaseRequest, Tag
from .book import Book, Incarnation
from .eviction import Candidate, candidate, choose
from .refusal import host_pool_words, short_words
from .tenant_states import can_leave, copies_when_leaving, is_mapped

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
        """Everybody who is told something."""
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


def asked_bytes(book: Book, restore: Mapping[str, tuple[Tag, ...]]) -> dict[str, int]:
    """Device -> what a restore of these will take from it."""
    asked: dict[str, int] = {}
    for name, tags in restore.items():
        tenant = book.tenants.get(name)
        if tenant is None or not tenant.is_usable:
            continue
        num_bytes = sum(t.num_bytes for t in tenant.report.tags if t.tag in tags and not is_mapped(t))
        for device in tenant.report.devices if num_bytes else ():
            asked[device] = asked.get(device, 0) + num_bytes
    return asked


def build(book: Book, request: LeaseRequest, *, host_limit_bytes: int) -> SwitchPlan | Shortage:
    """The least that grants `request`."""
    members = book.gang(request.gang)
    if (wrong := _wrong_with(request, members)) is not None:
        return wrong
    restore = {m.name: missing for m in members if (missing := missing_tags(m, request.tags))}
    evicted = _evict(book, request, restore)
    if isinstance(evicted, Shortage):
        return evicted
    together = _disagreeing(members, request)
    for name, tags in together.items():
        restore[name] = (*restore.get(name, ()), *tags)
    release = {**_by_tenant(book, evicted), **together}
    if (refusal := _host_room(book, release, host_limit_bytes)) is not None:
        return refusal
    disturbed = {book.tenants[name].report.gang for name in release} - {request.gang} | set(request.quiet)
    drain = {t.name for gang in disturbed for t in book.gang(gang) if t.is_usable and t.report.state == "active"}
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
    book: Book, request: LeaseRequest, restore: Mapping[str, tuple[Tag, ...]]
) -> tuple[Candidate, ...] | Shortage:
    """What has to leave, over all devices. A tag that leaves one device leaves all of its tenant's."""
    asked = asked_bytes(book, restore)
    chosen: list[Candidate] = []
    for device in asked:
        picked = _pick(book, device, asked[device], _candidates(book, request, device), chosen)
        if isinstance(picked, Shortage):
            return picked
        chosen += picked
    return _collective(book, _spared(book, chosen, {device: asked[device] - book.room(device) for device in asked}))


def _candidates(book: Book, request: LeaseRequest, device: str) -> list[Candidate]:
    """Tags of other gangs that could leave that device."""
    running = {t.report.gang for t in book.tenants.values() if t.is_usable and t.report.state == "active"}
    return [
        found
        for t in book.on(device)
        if t.is_usable and t.report.gang != request.gang
        for tag in t.report.tags
        if _is_free_to_go(book, t, tag.tag)
        if (found := candidate(t.name, t.report.gang, tag, disturbs=_disturbs(t, running, request))) is not None
    ]


def _pick(
    book: Book, device: str, asked: int, candidates: list[Candidate], chosen: Sequence[Candidate]
) -> tuple[Candidate, ...] | Shortage:
    """Of one device's candidates; what was chosen for another device may have made room here, too."""
    left = [c for c in candidates if c not in chosen]
    short = asked - book.room(device) - _num_bytes(c for c in candidates if c in chosen)
    picked = choose(left, short)
    if picked is not None:
        return picked
    is_full = _is_full_by_books(book, device, asked, candidates)
    if any(c.num_bytes == 0 for c in left) and not is_full:
        return tuple(left)  # some do not tell their size: all of them leave, and the measurement decides
    holders = book.holders(device)
    may_pass = bool(book.ghosts_on([device])) or not is_full
    words = short_words(short - _num_bytes(left), device, holders, book.measured_words(device))
    return Shortage(words, holders, may_pass)


def _spared(book: Book, chosen: Sequence[Candidate], short: Mapping[str, int]) -> list[Candidate]:
    """Without those that are not needed on any device, the costliest first: a tag that was chosen for one device may
    have made others, chosen before it for another one, superfluous."""
    counts = {c: [device for device in short if book.tenants[c.tenant].counts_on(device)] for c in chosen}
    surplus = {
        device: _num_bytes(c for c in chosen if device in counts[c]) - num_bytes for device, num_bytes in short.items()
    }
    kept = list(chosen)
    for each in sorted(chosen, key=lambda c: (c.disturbs, c.rank, c.num_bytes), reverse=True):
        if each.num_bytes and all(each.num_bytes <= surplus[device] for device in counts[each]):
            kept.remove(each)
            for device in counts[each]:
                surplus[device] -= each.num_bytes
    return kept


def _num_bytes(candidates: Iterable[Candidate]) -> int:
    return sum(c.num_bytes for c in candidates)


def _is_free_to_go(book: Book, tenant: Incarnation, tag: Tag) -> bool:
    """What leaves by common action cannot leave while a member takes no commands."""
    return tag not in COLLECTIVE or all(member.is_usable for member in book.gang(tenant.report.gang))


def _is_full_by_books(book: Book, device: str, asked: int, candidates: list[Candidate]) -> bool:
    """The ledger alone says no, whatever will be measured."""
    room = book.capacity(device) - book.reserve_bytes - book.held(device) + _num_bytes(candidates)
    return asked > room


def _disagreeing(members: tuple[Incarnation, ...], request: LeaseRequest) -> dict[str, tuple[Tag, ...]]:
    """Tags that only the whole gang can restore, and that some members hold from an older epoch than others, or alone:
    those members let go of them, so that all restore them together."""
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


def _disturbs(tenant: Incarnation, running: set[str], request: LeaseRequest) -> bool:
    return tenant.report.gang in running and tenant.report.gang not in request.quiet


def _collective(book: Book, chosen: list[Candidate]) -> tuple[Candidate, ...]:
    """With the same tag of all other members of a gang, where the members can only let go of it together."""
    extra: list[Candidate] = []
    together: set[tuple[str, Tag]] = {(c.gang, c.tag) for c in chosen if c.tag in COLLECTIVE}
    for gang, tag in sorted(together):
        have = {c.tenant for c in chosen if c.tag == tag}
        for member in book.gang(gang):
            report = member.tag(tag)
            if member.name in have or report is None or not member.is_usable:
                continue
            if (found := candidate(member.name, gang, report, disturbs=False)) is not None:
                extra.append(found)
    return (*chosen, *extra)


def _by_tenant(book: Book, chosen: tuple[Candidate, ...]) -> dict[str, tuple[Tag, ...]]:
    """In the order in which each tenant lists its tags."""
    picked: dict[str, set[Tag]] = {}
    for each in chosen:
        picked.setdefault(each.tenant, set()).add(each.tag)
    return {
        name: tuple(tag.tag for tag in book.tenants[name].report.tags if tag.tag in tags)
        for name, tags in sorted(picked.items())
    }


def copies_out(book: Book, release: Mapping[str, tuple[Tag, ...]]) -> int:
    """Bytes that this release will copy to the host: the prediction of the model."""
    return sum(
        tag.num_bytes
        for name, tags in release.items()
        for tag in book.tenants[name].report.tags
        if tag.tag in tags and copies_when_leaving(tag)
    )


def copies_in(book: Book, restore: Mapping[str, tuple[Tag, ...]]) -> int:
    """Bytes that this restore will copy back."""
    return sum(
        tag.num_bytes
        for name, tags in restore.items()
        for tag in book.tenants[name].report.tags
        if tag.tag in tags and tag.backing == "host"
    )


def _host_room(book: Book, release: Mapping[str, tuple[Tag, ...]], limit_bytes: int) -> Shortage | None:
    """Refused now rather than in the middle: copies that the host pool has no room for."""
    need = sum(
        max(0, tag.num_bytes - tag.host_bytes)
        for name, tags in release.items()
        for tag in book.tenants[name].report.tags
        if tag.tag in tags and can_leave(tag) and copies_when_leaving(tag)
    )
    used = book.host_bytes()
    if limit_bytes and used + need > limit_bytes:
        return Shortage(host_pool_words(need, used, limit_bytes))
    return None
