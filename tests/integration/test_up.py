"""A terminal that is closed, and sampling that the trainer follows: by the commands a user types."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

import psutil
import pytest
from tests.harness.own_segments import own_segments
from tests.harness.run_job import Job, audit, is_alive, metrics
from tests.harness.waiting import wait_until

from myxa.actors.checkpoints.folder import look_at

pytestmark = pytest.mark.timeout(180)


def test_a_closed_terminal_ends_the_run_which_leaves_nothing_but_a_checkpoint_to_go_on_from(job: Job) -> None:
    """One checkpoint is written beside training, and one that training waits for at the end."""
    segments = own_segments()
    with job.start(
        "run.num_steps=100000",
        "trainer.checkpoint_every=2",
        "trainer.async_save=true",
        "rollout.top_p=0.99",
        *job.paced(),
    ) as process:
        wait_until(lambda: _steps(job) >= 4, "the fourth step")
        pids = [p.pid for p in process.below()]
        sockets = [path for p in process.below() for path in _sockets(p)]
        for _ in range(2):  # as kernel and shell do when a terminal is closed: no wish to end at once
            process.send_signal(signal.SIGHUP)
        said, _ = process.communicate(timeout=60)
    first = job.run_dir()
    assert process.returncode == 129, said
    assert said.count("warning: rollout.top_p = 0.99: tokens are drawn from a part of the distribution") == 1
    assert not is_alive(pids)
    assert not [s for s in sockets if os.path.exists(s)]
    assert own_segments() <= segments
    assert {p["step"] for p in metrics(first) if "checkpoint/async_s" in p["values"]} >= {2}, "beside training"
    last = int(max((first / "checkpoints").iterdir()).name.removeprefix("version_"))
    assert last == _steps(job), "it ended in good order"
    info = look_at(first / "checkpoints" / f"version_{last:08d}")
    assert info.is_complete, info.problem
    trained = audit(first).trained
    assert len(trained) == len(set(trained)) == last * 4


def _sockets(process: psutil.Process) -> list[str]:
    """Files of its sockets; nothing, where it has ended."""
    with suppress(psutil.NoSuchProcess):
        return [str(one.laddr) for one in process.net_connections("unix") if str(one.laddr).startswith("/")]
    return []


def _steps(job: Job) -> int:
    try:
        return sum("reward/mean" in p["values"] for p in metrics(job.run_dir()))
    except (OSError, ValueError):
        return 0


def test_tokens_that_sampling_cut_off_are_cut_off_in_the_trainers_softmax_too(job: Job):
    """On-policy, so the engine's log-probs, over what was left, are the trainer's."""
    cut = ("rollout.top_p=0.6", "rollout.top_k=50", "rollout.replay_sampling=true", "async.max_staleness=0")
    status, printed, run_dir = job.run("run.num_steps=3", "algo.epochs=2", *cut)
    assert status == 0, printed
    points = [point["values"] for point in metrics(run_dir) if "train/logprob_diff_abs_max" in point["values"]]
    assert len(points) == 3
    for values in points:
        assert values["train/logprob_diff_abs_max"] < 1e-3
