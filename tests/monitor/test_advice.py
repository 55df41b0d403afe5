"""From a verdict to one knob and a value, or to a line of the run file; and what an actor's own time says."""

from __future__ import annotations

import msgspec
import pytest

from myxa.core.config import RunConfig
from myxa.core.knobs import KnobState, KnobValue, Tunable
from myxa.launch.control.why_verbs import room_for_rollouts
from myxa.launch.supervisor.placement import Present, place
from myxa.launch.views.advice import Facts, advise, facts_of_file, what_to_try
from myxa.launch.views.bottleneck import Bottleneck, Bound, judge
from myxa.launch.views.run_view import VerbAnswer, run_view_of
from myxa.launch.views.why import change_text, explain, explain_actors, idleness, unattributed

Shares = dict[str, dict[str, float]]


def knob(
    name: str, value: KnobValue, *, low: float = 1, high: float = 1000, pending: KnobValue | None = None
) -> KnobState:
    tunable = Tunable(name=name, kind="int", boundary="now", owner="x", help="", key=f"some.{name}", low=low, high=high)
    return KnobState(tunable=tunable, value=value, first=value, pending=pending)


def facts(**values: KnobValue) -> Facts:
    return Facts(knobs={name: knob(name, value) for name, value in values.items()}, num_samples=4)


def verdict(bound: Bound, share: float = 0.6) -> Bottleneck:
    return Bottleneck(bound, "sentence", "remedy", share)


@pytest.mark.parametrize(
    ("bound", "share", "known", "command"),
    [
        ("concurrency", 0.5, facts(concurrency=48), "myxa set concurrency=96"),
        ("concurrency", 0.95, facts(concurrency=2), "myxa set concurrency=8"),  # never more than four times as much
        ("capacity", 0.6, facts(max_staleness=1), "myxa set max_staleness=2"),
        ("weights", 0.6, facts(max_staleness=1, weights_every=1), "myxa set max_staleness=2"),
        ("weights", 0.6, facts(max_staleness=2, weights_every=1), "myxa set weights_every=2"),
        ("guard", 0.6, facts(guard_every=2), "myxa set guard_every=8"),
        ("training", 0.6, facts(max_tokens_per_microbatch=500), "myxa set max_tokens_per_microbatch=1000"),
        ("generation", 0.5, Facts(num_rollouts=2), "myxa scale rollout=4"),
        ("paused", 1.0, Facts(), "myxa resume"),
    ],
)
def test_one_knob_with_a_value(bound: Bound, share: float, known: Facts, command: str) -> None:
    advice = advise(verdict(bound, share), known)
    assert advice is not None
    assert advice.command == command
    assert advice.why


@pytest.mark.parametrize(
    ("bound", "known", "key", "new"),
    [
        ("reward", Facts(), "reward.workers", 8),
        ("reward", Facts(reward_workers=3), "reward.workers", 6),
        ("data", Facts(), "data.max_passes", 0),
    ],
)
def test_what_no_knob_does_is_a_line_of_the_run_file(bound: Bound, known: Facts, key: str, new: int) -> None:
    advice = advise(verdict(bound), known)
    assert advice is not None
    assert (advice.knob, advice.key, advice.new, advice.command) == ("", key, new, "")
    assert advise(verdict("data"), Facts(is_data_endless=True)) is None, "it is so already"


def test_concurrency_goes_as_far_as_engines_and_slots_have_room() -> None:
    known = facts(concurrency=4)
    roomy = Facts(knobs=known.knobs, num_samples=4, max_running=40, slots_total=100)
    assert advise(verdict("concurrency", 0.9), roomy).new == 10  # type: ignore[union-attr]
    few_slots = Facts(knobs=known.knobs, num_samples=4, max_running=400, slots_total=12, num_rollouts=2)
    assert advise(verdict("concurrency", 0.9), few_slots).new == 6  # type: ignore[union-attr]
    none_left = Facts(knobs={**known.knobs, "max_staleness": knob("max_staleness", 1)}, slots_total=4)
    assert advise(verdict("concurrency", 0.9), none_left).knob == "max_staleness"  # type: ignore[union-attr]


def test_a_knob_at_its_end_or_not_there_is_not_proposed() -> None:
    assert advise(verdict("capacity"), Facts(knobs={"max_staleness": knob("max_staleness", 5, high=5)})) is None
    assert advise(verdict("capacity"), Facts()) is None
    assert advise(verdict("none"), facts(concurrency=4)) is None
    pending = Facts(knobs={"max_staleness": knob("max_staleness", 1, pending=2)})
    assert advise(verdict("capacity"), pending).new == 3  # type: ignore[union-attr]


STARVED: Shares = {
    "trainer/0": {"compute": 0.2, "wait-data": 0.5, "wait-data/claim": 0.5, "other": 0.3, "other/start": 0.3},
    "rollout/0": {"compute": 0.9, "compute/generate at limit": 0.9, "wait-data": 0.1, "wait-data/reward": 0.06},
    "rollout/1": {"compute": 0.9, "compute/generate at limit": 0.9, "wait-data": 0.1},
    "buffer": {"wait-data": 0.99, "compute": 0.01},
}


def test_why_is_one_record_for_people_and_programs() -> None:
    reason = explain(STARVED, facts(concurrency=48), window_s=60)
    assert reason.bound == judge(STARVED).bound == "concurrency"
    assert "trainer/0 waits for data 71 % of the time" in reason.sentence
    assert (reason.knob, reason.old, reason.new) == ("concurrency", 48, 168)
    assert change_text(reason) == "myxa set concurrency=168"
    assert reason.shares["trainer/0"]["compute"] == pytest.approx(0.2857)
    assert reason.shares["trainer/0"]["other"] == 0.0
    assert len(reason.details) == 4
    other = explain(
        {**STARVED, **{f"rollout/{i}": {"wait-data": 1, "wait-data/reward": 1} for i in range(2)}}, Facts(), window_s=60
    )
    assert change_text(other) == "in the run file: reward.workers = 8"


def test_why_of_one_actor_says_what_it_does() -> None:
    reason = explain_actors(["rollout/0"], STARVED, facts(concurrency=48), window_s=60)
    assert reason.target == "rollout/0"
    assert reason.sentence == (
        "rollout/0 generates 90 % (with as many groups as its concurrency allows), waits for prompts 10 % (for rewards)"
    )
    assert set(reason.shares) == {"rollout/0"}
    assert "concurrency is the bottleneck" in reason.remedy


def test_time_that_nobody_accounts_for_is_told_apart_from_start_up() -> None:
    assert unattributed({"other": 0.5, "other/start": 0.5, "compute": 0.5}) == pytest.approx(0.0)
    assert unattributed({"other": 0.5, "other/start": 0.4, "compute": 0.5}) == pytest.approx(1 / 6)
    assert unattributed({"other": 0.5, "other/lead": 0.5, "compute": 0.5}) == pytest.approx(0.5)
    assert unattributed({"other": 1.0, "other/start": 1.0}) == 0.0
    assert idleness("rollout/2", {"other": 1.0, "other/start": 1.0}).sentence == "rollout/2 is starting"
    assert "does what is not accounted for 10 %" in idleness("x", {"compute": 0.9, "other": 0.1}).sentence


def test_f2_no_more_rollout_actors_than_the_machine_has_room_for() -> None:
    """F2."""
    roomy = Facts(num_rollouts=2, cores=3, most_rollouts=3)
    assert advise(verdict("generation", 0.9), roomy).command == "myxa scale rollout=3"  # type: ignore[union-attr]
    full = Facts(num_rollouts=2, cores=2, most_rollouts=2)
    assert advise(verdict("generation", 0.9), full) is None
    told = what_to_try(verdict("generation", 0.9), full)
    assert "no room for more than 2 rollout actors (2 cores)" in told
    assert "scale" not in told
    spare = Facts(num_rollouts=1, most_rollouts=3, more_devices="4,5")
    assert advise(verdict("generation"), spare).command == "myxa scale rollout=3 --devices 4,5"  # type: ignore[union-attr]
    assert advise(verdict("reward"), Facts(cores=2, num_rollouts=2)).new == 1  # type: ignore[union-attr]
    assert advise(verdict("reward"), Facts(cores=2, num_rollouts=1, reward_workers=2)) is None


def test_f2_gpus_are_counted_as_scale_counts_them() -> None:
    one = {"rollout": {"kind": "sglang", "devices": "0-3", "count": 2}, "trainer": {"devices": "4-5"}}
    config = RunConfig.model_validate({"model": {"path": "m"}, "data": {"train": "t"}, "roles": one})
    specs = place(config, 1)
    assert room_for_rollouts(config, Present(specs, (0,)), 2, 64) == (2, ""), "both have their GPUs, none is left"
    fewer = tuple(spec for spec in specs if spec.name != "rollout/1")
    assert room_for_rollouts(config, Present(fewer, (0,)), 1, 64) == (2, "")
    on_cores = RunConfig.model_validate({"model": {"path": "m"}, "data": {"train": "t"}})
    assert room_for_rollouts(on_cores, Present(place(on_cores, 1), (0,)), 1, 6) == (6, "")
    assert room_for_rollouts(on_cores, Present(place(on_cores, 2), (0, 1)), 2, 6) == (0, ""), "others have cores too"


def test_f2_all_views_show_the_same_line() -> None:
    known = facts(concurrency=48)
    reason = explain(STARVED, known, window_s=60)
    assert reason.to_try == what_to_try(judge(STARVED), known) == f"`myxa set concurrency=168`: {reason.remedy}"
    answers = {"why": VerbAnswer(msgspec.to_builtins(reason))}
    assert run_view_of(answers, 0.0).remedy == reason.to_try
    config = {"rollout": {"max_groups": 48, "num_samples": 4}, "engine": {"max_running": 0}}
    over = what_to_try(judge(STARVED), facts_of_file(config, 2, 2))
    assert over.startswith("in the run file: rollout.max_groups = 168: ")
