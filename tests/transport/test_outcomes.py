"""How every kind of call ends, for every moment at which something can fail: the table of docs/walk-call.md,
executed."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from tests.harness.manual_clock import ManualClock
from tests.transport.session_net import End, Net, Sink

from myxa.core.errors import (
    Draining,
    MyxaError,
    NotExecuted,
    NotSent,
    OutcomeUnknown,
    Overloaded,
    PeerDied,
)
from myxa.core.ids import PeerKey
from myxa.transport.session import session
from myxa.transport.wire import Lane

MOMENTS = ("queued", "on the way", "arrived", "running", "answered")
"""How far the call has come when it happens: still in our queue, sent, in the callee's mailbox, begun, answered."""
DEADLINE_S = 10.0


class Party(End):
    """An end whose network can be slow to take things, and whose host can refuse."""

    held: list[tuple[PeerKey, Lane, Any]] | None
    refusal: MyxaError | None

    def __init__(self, net, key):
        self.held = None
        self.refusal = None
        super().__init__(net, key)

    def send(self, peer, lane, parcel):
        if self.held is None:
            super().send(peer, lane, parcel)
        else:
            self.held.append((peer, lane, parcel))

    def let_go(self):
        held, self.held = self.held or [], None
        for item in held:
            super().send(*item)

    def deliver(self, arrival):
        if self.refusal is not None:
            raise self.refusal
        super().deliver(arrival)


class Scene:
    """One call, brought as far as a moment."""

    def __init__(self, moment):
        self.clock = ManualClock(50.0)
        self.net = Net(self.clock)
        self.one, self.two = Party(self.net, PeerKey(2, 1)), Party(self.net, PeerKey(3, 1))
        self.sink = Sink()
        self.begun = []
        self.one.call(self.two, Sink())  # so that there is a connection
        self.net.run()
        self.two.serve()
        self.net.run()
        self.two.effects.clear()
        if moment == "queued":
            self.one.held = []
        self.submit()
        if moment in ("arrived", "running", "answered"):
            self.net.run()
        if moment in ("running", "answered"):
            self.begin()
            self.net.run()
        if moment == "answered":
            self.answer()

    def submit(self):
        self.one.call(self.two, self.sink, deadline_s=DEADLINE_S)

    def begin(self):
        """The callee's handlers start."""
        arrivals, self.two.arrivals = self.two.arrivals, []
        for arrival in arrivals:
            self.two.session.serving.begin(arrival)
            self.two.effects["call"] += 1
            self.begun.append(arrival)

    def answer(self):
        serving = self.two.session.serving
        for arrival in self.begun:
            serving.reply(arrival, b"[8]", ())
        self.begun.clear()

    def settle(self):
        """Whatever can still happen does, short of the deadline."""
        self.net.run()  # who was cut off is connected again
        self.one.let_go()
        for _ in range(8):
            self.net.run()
            self.begin()
            self.answer()
        for _ in range(int(DEADLINE_S / 2)):
            self.pass_time(1.0)

    def pass_time(self, seconds):
        self.clock.advance(seconds)
        for end in (self.one, self.two):
            end.session.tick()
        self.net.run()
        self.begin()
        self.answer()
        self.net.run()

    # what happens

    def callee_dies(self):
        self.net.flying.clear()
        self.begun.clear()
        self.two.arrivals.clear()
        del self.net.ends[str(self.two.key)]
        self.one.session.peer_over(self.two.key, "its process was killed by SIGKILL")

    def connection_breaks(self):
        self.net.flying.clear()
        for near, far in ((self.one, self.two), (self.two, self.one)):
            for lane in Lane:
                near.cut(far.key, lane)
        self.settle()

    def deadline_passes(self):
        if self.one.held is None:
            self.net.flying.clear()
        self.clock.advance(DEADLINE_S + 0.1)
        self.one.session.tick()

    def we_close(self):
        self.one.session.close()

    def actor_ends(self):
        """As `actor_runner.py` ends an actor: what waits is refused, what runs is cut short."""
        serving = self.two.session.serving
        if self.one.held is not None or self.net.flying:
            self.two.refusal = Draining("actor3 is shutting down")
        for arrival in self.two.arrivals:
            serving.fail(arrival, Draining("actor3 stopped before it came to do"))
        for arrival in self.begun:
            serving.fail(arrival, PeerDied("actor3 stopped while it ran do"))
        self.two.arrivals.clear()
        self.begun.clear()
        self.one.let_go()
        self.net.run()

    def actor_ends_and_its_words_are_lost(self):
        self.net.flying.clear()
        self.begun.clear()
        self.two.arrivals.clear()
        self.one.session.calls.on_actor_gone("actor3", "it failed: boom")
        self.clock.advance(1.1)
        self.one.session.tick()

    # what became of it

    @property
    def outcome(self):
        assert len(self.sink.outcomes) <= 1, "a call ends once"
        if not self.sink.outcomes:
            return "waits"
        (outcome,) = self.sink.outcomes
        for kind, word in ((NotSent, "not sent"), (NotExecuted, "not executed"), (OutcomeUnknown, "unknown")):
            if isinstance(outcome, kind):
                assert outcome.callee == "actor3"
                return word
        assert not isinstance(outcome, MyxaError), outcome
        return "done"

    def check_truth(self):
        effects = self.two.effects["call"]
        if self.outcome in ("not sent", "not executed"):
            assert effects == 0, "it said that nothing had happened"
        if self.outcome == "done":
            assert effects >= 1
        assert effects <= 1, "at most once"


TABLE = {
    "callee_dies": ("not sent", "unknown", "unknown", "unknown", "unknown"),
    # what is lost with its connection is never sent twice: it waits for its deadline
    "connection_breaks": ("done", "waits", "done", "done", "waits"),
    "deadline_passes": ("not sent", "unknown", "unknown", "unknown", "unknown"),
    "we_close": ("not sent", "unknown", "unknown", "unknown", "unknown"),
    "actor_ends": ("not executed", "not executed", "not executed", "unknown", "done"),
    "actor_ends_and_its_words_are_lost": ("not sent", "unknown", "unknown", "unknown", "unknown"),
}
"""How a call ends, by the moment."""


@pytest.mark.parametrize(("what", "moment"), list(itertools.product(TABLE, MOMENTS)))
def test_every_call_ends_as_the_table_says(what, moment):
    scene = Scene(moment)
    getattr(scene, what)()
    assert scene.outcome == TABLE[what][MOMENTS.index(moment)]
    scene.check_truth()
    if scene.outcome == "waits":
        scene.clock.advance(2 * DEADLINE_S)
        scene.one.session.tick()
        assert scene.outcome in ("unknown", "not sent"), "nothing waits for ever"
        scene.check_truth()
    assert len(scene.one.session.calls) == 0


def test_what_is_refused_was_not_executed():
    scene = Scene("queued")
    scene.two.refusal = Overloaded("mailbox is full")
    scene.one.let_go()
    scene.net.run()
    assert scene.outcome == "not executed"
    assert scene.two.effects["call"] == 0


def test_another_version_is_found_out_when_the_two_meet(monkeypatch):
    clock = ManualClock()
    net = Net(clock)
    one = Party(net, PeerKey(2, 1))
    protocol = session.PROTOCOL
    monkeypatch.setattr(session, "PROTOCOL", "0ther")  # of the second process only: the first has greeted before it
    two = Party(net, PeerKey(3, 1))
    scene = Scene.__new__(Scene)
    scene.clock, scene.net, scene.one, scene.two, scene.sink = clock, net, one, two, Sink()
    greeting = two.session.greeting(one.key, Lane.CONTROL)
    monkeypatch.setattr(session, "PROTOCOL", protocol)
    one.held = []
    scene.submit()
    one.accepted.add(b"their way")
    one.session.received(b"their way", Lane.CONTROL, memoryview(greeting))
    assert one.session.counters["hello_of_another_version"] == 1
    assert scene.outcome == "not sent"
    assert "n3 speaks protocol 0ther, this process" in str(scene.sink.outcomes[0])
    assert "run the same version" in str(scene.sink.outcomes[0])
    assert one.session.peers() == ()
