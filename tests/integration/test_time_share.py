"""Trainer and engine on one device that cannot hold both: the whole loop in turns, by the command a user types."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests.harness.commands import run as run_command
from tests.harness.run_job import Job, audit, events, metrics
from tests.integration.device_sampler import Sampler

pytestmark = pytest.mark.timeout(180)

MIB = 1 << 20
CAPACITY_MIB = 9
"""The trainer's parameters, gradients and moments take 7.2 MiB, an engine's two sets of weights 3.6."""
TURNS = (
    'memory.share="switch"', f"memory.capacity_mb={CAPACITY_MIB}", "memory.switch_s=40", "engine.context_length=64",
    "engine.max_running=4",
)  # fmt: skip
REWARD = ('reward.fn="mine.py:score"',)
USERS_CODE = """
def score(completion, **_):
    return (sum(map(ord, completion.text)) + completion.num_tokens) % 11 / 10

async def seeded(ctx, prompt):
    from myxa.core.messages import SamplingParams
    await ctx.episode.generate(SamplingParams(max_new_tokens=12, seed=1000 * prompt.group_id + ctx.index))
    return ctx.episode.sample()
"""


@pytest.fixture(autouse=True)
def users_code(job: Job) -> None:
    (job.folder / "mine.py").write_text(USERS_CODE)


def run_sampled(job: Job, *overrides: str, **watched: tuple[str, ...]) -> tuple[Sampler, Path]:
    with job.start(*overrides) as process, Sampler(process.pid, **watched) as sampler:
        said, _ = process.communicate(timeout=150)
    assert process.returncode == 0, said
    return sampler, job.run_dir()


def losses(run_dir: Path) -> list[tuple[int, float, float]]:
    points = [(p["step"], p["values"]) for p in metrics(run_dir) if "train/grad_norm" in p["values"]]
    return [(step, values["train/loss"], values["train/grad_norm"]) for step, values in points]


def test_a_run_in_turns_trains_what_a_run_trains_that_never_switches(job: Job) -> None:
    """Bit for bit. On-policy, one request at a time in the engine and a seed of its own for each, so that nothing
    depends on what happened to run beside what."""
    plain = (
        "async.max_staleness=0", "run.num_steps=2", *REWARD,
        'rollout.workflow="mine.py:seeded"', "engine.max_running=1", "rollout.deterministic=true",
    )  # fmt: skip
    code, said, never = job.run(*plain, "engine.context_length=64")
    assert code == 0, said
    sampler, turns = run_sampled(job, *TURNS, *plain)
    on_policy = [p["values"] for p in metrics(never) if "lag/max" in p["values"]]
    assert [step["lag/max"] for step in on_policy] == [0.0, 0.0]
    assert max(step["train/logprob_diff_abs_max"] for step in on_policy) < 2e-5, "engine and trainer disagree"
    assert len(losses(never)) == 2
    assert all(norm > 0 for _, _, norm in losses(never)), "it learns something"
    assert losses(turns) == losses(never)
    one, other = (run / "export" / "model.safetensors" for run in (never, turns))
    assert one.read_bytes() == other.read_bytes()
    assert sampler.num_looks > 10
    assert sampler.seen["trainer/0"] + sampler.seen["rollout/0"] > CAPACITY_MIB * MIB, "both at once would not fit"
    assert sampler.highest["host:0"] <= CAPACITY_MIB * MIB
    assert sorted(audit(turns).trained) == sorted(audit(never).trained)
    refused = ask_mem(job, "--run", str(never))
    assert refused.returncode == 3
    assert "cannot be spoken to: it is over" in refused.stderr


def test_a_gang_takes_turns_with_two_engines(job: Job) -> None:
    counts = ("memory.capacity_mb=18", "roles.trainer.count=2", "roles.rollout.count=2")
    sampler, run_dir = run_sampled(
        job, *TURNS, *counts, "run.num_steps=4", *REWARD, trainers=("trainer/0", "trainer/1"),
        rollouts=("rollout/0", "rollout/1"),
    )  # fmt: skip
    facts = audit(run_dir)
    assert len(facts.trained) == len(set(facts.trained)) == 4 * 4
    assert not events(run_dir, "lease-refused")
    assert sampler.num_looks > 10
    assert sampler.highest["host:0"] <= 18 * MIB
    told = [p["values"] for p in metrics(run_dir) if p["values"].get("lag/max") == 0]
    assert told
    assert max(step["train/logprob_diff_abs_mean"] for step in told) < 1e-4, (
        "every engine has the weights that were handed over"
    )


def ask_mem(job: Job, *words: str) -> subprocess.CompletedProcess[str]:
    return run_command("mem", *words, folder=job.folder, timeout_s=60)
