"""The twin of the transport over sockets inside one process, for tests and simulations.

Same session, same bytes, no sockets; an envelope arrives in a later turn of the loop, in order per connection. A
network can cut connections and kill nodes, so that failures can be had on purpose. How an envelope gets across, who
can be reached and when a broken connection is noticed are the network's to say: the simulation of the tests says worse.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, deque
from collections.abc import Callable

from myxa.core.errors import LaunchError
from myxa.core.ids import PeerKey
from myxa.transport.wire import Endpoints, InboundSink, Lane, Parcel, Transport

RECONNECT_S = 0.05
UNREACHABLE_S = 1.0


class InprocNetwork:
    """All in-process transports that can reach each other; `Node.attach` takes it as `network`."""

    def __init__(self) -> None:
        self._nodes: dict[str, InprocTransport] = {}
        self._numbers = itertools.count(1)

    def __call__(self) -> InprocTransport:
        return self.transport()

    def transport(self) -> InprocTransport:
        address = f"inproc-{next(self._numbers)}"
        made = self._nodes[address] = InprocTransport(self, address)
        return made

    def find(self, address: str) -> InprocTransport | None:
        return self._nodes.get(address)

    def nodes(self) -> tuple[InprocTransport, ...]:
        return tuple(self._nodes.values())

    @property
    def unreachable_s(self) -> float:
        """After so long without anybody at an address, a peer is given up."""
        return UNREACHABLE_S

    def reach(self, source: InprocTransport, address: str) -> InprocTransport | None:
        del source
        return self.find(address)

    def carry(
        self, source: InprocTransport, target: InprocTransport, connection: bytes, lane: Lane, data: bytes | bytearray
    ) -> None:
        """Bring one envelope across, in order per connection."""
        del source
        asyncio.get_running_loop().call_soon(target.receive, connection, lane, data)

    def hang_up(self, target: InprocTransport, connection: bytes, *, in_order: bool) -> None:
        """The sender's end of a connection is gone; `in_order`: what was sent before still arrives."""
        if in_order:
            asyncio.get_running_loop().call_soon(target.shut, connection)
        else:
            target.shut(connection)

    def pause_s(self) -> float:
        return RECONNECT_S

    def drop(self, address: str) -> None:
        self._nodes.pop(address, None)

    def next_connection(self) -> bytes:
        return f"c{next(self._numbers)}".encode()

    def kill(self, transport: InprocTransport) -> None:
        """As SIGKILL: nothing more goes out or comes in; peers only see the broken connections."""
        transport.is_dead = True
        self.drop(transport.endpoints.inproc)
        for other in self.nodes():
            other.cut(transport.endpoints.inproc, "the other side is gone")


class _Outlet:
    def __init__(self, address: str) -> None:
        self.address = address
        self.connections: list[bytes | None] = [None, None]
        self.queues: tuple[deque[Parcel], deque[Parcel]] = (deque(), deque())
        self.timer: asyncio.TimerHandle | None = None
        self.lost_at: float | None = None


class InprocTransport(Transport):
    """One node's end."""

    def __init__(self, network: InprocNetwork, address: str) -> None:
        self._network = network
        self.endpoints = Endpoints(inproc=address)
        self.counters: Counter[str] = Counter()
        self._sink: InboundSink | None = None
        self._outlets: dict[PeerKey, _Outlet] = {}
        self._open: set[bytes] = set()
        self.is_dead = False

    def start(self, sink: InboundSink) -> None:
        self._sink = sink

    def connect(self, peer: PeerKey, endpoints: Endpoints) -> None:
        if not endpoints.inproc:
            raise LaunchError(
                f"{peer} listens at {endpoints}, not in this process", remedy="use the transport over sockets"
            )
        if peer not in self._outlets and endpoints.inproc != self.endpoints.inproc:
            self._outlets[peer] = _Outlet(endpoints.inproc)
            self._soon(self._try, peer)

    def send(self, peer: PeerKey, lane: Lane, parcel: Parcel) -> None:
        outlet = self._outlets.get(peer)
        if outlet is None or self.is_dead:
            return
        outlet.queues[lane].append(parcel)
        if outlet.connections[lane] is not None:
            self._flush(outlet, lane)

    def flush(self) -> None:
        """Nothing waits here for a turn of the loop."""

    def disconnect(self, peer: PeerKey, linger_s: float) -> None:
        outlet = self._outlets.pop(peer, None)
        if outlet is None:
            return
        if outlet.timer is not None:
            outlet.timer.cancel()
        if linger_s > 0 and not self.is_dead:
            for lane in Lane:
                if outlet.queues[lane]:
                    self._establish(peer, outlet, lane)
        target = self._network.find(outlet.address)
        for connection in outlet.connections:
            if target is not None and connection is not None:
                self._network.hang_up(target, connection, in_order=True)

    def forget(self, source: bytes, lane: Lane) -> None:
        self._open.discard(source)

    async def close(self, linger_s: float) -> None:
        for peer in list(self._outlets):
            self.disconnect(peer, linger_s)
        await asyncio.sleep(0)
        self._network.kill(self)

    def _try(self, peer: PeerKey) -> None:
        outlet = self._outlets.get(peer)
        if outlet is None or self.is_dead or self._sink is None:
            return
        loop = asyncio.get_running_loop()
        if self._network.reach(self, outlet.address) is None:
            outlet.lost_at = loop.time() if outlet.lost_at is None else outlet.lost_at
            outlet.timer = loop.call_later(self._network.pause_s(), self._try, peer)
            if loop.time() - outlet.lost_at > self._network.unreachable_s:
                self._sink.unreachable(peer, f"no process listens at {outlet.address}")
            return
        outlet.lost_at = None
        for lane in Lane:
            if outlet.connections[lane] is None:
                self._establish(peer, outlet, lane)

    def _establish(self, peer: PeerKey, outlet: _Outlet, lane: Lane) -> None:
        target = self._network.reach(self, outlet.address)
        if target is None or self._sink is None:
            return
        if outlet.connections[lane] is None:
            connection = outlet.connections[lane] = self._network.next_connection()
            target.accept(connection)
            self._deliver(outlet, lane, self._sink.greeting(peer, lane))
            self._sink.connected(peer, lane)
        self._flush(outlet, lane)

    def _flush(self, outlet: _Outlet, lane: Lane) -> None:
        queue = outlet.queues[lane]
        while queue:
            parcel = queue.popleft()
            if not parcel.is_withdrawn:
                parcel.is_sent = True
                self._deliver(outlet, lane, parcel.data)

    def _deliver(self, outlet: _Outlet, lane: Lane, data: bytes | bytearray) -> None:
        target, connection = self._network.find(outlet.address), outlet.connections[lane]
        if target is not None and connection is not None:
            self._network.carry(self, target, connection, lane, data)

    def accept(self, connection: bytes) -> None:
        self._open.add(connection)

    def shut(self, connection: bytes) -> None:
        self._open.discard(connection)

    def receive(self, connection: bytes, lane: Lane, data: bytes | bytearray) -> None:
        if connection in self._open and not self.is_dead and self._sink is not None:
            self._sink.received(connection, lane, memoryview(data))

    def cut(self, address: str, why: str) -> None:
        for peer, outlet in list(self._outlets.items()):
            if outlet.address != address or self._sink is None or self.is_dead:
                continue
            target = self._network.find(address)
            for lane in Lane:
                connection, outlet.connections[lane] = outlet.connections[lane], None
                if connection is not None:
                    if target is not None:
                        self._network.hang_up(target, connection, in_order=False)
                    self._sink.lost(peer, lane, why)
            if outlet.timer is not None:
                outlet.timer.cancel()
            outlet.timer = asyncio.get_running_loop().call_later(self._network.pause_s(), self._try, peer)

    @staticmethod
    def _soon(callback: Callable[..., None], *args: object) -> None:
        asyncio.get_running_loop().call_soon(callback, *args)
