"""Environments in worker processes: rollouts, phases that fail, hang or end their worker, teardown, live numbers."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from msgspec.structs import replace
from tests.gateway.scripted import CALL, Says
from tests.harness.group_runner import runner_of
from tests.harness.waiting import until
from tests.workflows.chat_models import QWEN3

from myxa.actors.environments.workflow import EnvironmentPools
from myxa.actors.rewards.rewarder import Rewarder
from myxa.core.config import RewardSettings, RunConfig
from myxa.core.errors import ConfigError, MemberFailed
from myxa.core.messages import Assignment, SamplingParams
from myxa.core.samples import Group, Message, Prompt, Sample

pytestmark = pytest.mark.timeout(120)

GAMES = Path(__file__).with_name("games.py")
ASKED = (Message(role="user", content="Let us count."),)
SAMPLING = SamplingParams(max_new_tokens=400)


def counts(prompt: str) -> str:
    """The number after the one that the environment said last."""
    return str(int(re.findall(r"(?:from|after) (\d+)", prompt)[-1]) + 1)


class Bench:
    """A group runner with environments."""

    def __init__(self, log: Path, answer: Callable[[str], str], workers: int, settings: dict[str, Any]) -> None:
        self.log = log
        log.touch()
        self.says = Says(QWEN3, answer)
        of = {"kind": "gym", "id": f"{GAMES}:Count", "env": {"GAMES_LOG": str(log)}, "teardown_s": 3.0, **settings}
        tables: dict[str, Any] = {
            "model": {"path": str(QWEN3.write(log.parent / "m"))}, "data": {"train": "d"}, "reward": {"fn": "workflow"},
            "rollout": {"workflow": "environment", "max_turns": 5, "workers": workers}, "environments": {"count": of},
        }  # fmt: skip
        self.environments = EnvironmentPools(RunConfig(**tables), self.says.tokenizer, os.environ)
        self.told: list[tuple[str, str]] = []
        self.runner = runner_of(
            self.environments, Rewarder(RewardSettings(fn="workflow")), self.says.tokenizer, self.says.generate,
            context_length=4096, run_dir="/runs/r1", timeout_s=30.0,
        )  # fmt: skip
        self.runner.on_failure = lambda kind, words: self.told.append((kind, words))

    @property
    def pool(self) -> Any:
        return self.environments.pools["count"]

    def lines(self, word: str) -> list[str]:
        return [line for line in self.log.read_text().splitlines() if line.startswith(word)]

    async def run(self, num: int = 1, group: int = 5, recorded: tuple[Sample, ...] = (), **metadata: Any) -> Group:
        prompt = Prompt(group_id=group, row=7, pass_index=0, messages=ASKED, label="", source="d", metadata=metadata)
        assignment = Assignment(
            prompt=prompt, attempt=1 + bool(recorded), num_samples=num, sampling=SAMPLING, partial=recorded
        )
        return await self.runner.run(assignment)


@asynccontextmanager
async def bench(
    tmp_path: Path, answer: Callable[[str], str] = counts, workers: int = 2, **settings: Any
) -> AsyncIterator[Bench]:
    made = Bench(tmp_path / "log", answer, workers, settings)
    try:
        await made.environments.start()
        yield made
    finally:
        await made.environments.close()
        assert not made.pool.pids


async def test_a_rollout_is_what_the_policy_did_and_what_each_turn_earned(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        group = await made.run(4)
        assert group.rewards.tolist() == [1.5] * 4
        for one in group.samples:
            assert one.turns == ("1", "2", "3") and one.token_rewards is not None
            assert one.token_rewards[one.token_rewards != 0].tolist() == [0.5] * 3
            assert one.metadata["environment"] == "count"
            last = max((ids for ids in made.says.prompts), key=len)
            whole = np.concatenate([one.prompt_ids, one.response_ids]).tolist()
            assert whole[: len(last)] == last  # what was asked last is what is trained, verbatim
        threads = {line.rsplit(" ", 1)[1] for line in made.lines("step r1.5.2 ")}
        assert len(threads) == 1  # all of a session in one thread
        assert len(made.lines("close r1.5.")) == 4
        made.says.prompts.clear()
        (again,) = (await made.run(group=6, recorded=(replace(group.samples[0], group_id=6),))).samples
        assert made.says.prompts == [], "another actor plays the recorded turns again"
        assert again.response_ids.tolist() == group.samples[0].response_ids.tolist()
        assert again.reward == 1.5 and made.lines("reset r1.6.0 1 True")
        with pytest.raises(Exception, match='names the environment "cuont"'):
            await made.run(environment="cuont")
        assert (await made.run(environment="count")).rewards.tolist() == [1.5]


async def test_observations_are_shown_whole_and_a_number_that_is_no_action_is_refused(tmp_path: Path) -> None:
    moves = iter(["9" * 300, "2", "1", "-1"])
    async with bench(tmp_path, lambda prompt: next(moves), id=f"{GAMES}:Board") as made:
        (sample,) = (await made.run()).samples
        assert [line.split()[1] for line in made.lines("move")] == ["2", "1", "-1"]
    refused, first, second = (reply[0].content for reply in sample.replies)
    assert "(7, 8)" in made.says.tokenizer.decode(made.says.prompts[0])
    assert "no action" in refused and first == "['left', 'right']" and "..." not in second and second.count("9") == 100
    assert sample.reward == 3.0


async def test_a_wrong_answer_earns_nothing_and_turns_are_limited(tmp_path: Path) -> None:
    async with bench(tmp_path, lambda prompt: "no", args={"goal": 99}) as made:
        (sample,) = (await made.run()).samples
    assert sample.num_turns == 5 and sample.metadata["ended_by"] == "max_turns"


async def test_what_an_environment_asks_wrongly_is_its_failure_and_no_end_of_the_game(tmp_path: Path) -> None:
    async with bench(tmp_path, id=f"{GAMES}:Pictures") as made:
        made.runner.options.rollout = made.runner.options.rollout.model_copy(update={"max_retries": 0})
        with pytest.raises(MemberFailed, match="this model reads text") as caught:
            await made.run()
        assert caught.value.kind == "environment"


async def test_an_error_whose_words_are_no_text_harms_no_other_session(tmp_path: Path) -> None:
    async with bench(tmp_path, workers=1) as made:
        made.runner.options.rollout = made.runner.options.rollout.model_copy(update={"max_retries": 0})
        failing, other = await asyncio.gather(
            made.run(group=1, modes={"step": "odd-name"}), made.run(group=2, modes={"step": "slow"}),
            return_exceptions=True,
        )  # fmt: skip
    assert isinstance(failing, MemberFailed) and "raised FileNotFoundError: level-" in failing.message
    assert isinstance(other, Group) and other.rewards.tolist() == [1.5]


PHASES = ("setup", "step", "finalize", "score")


def check_second_attempts(made: Bench, group: Group) -> None:
    assert set(group.rewards.tolist()) == {1.5} and group.num_masked == 0
    attempts = {tuple(line.split()[2:4]) for line in made.lines(f"reset r1.{group.prompt.group_id}.")}
    assert attempts == {("0", "False"), ("1", "True")}


async def test_members_whose_worker_died_are_tried_again(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        for number, phase in enumerate(("setup", "score")):
            check_second_attempts(made, await made.run(2, number, modes={phase: "die"}, times=1))
        assert {kind for kind, _ in made.told} == {"environment"}


async def test_what_becomes_of_members_that_raise(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        for number, (phase, mode, kind) in enumerate(
            (("setup", "raise", "environment"), ("score", "network", "network"))
        ):
            check_second_attempts(made, await made.run(2, number, modes={phase: mode}, times=1))
            assert {found for found, _ in made.told} == {kind}
            made.told.clear()
        with pytest.raises(MemberFailed, match=r"illegal move at .*games\.py:\d") as caught:
            await made.run(1, modes={"step": "policy"})
        assert caught.value.kind == "policy"
        made.told.clear()
        made.runner.options.rollout = made.runner.options.rollout.model_copy(update={"max_retries": 1})
        with pytest.raises(MemberFailed, match="level"):
            await made.run(1, modes={"step": "raise"})
        assert [words.split(":")[0] for _, words in made.told] == ["it is tried again", "it is masked"]
        made.runner.options.rollout = made.runner.options.rollout.model_copy(update={"max_retries": 0})
        with pytest.raises(MemberFailed, match="a reward is nan"):
            await made.run(1, modes={"score": "nan"})


async def test_members_that_hang_are_tried_again_and_torn_down(tmp_path: Path) -> None:
    limits: dict[str, Any] = {f"{phase}_s": 3.0 for phase in PHASES}
    async with bench(tmp_path, **limits) as made:
        runs = (made.run(2, number, modes={phase: "hang"}, times=1) for number, phase in enumerate(PHASES))
        for group in await asyncio.gather(*runs):
            check_second_attempts(made, group)
        for number, phase in enumerate(PHASES):
            words = next(words for _, words in made.told if f"did not finish {phase} within 3 s at " in words)
            assert "games.py" in words and f"session r1.{number}." in words and "worker process" in words
            await until(
                lambda number=number: len(made.lines(f"close r1.{number}.0")) == 2, "both attempts are torn down"
            )


async def test_a_coroutine_that_waits_or_holds_the_loop_fails_alone(tmp_path: Path) -> None:
    async with bench(tmp_path, id=f"{GAMES}:Async", workers=1, silence_s=4.0, step_s=10.0) as made:
        cases = enumerate((("waits", 2), ("holds", 3), ("", 2)))
        runs = (made.run(num, number, mode=mode) for number, (mode, num) in cases)
        waits, holds, well = await asyncio.gather(*runs)
        check_second_attempts(made, waits)
        check_second_attempts(made, holds)
        assert well.rewards.tolist() == [1.5, 1.5] and not made.lines("reset r1.2.0 1"), made.told
        assert {kind for kind, _ in made.told} == {"environment"} and len(made.told) == 5
        assert sum("did not finish step within 10 s" in words for _, words in made.told) == 2
        assert sum(bool(re.search(r"blocked its process for 2 s at .*games.py", words)) for _, words in made.told) == 3


async def test_a_silent_worker_is_killed_and_its_sessions_are_tried_in_another(tmp_path: Path) -> None:
    async with bench(tmp_path, silence_s=4.0) as made:
        group = await made.run(2, modes={"step": "stop"}, times=1)
        assert group.rewards.tolist() == [1.5, 1.5]
        assert "said nothing for 4 s" in made.told[0][1]
        gone = {int(line.rsplit(" ", 1)[1]) for line in made.lines("stop step")}
        await until(lambda: not any(map(psutil.pid_exists, gone)), "they have ended")


async def test_the_number_of_workers_is_live(tmp_path: Path) -> None:
    async with bench(tmp_path, workers=1, concurrency=2) as made:
        slow: dict[str, Any] = {"modes": {"setup": "slow", "step": "slow"}}
        one = asyncio.ensure_future(made.run(8, 1, **slow))
        await until(lambda: len(made.lines("reset")) >= 2, "two sessions run")
        await asyncio.sleep(0.3)
        assert len(made.pool.pids) == 1 and len(made.lines("reset")) == 2  # the others wait for room
        made.environments.resize(3)
        await until(lambda: len(made.pool.pids) == 3, "three workers")
        made.environments.resize(1)
        assert (await one).rewards.tolist() == [1.5] * 8
        await until(lambda: len(made.pool.pids) == 1, "surplus workers have ended")
        assert not made.told


async def test_tools_and_malformed_calls(tmp_path: Path) -> None:
    turns = iter(["<tool_call>{broken</tool_call>", CALL, "It will rain."])
    async with bench(tmp_path, lambda prompt: next(turns), id=f"{GAMES}:Weather", malformed_reward=-0.5) as made:
        (sample,) = (await made.run()).samples
    assert sample.reward == pytest.approx(1.0 - 0.25 - 0.5) and sample.metadata["num_malformed"] == 1
    assert [reply[0].role for reply in sample.replies] == ["user", "tool"]
    assert sample.token_rewards is not None
    assert sample.token_rewards[sample.token_rewards != 0].tolist() == [-0.75, 1.0]


async def test_what_cannot_be_loaded_is_said_at_the_start(tmp_path: Path) -> None:
    for name, words in ((f"{GAMES}:Cuont", 'has no "Cuont"'), ("nowhere:Env", 'no module "nowhere"')):
        with pytest.raises(ConfigError, match=words):
            async with bench(tmp_path, id=name):
                pass


async def test_a_hanging_teardown_costs_its_worker_and_not_the_sample(tmp_path: Path) -> None:
    async with bench(tmp_path, teardown_s=0.5) as made:
        group = await made.run(1, modes={"close": "hang"})
        assert group.rewards.tolist() == [1.5] and not made.told
        await until(lambda: bool(made.lines("hang close")), "it hangs")
        (before,) = {int(line.rsplit(" ", 1)[1]) for line in made.lines("hang close")}
        await until(lambda: not psutil.pid_exists(before), "the worker has ended")
