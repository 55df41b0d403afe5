"""Members of a group from which nothing is learnt: masked in what is trained on, told with their reasons, also later."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.buffer.conftest import make_group, make_sample

from myxa.actors.buffer.filters import load_group_filter, load_group_filters, load_sample_filter, mask_members
from myxa.algos.filters import SAMPLE_FILTERS, truncated
from myxa.core.config import RunConfig
from myxa.core.config.learning import SAMPLE_FILTER_BUILTINS
from myxa.core.errors import ConfigError, UserCodeError
from myxa.core.samples import Group
from myxa.launch.checks.files import function_findings

CODE = """
import numpy as np

def keep(group, *, least=1.0, answers=None):
    if answers is not None:
        return answers
    return [True if reward >= least else f"below {least:g}" for reward in group.rewards]

def verdicts(group, *, kind):
    return {
        "bools": [True, False], "numpy": group.rewards > 0, "empty": ["", "why"],
        "one": True, "few": [True], "numbers": [1, 0], "set": {True, False}, "odd": [True, "\\ud800"],
    }[kind] if kind != "raises" else 1 / 0

def fails(group):
    return 1 / 0

def shrugs(group):
    return 7

def mumbles(group):
    return "\\ud800"

def sorts(group):
    group.rewards[::-1].sort()
    return True

def spread(group, *, least):
    return float(np.ptp(group.rewards)) >= least
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "mine.py"
    file.write_text(CODE)
    return file


def cut(group: Group, *members: int) -> Group:
    samples = tuple(
        msgspec.structs.replace(one, finish="length") if one.index in members else one for one in group.samples
    )
    return msgspec.structs.replace(group, samples=samples)


async def test_masked_members_are_told_and_the_rest_is_learnt(shop: Any) -> None:
    async with shop.open(of_samples=truncated) as desk:
        first, second, third = (await desk.draw(max_groups=3)).assignments
        assert (await desk.put_group(cut(make_group(first), 1), 1, "rollout/0")).outcome == "ready"
        assert (await desk.put_group(make_group(second), 1, "rollout/0")).outcome == "ready"
        lost = await desk.put_group(cut(make_group(third), 0, 1), 1, "rollout/0")
        assert (lost.outcome, lost.reason) == ("filtered", "truncated 2")
        assert (await desk.ref.stats()).dropped == {"all-masked": 1}
        assert desk.buffer._groups.gauges()["buffer/masked/truncated"] == 1.0, "of groups that are kept"
        group, whole = await desk.ref.fetch((0, 1))
        assert [int(one.loss_mask.sum()) for one in group.samples] == [2, 0]
        assert group.samples[1].logprobs.tolist() == [0.0, 0.0]
        assert group.rewards.tolist() == [0.0, 1.0], "it still counts where rewards are compared"
        assert [int(one.loss_mask.sum()) for one in whole.samples] == [2, 2]
        assert await desk.train(0) == (0, 1)
        await desk.rewind(0)
        assert await desk.train(0) == (0, 1), "masked as it was"


FAILING = [
    ("verdicts", 'sample filter ".*:verdicts" returned 1 verdicts for 2 samples'),
    ("fails", 'group filter ".*:fails" raised ZeroDivisionError'),
    ("shrugs", 'group filter ".*:shrugs" returned a value of type int'),
    ("sorts", 'group filter ".*:sorts" raised ValueError: .* read-only'),
    ("mumbles", 'group filter ".*:mumbles" returned a value of type str'),
]


@pytest.mark.parametrize(("name", "said"), FAILING)
async def test_a_filter_that_fails_ends_the_run_with_its_own_name(shop: Any, file: Path, name: str, said: str) -> None:
    if name == "verdicts":
        filters: dict[str, Any] = {"of_samples": load_sample_filter(f"{file}:verdicts", {"kind": "few"})}
    else:
        filters = {"group_filter": load_group_filter(f"{file}:{name}", {})}
    async with shop.open(**filters) as desk:
        (assignment,) = (await desk.draw(max_groups=1)).assignments
        with pytest.raises(UserCodeError, match=said):
            await desk.put(assignment)
        assert isinstance(await desk.failure(), UserCodeError)


def group_of(rewards: Sequence[float]) -> Group:
    from myxa.core.samples import Message, Prompt

    prompt = Prompt(group_id=3, row=0, pass_index=0, messages=(Message(role="user", content="x"),))
    samples = tuple(make_sample(3, i, [0, 0]) for i in range(len(rewards)))
    return Group(prompt=prompt, samples=samples, rewards=np.array(rewards, np.float32))


def test_own_filters_get_their_arguments(file: Path) -> None:
    group = group_of([0.0, 1.0])
    for args, masked in (({}, {"below 1": 1}), ({"least": 2.0}, {"below 2": 2}), ({"least": 0.0}, {})):
        found, counts = mask_members(group, load_sample_filter(f"{file}:keep", args))
        assert counts == masked
        assert (found is group) == (not masked)
    for least, kept in ((0.5, None), (2.0, f"{file}:spread")):
        filters = load_group_filters(f"{file}:spread", {"least": least})
        assert filters.by_name[filters.chosen](group) == kept
    assert load_group_filters("zero_variance", {"eps": 1.5}).by_name["zero_variance"](group) == "zero_variance"
    with pytest.raises(ConfigError, match="missing a required argument: 'least'"):
        load_group_filters(f"{file}:spread")


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("bools", (None, "{name}")),
        ("numpy", ("{name}", None)),
        ("empty", (None, "why")),
        ("one", "returned a value of type bool, not a sequence of 2 verdicts"),
        ("few", "returned 1 verdicts for 2 samples"),
        ("numbers", "returned a value of type int, for sample 0"),
        ("set", "returned a value of type set, not a sequence of 2 verdicts"),
        ("odd", "returned a value of type str, for sample 1"),
        ("raises", "raised ZeroDivisionError: division by zero at {file}:"),
    ],
)
def test_verdicts(file: Path, kind: str, said: Any) -> None:
    name = f"{file}:verdicts"
    judge = load_sample_filter(name, {"kind": kind})
    group = group_of([0.0, 1.0])
    if isinstance(said, tuple):
        assert judge(group) == tuple(one and one.format(name=name) for one in said)
        return
    with pytest.raises(UserCodeError) as caught:
        judge(group)
    assert f'sample filter "{name}" {said.format(file=file)}' in caught.value.message
    assert "(group 3)" in caught.value.message


def test_the_run_file_and_the_table_name_the_same_filters() -> None:
    assert tuple(SAMPLE_FILTERS) == SAMPLE_FILTER_BUILTINS
    with pytest.raises(ValueError, match='did you mean "truncated"'):
        config(sample_filter="trunkated")


def config(**algo: Any) -> RunConfig:
    return RunConfig.model_validate({"model": {"path": "m"}, "data": {"train": "t.jsonl"}, "algo": algo})


@pytest.mark.parametrize(
    ("algo", "key", "said"),
    [
        ({"group_filter_args": {"epz": 0.1}}, "algo.group_filter_args.epz", 'did you mean "eps"'),
        ({"group_filter_args": {"eps": -0.1}}, "algo.group_filter_args.eps", "must not be negative"),
        ({"sample_filter": "truncated", "sample_filter_args": {"x": 1}}, "algo.sample_filter_args.x", "leave it out"),
        ({"sample_filter": "{file}:kept"}, "algo.sample_filter", 'did you mean "keep"'),
    ],
)
def test_mistakes_are_known_before_the_run(file: Path, algo: dict[str, Any], key: str, said: str) -> None:
    algo = {name: value.format(file=file) if isinstance(value, str) else value for name, value in algo.items()}
    (finding,) = [one for one in function_findings(config(**algo)) if one.key.startswith("algo")]
    assert finding.key == key
    assert said in str(finding.error)
