"""What a training step sends: calls, messages, bytes and the largest array, counted in every process of a real run.

    python bench/step_traffic.py [--steps 20] [--seed 0] [--run RUN.toml]

Two runs of the demo's shape (32 groups of 8 samples): all actors on one node, and trainer and rollout actor on two
nodes, whose messages then go by tcp. `--run`: that run file instead, as one node, for example that of a GPU. Counted
is what leaves a process in an envelope, its arrays included; an actor that calls another of its own process sends
nothing. Weights go by their own channel (shared memory, CUDA IPC, NCCL or disk) and are not messages. Prints markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
COUNTS_EVERY_S = 0.5
WARM_STEPS = 5
RUN = """
[run]
name = "traffic"
dir = "runs"
num_steps = {steps}
seed = {seed}
[model]
path = "model"
[data]
train = "prompts.jsonl"
[rollout]
num_samples = 8
max_new_tokens = 32
[algo]
batch_size = 32
group_filter = "none"
[optimizer]
lr = 1e-9
[trainer]
export_at_end = false
"""


# -- inside the run's processes


def build(spec: Any, config: Any, run_dir: Path) -> Any:
    """The real actor, in a process that counts what it sends."""
    from myxa.launch.program import build_actor
    from myxa.transport.session.frames import Kind
    from myxa.transport.session.links import Links
    from myxa.transport.wire import Lane

    counts: Counter[str] = Counter()
    hand_over = Links.hand_over

    def counted(self: Any, link: Any, lane: Any, envelope: Any, *rest: Any, **more: Any) -> Any:
        parcel = hand_over(self, link, lane, envelope, *rest, **more)
        if link is not self.itself:
            name = "control" if lane is Lane.CONTROL else "bulk"
            counts[f"{name} messages"] += 1
            counts[f"{name} bytes"] += len(parcel.data)
            counts["calls"] += envelope.kind is Kind.CALL
            counts["arrays"] += len(envelope.frames)
            for frame in envelope.frames:
                counts["largest array"] = max(counts["largest array"], len(frame))
            counts["largest message"] = max(counts["largest message"], len(parcel.data))
        return parcel

    def write() -> None:
        file = (run_dir / f"traffic-{spec.name.replace('/', '-')}.jsonl").open("a", buffering=1)
        while True:
            file.write(json.dumps({"at": time.monotonic(), **counts}) + "\n")
            time.sleep(COUNTS_EVERY_S)

    Links.hand_over = counted
    threading.Thread(target=write, daemon=True).start()
    actor: Any = build_actor(spec, config, run_dir)
    if spec.role == "trainer" and spec.index == 0:
        train, steps = actor.backend.train, (run_dir / "traffic-steps.txt").open("a", buffering=1)

        def noted(*args: Any, **kwargs: Any) -> Any:
            result = train(*args, **kwargs)
            steps.write(f"{time.monotonic()!r}\n")
            return result

        actor.backend.train = noted
    return actor


# -- outside


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run", type=Path, default=None)
    options = parser.parse_args()
    rows: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if options.run is None:
            prepare(folder, options.steps, options.seed)
            rows["demo, one node"] = measured(folder, folder / "run.toml", options.steps, num_nodes=1)
            rows["demo, two nodes"] = measured(folder, folder / "run.toml", options.steps, num_nodes=2)
        else:
            rows[options.run.stem] = measured(folder, options.run.resolve(), options.steps, num_nodes=1)
    print(table(rows))


def prepare(folder: Path, steps: int, seed: int) -> None:
    from myxa.actors.models.tiny import make_tiny_model
    from myxa.launch.demo.run import write_rows

    make_tiny_model(folder / "model", preset="0p5m", seed=seed)
    write_rows(folder / "prompts.jsonl", 32 * (steps + 4), seed=seed)
    (folder / "run.toml").write_text(RUN.format(steps=steps, seed=seed))


def measured(folder: Path, run: Path, steps: int, *, num_nodes: int) -> dict[str, float]:
    """Of one step, the mean over all but the first WARM_STEPS."""
    runs = folder / f"nodes-{num_nodes}"
    myxa = [sys.executable, "-m", "myxa.launch"]
    common = [str(run), "--quiet", "--program", "step_traffic:build"]
    common += ["--set", f"run.num_steps={steps}", "--set", f"run.dir={runs}"]
    env = {**os.environ, "PYTHONPATH": str(HERE)}
    if num_nodes == 1:
        commands = [[*myxa, "up", *common]]
    else:
        common += ["--set", "roles.rollout.nodes=[1]", "--nnodes", "2", "--rdzv-file", str(folder / "met")]
        commands = [
            [*myxa, "launch", *common, "--node-rank", str(rank), *(("--rdzv", "127.0.0.1:0") if rank == 0 else ())]
            for rank in range(num_nodes)
        ]
    started = [
        subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command in commands
    ]
    said = [process.communicate(timeout=600)[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit("\n".join(said))
    return per_step(runs / "latest")


def per_step(run_dir: Path) -> dict[str, float]:
    stamps = [float(line) for line in (run_dir / "traffic-steps.txt").read_text().split()]
    begin, end = stamps[WARM_STEPS - 1], stamps[-1]
    found: Counter[str] = Counter()
    for file in run_dir.glob("traffic-*.jsonl"):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        first = max((line for line in lines if line["at"] <= begin), key=lambda line: line["at"], default={})
        last = max((line for line in lines if line["at"] <= end), key=lambda line: line["at"], default={})
        for name, value in last.items():
            if name.startswith("largest"):
                found[name] = max(found[name], value)
            elif name != "at":
                found[name] += value - first.get(name, 0)
    steps = len(stamps) - WARM_STEPS
    return {name: value if name.startswith("largest") else value / steps for name, value in found.items()}


def table(rows: dict[str, dict[str, float]]) -> str:
    for found in rows.values():
        for what in ("messages", "bytes"):
            found[what] = found.pop(f"control {what}", 0) + found.pop(f"bulk {what}", 0)
    names = ("calls", "messages", "bytes", "arrays", "largest array", "largest message")
    lines = [f"| a step of | {' | '.join(names)} |", f"|---|{'---:|' * len(names)}"]
    lines += [
        f"| {run} | {' | '.join(f'{found.get(name, 0):,.0f}' for name in names)} |" for run, found in rows.items()
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
