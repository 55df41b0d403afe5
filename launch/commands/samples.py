"""`myxa samples`: the newest finished groups, as people read them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..control.client import ControlClient
from .output import Verbs, add_run_flags, show
from .whole import at_least

if TYPE_CHECKING:
    from rich.console import RenderableType


def add(verbs: Verbs) -> None:
    """The command and its flags."""
    samples = verbs.add_parser("samples", help="the newest finished groups: prompt, answers, rewards, versions")
    samples.add_argument(
        "num_groups", nargs="?", type=at_least(1), default=4, metavar="N", help="how many (%(default)s)"
    )
    samples.add_argument("--tokens", type=at_least(1), default=512, metavar="T", dest="max_tokens",
                         help="tokens of each answer at most (%(default)s)")  # fmt: skip
    samples.set_defaults(run=_samples)
    add_run_flags(samples)


def _samples(options: argparse.Namespace) -> int:
    client = ControlClient.of(options.run_path, view=True)
    told = client.ask("samples", num_groups=options.num_groups, max_tokens=options.max_tokens)
    show(options, told, _draw)
    return 0


def _draw(told: dict[str, Any]) -> RenderableType:
    from rich.text import Text

    lines = [line for group in told["groups"] for line in _group(group)]
    return Text("\n".join(lines) or "no group was finished yet")


def _group(group: dict[str, Any]) -> Iterator[str]:
    step = f", step {group['step']}" if group["step"] >= 0 else ""
    why = f" ({group['reason']})" if group["reason"] else ""
    yield f"group {group['group_id']}: {group['outcome']}{why}, {group['state']}{step}, knobs {group['knobs']}"
    yield f"  {group['prompt']}"
    for sample in group["samples"]:
        yield f"  [{sample['index']}] reward {sample['reward']:g}, {_facts(sample)}"
        yield f"      {''.join(sample['tokens'])}"


def _facts(sample: dict[str, Any]) -> str:
    stamped = sorted({version for version in sample["versions"] if version >= 0})
    versions = f"versions {stamped[0]} to {stamped[-1]}" if stamped else "no engine"
    gap = _gap(sample)
    return f"{sample['num_tokens']} tokens ({sample['finish']}), {versions}, temperature {sample['temperature']:g}{gap}"


def _gap(sample: dict[str, Any]) -> str:
    """How far the trainer's log-probs are from the engine's, over the tokens that are told and trained."""
    told = zip(sample["logprobs"], sample["train_logprobs"], sample["loss_mask"], strict=False)
    gaps = [abs(trained - drawn) for drawn, trained, is_trained in told if is_trained]
    if not gaps:
        return ""
    return f", trainer and engine differ by {sum(gaps) / len(gaps):.2g} nats a token, at most {max(gaps):.2g}"
