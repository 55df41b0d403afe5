"""The verb `samples`: the newest samples token by token, or what was kept of a step.

The model's tokenizer is loaded at the first request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from ...actors.contracts import BufferContract
from ...core.knobs import Operator
from ...core.messages import RecentGroup
from ...core.protocols import Tokenizer
from ...core.refs import with_deadline
from ...core.samples import Sample
from ..views.run_files import SampleQuery, read_samples
from . import verbs
from .server import Handler, VerbContext

NOT_A_CHARACTER = "\ufffd"


async def _samples(context: VerbContext, arguments: verbs.SamplesArguments, who: Operator) -> dict[str, Any]:
    del who
    if arguments.step >= 0 or arguments.held_out:
        wanted = SampleQuery(arguments.step, arguments.held_out, arguments.eval_set)
        kept = await asyncio.to_thread(read_samples, context.run_dir.path, wanted, arguments.num_groups)
        return {"groups": kept, "num_left_out": 0}
    found = await _buffer(context, verbs.SAMPLES.ask_s).recent(arguments.num_groups)
    folder = context.config.model.path
    groups = await asyncio.to_thread(lambda: _shown(found, _tokenizer(folder), arguments.max_tokens))
    return {"groups": groups, "num_left_out": len(found) - len(groups)}


def _buffer(context: VerbContext, seconds: float) -> BufferContract:
    return with_deadline(context.node.ref(BufferContract, "buffer"), seconds)


@lru_cache(maxsize=1)
def _tokenizer(folder: str) -> Tokenizer:
    from ...actors.models.chat_template import PlainText
    from ...actors.models.tokenizer import load_tokenizer

    return load_tokenizer(folder, PlainText())


def _shown(found: Sequence[RecentGroup], tokenizer: Tokenizer, max_tokens: int) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = []
    left = verbs.MAX_SHOWN_TOKENS
    for recent in found:
        left -= sum(min(len(sample.response_ids), max_tokens) for sample in recent.group.samples)
        if left < 0 and groups:
            break
        groups.append(_shown_group(recent, tokenizer, max_tokens))
    return groups


def _shown_group(recent: RecentGroup, tokenizer: Tokenizer, max_tokens: int) -> dict[str, Any]:
    group = recent.group
    parts = group.reward_parts or tuple({} for _ in group.samples)
    return {
        "group_id": group.group_id,
        "prompt": "\n".join(f"{message.role}: {message.content}" for message in group.prompt.messages),
        "label": group.prompt.label,
        "outcome": recent.outcome,
        "reason": recent.reason,
        "state": recent.state,
        "step": recent.step,
        "knobs": group.knobs,
        "rollout": recent.rollout,
        "wall_s": recent.wall_s,
        "samples": [
            {**_shown_sample(sample, tokenizer, max_tokens), "reward": float(reward), "reward_parts": of}
            for sample, reward, of in zip(group.samples, group.rewards, parts, strict=True)
        ],
    }  # fmt: skip


def _shown_sample(sample: Sample, tokenizer: Tokenizer, max_tokens: int) -> dict[str, Any]:
    """Lists of a number for each token have the same length."""
    return {
        "index": sample.index,
        "branch": sample.branch,
        "text": sample.text,
        "finish": sample.finish,
        "num_turns": sample.num_turns,
        "temperature": sample.temperature,
        "num_tokens": len(sample.response_ids),
        "tokens": token_texts(sample.response_ids[:max_tokens].tolist(), tokenizer),
        "logprobs": sample.logprobs[:max_tokens].tolist(),
        "versions": sample.versions[:max_tokens].tolist(),
        "loss_mask": sample.loss_mask[:max_tokens].tolist(),
    }


def token_texts(ids: Sequence[int], tokenizer: Tokenizer) -> tuple[str, ...]:
    """Text of each token; one that only begins a character has none, the one that completes it has all of it. Each is
    decoded after the one before, since tokenizers treat the first token of a text in their own way."""
    texts: list[str] = []
    begun: list[int] = []
    before: list[int] = []
    for token in ids:
        begun.append(token)
        head = tokenizer.decode(before, skip_special=False)
        text = tokenizer.decode([*before, *begun], skip_special=False)[len(head) :]
        if text.endswith(NOT_A_CHARACTER) and len(begun) < 4:
            texts.append("")
            continue
        texts.append(text)
        before, begun = begun[-1:], []
    if begun and texts:
        texts[-1] = NOT_A_CHARACTER
    return tuple(texts)


DATA_HANDLERS: dict[verbs.Verb[Any], Handler] = {verbs.SAMPLES: _samples}
