"""Training on recorded groups: a run without an engine, by the command a user types."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from tests.data.opened import open_prompts
from tests.harness.commands import Command
from tests.harness.dumps import whole_groups, write_groups
from tests.harness.run_job import Job, audit, metrics, worker_pids
from tests.harness.waiting import wait_until

from myxa.actors.engines.embedded.engine import EmbeddedEngine, EmbeddedOptions
from myxa.actors.ledger.file import State
from myxa.actors.models.tokenizer import load_tokenizer
from myxa.actors.rewards.rewarder import make_rewarder
from myxa.actors.rollout.group_runner import GroupRunner, RolloutOptions
from myxa.actors.workflows import named
from myxa.actors.workflows.episode import ModelAccess
from myxa.core.clock import SystemClock
from myxa.core.config import load_config
from myxa.core.messages import Assignment, SamplingParams
from myxa.core.samples import NO_VERSION, Group

pytestmark = pytest.mark.timeout(180)
NUM_STEPS = 80
PAGE = Path(__file__).parents[2] / "docs" / "engines.md"
NUM_GROUPS = 12


async def recorded(job: Job, path: Path) -> list[Group]:
    """A dump of what the job's model says, with rewards of which each is another."""
    config = load_config(job.folder / "run.toml")
    data = open_prompts(config)
    engine, scorer = EmbeddedEngine(config.model.path, EmbeddedOptions(seed=9)), make_rewarder(config)
    await engine.start()
    runner = GroupRunner(
        workflow=named.answer_once,
        scorer=scorer,
        tokenizer=load_tokenizer(config.model.path),
        model=ModelAccess(generate=engine.generate, sampling=SamplingParams(), context_length=64),
        options=RolloutOptions(),
        clock=SystemClock(),
    )
    sampling = SamplingParams(max_new_tokens=config.rollout.max_new_tokens)
    groups: list[Group] = []
    try:
        for draw in range(NUM_GROUPS):
            prompt = data.prompt(draw)
            assert prompt is not None
            given = Assignment(prompt=prompt, attempt=1, num_samples=config.rollout.num_samples, sampling=sampling)
            group = await runner.run(given)
            group.rewards[:] = np.arange(4) + 10 * draw
            told = [replace(s, reference_logprobs=s.logprobs - np.float32(0.01) * draw) for s in group.samples]
            group = replace(group, samples=tuple(told))
            groups.append(group)
    finally:
        await engine.close()
        await scorer.close()
    write_groups(path, groups, lambda draw: draw // 4)
    return groups


def test_a_trainer_is_fed_from_a_dump_and_a_buffer_that_dies_gives_the_same_again(job: Job) -> None:
    groups = asyncio.run(recorded(job, job.folder / "recorded.sqlite"))
    (replay,) = re.findall(r"^```toml\n# replay\.toml\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (job.folder / "replay.toml").write_text(replay)
    words = (f"run.num_steps={NUM_STEPS}", "data.max_passes=0", "async.max_staleness=0")
    words += ('algo.ref_urls=["http://127.0.0.1:9"]', "algo.kl_coef=0.1", 'algo.kl_kind="k1"')
    words = [part for word in words for part in ("--set", word)]
    with Command(["up", "run.toml", "replay.toml", *words], job.folder) as process:
        wait_until(lambda: len(steps(job)) >= 3, "the third step")
        os.kill(worker_pids(process.pid, "buffer")[0], signal.SIGKILL)
        said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    trained = [group for row, group in whole_groups(job.run_dir() / "ledger.sqlite") if row.state is State.TRAINED]
    assert len(trained) >= 12, "those that no checkpoint covers are kept"
    for group in trained:
        was = groups[group.group_id % NUM_GROUPS]
        assert group.rewards.tolist() == was.rewards.tolist()
        for sample, recorded_one in zip(group.samples, was.samples, strict=True):
            for name in ("prompt_ids", "response_ids", "logprobs", "loss_mask", "reference_logprobs"):
                assert np.array_equal(getattr(sample, name), getattr(recorded_one, name)), name
            assert sample.oldest_version() == NO_VERSION, "no engine takes part"
    assert not (job.run_dir() / "logs" / "rollout-0.log").exists()
    assert audit(job.run_dir()).trained == list(range(NUM_STEPS * 4)), "strictly in the order of the dump, pass by pass"
    values = [point["values"] for point in metrics(job.run_dir())]
    diffs = [one["train/logprob_diff_abs_max"] for one in values if "train/logprob_diff_abs_max" in one]
    assert diffs[0] < 2e-5, "the trainer, at the weights that they were drawn with, gives them their log-probs"
    assert not [one for one in values if "guard/logprob_diff" in one]
    first_kl = next(one["train/kl"] for one in values if "train/kl" in one)
    assert 0 < first_kl < 0.03, "towards the reference as it is recorded: 0.01 nats further with each group"


def steps(job: Job) -> list[float]:
    try:
        return [p["values"]["reward/raw_mean"] for p in metrics(job.run_dir()) if "reward/raw_mean" in p["values"]]
    except (OSError, ValueError):
        return []
