"""The trainer's live knobs as they are declared: names, limits, and what travels with a step."""

from __future__ import annotations

from typing import Any

import pydantic
import pytest

from myxa.actors.backends.torch_backend.accounting import KNOBS
from myxa.actors.trainer.knobs import LEADER_TUNABLES, TUNABLES, TrainerKnobs, step_values
from myxa.actors.trainer.step_plan import StepPlanOptions
from myxa.core.config import AlgoConfig, OptimizerConfig, TrainerConfig
from myxa.core.config.run import GuardSettings, RunSettings
from myxa.core.errors import ConfigError

SECTIONS: dict[str, Any] = {
    "algo": AlgoConfig, "optimizer": OptimizerConfig, "trainer": TrainerConfig, "guard": GuardSettings,
    "run": RunSettings,
}  # fmt: skip


def test_a_knob_exists_for_everything_that_ranks_can_change() -> None:
    assert len({t.name for t in TUNABLES}) == len(TUNABLES)
    assert set(step_values(AlgoConfig(), OptimizerConfig())) == set(KNOBS)


@pytest.mark.parametrize("tunable", [t for t in TUNABLES if t.key], ids=lambda t: t.name)
def test_limits_are_those_of_the_run_file(tunable: Any) -> None:
    section, _, field = tunable.key.partition(".")
    candidates = [-1, 0, 1e-9, 0.5, 1, 1.5, 3, 1e6, 1e9] if tunable.kind == "float" else [-1, 0, 1, 2, 1000]
    for value in candidates:
        try:
            SECTIONS[section].model_validate(
                {"batch_size": 10**6, field: value} if section == "algo" else {field: value}
            )
            is_good = True
        except pydantic.ValidationError as error:
            (found,) = error.errors()
            goes_not_together = found["loc"] == () or "must be 0 (off) or greater" in found["msg"]
            is_good = goes_not_together  # the backend's to judge
        try:
            tunable.check(value)
        except ConfigError:
            assert not is_good, f"the run file takes {tunable.key} = {value}, the knob does not"
        else:
            assert is_good, f"the knob takes {tunable.name} = {value}, the run file does not"


def test_only_values_that_differ_from_the_run_files_travel_with_a_step() -> None:
    live = TrainerKnobs(step_values(AlgoConfig(), OptimizerConfig()) | {"keep_last": 2})
    knobs = {k.tunable.name: k for k in live.knobs()}
    assert set(knobs) == {*KNOBS, "keep_last"}, "knobs without a first value do not exist"
    assert live.for_step() == {} == live.metrics()
    knobs["lr"].use(3e-4)
    knobs["decay_steps"].use(7)
    knobs["keep_last"].use(5)
    assert live.for_step() == {"lr": 3e-4, "decay_steps": 7.0}
    assert live.count("keep_last") == 5
    knobs["lr"].use(OptimizerConfig().lr)
    assert live.for_step() == {"decay_steps": 7.0}
    assert live.metrics() == {"knob/lr": OptimizerConfig().lr, "knob/decay_steps": 7.0, "knob/keep_last": 5.0}


def test_plans_follow_their_knobs() -> None:
    options = StepPlanOptions(AlgoConfig(), num_ranks=1, max_tokens=64, minibatches=1)
    live = TrainerKnobs({"minibatches": 1, "max_tokens_per_microbatch": 64})
    assert live.plan_options(options) == options
    for knob in live.knobs():
        knob.use({"minibatches": 2, "max_tokens_per_microbatch": 32}[knob.tunable.name])
    assert (live.plan_options(options).minibatches, live.plan_options(options).max_tokens) == (2, 32)
    assert {t.boundary for t in LEADER_TUNABLES} == {"step", "weights"}
