"""The registry: the one well-known actor. It issues epochs, keeps the directory, and reports arrivals and exits.

The launcher of node 0 hosts it; a run ends with it. While it is away nodes call each other by their mirrors. No member
speaks in another's name: the caller is known by its connection, over ipc or in the process by the operating system.

All hear of all, but processes of a crowd hear of others of a crowd only once one has asked for the other: what the
registry sends would grow with the square of their number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import msgspec

from ...core.actor import MANY_PEERS, Actor
from ...core.changes import Changes
from ...core.errors import NotPermitted, StaleEpoch
from ...core.handlers import call, current_caller
from ...core.ids import LEADER, PeerKey, check_name
from ...core.supervision import describe_status
from ...core.timeouts import TIMEOUTS
from ..session.guard import ANYBODY, KeyRights, PeerGuard, is_provisional
from ..wire import Endpoints, is_public_key
from .directory import DirectoryUpdate, EndedNode, HostedActor, NodeRecord

REGISTRY = "registry"
REGISTRY_KEY = PeerKey(1, 1)
"""Number and epoch of the process that hosts the registry."""


KEPT_UPDATES = 512
CROWDS = ("launcher/", "model/", "rollout/", "trainer/")
"""Their processes are many, and call few of each other."""
IN_NONE = ("launcher/0", LEADER)


def in_crowd(name: str) -> bool:
    return name.startswith(CROWDS) and name not in IN_NONE


class RegistryState:
    """Node names -> incarnations, and the numbered history of changes."""

    def __init__(self) -> None:
        self.version = 0
        self._ids: dict[str, int] = {}
        self._epochs: dict[str, int] = {}
        self._nodes: dict[str, NodeRecord] = {}
        self._hosts: dict[str, str] = {}
        """Actor -> its node."""
        self._by_id: dict[int, NodeRecord] = {}
        self._met: set[tuple[str, str]] = set()
        """Nodes of crowds, in both orders."""
        self._updates: deque[DirectoryUpdate] = deque(maxlen=KEPT_UPDATES)

    def node(self, name: str) -> NodeRecord | None:
        return self._nodes.get(name)

    def nodes(self) -> tuple[NodeRecord, ...]:
        return tuple(self._nodes.values())

    def member(self, key: PeerKey | None) -> NodeRecord | None:
        """That incarnation; None: it is not there."""
        node = self._by_id.get(key.node_id) if key is not None else None
        return node if node is not None and node.key == key else None

    def meet(self, name: str, actor: str) -> bool:
        """See `RegistryActor.updates`. False: nothing changes."""
        other = self._hosts.get(actor, actor)
        if not (in_crowd(name) and in_crowd(other)) or (name, other) in self._met:
            return False
        self._met |= {(name, other), (other, name)}
        self._note(nodes=tuple(node for node in map(self.node, (name, other)) if node is not None))
        return True

    def since(self, version: int, name: str = "") -> tuple[DirectoryUpdate, ...]:
        """What the mirror of that node needs at that version: nothing, the updates it missed, or a snapshot."""
        if version == self.version:
            return ()
        if self._updates and self._updates[0].version <= version + 1 <= self.version and version >= 0:
            updates = tuple(self._updates)[version - self.version :]
        else:
            updates = (DirectoryUpdate(version=self.version, is_snapshot=True, nodes=self.nodes()),)
        return tuple(self._filter_for(name, updates)) if in_crowd(name) else updates

    def _filter_for(self, name: str, updates: tuple[DirectoryUpdate, ...]) -> Iterator[DirectoryUpdate]:
        def hears(other: NodeRecord | EndedNode) -> bool:
            return other.name == name or not in_crowd(other.name) or (name, other.name) in self._met

        for update in updates:
            nodes, gone = tuple(filter(hears, update.nodes)), tuple(filter(hears, update.gone))
            if nodes or gone or update is updates[-1]:  # whose version says how far the mirror is
                yield msgspec.structs.replace(update, nodes=nodes, gone=gone)

    def register(self, name: str, endpoints: Endpoints, pid: int = 0, role: str = "keeper") -> NodeRecord:
        """A number and an epoch that were never used; a living older incarnation is thereby over."""
        epoch = self._epochs[name] = self._epochs.get(name, 0) + 1
        node_id = self._ids.setdefault(name, len(self._ids) + REGISTRY_KEY.node_id)
        record = NodeRecord(name=name, node_id=node_id, epoch=epoch, endpoints=endpoints, pid=pid, role=role)
        old = self._nodes.get(name)
        self._put(record, old)
        self._note(nodes=(record,), gone=(_departure(old, f"it was replaced by epoch {epoch}"),) if old else ())
        return record

    def announce(self, name: str, epoch: int, actors: tuple[HostedActor, ...], reasons: dict[str, str]) -> NodeRecord:
        """The actors of an incarnation, all of them. Raises StaleEpoch if it is not the current one."""
        old = self._nodes.get(name)
        if old is None or old.epoch != epoch:
            newest = self._epochs.get(name, 0)
            raise StaleEpoch(f"{name} epoch {epoch} is not registered; the newest is {newest}")
        for actor in actors:
            if (host := self._hosts.get(actor.name, name)) != name:
                raise StaleEpoch(
                    f"{actor.name} is already in {host}", remedy="names are unique; stop the other one first"
                )
        record = msgspec.structs.replace(old, actors=actors)
        self._put(record, old)
        self._note(nodes=(record,), reasons=reasons)
        return record

    def depart(self, name: str, epoch: int, reason: str, pid: int = 0) -> bool:
        """An incarnation, given by epoch or process id (0: not known), is over. False: it is not the current one."""
        node = self._nodes.get(name)
        if node is None or epoch not in (0, node.epoch) or pid not in (0, node.pid):
            return False
        self._put(msgspec.structs.replace(node, actors=()), node)
        del self._nodes[name], self._by_id[node.node_id]
        self._note(gone=(_departure(node, reason),))
        return True

    def _put(self, record: NodeRecord, old: NodeRecord | None) -> None:
        """In the place of `old`, the same node's record."""
        for actor in old.actors if old is not None else ():
            self._hosts.pop(actor.name, None)
        self._nodes[record.name] = record
        self._by_id[record.node_id] = record
        self._hosts.update((actor.name, record.name) for actor in record.actors)

    def _note(
        self,
        nodes: tuple[NodeRecord, ...] = (),
        gone: tuple[EndedNode, ...] = (),
        reasons: dict[str, str] | None = None,
    ) -> None:
        self.version += 1
        self._updates.append(DirectoryUpdate(version=self.version, nodes=nodes, gone=gone, reasons=reasons or {}))


def _departure(node: NodeRecord, reason: str) -> EndedNode:
    return EndedNode(name=node.name, node_id=node.node_id, epoch=node.epoch, reason=reason)


class RegistryActor(Actor):
    """The registry of one system: what nodes and launchers ask of it."""

    mailbox_size = MANY_PEERS
    """Every process has a question for updates here all the time."""

    def __init__(self, guard: PeerGuard | None = None) -> None:
        self.state = RegistryState()
        self._guard = guard
        self._changes = Changes()

    @call(deadline=10, reentrant=True)
    async def register(self, node: str, endpoints: Endpoints, pid: int) -> NodeRecord:
        """A process joins; the record holds its number and epoch. An older incarnation of that name is thereby over."""
        role = self._check_registration(check_name(node), endpoints)
        record = self.state.register(node, endpoints, pid, role)
        self._changes.tell()
        return record

    @call(deadline=10, reentrant=True)
    async def announce(self, node: str, epoch: int, actors: tuple[HostedActor, ...], reasons: dict[str, str]) -> int:
        """All actors of a node; `reasons`: why some that were there are not. Returns the directory's version."""
        self._check_caller(f"speak for {node}", node)
        self.state.announce(node, epoch, actors, reasons)
        self._changes.tell()
        return self.state.version

    @call(deadline=10, reentrant=True)
    async def leave(self, node: str, epoch: int, reason: str) -> None:
        """A process leaves cleanly; only itself may say so."""
        self._check_caller(f"speak for {node}", node)
        self._depart(node, epoch, reason)

    @call(deadline=10, reentrant=True)
    async def expect(self, node: str, public_key: str) -> None:
        """A process of that name joins over tcp with that key only; launchers announce it, the last one counts."""
        self._check_caller("announce keys")
        if not is_public_key(public_key):
            raise self._refusal("that is no public key")
        if self._guard is not None:
            self._guard.expect(KeyRights(check_name(node), "node", public_key))

    @call(deadline=10, reentrant=True)
    async def process_exited(self, node: str, epoch: int, status: int, pid: int = 0) -> bool:
        """A launcher saw the process end (negative status: by a signal). It knows the epoch or the process id; 0: not.
        All nodes hear of it; calls pending to it fail at once. False if that incarnation was gone or replaced already.
        Give one of the two: with neither, a report that comes late would hit the next incarnation."""
        self._check_caller("report the end of another process")
        return self._depart(node, epoch, f"its process ended with {describe_status(status)}", pid)

    def unreachable(self, key: PeerKey, why: str) -> None:
        """This process lost the connection to that incarnation for good."""
        if record := self.state.member(key):
            self._depart(record.name, record.epoch, why)

    @call(deadline=TIMEOUTS.wire.updates_s + 3.0, reentrant=True)
    async def updates(
        self, after: int, wait_s: float = TIMEOUTS.wire.updates_s, meets: str = ""
    ) -> tuple[DirectoryUpdate, ...]:
        """What happened after version `after` (-1: a snapshot), once something has; none after `wait_s`. `meets`: an
        actor whose process and the caller's hear of each other from now on; one that is not there yet is expected in a
        process of its name."""
        asker = self.state.member(current_caller())
        name = asker.name if asker is not None else ""
        if meets and self.state.meet(name, check_name(meets)):
            self._changes.tell()
        await self._changes.until(lambda: self.state.version != after, wait_s)
        return self.state.since(after, name)

    def _depart(self, node: str, epoch: int, reason: str, pid: int = 0) -> bool:
        is_over = self.state.depart(node, epoch, reason, pid)
        if is_over:
            self._changes.tell()
        return is_over

    # -- who may do what: each raises NotPermitted; StaleEpoch for a caller that is over

    def _check_registration(self, name: str, endpoints: Endpoints) -> str:
        """May that caller join as `name`, listening there? Returns the role that it has then."""
        if self._guard is None:
            return ANYBODY.role
        caller = current_caller()
        badge = self._guard.stranger(caller) if caller is not None and is_provisional(caller) else None
        if badge is None:
            raise self._refusal("only a process that has not joined yet may register")
        expected = self._guard.expected(endpoints.curve)
        badge = expected if expected is not None and badge == ANYBODY else badge
        if badge.name not in ("", name) or badge.key not in ("", endpoints.curve):
            raise self._refusal(f"the key that was announced for {badge.name} was used to join as {name}")
        living = self.state.node(name)
        if living is not None and living.node_id == REGISTRY_KEY.node_id:
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
        owner = next((n.name for n in self.state.nodes() if n.endpoints.curve == key), name)
        if not is_public_key(key) or owner != name:
            raise self._refusal(f"{name} gives a key that is {'no key' if owner == name else f'that of {owner}'}")

    def _check_caller(self, request: str, name: str = "") -> None:
        """May the caller do that? In its own `name` all may. One that has not joined may only call `register`."""
        caller = current_caller()
        if self._guard is None or caller is None:
            return
        node = self.state.member(caller)
        if node is None:
            raise StaleEpoch(f"{caller} is not registered (any more)")
        if node.role != "keeper" and node.name != name:
            raise self._refusal(f"{node.name} may not {request}")

    def _refusal(self, why: str) -> NotPermitted:
        return NotPermitted(why, remedy="a process speaks under its own name and key; launchers hold the job's key")
