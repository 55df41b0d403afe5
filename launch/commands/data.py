"""Groups and samples of a run: `dump` writes groups with their tokens into a file, `samples` shows answers as people
read them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..control import verbs
from .parser import Command, Parser, add_run_flags, folder_of, show, verb_command

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
    parser.add_argument("--eval", nargs="?", const="", default=None, metavar="SET",
                        help="answers to held-out prompts, of one set of [eval.sets] or of all")  # fmt: skip


def _held_out(options: argparse.Namespace) -> dict[str, Any]:
    return {"held_out": options.eval is not None, "eval_set": options.eval or ""}


def _samples_from_files(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    from ..views.run_files import SampleQuery, read_samples

    wanted = SampleQuery(step=options.step, **_held_out(options))
    return {"groups": read_samples(folder, wanted, options.num_groups), "num_left_out": 0}


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

    groups = facts["groups"]
    lines = [line for group in groups for line in (_kept_group if "answers" in group else _group)(group)]
    return Text(
        "\n".join(lines)
        or "there is no such group: of a step, samples.jsonl gets as many as monitor.samples_per_step says"
    )


def _group(group: dict[str, Any]) -> Iterator[str]:
    step = f", step {group['step']}" if group["step"] >= 0 else ""
    why = f" ({group['reason']})" if group["reason"] else ""
    yield f"group {group['group_id']}: {group['outcome']}{why}, {group['state']}{step}, knobs {group['knobs']}"
    yield f"  {group['prompt']}"
    for sample in group["samples"]:
        yield f"  [{sample['index']}] reward {sample['reward']:g}, {_samples_facts(sample)}"
        yield f"      {''.join(sample['tokens'])}"


def _samples_facts(sample: dict[str, Any]) -> str:
    stamped = sorted({version for version in sample["versions"] if version >= 0})
    versions = f"versions {stamped[0]} to {stamped[-1]}" if stamped else "no engine"
    return f"{sample['num_tokens']} tokens ({sample['finish']}), {versions}, temperature {sample['temperature']:g}"


SAMPLES_WORDS = (
    "Of a live run: the newest finished groups, token by token. With --step or --eval, and of an ended run: what "
    "samples.jsonl kept of each step."
)
COMMANDS = (
    Command(
        "dump",
        "write finished groups with their tokens into a file",
        _dump,
        _add_dump,
        "All finished groups of a run, live or ended, whose tokens its ledger has: those that are not trained yet, and "
        "those that checkpoints have not let go, in the order of training.",
    ),
    verb_command(
        verbs.SAMPLES,
        _draw,
        add=_add_samples,
        more=_held_out,
        from_files=_samples_from_files,
        description=SAMPLES_WORDS,
    ),
)
