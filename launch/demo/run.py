"""`myxa demo`: from random weights to a model that sorts digits, on a laptop, by the code that runs on clusters.

Two ordinary runs, one after the other, with run files anybody may copy (`sft.toml`, `rl.toml` beside this file): short
imitation of mostly wrong demonstrations, then asynchronous GRPO. Model, tokenizer and task are made on the spot.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import orjson

from ...core.config import load_config
from ..launcher import LaunchOptions, Outcome, launch
from ..node_place import find_place
from .material import prepare

_NEXT_STEPS = (
    "myxa up {folder}/rl.toml --set async.max_staleness=0     the same without asynchrony: watch the trainer wait",
    "myxa engine serve {folder}/sft/export --port 0           the warm model behind SGLang's HTTP routes",
    "docs/tutorial.md                                         your dataset, your reward, your run file",
)


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the command line may change."""

    folder: Path
    seed: int = 0
    engines: int = 1
    ranks: int = 1
    is_quiet: bool = False

    @staticmethod
    def default_folder(now: datetime) -> Path:
        """`runs/demo-<stamp>` in the current folder."""
        return Path("runs") / f"demo-{now.strftime('%Y%m%d-%H%M%S')}"


def run_demo(options: DemoOptions) -> int:
    """Both runs and a summary; returns the exit status."""
    started = time.monotonic()
    warm = warm_up(options)
    if warm.exit_code:
        return warm.exit_code
    sft_s = time.monotonic() - started
    next_steps = tuple(step.format(folder=options.folder) for step in _NEXT_STEPS)
    learnt = _launch(options, "rl", [f"roles.rollout.count={options.engines}"], next_steps)
    if learnt.exit_code or learnt.run_dir is None:
        return learnt.exit_code
    wall_s = time.monotonic() - started
    _write_summary(options.folder, learnt.run_dir, sft_s=sft_s, wall_s=wall_s)
    return 0


def warm_up(options: DemoOptions) -> Outcome:
    """Make model and data, run the supervised stage; afterwards `<folder>/sft/export` holds the warm model."""
    prepare(options.folder, options.seed)
    result = _launch(options, "sft", [], ())
    if result.exit_code == 0 and result.run_dir is not None:
        link = options.folder / "sft"
        link.unlink(missing_ok=True)
        link.symlink_to(result.run_dir.name)
    return result


def _launch(options: DemoOptions, stage: str, overrides: Sequence[str], next_steps: tuple[str, ...]) -> Outcome:
    always = [
        f'run.dir="{options.folder.absolute()}"',
        f"run.seed={options.seed}",
        f"roles.trainer.count={options.ranks}",
    ]
    config = load_config([options.folder / f"{stage}.toml"], [*always, *overrides])
    place = find_place(1, 0, None, {})
    return launch(config, LaunchOptions(place=place, is_quiet=options.is_quiet, next_steps=next_steps))


def _write_summary(folder: Path, run_dir: Path, *, sft_s: float, wall_s: float) -> None:
    """`summary.json`: what `bench/demo_seeds.py` judges."""
    rewards: list[float] = []
    lags: list[float] = []
    steps = 0
    for line in (run_dir / "metrics.jsonl").read_bytes().splitlines():
        values = orjson.loads(line)["values"]
        if "eval/reward" in values:
            rewards.append(values["eval/reward"])
        if "lag/max" in values:
            lags.append(values["lag/max"])
            steps += 1
    summary = {
        "eval_start": rewards[0],
        "eval_end": rewards[-1],
        "max_lag": max(lags),
        "steps": steps,
        "sft_s": sft_s,
        "rl_s": wall_s - sft_s,
        "wall_s": wall_s,
        "run_dir": str(run_dir),
    }
    (folder / "summary.json").write_bytes(orjson.dumps(summary, option=orjson.OPT_INDENT_2) + b"\n")
