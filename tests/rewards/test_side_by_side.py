"""An async reward that blocks, hangs or ends its process costs its own call: the actor's loop turns, others are judged."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.rewards.world import answer, rewarder

from myxa.actors.rewards import pool
from myxa.actors.rewards.rewarder import Rewarder
from myxa.algos.rewards.outcome import RewardOutcome
from myxa.core.errors import DeadlyReward, UserCodeError

CODE = """
import asyncio, os, re, signal, time

async def act(completion):
    verb = completion.text
    if verb == "blocks": time.sleep(60)
    if verb == "cannot be interrupted":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        time.sleep(60)
    if verb == "holds the interpreter": re.match("(a+)+$", "a" * 60 + "b")
    if verb == "leaves": os._exit(7)
    if verb == "forks": return float(os.fork() > 0)
    if verb == "will not be cancelled":
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                pass
    if verb == "waits in a thread": await asyncio.to_thread(time.sleep, 60)
    await asyncio.sleep(0.3)
    return {"reward": 1.0, "pid": os.getpid()}
"""


@asynccontextmanager
async def judge(tmp_path: Path, **settings: Any) -> AsyncIterator[Rewarder]:
    file = tmp_path / "mine.py"
    file.write_text(CODE)
    async with rewarder(f"{file}:act", pause_after=0, **({"max_block_s": 0.3} | settings)) as made:
        await made.score(answer("good"))  # its process is there
        yield made


async def with_others(made: Rewarder, *texts: str) -> list[RewardOutcome | BaseException]:
    """What became of them, called beside good ones, which all are judged; the loop turned all the while."""
    gaps, is_over = [0.0], False

    async def watch() -> None:
        last_s = time.monotonic()
        while not is_over:
            await asyncio.sleep(0.01)
            gaps.append(time.monotonic() - last_s)
            last_s = time.monotonic()

    watching = asyncio.create_task(watch())
    calls = [made.score(answer(text)) for text in ("good", *texts, "good")]
    done = await asyncio.gather(*calls, return_exceptions=True)
    is_over = True
    await watching
    assert max(gaps) < 2.0
    assert [one.value if isinstance(one, RewardOutcome) else one for one in (done[0], done[-1])] == [1.0] * 2
    return done[1:-1]


async def test_d01_a_reward_that_blocks_is_named_with_its_line_and_the_others_are_judged(tmp_path: Path) -> None:
    async with judge(tmp_path) as made:
        before = made.worker_pids
        (told,) = await with_others(made, "blocks")
        assert isinstance(told, UserCodeError)
        assert "blocked its process for 0.3 s at act (mine.py:6); a plain def may" in told.message
        assert made.worker_pids == before
        (told,) = await with_others(made, "cannot be interrupted")
        assert isinstance(told, UserCodeError)
        assert "its code blocked it at act (mine.py:9): exit code 70" in told.message
        (told,) = await with_others(made, "leaves")
        assert isinstance(told, DeadlyReward), "of all that were under way only this one"
        assert "ended its worker process (exit code 7)" in told.message


async def test_d01_code_that_holds_the_interpreter_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "SLACK_S", 0.2)
    async with judge(tmp_path, timeout_s=2.0) as made:
        (told,) = await with_others(made, "holds the interpreter")
        assert isinstance(told, UserCodeError)
        assert "took longer than 2 s" in told.message


async def test_d01_calls_that_hang_in_threads_or_for_ever_starve_nobody(tmp_path: Path) -> None:
    async with judge(tmp_path, timeout_s=1.5) as made:
        told = await with_others(made, *["waits in a thread"] * 40, "will not be cancelled")
        assert all(isinstance(one, UserCodeError) and "took longer than 1.5 s" in one.message for one in told)
        assert isinstance(await made.score(answer("good")), RewardOutcome)
        async with asyncio.timeout(10):  # the process that has them is given up
            while len(made.worker_pids) > 1:
                await asyncio.sleep(0.05)


async def test_as_many_calls_as_there_are_run_side_by_side_in_one_process(tmp_path: Path) -> None:
    async with judge(tmp_path) as made:
        begun_s = time.monotonic()
        done = await asyncio.gather(*(made.score(answer("good", index=index)) for index in range(100)))
        assert time.monotonic() - begun_s < 10  # 30 one after another
        assert {one.parts["pid"] for one in done} == {float(made.worker_pids[0])}
        assert (await made.score(answer("forks"))).value == 1.0, "and its copy says nothing"
        assert (await made.score(answer("good"))).value == 1.0
