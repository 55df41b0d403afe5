"""Evaluation on several sets: each asked in its own way, told by its own name; one that fails does not hide the others."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
from tests.harness.waiting import until

from myxa.actors.coordinator.evaluator import Evaluator
from myxa.actors.coordinator.options import CoordinatorOptions
from myxa.actors.coordinator.run_state import CoordinatorJournal, RunContext, RunState
from myxa.core.activity import ActivityMeter
from myxa.core.clock import SystemClock
from myxa.core.config.data import EvalSetSettings, EvalSettings
from myxa.core.errors import ConfigError, EngineError
from myxa.core.messages import EvalRequest, EvalResult, SamplingParams
from myxa.core.samples import Prompt

REWARDS = {"easy": 0.9, "hard": 0.1}


def of_set(**own: Any) -> EvalSetSettings:
    return EvalSetSettings(path="held.jsonl", **own)


class World:
    log = logging.getLogger("evaluator")
    clock = SystemClock()

    def __init__(
        self,
        sets: dict[str, EvalSetSettings] | None = None,
        *,
        broken: str = "none of them",
    ) -> None:
        self.asked: list[EvalRequest] = []
        self.metrics: dict[str, float] = {}
        self.events: list[tuple[str, str]] = []
        self.broken = broken
        self.state = RunState(version=7)
        self.oldest = 6
        self.lineage = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.serving = {"rollout/0": 7}
        self.options = CoordinatorOptions(
            has_engines=True, audit_path=Path("a"), journal_path=Path("j"), launch="x",
            eval=EvalSettings(data="held.jsonl", num_prompts=4, num_samples=2, temperature=0.7), eval_sampling=SamplingParams(max_new_tokens=50),
            eval_sets=sets or {"": of_set()},
        )  # fmt: skip
        self.evaluator = self.with_state(self.state)

    def with_state(self, state: RunState) -> Evaluator:
        self.state = state
        every: Any = self
        meter = ActivityMeter("c", self.clock)
        context = RunContext(every, meter, every, self.options, every)
        return Evaluator(context, every, every)

    async def keep(self) -> None: ...

    def ref(self, contract: type, name: str) -> Any:
        return self

    async def ready_engines(self) -> list[str]:
        return ["rollout/0"]

    async def num_held_out(self, name: str = "") -> int:
        return 100

    async def eval_prompts(self, limit: int, name: str = "") -> tuple[Prompt, ...]:
        return tuple(Prompt(group_id=-1 - i, row=i, pass_index=0, messages=()) for i in range(limit))

    async def evaluate(self, request: EvalRequest) -> EvalResult:
        self.asked.append(request)
        oldest = self.oldest
        await self.gate.wait()
        if request.name == self.broken:
            raise EngineError("it broke", remedy="none")
        reward = REWARDS.get(request.name, 0.5)
        return EvalResult(
            mean_reward=reward, num_samples=8, oldest_version=oldest, newest_version=7, metrics={"reward": reward}
        )

    def metric(self, step: int, values: dict[str, float]) -> None:
        self.metrics |= values

    def event(self, kind: str, text: str) -> None:
        self.events.append((kind, text))


async def test_each_set_is_asked_in_its_own_way_and_the_rest_is_as_for_all() -> None:
    world = World({"easy": of_set(), "hard": of_set(num_prompts=2, num_samples=9, temperature=0.0, top_p=0.8)})
    result = await world.evaluator.evaluate()
    easy, hard = world.asked
    assert (len(easy.prompts), easy.num_samples, easy.sampling) == (
        4, 2, SamplingParams(temperature=0.7, max_new_tokens=50),
    )  # fmt: skip
    assert (len(hard.prompts), hard.num_samples, hard.sampling) == (
        2, 9, SamplingParams(temperature=0.0, top_p=0.8, max_new_tokens=50),
    )  # fmt: skip
    assert world.metrics == {"eval/easy/reward": 0.9, "eval/hard/reward": 0.1, "eval/reward": 0.5}
    assert (result.mean_reward, world.state.eval_reward) == (0.5, 0.5)


async def test_the_only_set_has_no_name() -> None:
    world = World()
    await world.evaluator.evaluate()
    assert world.metrics == {"eval/reward": 0.5}
    with pytest.raises(ConfigError, match="no evaluation set 'hard'.*leave the name out"):
        await world.evaluator.evaluate("hard")


async def test_at_its_end_a_run_evaluates_its_last_version_unless_all_answers_are_of_it_already() -> None:
    world = World()
    await world.evaluator.evaluate()
    world.oldest = 7
    for num_asked in (2, 2):  # the first answers were of two versions
        await world.evaluator.attempt_anew()
        assert len(world.asked) == num_asked


async def test_a_coordinator_that_starts_again_at_the_end_does_not_evaluate_once_more(tmp_path: Path) -> None:
    world = World()
    world.oldest = 7
    await world.evaluator.attempt_anew()
    journal = CoordinatorJournal(tmp_path / "journal", "here")
    journal.state = world.state
    await journal.keep()
    later, again = World(), CoordinatorJournal(tmp_path / "journal", "here")
    assert again.load() == (True, "")
    assert await later.with_state(again.state).attempt_anew() is None
    assert not later.asked


async def test_a_version_is_evaluated_once_however_many_want_it_at_a_time() -> None:
    """An evaluation of an older version is under way; the next one is due, and the run ends."""
    world = World()
    world.gate = asyncio.Event()
    first = asyncio.ensure_future(world.evaluator.attempt_due())
    await until(lambda: len(world.asked) == 1, "the first is under way")
    world.oldest = 7
    wanting = [world.evaluator.attempt_due(), world.evaluator.attempt_anew(), world.evaluator.attempt_anew()]
    others = [asyncio.ensure_future(one) for one in wanting]
    await asyncio.sleep(0)
    world.gate.set()
    await first
    results = await asyncio.gather(*others)
    assert len(world.asked) == 2
    assert [one is not None for one in results] == [True, False, False]


async def test_an_evaluation_that_the_trainers_return_overtook_does_not_speak_for_the_version_made_again() -> None:
    world = World()
    world.oldest, world.gate = 7, asyncio.Event()
    first = asyncio.ensure_future(world.evaluator.attempt_due())
    await until(lambda: len(world.asked) == 1, "it is under way")
    world.lineage += 1
    world.gate.set()
    await first
    assert await world.evaluator.attempt_anew() is not None
    assert await world.evaluator.attempt_anew() is None


async def test_evaluations_that_take_longer_than_the_steps_between_them_do_not_queue() -> None:
    world = World()
    world.oldest, world.gate = 7, asyncio.Event()
    first = asyncio.ensure_future(world.evaluator.attempt_due())
    await until(lambda: len(world.asked) == 1, "the first is under way")
    world.state.version = 8
    others = [asyncio.ensure_future(world.evaluator.attempt_due()) for _ in range(5)]
    await asyncio.sleep(0)
    world.gate.set()
    results = await asyncio.gather(first, *others)
    assert len(world.asked) == 2
    assert [one is not None for one in results] == [True, True, False, False, False, False]


async def test_one_set_alone_does_not_speak_for_the_run() -> None:
    world = World({"easy": of_set(), "hard": of_set()})
    assert (await world.evaluator.evaluate("easy")).mean_reward == 0.9
    assert [one.name for one in world.asked] == ["easy"]
    assert (world.metrics, world.state.eval_reward) == ({"eval/easy/reward": 0.9}, None)
    with pytest.raises(ConfigError, match="no evaluation set 'hart'.*hard"):
        await world.evaluator.evaluate("hart")


async def test_a_set_that_fails_is_named_and_the_others_are_told() -> None:
    world = World({"easy": of_set(), "hard": of_set()}, broken="easy")
    with pytest.raises(EngineError, match="it broke"):
        await world.evaluator.evaluate()
    assert world.metrics == {"eval/hard/reward": 0.1}, "and no mean over what is left"
    assert world.state.eval_reward is None
    assert [text for kind, text in world.events if kind == "eval-failed"] == ["set easy: it broke -- none"]


async def test_a5_rows_that_are_not_asked_are_told_with_the_result() -> None:
    world = World({"": of_set(num_prompts=64)})
    result = await world.evaluator.evaluate()
    assert result.num_left_out == 36
    assert world.events[-1][1].endswith("; 36 held-out rows beyond num_prompts were left out")
