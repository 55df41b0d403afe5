"""Launchers that a real Slurm starts: a controller, a node and munge of the test's own, on this machine."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from tests.harness.ledger_audit import audit_ledger
from tests.harness.run_job import events, make_job, metrics
from tests.harness.waiting import wait_until

pytestmark = pytest.mark.timeout(240)

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel")
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
NodeName={host} NodeAddr=127.0.0.1 CPUs=2
PartitionName=all Nodes=ALL Default=YES State=UP OverSubscribe=FORCE:4
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SlurmUser=root
SlurmctldPort={controller}
SlurmdPort={node}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmdSpoolDir={folder}/spool
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
KillWait=30
"""
JOB = """#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks=2
#SBATCH --overcommit
#SBATCH --output={folder}/printed-%j.txt
#SBATCH --time=10
srun --overcommit --kill-on-bad-exit=1 {myxa} {words} --rdzv-file {folder}/rdzv-$SLURM_JOB_ID --finish-timeout 25
"""
TWO_NODES = ("roles.rollout.nodes=[1]",)


@dataclass(frozen=True)
class Cluster:
    folder: Path

    def call(self, *command: str) -> str:
        env = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, (command, done.stdout, done.stderr, self.logs())
        return done.stdout

    def submit(self, folder: Path, *words: str) -> str:
        """The job's number."""
        myxa = f"{sys.executable} -m myxa.launch"
        (folder / "job.sbatch").write_text(JOB.format(folder=folder, myxa=myxa, words=" ".join(words)))
        return self.call("sbatch", "--parsable", str(folder / "job.sbatch")).strip()

    def state(self, job: str) -> str:
        (line,) = (text for text in self.call("scontrol", "show", "job", job).split() if text.startswith("JobState="))
        return line.partition("=")[2]

    def logs(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in self.folder.glob("*.log"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing or os.geteuid():
        pytest.skip(
            f"NO SLURM: {', '.join(missing) or 'root'} is missing (Debian: slurmctld slurmd slurm-client munge)"
        )
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("spool", "state"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    ports = {"controller": free_port(), "node": free_port()}
    (folder / "slurm.conf").write_text(CONF.format(host=socket.gethostname(), folder=folder, **ports))
    env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    munge = [
        f"--{what}={folder}/munge.{what.removesuffix('-file')}"
        for what in ("socket", "pid-file", "log-file", "seed-file")
    ]
    daemons = (
        ["munged", "--foreground", "--force", *munge, f"--key-file={key}"],
        ["slurmctld", "-D", "-c"],
        ["slurmd", "-D", "-c"],
    )
    started: list[subprocess.Popen[bytes]] = []
    found = Cluster(folder)
    try:
        for command in daemons:
            with (folder / f"{command[0]}.out.log").open("wb") as out:
                started.append(subprocess.Popen(command, env=env, stdout=out, stderr=out))
            if command[0] == "munged":
                wait_until((folder / "munge.socket").exists, "munge listens", timeout_s=20)
        wait_until(lambda: "idle" in _sinfo(env), "the node is idle", timeout_s=60)
        yield found
    finally:
        for process in reversed(started):
            process.send_signal(signal.SIGTERM)
            process.wait(30)


def free_port() -> int:
    """One that was free a moment ago: Slurm takes no other kind."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def _sinfo(env: dict[str, str]) -> str:
    return subprocess.run(["sinfo", "-h", "-o", "%T"], env=env, capture_output=True, text=True, check=False).stdout


def launchers(folder: Path) -> list[int]:
    found: list[int] = []
    for process in psutil.process_iter(["cmdline"]):
        if any(str(folder) in word for word in process.info["cmdline"] or ()):
            found.append(process.pid)
    return found


def test_two_tasks_are_two_nodes_of_one_run_and_scancel_leaves_a_run_to_resume(
    cluster: Cluster, tmp_path: Path
) -> None:
    job = make_job(tmp_path)
    sets = ("run.num_steps=400", "trainer.checkpoint_every=2", *TWO_NODES)
    words = ("launch", str(tmp_path / "run.toml"), *(part for item in sets for part in ("--set", f"'{item}'")))
    number = cluster.submit(tmp_path, *words)

    def printed() -> str:
        return "\n".join(path.read_text() for path in sorted(tmp_path.glob("printed-*.txt")))

    def steps() -> list[int]:
        runs = tmp_path / "runs"
        return [point["step"] for point in metrics(job.run_dir())] if (runs / "latest").exists() else []

    wait_until(lambda: max(_safely(steps), default=0) >= 4, printed, timeout_s=90)
    cluster.call("scancel", number)
    wait_until(lambda: cluster.state(number) == "CANCELLED", "the job is over", timeout_s=60)
    wait_until(lambda: not launchers(tmp_path), "no process is left", timeout_s=30)
    stopped = max(steps())
    assert stopped < 400
    run_dir = job.run_dir()
    assert {event["source"] for event in events(run_dir, "stopping")} or printed()

    number = cluster.submit(tmp_path, "resume", str(run_dir), "--set", f"run.num_steps={stopped + 2}")
    wait_until(lambda: cluster.state(number) in ("COMPLETED", "FAILED"), printed, timeout_s=120)
    assert cluster.state(number) == "COMPLETED", printed()
    assert not launchers(tmp_path)
    assert max(steps()) == stopped + 2
    audit = audit_ledger(job.run_dir() / "ledger.sqlite")
    assert audit.num_rewound == 0, "a checkpoint was written when the job was cancelled"


def _safely(steps: Callable[[], list[int]]) -> list[int]:
    try:
        return steps()
    except (OSError, ValueError):  # a line is being written
        return []
