"""Groups and samples of a run: `dump` writes groups with their tokens into a file, `samples` shows answers as people
read them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..control import verbs
from .parser import Parser, ask, at_least, show, table, verb_command

if TYPE_CHECKING:
    from rich.console import RenderableType


def _add_dump(parser: Parser) -> None:
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--next", type=at_least(1), default=0, metavar="N", dest="next_groups",
                      help="the next N that are claimed for training (all that was not trained yet)")  # fmt: skip
    what.add_argument("--end", action="store_const", const=-1, dest="next_groups",
                      help="end an earlier --next before it has all its groups")  # fmt: skip
    what.add_argument("--list", action="store_true", help="files that were written, or are being written")


def _dump(options: argparse.Namespace) -> int:
    if options.list:
        show(options, ask(options, verbs.DUMPS), _files)
    else:
        show(options, ask(options, verbs.DUMP), _dump_sentence)
    return 0


def _dump_sentence(facts: dict[str, Any]) -> str:
    text = f"{facts['num_groups']} groups, {facts['num_bytes']:,} bytes in {facts['path']}"
    return f"{text}: {facts['reason']}" if facts["reason"] else text


def _files(facts: list[dict[str, Any]]) -> RenderableType:
    rows = [(d["path"], d["num_groups"], f"{d['num_bytes']:,}", d["reason"] or "whole") for d in facts]
    return table(("file", "groups", "bytes", ""), rows, right=("groups", "bytes"))


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
    tokens = zip(sample["logprobs"], sample["train_logprobs"], sample["loss_mask"], strict=False)
    gaps = [abs(trained - drawn) for drawn, trained, is_trained in tokens if is_trained]
    gap = ""
    if gaps:
        mean = sum(gaps) / len(gaps)
        gap = f", trainer and engine differ by {mean:.2g} nats a token, at most {max(gaps):.2g}"
    return f"{sample['num_tokens']} tokens ({sample['finish']}), {versions}, temperature {sample['temperature']:g}{gap}"


SAMPLES_WORDS = (
    "Of a live run: the newest finished groups, token by token. With --step or --eval, and of an ended run: what "
    "samples.jsonl kept of each step."
)
COMMANDS = (
    verb_command(verbs.DUMP, _dump_sentence, add=_add_dump, run=_dump),
    verb_command(
        verbs.SAMPLES,
        _draw,
        add=_add_samples,
        more=_held_out,
        from_files=_samples_from_files,
        description=SAMPLES_WORDS,
    ),
)
