"""A simulated network over the in-process transport: latency, loss, partitions, slow readers.

A connection keeps its order within a lane, as on sockets; messages of different lanes may overtake each other. A
partition holds envelopes back, as TCP would, until it heals or until keepalive breaks the connection. When a
connection breaks, some envelopes under way may still arrive. A greeting is lost or doubled only with its connection.
The network handles bytes and processes; it does not interpret calls.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tests.harness.inproc import InprocNetwork, InprocTransport
from tests.simulation.sim_loop import EventLog, Process, ProcessState, SimLoop, SimulationError, current_process

from myxa.transport.session.frames import Kind
from myxa.transport.wire import Lane

_TICK_S = 1e-6
"""Between two envelopes of one connection; keeps their order among timers."""
_KINDS = {int(kind): kind.name for kind in Kind}
_LANES = tuple(lane.name.lower() for lane in Lane)
_KIND_AT = 3
"""Place of the kind in an envelope's header."""
_CORR_AT = slice(12, 20)
"""Place of the correlation number."""


@dataclass(frozen=True, slots=True)
class Net:
    """How the network behaves all the time. Chances are per envelope."""

    drop: float = 0.0
    """The envelope is lost with its connection."""
    duplicate: float = 0.0
    """Arrives once more, perhaps later than what was sent after it."""
    delay_s: tuple[float, float] = (0.0001, 0.001)
    """Least and most time under way."""
    keepalive_s: float = 2.0
    """A connection to a silent peer (partition, pause) breaks after this time."""
    reconnect_s: tuple[float, float] = (0.05, 0.3)
    """Least and most pause before the next attempt to connect."""
    unreachable_s: float = 4.0
    """A peer that cannot be connected to for so long is given up."""


@dataclass(slots=True)
class _Flight:
    """Something under way on one connection: an envelope, or (`data` None) its end."""

    sender: str
    receiver: InprocTransport
    connection: bytes
    lane: Lane
    data: bytes | bytearray | None


class SimNetwork(InprocNetwork):
    """The network of one simulation. Names are those of the processes whose transports it made."""

    def __init__(self, loop: SimLoop, net: Net, log: EventLog) -> None:
        super().__init__()
        self.net = net
        self._loop = loop
        self._log = log
        self._random = random.Random(f"{loop.seed}/network")
        self._hosts: dict[InprocTransport, Process] = {}
        self._last_at: dict[bytes, float] = {}
        self._blocked: dict[tuple[str, str], float] = {}
        self._held: dict[tuple[str, str], list[_Flight]] = {}
        self._slow: dict[str, float] = {}
        self._read_at: dict[str, float] = {}

    def transport(self) -> InprocTransport:
        process = current_process()
        if process is None:
            raise SimulationError("a node needs a simulated process", remedy="use `await sim.node(name)`")
        made = super().transport()
        self._hosts[made] = process
        return made

    # -- what can be done to it

    def partition(self, pairs: Iterable[tuple[str, str]]) -> None:
        """From now on nothing gets from the first to the second of each pair."""
        now = self._loop.time()
        for pair in pairs:
            if pair not in self._blocked:
                self._blocked[pair] = now
                self._loop.call_later(self.net.keepalive_s, self._give_up, pair, now)

    def heal(self) -> None:
        """Let everything through again; what was held back leaves now."""
        for pair in list(self._blocked):
            del self._blocked[pair]
            for flight in self._held.pop(pair, ()):
                self._take_off(flight)

    def slow(self, name: str, envelopes_per_s: float) -> None:
        """A process reads no faster than this; 0: as fast as it can."""
        if envelopes_per_s > 0:
            self._slow[name] = 1.0 / envelopes_per_s
        else:
            self._slow.pop(name, None)

    def reset(self, one: str, other: str) -> None:
        """The connections between two processes break at once, and are made again."""
        for source, target in ((one, other), (other, one)):
            self._break(source, target, "reset")

    def stopped(self, process: Process) -> None:
        """A process stands still: its connections break if that lasts."""
        self._loop.call_later(self.net.keepalive_s, self._give_up_stopped, process, process.paused_s)

    def process_ended(self, process: Process) -> None:
        """Nothing of it listens any more."""
        for transport, host in list(self._hosts.items()):
            if host is process:
                self.kill(transport)

    def kill(self, transport: InprocTransport) -> None:
        """Its process ended; the others notice when their connections to it break."""
        if transport.is_dead:
            return
        transport.is_dead = True
        address = transport.endpoints.inproc
        self.drop(address)
        name = self._hosts[transport].name
        for other, process in self._alive():
            is_cut_off = self._is_blocked(name, process.name)
            delay_s = self.net.keepalive_s if is_cut_off else self._delay_s()
            self._loop.call_later(delay_s, self._run_in, process, other.cut, address, "the other side is gone")

    def _run_in(self, process: Process, callback: Callable[..., None], *args: object) -> None:
        """Run a callback in the context of a process."""
        self._loop.call_soon(callback, *args, context=process.context())

    def _give_up(self, pair: tuple[str, str], since: float) -> None:
        if self._blocked.get(pair) == since:
            self._break(*pair, "keepalive")
            self._break(pair[1], pair[0], "keepalive")

    def _give_up_stopped(self, process: Process, paused_s: float) -> None:
        if process.state is ProcessState.PAUSED and process.paused_s == paused_s:
            for _, other in self._alive():
                if other is not process:
                    self._break(other.name, process.name, "keepalive")
                    self._break(process.name, other.name, "keepalive")

    def _break(self, source: str, target: str, why: str) -> None:
        """The connections that `source` sends on to `target` break; `source` is notified in its own context."""
        self._log.add("break", f"{source}>{target} {why}")
        addresses = [t.endpoints.inproc for t, process in self._alive() if process.name == target]
        for transport, process in self._alive():
            if process.name == source:
                for address in addresses:
                    self._run_in(process, transport.cut, address, why)

    # -- as the transports see it

    @property
    def unreachable_s(self) -> float:
        return self.net.unreachable_s

    def reach(self, source: InprocTransport, address: str) -> InprocTransport | None:
        target = self.find(address)
        if target is None:
            return None
        host, other = self._hosts[source], self._hosts[target]
        if other.state is not ProcessState.RUNNING or self._is_blocked(host.name, other.name):
            return None
        return target

    def pause_s(self) -> float:
        return self._random.uniform(*self.net.reconnect_s)

    def carry(
        self, source: InprocTransport, target: InprocTransport, connection: bytes, lane: Lane, data: bytes | bytearray
    ) -> None:
        flight = _Flight(self._hosts[source].name, target, connection, lane, data)
        is_exempt = data[_KIND_AT] == Kind.HELLO
        if not is_exempt and self._random.random() < self.net.drop:
            self._note("drop", flight)
            self._break(flight.sender, self._hosts[target].name, "drop")
            return
        self._note("send", flight)
        lands_at = self._take_off(flight)
        if not is_exempt and self._random.random() < self.net.duplicate:
            self._note("double", flight)
            self._take_off(_Flight(flight.sender, target, connection, lane, bytes(data)), after=lands_at)

    def hang_up(self, target: InprocTransport, connection: bytes, *, in_order: bool) -> None:
        end = _Flight("", target, connection, Lane.CONTROL, None)
        last_at = self._last_at.get(connection, 0.0)
        for pair, flights in self._held.items():
            if any(flight.connection == connection for flight in flights):
                if in_order:
                    end.sender = pair[0]
                    flights.append(end)
                    return
                flights[:] = [flight for flight in flights if flight.connection != connection]
        now = self._loop.time()
        if not in_order and last_at > now:
            last_at = self._random.uniform(now, last_at)
        self._land_at(max(now, last_at) + _TICK_S, end)

    # -- under way

    def _take_off(self, flight: _Flight, *, after: float | None = None) -> float:
        """When it will land. `after`: it is a copy of what lands then, and comes some time later."""
        pair = flight.sender, self._hosts[flight.receiver].name
        if pair in self._blocked:
            self._held.setdefault(pair, []).append(flight)
            return 0.0
        if after is None:
            at = max(self._loop.time() + self._delay_s(), self._last_at.get(flight.connection, 0.0) + _TICK_S)
        else:
            at = max(self._loop.time(), after) + self._delay_s() + _TICK_S
        if (interval_s := self._slow.get(pair[1])) is not None:
            at = self._read_at[pair[1]] = max(at, self._read_at.get(pair[1], 0.0) + interval_s)
        if after is None:
            self._last_at[flight.connection] = at
        self._land_at(at, flight)
        return at

    def _land_at(self, at: float, flight: _Flight) -> None:
        if flight.receiver.is_dead:
            return
        self._loop.call_at(at, self._land, flight, context=self._hosts[flight.receiver].context())

    def _land(self, flight: _Flight) -> None:
        if flight.receiver.is_dead:
            return
        if flight.data is None:
            self._last_at.pop(flight.connection, None)
            flight.receiver.shut(flight.connection)
        else:
            self._note("land", flight)
            flight.receiver.receive(flight.connection, flight.lane, flight.data)

    # -- facts

    def _alive(self) -> list[tuple[InprocTransport, Process]]:
        return [(transport, self._hosts[transport]) for transport in self.nodes()]

    def _is_blocked(self, one: str, other: str) -> bool:
        """A connection needs both ways."""
        return (one, other) in self._blocked or (other, one) in self._blocked

    def _delay_s(self) -> float:
        return self._random.uniform(*self.net.delay_s)

    def _note(self, what: str, flight: _Flight) -> None:
        data = flight.data
        if data is not None:
            corr = int.from_bytes(data[_CORR_AT], "little")
            receiver = self._hosts[flight.receiver].name
            self._log.add(what, flight.sender, receiver, _LANES[flight.lane], _KINDS.get(data[_KIND_AT], "?"), corr)
