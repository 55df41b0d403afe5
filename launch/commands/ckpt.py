"""`myxa ckpt`, `eval`, `down`: a checkpoint, an evaluation, the end of the run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .output import Verbs, add_run_flags, show, table
from .which_run import client_of, note_of

if TYPE_CHECKING:
    from rich.console import RenderableType

CHECKPOINT_S = 1815.0
EVALUATION_S = 615.0


def add(verbs: Verbs) -> None:
    """The commands and their flags."""
    ckpt = verbs.add_parser("ckpt", help="a checkpoint at the next step boundary")
    ckpt.add_argument("--export", action="store_true", help="a HuggingFace folder instead of a checkpoint")
    ckpt.add_argument("--list", action="store_true", dest="is_list",
                      help="write none; check every byte of those that are there (also when it is over)")  # fmt: skip
    ckpt.set_defaults(run=_ckpt)
    evaluation = verbs.add_parser("eval", help="held-out reward now, beside training")
    evaluation.add_argument("eval_set", nargs="?", default="", metavar="SET",
                            help="one of [eval.sets] (left out: all of them)")  # fmt: skip
    evaluation.set_defaults(run=_eval)
    down = verbs.add_parser("down", help="end the run in good order, as Ctrl-C does")
    down.set_defaults(run=_down)
    for parser in (ckpt, evaluation, down):
        parser.add_argument("-m", "--reason", default="", metavar="WHY", help="your own words, for the audit log")
        add_run_flags(parser)


def _ckpt(options: argparse.Namespace) -> int:
    if options.is_list:
        return _list(options)
    client = client_of(options, changes=True)
    answer = client.ask("ckpt", CHECKPOINT_S, reason=options.reason, export=options.export)
    show(options, answer, lambda told: told["folder"])
    return 0


def _list(options: argparse.Namespace) -> int:
    from ..lives.checkpoint_list import checkpoints_of

    run_dir: Path = options.run_path or Path(note_of(options).run_dir)
    show(options, checkpoints_of(run_dir), _page)
    return 0


def _page(rows: list[dict[str, Any]]) -> RenderableType:
    cells = [(row["version"], row["folder"], row["stays"], row["problem"] or row["lacks"] or "whole") for row in rows]
    return table(("version", "folder", "stays", "it is"), cells, right=("version",))


def _eval(options: argparse.Namespace) -> int:
    answer = client_of(options, changes=True).ask("eval", EVALUATION_S, reason=options.reason, name=options.eval_set)
    show(options, answer, _eval_page)
    return 0


def _eval_page(told: dict[str, float]) -> str:
    lines = [f"  {key.removeprefix('eval/')} {value:.4g}" for key, value in told.items() if key != "eval_reward"]
    return "\n".join([f"held-out reward {told['eval_reward']:.4g}", *lines])


def _down(options: argparse.Namespace) -> int:
    answer = client_of(options, changes=True).ask("down", reason=options.reason)
    show(options, answer, lambda told: f"the run ends: {told['ending']}")
    return 0
