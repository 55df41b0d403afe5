"""Does anything grow? A tiny run of many steps, and what each of its processes takes meanwhile.

    python bench/long_run.py [--steps 30000] [--every 5] [--set SECTION.KEY=VALUE ...]

The model has 49 thousand parameters, a step takes some milliseconds. Every `--every` seconds the resident memory (RSS),
and the part of it that is not shared (USS), of each process of the run is read. Printed per process: RSS after 10 % of
the steps and at the end, how many bytes a step were added between those two (the slope of a line through all samples),
and whether that is flat: less than `--allowed` bytes of USS a step. What the run left on the disk is listed too. Exit
status 1 if a process grew or the run did not make its steps.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from gpu.make_model import qwen3_config

from myxa.actors.models.hf_folder import write_folder
from myxa.actors.models.tiny import Preset, init_weights, write_tokenizer
from myxa.launch.worker_spec import SPEC_VARIABLE, WORKER_MODULE

SMALLEST = Preset(hidden_size=64, num_layers=1, num_heads=1, num_kv_heads=1, intermediate_size=64)
WARM_UP = 0.1
"""Share of the steps in which a process may grow: caches, arenas and bounded histories fill."""
TAIL_BYTES = 1 << 16
NUM_PROMPTS = 5000
RUN_FILE = """
[run]
name = "long"
dir = "runs"

[model]
path = "model"

[data]
train = "prompts.jsonl"

[rollout]
num_samples = 2
max_new_tokens = 4
max_groups = 8

[reward]
fn = "judged.py:reward"

[algo]
batch_size = 2
group_filter = "none"

[async]
max_staleness = 2

[trainer]
checkpoint_every = 500

[monitor]
tensorboard = false
"""
JUDGED = """
def reward(completion):
    return float(sum(completion.text.encode()) % 2)
"""


@dataclass(frozen=True)
class Look:
    """One process at one moment."""

    step: int
    rss_bytes: int
    uss_bytes: int


@dataclass
class Process:
    """One process of the run through time."""

    name: str
    looks: list[Look] = field(default_factory=list)

    def after(self, step: int) -> list[Look]:
        return [look for look in self.looks if look.step >= step]


def slope(points: list[tuple[float, float]]) -> float:
    """Of the line that fits the points best; 0 where there is none."""
    count = len(points)
    mean_x, mean_y = (sum(column) / max(count, 1) for column in (zip(*points, strict=True) if points else ((), ())))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


class LongRun:
    """The run, and who belongs to it."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder = folder
        self._options = options
        self.by_pid: dict[int, Process] = {}
        config = qwen3_config(SMALLEST, 320, 256, place="bench/long_run.py")
        write_folder(folder / "model", config.source, init_weights(config, 0))
        write_tokenizer(folder / "model", config)
        rows = (json.dumps({"prompt": f"say {number}"}) for number in range(NUM_PROMPTS))
        (folder / "prompts.jsonl").write_text("\n".join(rows))
        (folder / "judged.py").write_text(JUDGED)
        (folder / "run.toml").write_text(RUN_FILE)

    @property
    def run_dir(self) -> Path:
        return self.folder / "runs" / "latest"

    def step(self) -> int:
        """The newest that the metrics tell of."""
        with contextlib.suppress(OSError), (self.run_dir / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
            for line in reversed(file.read().splitlines()):
                with contextlib.suppress(ValueError):
                    told: dict[str, Any] = json.loads(line)
                    if "train/loss" in told["values"]:
                        return int(told["step"])
        return 0

    def play(self) -> int:
        """To the end; returns the exit status."""
        sets = [part for item in self._options.overrides for part in ("--set", item)]
        command = [sys.executable, "-m", "myxa.launch", "up", str(self.folder / "run.toml"), "--quiet"]
        command += ["--set", f"run.num_steps={self._options.steps}", *sets]
        with (self.folder / "run.log").open("wb") as log:
            launcher = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=subprocess.STDOUT)
        told = 0
        try:
            while launcher.poll() is None:
                time.sleep(self._options.every)
                step = self.step()
                if step >= self._options.steps:
                    continue  # the launcher reads all of it for the report
                self._look(launcher, step)
                if step >= told + self._options.steps // 20:
                    told = step
                    print(f"step {step}, {time.strftime('%H:%M:%S')}: {self._sizes()}", flush=True)
        finally:
            if launcher.poll() is None:
                launcher.terminate()
                launcher.wait(60)
        return launcher.returncode

    def _sizes(self) -> str:
        return ", ".join(f"{one.name} {one.looks[-1].rss_bytes / 2**20:.1f}" for one in self.by_pid.values())

    def _look(self, launcher: subprocess.Popen[bytes], step: int) -> None:
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(launcher.pid)
            for process in (root, *root.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    known = self.by_pid.get(process.pid)
                    if known is None:
                        known = self.by_pid[process.pid] = Process(name_of(process, root))
                    memory = process.memory_full_info()
                    if memory.rss:  # a process that has just ended has nothing
                        known.looks.append(Look(step, memory.rss, memory.uss))


def name_of(process: psutil.Process, root: psutil.Process) -> str:
    if process == root:
        return "launcher"
    spec = process.environ().get(SPEC_VARIABLE, "")
    if spec and WORKER_MODULE in process.cmdline():
        return Path(spec).stem.rpartition(".")[0]
    return " ".join(word for word in process.cmdline() if "myxa." in word).removeprefix("myxa.") or process.name()


def table(processes: list[Process], steps: int, allowed: float) -> list[str]:
    """Prints a row each; returns the names of those that grew."""
    grew: list[str] = []
    print("| process | RSS at 10 %, MiB | RSS at the end, MiB | RSS, bytes a step | USS, bytes a step | verdict |")
    print("|---|---|---|---|---|---|")
    for one in sorted(processes, key=lambda process: process.name):
        looks = one.after(round(steps * WARM_UP))
        if len(looks) < 10:
            continue
        rss = slope([(look.step, look.rss_bytes) for look in looks])
        uss = slope([(look.step, look.uss_bytes) for look in looks])
        is_flat = uss < allowed
        grew += [] if is_flat else [one.name]
        first, last = looks[0].rss_bytes / 2**20, looks[-1].rss_bytes / 2**20
        verdict = "flat" if is_flat else "growing"
        print(f"| {one.name} | {first:.1f} | {last:.1f} | {rss:.0f} | {uss:.0f} | {verdict} |")
    return grew


def list_files(run_dir: Path) -> None:
    sizes: dict[str, int] = {}
    for path in run_dir.resolve().rglob("*"):
        if path.is_file() and not path.is_symlink():
            name = path.relative_to(run_dir.resolve()).parts[0]
            sizes[name] = sizes.get(name, 0) + path.stat().st_size
    print("\non the disk, MiB: " + ", ".join(f"{name} {size / 2**20:.1f}" for name, size in sorted(sizes.items())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30_000)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two looks")
    parser.add_argument("--allowed", type=float, default=200.0, help="bytes of USS a step that still count as flat")
    parser.add_argument("--keep", type=Path, help="folder for the run, which stays; else a temporary one")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="SECTION.KEY=VALUE")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="myxa-long-")))
        folder.mkdir(parents=True, exist_ok=True)
        run = LongRun(folder, options)
        began = time.monotonic()
        status = run.play()
        wall_s = time.monotonic() - began
        step = run.step()
        print(f"\n{step} steps in {wall_s:.0f} s, {wall_s / max(step, 1) * 1e3:.1f} ms each; exit status {status}\n")
        if status:
            print((folder / "run.log").read_text(errors="replace")[-3000:])
        grew = table(list(run.by_pid.values()), options.steps, options.allowed)
        list_files(run.run_dir)
    sys.exit(1 if status or grew or step < options.steps else 0)


if __name__ == "__main__":
    main()
