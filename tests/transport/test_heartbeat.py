"""Heartbeats of loops over the bare session: who asks whom, what silence is called, what was declared is believed."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.harness.manual_clock import ManualClock
from tests.transport.session_net import Net, Sink, link_of

from myxa.core.errors import ConfigError
from myxa.core.timeouts import TIMEOUTS
from myxa.transport.session.frames import Envelope, Kind, Malformed, decode, encode
from myxa.transport.session.heartbeat import MAX_UNANSWERED
from myxa.transport.wire import Lane


class Two:
    """Two sessions; the first one waits for an answer of the second."""

    def __init__(self):
        self.clock = ManualClock(1000.0)
        self.net = Net(self.clock)
        self.one, self.two = self.net.end(2, 1), self.net.end(3, 1)
        self.sink = Sink()
        self.one.call(self.two, self.sink)
        self.net.run()
        self.kinds = Counter()

    def live(self, seconds, *, frozen=()):
        """Time passes for all but the frozen ones; what is sent to those waits for them."""
        waiting = []
        for _ in range(round(seconds / TIMEOUTS.wire.tick_s)):
            self.clock.advance(TIMEOUTS.wire.tick_s)
            for end in (self.one, self.two):
                if end not in frozen:
                    end.session.tick()
            while self.net.flying:
                item = self.net.flying[0]
                envelope = decode(memoryview(item[3]))
                assert not isinstance(envelope, Malformed)
                self.kinds[envelope.kind] += 1
                if item[1] in [str(end.key) for end in frozen]:
                    waiting.append(self.net.flying.popleft())
                else:
                    self.net.step()
        self.net.flying.extend(waiting)

    def told(self, end):
        return [verdict for _, verdict, _ in end.verdicts]


@pytest.fixture
def both():
    return Two()


def test_who_waits_asks_and_the_callee_who_hears_it_need_not(both):
    both.live(20)
    assert both.told(both.one) == both.told(both.two) == []
    assert both.kinds[Kind.PING] == both.kinds[Kind.PONG]
    assert 14 <= both.kinds[Kind.PING] <= 21, "one exchange a second, not two"


def test_without_business_nobody_asks(both):
    both.two.serve()
    both.net.run()
    assert both.sink.outcomes
    both.live(30)
    assert both.kinds == {}
    both.live(30, frozen=[both.two])
    assert both.told(both.one) == []


def test_silence_is_suspect_then_hung_and_the_call_stays_pending(both):
    both.live(30)
    both.live(15, frozen=[both.two])
    assert both.told(both.one) == ["suspect", "hung"]
    key, _, reason = both.one.verdicts[1]
    assert key == both.two.key
    assert "its event loop gave no sign of life for 1" in reason
    assert both.sink.outcomes == [], "suspicion informs; it ends nothing"
    assert link_of(both.one, both.two) is not None
    both.live(2)
    assert both.told(both.one) == ["suspect", "hung", "recovered"]
    assert "it answers again after 1" in both.one.verdicts[2][2]
    both.two.serve()
    both.net.run()
    assert len(both.sink.outcomes) == 1
    assert both.one.session.counters["hung"] == 1


def test_who_hangs_does_not_find_an_inbox_full_of_questions(both):
    both.live(600, frozen=[both.two])
    assert both.kinds[Kind.PING] < MAX_UNANSWERED + 600 / 5 + 2
    both.live(2)
    assert both.told(both.one)[-1] == "recovered"


def test_declared_busy_time_is_sent_ahead_and_believed(both):
    both.live(5)
    before = both.two.num_flushes
    with both.two.session.heartbeat.busy("actor3", 600, "torch.compile"):
        assert both.two.num_flushes == before + 2, "it leaves before the block begins"
        both.net.run()
        both.live(599, frozen=[both.two])  # the loop is blocked
        assert both.told(both.one) == []
        assert both.two.session.heartbeat.busy_s == pytest.approx(1, abs=0.1)
    both.net.run()
    both.live(14, frozen=[both.two])
    assert both.told(both.one) == ["suspect", "hung"], "after the block the usual bounds hold again"


def test_who_blocks_longer_than_declared_is_found(both):
    busy = both.two.session.heartbeat.busy("actor3", 60, "first forward")
    busy.__enter__()
    both.net.run()
    both.live(59, frozen=[both.two])
    assert both.told(both.one) == []
    both.live(16, frozen=[both.two])
    assert both.told(both.one) == ["suspect", "hung"]
    assert "it had declared actor3: first forward" in both.one.verdicts[1][2]
    busy.__exit__(None, None, None)


def test_the_longest_declaration_counts(both):
    heartbeat = both.two.session.heartbeat
    with heartbeat.busy("actor3", 600, "load"):
        with heartbeat.busy("actor3", 10, "forward"):
            both.net.run()
        both.net.run()
        both.live(300, frozen=[both.two])
        assert both.told(both.one) == []
    assert heartbeat.busy_s == 0


@pytest.mark.parametrize("limit_s", [0, -1, float("nan"), float("inf"), 1e9])
def test_a_limit_that_is_none_is_refused(both, limit_s):
    with (
        pytest.raises(ConfigError, match="a limit is more than 0 s"),
        both.two.session.heartbeat.busy("a", limit_s, "x"),
    ):
        raise AssertionError


def test_a_peer_cannot_declare_itself_busy_for_ever(both):
    envelope = Envelope(kind=Kind.PING, src_node=3, src_epoch=1, dst_epoch=1, body=b'{"busy_s":1e300}')
    source = link_of(both.one, both.two).sources[Lane.CONTROL]
    both.one.session.received(source, Lane.CONTROL, memoryview(encode(envelope)))
    both.clock.advance(24 * 3600)
    both.one.session.tick()  # a day in which this side looked away
    both.live(40, frozen=[both.two])
    assert both.told(both.one) == ["suspect", "hung"]


@pytest.mark.parametrize("body", [b"[]", b'{"busy_s":"x"}', b'{"lag":1}', b"\xff", b'{"busy_s":-5}'])
def test_vitals_that_cannot_be_read_are_counted(both, body):
    envelope = Envelope(kind=Kind.PING, src_node=3, src_epoch=1, dst_epoch=1, body=body)
    source = link_of(both.one, both.two).sources[Lane.CONTROL]
    both.one.session.received(source, Lane.CONTROL, memoryview(encode(envelope)))
    assert both.one.session.counters["malformed_vitals"] == 1


def test_a_pause_of_the_observer_blames_nobody(both):
    both.live(10)
    both.clock.advance(3600)
    both.one.session.tick()
    both.two.session.tick()
    both.live(10)
    assert both.told(both.one) == both.told(both.two) == []


def test_a_hung_peer_is_reported_with_what_waits_there(both):
    both.two.load_is = 3
    both.live(3)
    both.live(15, frozen=[both.two])
    assert "3 messages were waiting" in both.one.verdicts[-1][2]


def test_who_is_gone_is_not_judged(both):
    both.live(3)
    both.one.session.peer_over(both.two.key, "its process exited")
    both.live(30, frozen=[both.two])
    assert both.told(both.one) == []


def test_a_broken_connection_is_no_recovery(both):
    both.live(5)
    both.two.cut(both.one.key, Lane.CONTROL)
    both.one.cut(both.two.key, Lane.CONTROL)
    both.live(5)
    assert both.told(both.one) == []
