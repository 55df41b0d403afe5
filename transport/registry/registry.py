"""The registry: the one well-known actor. It issues epochs, keeps the directory, and reports arrivals and exits.

The launcher of node 0 hosts it. The data plane does not need it: nodes call each other directly and use their mirrors
while it is away; only joining and reports of exits wait for it. With a journal it may die and come back: it then has
its members again, and reports none of them as gone before that member had time to report.

`RegistryState` has the rules, sans-IO. By `RegistryRights` no member speaks in another's name. The caller is known by
its connection.
A caller over ipc or in the process is trusted as far as the operating system trusts it: the processes of one user on
one host may do everything, as launchers may.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable

import msgspec

from ...core.actor import Actor
from ...core.errors import LaunchError, NotPermitted, StaleEpoch
from ...core.handlers import call, current_caller
from ...core.ids import PeerKey, check_name
from ...core.supervision import describe_status
from ..session.guard import ANYBODY, KeyRights, PeerGuard, is_provisional
from ..wire import Endpoints, is_public_key
from .directory import DirectoryUpdate, EndedNode, HostedActor, NodeRecord
from .journal import JournalLine, NodeEnded, NodeEntry, RegistryJournal

REGISTRY = "registry"
REJOIN_S = 20.0
"""How long a restarted registry waits for a process that its last incarnation knew. On its host they notice within
about a second, on others within ten."""
UPDATES_S = 3.0
"""How long a node's question for updates is held back when there are none. An answer that is lost costs 3 s more."""

_log = logging.getLogger("myxa.transport")


class RegistryContract(Actor):
    """What nodes and launchers ask of the registry."""

    @call(deadline=10, reentrant=True)
    async def register(self, node: str, endpoints: Endpoints, pid: int) -> NodeRecord:
        """A process joins; the record holds its number and epoch. An older incarnation of that name is thereby over."""
        raise NotImplementedError

    @call(deadline=10, reentrant=True)
    async def rejoin(self, record: NodeRecord) -> str:
        """A process that an earlier incarnation of the registry admitted keeps its epoch. Empty, or why it may
        not: then it is over, and whatever it still does has no effect."""
        raise NotImplementedError

    @call(deadline=10, reentrant=True)
    async def announce(self, node: str, epoch: int, actors: tuple[HostedActor, ...], reasons: dict[str, str]) -> int:
        """All actors of a node; `reasons`: why some that were there are not. Returns the directory's version."""
        raise NotImplementedError

    @call(deadline=10, reentrant=True)
    async def leave(self, node: str, epoch: int, reason: str) -> None:
        """A process leaves cleanly; only itself may say so."""
        raise NotImplementedError

    @call(deadline=10, reentrant=True)
    async def process_exited(self, node: str, epoch: int, status: int, pid: int = 0) -> bool:
        """A launcher saw the process end (negative status: by a signal). It knows the epoch or the process id; 0: not.
        All nodes hear of it; calls pending to it fail at once. False if that incarnation was gone or replaced already.
        Give one of the two: with neither, a report that comes late would hit the next incarnation."""
        raise NotImplementedError

    @call(deadline=10, reentrant=True)
    async def expect(self, node: str, public_key: str) -> None:
        """A process of that name will join over tcp with that key and with no other; only launchers may announce it.
        A later announcement of the same name replaces this one."""
        raise NotImplementedError

    @call(deadline=30, reentrant=True)
    async def resolve(self, name: str, wait_s: float) -> NodeRecord | None:
        """The node that hosts actor `name`, waiting for it to come up to `wait_s`."""
        raise NotImplementedError

    @call(deadline=10, reentrant=True)
    async def list_nodes(self, prefix: str = "") -> tuple[NodeRecord, ...]:
        raise NotImplementedError

    @call(deadline=UPDATES_S + 3.0, reentrant=True)
    async def updates(self, after: int, history: int, wait_s: float = UPDATES_S) -> tuple[DirectoryUpdate, ...]:
        """What happened after version `after` (-1: a snapshot), once something has; none after `wait_s`. `history`: of
        which incarnation of the registry that version is; for another one a snapshot comes first."""
        raise NotImplementedError


KEPT_UPDATES = 512
REGISTRY_NODE_ID = 1
"""Of the process that hosts the registry; its epoch is in the rendezvous record."""


class RegistryState:
    """Node names -> incarnations, and the numbered history of changes."""

    def __init__(self) -> None:
        self.version = 0
        self.history = 0
        """Epoch of the process that hosts the registry; part of every update."""
        self.presumed: set[str] = set()
        """Nodes that were alive when the last incarnation of the registry died, and were not heard of since."""
        self._ids: dict[str, int] = {}
        self._epochs: dict[str, int] = {}
        self._nodes: dict[str, NodeRecord] = {}
        self._updates: deque[DirectoryUpdate] = deque(maxlen=KEPT_UPDATES)

    def node(self, name: str) -> NodeRecord | None:
        return self._nodes.get(name)

    def find(self, actor: str) -> NodeRecord | None:
        for node in self._nodes.values():
            if any(a.name == actor for a in node.actors):
                return node
        return None

    def nodes(self, prefix: str) -> tuple[NodeRecord, ...]:
        return tuple(n for name, n in sorted(self._nodes.items()) if name.startswith(prefix))

    def since(self, version: int, history: int = 0) -> tuple[DirectoryUpdate, ...]:
        """What a mirror at that version of that history needs: nothing, the updates it missed, or a snapshot."""
        is_ours = history == self.history
        if is_ours and version == self.version:
            return ()
        if is_ours and self._updates and self._updates[0].version <= version + 1 <= self.version and version >= 0:
            return tuple(u for u in self._updates if u.version > version)
        nodes = tuple(self._nodes.values())
        return (DirectoryUpdate(version=self.version, history=self.history, is_snapshot=True, nodes=nodes),)

    def restore(self, entries: Iterable[JournalLine]) -> None:
        """Take up what the last incarnation of the registry knew; whom it knew is presumed to be alive."""
        for entry in entries:
            if isinstance(entry, NodeEntry):
                record = entry.record
                self._ids[record.name] = record.node_id
                if record.epoch >= self._epochs.get(record.name, 0):
                    self._epochs[record.name] = record.epoch
                    self._nodes[record.name] = record
            elif isinstance(entry, NodeEnded):
                record = self._nodes.get(entry.node)
                if record is not None and record.epoch == entry.epoch:
                    del self._nodes[entry.node]
        self.presumed = set(self._nodes)

    def grant(self, name: str, endpoints: Endpoints, pid: int = 0, role: str = "keeper") -> NodeRecord:
        """A number and an epoch that were never used. `enter` announces them."""
        epoch = self._epochs[name] = self._epochs.get(name, 0) + 1
        node_id = self._ids.setdefault(name, max(self._ids.values(), default=REGISTRY_NODE_ID - 1) + 1)
        return NodeRecord(name=name, node_id=node_id, epoch=epoch, endpoints=endpoints, pid=pid, role=role)

    def enter(self, record: NodeRecord) -> None:
        """An incarnation that was granted is there; a living older one is thereby over. Raises StaleEpoch if a newer
        one has entered meanwhile."""
        old = self._nodes.get(record.name)
        if record.epoch != self._epochs.get(record.name) or (old is not None and old.epoch >= record.epoch):
            raise StaleEpoch(f"{record.name} epoch {record.epoch} was replaced before it was there")
        self._nodes[record.name] = record
        self.presumed.discard(record.name)
        self._note(
            nodes=(record,), gone=(_departure(old, f"it was replaced by epoch {record.epoch}"),) if old else ()
        )  # fmt: skip

    def register(self, name: str, endpoints: Endpoints, pid: int = 0, role: str = "keeper") -> NodeRecord:
        """Grant and enter, for registries that keep no journal."""
        record = self.grant(name, endpoints, pid, role)
        self.enter(record)
        return record

    def rejoin(self, record: NodeRecord) -> str:
        """A process that an earlier incarnation of the registry admitted is still there. Why it is not: else empty."""
        known = self._nodes.get(record.name)
        newest = self._epochs.get(record.name, 0)
        claimed = f"{record.name} epoch {record.epoch}"
        if known is None or known.epoch != record.epoch:
            if record.epoch > newest or newest == 0:
                return f"{claimed} was not given out by this registry"
            return f"{claimed} is over; " + (f"epoch {newest} is there" if known else f"the newest was {newest}")
        if (known.node_id, known.endpoints, known.pid) != (record.node_id, record.endpoints, record.pid):
            return f"{claimed} is another process"
        self.presumed.discard(record.name)
        if known.actors != record.actors:
            self._nodes[record.name] = mended = msgspec.structs.replace(known, actors=record.actors)
            self._note(nodes=(mended,))
        return ""

    def announce(self, name: str, epoch: int, actors: tuple[HostedActor, ...], reasons: dict[str, str]) -> NodeRecord:
        """The actors of an incarnation, all of them. Raises StaleEpoch if it is not the current one."""
        old = self._nodes.get(name)
        if old is None or old.epoch != epoch:
            newest = self._epochs.get(name, 0)
            raise StaleEpoch(f"{name} epoch {epoch} is not registered; the newest is {newest}")
        for actor in actors:
            host = self.find(actor.name)
            if host is not None and host.name != name:
                raise StaleEpoch(
                    f"{actor.name} is already in {host.name}", remedy="names are unique; stop the other one first"
                )
        record = msgspec.structs.replace(old, actors=actors)
        self._nodes[name] = record
        self.presumed.discard(name)
        self._note(nodes=(record,), reasons=reasons)
        return record

    def depart(self, name: str, epoch: int, reason: str, pid: int = 0) -> bool:
        """An incarnation, given by epoch or process id (0: not known), is over. False: it is not the current one."""
        node = self._nodes.get(name)
        if node is None or epoch not in (0, node.epoch) or pid not in (0, node.pid):
            return False
        del self._nodes[name]
        self.presumed.discard(name)
        self._note(gone=(_departure(node, reason),))
        return True

    def _note(
        self,
        nodes: tuple[NodeRecord, ...] = (),
        gone: tuple[EndedNode, ...] = (),
        reasons: dict[str, str] | None = None,
    ) -> None:
        self.version += 1
        self._updates.append(
            DirectoryUpdate(version=self.version, history=self.history, nodes=nodes, gone=gone, reasons=reasons or {})
        )


def _departure(node: NodeRecord, reason: str) -> EndedNode:
    return EndedNode(name=node.name, node_id=node.node_id, epoch=node.epoch, reason=reason)


class RegistryActor(RegistryContract):
    """The registry of one system."""

    def __init__(self, guard: PeerGuard | None = None, journal: RegistryJournal | None = None) -> None:
        self.state = RegistryState()
        self.num_refused = 0
        self._journal = journal
        if journal is not None:
            self.state.restore(journal.entries)
        self._rights = RegistryRights(self.state, guard)
        self._sleepers: dict[asyncio.Event, None] = {}  # in order: a simulated run repeats itself

    async def register(self, node: str, endpoints: Endpoints, pid: int) -> NodeRecord:
        role = self._rights.to_register(check_name(node), endpoints, current_caller())
        record = self.state.grant(node, endpoints, pid, role)
        if self._journal is not None:
            self._journal.append(NodeEntry(record=record))
            await self._journal.settle()
        self.state.enter(record)
        self._wake()
        return record

    async def rejoin(self, record: NodeRecord) -> str:
        self._rights.to_rejoin(record, current_caller())
        refusal = self.state.rejoin(record)
        if refusal:
            self.num_refused += 1
            _log.warning("refused: %s", refusal)
        else:
            self._remember(record.name)
        self._wake()
        return refusal

    async def announce(self, node: str, epoch: int, actors: tuple[HostedActor, ...], reasons: dict[str, str]) -> int:
        self._rights.to_speak_for(node, current_caller())
        self.state.announce(node, epoch, actors, reasons)
        self._remember(node)
        self._wake()
        return self.state.version

    async def leave(self, node: str, epoch: int, reason: str) -> None:
        self._rights.to_speak_for(node, current_caller())
        self._depart(node, epoch, reason)

    async def expect(self, node: str, public_key: str) -> None:
        self._rights.to_expect(check_name(node), public_key, current_caller())

    async def process_exited(self, node: str, epoch: int, status: int, pid: int = 0) -> bool:
        self._rights.to_keep("report the end of another process", current_caller())
        return self._depart(node, epoch, f"its process ended with {describe_status(status)}", pid)

    def unreachable(self, key: PeerKey, why: str) -> None:
        """This process lost the connection to that incarnation for good."""
        for record in self.state.nodes(""):
            if record.key == key:
                self._depart(record.name, record.epoch, why)

    async def resolve(self, name: str, wait_s: float) -> NodeRecord | None:
        give_up_at = self.ctx.clock.monotonic() + wait_s
        while (record := self.state.find(name)) is None:
            left = give_up_at - self.ctx.clock.monotonic()
            if left <= 0 or not await self._sleep(left):
                break
        return self.state.find(name) if record is None else record

    async def list_nodes(self, prefix: str = "") -> tuple[NodeRecord, ...]:
        return self.state.nodes(prefix)

    async def updates(self, after: int, history: int, wait_s: float = UPDATES_S) -> tuple[DirectoryUpdate, ...]:
        found = self.state.since(after, history)
        if not found and await self._sleep(wait_s):
            found = self.state.since(after, history)
        return found

    async def on_start(self) -> None:
        """Give those whom the last incarnation knew their time."""
        if self.state.presumed:
            self.ctx.spawn(self._wait_for_presumed(), name="wait for those who were there")

    async def on_stop(self, why: str) -> None:
        if self._journal is not None:
            self._journal.close()

    async def _wait_for_presumed(self) -> None:
        await asyncio.sleep(REJOIN_S)
        for name in sorted(self.state.presumed):
            record = self.state.node(name)
            if record is not None:
                self._depart(name, record.epoch, f"it did not report within {REJOIN_S:g} s of the registry's restart")

    def _depart(self, node: str, epoch: int, reason: str, pid: int = 0) -> bool:
        record = self.state.node(node)
        if record is None or not self.state.depart(node, epoch, reason, pid):
            return False
        self._write(NodeEnded(node=node, epoch=record.epoch, reason=reason))
        self._wake()
        return True

    def _remember(self, node: str) -> None:
        record = self.state.node(node)
        if record is not None:
            self._write(NodeEntry(record=record))

    def _write(self, entry: JournalLine) -> None:
        """A journal that cannot be written stops grants, but ends are still announced."""
        if self._journal is None:
            return
        try:
            self._journal.append(entry)
        except LaunchError as error:
            _log.error("%s", error)

    async def _sleep(self, timeout_s: float) -> bool:
        """Until something changes; False after `timeout_s`."""
        changed = asyncio.Event()
        self._sleepers[changed] = None
        try:
            async with asyncio.timeout(timeout_s):
                await changed.wait()
        except TimeoutError:
            return False
        finally:
            del self._sleepers[changed]
        return True

    def _wake(self) -> None:
        for changed in self._sleepers:
            changed.set()


class RegistryRights:
    """Each method raises NotPermitted; StaleEpoch for a caller that is over."""

    def __init__(self, state: RegistryState, guard: PeerGuard | None) -> None:
        self._state = state
        self._guard = guard
        self.num_refused = 0

    def to_register(self, name: str, endpoints: Endpoints, caller: PeerKey | None) -> str:
        """May that caller join as `name`, listening there? Returns the role that it has then."""
        if self._guard is None:
            return ANYBODY.role
        badge = self._guard.stranger(caller) if caller is not None and is_provisional(caller) else None
        if badge is None:
            raise self._refusal("only a process that has not joined yet may register")
        expected = self._guard.expected(endpoints.curve)
        badge = expected if expected is not None and badge == ANYBODY else badge
        if badge.name not in ("", name) or badge.key not in ("", endpoints.curve):
            raise self._refusal(f"the key that was announced for {badge.name} was used to join as {name}")
        living = self._state.node(name)
        if living is not None and living.node_id == REGISTRY_NODE_ID:
            raise self._refusal(f"{name} is the process of the registry itself")
        self._check_key(name, endpoints)
        self._guard.joined(endpoints.curve)
        return badge.role

    def _check_key(self, name: str, endpoints: Endpoints) -> None:
        key = endpoints.curve
        if not key:
            if any(endpoints.tcp):
                raise self._refusal(f"{name} listens on tcp and has no key")
            return
        owner = next((n.name for n in self._state.nodes("") if n.endpoints.curve == key), name)
        if not is_public_key(key) or owner != name:
            raise self._refusal(f"{name} gives a key that is {'no key' if owner == name else f'that of {owner}'}")

    def to_speak_for(self, name: str, caller: PeerKey | None) -> None:
        record = self._record(caller)
        if record is not None and record.role != "keeper" and record.name != name:
            raise self._refusal(f"{record.name} spoke for {name}")

    def to_rejoin(self, record: NodeRecord, caller: PeerKey | None) -> None:
        """Say again what the registry knew of it; key and role stay as they were."""
        self.to_speak_for(record.name, caller)
        known = self._record(caller)
        if known is not None and (known.key, known.role, known.endpoints.curve) != (
            record.key, record.role, record.endpoints.curve,
        ):  # fmt: skip
            raise self._refusal(f"{known.name} came back with another number, key or role")

    def to_keep(self, what: str, caller: PeerKey | None) -> None:
        record = self._record(caller)
        if record is not None and record.role != "keeper":
            raise self._refusal(f"{record.name} may not {what}")

    def to_expect(self, name: str, public_key: str, caller: PeerKey | None) -> None:
        """Announce a key; notes it."""
        self.to_keep("announce keys", caller)
        if not is_public_key(public_key):
            raise self._refusal("that is no public key")
        if self._guard is not None:
            self._guard.expect(KeyRights(name, "node", public_key))

    def _record(self, caller: PeerKey | None) -> NodeRecord | None:
        """Of a member; None: within the process. A process that has not joined may only call `register`."""
        if self._guard is None or caller is None:
            return None
        for record in self._state.nodes(""):
            if record.key == caller:
                return record
        self.num_refused += 1
        raise StaleEpoch(f"{caller} is not registered (any more)")

    def _refusal(self, why: str) -> NotPermitted:
        self.num_refused += 1
        return NotPermitted(why, remedy="a process speaks under its own name and key; launchers hold the job's key")
