"""The detector on simulated arrival times: what hangs is found in bounds, what said that it would be busy is left be."""

from __future__ import annotations

import random

import pytest

from myxa.core.failure_detector import DEFAULT_POLICY, FailureDetector

LOOK_S = 0.25
HUNG_GOAL_S = 15.0


@pytest.fixture
def lots() -> random.Random:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")  # pytest shows it with a failure
    return random.Random(seed)


def beat(detector: FailureDetector, start: float, num: int, gap_s=lambda: 1.0) -> float:
    now = start
    for _ in range(num):
        now += gap_s()
        detector.heard(now)
    return now


def verdicts(detector: FailureDetector, heard_at: float, until_s: float) -> dict[str, float]:
    """State -> seconds of silence after which a look every LOOK_S entered it."""
    found: dict[str, float] = {}
    for look in range(1, int(until_s / LOOK_S)):
        for state in detector.check(heard_at + look * LOOK_S):
            assert state not in found, "told once"
            found[state] = look * LOOK_S
    return found


@pytest.mark.parametrize("jitter_s", [0.0, 0.05, 0.3, 1.0])
def test_a_peer_that_falls_silent_is_suspect_then_hung_in_bounds(lots: random.Random, jitter_s: float) -> None:
    for _ in range(50):
        detector = FailureDetector(100.0)
        last = beat(detector, 100.0, lots.randrange(300), lambda: 1.0 + jitter_s * lots.expovariate(1.0))
        found = verdicts(detector, last, 40)
        assert list(found) == ["suspect", "hung"]
        assert 3.0 < found["suspect"] <= found["hung"]
        assert 10.0 < found["hung"] <= HUNG_GOAL_S - LOOK_S


def test_an_irregular_peer_is_given_more_time_but_never_more_than_the_limit(lots: random.Random) -> None:
    regular, irregular = FailureDetector(0.0), FailureDetector(0.0)
    beat(regular, 0.0, 200)
    last = beat(irregular, 0.0, 200, lambda: lots.choice((1.0, 1.0, 1.0, 3.5)))
    assert regular.bound_s("suspect") < irregular.bound_s("suspect")
    assert regular.bound_s("hung") < irregular.bound_s("hung") == DEFAULT_POLICY.limit_s
    assert verdicts(irregular, last, 40)["hung"] <= HUNG_GOAL_S - LOOK_S


def test_a_sign_of_life_ends_any_suspicion() -> None:
    detector = FailureDetector(0.0)
    assert detector.heard(1.0) is False
    assert detector.check(7.0) == ("suspect",)
    assert detector.heard(7.1) is True
    assert detector.state == "ok"
    assert detector.check(7.1 + 20) == ("suspect", "hung"), "a late look finds both, in order"
    assert detector.heard(40.0) is True
    assert detector.check(40.1) == ()


def test_what_a_hung_peer_did_not_say_is_not_learned() -> None:
    detector = FailureDetector(0.0)
    last = beat(detector, 0.0, 100)
    before = detector.bound_s("hung")
    detector.check(last + 3600)
    detector.heard(last + 3600)
    assert detector.bound_s("hung") == before


def test_the_end_of_a_busy_time_brings_the_usual_bounds_back() -> None:
    detector = FailureDetector(0.0)
    detector.heard(1.0, busy_s=600.0)
    detector.heard(400.0)  # done early
    assert detector.check(400.0 + HUNG_GOAL_S) == ("suspect", "hung")
    regular = FailureDetector(0.0)
    regular.heard(1.0)
    assert detector.bound_s("hung") == regular.bound_s("hung"), "the busy gap taught nothing"


def test_a_pause_of_the_observer_is_nobodys_silence() -> None:
    detector = FailureDetector(0.0)
    last = beat(detector, 0.0, 10)
    detector.forgive(last + 3600.0, 3600.0)
    assert detector.check(last + 3600.0 + 1.0) == ()
    detector.forgive(last + 3600.0, 3600.0)
    assert detector.silence_s(last + 3600.0 + 1.0) == 1.0, "no credit beyond now"
    assert detector.check(last + 3600.0 + HUNG_GOAL_S) == ("suspect", "hung")


def test_time_in_which_nobody_looked_does_not_count() -> None:
    detector = FailureDetector(0.0)
    last = beat(detector, 0.0, 10)
    detector.resume(last + 500.0)
    assert detector.check(last + 501.0) == ()
    detector.heard(last + 502.0)
    assert detector.bound_s("suspect") < 5.0, "the gap of 500 s was not learned"


def test_no_false_verdict_in_a_day_of_jitter_and_declared_busy_time(lots: random.Random) -> None:
    """86,400 s: a beat a second, late by a random time, stalls below the acceptable pause that nobody declared, and
    declared busy periods that hold the interpreter lock for up to their limit. Then it hangs, and is found."""
    detector = FailureDetector(0.0)
    now, num_busy = 0.0, 0
    look = 0.0

    def wait_until(moment: float) -> None:
        nonlocal look
        while look < moment:
            assert detector.check(look) == (), f"suspected at {look:.1f} s"
            look += LOOK_S

    while now < 86_400.0:
        if lots.random() < 0.003:
            limit_s = lots.uniform(1.0, 600.0)
            num_busy += 1
            detector.heard(now, busy_s=limit_s)  # sent ahead
            now += limit_s * lots.random()
            wait_until(now)
            detector.heard(now)  # and taken back
            continue
        stall_s = lots.uniform(0.0, 2.0) if lots.random() < 0.01 else 0.0
        now += 1.0 + min(1.5, lots.expovariate(8.0)) + stall_s
        wait_until(now)
        detector.heard(now)
    assert num_busy > 50
    found = verdicts(detector, now, 40)
    assert 10.0 < found["hung"] <= HUNG_GOAL_S - LOOK_S
