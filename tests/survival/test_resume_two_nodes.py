"""A run on two nodes, a rank of its gang and an engine on each, which take turns on the node's device, is killed as a
whole (both launchers and every actor), and `myxa resume` on two nodes goes on to the end of the data: each prompt is
trained on once. Two launchers on this machine meet over tcp, as on two."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.harness.commands import Command
from tests.harness.ledger_audit import audit_ledger
from tests.harness.run_job import Job, events, make_job, metrics, newest_step_in, worker_pids
from tests.harness.waiting import wait_until
from tests.integration.device_sampler import Sampler
from tests.survival.lives import BATCH, FLAGS, check_each_once

from myxa.launch.run_lineage.origin import RunOrigin

pytestmark = pytest.mark.timeout(180)

NUM_PROMPTS = 44
CAPACITY_MIB = 9
"""Not enough for a rank and an engine at once."""
SPREAD = (
    *FLAGS, f'data.train="data/prompts.jsonl@[0:{NUM_PROMPTS}]"', "roles.trainer.nodes=[0, 1]",
    "roles.rollout.nodes=[0, 1]", "roles.memory.nodes=[0, 1]", 'weights.channel="disk"', f"rollout.max_groups={BATCH}",
    'memory.share="switch"', f"memory.capacity_mb={CAPACITY_MIB}", "memory.switch_s=40",
    "engine.context_length=64", "engine.max_running=4",
)  # fmt: skip


class TwoNodes:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.launchers: list[Command] = []
        self._num_lives = 0

    @property
    def run_dir(self) -> Path:
        return self.job.run_dir()

    def begin(self, *words: str) -> None:
        """`words`: what is launched, or resumed, on both."""
        self._num_lives += 1
        folder = self.job.folder
        meeting = ("--rdzv-file", str(folder / f"rdzv.{self._num_lives}"), "--job-key", str(folder / "job.key"))
        self.launchers = []
        for node, more in enumerate((("--rdzv", "127.0.0.1:0"), ())):
            place = ("--nnodes", "2", "--node-rank", str(node), *meeting, *more, "--lost-timeout", "6")
            with (folder / f"said.{self._num_lives}.{node}").open("w") as log:
                self.launchers.append(Command([*words, *place], folder, log=log))

    def version(self) -> int:
        assert all(launcher.poll() is None for launcher in self.launchers), self.said()
        with contextlib.suppress(OSError, ValueError):  # it is not there, or a line is being written
            return newest_step_in(self.run_dir)
        return 0

    def kill(self) -> int:
        """SIGKILL of both launchers and of all that they started; returns of how many processes."""
        everyone = [process for launcher in self.launchers for process in launcher.family()]
        for process in everyone:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        for launcher in self.launchers:
            launcher.wait(30)
        _, alive = psutil.wait_procs(everyone, timeout=20)
        assert not alive, f"outlive their launchers: {alive}"
        return len(everyone)

    def wait(self) -> list[int]:
        """Exit statuses of a life that ends by itself."""
        return [launcher.wait(100) for launcher in self.launchers]

    def said(self) -> str:
        return "\n".join(
            f"== {file.name}\n{file.read_text()[-3000:]}" for file in sorted(self.job.folder.glob("said.*"))
        )


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[TwoNodes]:
    job = make_job(tmp_path)
    job.be_patient(0.3)
    made = TwoNodes(job)
    try:
        yield made
    finally:
        made.kill()
        print(made.said())


def test_a_run_on_two_nodes_that_is_killed_as_a_whole_goes_on_on_two(nodes: TwoNodes):
    sets = [part for item in (*SPREAD, f'run.dir="{nodes.job.folder}/runs"') for part in ("--set", item)]
    nodes.begin("launch", str(nodes.job.folder / "run.toml"), *sets)
    wait_until(lambda: nodes.version() >= 5, "the fifth step")
    run_dir = nodes.run_dir
    for node, launcher in enumerate(nodes.launchers):
        assert worker_pids(launcher.pid, f"trainer/{node}"), f"no rank on node {node}"
        assert worker_pids(launcher.pid, f"rollout/{node}"), f"no engine on node {node}"
    assert nodes.kill() >= 8, "also the buffer and the coordinator"
    assert audit_ledger(run_dir / "ledger.sqlite").problems == ()
    nodes.begin("resume", str(run_dir))
    watched = [
        Sampler(launcher.pid, (f"trainer/{node}",), (f"rollout/{node}",), (f"host:0@{node}",))
        for node, launcher in enumerate(nodes.launchers)
    ]
    with watched[0], watched[1]:
        assert nodes.wait() == [0, 0], nodes.said()
    check_each_once(run_dir, NUM_PROMPTS)
    assert len(RunOrigin.load(run_dir).lives) == 2
    (told,) = [event["text"] for event in events(run_dir, "resumed")]
    assert "its own ledger" in told
    for node, seen in enumerate(watched):
        assert seen.num_looks > 10
        assert seen.seen[f"trainer/{node}"] + seen.seen[f"rollout/{node}"] > CAPACITY_MIB << 20, "not both at once"
        assert seen.highest[f"host:0@{node}"] <= CAPACITY_MIB << 20
    told = [p["values"] for p in metrics(run_dir) if p["values"].get("lag/max") == 0]
    assert told and max(step["train/logprob_diff_abs_mean"] for step in told) < 1e-4, (
        "the engines of both nodes have the weights that were handed over"
    )
