"""Distillation from a teacher behind a server, by the command a user types: through the death of all its processes."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from tests.harness.commands import run as run_command
from tests.harness.dumps import whole_groups
from tests.harness.engine_server import scores, serve
from tests.harness.run_job import Job, audit, metrics
from tests.harness.waiting import wait_until

from myxa.actors.engines.embedded.engine import EmbeddedEngine, EmbeddedOptions
from myxa.actors.models.tiny import make_tiny_model
from myxa.core.samples import Group

pytestmark = pytest.mark.timeout(180)
NUM_STEPS = 20


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a server of that model, on a loop of its own."""
    loop, ready, found = asyncio.new_event_loop(), threading.Event(), list[str]()

    async def be_there() -> None:
        async with serve(folder, options=EmbeddedOptions(max_running=4)) as here:
            found.append(here.url)
            ready.set()
            await asyncio.Event().wait()

    serving = loop.create_task(be_there())

    def work() -> None:
        try:
            loop.run_until_complete(serving)
        except asyncio.CancelledError:
            pass
        finally:
            loop.close()

    thread = threading.Thread(target=work, name="teacher")
    thread.start()
    try:
        assert ready.wait(60), "the server did not come up"
        yield found[0]
    finally:
        loop.call_soon_threadsafe(serving.cancel)
        thread.join(30)


async def judged(folder: Path, groups: list[Group]) -> float:
    """The largest difference of a reference log-prob to what the model of that folder says."""
    engine, worst = EmbeddedEngine(folder, EmbeddedOptions(max_running=4)), 0.0
    await engine.start()
    try:
        for sample in (one for group in groups for one in group.samples):
            assert sample.reference_logprobs is not None
            ids = np.concatenate([sample.prompt_ids, sample.response_ids])
            exact = await scores(engine, ids, len(sample.prompt_ids))
            worst = max(worst, float(np.abs(exact - sample.reference_logprobs).max()))
    finally:
        await engine.close()
    return worst


def test_a_run_distils_from_a_served_teacher_and_goes_on_after_it_was_killed(job: Job) -> None:
    teacher = job.folder / "teacher"
    make_tiny_model(teacher, preset="1m", seed=7)
    with served(teacher) as url:
        distil = (
            f'algo.ref_urls=["{url}"]', 'algo.kl_in="advantage"', 'algo.kl_kind="k1"', "algo.kl_coef=1.0",
            "rollout.num_samples=1", "trainer.checkpoint_every=2", f"run.num_steps={NUM_STEPS}", *job.paced(),
        )  # fmt: skip
        with job.start(*distil) as process:
            wait_until(lambda: len(_kl(job)) >= 3, "the third step")
            os.kill(process.pid, signal.SIGKILL)
            process.communicate(timeout=60)
        done = run_command("resume", str(job.run_dir()), "--quiet", folder=job.folder, timeout_s=120)
        assert done.returncode == 0, done.stdout + done.stderr
    run_dir = job.run_dir()
    facts = audit(run_dir)
    assert len(facts.trained) >= NUM_STEPS * 4
    assert "DROPPED" not in facts.states
    groups = [group for _, group in whole_groups(run_dir / "ledger.sqlite")]
    assert len(groups) >= 4
    assert asyncio.run(judged(teacher, groups)) < 1e-4
    assert all(value != 0.0 for value in _kl(job)), "the policy is another model than its teacher"
    told = [point["values"] for point in metrics(run_dir) if "reference/num_errors" in point["values"]]
    assert told and all(values["reference/num_errors"] == 0.0 for values in told)
    assert any(values.get("reference/s_mean", 0.0) > 0.0 for values in told)


def _kl(job: Job) -> list[float]:
    try:
        return [p["values"]["train/kl"] for p in metrics(job.run_dir()) if "train/kl" in p["values"]]
    except (OSError, ValueError):
        return []
