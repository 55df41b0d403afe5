"""The small sans-IO parts: credit, errors as data, directory, registry rules."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myxa.core import errors
from myxa.core.errors import (
    EngineError,
    MyxaError,
    NotExecuted,
    PeerDied,
    RemoteError,
    StaleEpoch,
)
from myxa.transport.registry.directory import Directory, HostedActor
from myxa.transport.registry.registry import KEPT_UPDATES, RegistryState
from myxa.transport.session.faults import decode_fault, encode_fault, fault_of
from myxa.transport.session.pending import UNIT_BYTES, WINDOW_UNITS, cost_of
from myxa.transport.wire import Endpoints

# -- credit


def test_cost_counts_messages_and_bytes():
    assert cost_of(0) == cost_of(1) == cost_of(UNIT_BYTES) == 1
    assert cost_of(UNIT_BYTES + 1) == 2
    assert cost_of(1 << 40) == WINDOW_UNITS


# -- errors as data


def all_errors(root: type[MyxaError]) -> list[type[MyxaError]]:
    return [
        root,
        *(e for child in root.__subclasses__() if child.__module__ == errors.__name__ for e in all_errors(child)),
    ]


@pytest.mark.parametrize("kind", all_errors(MyxaError), ids=lambda k: k.__name__)
def test_every_class_of_the_tree_arrives_as_itself(kind):
    back = decode_fault(encode_fault(kind("it broke", remedy="mend it")), "rollout/0", "draw", is_refusal=False)
    assert type(back) is kind
    assert "it broke" in str(back)
    if isinstance(back, errors.CallError):
        assert back.callee == "rollout/0"


@pytest.mark.parametrize(
    ("error", "detail"),
    [
        (errors.MemberFailed("no", kind="sandbox"), "kind"),
    ],
)
def test_details_survive(error, detail):
    back = decode_fault(encode_fault(error), "a", "b", is_refusal=isinstance(error, NotExecuted))
    assert type(back) is type(error)
    assert getattr(back, detail) == getattr(error, detail)


def test_a_subclass_of_ones_own_arrives_as_its_nearest_known_ancestor():
    class GlassEngineError(EngineError):
        pass

    back = decode_fault(encode_fault(GlassEngineError("cracked")), "a", "b", is_refusal=False)
    assert type(back) is EngineError


def test_an_outcome_of_another_call_is_not_mistaken_for_this_ones():
    inner = PeerDied("buffer died")
    inner.callee = "buffer"
    back = decode_fault(encode_fault(inner), "rollout/0", "go", is_refusal=False)
    assert type(back) is RemoteError
    assert back.remote_type == "PeerDied"
    assert "buffer died" in str(back)


def test_a_refusal_is_always_of_a_class_that_means_not_executed():
    back = decode_fault(encode_fault(EngineError("x")), "a", "b", is_refusal=True)
    assert isinstance(back, NotExecuted)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=80))
def test_unreadable_errors_are_errors_too(body):
    assert isinstance(decode_fault(body, "a", "b", is_refusal=False), MyxaError)
    assert isinstance(decode_fault(b'{"kind":"SystemExit","message":' + body, "a", "b", is_refusal=True), NotExecuted)


def test_unknown_classes_are_never_made():
    body = b'{"kind":"KeyboardInterrupt","message":"x"}'
    assert type(decode_fault(body, "a", "b", is_refusal=False)) is RemoteError


def test_tracebacks_are_text_and_bounded():
    def deep(n):
        return deep(n - 1) if n else 1 / 0

    with pytest.raises(ZeroDivisionError) as raised:
        deep(500)
    fault = fault_of(raised.value)
    assert fault.kind == "RemoteError"
    assert len(fault.traceback) <= 20_000


# -- directory and registry

HERE = Endpoints(inproc="x")


def actor(name: str, index: int = 0, *handlers: str) -> HostedActor:
    return HostedActor(name=name, index=index, handlers=handlers)


def test_only_the_current_incarnation_may_announce():
    state = RegistryState()
    state.register("a", HERE)
    state.register("a", HERE)
    with pytest.raises(StaleEpoch, match="the newest is 2"):
        state.announce("a", 1, (), {})
    state.announce("a", 2, (actor("x"),), {})
    state.register("b", HERE)
    with pytest.raises(StaleEpoch, match="x is already in a"):
        state.announce("b", 1, (actor("x"),), {})


def follow(state: RegistryState, mirror: Directory):
    events = []
    for update in state.since(mirror.version):
        changes = mirror.apply(update)
        events += [(e.kind, e.name, e.epoch) for e in changes[0]]
    return events


def test_a_snapshot_tells_what_changed_meanwhile():
    state, mirror = RegistryState(), Directory()
    state.register("a", HERE)
    state.announce("a", 1, (actor("x"),), {})
    state.register("b", HERE)
    state.announce("b", 1, (actor("y"),), {})
    follow(state, mirror)
    state.register("a", HERE)
    state.announce("a", 2, (actor("x"),), {})
    state.depart("b", 1, "gone")
    for _ in range(KEPT_UPDATES + 1):
        state.register("c", HERE)
    (snapshot,) = state.since(mirror.version)
    assert snapshot.is_snapshot
    events, gone = mirror.apply(snapshot)
    assert [(e.kind, e.name, e.epoch) for e in events] == [("down", "y", 1), ("restarted", "x", 2)]
    assert {(d.name, d.epoch) for d in gone} == {("a", 1), ("b", 1)}


def test_old_updates_have_no_effect():
    state, mirror = RegistryState(), Directory()
    for _ in range(4):
        state.register("a", HERE)
    updates = state.since(0)
    mirror.apply(state.since(-1)[0])
    assert mirror.apply(updates[0]) == ([], [])
    assert mirror.epoch_of("a") == 4
