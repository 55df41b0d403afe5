"""Random kills for minutes: `make soak`. Nothing may be left, nobody may be forgotten, the run must end well."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import psutil
import pytest

SOAK_S = 180.0


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_run_survives_random_kills(tmp_path: Path, run):
    seed = int(os.environ.get("SOAK_SEED", time.time_ns() % 100_000))
    print(f"seed {seed} (SOAK_SEED)")
    lot = random.Random(seed)
    flags = [flag for role in ("rollout", "trainer", "buffer", "coordinator", "monitor")
             for flag in ("--set", f"roles.{role}.max_restarts=1000")]  # fmt: skip
    with run(tmp_path, "up", *flags, "--set", "roles.rollout.count=3", "--set", "roles.trainer.count=2") as one:
        one.until_serving("monitor", "buffer", "coordinator", "trainer/0", "trainer/1", "rollout/0", "rollout/2")
        kills = 0
        deadline = time.monotonic() + SOAK_S
        while time.monotonic() < deadline:
            workers = [child for child in one.children() if "myxa.launch.worker" in " ".join(cmdline(child))]
            for worker in lot.sample(workers, min(len(workers), lot.choice([1, 1, 1, 2, 8]))):
                worker.send_signal(lot.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV]))
                kills += 1
            time.sleep(lot.uniform(0.0, 6.0))
        print(f"{kills} kills")
        assert one.process.poll() is None, one.evidence()
        one.until(
            lambda: len([c for c in one.children() if "myxa.launch.worker" in " ".join(cmdline(c))]) == 8,
            "all to be back",
        )
        children = one.children()
        one.switch("finish")
        one.until(lambda: one.process.poll() is not None, "the end")
        assert one.ended() == 0, one.evidence()
        one.until_gone(children)


def cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []
