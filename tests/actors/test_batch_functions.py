"""A user's functions over a batch: what they return is what is trained on, and whatever is wrong with them is told."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.actors.test_step_plan import group

from myxa.actors.trainer.step_plan import BatchFunctions, ClaimedBatch, StepPlanOptions, plan_step, planned_step
from myxa.core.config import AlgoConfig
from myxa.core.errors import ConfigError, UserCodeError
from myxa.core.samples import Group, TrainSample

EXAMPLE = (Path(__file__).parents[2] / "examples" / "own_algorithm.py").read_text()
OPTIONS = StepPlanOptions(AlgoConfig(), num_ranks=2, max_tokens=40, minibatches=1)
WRONG = """
import functools, math, numpy as np, time

CALM = 3

def raises(groups): return [[1 / (g.group_id - 1)] * 3 for g in groups]
def leaves(groups): raise SystemExit(3)
def few(groups): return [[0.0, 0.0, 0.0]]
def short(groups): return [[0.0, 1.0] for _ in groups]
def nothing(groups): pass
def text(groups): return [["a", "b", "c"] for _ in groups]
def nan(groups): return [[0.0, math.nan, 0.0] for _ in groups]
def large(groups): return [[0.0, 0.0, 1e300] for _ in groups]
def torn(groups): return [[[0.0], 0.0, 0.0] for _ in groups]
def ragged(groups): return [[[[0.0], [0.0, 1.0]], 0.0, 0.0] for _ in groups]
def plenty(groups, other): return []
async def later(groups): return []
class Later:
    async def __call__(self, groups): return []
bound = functools.partial(functools.partial(Later()))
def sleeps(groups): time.sleep(60)
"""


def groups_of(*rewards: Sequence[float]) -> list[Group]:
    """Groups of as many samples as rewards; sample i of group g has g + i + 2 tokens, the first of which is masked."""
    made = [group(number, list(mine), length=number + 2) for number, mine in enumerate(rewards)]
    for sample in (sample for one in made for sample in one.samples):
        sample.loss_mask[0] = 0
    return made


GROUPS = groups_of([0.0, 1.0, 0.3], [0.1, 0.7, 0.7])


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "mine.py"
    file.write_text(EXAMPLE)
    return file


def options_of(file: Path, **names: str) -> StepPlanOptions:
    algo: dict[str, Any] = {key: f"{file}:{name}" for key, name in names.items()}
    return replace(OPTIONS, functions=BatchFunctions.load(AlgoConfig(**algo)))


def samples_of(options: StepPlanOptions, groups: Sequence[Group] = GROUPS) -> list[TrainSample]:
    found = [s for shard in plan_step(3, groups, options) for s in shard.samples]
    return sorted(found, key=lambda s: (s.group_id, s.index))


def test_advantages_like_grpos_give_the_very_same_shards(mine: Path) -> None:
    encode = msgspec.msgpack.Encoder(enc_hook=lambda array: array.tobytes()).encode
    own = options_of(mine, advantage_fn="advantages")
    rng = np.random.default_rng(5)
    for groups in (GROUPS, groups_of(*(rng.normal(size=n).tolist() for n in (4, 2, 7, 3)))):
        assert encode(plan_step(3, groups, own)) == encode(plan_step(3, groups, OPTIONS))


def test_a_number_per_token_is_the_tokens_own(mine: Path) -> None:
    mine.write_text(
        "def f(groups):\n    return [[0.5, s.logprobs * s.response_ids, 2] for g in groups for s in [g.samples[1]]]\n"
    )
    first, second, third = samples_of(options_of(mine, advantage_fn="f"))[:3]
    assert (first.advantage, first.token_advantages, third.advantage) == (0.5, None, 2.0)
    assert second.token_advantages is not None
    assert second.token_advantages.tolist() == [0.0, -1.0, -2.0]
    assert second.token_advantages.dtype == np.float32
    assert second.advantage == -1.5, "the mean of those in the loss"


async def test_rewards_are_what_the_function_makes_of_them(mine: Path) -> None:
    plan = await planned_step(3, ClaimedBatch(GROUPS), options_of(mine, reward_post_process="process"), 10.0)
    samples = sorted((s for shard in plan.shards for s in shard.samples), key=lambda s: (s.group_id, s.index))
    lengths = np.array([len(s.response_ids) for g in GROUPS for s in g.samples])
    expected = np.concatenate([g.rewards for g in GROUPS]) - 0.1 * lengths / lengths.max()
    assert [s.reward for s in samples] == pytest.approx(expected)
    assert samples[4].advantage > samples[5].advantage, "of equal rewards the shorter answer has more now"
    assert plan.metrics["reward/mean"] == pytest.approx(np.mean([g.rewards for g in GROUPS])), "as they were given"
    assert plan.metrics["reward/processed_mean"] == pytest.approx(expected.mean())
    plain = await planned_step(3, ClaimedBatch(GROUPS), OPTIONS, 10.0)
    assert "reward/processed_mean" not in plain.metrics


REFUSED = [
    ("raises", "raised ZeroDivisionError: division by zero at {file}:6 (step 3)"),
    ("leaves", "raised SystemExit: 3 at {file}:7 (step 3)"),
    ("few", "returned 1 entries for 2 groups (step 3)"),
    ("short", "returned 2 values for 3 samples, for group 0 (step 3)"),
    ("nothing", "returned a value of type NoneType, not a sequence of 2 entries (step 3)"),
    ("text", "returned a value of type str, not a number, for sample 0, for group 0 (step 3)"),
    ("nan", "returned nan, for sample 1, for group 0 (step 3)"),
    ("large", "returned 1e+300, which is too large for a float32, for sample 2, for group 0 (step 3)"),
    ("ragged", "{what}, for sample 0, for group 0 (step 3)"),
]


@pytest.mark.parametrize(("name", "said"), REFUSED, ids=[name for name, _ in REFUSED])
@pytest.mark.parametrize("key", ["reward_post_process", "advantage_fn"])
async def test_what_cannot_be_trained_on_is_refused(mine: Path, key: str, name: str, said: str) -> None:
    mine.write_text(WRONG)
    with pytest.raises(UserCodeError) as caught:
        await planned_step(3, ClaimedBatch(GROUPS), options_of(mine, **{key: name}), 10.0)
    array = "returned advantages that are no array of numbers"
    what = "returned a value of type list, not a number" if key == "reward_post_process" else array
    assert str(caught.value).startswith(f'algo.{key} = "{mine}:{name}" {said.format(file=mine, what=what)}')
    assert str(caught.value).endswith(" -- mend the function; docs/algorithms.md says what it gets and returns")


def test_rows_have_the_length_of_the_response(mine: Path) -> None:
    mine.write_text(WRONG)
    with pytest.raises(
        UserCodeError, match=r"returned advantages of shape \[1\] and type float64, not numbers for 2 tokens, for sa"
    ):
        samples_of(options_of(mine, advantage_fn="torn"))
    options = options_of(mine, reward_post_process="torn")
    with pytest.raises(UserCodeError, match="returned a value of type list, not a number, for sample 0"):
        options.functions.rewarded(3, GROUPS)


async def test_one_that_hangs_is_named_and_not_waited_for(mine: Path) -> None:
    mine.write_text(WRONG)
    with pytest.raises(UserCodeError, match=r'sleeps" did not return within 0\.05 s \(step 3\)'):
        await planned_step(3, ClaimedBatch(GROUPS), options_of(mine, advantage_fn="sleeps"), 0.05)


@pytest.mark.parametrize(
    ("name", "said"),
    [("plenty", "missing a required argument"), ("later", "is an async function"), ("bound", "is an async function")],
)
def test_a_function_of_another_kind_is_refused_when_it_is_loaded(mine: Path, name: str, said: str) -> None:
    mine.write_text(WRONG)
    with pytest.raises(ConfigError, match=said):
        options_of(mine, advantage_fn=name)
