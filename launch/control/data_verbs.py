"""Verbs about data: files of the buffer's groups, and the newest samples token by token.

The model's tokenizer is loaded at the first request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any

import msgspec
import numpy as np

from ...actors.contracts import BufferContract
from ...core.knobs import Operator
from ...core.messages import DumpReport, RecentGroup, Record
from ...core.protocols import Tokenizer
from ...core.refs import with_deadline
from ...core.samples import F32, Sample
from ..views.run_files import SampleQuery, read_samples
from .verb import Arguments, Verb, VerbContext

ASK_S = 20.0
DUMP_S = 1800.0
MIB = 1 << 20
MAX_GROUPS = 64
MAX_TOKENS = 1 << 16
"""Tokens of all samples in one answer."""
NOT_A_CHARACTER = "\ufffd"
NOT_SCORED: F32 = np.zeros(0, dtype=np.float32)


class DumpArguments(Arguments, frozen=True, kw_only=True):
    """Of `dump`."""

    next_groups: Annotated[int, msgspec.Meta(ge=-1, le=1_000_000)] = 0
    """0: all that was not trained yet, now; more: the next groups that are claimed for training; -1: end that."""
    max_mb: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 1024
    """Largest file, in MiB."""


class SamplesArguments(Arguments, frozen=True, kw_only=True):
    """Of `samples`."""

    num_groups: Annotated[int, msgspec.Meta(ge=1, le=MAX_GROUPS)] = 4
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)] = 512
    """Of the response of each sample; what comes after is left out."""
    step: Annotated[int, msgspec.Meta(ge=-1)] = -1
    """Of this step, as `samples.jsonl` has it; -1: of any."""
    held_out: bool = False
    """Answers to held-out prompts, as `samples.jsonl` has them."""
    eval_set: Annotated[str, msgspec.Meta(max_length=200)] = ""
    """Of this set alone."""


class ShownSample(Record, frozen=True):
    """One sample; `tokens`, `logprobs`, `versions` and `loss_mask` have the same length."""

    index: int
    text: str
    reward: float
    reward_parts: dict[str, float]
    finish: str
    num_turns: int
    temperature: float
    num_tokens: int
    """Of the whole response."""
    tokens: tuple[str, ...]
    """Text of each token of the response; empty where the token continues a character of the one before."""
    logprobs: tuple[float, ...]
    """When they were drawn, nats."""
    train_logprobs: tuple[float, ...]
    """The trainer's own, in the step that trained it, 0 where the mask is 0; of the first groups of each step that
    differ in reward, else empty."""
    versions: tuple[int, ...]
    loss_mask: tuple[int, ...]


class ShownGroup(Record, frozen=True):
    """One group that was finished a while ago."""

    group_id: int
    prompt: str
    label: str
    outcome: str
    """"kept" or "left out"."""
    reason: str
    state: str
    """Where the group is now, by the ledger."""
    step: int
    knobs: int
    """Epoch of the knobs that it was dispatched under."""
    rollout: str
    wall_s: float
    samples: tuple[ShownSample, ...]


async def _dump(context: VerbContext, arguments: DumpArguments, who: Operator) -> DumpReport:
    del who
    max_bytes = arguments.max_mb * MIB
    if arguments.next_groups:
        return await _buffer(context, ASK_S).dump_next(max(arguments.next_groups, 0), max_bytes)
    return await _buffer(context, DUMP_S).dump(max_bytes)


async def _dumps(context: VerbContext, arguments: Arguments, who: Operator) -> tuple[DumpReport, ...]:
    del arguments, who
    return await _buffer(context, ASK_S).dumps()


async def _samples(context: VerbContext, arguments: SamplesArguments, who: Operator) -> dict[str, Any]:
    del who
    if arguments.step >= 0 or arguments.held_out:
        wanted = SampleQuery(arguments.step, arguments.held_out, arguments.eval_set)
        kept = await asyncio.to_thread(read_samples, context.run_dir.path, wanted, arguments.num_groups)
        return {"groups": kept, "num_left_out": 0}
    found = await _buffer(context, ASK_S).recent(arguments.num_groups)
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


def _shown(found: Sequence[RecentGroup], tokenizer: Tokenizer, max_tokens: int) -> list[ShownGroup]:
    groups: list[ShownGroup] = []
    left = MAX_TOKENS
    for recent in found:
        left -= sum(min(len(sample.response_ids), max_tokens) for sample in recent.group.samples)
        if left < 0 and groups:
            break
        groups.append(_shown_group(recent, tokenizer, max_tokens))
    return groups


def _shown_group(recent: RecentGroup, tokenizer: Tokenizer, max_tokens: int) -> ShownGroup:
    group = recent.group
    parts = group.reward_parts or tuple({} for _ in group.samples)
    scores = recent.train_logprobs or tuple(NOT_SCORED for _ in group.samples)
    return ShownGroup(
        group_id=group.group_id,
        prompt="\n".join(f"{message.role}: {message.content}" for message in group.prompt.messages),
        label=group.prompt.label,
        outcome=recent.outcome,
        reason=recent.reason,
        state=recent.state,
        step=recent.step,
        knobs=group.knobs,
        rollout=recent.rollout,
        wall_s=recent.wall_s,
        samples=tuple(
            _shown_sample(sample, float(reward), of, trained, tokenizer, max_tokens)
            for sample, reward, of, trained in zip(group.samples, group.rewards, parts, scores, strict=True)
        ),
    )


def _shown_sample(
    sample: Sample, reward: float, parts: dict[str, float], scores: F32, tokenizer: Tokenizer, max_tokens: int
) -> ShownSample:
    ids = sample.response_ids[:max_tokens].tolist()
    return ShownSample(
        index=sample.index,
        text=sample.text,
        reward=reward,
        reward_parts=parts,
        finish=sample.finish,
        num_turns=sample.num_turns,
        temperature=sample.temperature,
        num_tokens=len(sample.response_ids),
        tokens=token_texts(ids, tokenizer),
        logprobs=tuple(sample.logprobs[:max_tokens].tolist()),
        train_logprobs=tuple(scores[:max_tokens].tolist()),
        versions=tuple(sample.versions[:max_tokens].tolist()),
        loss_mask=tuple(sample.loss_mask[:max_tokens].tolist()),
    )


def token_texts(ids: Sequence[int], tokenizer: Tokenizer) -> tuple[str, ...]:
    """Text of each token; one that only begins a character has none, the one that completes it has all of it.

    Each is decoded after the one before, since tokenizers treat the first token of a text in their own way.
    """
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


DATA_VERBS: tuple[Verb[Any], ...] = (
    Verb("dump", "operate", DumpArguments, "write groups with their tokens into a file of the run", run=_dump),
    Verb("dumps", "view", Arguments, "files that `dump` wrote, or is writing", run=_dumps),
    Verb("samples", "view", SamplesArguments, "the newest finished groups, token by token", run=_samples),
)
