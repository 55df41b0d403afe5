"""Sessions without a loop and without sockets: a network that delivers when told and fails on purpose."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

from myxa.core.ids import PeerKey
from myxa.transport.session.pending import PendingCall, Route
from myxa.transport.session.session import LOOPBACK, Session
from myxa.transport.wire import Endpoints, Lane, Transport


class Net:
    """Delivers what its ends send, one envelope at a time, until a connection is cut."""

    def __init__(self, clock):
        self.clock = clock
        self.ends = {}
        self.flying = deque()
        self.coming_up = deque()
        self.num_connections = 0

    def end(self, node_id, epoch):
        return End(self, PeerKey(node_id, epoch))

    def step(self):
        while self.coming_up:
            end, peer, lane = self.coming_up.popleft()
            end.session.connected(peer, lane)
        if self.flying:
            connection, target, lane, data = self.flying.popleft()
            if target in self.ends and connection in self.ends[target].accepted:
                self.ends[target].session.received(connection, lane, memoryview(data))

    def run(self, limit=10_000):
        while self.flying and limit:
            self.step()
            limit -= 1
        assert limit


class End(Transport):
    """Transport, host and session of one incarnation."""

    def __init__(self, net, key):
        self.counters = Counter()
        self.net, self.key = net, key
        self.endpoints = Endpoints(inproc=str(key))
        self.up = {}
        self.accepted = set()
        self.arrivals = []
        self.effects = Counter()
        self.abandoned = []
        self.fenced_by = []
        self.verdicts = []
        self.load_is = 0
        self.num_flushes = 0
        net.ends[str(key)] = self
        self.session = Session(own=key, name=f"n{key.node_id}", transport=self, host=self, clock=net.clock)

    # transport

    def start(self, sink):
        raise AssertionError

    async def close(self, linger_s):
        raise AssertionError

    def connect(self, peer, endpoints):
        for lane in Lane:
            if (peer, lane) not in self.up:
                self.dial(peer, lane)

    def dial(self, peer, lane):
        self.net.num_connections += 1
        connection = f"{self.net.num_connections}".encode()
        self.up[peer, lane] = connection
        target = self.net.ends.get(str(peer))
        if target is None:
            return
        target.accepted.add(connection)
        greeting = self.session.greeting(peer, lane)
        self.net.flying.append((connection, str(peer), lane, greeting))
        self.net.coming_up.append((self, peer, lane))

    def send(self, peer, lane, parcel):
        connection = self.up.get((peer, lane))
        if connection is None or parcel.is_withdrawn:
            return
        parcel.is_sent = True
        self.net.flying.append((connection, str(peer), lane, bytes(parcel.data)))

    def flush(self):
        self.num_flushes += 1

    def disconnect(self, peer, linger_s):
        for lane in Lane:
            self.up.pop((peer, lane), None)

    def forget(self, source, lane):
        self.accepted.discard(source)

    def cut(self, peer, lane):
        connection = self.up.get((peer, lane))
        if connection is None:
            return
        self.net.ends[str(peer)].accepted.discard(connection)
        self.session.lost(peer, lane, "cut")
        self.dial(peer, lane)

    # host

    def deliver(self, arrival):
        self.arrivals.append(arrival)

    def abandon(self, arrival):
        self.abandoned.append(arrival.envelope.corr)

    def unreachable(self, key, why):
        pass

    def fenced(self, error):
        self.fenced_by.append(error)

    def loop_back(self, lane, data):
        self.net.ends[str(self.key)].session.received(LOOPBACK, lane, memoryview(data))

    def num_waiting(self):
        return self.load_is

    def judged(self, key, verdict, reason):
        self.verdicts.append((key, verdict, reason))

    def crashed(self, error):
        raise error

    # deeds

    def call(self, other, sink, *, deadline_s=None):
        now = self.net.clock.monotonic()
        call = PendingCall(
            target=f"actor{other.key.node_id}", method="do", body=b"[1]", tell=sink.done,
            deadline_at=None if deadline_s is None else now + deadline_s,
        )  # fmt: skip
        route = Route(peer=other.key, endpoints=other.endpoints, actor=0, method=0)
        return self.session.calls.submit(call, route)

    def serve(self):
        """Execute what has arrived."""
        arrivals, self.arrivals = self.arrivals, []
        for arrival in arrivals:
            self.session.serving.begin(arrival)
            self.effects[bytes(arrival.envelope.body)] += 1
            self.session.serving.reply(arrival, arrival.envelope.body, ())


def link_of(one: Any, other: Any) -> Any:
    return one.session._links.find(other.key)


class Sink:
    def __init__(self):
        self.outcomes = []

    def done(self, outcome):
        self.outcomes.append(outcome)
