"""Routing as arithmetic: least loaded, sessions stay, nobody is buried."""

from __future__ import annotations

import random

import pytest

from myxa.actors.engines import engine_pool
from myxa.actors.engines.engine_pool import SLACK, SPREAD, Choice


def test_without_a_session_the_least_loaded_serves_and_names_break_ties():
    choice = Choice()
    assert choice.pick("", {"a": 3, "b": 1, "c": 1}) == "b"
    with pytest.raises(ValueError, match="no server"):
        choice.pick("s", {})


def test_a_session_stays_until_its_server_is_overloaded_or_gone():
    choice = Choice()
    assert choice.pick("s", {"a": 0, "b": 0}) == "a"
    assert choice.pick("s", {"a": SLACK, "b": 0}) == "a"
    assert choice.pick("s", {"a": SLACK + 1, "b": 0}) == "b"
    assert choice.pick("s", {"a": 0, "b": SLACK}) == "b"
    assert choice.pick("s", {"a": 5}) == "a"
    assert choice.pick("s", {"a": 5, "b": 0}) == "a"


def test_forgetting_is_bounded(monkeypatch):
    monkeypatch.setattr(engine_pool, "MAX_SESSIONS", 3)
    choice = Choice()
    for name in "stuv":
        choice.pick(name, {"a": 0, "b": 5})
    assert choice.pick("v", {"a": 5, "b": 0}) == "a"
    assert choice.pick("s", {"a": 5, "b": 0}) == "b"


def test_no_server_is_ever_far_above_the_least_loaded():
    """A few popular sessions, arrivals and ends at random."""
    rng = random.Random(3)
    choice, loads = Choice(), {"a": 0, "b": 0, "c": 0}
    for _ in range(20_000):
        if rng.random() < 0.52 or not any(loads.values()):
            before = dict(loads)
            name = choice.pick(str(rng.choice([1, 1, 1, 2, rng.randrange(1000)])), loads)
            assert before[name] <= SPREAD * min(before.values()) + SLACK
            loads[name] += 1
        else:
            name = rng.choice([n for n, load in loads.items() if load])
            loads[name] -= 1
