"""A run directory's metrics, events and trace as the figures that a benchmark tells.

python run_figures.py RUN_DIR [--model FOLDER]
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from figures import Report, markdown, median, number, percent
from flops import mfu, train_flops

from myxa.actors.models.hf_folder import read_config
from myxa.actors.models.model_config import ModelConfig
from myxa.actors.sinks.chrome_trace import TRACE_FILE

WAITING = ("wait-data", "wait-weights", "wait-capacity", "paused")
SKIPPED_STEPS = 2
"""At the start kernels are compiled and allocators fill up."""


@dataclass
class Run:
    """What a run left behind."""

    run_dir: Path
    started_s: float = 0.0
    """Wall time of the phase "running"."""
    steps: dict[int, tuple[float, dict[str, float]]] = field(default_factory=dict)
    """Version made -> (wall time, metrics of the step)."""
    evals: list[tuple[int, float]] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    """Tokens a second of all rollout actors, second by second, while the run was running."""
    adopt_s: list[float] = field(default_factory=list)
    """Commit of a version by an engine: pause, load, go on."""
    others: dict[str, list[float]] = field(default_factory=dict)
    """Metrics of the weight channel and its sync by any actor."""
    idle: dict[str, dict[str, float]] = field(default_factory=dict)
    """Actor -> kind of waiting -> share of its time from the end of the first steps on."""
    nameless: dict[str, float] = field(default_factory=dict)
    """Actor -> share of its time then that is neither work nor waiting."""

    def column(self, name: str) -> list[float]:
        """A metric of the trainer's steps, the first ones left out."""
        ordered = [self.steps[step][1] for step in sorted(self.steps)]
        return [values[name] for values in ordered[SKIPPED_STEPS:] if name in values]

    @property
    def step_walls(self) -> list[float]:
        walls = [self.steps[step][0] for step in sorted(self.steps)]
        return [
            after - before for before, after in zip(walls[SKIPPED_STEPS:], walls[SKIPPED_STEPS + 1 :], strict=False)
        ]

    @property
    def wall_s(self) -> float:
        """From the first dispatch to the last step."""
        return max((wall for wall, _ in self.steps.values()), default=self.started_s) - self.started_s


def lines(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except ValueError:  # cut off by the end of the run
                continue


def read_run(run_dir: Path) -> Run:
    """Read everything. Raises FileNotFoundError for a folder without metrics."""
    if not (run_dir / "metrics.jsonl").exists():
        raise FileNotFoundError(f"{run_dir} holds no metrics.jsonl: the run did not get that far")
    run = Run(run_dir)
    for event in lines(run_dir / "events.jsonl"):
        if event["kind"] == "phase" and event["text"].endswith("-> running"):
            run.started_s = event["wall_s"]
    times: dict[str, list[tuple[float, dict[str, float]]]] = {}
    for point in lines(run_dir / "metrics.jsonl"):
        _take(run, point, times)
    walls = [run.steps[step][0] for step in sorted(run.steps)]
    warm_s = walls[SKIPPED_STEPS - 1] if len(walls) > SKIPPED_STEPS else run.started_s
    for actor, points in sorted(times.items()):
        shares = _shares(points, warm_s)
        if shares:
            run.nameless[actor] = shares["other"]
            run.idle[actor] = {kind: shares[kind] for kind in WAITING}
    _read_spans(run)
    return run


def _take(run: Run, point: dict[str, Any], times: dict[str, list[tuple[float, dict[str, float]]]]) -> None:
    values: dict[str, float] = point["values"]
    wall_s: float = point["wall_s"]
    if "train/step_s" in values:
        run.steps[point["step"]] = (wall_s, values)
    if "eval/reward" in values:
        run.evals.append((point["step"], values["eval/reward"]))
    if "rollout/tokens_per_s" in values and run.started_s and wall_s > run.started_s:
        run.rates.append(values["rollout/tokens_per_s"])
    if "time/compute" in values:
        times.setdefault(point["source"], []).append((wall_s, values))
    for name, value in values.items():
        if name.startswith("weights/"):
            run.others.setdefault(name, []).append(value)


def _shares(points: list[tuple[float, dict[str, float]]], begin_s: float) -> dict[str, float]:
    """Shares of all kinds of time between the first report after that time and the last."""
    later = [values for wall_s, values in points if wall_s >= begin_s]
    if len(later) < 2:
        return {}
    first, last = later[0], later[-1]
    kinds = (*WAITING, "compute", "other")
    spent = {kind: last.get(f"time/{kind}", 0.0) - first.get(f"time/{kind}", 0.0) for kind in kinds}
    total = sum(spent.values())
    return {kind: each / total for kind, each in spent.items()} if total > 0 else {}


def _read_spans(run: Run) -> None:
    path = run.run_dir / TRACE_FILE
    if not path.exists():
        return
    for event in json.loads(path.read_bytes()):
        is_adoption = event.get("ph") == "X" and "adopts_version" in (event.get("args") or {})
        if is_adoption and event["ts"] / 1e6 >= run.started_s:
            run.adopt_s.append(event["dur"] / 1e6)


def run_rows(run: Run, config: ModelConfig | None, num_gpus: int = 1) -> list[tuple[str, str]]:
    """The table of one run; medians over its steps."""
    tokens, step_s = run.column("train/num_tokens"), run.column("train/step_s")
    walls = run.step_walls
    rows = [
        ("steps, wall seconds from the first dispatch", f"{len(run.steps)}, {run.wall_s:.1f}"),
        ("rollout tokens/s (mean, median, best second)", _three(run.rates)),
        ("trained tokens/s of wall time", number(sum(tokens[1:]) / sum(walls) if walls else None)),
        ("tokens a step; tokens/s while training", f"{number(median(tokens))}; {number(_rate(tokens, step_s))}"),
        ("MFU while training", percent(_mfu(run, config, num_gpus))),
        ("step time: all, of it training, ms", f"{_ms(walls)}, {_ms(step_s)}"),
        ("first step; of later ones before, around, in training, publishing, ms", _parts_of_a_step(run)),
        ("commit by an engine (stalls at most so long), ms; longest", f"{_ms(run.adopt_s)}; {_top(run.adopt_s)}"),
        ("train/rollout log-prob difference (age of the data included): mean, largest of a step", _differences(run)),
        ("age of the data in steps, largest", number(max(run.column("lag/max"), default=None))),
    ]  # fmt: skip
    for name in sorted(set(run.others) - {"weights/publish_s"}):
        values = run.others[name]
        rows += [(f"{name}: median, largest", f"{number(median(values))}, {number(max(values))}")]
    for actor, shares in run.idle.items():
        told = ", ".join(f"{kind} {percent(share)}" for kind, share in shares.items() if share >= 0.001)
        rows.append((f"idle share of {actor}", f"{percent(sum(shares.values()))}{f' ({told})' if told else ''}"))
    return rows


def _parts_of_a_step(run: Run) -> str:
    """Training of the first step; medians: waiting for data (and whatever else lies between two steps), planning and
    telling, training, publishing."""
    walls, whole, train, publish = (
        median(values) or 0.0
        for values in (
            run.step_walls, *(run.column(name) for name in ("leader/step_wall_s", "train/step_s", "weights/publish_s"))
        )
    )  # fmt: skip
    first = run.steps[min(run.steps)][1]["train/step_s"] if run.steps else 0.0
    parts = (first, walls - whole, whole - train - publish, train, publish)
    return ", ".join(f"{part * 1e3:.1f}" for part in parts)


def _three(values: list[float]) -> str:
    if not values:
        return "-"
    return f"{number(statistics.fmean(values))}, {number(median(values))}, {number(max(values))}"


def _ms(seconds: list[float]) -> str:
    middle = median(seconds)
    return "-" if middle is None else f"{middle * 1e3:.1f}"


def _top(seconds: list[float]) -> str:
    return f"{max(seconds) * 1e3:.1f}" if seconds else "-"


def _rate(tokens: list[float], seconds: list[float]) -> float | None:
    return sum(tokens) / sum(seconds) if seconds else None


def _mfu(run: Run, config: ModelConfig | None, num_gpus: int) -> float | None:
    """Every sample of a step counts with the step's mean length, so the attention's share is a lower bound."""
    tokens, step_s, samples = (run.column(f"train/{name}") for name in ("num_tokens", "step_s", "num_samples"))
    if config is None or not step_s or len(samples) != len(step_s):
        return None
    flops = sum(train_flops(config, [total / num] * int(num)) for total, num in zip(tokens, samples, strict=True))
    return mfu(flops, sum(step_s), num_gpus)


def _differences(run: Run) -> str:
    found = run.column("train/logprob_diff_abs_mean")
    return f"{number(statistics.fmean(found))}, {number(max(found))}" if found else "-"


def curve(run: Run, num_points: int = 16) -> list[tuple[str, str, str]]:
    """(step, held-out reward, training reward) along the run."""
    held_out = dict(run.evals)
    rewards = {step: values["reward/mean"] for step, (_, values) in run.steps.items() if "reward/mean" in values}
    chosen = sorted(held_out) or sorted(rewards)
    every = max(1, -(-len(chosen) // num_points))
    kept = chosen[::every] + ([chosen[-1]] if chosen and (len(chosen) - 1) % every else [])
    return [(str(step), number(held_out.get(step)), number(_near(rewards, step))) for step in kept]


def _near(rewards: dict[int, float], step: int) -> float | None:
    """Mean training reward of the five steps before."""
    near = [rewards[s] for s in range(step - 4, step + 1) if s in rewards]
    return statistics.fmean(near) if near else None


def tell_run(report: Report, name: str, run: Run, config: ModelConfig | None, num_gpus: int = 1) -> None:
    """Tables of a run, and its figures into the JSON."""
    rows = run_rows(run, config, num_gpus)
    report.table(f"### {name}", ("figure", "value"), rows)
    if run.evals:
        report.table("Reward", ("step", "held-out", "training, 5 steps"), curve(run))
    report.keep(name, {"rows": rows, "evals": run.evals, "curve": curve(run, 100)})


def newest_run(folder: Path, besides: Collection[Path] = ()) -> Path | None:
    """The run directory in `folder` that was made last, and is none of `besides`."""
    there = folder.iterdir() if folder.is_dir() else ()
    runs = [p for p in there if p.is_dir() and not p.is_symlink() and p not in besides]
    return max(runs, key=lambda p: p.stat().st_mtime, default=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--model", type=Path, help="its model folder, for MFU")
    args = parser.parse_args()
    run = read_run(args.run_dir)
    config = read_config(args.model) if args.model else None
    print(markdown(("figure", "value"), run_rows(run, config)))
    print(markdown(("step", "held-out", "training, 5 steps"), curve(run)))


if __name__ == "__main__":
    main()
