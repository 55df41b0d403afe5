"""Frozen models of a run's own, by the command a user types: through kill -9 of their actor while it is asked."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tests.harness.commands import run as run_command
from tests.harness.dumps import whole_groups
from tests.harness.run_job import Job, audit, events, metrics, worker_pids
from tests.harness.waiting import wait_until

pytestmark = pytest.mark.timeout(180)
STEPS = 5
FLOWS = """
from pathlib import Path
from myxa.core.samples import Message

LOG = Path(__file__).with_name("log")

def note(*words):
    with LOG.open("a") as file:
        file.write(" ".join(map(str, words)) + chr(10))

async def talk(ctx, prompt):
    other = ctx.models["critic"].session(prompt.messages)
    for _ in range(2):
        mine = await ctx.episode.generate()
        note("asked", ctx.session_id)
        other.reply("user", mine.text) if other.num_turns else None
        said = await other.generate()
        note("told", ctx.session_id)
        if not ctx.episode.reply("user", said.text[:8] or "go on"):
            break
    return ctx.episode.sample(reward=float(len(mine.text) % 3))
"""


def test_a_run_ends_well_although_the_actor_of_its_model_is_killed_in_the_middle_of_rollouts(job: Job) -> None:
    log = job.folder / "log"
    (job.folder / "flows.py").write_text(FLOWS)
    flags = (
        'rollout.workflow="flows.py:talk"', 'reward.fn="workflow"', "rollout.max_turns=2", f"run.num_steps={STEPS}",
        'models.critic.path="model"', "models.critic.max_new_tokens=6",
    )  # fmt: skip

    def waiting() -> int:
        """Rollouts that wait for the model."""
        words = [line.split()[0] for line in log.read_text().splitlines()] if log.exists() else []
        return words.count("asked") - words.count("told")

    def told() -> int:
        return log.read_text().count("told") if log.exists() else 0

    with job.start(*flags) as process:
        killed = set[int]()
        for number in (1, 2):
            wait_until(lambda: told() > 16 * number, "the model answers")  # noqa: B023 -- used at once
            wait_until(lambda: set(worker_pids(process.pid, "model/critic/0")) - killed, "it is there")
            (pid,) = set(worker_pids(process.pid, "model/critic/0")) - killed
            killed.add(pid)
            os.kill(pid, signal.SIGSTOP)
            wait_until(lambda: waiting() >= 4, f"rollouts wait, kill {number}")
            os.kill(pid, signal.SIGKILL)
        out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    run_dir = job.run_dir()
    facts = audit(run_dir)
    assert len(facts.trained) == len(set(facts.trained)) == STEPS * 4
    assert "DROPPED" not in facts.states and not events(run_dir, "member-failed")
    groups = [group for _, group in whole_groups(run_dir / "ledger.sqlite")]
    samples = [one for group in groups for one in group.samples if one.num_turns == 2]
    assert samples and all(0 < one.loss_mask.sum() < len(one.loss_mask) for one in samples), "what it says is masked"
    told_of = {point["source"] for point in metrics(run_dir) if "model/num_requests" in point["values"]}
    assert told_of == {"model/critic/0"}


def test_the_example_of_self_play_is_planned_and_makes_steps(job: Job) -> None:
    """What it learns is in its README."""
    example = Path(__file__).parents[2] / "examples" / "self_play"
    files, folder = (str(example / "run.toml"), str(job.folder / "run.toml")), job.folder
    small = ('model.path="model"', 'models.opponent.path="model"', "run.num_steps=2", "algo.batch_size=2",
             f'rollout.workflow="{example / "self_play.py"}:match"', "rollout.max_groups=4", "algo.group_filter=none",
             'data.train="data/prompts.jsonl"')  # fmt: skip
    words = (*files, *(part for one in small for part in ("--set", one)))
    planned = run_command("plan", *words, folder=folder, timeout_s=60)
    assert planned.returncode == 0 and "model/opponent/0" in planned.stdout, planned.stdout + planned.stderr
    done = run_command("up", *words, "--quiet", folder=folder, timeout_s=150)
    assert done.returncode == 0, done.stdout + done.stderr
    groups = [group for _, group in whole_groups(job.run_dir() / "ledger.sqlite")]
    assert groups and all("opponent" in one.metadata for group in groups for one in group.samples)
    assert {float(reward) for group in groups for reward in group.rewards} <= {0.0, 0.5, 1.0}
