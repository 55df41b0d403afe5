"""Trainer and engines in turns on two nodes: one gang, an engine a node, one manager and its agent. Two launchers on this
machine meet over tcp, as on two."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.harness.commands import Command
from tests.harness.run_job import Job, audit, events, metrics
from tests.integration.device_sampler import Sampler

pytestmark = pytest.mark.timeout(180)

MIB = 1 << 20
CAPACITY_MIB = 9
OVERRIDES = (
    'memory.share="switch"', f"memory.capacity_mb={CAPACITY_MIB}", "memory.switch_s=40", "engine.context_length=64",
    "engine.max_running=4", "roles.trainer.nodes=[0, 1]", "roles.rollout.nodes=[0, 1]", "roles.memory.nodes=[0, 1]",
    'weights.channel="disk"',
)  # fmt: skip
Launchers = tuple[subprocess.Popen[str], subprocess.Popen[str]]


@contextmanager
def two_nodes(job: Job, *overrides: str) -> Iterator[Launchers]:
    """Both launchers; what they print goes to `said.<node>`."""
    sets = [part for item in (*OVERRIDES, *overrides, f'run.dir="{job.folder}/runs"') for part in ("--set", item)]
    meeting = ["--rdzv-file", str(job.folder / "rdzv"), "--job-key", str(job.folder / "job.key")]

    def launch(rank: int, *more: str) -> subprocess.Popen[str]:
        place = ["--nnodes", "2", "--node-rank", str(rank), *meeting, *more, "--lost-timeout", "6"]
        with (job.folder / f"said.{rank}").open("w") as out:
            return Command(["launch", str(job.folder / "run.toml"), *place, *sets], job.folder, log=out)

    launchers = (launch(0, "--rdzv", "127.0.0.1:0"), launch(1))
    try:
        yield launchers
    finally:
        for launcher in launchers:
            launcher.send_signal(signal.SIGTERM)
        for launcher in launchers:
            try:
                launcher.wait(30)
            except subprocess.TimeoutExpired:
                launcher.kill()
                launcher.wait()


def ended(job: Job, launchers: Launchers, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    for node, launcher in enumerate(launchers):
        status = launcher.wait(max(1.0, deadline - time.monotonic()))
        assert status == 0, (job.folder / f"said.{node}").read_text()


def test_a_gang_on_two_nodes_takes_turns_with_an_engine_on_each(job: Job) -> None:
    flags = ("run.num_steps=3", "guard.every=2")
    with two_nodes(job, *flags) as launchers:
        watched = [
            Sampler(launcher.pid, (f"trainer/{node}",), (f"rollout/{node}",), (f"host:0@{node}",))
            for node, launcher in enumerate(launchers)
        ]
        with watched[0], watched[1]:
            ended(job, launchers, 120)
    facts = audit(job.run_dir())
    assert len(facts.trained) == len(set(facts.trained)) == 3 * 4
    assert not events(job.run_dir(), "lease-refused")
    for node, seen in enumerate(watched):
        assert seen.num_looks > 20
        assert seen.seen[f"trainer/{node}"] + seen.seen[f"rollout/{node}"] > CAPACITY_MIB * MIB, "not both at once"
        assert seen.highest[f"host:0@{node}"] <= CAPACITY_MIB * MIB
    told = [p["values"]["guard/logprob_diff"] for p in metrics(job.run_dir()) if "guard/logprob_diff" in p["values"]]
    assert told
    assert max(told) < 1e-4, "the engines of both nodes have the weights that were handed over"
