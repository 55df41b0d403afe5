"""A reward function that judges all answers of a group at once: as well kept in bounds as one that judges one answer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.harness.group_runner import runner_of
from tests.rewards.world import answers, failure, rewarder

from myxa.actors.rewards.guard import Scorer
from myxa.actors.rewards.rewarder import Rewarder
from myxa.actors.rollout.group_runner import GroupRunner, Partial
from myxa.actors.workflows.episode import Interrupted, WorkflowContext
from myxa.algos.rewards.outcome import RewardOutcome
from myxa.core.completions import Completion
from myxa.core.config import RewardSettings
from myxa.core.errors import DeadlyReward, RewardError, UserCodeError
from myxa.core.messages import Assignment, SamplingParams
from myxa.core.samples import Message, Prompt, Sample

CODE = '''
import os

calls = []

def rank(completions):
    """The longest answer gets 1, the others their share of its length."""
    calls.append([c.index for c in completions])
    verbs = {c.text for c in completions}
    if "leave" in verbs: os._exit(7)
    if "raise" in verbs: raise KeyError("label")
    if "few" in verbs: return [1.0]
    if "number" in verbs: return 1.0
    if "set" in verbs: return {1.0, 2.0}
    if "none" in verbs: return [1.0] * (len(completions) - 1) + [None]
    longest = max(len(c.text) for c in completions)
    return tuple({"reward": len(c.text) / longest, "longest": longest} for c in completions)

async def rank_later(completions):
    return rank(completions)
'''

WAYS: list[tuple[str, dict[str, Any]]] = [("rank_later", {}), ("rank", {"workers": 1})]


@pytest.fixture
def file(write_code: Callable[[str], Path]) -> Path:
    return write_code(CODE)


@pytest.mark.parametrize(("fn", "way"), WAYS)
async def test_one_call_judges_the_group_wherever_it_runs(file: Path, fn: str, way: dict[str, Any]) -> None:
    async with rewarder(f"{file}:{fn}", scope="group", **way) as made:
        assert made.judges_groups
        assert await made.score_group(answers("a", "abcd")) == (
            RewardOutcome(0.25, {"longest": 4.0}),
            RewardOutcome(1.0, {"longest": 4.0}),
        )
        for number, (text, cause) in enumerate(
            [
                ("raise", "raised KeyError: 'label' at {file}:11"),
                ("few", "returned 1 rewards for 2 answers"),
                ("number", "returned a value of type float, not a sequence of 2 rewards"),
                ("set", "returned a value of type set, not a sequence of 2 rewards"),
                ("none", "returned a value of type NoneType, not a number, for answer 1"),
            ],
            start=1,
        ):
            told = await failure(made, *answers("x", text))
            assert told.startswith(f'reward function "{file}:{fn}" {cause.format(file=file)} (group 3) -- ')
            assert made.num_errors == number, "one call, one error"
        with pytest.raises(DeadlyReward, match=r"ended its worker process \(exit code 7\) \(group 3\)"):
            await made.score_group(answers("x", "leave"))  # its second worker too
        assert (await made.score_group(answers("x")))[0].value == 1.0


@pytest.mark.usefixtures("called_here")
async def test_errors_and_truncated_answers_may_count_zero(file: Path) -> None:
    async with rewarder(
        f"{file}:rank_later", scope="group", on_error="zero", truncated="zero", max_error_rate=1.0
    ) as made:
        assert await made.score_group(answers("x", "raise")) == (RewardOutcome(0.0), RewardOutcome(0.0))
        cut = msgspec.structs.replace(answers("x", "abcd")[1], finish="length")
        assert [one.value for one in await made.score_group([answers("x")[0], cut])] == [0.25, 0.0]
        (module,) = [m for m in sys.modules.values() if getattr(m, "__file__", "") == str(file)]
        assert module.calls == [[0, 1], [0, 1]], "the others are compared with it"
        assert await made.score_group(answers("a", "b", finish="length")) == (RewardOutcome(0.0),) * 2
        assert len(module.calls) == 2, "nothing to judge"


def test_builtins_judge_single_answers() -> None:
    with pytest.raises(ValueError, match='"math" judges one answer by itself'):
        RewardSettings(fn="math", scope="group")


def test_a_function_with_another_signature_is_told_the_right_one(file: Path) -> None:
    from myxa.actors.user_code.functions import GROUP_REWARD, load_function

    file.write_text("def rank(completions, label): return []\n")
    with pytest.raises(Exception, match=r"argument: 'label' -- it must look like: def rewards\(completions: Seq"):
        load_function(f"{file}:rank", GROUP_REWARD)


class Letters:
    eos_token_ids = (0,)

    def __init__(self, prompt: str = "?") -> None:
        self.prompt = prompt

    def render(self, messages: Any, *, add_generation_prompt: bool, tools: Any = ()) -> list[int]:
        return [1, 2, 3]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return "".join(self.prompt[:-2] if one == 1 else self.prompt[one - 4 :][:1] if one < 4 else "x" for one in ids)


def sample(prompt: Prompt, index: int) -> Sample:
    return Sample(
        group_id=prompt.group_id, index=index, prompt_ids=np.array([1, 2, 3], np.int32),
        response_ids=np.array([4], np.int32), logprobs=np.zeros(1, np.float32), loss_mask=np.ones(1, np.uint8),
        versions=np.zeros(1, np.int32), finish="stop", text="x" * (index + 1),
    )  # fmt: skip


class Together(Scorer):
    """Notes what it is given."""

    judges_groups = True

    def __init__(self, failure: Exception | None = None) -> None:
        super().__init__()
        self.given: list[list[str]] = []
        self.failure = failure

    async def score(self, completion: Completion) -> RewardOutcome:
        raise AssertionError("is not asked for single answers")

    async def score_group(self, completions: Sequence[Completion]) -> list[RewardOutcome]:
        self.given.append([c.text for c in completions])
        if self.failure is not None:
            raise self.failure
        return [RewardOutcome(float(c.index), {"size": float(len(completions))}) for c in completions]


def runner(
    scorer: Together | Rewarder, produce: Callable[[WorkflowContext, Prompt], Sample], prompt: str = "???"
) -> GroupRunner:
    async def generate(ctx: WorkflowContext, prompt: Prompt) -> Sample:
        return produce(ctx, prompt)

    return runner_of(
        generate, scorer, Letters(prompt), on_load=lambda load: loads.append((load.generating, load.rewarding))
    )


loads: list[tuple[int, int]] = []
PROMPT = Prompt(group_id=5, row=0, pass_index=0, messages=(Message(role="user", content="q"),))


def assignment(**more: Any) -> Assignment:
    return Assignment(prompt=PROMPT, attempt=1, num_samples=3, sampling=SamplingParams(), **more)


async def test_a_group_is_judged_once_when_its_last_member_is_there() -> None:
    loads.clear()
    scorer = Together()
    made = runner(scorer, lambda ctx, prompt: sample(prompt, ctx.index))
    group = await made.run(assignment())
    assert scorer.given == [["x", "xx", "xxx"]]
    assert group.rewards.tolist() == [0.0, 1.0, 2.0]
    assert group.reward_parts == ({"size": 3.0},) * 3
    assert max(rewarding for _, rewarding in loads) == 3 and loads[-1] == (0, 0), "all members wait for it"
    assert not made.has(5)


async def test_an_interrupted_group_is_judged_by_whoever_finishes_it() -> None:
    scorer = Together()

    def stops_in_the_last(ctx: WorkflowContext, prompt: Prompt) -> Sample:
        if ctx.index == 2:
            raise Interrupted((sample(prompt, 2),))
        return sample(prompt, ctx.index)

    with pytest.raises(Partial) as caught:
        await runner(scorer, stops_in_the_last).run(assignment())
    assert [one.index for one in caught.value.samples] == [0, 1, 2]
    assert scorer.given == [], "what is not whole has no reward"
    again = assignment(partial=caught.value.samples)
    group = await runner(scorer, lambda ctx, prompt: sample(prompt, ctx.index)).run(again)
    assert scorer.given == [["x", "xx", "xxx"]]
    assert group.rewards.tolist() == [0.0, 1.0, 2.0]


async def test_a_failure_costs_the_group_as_a_reward_error() -> None:
    made = runner(Together(UserCodeError("no judge", remedy="x")), lambda ctx, prompt: sample(prompt, ctx.index))
    with pytest.raises(RewardError, match="no judge"):
        await made.run(assignment())
    assert not made.has(5)


@pytest.mark.parametrize(("prompt", "text", "value"), [
    ("user: q\n<think>\n", "it is 7", 0.0), ("user: q\n<think>\n", "maybe 8</think>7", 1.0),
    ("user: q\n<think>\n\n</think>\n", "it is 7", 1.0), ("what is <think>?", "it is 7", 1.0), ("user: q", "it is 7", 1.0),
])  # fmt: skip
async def test_a_thought_that_never_ended_has_no_answer(prompt: str, text: str, value: float) -> None:
    judge = Rewarder(RewardSettings(fn="numeric"))
    labelled = msgspec.structs.replace(assignment(), prompt=msgspec.structs.replace(PROMPT, label="7"))
    made = runner(judge, lambda ctx, of: msgspec.structs.replace(sample(of, ctx.index), text=text), prompt)
    assert (await made.run(labelled)).rewards.tolist() == [value] * 3
    await judge.close()
