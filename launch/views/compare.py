"""Runs side by side: those of a folder with state, step and reward; last values and curves of several. Pure, but for
reading their files."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...core.errors import ConfigError
from ..run_dir import RunDir, is_run_folder
from .numbers import training_reward
from .run_files import RunFiles, load_run
from .run_view import outcome

_GLANCE_BYTES = 1 << 18
_MAX_METRICS = 200
USUAL = (
    "reward/raw_mean", "reward/mean", "reward/part/*/mean", "eval/reward", "eval/*/reward", "reward/pass_rate",
    "train/loss", "train/accuracy", "train/margin", "train/kl", "train/entropy", "train/grad_norm", "train/approx_kl",
    "train/logprob_diff_abs_mean", "lag/max", "batch/response_tokens_mean", "train/step_s", "rollout/tokens_per_s",
    "train/tokens_per_s",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RunRow:
    """One run of a folder."""

    name: str
    state: str
    """running, finished, failed, unfinished, not started, unknown."""
    step: int
    reward: float | None
    eval_reward: float | None
    started_wall_s: float
    run_dir: str


def runs_of(folder: Path) -> list[RunRow]:
    """Its runs, the newest first, or that run itself. Raises ConfigError if it is no folder."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a directory", remedy="name a folder of runs, e.g. runs")
    if is_run_folder(folder):
        return [_glance(folder.resolve())]
    folders = [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink() and is_run_folder(path)]
    return sorted((_glance(path) for path in folders), key=lambda row: row.started_wall_s, reverse=True)


def _glance(run_dir: Path) -> RunRow:
    run = RunFiles(run_dir, _GLANCE_BYTES)
    run.is_live = RunDir(run_dir).is_held
    run.read()
    return RunRow(
        name=run_dir.name,
        state=outcome(run).word,
        step=max((step for _, step in run.reported), default=0),
        reward=run.last(training_reward(run.series)),
        eval_reward=run.last("eval/reward"),
        started_wall_s=(run_dir / "config.toml").stat().st_mtime if (run_dir / "config.toml").is_file() else 0.0,
        run_dir=str(run_dir),
    )


@dataclass(frozen=True, slots=True)
class ComparedMetric:
    """One metric of several runs; None and empty where a run has none."""

    metric: str
    last: tuple[float | None, ...]
    curves: tuple[dict[int, float], ...]
    """Step -> value, by step."""


def load_runs(folders: Sequence[Path]) -> list[RunFiles]:
    """Read several runs. Raises ConfigError for what is no run, or fewer than two."""
    resolved = list(dict.fromkeys(folder.resolve() for folder in folders))
    if len(resolved) < 2:
        raise ConfigError("compare takes two runs or more", remedy="`myxa ls` lists those of a folder")
    return [load_run(folder) for folder in resolved]


def compared(runs: Sequence[RunFiles], patterns: Sequence[str] = ()) -> list[ComparedMetric]:
    """Metrics that any of the runs has, in the order of the patterns. Raises ConfigError if no metric fits."""
    names = sorted({name for run in runs for name in run.names()})
    metrics = dict.fromkeys(n for pattern in patterns or USUAL for n in names if fnmatch.fnmatchcase(n, pattern))
    if patterns and not metrics:
        raise ConfigError(
            f"no metric is called {' or '.join(patterns)}", remedy=f"there are: {', '.join(names[:12])}, ..."
        )
    return [
        ComparedMetric(name, tuple(run.last(name) for run in runs), tuple(run.steps(name) for run in runs))
        for name in list(metrics)[:_MAX_METRICS]
    ]
