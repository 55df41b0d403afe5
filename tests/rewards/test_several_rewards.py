"""Several reward functions: added up by their weights, or chosen by the row; each with errors and workers of its
own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.data.opened import open_prompts, run_on, write_rows
from tests.rewards.world import answer

from myxa.actors.data.prompts import open_data
from myxa.actors.rewards.call import RewardKeys
from myxa.actors.rewards.rewarder import Rewarder, SeveralRewards, make_rewarder
from myxa.actors.rollout.evaluation import Evaluation
from myxa.algos.rewards.outcome import RewardOutcome
from myxa.core.completions import Completion
from myxa.core.config import RewardSettings, RunConfig
from myxa.core.errors import ConfigError, DataError, UserCodeError
from myxa.launch.checks.files import function_findings
from myxa.launch.composition.rollout_parts import eval_rewarders

CODE = """
calls = []

async def shape(completion):
    calls.append(completion.index)
    if completion.text == "raise":
        raise KeyError("label")
    return {"reward": len(completion.text) / 4, "length": len(completion.text)}

async def rank(completions):
    return [float(c.index) for c in completions]

def huge(completion):
    return 3e38
"""


pytestmark = pytest.mark.usefixtures("called_here")


@pytest.fixture
def file(write_code: Callable[[str], Path]) -> Path:
    return write_code(CODE)


def judged(text: str, label: str = "", index: int = 0, **metadata: Any) -> Completion:
    return answer(text, label, index, metadata=metadata, num_tokens=10)


def several(functions: dict[str, Any], **more: Any) -> SeveralRewards:
    return SeveralRewards(RewardSettings.model_validate({"functions": functions, **more}))


async def test_the_sum_by_weights_and_each_as_a_part(file: Path) -> None:
    made = several({"exact": {}, "style": {"fn": f"{file}:shape", "weight": 0.5}, "format": {"weight": 0.0}})
    assert await made.score(judged("four", "four")) == RewardOutcome(
        1.5, {"exact": 1.0, "style": 1.0, "style/length": 4.0, "format": 0.0}
    )
    with pytest.raises(UserCodeError, match=r'mine.py:shape" raised KeyError: .* \(group 3, sample 0\)'):
        await made.score(judged("raise"))
    assert made.num_errors == 1
    assert made.gauges()["reward/num_errors"] == 1.0
    await made.close()
    long = several({"exact": {}, "format": {}}, overlong_tokens=10, overlong_buffer=5)  # its length costs once
    assert await long.score(judged("a", "a")) == RewardOutcome(0.0, {"exact": 1.0, "format": 0.0, "overlong": -1.0})


async def test_functions_of_groups_and_of_answers_go_together(file: Path) -> None:
    made = several({"exact": {"weight": 10}, "rank": {"fn": f"{file}:rank", "scope": "group"}})
    assert made.judges_groups
    outcomes = await made.score_group([judged("a", "a", 0), judged("b", "a", 1)])
    assert [one.value for one in outcomes] == [10.0, 1.0]
    assert outcomes[1].parts == {"exact": 0.0, "rank": 1.0}


async def test_a_sum_that_no_float_holds_is_an_error(file: Path) -> None:
    made = several({"a": {"fn": f"{file}:huge"}, "b": {"fn": f"{file}:huge"}})
    with pytest.raises(UserCodeError, match=r"the sum of reward.functions returned 6e\+38 .* too large .*\(group 3\)"):
        await made.score(judged("x"))


async def test_the_row_chooses(file: Path) -> None:
    numeric = {"fn": "numeric", "args": {"tolerance": 0.5}}  # named as data names its sources
    made = several(
        {"openai/gsm8k": numeric, "style": {"fn": f"{file}:shape"}}, choose_by="rm_type", choose_else="style"
    )
    assert await made.score(judged("5", "4", rm_type="openai/gsm8k")) == RewardOutcome(1.0, {"openai/gsm8k": 1.0})
    assert await made.score(judged("xx")) == RewardOutcome(0.5, {"style": 0.5, "style/length": 2.0})
    (module,) = [m for m in sys.modules.values() if getattr(m, "__file__", "") == str(file)]
    assert module.calls == [0], "the others are not called"
    for name in ("exact", 7):
        with pytest.raises(UserCodeError, match=f"says rm_type = {name!r}, which is none of reward.functions"):
            await made.score(judged("5", rm_type=name))


async def test_one_function_out_of_order_ends_the_run_by_its_name(file: Path) -> None:
    made = several({"exact": {}, "style": {"fn": f"{file}:shape"}}, pause_after=0)
    assert isinstance(made, SeveralRewards)
    for _ in range(20):
        with pytest.raises(UserCodeError):
            await made.score(judged("raise"))
    assert "mine.py:shape" in made.too_many_errors and "failed in 20 of the last 20 calls" in made.too_many_errors
    made.allow(1.0)
    assert made.too_many_errors == ""


@pytest.mark.parametrize(("settings", "said"), [
    ({"functions": {"exact": {}}, "fn": "math"}, "does not go with the table functions"),
    ({"functions": {"exact": {}}, "args": {"a": 1}}, "does not go with the table functions"),
    ({"functions": {"mine": {}}}, '"mine" is no built-in reward'),
    ({"functions": {"no name": {"fn": "exact"}}}, "a function's name is 1 to 32 letters"),
    ({"functions": {"overlong": {"fn": "exact"}}}, 'and not "overlong"'),
    ({"functions": {"a/": {"fn": "exact"}}}, "a function's name is 1 to 32 letters"),
    ({"functions": {"a" * 33: {"fn": "exact"}}}, "a function's name is 1 to 32 letters"),
    ({"functions": {"a": {"fn": "exact"}, "a/b": {"fn": "exact"}}}, 'is named like a part of "a"'),
    ({"functions": {"reward": {"fn": "exact"}}}, 'and not "overlong" or "reward"'),
    ({"functions": {"exact": {"weight": 0.0}}}, "so every reward is 0"),
    ({"functions": {"regex": {}}}, 'fn = "regex" needs a pattern'),
    ({"functions": {"regex": {"pattern": "("}}}, "is not a regular expression"),
    ({"functions": {"exact": {"scope": "group"}}}, "judges one answer by itself"),
    ({"functions": {"exact": {"fn": "exakt"}}}, 'did you mean "exact"'),
    ({"choose_by": "rm_type"}, "needs the table functions"),
    ({"functions": {"exact": {}}, "choose_else": "exact"}, "needs choose_by"),
    ({"functions": {"exact": {}}, "choose_by": "t", "choose_else": "exakt"}, 'did you mean "exact"'),
    ({"functions": {f"f{i}": {"fn": "exact"} for i in range(17)}}, "has 17 functions"),
])  # fmt: skip
def test_what_does_not_go_together(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as caught:
        RewardSettings.model_validate(settings)
    assert said in str(caught.value)


def run(tmp_path: Path, rows: list[Any], **reward: Any) -> RunConfig:
    return run_on(write_rows(tmp_path / "t.jsonl", *rows), reward=reward)


CHOICE = {"functions": {"exact": {}, "format": {}}, "choose_by": "rm_type"}


def row(label: str | None, **metadata: Any) -> dict[str, Any]:
    return {"prompt": "q", "metadata": metadata} | ({} if label is None else {"label": label})


@pytest.mark.parametrize(("bad", "said"), [
    (row("5", rm_type="exakt"), "says rm_type = 'exakt', which is to name one of reward.functions -- did you mean"),
    (row("5", rm_type=3), "says rm_type = 3"),
    (row("5"), "has no rm_type, which is to name one of reward.functions -- name one"),
    (row(None, rm_type="exact"), "the row has no label, with which reward.functions.exact compares"),
])  # fmt: skip
def test_a_row_that_nobody_can_judge_is_a_bad_row(tmp_path: Path, bad: dict[str, Any], said: str) -> None:
    good = [row("5", rm_type="exact"), row(None, rm_type="format")]
    assert len(open_prompts(run(tmp_path, good, **CHOICE))) == 2
    with pytest.raises(DataError) as caught:
        open_prompts(run(tmp_path, [*good, bad], **CHOICE))
    assert "t.jsonl:3" in str(caught.value) and said in str(caught.value)
    if "rm_type" not in bad["metadata"]:
        assert len(open_prompts(run(tmp_path, [bad], **CHOICE, choose_else="exact"))) == 1


def test_a_sum_needs_a_label_if_one_of_them_does(tmp_path: Path) -> None:
    with pytest.raises(DataError, match='column "label" is missing'):
        open_prompts(run(tmp_path, [row(None)], functions={"exact": {}, "format": {}}))


async def test_each_source_of_prompts_may_have_its_function(tmp_path: Path) -> None:
    config = run(tmp_path, [row("5")])
    raw = config.model_dump()
    path = raw["data"]["train"]
    raw["data"] = {"sources": {"sums": {"path": path}, "prose": {"path": path}}}
    functions = {"sums": {"fn": "numeric"}, "prose": {"fn": "f1"}}
    raw["reward"] = {"functions": functions, "choose_by": "data_source"}
    raw["async"] = raw.pop("asynchrony")
    config = RunConfig.model_validate(raw)
    data = open_data(config)
    made = make_rewarder(config)
    for name in ("sums", "prose"):
        prompt = data.by_name[name].prompt(0)
        assert prompt is not None
        outcome = await made.score(judged("5.0", prompt.label, **prompt.metadata))
        assert outcome.parts.keys() == {name}
    functions.pop("prose")
    with pytest.raises(DataError, match="has no data_source"):
        open_data(RunConfig.model_validate(raw))


async def test_what_the_workflow_says_counts_beside_what_others_judge() -> None:
    made = several({"workflow": {}, "numeric": {"weight": 2.0}}, workers=1)
    said = msgspec.structs.replace(judged("5.0", "5"), reward=0.25)
    assert await made.score(said) == RewardOutcome(2.25, {"workflow": 0.25, "numeric": 1.0})
    await made.close()


async def test_an_evaluation_set_may_judge_otherwise_than_the_workflow() -> None:
    made = Rewarder(RewardSettings(fn="workflow").alone("numeric"), RewardKeys.of_eval_set("sums"))
    assert (await made.score(msgspec.structs.replace(judged("4", "5"), reward=1.0))).value == 0.0
    await made.close()


async def test_that_an_evaluation_waits_for_the_function_of_a_set_is_told(file: Path) -> None:
    settings = RewardSettings(pause_after=1, max_outage_s=0.05, cool_down_s=0.02).alone(f"{file}:shape")
    made = Rewarder(settings, RewardKeys.of_eval_set("sums"))
    events: list[tuple[str, str]] = []
    Evaluation({"sums": made}).listen(lambda kind, text: events.append((kind, text)))
    await made.score(judged("four"))
    with pytest.raises(UserCodeError):
        await made.score(judged("raise"))
    kind, text = events[0]
    assert kind == "reward-paused"
    assert text.startswith(f'evaluation set sums: reward function "{file}:shape" failed')
    await made.close()


@pytest.mark.parametrize("key", ["reward.functions.workflow.fn", "eval.sets.sums.reward"])
def test_a_built_in_workflow_says_no_reward(tmp_path: Path, key: str) -> None:
    raw = run(tmp_path, []).model_dump()
    raw["async"] = raw.pop("asynchrony")
    if key.startswith("eval"):
        raw["eval"]["sets"] = {"sums": {"path": raw["data"]["train"], "reward": "workflow"}}
    else:
        raw["reward"] = {"functions": {"workflow": {}, "exact": {}}}
    with pytest.raises(ValueError, match="needs a workflow of your own"):
        RunConfig.model_validate(raw)


def test_mistakes_of_an_evaluation_sets_function_are_told_by_their_key(tmp_path: Path, file: Path) -> None:
    raw = run(tmp_path, []).model_dump()
    raw["async"] = raw.pop("asynchrony")
    path = raw["data"]["train"]
    raw["eval"]["sets"] = {
        "sums": {"path": path, "reward": "numeric", "reward_args": {"tol": 1}},
        "far": {"path": path, "reward": "remote"},
        "own": {"path": path, "reward": f"{file}:shap"},
    }
    config = RunConfig.model_validate(raw)
    found = {finding.key: str(finding.error) for finding in function_findings(config)}
    assert "takes no such argument" in found["eval.sets.sums.reward_args.tol"]
    assert found.keys() == {"eval.sets.sums.reward_args.tol", "eval.sets.far.reward_args.url", "eval.sets.own.reward"}
    raw["eval"]["sets"] = {"own": {"path": path, "reward": f"{file}:shap"}}
    with pytest.raises(ConfigError, match=r"^eval\.sets\.own\.reward: "):
        eval_rewarders(RunConfig.model_validate(raw), None)


def test_mistakes_are_told_by_their_key(tmp_path: Path, file: Path) -> None:
    functions = {"numeric": {"args": {"tol": 1}}, "own": {"fn": f"{file}:shap"}}
    with pytest.raises(ConfigError, match='reward.functions.numeric.args.tol: reward "numeric" takes no such argument'):
        several(functions)
    found = {finding.key: str(finding.error) for finding in function_findings(run(tmp_path, [], functions=functions))}
    assert "takes no such argument" in found["reward.functions.numeric.args.tol"]
    assert "reward.functions.own.fn: " in found["reward.functions.own.fn"]
    assert 'did you mean "shape"' in found["reward.functions.own.fn"]
