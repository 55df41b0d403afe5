"""The lease ledger of a node's devices: who holds what, how much is promised, how much could be granted.

It keeps two figures side by side. The *books* are what tenants reported and were promised; the *measurement* is what
the device reports. A grant needs room in both: the books include memory that is promised and not taken yet, the
measurement includes processes that never registered. An incarnation that died keeps its entry, and its bytes, until a
measurement shows that they are free.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ...core.device_memory import DeviceReading, DeviceView, Holder, Tag, TagReport, TenantReport, whole_of
from ...core.errors import MemoryFault
from .tenant_states import COUNTED_ONLY, STABLE, held_bytes, is_mapped

MAX_HOLDERS = 12


def in_words(num_bytes: int) -> str:
    """Bytes for people: "24.6 GiB", "512 MiB", "7 bytes"."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            value = num_bytes / size
            return f"{value:.1f} {unit}" if value < 100 else f"{value:.0f} {unit}"
    return f"{num_bytes} bytes"


def place_of(report: TenantReport) -> str:
    """Where a tenant is: "GPU-6f1c", "GPU-6f1c, GPU-88a0"."""
    return ", ".join(report.devices)


def unmeasured_words(devices: Iterable[str], trouble: str) -> str:
    """Of devices that could not be measured. `trouble`: the reason, if known."""
    return f"refused: {', '.join(sorted(devices))} could not be measured in time" + (f": {trouble}" if trouble else "")


PROOF_GAP_S = 0.02
"""Between the two measurements that prove memory free."""


@dataclass(slots=True)
class Incarnation:
    """One process incarnation of a tenant."""

    report: TenantReport
    promised: dict[Tag, int] = field(default_factory=dict[Tag, int])
    """To be restored, not reported as mapped yet."""
    fenced: str = ""
    """Why it does not count any more; empty: it does."""
    is_dead: bool = False
    has_lost_a_process: bool = False
    """One of its processes ended since its last report: it may hold less than that says."""
    proven_on: set[str] = field(default_factory=set[str])
    """Dead, and its memory measured as free on these of its devices."""

    @property
    def name(self) -> str:
        return self.report.tenant

    @property
    def held_bytes(self) -> int:
        """Of each of its devices, at worst. Fenced: everything it ever registered."""
        report = self.report
        if self.fenced and not self.is_dead:
            return report.residue_bytes + sum(tag.num_bytes for tag in report.tags)
        mapped = {tag.tag for tag in report.tags if is_mapped(tag)}
        return held_bytes(report) + sum(n for tag, n in self.promised.items() if tag not in mapped)

    @property
    def untaken_bytes(self) -> int:
        """Of `held_bytes`: not on the devices yet, but may be at any moment."""
        if self.is_dead:
            return 0
        return self.held_bytes - held_bytes(self.report) + self.report.reserved_bytes

    @property
    def is_usable(self) -> bool:
        """It accepts commands."""
        return not self.fenced and not self.is_dead

    @property
    def sure_bytes(self) -> int:
        """Of `held_bytes`: on the devices now, beyond doubt."""
        counted = sum(t.num_bytes for t in self.report.tags if t.tag in COUNTED_ONLY and is_mapped(t))
        return max(0, self.held_bytes - self.untaken_bytes - counted)

    def counts_on(self, device: str) -> bool:
        """Whether some of that device is, or may be, in its use."""
        return device in self.report.devices and device not in self.proven_on

    def tag(self, name: Tag) -> TagReport | None:
        """What it last said of a tag."""
        return next((tag for tag in self.report.tags if tag.tag == name), None)


@dataclass(slots=True)
class DeviceAccount:
    """Where a device is, and what it was last measured as."""

    node: int = 0
    reading: DeviceReading | None = None
    baseline_bytes: int = 0
    """Unregistered use when the device was quiet."""


class LeaseLedger:
    """Entries by tenant name, and sums by device."""

    def __init__(self, *, reserve_bytes: int, margin_bytes: int) -> None:
        """`reserve_bytes` of each device are never promised; `margin_bytes` must be free beyond what is asked."""
        self.reserve_bytes = reserve_bytes
        self.margin_bytes = margin_bytes
        self.devices: dict[str, DeviceAccount] = {}
        self.tenants: dict[str, Incarnation] = {}
        self.unproven: list[Incarnation] = []
        """Dead incarnations whose memory is not proven free."""

    # -- reports

    def accept(self, report: TenantReport) -> Incarnation | None:
        """Enter a report; None if a newer one is known already. MemoryFault for one that makes no sense."""
        check_report(report)
        known = self.tenants.get(report.tenant)
        self._check_place(report, known)
        for device in report.devices:
            self.devices.setdefault(device, DeviceAccount(report.node))
        if known is None or known.is_dead or report.epoch > known.report.epoch:
            if known is not None and not known.is_dead:
                known.fenced = known.fenced or "replaced by a newer incarnation"
                self.unproven.append(known)  # it counts until its end is proven
            if known is not None and known.is_dead and report.epoch <= known.report.epoch:
                return None
            self.tenants[report.tenant] = Incarnation(report)
            return self.tenants[report.tenant]
        if (report.epoch, report.sequence) <= (known.report.epoch, known.report.sequence):
            return known if report == known.report else None
        known.report, known.has_lost_a_process = report, False
        for tag in report.tags:
            if is_mapped(tag):
                known.promised.pop(tag.tag, None)
        return known

    def _check_place(self, report: TenantReport, known: Incarnation | None) -> None:
        """A living process cannot have its memory elsewhere: what it held would no longer be counted."""
        before = known.report.devices if known is not None and known.report.epoch == report.epoch else report.devices
        if before != report.devices:
            raise MemoryFault(
                f"report of {report.tenant}: was on {', '.join(before)}, says {place_of(report)} now",
                remedy="mend the tenant",
            )
        for device in report.devices:
            account = self.devices.get(device)
            if account is not None and account.node != report.node:
                raise MemoryFault(
                    f"report of {report.tenant}: {device} is on node {account.node}, it says node {report.node}",
                    remedy="name each device of a run differently",
                )

    def fence(self, name: str, reason: str) -> Incarnation | None:
        """It gets no commands from now on; its bytes still count."""
        known = self.tenants.get(name)
        if known is not None and not known.is_dead:
            known.fenced = known.fenced or reason
        return known

    def lost_a_process(self, name: str, epoch: int) -> None:
        """One of that incarnation's processes ended; others still run."""
        known = self.tenants.get(name)
        if known is not None and known.report.epoch == epoch:
            known.has_lost_a_process = True

    def died(self, name: str, epoch: int) -> Incarnation | None:
        """All processes of that incarnation ended. Returns it, unless that was known."""
        all_of_name = (g for g in (*self.tenants.values(), *self.unproven) if g.name == name)
        found = next((g for g in all_of_name if g.report.epoch == epoch), None)
        if found is None or found.is_dead:
            return None
        found.is_dead = True
        if all(gone is not found for gone in self.unproven):
            self.unproven.append(found)
        return found

    def proven(self, device: str) -> tuple[Incarnation, ...]:
        """The memory of the dead of a device was seen to be free: forget those that count on no other device."""
        there = [g for g in self.unproven_on([device]) if g.is_dead]
        for dead in there:
            dead.proven_on.add(device)
        gone = tuple(g for g in there if g.proven_on.issuperset(g.report.devices))
        self.unproven = [g for g in self.unproven if g not in gone]
        for dead in gone:
            if self.tenants.get(dead.name) is dead:
                del self.tenants[dead.name]
        return gone

    # -- sums

    def on(self, device: str) -> Iterator[Incarnation]:
        """All incarnations that count there, including the dead without proof."""
        for tenant in self.tenants.values():
            if tenant.counts_on(device) and not tenant.is_dead:
                yield tenant
        yield from (g for g in self.unproven if g.counts_on(device))

    def gang(self, name: str) -> tuple[Incarnation, ...]:
        """Members that are not dead, sorted by name."""
        found = [t for t in self.tenants.values() if t.report.gang == name and not t.is_dead]
        return tuple(sorted(found, key=lambda t: t.name))

    def unproven_on(self, devices: Iterable[str]) -> tuple[Incarnation, ...]:
        """The unproven dead of these devices."""
        wanted = tuple(devices)
        return tuple(g for g in self.unproven if any(g.counts_on(device) for device in wanted))

    def held(self, device: str) -> int:
        """By the books, of the dead what is not measured as free."""
        return sum(t.held_bytes for t in self.on(device) if not t.is_dead) + self.unproven_bytes(device)

    def unproven_bytes(self, device: str) -> int:
        """Of the dead: what they held, but no more than the last measurement leaves when everything is taken off that
        the living hold beyond doubt. So memory that is seen to be free is free, whatever the rest is proven by."""
        dead = sum(g.held_bytes for g in self.unproven_on([device]) if g.is_dead)
        reading = self.devices[device].reading
        if not dead or reading is None:
            return dead
        return min(dead, max(0, self._beyond_doubt(device)))

    def _beyond_doubt(self, device: str) -> int:
        """Used, by the last measurement, beside what the living hold for sure; others cannot hold more than that."""
        reading = self.devices[device].reading
        sure = sum(t.sure_bytes for t in self.on(device) if not t.is_dead)
        return 0 if reading is None else reading.capacity_bytes - reading.free_bytes - reading.driver_bytes - sure

    def capacity(self, device: str) -> int:
        """0 before the first measurement."""
        reading = self.devices[device].reading
        return 0 if reading is None else reading.capacity_bytes

    def room(self, device: str, *, besides: Mapping[str, Iterable[Tag]] | None = None) -> int:
        """Bytes that could be granted now: the smaller of what the books and what the last measurement leave.
        `besides`: promises that are not to be counted (the ones this is asked for)."""
        account = self.devices[device]
        if account.reading is None:
            return 0
        mine = 0
        for name, tags in (besides or {}).items():
            tenant = self.tenants.get(name)
            if tenant is not None and tenant.counts_on(device) and tenant.is_usable:
                mine += sum(tenant.promised.get(tag, 0) for tag in tags)
        untaken = sum(tenant.untaken_bytes for tenant in self.on(device)) - mine
        by_books = account.reading.capacity_bytes - self.reserve_bytes - (self.held(device) - mine)
        by_measurement = account.reading.free_bytes - self.margin_bytes - untaken
        return min(by_books, by_measurement)

    def unattributed(self, device: str) -> int:
        """Used by neither a living tenant nor the driver, by the last measurement. The dead count as unregistered."""
        return max(0, self._beyond_the_books(device))

    def _beyond_the_books(self, device: str) -> int:
        """As `unattributed`; below zero where less is used than the living say they hold."""
        reading = self.devices[device].reading
        if reading is None:
            return 0
        taken = sum(t.held_bytes - t.untaken_bytes for t in self.on(device) if not t.is_dead)
        return reading.capacity_bytes - reading.free_bytes - reading.driver_bytes - taken

    def settle_baseline(self, device: str) -> None:
        """The device is quiet: the present unregistered use becomes the baseline. A reading below what living tenants
        report only gives an upper limit for others. A reading below what they certainly hold gives nothing: a tenant
        died unnoticed, and its missing memory hides that of others. While a tenant loads, memory that it has not
        reported looks unregistered, so the reading is only an upper limit too."""
        if any(t.has_lost_a_process for t in self.on(device)):
            return
        account = self.devices[device]
        beyond, limit = self._beyond_the_books(device), self._beyond_doubt(device)
        is_loading = any(t.report.reserved_bytes for t in self.on(device))
        if beyond >= 0 and not is_loading:
            account.baseline_bytes = beyond
        elif limit >= 0:
            account.baseline_bytes = min(account.baseline_bytes, limit)

    def dead_are_gone(self, device: str) -> bool:
        """Whether the last measurement shows the memory of all dead of that device as free."""
        account = self.devices[device]
        dead = sum(g.held_bytes for g in self.unproven_on([device]) if g.is_dead)
        return account.reading is not None and (
            dead == 0 or self.unattributed(device) <= account.baseline_bytes + self.margin_bytes
        )

    # -- for people

    def holders(self, device: str) -> tuple[Holder, ...]:
        """Largest first, unregistered memory last."""
        found: list[Holder] = []
        unproven = self.unproven_bytes(device)
        for tenant in self.on(device):
            state = "dead, not proven free" if tenant.is_dead else "fenced" if tenant.fenced else tenant.report.state
            rows = [(tag.tag, tag.num_bytes) for tag in tenant.report.tags if is_mapped(tag) or state == "fenced"]
            rows += [(tag, n) for tag, n in tenant.promised.items() if tag not in {row[0] for row in rows}]
            rows.append(("residue", tenant.report.residue_bytes))
            rows.sort(key=lambda row: -row[1])
            wholes: dict[str, int] = {}
            for tag, num_bytes in rows:
                counted = min(num_bytes, unproven) if tenant.is_dead else num_bytes
                unproven -= counted if tenant.is_dead else 0
                wholes[whole_of(tag)] = wholes.get(whole_of(tag), 0) + counted
            found += [Holder(device, tenant.name, tag, n, state) for tag, n in wholes.items() if n]
        found.sort(key=lambda holder: (-holder.num_bytes, holder.tenant, holder.tag))
        unregistered = self.unattributed(device) - self.unproven_bytes(device)
        if unregistered > 0:
            found.append(Holder(device, "", "", unregistered, ""))
        return tuple(found)

    def short_words(self, device: str, short_bytes: int) -> str:
        """Of a device that cannot be made to hold what is asked: who holds it, and what keeps the memory of the dead
        from being proven free."""
        holders = self.holders(device)
        named = [h for h in holders if h.tenant]
        parts = [f"{h.tenant} {h.tag} {in_words(h.num_bytes)} ({h.state})" for h in named[:MAX_HOLDERS]]
        if rest := named[MAX_HOLDERS:]:
            parts.append(f"{len(rest)} more {in_words(sum(h.num_bytes for h in rest))}")
        if unregistered := sum(h.num_bytes for h in holders if not h.tenant):
            parts.append(f"{in_words(unregistered)} by unregistered processes")
        words = f"refused: {in_words(short_bytes)} short on {device}, held by {', '.join(parts) or 'no process'}"
        account = self.devices[device]
        if account.reading is None or not any(g.is_dead for g in self.unproven_on([device])):
            return words
        return (
            f"{words}; measured: {in_words(account.reading.free_bytes)} of {in_words(account.reading.capacity_bytes)} "
            f"free, {in_words(self.unattributed(device))} used by no living tenant, before the deaths "
            f"{in_words(account.baseline_bytes)}"
        )

    def view(self, device: str) -> DeviceView:
        """One device, for `myxa mem`."""
        reading, node = self.devices[device].reading or DeviceReading(0, 0), self.devices[device].node
        tenants = tuple(t.report for t in sorted(self.on(device), key=lambda t: (t.name, t.report.epoch)))
        return DeviceView(device, reading.capacity_bytes, reading.free_bytes, self.unattributed(device), tenants, node)

    def is_settled(self, device: str) -> bool:
        """No usable tenant there is in a change that this ledger did not start."""
        return all(t.report.state in STABLE for t in self.on(device) if t.is_usable)


def check_report(report: TenantReport) -> None:
    """MemoryFault for numbers that cannot be."""
    names = [tag.tag for tag in report.tags]
    wrong = ""
    if not (report.tenant and report.gang and report.devices and all(report.devices)):
        wrong = "tenant, gang and devices need names"
    elif len(set(report.devices)) != len(report.devices):
        wrong = "a device is listed twice"
    elif len(set(names)) != len(names):
        wrong = "a tag is listed twice"
    elif any(tag.num_bytes < 0 or tag.host_bytes < 0 for tag in report.tags) or report.residue_bytes < 0:
        wrong = "bytes below zero"
    elif len(report.pids) != len(report.started_at):
        wrong = f"{len(report.pids)} processes with {len(report.started_at)} start times"
    if wrong:
        raise MemoryFault(f"report of {report.tenant or 'a tenant'}: {wrong}", remedy="mend the tenant")
