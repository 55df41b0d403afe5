"""Groups and samples of a run: `dump` writes groups with their tokens into a file, `samples` shows answers as people
read them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .output import Verbs, add_run_flags, client_of, client_or_folder, show, table
from .parser import at_least

if TYPE_CHECKING:
    from rich.console import RenderableType


DUMP_S = 1815.0


def add_dump(verbs: Verbs) -> None:
    """The command and its flags."""
    dump = verbs.add_parser("dump", help="write groups with their tokens into a file of the run")
    what = dump.add_mutually_exclusive_group()
    what.add_argument("--next", type=at_least(1), default=0, metavar="N", dest="next_groups",
                      help="the next N that are claimed for training (all that was not trained yet)")  # fmt: skip
    what.add_argument("--end", action="store_true", help="end an earlier --next before it has all its groups")
    what.add_argument("--list", action="store_true", help="files that were written, or are being written")
    dump.add_argument(
        "--max-mb", type=at_least(1), default=1024, metavar="MB", help="largest file, in MiB (%(default)s)"
    )
    dump.set_defaults(run=_dump)
    add_run_flags(dump)


def _dump(options: argparse.Namespace) -> int:
    if options.list:
        show(options, client_of(options).ask("dumps"), _files)
        return 0
    client = client_of(options, changes=True)
    wanted = -1 if options.end else options.next_groups
    show(options, client.ask("dump", DUMP_S, next_groups=wanted, max_mb=options.max_mb), _dump_sentence)
    return 0


def _dump_sentence(facts: dict[str, Any]) -> str:
    text = f"{facts['num_groups']} groups, {facts['num_bytes']:,} bytes in {facts['path']}"
    return f"{text}: {facts['reason']}" if facts["reason"] else text


def _files(facts: list[dict[str, Any]]) -> RenderableType:
    rows = [(d["path"], d["num_groups"], f"{d['num_bytes']:,}", d["reason"] or "whole") for d in facts]
    return table(("file", "groups", "bytes", ""), rows, right=("groups", "bytes"))


def add_samples(verbs: Verbs) -> None:
    """The command and its flags."""
    samples = verbs.add_parser(
        "samples",
        help="prompt, answers, rewards: of the newest groups, of any step, of held-out prompts",
        description="Of a live run: the newest finished groups, token by token. With --step or --eval, and of an ended "
        "run: what samples.jsonl kept of each step.",
    )
    samples.add_argument(
        "num_groups", nargs="?", type=at_least(1), default=4, metavar="N", help="how many (%(default)s)"
    )
    samples.add_argument("--tokens", type=at_least(1), default=512, metavar="T", dest="max_tokens",
                         help="tokens of each answer at most (%(default)s)")  # fmt: skip
    samples.add_argument("--step", type=at_least(0), default=-1, metavar="S",
                         help="of this step, as the curves count them (any)")  # fmt: skip
    samples.add_argument("--eval", nargs="?", const="", default=None, metavar="SET", dest="eval_set",
                         help="answers to held-out prompts, of one set of [eval.sets] or of all")  # fmt: skip
    samples.set_defaults(run=_samples)
    add_run_flags(samples)


def _samples(options: argparse.Namespace) -> int:
    found = client_or_folder(options, view=True)
    wanted: dict[str, Any] = {
        "step": options.step,
        "held_out": options.eval_set is not None,
        "eval_set": options.eval_set or "",
    }
    if isinstance(found, Path):
        from ..views.run_files import SampleQuery, read_samples

        facts = {"groups": read_samples(found, SampleQuery(**wanted), options.num_groups), "num_left_out": 0}
    else:
        facts = found.ask("samples", num_groups=options.num_groups, max_tokens=options.max_tokens, **wanted)
    is_kept = isinstance(found, Path) or options.step >= 0 or options.eval_set is not None
    show(options, facts, _draw_kept if is_kept else _draw)
    return 0


def _draw_kept(facts: dict[str, Any]) -> RenderableType:
    """Groups as `samples.jsonl` has them."""
    from rich.text import Text

    lines = [line for group in facts["groups"] for line in _kept_group(group)]
    return Text(
        "\n".join(lines)
        or "samples.jsonl holds no such group: monitor.samples_per_step says how many of each step it gets"
    )


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

    lines = [line for group in facts["groups"] for line in _group(group)]
    return Text("\n".join(lines) or "no group was finished yet")


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
    gap = _gap(sample)
    return f"{sample['num_tokens']} tokens ({sample['finish']}), {versions}, temperature {sample['temperature']:g}{gap}"


def _gap(sample: dict[str, Any]) -> str:
    """How far the trainer's log-probs are from the engine's, over the shown tokens that are trained on."""
    tokens = zip(sample["logprobs"], sample["train_logprobs"], sample["loss_mask"], strict=False)
    gaps = [abs(trained - drawn) for drawn, trained, is_trained in tokens if is_trained]
    if not gaps:
        return ""
    return f", trainer and engine differ by {sum(gaps) / len(gaps):.2g} nats a token, at most {max(gaps):.2g}"
