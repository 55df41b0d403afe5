"""Rewards are run where they should be; whatever a function does, the rewarder says so and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.rewards.world import answer, failure, rewarder

from myxa.actors.rewards import pool
from myxa.actors.rewards.guard import ErrorBudget
from myxa.actors.rewards.rewarder import FixedReward, Rewarder, make_rewarder
from myxa.actors.subreaper import descendants
from myxa.algos.rewards.outcome import RewardOutcome
from myxa.core.config import RewardSettings, RunConfig
from myxa.core.errors import ConfigError, UserCodeError

CODE = '''
import asyncio, os, sys, threading, time

def act(completion):
    """Does what the text says."""
    verb = completion.text
    if verb == "hang": time.sleep(600)
    if verb == "print": print("noise on standard output", flush=True)
    if verb == "input": return float(sys.stdin.read() == "")
    if verb == "pid":
        return {"reward": 0.5, "pid": os.getpid(), "main": threading.current_thread() is threading.main_thread()}
    if verb == "fork": return float(os.fork() > 0)
    return None if verb == "none" else 1.0

async def act_later(completion):
    await asyncio.sleep(0.01)
    if completion.text == "hang": await asyncio.sleep(600)
    return act(completion)

def nested(completion):
    later = act_later(completion)
    try:
        return asyncio.run(later)
    finally:
        later.close()

def forgot(completion):
    return act_later(completion)

def scaled(completion, *, factor, pattern=""):
    return {"reward": factor, "pattern": len(pattern)}
'''


@pytest.fixture(autouse=True)
def nothing_survives() -> Any:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    deadline = time.monotonic() + 10
    while left := [c for c in psutil.Process().children(recursive=True) if c.pid not in before]:
        assert time.monotonic() < deadline, f"still alive: {left}"
        time.sleep(0.05)


@pytest.fixture
def code(write_code: Callable[[str], Path]) -> str:
    return str(write_code(CODE))


async def kill_the_worker(of: Rewarder) -> None:
    """The only one, which is idle; returns when it is known to be dead."""
    (pid,) = of.worker_pids
    os.kill(pid, 9)
    async with asyncio.timeout(10):
        while of.worker_pids:
            await asyncio.sleep(0.02)


async def test_builtins_run_in_the_loop_and_length_costs_a_part_of_any_reward() -> None:
    cut = answer("4", "4", num_tokens=100, finish="length")
    async with rewarder("exact") as made:
        assert [(await made.score(answer(text, "4"))).value for text in "45"] == [1.0, 0.0]
        assert (await made.score(cut)).value == 1.0
        assert made.worker_pids == ()
    costs = {"overlong_tokens": 100, "overlong_buffer": 20, "overlong_penalty": 0.5}
    async with rewarder("exact", **costs, truncated="zero") as made:
        assert await made.score(answer("4", "4", num_tokens=80)) == RewardOutcome(1.0, {"overlong": 0.0})
        assert await made.score(answer("4", "4", num_tokens=90)) == RewardOutcome(0.75, {"overlong": -0.25})
        assert await made.score(cut) == RewardOutcome(-0.5, {"overlong": -0.5})


def test_an_overlong_buffer_fits_into_the_length() -> None:
    for tokens, buffer in ((100, 0), (100, 101), (0, 5)):
        with pytest.raises(ValueError, match="overlong_tokens"):
            RewardSettings(overlong_tokens=tokens, overlong_buffer=buffer)


async def test_math_gets_a_process_even_if_none_was_asked_for() -> None:
    async with rewarder("math", args={"seconds": 1}) as made:
        done = await asyncio.gather(*(made.score(answer(rf"\boxed{{{i}+x}}", "x+3")) for i in range(5)))
        assert [outcome.value for outcome in done] == [0.0, 0.0, 0.0, 1.0, 0.0]
        assert len(made.worker_pids) == 1
        assert (await made.score(answer(r"\boxed{1+y}", '["x","y+1"]'))).value == 1.0
        assert made.num_errors == 0


def test_math_is_imported_in_its_own_process_only() -> None:
    code = (
        "import sys; from myxa.actors.rewards.rewarder import Rewarder; from myxa.core.config import RewardSettings;"
        "Rewarder(RewardSettings(fn='math')); print(sorted({'torch', 'sympy', 'math_verify', 'zmq'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


async def test_own_functions_run_in_the_main_threads_of_processes(code: str) -> None:
    for fn in ("act", "act_later"):
        async with rewarder(f"{code}:{fn}") as made:
            outcome = await made.score(answer("pid"))
            (pid,) = made.worker_pids
            assert outcome == RewardOutcome(0.5, {"pid": float(pid), "main": 1.0}) and pid != os.getpid()
    async with rewarder(f"{code}:act", workers=2) as made:
        outcomes = await asyncio.gather(*(made.score(answer("pid")) for _ in range(8)))
        pids = {int(outcome.parts["pid"]) for outcome in outcomes}
        assert pids == set(made.worker_pids) and 1 <= len(pids) <= 2 and os.getpid() not in pids


async def test_quick_calls_are_served_by_the_workers_that_are_there_while_others_start(
    code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "STARTS_AT_ONCE", 1)
    async with rewarder(f"{code}:act", workers=6) as made:
        await asyncio.gather(*(made.score(answer("pid")) for _ in range(6)))
        assert len(made.worker_pids) < 6


async def test_the_time_of_calls_is_told_by_what_took_it(tmp_path: Path) -> None:
    path = tmp_path / "slow.py"
    path.write_text("import time\ndef slow(completion):\n    time.sleep(0.2)\n    return 1.0\n")
    async with rewarder(f"{path}:slow", workers=1) as rewards:
        await rewards.score(answer("the worker starts"))
        before, began_s = rewards.seconds(), time.monotonic()
        await asyncio.gather(*(rewards.score(answer("x", group_id=n)) for n in range(4)))
        elapsed_s = time.monotonic() - began_s
        spent = {what: seconds - before[what] for what, seconds in rewards.seconds().items()}
    assert 0.79 <= spent["function"] <= elapsed_s
    assert spent["queue"] >= 0.2 + 0.4 + 0.6 - 0.05, "for the only worker"
    assert 0.0 < sum(spent.values()) <= 4 * elapsed_s
    async with rewarder("exact") as rewards:
        await rewards.score(answer("x"))
        assert rewards.seconds() == {}, "no worker, and nothing to say"


async def test_named_arguments_and_pattern_reach_an_own_function(code: str) -> None:
    async with rewarder(f"{code}:scaled", args={"factor": 2.5}, pattern="abc", workers=1) as made:
        assert await made.score(answer("x")) == RewardOutcome(2.5, {"pattern": 3.0})
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"fn": f"{code}:scaled"}, "missing a required argument: 'factor'"), ({"fn": f"{code}:nope", "workers": 1}, "nope"),
        ({"fn": "numeric", "args": {"tol": 1}}, "tol"),
    ]  # fmt: skip
    for settings, says in wrong:
        with pytest.raises(ConfigError, match=says):
            Rewarder(RewardSettings(**settings))


@pytest.mark.usefixtures("called_here")
async def test_a_function_that_forgot_to_be_async(code: str) -> None:
    async with rewarder(f"{code}:forgot") as made:
        assert "returned a coroutine; declare it, and what wraps it, with `async def`" in await failure(
            made, answer("x")
        )
    async with rewarder(f"{code}:nested") as made:
        told = await failure(made, answer("x"))
        assert "asyncio.run() cannot be called" in told and "declare it with `async def`, and `await` there" in told


@pytest.mark.usefixtures("null_device")
async def test_a_worker_outlives_prints_and_forks_and_is_replaced_when_it_dies(
    code: str, capfd: pytest.CaptureFixture[str]
) -> None:
    async with rewarder(f"{code}:act", workers=1) as made:
        for text in ("print", "input", "fork", "fork"):
            assert (await made.score(answer(text))).value == 1.0
        task = asyncio.ensure_future(made.score(answer("hang")))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await made.score(answer("pid"))).value == 0.5, "not the answer of the cancelled call"
        await kill_the_worker(made)
        assert (await made.score(answer("fine"))).value == 1.0, "an idle worker's death costs no call"
        assert made.num_errors == 0
    captured = capfd.readouterr()
    assert "noise on standard output" in captured.err and captured.out == ""


async def test_closing_ends_a_call_that_runs(code: str) -> None:
    async with rewarder(f"{code}:act", workers=2) as made:
        task = asyncio.ensure_future(made.score(answer("hang")))
        await asyncio.sleep(0.1)
        await made.close()
        with pytest.raises(UserCodeError):
            await task
        assert "was called after its actor ended" in await failure(made, answer("x"))


async def test_a_start_overtaken_by_the_end_is_waited_for(code: str) -> None:
    others = set(descendants(os.getpid()))
    async with rewarder(f"{code}:act", workers=1) as made:
        task = asyncio.ensure_future(made.score(answer("x")))
        await asyncio.sleep(0.01)
        await made.close()
        assert set(descendants(os.getpid())) <= others
        with pytest.raises(UserCodeError):
            await task


@pytest.mark.usefixtures("called_here")
async def test_too_many_errors_end_the_run(code: str) -> None:
    async with rewarder(f"{code}:act_later", max_error_rate=0.2) as made:
        for number in range(20):
            assert made.too_many_errors == ""
            if number % 4:
                await made.score(answer("fine"))
            else:
                await failure(made, answer("none"))
        assert made.too_many_errors == (
            f'reward function "{code}:act_later" failed in 5 of the last 20 calls, more than reward.max_error_rate = 0.2 '
            "allows; last: returned a value of type NoneType, not a number"
        )
        assert made.num_errors == 5


def test_the_error_budget_looks_at_the_last_calls_only() -> None:
    budget = ErrorBudget(0.1)
    for _ in range(19):
        budget.note(has_failed=True)
    assert not budget.is_spent
    for _ in range(1000):
        budget.note(has_failed=False)
    assert not budget.is_spent
    for _ in range(10):
        budget.note(has_failed=True)
    assert not budget.is_spent
    budget.note(has_failed=True)
    assert budget.is_spent
    assert budget.recent == (11, 100)
    never = ErrorBudget(0.0)
    for number in range(20):
        never.note(has_failed=number == 0)
    assert never.is_spent


async def test_a_function_that_loads_here_but_not_in_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "here_only.py"
    file.write_text(f"import os\nif os.getpid() != {os.getpid()}: raise OSError('no licence')\ndef f(c): return 1.0\n")
    async with rewarder(f"{file}:f", workers=1) as made:
        message = await failure(made, answer("x"))
        assert message.startswith(f"reward.fn: importing {file} raised OSError: no licence ({file}:2) -- ")
        assert made.too_many_errors == message
        assert made.num_errors == 1


async def test_demonstrations_get_a_fixed_reward() -> None:
    raw: dict[str, Any] = {"model": {"path": "m"}, "data": {"train": "t", "preset": "chat"}}
    made = make_rewarder(RunConfig.model_validate({**raw, "algo": {"kind": "sft"}}))
    assert isinstance(made, FixedReward)
    assert await made.score(answer("x", "y")) == RewardOutcome(1.0)
    assert (made.too_many_errors, made.num_errors) == ("", 0)
    await made.close()
    assert isinstance(make_rewarder(RunConfig.model_validate(raw)), Rewarder)
