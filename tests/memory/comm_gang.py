"""Runs gangs of `comm_rank.py` for the tests, waits for them with a deadline, ends by pid what is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Collection
from pathlib import Path
from typing import Any

from tests.harness.commands import Command

PROGRAM = Path(__file__).with_name("comm_rank.py")
SEED = 20
WORLD = 4
PATIENCE_S = 2.0
"""Of a rank, where somebody is missing."""

Found = list[dict[str, Any]]
"""By rank, by scenario; nothing of a rank that was to be killed."""


def run_gangs(
    gangs: list[str], folder: Path, *, dying: Collection[str] = (), deadline_s: float = 110.0, program: Path = PROGRAM
) -> dict[str, Found]:
    """What each gang found, by its first scenario. Of those in `dying`, the last rank was to be killed. A failure shows
    that rank's own words."""
    folder.mkdir(parents=True, exist_ok=True)
    print(f"gangs of {WORLD}: {'; '.join(gangs)}, seed {SEED}")
    quiet = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    words = [str(folder), str(WORLD), str(SEED), *gangs]
    with (folder / "first.log").open("w") as log:
        process = Command(words, folder, program=program, env={**os.environ, **quiet, "TMPDIR": str(folder)}, log=log)
    try:
        process.wait(deadline_s)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"some rank still runs after {deadline_s} s\n{told(folder)}") from None
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)  # the ranks die with it
        process.wait(10)
    assert process.returncode == 0, told(folder)
    ends = json.loads((folder / "ends.json").read_text())
    names = [names.split(",")[0] for names in gangs]
    return {name: read(folder / name, ends[name], {WORLD - 1} if name in dying else set()) for name in names}


def read(folder: Path, ends: dict[str, int], killed: set[int]) -> Found:
    found: Found = []
    for rank in range(WORLD):
        if rank in killed:
            assert ends[str(rank)] == -signal.SIGKILL, f"rank {rank} ended with {ends[str(rank)]}"
            found.append({})
            continue
        path = folder / f"{rank}.json"
        assert path.exists(), f"rank {rank} ended with {ends[str(rank)]}\n{told(folder)}"
        result = json.loads(path.read_text())
        bad = [f"{name}: {each['error']}" for name, each in result.items() if not each["ok"]]
        assert not bad, f"rank {rank}: {bad[0]}\n{told(folder)}"
        assert ends[str(rank)] == 0, f"rank {rank} ended with {ends[str(rank)]}\n{told(folder)}"
        found.append(result)
    return found


def told(folder: Path) -> str:
    paths = [*sorted(folder.rglob("*.log")), *sorted(folder.rglob("[0-9].json"))]
    return "\n".join(f"-- {path.relative_to(folder)}: {path.read_text(errors='replace')[-1200:]}" for path in paths)
