"""Groups and samples of a run: `dump` writes groups with their tokens into a file, `samples` shows answers as people
read them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .parser import Command, Parser, add_run_flags, at_least, folder_of, show

if TYPE_CHECKING:
    from rich.console import RenderableType


def _add_dump(parser: Parser) -> None:
    parser.add_argument("file", type=Path, nargs="?", default=None, metavar="FILE",
                        help="a new file (groups.jsonl in the run directory)")  # fmt: skip
    add_run_flags(parser)


def _dump(options: argparse.Namespace) -> int:
    """From the ledger itself, so it works after the run, too."""
    from ...actors.buffer.dumps import write_dump
    from ...actors.ledger.file import LEDGER

    folder = folder_of(options)
    path: Path = options.file or folder / "groups.jsonl"
    facts = {"path": str(path), "num_groups": write_dump(folder / LEDGER, path, folder.name)}
    show(options, facts, lambda told: f"{told['num_groups']} groups in {told['path']}")
    return 0


def _add_samples(parser: Parser) -> None:
    parser.add_argument("num_groups", nargs="?", type=at_least(1), default=4, metavar="N", help="how many (4)")
    parser.add_argument("--step", type=at_least(0), default=-1, metavar="S", help="of this step (any)")
    parser.add_argument("--eval", nargs="?", const="", default=None, metavar="SET",
                        help="answers to held-out prompts, of one set of [eval.sets] or of all")  # fmt: skip
    add_run_flags(parser)


def _samples(options: argparse.Namespace) -> int:
    from ..views.run_files import SampleQuery, read_samples

    wanted = SampleQuery(step=options.step, held_out=options.eval is not None, eval_set=options.eval or "")
    show(options, {"groups": read_samples(folder_of(options), wanted, options.num_groups)}, _draw)
    return 0


def _kept_group(group: dict[str, Any]) -> Iterator[str]:
    name = f" {group['eval_set']}" if group["eval_set"] else ""
    why = f" ({group['reason']})" if group["reason"] else ""
    low, high = group["oldest_version"], group["newest_version"]
    versions = "no engine" if high < 0 else f"version {high}" if low == high else f"versions {low} to {high}"
    yield f"step {group['step']}, group {group['group_id']}: {group['outcome']}{name}{why}, {versions}"
    yield f"  {group['prompt']}"
    if group["label"]:
        yield f"  label: {group['label']}"
    for answer in group["answers"]:
        parts = "".join(f", {name} {value:g}" for name, value in answer["reward_parts"].items())
        facts = f"{answer['num_tokens']} tokens ({answer['finish']})"
        yield f"  [{answer['index']}] reward {answer['reward']:g}{parts}, {facts}"
        yield f"      {answer['text']}"
    if group["num_answers"] > len(group["answers"]):
        yield f"  and {group['num_answers'] - len(group['answers'])} more answers"


def _draw(facts: dict[str, Any]) -> RenderableType:
    from rich.text import Text

    lines = [line for group in facts["groups"] for line in _kept_group(group)]
    return Text("\n".join(lines) or "there is no such group: samples.jsonl keeps monitor.samples_per_step of a step")


COMMANDS = (
    Command(
        "dump",
        "write finished groups with their tokens into a file",
        _dump,
        _add_dump,
        "All finished groups of a run, live or ended, whose tokens its ledger has: those that are not trained yet, and "
        "those that checkpoints have not let go, in the order of training.",
    ),
    Command(
        "samples",
        "prompt, answers, rewards: of the newest groups, or of a step",
        _samples,
        _add_samples,
        "What samples.jsonl kept of each step, of a run that is live or has ended.",
    ),
)
