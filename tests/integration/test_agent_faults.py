"""`bench/agent_faults.py` at the size of CI: an environment that blocks, hangs and raises costs no step and no group."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from pathlib import Path

import pytest
from tests.harness.commands import Command
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
    wishes = {"steps": 6, "block": 30.0, "hang": 3600.0, "limit": 6.0, "max_block": 1.0, "env": 0.5}
    found = bench.run(tmp_path, **wishes, start=lambda words, folder, log: Command(words, folder, log=log))
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
        await asyncio.sleep(0.3)
        await ctx.episode.generate()
        if LOG.read_text().count("close") > 8 and not OPEN.exists():
            note("held", ctx.session_id, ctx.attempt, ctx.is_replay)
            while not OPEN.exists():
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
    flags = (
        'rollout.workflow="shop.py:play"', 'reward.fn="workflow"', "rollout.max_turns=2", "rollout.max_groups=6",
        "run.num_steps=100000",
    )  # fmt: skip
    command = job.start(*flags)

    def lines(of: str) -> list[tuple[str, str, str]]:
        """(session, attempt, is a replay) of the orders or the closings."""
        log = tmp_path / "log"
        found = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
        return [(session, attempt, again) for what, session, attempt, again in found if what == of]

    def replayed() -> set[str]:
        """Others were dispatched to the dead actor and not begun."""
        orders = lines("order")
        return {s for s, _, again in orders if again == "True"} & {s for s, attempt, _ in orders if attempt == "0"}

    try:
        wait_until(lambda: len(lines("held")) >= 4, "open episodes")
        os.kill(worker_pids(command.pid, "rollout/0")[0], signal.SIGKILL)
        (tmp_path / "open").touch()
        wait_until(replayed, "a replay")
    finally:
        command.send_signal(signal.SIGINT)
        command.communicate(timeout=60)
    first = [session for session, attempt, _ in lines("order") if attempt == "0"]
    assert len(first) == len(set(first)), "no session was begun twice as if it were new"
    assert replayed() <= {session for session, attempt, _ in lines("close") if attempt == "0"}
