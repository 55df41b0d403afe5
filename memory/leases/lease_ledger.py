"""The lease ledger of a run's devices: who holds what, what could be granted.

The ledger keeps two figures side by side. The *books* are what tenants reported; the *measurement* is what the device
reports. A grant needs room in both: the books include memory that is reserved and not taken yet, the measurement
includes processes that are no tenants, and those that died and whose memory is not free yet.

A plan says who is drained, which tags leave, which come back, who resumes; without one there is a `Shortage` with the
reason. Tags leave whole, the cheapest first, and none that is not needed. Cost per byte freed, lowest first:
contents without further use (discard), with a valid host copy (clean), that their owner can compute again
(rematerialise), that must be copied (dirty backup): first those that come back while their owner already computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ...core.device_memory import (
    OPTIMIZER_PARTS,
    Backing,
    DeviceReading,
    DeviceUse,
    DeviceView,
    LeaseRequest,
    Tag,
    TagReport,
    TenantReport,
    whole_of,
)

MAPPED: frozenset[Backing] = frozenset({"mapped_dirty", "mapped_clean", "copy_out", "copy_in"})
"""Backings that hold device memory."""


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
    """Of the device."""
    return sum(tag.num_bytes for tag in report.tags if is_mapped(tag))


# -- the ledger

MAX_HOLDERS = 12


def in_words(num_bytes: int) -> str:
    """Bytes for people: "24.6 GiB", "512 MiB"."""
    return f"{num_bytes / (1 << 30):.1f} GiB" if num_bytes >= 1 << 30 else f"{num_bytes / (1 << 20):.0f} MiB"


@dataclass(slots=True)
class Incarnation:
    """One process incarnation of a tenant."""

    report: TenantReport
    silent: str = ""
    """Why it gets no commands in this lease; empty: it gets them."""

    @property
    def name(self) -> str:
        return self.report.tenant

    @property
    def held_bytes(self) -> int:
        """Of each of its devices, at worst. Of a silent one: everything it ever reported."""
        if self.silent:
            return sum(tag.num_bytes for tag in self.report.tags)
        return held_bytes(self.report)

    @property
    def untaken_bytes(self) -> int:
        """Of `held_bytes`: not on the devices yet, but may be at any moment."""
        return self.held_bytes - held_bytes(self.report) + self.report.reserved_bytes

    def tag(self, name: Tag) -> TagReport | None:
        """What it last said of a tag."""
        return next((tag for tag in self.report.tags if tag.tag == name), None)


class LeaseLedger:
    """Tenants by name, and sums by device."""

    def __init__(self, *, reserve_bytes: int, margin_bytes: int) -> None:
        """`reserve_bytes` of each device are never promised; `margin_bytes` must be free beyond what is asked."""
        self.reserve_bytes = reserve_bytes
        self.margin_bytes = margin_bytes
        self.tenants: dict[str, Incarnation] = {}
        self.readings: dict[str, DeviceReading] = {}

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(sorted({device for t in self.tenants.values() for device in t.report.devices}))

    def add(self, report: TenantReport, silent: str = "") -> None:
        """What a tenant says now."""
        self.tenants[report.tenant] = Incarnation(report, silent)

    def uses(self, devices: Iterable[str] | None = None) -> dict[int, list[DeviceUse]]:
        """Whose use of these devices (None: of all) is to be measured, by node."""
        uses: dict[int, list[DeviceUse]] = {}
        for device in self.devices if devices is None else devices:
            tenants = list(self.on(device))
            pids = sorted({pid for tenant in tenants for pid in tenant.report.pids})
            uses.setdefault(tenants[0].report.node, []).append(DeviceUse(device, tuple(pids)))
        return uses

    # -- sums

    def on(self, device: str) -> Iterator[Incarnation]:
        """All that count there."""
        yield from (tenant for tenant in self.tenants.values() if device in tenant.report.devices)

    def gang(self, name: str) -> tuple[Incarnation, ...]:
        members = [t for t in self.tenants.values() if t.report.gang == name]
        return tuple(sorted(members, key=lambda t: t.name))

    def held(self, device: str) -> int:
        """By the books."""
        return sum(t.held_bytes for t in self.on(device))

    def unbooked(self, device: str) -> int:
        """What the books leave."""
        reading = self.readings.get(device)
        return (0 if reading is None else reading.capacity_bytes) - self.reserve_bytes - self.held(device)

    def room(self, device: str) -> int:
        """Bytes that could be granted now: the smaller of what the books and what the last measurement leave."""
        reading = self.readings.get(device)
        if reading is None:
            return 0
        untaken = sum(tenant.untaken_bytes for tenant in self.on(device))
        return min(self.unbooked(device), reading.free_bytes - self.margin_bytes - untaken)

    def unattributed(self, device: str) -> int:
        """Used by neither a tenant nor the driver, by the last measurement."""
        reading = self.readings.get(device)
        if reading is None:
            return 0
        attributed = sum(t.held_bytes - t.untaken_bytes for t in self.on(device))
        return max(0, reading.capacity_bytes - reading.free_bytes - reading.driver_bytes - attributed)

    # -- for people

    def short_words(self, device: str, short_bytes: int) -> str:
        """Of a device that cannot be made to hold what is asked: who holds it, largest first, strangers last."""
        held: list[tuple[int, str]] = []
        for tenant in self.on(device):
            state = "silent" if tenant.silent else tenant.report.state
            sizes: dict[str, int] = {}
            for tag in tenant.report.tags:
                if is_mapped(tag) or tenant.silent:
                    sizes[whole_of(tag.tag)] = sizes.get(whole_of(tag.tag), 0) + tag.num_bytes
            held += [(n, f"{tenant.name} {tag} {in_words(n)} ({state})") for tag, n in sizes.items() if n]
        held.sort(key=lambda holder: (-holder[0], holder[1]))
        parts = [text for _, text in held[:MAX_HOLDERS]]
        if others := held[MAX_HOLDERS:]:
            parts.append(f"{len(others)} more {in_words(sum(n for n, _ in others))}")
        if strangers := self.unattributed(device):
            parts.append(f"{in_words(strangers)} by unregistered processes")
        return f"refused: {in_words(short_bytes)} short on {device}, held by {', '.join(parts) or 'no process'}"

    def view(self, device: str) -> DeviceView:
        """One device, for `myxa mem`."""
        reading = self.readings.get(device, DeviceReading(0, 0))
        tenants = tuple(t.report for t in sorted(self.on(device), key=lambda t: t.name))
        return DeviceView(
            device=device,
            capacity_bytes=reading.capacity_bytes,
            free_bytes=reading.free_bytes,
            unattributed_bytes=self.unattributed(device),
            tenants=tenants,
            node=tenants[0].node,
        )


# -- plans


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
    """The cheapest classes, the largest first, until `short_bytes` of a device are free; None: they do not do."""
    leaving: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: (c.rank, -c.num_bytes, c.tenant, c.tag)):
        if short_bytes <= 0:
            break
        if candidate.num_bytes:
            leaving.append(candidate)
            short_bytes -= candidate.num_bytes
    return tuple(leaving) if short_bytes <= 0 else None


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


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why a lease cannot be had now."""

    reason: str
    may_pass: bool = False
    """Memory that is about to become free, or a measurement that lags, would cure it."""


def asked_bytes(ledger: LeaseLedger, restore: Mapping[str, tuple[Tag, ...]]) -> dict[str, int]:
    """Device -> what a restore of these will take from it."""
    num_bytes_on: dict[str, int] = {}
    for name, tags in restore.items():
        tenant = ledger.tenants.get(name)
        if tenant is None or tenant.silent:
            continue
        num_bytes = sum(t.num_bytes for t in tenant.report.tags if t.tag in tags and not is_mapped(t))
        for device in tenant.report.devices if num_bytes else ():
            num_bytes_on[device] = num_bytes_on.get(device, 0) + num_bytes
    return num_bytes_on


def build(ledger: LeaseLedger, request: LeaseRequest) -> SwitchPlan | Shortage:
    """The least that grants `request`."""
    members = ledger.gang(request.gang)
    if (wrong := _find_conflict(request, members)) is not None:
        return wrong
    restore: dict[str, tuple[Tag, ...]] = {}
    for member in members:
        missing: list[Tag] = [t.tag for t in member.report.tags if t.tag in request.tags and not is_mapped(t)]
        if missing:
            restore[member.name] = tuple(missing)
    evicted = _evict(ledger, request, restore)
    if isinstance(evicted, Shortage):
        return evicted
    release = _by_tenant(ledger, evicted)
    disturbed = {ledger.tenants[name].report.gang for name in release} - {request.gang} | set(request.quiet)
    drain = {t.name for gang in disturbed for t in ledger.gang(gang) if not t.silent and t.report.state == "active"}
    drain |= {m.name for m in members if m.report.state == "active" and (m.name in restore or not request.is_active)}
    commit = {m.name for m in members if request.is_active and (m.report.state != "active" or m.name in drain)}
    return SwitchPlan(tuple(sorted(drain)), release, restore, tuple(sorted(commit)))


def _find_conflict(request: LeaseRequest, members: tuple[Incarnation, ...]) -> Shortage | None:
    if not members:
        return Shortage(f"refused: no tenant of gang {request.gang!r} is there", may_pass=True)
    if request.gang in request.quiet:
        return Shortage(f"refused: gang {request.gang!r} asks for memory and to be quiet itself")
    for member in members:
        if member.silent:
            return Shortage(f"refused: {member.name} {member.silent}", may_pass=True)
        lost = [tag.tag for tag in member.report.tags if tag.tag in request.tags and tag.backing == "poisoned"]
        if lost:
            return Shortage(f"refused: {member.name} lost the contents of {', '.join(lost)}; it has to be restarted")
    for tag in COLLECTIVE:
        holders = [member.name for member in members if member.tag(tag) is not None]
        if tag in request.tags and holders and len(holders) < len(members):  # the others would be waited for in vain
            without = ", ".join(member.name for member in members if member.name not in holders)
            return Shortage(
                f"refused: {', '.join(holders)} can release communicators and {without} cannot: all ranks must be "
                'alike; install a C++ compiler on each node, or set memory.communicators = "keep"'
            )
    return None


def _evict(
    ledger: LeaseLedger, request: LeaseRequest, restore: Mapping[str, tuple[Tag, ...]]
) -> tuple[Candidate, ...] | Shortage:
    """What has to leave, over all devices. A tag that leaves one device leaves all of its tenant's."""
    needed = asked_bytes(ledger, restore)
    leaving: list[Candidate] = []
    for device in needed:
        picked = _pick(ledger, device, needed[device], _candidates(ledger, request, device), leaving)
        if isinstance(picked, Shortage):
            return picked
        leaving += picked
    return _collective(
        ledger, _without_needless(ledger, leaving, {device: needed[device] - ledger.room(device) for device in needed})
    )


def _candidates(ledger: LeaseLedger, request: LeaseRequest, device: str) -> list[Candidate]:
    return [
        Candidate(t.name, t.report.gang, tag.tag, tag.num_bytes, rank_of(tag))
        for t in ledger.on(device)
        if not t.silent and t.report.gang != request.gang
        for tag in t.report.tags
        # What leaves by common action cannot leave while a member takes no commands, or does not have it.
        if can_leave(tag)
        and (tag.tag not in COLLECTIVE or all(not m.silent and m.tag(tag.tag) for m in ledger.gang(t.report.gang)))
    ]


def _pick(
    ledger: LeaseLedger, device: str, needed: int, candidates: list[Candidate], leaving: Sequence[Candidate]
) -> tuple[Candidate, ...] | Shortage:
    """Of one device's candidates; what was chosen for another device may have made room here, too."""
    remaining = [c for c in candidates if c not in leaving]
    short = needed - ledger.room(device) - _num_bytes(c for c in candidates if c in leaving)
    picked = choose(remaining, short)
    if picked is not None:
        return picked
    is_full = needed > ledger.unbooked(device) + _num_bytes(candidates)  # whatever will be measured
    if any(c.num_bytes == 0 for c in remaining) and not is_full:
        return tuple(remaining)  # some do not report their size: all of them leave, and the measurement decides
    return Shortage(ledger.short_words(device, short - _num_bytes(remaining)), may_pass=not is_full)


def _without_needless(ledger: LeaseLedger, leaving: Sequence[Candidate], short: Mapping[str, int]) -> list[Candidate]:
    """Without those that no device needs, the costliest first: one chosen later may have made them superfluous."""
    counts = {c: [device for device in short if device in ledger.tenants[c.tenant].report.devices] for c in leaving}
    surplus = {
        device: _num_bytes(c for c in leaving if device in counts[c]) - num_bytes for device, num_bytes in short.items()
    }
    needed = list(leaving)
    for candidate in sorted(leaving, key=lambda c: (c.rank, c.num_bytes), reverse=True):
        if candidate.num_bytes and all(candidate.num_bytes <= surplus[device] for device in counts[candidate]):
            needed.remove(candidate)
            for device in counts[candidate]:
                surplus[device] -= candidate.num_bytes
    return needed


def _num_bytes(candidates: Iterable[Candidate]) -> int:
    return sum(c.num_bytes for c in candidates)


def _collective(ledger: LeaseLedger, leaving: list[Candidate]) -> tuple[Candidate, ...]:
    """With the same tag of all other members of a gang, where the members can only release it together."""
    extra: list[Candidate] = []
    together: set[tuple[str, Tag]] = {(c.gang, c.tag) for c in leaving if c.tag in COLLECTIVE}
    for gang, tag in sorted(together):
        tenants = {c.tenant for c in leaving if c.tag == tag}
        for member in ledger.gang(gang):
            report = member.tag(tag)
            if member.name not in tenants and report is not None and not member.silent and can_leave(report):
                extra.append(Candidate(member.name, gang, tag, report.num_bytes, rank_of(report)))
    return (*leaving, *extra)


def _by_tenant(ledger: LeaseLedger, leaving: tuple[Candidate, ...]) -> dict[str, tuple[Tag, ...]]:
    """In the order in which each tenant lists its tags."""
    picked: dict[str, set[Tag]] = {}
    for candidate in leaving:
        picked.setdefault(candidate.tenant, set()).add(candidate.tag)
    return {
        name: tuple(tag.tag for tag in ledger.tenants[name].report.tags if tag.tag in tags)
        for name, tags in sorted(picked.items())
    }
