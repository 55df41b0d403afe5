"""`bench/agent_faults.py` at the size of CI: an environment that blocks, hangs and raises costs no step and no group."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from pathlib import Path

import pytest
from tests.harness.run_job import make_job, worker_pids
from tests.harness.waiting import wait_until

BENCH = Path(__file__).parents[2] / "bench" / "agent_faults.py"


@pytest.mark.timeout(240)
def test_d01_d02_d03_a_run_with_a_bad_environment_trains_all_its_steps_and_blames_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location("agent_faults", BENCH)
    assert spec is not None and spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "agent_faults", bench)
    spec.loader.exec_module(bench)
    found = bench.run(tmp_path, steps=6, block=30.0, hang=3600.0, limit=6.0, max_block=1.0, env=0.5)
    assert found.wrong(6) == []


SHOP = """
import asyncio
from pathlib import Path

LOG, OPEN = (Path(__file__).with_name(name) for name in ("log", "open"))

def note(*words):
    with LOG.open("a") as file:
        file.write(" ".join(map(str, words)) + chr(10))

async def play(ctx, prompt):
    note("order", ctx.session_id, ctx.attempt, ctx.is_replay)
    try:
        await ctx.episode.generate()
        while LOG.read_text().count("close") > 8 and not OPEN.exists():
            await asyncio.sleep(0.02)
        ctx.episode.reply("user", "placed")
        turn = await ctx.episode.generate()
    finally:
        note("close", ctx.session_id, ctx.attempt, ctx.is_replay)
    return ctx.episode.sample(reward=float(len(turn.text) % 3))
"""


def test_d04_after_the_death_of_an_actor_a_replay_knows_that_it_is_one_and_the_first_was_closed(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    (tmp_path / "shop.py").write_text(SHOP)
    flags = ('rollout.workflow="shop.py:play"', 'reward.fn="workflow"', "rollout.max_turns=2", "run.num_steps=8")
    command = job.start(*flags)
    log = tmp_path / "log"

    def num(word: str) -> int:
        return log.read_text().count(word) if log.exists() else 0

    wait_until(lambda: num("close") > 8 and num("order") - num("close") >= 4, "episodes under way")
    os.kill(worker_pids(command.pid, "rollout/0")[0], signal.SIGKILL)
    (tmp_path / "open").touch()
    command.communicate(timeout=90)
    assert command.poll() == 0
    lines = [line.split() for line in log.read_text().splitlines()]
    first = [(session, attempt) for what, session, attempt, _ in lines if what == "order" and attempt == "0"]
    assert len(first) == len(set(first)), "no session was begun twice as if it were new"
    later = {session for what, session, attempt, is_replay in lines if (what, is_replay) == ("order", "True")}
    again = later & {session for session, _ in first}  # others were dispatched to the dead actor and not begun
    closed = {(session, attempt) for what, session, attempt, _ in lines if what == "close"}
    assert again and {(session, "0") for session in again} <= closed
