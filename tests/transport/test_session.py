"""The session layer alone: no loop, no sockets, a clock that moves when told, and a network that fails on purpose."""

from __future__ import annotations

import msgspec
import pytest
from tests.harness.manual_clock import ManualClock
from tests.transport.session_net import Net, Sink, link_of

from myxa.core.errors import DeadlineExceeded, NotSent, PeerDied, StaleEpoch
from myxa.transport.session.frames import Envelope, Kind, decode, encode
from myxa.transport.wire import Lane

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def pair(clock):
    net = Net(clock)
    return net, net.end(2, 1), net.end(3, 1)


def test_the_callee_sees_the_time_that_is_left(pair, clock):
    net, one, two = pair
    one.call(two, Sink(), deadline_s=5)
    clock.advance(2)
    net.run()
    (arrival,) = two.arrivals
    assert arrival.deadline_at == pytest.approx(clock.monotonic() + 5, abs=0.01)  # relative: clocks need not agree
    clock.advance(6)
    with pytest.raises(DeadlineExceeded, match="not executed"):
        two.session.serving.begin(arrival)


def test_a_call_meant_for_another_epoch_is_refused(pair):
    net, one, two = pair
    sink = Sink()
    one.call(two, sink)
    for place, (connection, target, lane, data) in enumerate(net.flying):
        envelope = decode(memoryview(data))
        if isinstance(envelope, Envelope) and envelope.kind is Kind.CALL:
            net.flying[place] = (connection, target, lane, encode(msgspec.structs.replace(envelope, dst_epoch=7)))
    net.run()
    assert isinstance(sink.outcomes[0], StaleEpoch)
    assert two.session.counters["stale"] == 1
    assert two.arrivals == []


def test_a_sender_that_takes_anothers_name_is_not_believed(pair):
    net, one, two = pair
    one.call(two, Sink())
    net.run()
    source = link_of(two, one).sources[0]
    forged = Envelope(kind=Kind.CALL, src_node=9, src_epoch=1, dst_epoch=1, corr=99)
    two.session.received(source, Lane.CONTROL, memoryview(encode(forged)))
    assert two.session.counters["malformed"] == 1
    assert len(two.arrivals) == 1


def test_an_older_incarnation_is_told_that_it_is_over(pair):
    net, one, two = pair
    one.call(two, Sink())
    net.run()
    newer = net.end(2, 2)
    newer.call(two, Sink())
    net.run()
    assert one.fenced_by == []
    assert two.session._links.find(one.key) is None
    one.dial(two.key, Lane.CONTROL)  # the zombie tries again
    net.run()
    assert len(one.fenced_by) == 1
    two.serve()
    net.run()


def test_a_closed_session_hears_nothing_and_opens_nothing(pair):
    net, one, two = pair
    sink = Sink()
    one.call(two, sink)
    net.run()
    one.session.close()
    assert isinstance(sink.outcomes[0], PeerDied)
    net.run()
    assert two.session.peers() == ()  # it heard the goodbye
    newer = net.end(4, 1)
    newer.call(one, Sink())
    net.run()
    assert one.session.peers() == ()
    assert one.arrivals == []
    for target in (newer, one):
        with pytest.raises(NotSent, match="closing"):
            one.call(target, Sink())


@pytest.mark.parametrize(("node_id", "epoch"), [(3, 2), (4, 1)], ids=["a newer incarnation", "another node"])
def test_who_else_listens_at_an_address_is_not_called_in_its_place(pair, node_id, epoch):
    net, one, two = pair
    other = net.end(node_id, epoch)
    net.ends[str(two.key)] = other
    sink, again = Sink(), Sink()
    one.call(two, sink)
    net.run()
    assert sink.outcomes == [] and other.arrivals == []
    one.session.peer_over(two.key, "its process ended")  # the registry knows
    assert isinstance(sink.outcomes[0], PeerDied | NotSent)
    assert node_id != 3 or other.session.counters["hello_stale"] > 0
    one.call(other, again)  # it is not taken for dead itself
    net.run()
    other.serve()
    net.run()
    assert bytes(again.outcomes[0].body) == b"[1]"
