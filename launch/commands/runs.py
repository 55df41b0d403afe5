"""Commands about what runs wrote: `ls`, `compare`; groups with their tokens in a file by `dump`, answers as people read
them by `samples`.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .parser import JSON, RUN, at_least, command, flag, folder_of, show, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..views.compare import ComparedMetric


@command(
    "ls", "the runs of a folder: state, step, reward",
    flag("folder", type=Path, nargs="?", default=Path("runs"), metavar="FOLDER", help="folder of runs (%(default)s)"),
    JSON,
)  # fmt: skip
def ls(options: argparse.Namespace) -> int:
    from ..views.compare import runs_of

    show(options, [asdict(run) for run in runs_of(options.folder)], _ls_page)
    return 0


def _ls_page(runs: list[dict[str, Any]]) -> RenderableType | str:
    from ..views.numbers import duration, short

    if not runs:
        return "there is no run in this folder"
    now_s = time.time()
    cells = [
        (run["name"], run["state"], run["step"], short(run["reward"]), short(run["eval_reward"]),
         f"{duration(max(0.0, now_s - run['started_wall_s']))} ago") for run in runs
    ]  # fmt: skip
    return table(("run", "state", "step", "reward", "held-out", "started"), cells, right=("step", "reward", "held-out"))


@command(
    "compare", "last values and curves of several runs, side by side",
    flag("folders", type=Path, nargs="+", metavar="RUN", help="run directory; two or more"),
    flag("--metric", action="append", default=[], metavar="PATTERN", dest="metrics",
         help="such as 'reward/*'; may be given several times"),
    flag("--html", type=Path, default=None, metavar="FILE", help="write a page with charts"), JSON,
    description="Without --metric: reward, evaluation, loss, entropy, lag, lengths, speed. The page of --html has all "
    "metrics and needs no network.",
)  # fmt: skip
def compare(options: argparse.Namespace) -> int:
    from ..views.compare import compared, load_runs

    runs = load_runs(options.folders)
    if options.html is not None:
        from ..views.report import write_page

        page = write_page(runs, options.html)
        show(options, {"report": str(page)}, lambda facts: facts["report"])
        return 0
    names, metrics = [run.run_dir.name for run in runs], compared(runs, options.metrics)
    facts = {
        "runs": [str(run.run_dir) for run in runs],
        "metrics": [{"metric": metric.metric, "last": metric.last} for metric in metrics],
    }
    show(options, facts, lambda _: _compare_page(names, metrics))
    return 0


def _compare_page(names: list[str], metrics: list[ComparedMetric]) -> RenderableType:
    from rich.console import Console

    from ..views.numbers import clean, short, sparkline

    console = Console()
    width = max(6, min(24, (console.width - 36) // len(names) - 12))
    rows: list[tuple[str, ...]] = []
    for metric in metrics:
        lines = (sparkline([*curve.values()], width) for curve in metric.curves)
        cells = (f"{short(last):>8}  {line}" for last, line in zip(metric.last, lines, strict=True))
        rows.append((clean(metric.metric), *cells))
    return table(("metric", *(clean(name) for name in names)), rows)


@command(
    "dump", "write finished groups with their tokens into a file",
    flag("file", type=Path, nargs="?", default=None, metavar="FILE",
         help="a new file (groups.sqlite in the run directory)"), RUN, JSON,
    description="All finished groups of a run, live or ended, whose tokens its ledger has: those that are not trained "
    "yet, and those that checkpoints have not deleted, in the order of training.",
)  # fmt: skip
def dump(options: argparse.Namespace) -> int:
    """From the ledger itself, so it works after the run, too."""
    from ...actors.ledger.file import LEDGER, dump_groups

    folder = folder_of(options)
    path: Path = options.file or folder / "groups.sqlite"
    facts = {"path": str(path), "num_groups": dump_groups(folder / LEDGER, path)}
    show(options, facts, lambda facts: f"{facts['num_groups']} groups in {facts['path']}")
    return 0


@command(
    "samples", "prompt, answers, rewards: of the newest groups, or of a step",
    flag("num_groups", nargs="?", type=at_least(1), default=4, metavar="N", help="how many (4)"),
    flag("--step", type=at_least(0), default=-1, metavar="S", help="of this step (any)"),
    flag("--eval", nargs="?", const="", default=None, metavar="SET",
         help="answers to held-out prompts, of one set of [eval.sets] or of all"), RUN, JSON,
    description="What samples.jsonl kept of each step, of a run that is live or has ended.",
)  # fmt: skip
def samples(options: argparse.Namespace) -> int:
    from ..views.run_files import SampleQuery, read_samples

    query = SampleQuery(step=options.step, held_out=options.eval is not None, eval_set=options.eval or "")
    asked = f" of set {options.eval!r}" * bool(options.eval) + f" of step {options.step}" * (options.step >= 0)
    groups = read_samples(folder_of(options), query, options.num_groups)
    show(options, {"groups": groups}, lambda facts: _samples_page(facts["groups"], asked))
    return 0


def _samples_page(groups: list[dict[str, Any]], asked: str) -> RenderableType:
    from rich.text import Text

    from ..views.conversation import group_lines

    lines = [line for group in groups for line in group_lines(group)]
    return Text("\n".join(lines) or f"samples.jsonl has no group{asked}: it keeps monitor.samples_per_step a step")
