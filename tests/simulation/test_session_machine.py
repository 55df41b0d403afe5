"""The session layer against a small reference model, by a Hypothesis state machine: no loop, no sockets, no simulator.

One caller, one callee over its incarnations. The model knows what was asked and what was done; it says which ends are
allowed. With no fault at all it allows only success.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.transport.session_net import End, Net

from myxa.core.clock import ManualClock
from myxa.core.errors import (
    CallError,
    DeadlineExceeded,
    NotExecuted,
    NotSent,
    OutcomeUnknown,
    RemoteError,
)
from myxa.core.ids import PeerKey
from myxa.transport.session.frames import Envelope, Kind
from myxa.transport.session.links import WINDOW_UNITS
from myxa.transport.session.pending import CallOrder, Route
from myxa.transport.wire import Lane

BIG = b" " * 300_000


# -- the reference model


@dataclass
class Asked:
    """One thing the caller asked for. Also its sink."""

    model: Model
    name: str
    kind: str
    deadline_at: float | None
    corr: int = 0
    runs: Counter[int] = field(default_factory=Counter)
    """Epoch of the callee -> how often it ran there."""
    is_over: bool = False
    has_failed: bool = False
    """The handler raised."""

    def done(self, outcome: Any) -> None:
        assert not self.is_over, f"{self.name} ended twice"
        self.is_over = True
        getattr(self, f"_{self.kind}_ended")(outcome)
        if isinstance(outcome, CallError) and not self.has_failed:
            assert self.model.num_faults, f"{self.name} failed although nothing went wrong: {outcome!r}"
        if isinstance(outcome, NotSent | NotExecuted):
            assert not self.runs, f"{self.name} ended with {outcome!r}, but ran"
        if isinstance(outcome, DeadlineExceeded):
            assert self.deadline_at is not None
            assert self.model.clock.monotonic() >= self.deadline_at

    def _call_ended(self, outcome: Any) -> None:
        assert self.runs.total() <= 1, f"{self.name} ran {self.runs}"
        if isinstance(outcome, Envelope):
            (epoch,) = self.runs
            assert bytes(outcome.body).strip() == f"{self.name} by {epoch}".encode()
        else:
            assert isinstance(outcome, NotSent | NotExecuted | OutcomeUnknown | RemoteError), outcome

    def _put_ended(self, outcome: Any) -> None:
        if isinstance(outcome, Envelope):
            assert self.model.disk[self.name] == 1, f"{self.name} was acked, {self.model.disk[self.name]} times there"
        else:
            assert isinstance(outcome, NotSent | NotExecuted | OutcomeUnknown | RemoteError), outcome


@dataclass
class Model:
    clock: ManualClock
    asked: dict[str, Asked] = field(default_factory=dict)
    disk: Counter[str] = field(default_factory=Counter)
    """The callee's own ledger; outlives its incarnations."""
    num_faults: int = 0

    def ask(self, kind: str, deadline_s: float | None) -> Asked:
        at = None if deadline_s is None else self.clock.monotonic() + deadline_s
        made = Asked(self, f"{kind}{len(self.asked)}", kind, at)
        self.asked[made.name] = made
        return made

    @property
    def open(self) -> list[Asked]:
        return [one for one in self.asked.values() if not one.is_over]

    def run(self, name: str, epoch: int) -> None:
        asked = self.asked[name]
        asked.runs[epoch] += 1
        if asked.kind == "put":
            assert asked.runs[epoch] == 1 or asked.has_failed, f"{name} ran twice in one incarnation"
            self.disk[name] = 1


# -- the surroundings of a session


class Wire(Net):
    """Each connection keeps its order, nothing more is promised."""

    def come_up(self) -> None:
        """Say of the connections that were made that they are there."""
        while self.coming_up:
            end, peer, lane = self.coming_up.popleft()
            if (peer, lane) in end.up:
                end.session.connected(peer, lane)

    def busy(self) -> list[bytes]:
        """Connections with something on its way."""
        ends = self.ends
        return list(dict.fromkeys(name for name, to, _, _ in self.flying if to in ends and name in ends[to].accepted))

    def head(self, name: bytes) -> Any:
        return next(item for item in self.flying if item[0] == name)

    def deliver(self, name: bytes, *, keep: bool = False) -> None:
        self.come_up()
        item = self.head(name)
        if not keep:
            self.flying.remove(item)
        _, target, lane, data = item
        if target in self.ends and name in self.ends[target].accepted:
            self.ends[target].session.received(name, lane, memoryview(bytearray(data)))


class Party(End):
    """Transport and host of one session."""

    def deliver(self, arrival: Any) -> None:
        self.arrivals.append(arrival)

    def abandon(self, arrival: Any) -> None:
        if not arrival.envelope.key and arrival in self.arrivals:
            self.arrivals.remove(arrival)

    def fenced(self, error: Any) -> None:
        raise AssertionError(error)


# -- the machine


class SessionMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock(100.0)
        self.model = Model(self.clock)
        self.wire = Wire(self.clock)
        self.caller = Party(self.wire, PeerKey(2, 1))
        self.callee = Party(self.wire, PeerKey(3, 1))

    # intents of the caller

    def submit(self, asked: Asked, body: bytes) -> None:
        order = CallOrder(
            target="callee", method="do", schema="x", kind=asked.kind, body=body, deadline_at=asked.deadline_at,  # pyright: ignore[reportArgumentType]
            is_resendable=asked.kind == "put", key=asked.name.encode().ljust(16) if asked.kind == "put" else b"",
        )  # fmt: skip
        asked.corr = self.caller.session.calls.submit(order, self.route(), asked)

    def route(self) -> Route:
        return Route(peer=self.callee.key, endpoints=self.callee.endpoints, actor=0, method=0)

    @rule(deadline_s=st.sampled_from([0.5, 4.0, 30.0]), is_big=st.booleans())
    def call(self, deadline_s: float, is_big: bool) -> None:
        asked = self.model.ask("call", deadline_s)
        self.submit(asked, asked.name.encode() + (BIG if is_big else b""))

    @rule(deadline_s=st.sampled_from([8.0, 100.0, None]))
    def put(self, deadline_s: float | None) -> None:
        asked = self.model.ask("put", deadline_s)
        self.submit(asked, asked.name.encode())

    @precondition(lambda self: self.model.open)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        asked = data.draw(st.sampled_from(self.model.open))
        asked.is_over = True  # `done` fails from now on
        self.model.num_faults += 1  # the callee may have been about to answer something else on its behalf
        self.caller.session.calls.cancel(asked.corr)

    # the network

    @precondition(lambda self: self.wire.busy())
    @rule(data=st.data(), count=st.integers(1, 8))
    def deliver(self, data: st.DataObject, count: int) -> None:
        for _ in range(count):
            if busy := self.wire.busy():
                self.wire.deliver(data.draw(st.sampled_from(busy)))

    @precondition(lambda self: self.loseable())
    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        self.wire.deliver(data.draw(st.sampled_from(self.loseable())), keep=True)

    def loseable(self) -> list[bytes]:
        return [name for name in self.wire.busy() if self.wire.head(name)[3][3] != Kind.HELLO]

    @rule(lane=st.sampled_from(list(Lane)), is_mine=st.booleans())
    def connect(self, lane: Lane, is_mine: bool) -> None:
        """A connection breaks and is made again."""
        self.model.num_faults += 1
        one, other = (self.caller, self.callee) if is_mine else (self.callee, self.caller)
        one.cut(other.key, lane)

    # the callee

    @precondition(lambda self: self.callee.arrivals)
    @rule(place=st.integers(0, 50), is_well=st.sampled_from([True, True, True, False]))
    def reply(self, place: int, is_well: bool) -> None:
        arrivals, serving = self.callee.arrivals, self.callee.session.serving
        arrival = arrivals.pop(place % len(arrivals))
        name = bytes(arrival.envelope.body).decode().strip()
        asked = self.model.asked[name]
        try:
            serving.begin(arrival)
        except CallError as error:
            serving.fail(arrival, error)
            return
        self.model.run(name, self.callee.key.epoch)
        if not is_well:
            asked.has_failed = True
            serving.fail(arrival, ValueError("the handler raised"))
        else:
            big = BIG if len(arrival.envelope.body) > len(BIG) else b""
            serving.reply(arrival, f"{name} by {self.callee.key.epoch}".encode() + big, ())

    @rule()
    def restart(self) -> None:
        self.model.num_faults += 1
        old = self.callee
        del self.wire.ends[str(old.key)]
        self.callee = Party(self.wire, PeerKey(3, old.key.epoch + 1))
        self.caller.session.peer_over(old.key, "it was killed")
        self.caller.session.calls.on_located("callee", lambda order: self.route())

    # time

    @rule(seconds=st.sampled_from([0.1, 1.0, 6.0, 25.0]))
    def expire(self, seconds: float) -> None:
        if seconds > 0.1:
            self.model.num_faults += 1  # deadlines may pass
        self.clock.advance(seconds)
        self.tick()

    def tick(self) -> None:
        self.wire.come_up()
        self.caller.session.tick()
        self.callee.session.tick()

    # what holds at any time

    @invariant()
    def both_know_what_is_open(self) -> None:
        pending = self.caller.session.calls._pending
        assert {one.corr for one in self.model.open} == set(pending)

    @invariant()
    def credit_is_kept(self) -> None:
        for end in (self.caller, self.callee):
            for link in end.session._links.all():
                for lane in Lane:
                    window = link.windows[lane]
                    assert 0 <= window.num_units == sum(window.unanswered.values()) <= WINDOW_UNITS

    def teardown(self) -> None:
        """Without further faults everything ends, and nothing is left."""
        for _ in range(400):
            while busy := self.wire.busy():
                self.wire.deliver(busy[0])
            while self.callee.arrivals:
                self.reply(0, True)
            if self.wire.busy():
                continue
            if not self.model.open:
                break
            self.model.num_faults += 1  # something was lost, or a deadline passes now
            self.clock.advance(1.0)
            self.tick()
        assert not self.model.open, f"never ended: {[one.name for one in self.model.open]}"
        self.clock.advance(1.0)
        self.tick()
        while busy := self.wire.busy():
            self.wire.deliver(busy[0])
        calls = self.caller.session.calls
        assert (len(calls), calls.parked_targets) == (0, ())
        for end in (self.caller, self.callee):
            for link in end.session._links.all():
                assert not link.pending
                assert not link.served
                assert not any(link.waiting)
                assert not any(window.num_units for window in link.windows)


SessionMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=60, deadline=None)
TestSession = SessionMachine.TestCase


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_the_session_keeps_to_the_model_for_long() -> None:
    machine = type("LongMachine", (SessionMachine,), {})
    case = machine.TestCase
    case.settings = settings(
        max_examples=int(os.environ.get("SIM_EXAMPLES", "2000")), stateful_step_count=100, deadline=None,
    )  # fmt: skip
    case("runTest").runTest()
