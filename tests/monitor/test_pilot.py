"""The autopilot's policy on a model of a run: few moves, no way back, near the best setting; and who stops it."""

from __future__ import annotations

import random
from collections.abc import Container
from dataclasses import dataclass, field

import pytest

from myxa.core.knobs import KnobState, Tunable
from myxa.launch.control.autopilot import Pilot, PilotOptions
from myxa.launch.views.advice import Advice, Facts, all_advice
from myxa.launch.views.bottleneck import Bottleneck, judge


@dataclass
class Plant:
    """Engines that make groups as fast as they have them in hand, up to what they can; a trainer that eats them."""

    concurrency: int
    fills_at: int
    """Groups at once above which an engine gets no faster."""
    slots: int
    group_s: float = 1.0
    train_s: float = 1.0
    batch: int = 16
    noise: float = 0.0
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    def step_s(self, concurrency: int | None = None) -> float:
        at_once = min(self.concurrency if concurrency is None else concurrency, self.fills_at, self.slots)
        return max(self.train_s, self.batch * self.group_s / at_once)

    def best_s(self) -> float:
        return min(self.step_s(c) for c in range(1, 2 * self.slots))

    def shares(self) -> dict[str, dict[str, float]]:
        step_s = self.step_s()
        trains = min(1.0, max(0.0, self.train_s / step_s + self.rng.uniform(-1, 1) * self.noise))
        makes = min(1.0, self.batch * self.group_s / min(self.concurrency, self.fills_at, self.slots) / step_s)
        is_at_limit = self.concurrency < self.slots
        busy = {"compute": makes, "wait-capacity": 1 - makes}
        busy["compute/generate at limit" if is_at_limit else "compute/generate"] = makes
        return {"trainer/0": {"compute": trains, "wait-data": 1 - trains}, "rollout/0": busy}

    def facts(self) -> Facts:
        tunable = Tunable(name="concurrency", kind="int", boundary="now", owner="rollout", help="", low=1, high=65536)
        state = KnobState(tunable=tunable, value=self.concurrency, first=1)
        return Facts(knobs={"concurrency": state}, max_running=self.fills_at, slots_total=self.slots)


@dataclass
class Flight:
    """What happened."""

    settings: list[int]
    versions: list[int]


def fly(plant: Plant, pilot: Pilot, steps: int = 200) -> Flight:
    flight = Flight([plant.concurrency], [])
    for version in range(steps):
        facts = plant.facts()
        verdict = judge(plant.shares(), engines_are_full=plant.concurrency >= plant.fills_at)

        def propose(but_for: Container[str], verdict: Bottleneck = verdict, facts: Facts = facts) -> Advice | None:
            return next(iter(all_advice(verdict, facts, but_for=but_for)), None)

        advice = pilot.look(version, verdict, propose)
        if advice is not None:
            assert advice.old == plant.concurrency
            plant.concurrency = int(advice.new)
            pilot.moved(version, advice, verdict)
            flight.settings.append(plant.concurrency)
            flight.versions.append(version)
    return flight


@pytest.mark.parametrize("seed", range(20))
def test_a_planted_imbalance_is_mended_in_few_moves_and_without_going_back(seed: int) -> None:
    print("seed", seed)
    rng = random.Random(seed)
    plant = Plant(
        concurrency=rng.choice([1, 1, 2, 3]),
        fills_at=rng.choice([8, 24, 64]),
        slots=rng.choice([32, 48, 64]),
        group_s=rng.uniform(0.5, 2.0),
        train_s=rng.uniform(0.5, 3.0),
        noise=0.03,
        rng=rng,
    )
    flight = fly(plant, Pilot())
    assert len(flight.settings) - 1 < 5
    assert flight.settings == sorted(flight.settings)
    gaps = [b - a for a, b in zip(flight.versions, flight.versions[1:], strict=False)]
    assert all(gap >= 5 for gap in gaps)
    at_rest = judge(plant.shares(), engines_are_full=plant.concurrency >= plant.fills_at)
    # Within 10 % of the best, or what is left is below what the pilot thinks worth a move.
    assert plant.step_s() <= 1.1 * plant.best_s() or at_rest.share < 0.33, (plant, flight)


def test_a_balanced_run_and_a_noisy_one_are_left_alone() -> None:
    for noise in (0.0, 0.2):
        flight = fly(Plant(concurrency=16, fills_at=64, slots=48, noise=noise), Pilot())
        assert flight.settings == [16]


def test_a_move_that_did_not_help_is_not_followed_by_another() -> None:
    pilot = Pilot(PilotOptions(settle_steps=2, num_looks=1))
    stuck = judge(
        {"trainer/0": {"compute": 0.2, "wait-data": 0.8}, "rollout/0": {"compute": 1, "compute/generate at limit": 1}}
    )
    moves = 0
    value = 4
    for version in range(50):
        advice = pilot.look(version, stuck, lambda but_for: _up("concurrency", value, but_for))  # noqa: B023 - called at once
        if advice is not None:
            pilot.moved(version, advice, stuck)
            value, moves = int(advice.new), moves + 1
    assert moves == 1
    assert "did not help: 80 % before, 80 % after" in pilot.left_alone["concurrency"]


def test_a_knob_that_a_person_turned_or_that_would_go_back_is_left_to_people() -> None:
    pilot = Pilot(PilotOptions(settle_steps=1, num_looks=1))
    bad, worse = Bottleneck("capacity", "", "", 0.8), Bottleneck("capacity", "", "", 0.5)
    first = pilot.look(0, bad, lambda but_for: _up("max_staleness", 1, but_for))
    assert first is not None
    pilot.moved(0, first, bad)
    assert pilot.look(5, worse, lambda but_for: _up("max_staleness", 7, but_for)) is None
    assert pilot.left_alone == {"max_staleness": "a person set it to 7"}
    other = Pilot(PilotOptions(settle_steps=1, num_looks=1))
    other.moved(0, first, bad)
    down = Advice("max_staleness", 2, 1, "why")
    assert other.look(5, worse, lambda but_for: None if "max_staleness" in but_for else down) is None
    assert other.left_alone == {"max_staleness": "it would go back"}


def test_a_refusal_is_taken_for_an_answer() -> None:
    pilot = Pilot(PilotOptions(settle_steps=1, num_looks=1))
    bad = Bottleneck("capacity", "", "", 0.8)
    advice = pilot.look(0, bad, lambda but_for: _up("max_staleness", 1, but_for))
    assert advice is not None
    pilot.refused(advice, "buffer: not now")
    assert pilot.look(1, bad, lambda but_for: _up("max_staleness", 1, but_for)) is None
    assert pilot.num_moves == 0


def _up(knob: str, value: int, but_for: Container[str]) -> Advice | None:
    return None if knob in but_for else Advice(knob, value, value + 1, "why")
