"""The monitor and the memory manager die in real runs: training waits for neither, the monitor's files continue with the
gap marked, tenants keep their device memory while their manager is away."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from tests.control.live import live_run
from tests.harness.ledger_audit import audit_ledger
from tests.harness.run_job import audit, events, metrics, worker_pids
from tests.harness.waiting import wait_until

pytestmark = pytest.mark.timeout(300)

TURNS = (
    'memory.share="switch"', "memory.capacity_mb=9", "memory.switch_s=40", "engine.context_length=64",
    "engine.max_running=4",
)  # fmt: skip


def trained(run_dir: Path) -> int:
    """Groups trained, by the ledger: the monitor's files are what this is about."""
    return len(audit(run_dir).trained)


def goes_on(run_dir: Path, num_steps: int = 2) -> None:
    before = trained(run_dir)
    wait_until(lambda: trained(run_dir) >= before + 4 * num_steps, f"{num_steps} more steps")


def test_training_waits_for_neither_monitor_nor_memory_manager(tmp_path: Path):
    with live_run(tmp_path, "monitor.trace=true", *TURNS) as live:
        run_dir, launcher = live.run_dir, live.launcher.pid
        (monitor,) = worker_pids(launcher, "monitor")
        os.kill(monitor, signal.SIGSTOP)
        stopped = time.time()
        goes_on(run_dir)
        assert not [point for point in metrics(run_dir) if point["wall_s"] > stopped + 1.0], "it stood still"
        os.kill(monitor, signal.SIGKILL)
        goes_on(run_dir)
        wait_until(lambda: bool(events(run_dir, "telemetry-gap")), "the next monitor to mark the gap")
        (gap,) = events(run_dir, "telemetry-gap")
        assert gap["data"]["since_s"] <= stopped + 1.0
        assert gap["data"]["until_s"] > stopped
        before = max((point["step"] for point in metrics(run_dir) if "train/loss" in point["values"]), default=0)

        def is_written() -> bool:
            points = [point for point in metrics(run_dir) if "train/loss" in point["values"]]
            return bool(points) and points[-1]["step"] >= before + 2 and points[-1]["wall_s"] > gap["wall_s"]

        wait_until(is_written, "the curves to go on")
        os.kill(worker_pids(launcher, "memory/0")[-1], signal.SIGKILL)
        goes_on(run_dir)
        assert (run_dir / "logs/memory.0.1.log").exists(), "it was started again; tenants kept their memory"
    assert audit_ledger(run_dir / "ledger.sqlite").problems == ()
    entries = json.loads((run_dir / "trace.json").read_text())
    entries = entries["traceEvents"] if isinstance(entries, dict) else entries
    (mark,) = [entry for entry in entries if entry.get("name") == "no monitor"]
    later = [entry for entry in entries if entry.get("ts", 0) > mark["ts"] + mark["dur"]]
    assert any(entry.get("ph") == "X" for entry in later), "the trace goes on behind the gap"
