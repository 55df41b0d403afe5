"""An agent run whose environment fails in every way: does it train all its steps, and who is blamed?

    python bench/agent_faults.py [--steps 12] [--block 60] [--hang 3600] [--limit 30] [--max-block 5] [--env 1]

In 5 % of its episodes the environment blocks the process for `--block` seconds by `time.sleep`, in 5 % it raises, in
2 % it awaits for `--hang` seconds; for 2 % of the samples it raises in every attempt, so that groups of uneven size are
trained on. Each step of it takes `--env` seconds otherwise. `rollout.timeout_s` is `--limit`, `rollout.max_block_s` is
`--max-block`. Prints what failed by kind, which groups were lost, and what `myxa why` said. Exit status 1 unless all
steps are trained, fewer than 10 % of the groups are lost, all kinds are counted, and `why` named the environment.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from myxa.actors.models.tiny import make_tiny_model
from myxa.launch.cli import main as myxa
from myxa.launch.demo.run import write_rows

BATCH, SAMPLES = 8, 4
RUN_FILE = """
[run]
name = "faults"
dir = "runs"
num_steps = {steps}

[model]
path = "model"

[data]
train = "prompts.jsonl"

[rollout]
workflow = "flow.py:play"
workflow_args = {{ block = {block}, hang = {hang}, step = {env} }}
num_samples = 4
max_new_tokens = 8
max_turns = 2
max_groups = 16
timeout_s = {limit}
max_block_s = {max_block}

[reward]
fn = "workflow"

[algo]
batch_size = 8
group_filter = "none"

[async]
max_staleness = 2

[monitor]
tensorboard = false
"""
FLOW = """
import asyncio
import time
import zlib


class Env:
    def __init__(self, key, attempt, args):
        self.mode = zlib.crc32(f"{key}.{attempt}".encode()) % 100
        self.is_closed = zlib.crc32(key.encode()) % 50 == 0
        self.args = args

    async def step(self, text):
        await asyncio.sleep(self.args["step"])
        if self.mode < 5:
            time.sleep(self.args["block"])
        elif self.mode < 10 or self.is_closed:
            raise ConnectionError("the shop is closed")
        elif self.mode < 12:
            await asyncio.sleep(self.args["hang"])
        return "ok"


async def play(ctx, prompt, **args):
    env = Env(f"{prompt.row}.{ctx.index}", ctx.attempt, args)
    turn = await ctx.episode.generate()
    while ctx.episode.num_turns < ctx.max_turns and ctx.episode.reply("user", await env.step(turn.text)):
        turn = await ctx.episode.generate()
    return ctx.episode.sample(reward=float(len(turn.text) % 3))
"""


@dataclass
class Found:
    """What came of the run."""

    code: int
    said: str
    wall_s: float
    run_dir: Path
    why: set[str] = field(default_factory=set[str])
    """Sentences of `myxa why`."""
    states: dict[str, int] = field(default_factory=dict[str, int])
    reasons: dict[str, int] = field(default_factory=dict[str, int])
    gauges: dict[str, float] = field(default_factory=dict[str, float])
    num_events: int = 0
    """Of kind member-failed."""

    @property
    def lost(self) -> float:
        """Share of all finished groups that were dropped for what a workflow did."""
        return sum(self.reasons.values()) / max(sum(self.states.values()), 1)

    def failures(self) -> dict[str, float]:
        """By kind."""
        head = "rollout/failures/"
        return {name.removeprefix(head): value for name, value in self.gauges.items() if name.startswith(head)}

    def wrong(self, num_steps: int) -> list[str]:
        """What is not as it should be."""
        failures = self.failures()
        return [
            words
            for is_so, words in (
                (self.code != 0, f"exit status {self.code}: {self.said[-1500:]}"),
                (self.states.get("TRAINED", 0) + self.states.get("DURABLE", 0) != num_steps * BATCH, f"{self.states}"),
                (self.lost >= 0.1, f"{self.lost:.0%} of the groups are lost: {self.reasons}"),
                (not failures.get("environment") or not failures.get("network"), f"failures by kind: {failures}"),
                (not self.gauges.get("rollout/num_masked"), "no member is masked"),
                (self.num_events < sum(failures.values()), f"{self.num_events} events of {failures}"),
                (not any("Env.step (flow.py)" in one for one in self.why), f"why: {self.why}"),
            )
            if is_so
        ]


def start_myxa(words: list[str], folder: Path, said: IO[str]) -> subprocess.Popen[str]:
    """A process of its own."""
    command = [sys.executable, "-m", "myxa.launch", *words]
    return subprocess.Popen(command, cwd=folder, stdout=said, stderr=subprocess.STDOUT, text=True)


def run(
    folder: Path, *, steps: int, block: float, hang: float, limit: float, max_block: float, env: float,
    start: Callable[[list[str], Path, IO[str]], subprocess.Popen[str]] = start_myxa,
) -> Found:  # fmt: skip
    """One run in that folder, asked `why` while it goes on."""
    make_tiny_model(folder / "model", preset="0p5m", seed=0)
    write_rows(folder / "prompts.jsonl", 400, seed=1)
    (folder / "flow.py").write_text(FLOW)
    values = {"steps": steps, "block": block, "hang": hang, "limit": limit, "max_block": max_block, "env": env}
    (folder / "run.toml").write_text(RUN_FILE.format(**values))
    began_s, why = time.monotonic(), set[str]()
    with (folder / "said").open("w+") as said:
        up = start(["up", "run.toml"], folder, said)
        try:
            while True:
                try:
                    up.wait(3.0)
                    break
                except subprocess.TimeoutExpired:
                    with contextlib.redirect_stdout(io.StringIO()) as asked:
                        myxa(["why", "--run", str(folder / "runs/latest")])
                    why.add(" ".join(asked.getvalue().split("actor")[0].split()))
        finally:
            if up.poll() is None:
                up.terminate()
                up.wait(60)
        said.seek(0)
        words = said.read()
    (run_dir,) = (path for path in (folder / "runs").iterdir() if path.is_dir() and not path.is_symlink())
    return _read(Found(up.returncode, words, time.monotonic() - began_s, run_dir, why))


def _read(found: Found) -> Found:
    with sqlite3.connect(f"file:{found.run_dir / 'ledger.sqlite'}?mode=ro", uri=True) as db:
        found.states = dict(db.execute("SELECT state, COUNT(*) FROM groups GROUP BY state").fetchall())
        kinds = "('workflow-error', 'environment-error', 'policy-error')"
        query = f"SELECT reason, COUNT(*) FROM groups WHERE reason IN {kinds} GROUP BY reason"
        found.reasons = dict(db.execute(query).fetchall())
    db.close()
    for line in (found.run_dir / "metrics.jsonl").read_text().splitlines():
        values = json.loads(line)["values"]
        found.gauges |= {name: value for name, value in values.items() if name.startswith("rollout/")}
    lines = (found.run_dir / "events.jsonl").read_text().splitlines()
    found.num_events = sum(json.loads(line)["kind"] == "member-failed" for line in lines)
    return found


def main() -> int:
    """Run it and judge."""
    parser = argparse.ArgumentParser(description="An agent run whose environment fails in every way.")
    parser.add_argument("--steps", type=int, default=12)
    for name, default in (("block", 60.0), ("hang", 3600.0), ("limit", 30.0), ("max-block", 5.0), ("env", 1.0)):
        parser.add_argument(f"--{name}", type=float, default=default)
    options = vars(parser.parse_args())
    with tempfile.TemporaryDirectory(prefix="agent-faults-") as folder:
        found = run(Path(folder), **options)
        print(f"{options['steps']} steps in {found.wall_s:.0f} s, exit status {found.code}")
        print(f"groups: {found.states}; lost {found.lost:.1%}: {found.reasons or 'none'}")
        masked, retried = found.gauges.get("rollout/num_masked", 0.0), found.gauges.get("rollout/num_retried", 0.0)
        print(f"failures by kind: {found.failures()}; retried {retried:.0f}, masked {masked:.0f}")
        for sentence in sorted(found.why):
            print(f"why: {sentence}")
        wrong = found.wrong(options["steps"])
    for words in wrong:
        print(f"WRONG: {words}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
