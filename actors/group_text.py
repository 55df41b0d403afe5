"""A finished group as text for people, in bounded size: its prompt, and of each sample the conversation with what the
tokens of each turn say: weight versions, loss mask, reward.

What a model wrote stays as it is; views read tool calls and thoughts in it (`launch/views/conversation.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from ..core.messages import AnswerText, GroupText, SaidText
from ..core.samples import REASONING_KEYS, Group, Message, Sample

MAX_CHARS = 4_000
"""Of a message; the middle of what is longer is left out."""
MAX_GROUP_CHARS = 100_000
"""Of all answers of a group together, each of which may have as many as the others."""
MAX_ANSWERS = 16
MAX_MESSAGES = 100
"""Of one conversation; the middle of what is longer is left out."""
MAX_PARTS = 16
MAX_NAME = 80
MAX_TOOL = 500
MAX_TOOLS = 32
MAX_CALLS = 8
"""Of a message."""


def group_text(
    group: Group, *, step: int, outcome: str, wall_s: float, source: str, reason: str = "", eval_set: str | None = None
) -> GroupText:
    """`step`: the version that its step made, or that answered held-out prompts. `eval_set`: of held-out ones."""
    versions = [version for sample in group.samples for version in sample.versions.tolist() if version >= 0]
    nothing: dict[str, float] = {}
    parts = group.reward_parts or (nothing,) * len(group.samples)
    # A group that was dropped because it is wrong may lack some of them.
    answers = list(zip(group.samples, group.rewards.tolist(), parts, strict=False))[:MAX_ANSWERS]
    num_chars = MAX_GROUP_CHARS // max(len(answers), 1)
    return GroupText(
        step=step,
        oldest_version=min(versions, default=-1),
        newest_version=max(versions, default=-1),
        group_id=group.group_id,
        messages=_bounded_messages(group.prompt.messages, 2 * MAX_CHARS),
        tools=_tools(group.prompt.tools),
        label=shortened(group.prompt.label),
        outcome=outcome,
        reason=reason,
        is_held_out=eval_set is not None,
        eval_set=eval_set or "",
        source=source,
        wall_s=wall_s,
        answers=tuple(_answer(group, *answer, num_chars) for answer in answers),
        num_answers=len(group.samples),
    )


def _answer(group: Group, sample: Sample, reward: float, parts: Mapping[str, float], num_chars: int) -> AnswerText:
    num_shared, branch = _shared_turns(group, sample)
    return AnswerText(
        index=sample.index,
        branch=sample.branch,
        messages=_bounded_messages([*sample.messages, *_turns(sample, num_shared)], num_chars),
        tools=_tools(sample.tools),
        num_opening=min(len(sample.messages), MAX_MESSAGES // 2),
        num_shared=num_shared,
        shared_with=branch,
        reward=reward,
        reward_parts=dict(list(parts.items())[:MAX_PARTS]),
        finish=sample.finish,
        num_tokens=len(sample.response_ids),
    )


def _shared_turns(group: Group, sample: Sample) -> tuple[int, int]:
    """How many turns of the model a sample has from another one of its rollout, and which one; -1: none."""
    if not sample.branch or (num_shared := len(sample.turns) - len(sample.model_runs())) <= 0:
        return 0, -1
    size = len(sample.prompt_ids)
    earlier = (other for other in group.samples if other.index == sample.index and other.branch < sample.branch)
    for other in earlier:
        if np.array_equal(np.concatenate([other.prompt_ids, other.response_ids])[:size], sample.prompt_ids):
            return num_shared, other.branch
    return num_shared, -1


def _turns(sample: Sample, num_shared: int) -> list[Message | SaidText]:
    """All that was said after the prompt; no tokens where turns and runs of tokens do not correspond."""
    runs, messages = sample.model_runs(), list[Message | SaidText]()
    for number, text in enumerate(sample.turns):
        facts: dict[str, Any] = {"is_model": True}
        if number >= num_shared and len(runs) == len(sample.turns) - num_shared:
            begin, end = runs[number - num_shared]
            facts |= _of_tokens(sample, begin, end)
        messages.append(SaidText(role="assistant", content=text, **facts))
        messages += sample.replies[number] if number < len(sample.replies) else ()
    return messages


def _of_tokens(sample: Sample, begin: int, end: int) -> dict[str, Any]:
    versions = sample.versions[begin:end]
    weights = None if sample.loss_weights is None else sample.loss_weights[begin:end]
    return {
        "num_tokens": end - begin,
        "num_learnt": end - begin if weights is None else int((weights > 0).sum()),
        "oldest_version": int(versions.min()),
        "newest_version": int(versions.max()),
        "reward": None if sample.token_rewards is None else float(sample.token_rewards[end - 1]),
    }


def _message_text(message: Message) -> SaidText:
    return SaidText(
        role=shortened(message.role, MAX_NAME),
        content=message.content,
        name=shortened(message.name, MAX_NAME),
        calls=tuple(_json(call.get("function", call)) for call in message.tool_calls[:MAX_CALLS]),
        call_id=shortened(message.tool_call_id, MAX_NAME),
        thought=next((str(message.extra[key]) for key in REASONING_KEYS if message.extra.get(key)), ""),
    )


def _tools(tools: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Their declarations, as JSON."""
    return tuple(shortened(_json(tool.get("function", tool)), MAX_TOOL) for tool in tools[:MAX_TOOLS])


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)


def _bounded_messages(messages: Sequence[Message | SaidText], num_chars: int) -> tuple[SaidText, ...]:
    num_left = num_chars
    num_cut = len(messages) - MAX_MESSAGES
    if num_cut > 0:
        half = MAX_MESSAGES // 2
        gap = SaidText(role="", content=f"[... {num_cut:,} messages ...]")
        messages = [*messages[:half], gap, *messages[half + num_cut :]]
    texts: list[SaidText] = []
    for number, message in enumerate(messages):
        shown = _message_text(message) if isinstance(message, Message) else message
        most = min(MAX_CHARS, max(num_left // (len(messages) - number), 40))
        content, thought, *calls = (shortened(text, most) for text in (shown.content, shown.thought, *shown.calls))
        num_left -= len(content) + len(thought) + sum(map(len, calls))
        texts.append(replace(shown, content=content, thought=thought, calls=tuple(calls)))
    return tuple(texts)


def shortened(text: str, most: int = MAX_CHARS) -> str:
    """Its beginning and its end. A lone surrogate, which no file can hold, is spelt out."""
    text = text.encode("utf-8", "backslashreplace").decode()
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} [... {len(text) - most:,} characters ...] {text[-half:]}"
