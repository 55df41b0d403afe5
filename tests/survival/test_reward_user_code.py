"""Users' functions may raise anything, return anything, and ignore that they are cancelled: the actor gets an ordinary
error with the cause, by the deadline, wherever the function runs."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from myxa.actors.rewards.rewarder import Rewarder
from myxa.actors.rollout.group_runner import GroupRunner, Partial, drop_reason
from myxa.actors.user_code import calls
from myxa.actors.user_code.calls import TookTooLong, UserRaised, within
from myxa.actors.workflows.episode import Interrupted, ModelAccess, WorkflowContext
from myxa.algos.rewards.outcome import RewardOutcome
from myxa.core.clock import SystemClock
from myxa.core.completions import Completion
from myxa.core.config import RewardSettings
from myxa.core.errors import MyxaError, UserCodeError
from myxa.core.messages import Assignment, SamplingParams
from myxa.core.samples import Message, Prompt, Sample

CODE = """
import asyncio

class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no words")

class Number(float):
    def __float__(self):
        raise KeyboardInterrupt

class Key(str):
    def __repr__(self):
        raise RuntimeError("no words")

def deep():
    return deep()

RAISED = {
    "base": BaseException("base"), "exit": SystemExit(3), "interrupt": KeyboardInterrupt(),
    "cancelled": asyncio.CancelledError(), "generator": GeneratorExit(), "stop": StopIteration(4),
    "unspeakable": Unspeakable(), "long": ValueError("x" * 10**6),
}
RETURNED = {
    "none": None, "text": "1.0", "nan": float("nan"), "inf": float("-inf"), "huge": 10**400, "wide": 1e39,
    "complex": 1j, "list": [1.0], "float": Number(1.0), "key": {Key("a"): 1.0}, "part": {"reward": 1.0, "x": None},
    "number": {1: 2.0, "reward": 1.0}, "empty": {},
}

def act(completion):
    if completion.text == "recursion":
        deep()
    if completion.text in RAISED:
        raise RAISED[completion.text]
    return RETURNED.get(completion.text, 1.0)

async def act_later(completion):
    await asyncio.sleep(0)
    return act(completion)
"""
WORDS = {
    "base": "raised BaseException: base", "exit": "raised SystemExit: 3", "interrupt": "raised KeyboardInterrupt: ",
    "cancelled": "raised CancelledError: ", "generator": "raised GeneratorExit: ", "stop": "raised",
    "unspeakable": "raised Unspeakable: (no text: its __str__ raised RuntimeError)", "long": "raised ValueError: xxx",
    "recursion": "raised RecursionError: ", "none": "returned a value of type NoneType",
    "text": "returned a value of type str", "nan": "returned nan", "inf": "returned -inf",
    "huge": "returned a number that is too large", "wide": "returned 1e+39, which is too large for a float32",
    "complex": "returned a value of type complex", "list": "returned a value of type list",
    "float": "returned a Number that raised KeyboardInterrupt",
    "key": "returned a dict that raised RuntimeError: no words", "part": 'returned a value of type NoneType as "x"',
    "number": "returned a dict with the key 1, which is not text",
    "empty": 'returned a dict without "reward"; it has nothing',
}  # fmt: skip


@pytest.mark.parametrize(
    ("fn", "settings"),
    [
        ("act", {"isolate": False}),
        ("act", {}),
        ("act_later", {"isolate": False}),
        ("act_later", {}),
        ("act_later", {"workers": 1}),
    ],
    ids=["thread", "process", "loop", "side-by-side", "process-async"],
)
async def test_whatever_a_reward_does_is_told_and_the_next_call_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fn: str, settings: dict[str, Any]
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "mine.py"
    file.write_text(CODE)
    made = Rewarder(RewardSettings(fn=f"{file}:{fn}", pause_after=0, **settings))
    try:
        for text, words in WORDS.items():
            with pytest.raises(UserCodeError) as caught:
                await made.score(Completion(group_id=0, index=0, messages=(), prompt="?", text=text))
            assert f'" {words}' in str(caught.value), text
            assert len(str(caught.value)) < 4000
            fine = Completion(group_id=0, index=0, messages=(), prompt="?", text="fine")
            assert (await made.score(fine)).value == 1.0
    finally:
        await made.close()


async def _stubborn(until: asyncio.Event) -> float:
    while not until.is_set():
        try:
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            continue
    return 1.0


async def _stubborn_for(lasts_s: float) -> None:
    end = asyncio.Event()
    asyncio.get_running_loop().call_later(lasts_s, end.set)
    await _stubborn(end)


async def test_a_coroutine_that_will_not_be_cancelled_does_not_hold_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "GRACE_S", 0.1)
    end = asyncio.Event()
    with pytest.raises(TookTooLong) as caught:
        await within(_stubborn(end), 0.1)
    assert caught.value.hangs
    caller = asyncio.ensure_future(within(_stubborn(end), 60.0))
    await asyncio.sleep(0.05)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    end.set()
    async with asyncio.timeout(10):
        while len(asyncio.all_tasks()) > 1:
            await asyncio.sleep(0.01)


async def test_who_cancelled_is_told_apart() -> None:
    async def cancels_itself() -> None:
        raise asyncio.CancelledError

    with pytest.raises(UserRaised):
        await within(cancels_itself(), 5.0)
    with pytest.raises(TookTooLong) as caught:
        await within(asyncio.sleep(60), 0.01)
    assert not caught.value.hangs


class Letters:
    """The tokenizer that a prompt needs."""

    eos_token_ids = (4,)

    def render(self, messages: Any, *, add_generation_prompt: bool, tools: Any) -> list[int]:
        del messages, add_generation_prompt, tools
        return [1, 2, 3]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return "x" * len(ids)


class Ones:
    """Everything is worth 1."""

    judges_groups = False

    async def score(self, completion: Completion) -> RewardOutcome:
        return RewardOutcome(float(completion.index >= 0))

    async def score_group(self, completions: Sequence[Completion]) -> list[RewardOutcome]:
        return [await self.score(completion) for completion in completions]


def sample(prompt: Prompt, index: int) -> Sample:
    return Sample(
        group_id=prompt.group_id, index=index, prompt_ids=np.array([1, 2, 3], np.int32),
        response_ids=np.array([4], np.int32), logprobs=np.zeros(1, np.float32), loss_mask=np.ones(1, np.uint8),
        versions=np.zeros(1, np.int32), finish="stop", text="x",
    )  # fmt: skip


async def _raise(error: BaseException) -> Any:
    raise error


WORKFLOWS: list[tuple[Callable[[Prompt, int], Any], str]] = [
    (lambda p, i: _raise(SystemExit(1)), "workflow raised SystemExit: 1"),
    (lambda p, i: _raise(KeyboardInterrupt()), "workflow raised KeyboardInterrupt: "),
    (lambda p, i: _raise(asyncio.CancelledError()), "workflow raised CancelledError: "),
    (lambda p, i: _raise(ValueError("bad row")), "workflow raised ValueError: bad row"),
    (lambda p, i: _raise(TimeoutError()), "workflow raised TimeoutError: "),
    (lambda p, i: asyncio.sleep(60), "workflow did not finish within 0.3 s (group 5, sample "),
    (lambda p, i: _stubborn_for(1.5), "did not finish within 0.3 s, and still runs although"),
    (lambda p, i: asyncio.sleep(0, {"text": "x"}), "workflow returned a value of type dict, not a Sample"),
    (lambda p, i: asyncio.sleep(0, sample(p, i + 9)), "workflow returned sample 5/"),
]


def runner(workflow: Callable[[Prompt, int], Any]) -> GroupRunner:
    async def generate(ctx: WorkflowContext, prompt: Prompt) -> Sample:
        return await workflow(prompt, ctx.index)

    made = GroupRunner(
        workflow=generate,
        scorer=Ones(),
        tokenizer=Letters(),  # pyright: ignore[reportArgumentType]
        model=ModelAccess(generate=None, sampling=SamplingParams(), context_length=64),  # pyright: ignore[reportArgumentType]
        max_turns=1,
        clock=SystemClock(),
        on_load=lambda load: None,
        on_hop=lambda hop, group_id, began_s, lasted_s: None,
    )
    made.timeout_s = 0.3
    return made


ASSIGNMENT = Assignment(
    prompt=Prompt(group_id=5, row=7, pass_index=0, messages=(Message(role="user", content="?"),), source="rows.jsonl"),
    attempt=1,
    num_samples=2,
    sampling=SamplingParams(),
)


@pytest.mark.parametrize(("workflow", "words"), WORKFLOWS, ids=[words[:48] for _, words in WORKFLOWS])
async def test_whatever_a_workflow_does_costs_its_group_only(
    monkeypatch: pytest.MonkeyPatch, workflow: Callable[[Prompt, int], Any], words: str
) -> None:
    monkeypatch.setattr(calls, "GRACE_S", 0.1)
    started_s = time.monotonic()
    with pytest.raises(UserCodeError) as caught:
        await runner(workflow).run(ASSIGNMENT)
    assert words in str(caught.value)
    assert isinstance(caught.value, MyxaError)
    assert drop_reason(caught.value) == "workflow-error"
    assert time.monotonic() - started_s < 30
    fine = await runner(lambda prompt, index: asyncio.sleep(0, sample(prompt, index))).run(ASSIGNMENT)
    assert fine.rewards.tolist() == [1.0, 1.0]
    async with asyncio.timeout(10):  # asyncio would wait for them at its end
        while len(asyncio.all_tasks()) > 1:
            await asyncio.sleep(0.01)


async def test_an_interruption_passes_through() -> None:
    def interrupted(prompt: Prompt, index: int) -> Any:
        return _raise(Interrupted(msgspec.structs.replace(sample(prompt, index), finish="abort")))

    with pytest.raises(Partial) as caught:
        await runner(interrupted).run(ASSIGNMENT)
    assert [one.index for one in caught.value.samples] == [0, 1]
