"""A finished group as people read it: prompt, answers, rewards. Bounded, for it travels with an actor's telemetry."""

from __future__ import annotations

from ..core.messages import AnswerText, GroupText
from ..core.samples import Group

MAX_CHARS = 4_000
"""Of a prompt, and of each answer; the middle of what is longer is left out."""
MAX_ANSWERS = 16
MAX_PARTS = 16


def group_text(
    group: Group, *, step: int, outcome: str, wall_s: float, source: str, reason: str = "", eval_set: str | None = None
) -> GroupText:
    """`step`: the version that its step made, or that answered held-out prompts. `eval_set`: of held-out ones."""
    versions = [version for sample in group.samples for version in sample.versions.tolist() if version >= 0]
    nothing: dict[str, float] = {}
    parts = group.reward_parts or (nothing,) * len(group.samples)
    # A group that was dropped because it is wrong may lack some of them.
    told = list(zip(group.samples, group.rewards.tolist(), parts, strict=False))[:MAX_ANSWERS]
    return GroupText(
        step=step,
        oldest_version=min(versions, default=-1),
        newest_version=max(versions, default=-1),
        group_id=group.group_id,
        prompt=shortened("\n".join(f"{message.role}: {message.content}" for message in group.prompt.messages)),
        label=shortened(group.prompt.label),
        outcome=outcome,
        reason=reason,
        is_held_out=eval_set is not None,
        eval_set=eval_set or "",
        source=source,
        wall_s=wall_s,
        answers=tuple(
            AnswerText(
                index=sample.index,
                text=shortened(sample.text),
                reward=reward,
                reward_parts=dict(list(named.items())[:MAX_PARTS]),
                finish=sample.finish,
                num_tokens=len(sample.response_ids),
            )
            for sample, reward, named in told
        ),
        num_answers=len(group.samples),
    )


def shortened(text: str) -> str:
    """Its beginning and its end. A lone surrogate, which no file can hold, is spelt out."""
    text = text.encode("utf-8", "backslashreplace").decode()
    if len(text) <= MAX_CHARS:
        return text
    half = MAX_CHARS // 2
    return f"{text[:half]} [... {len(text) - MAX_CHARS:,} characters ...] {text[-half:]}"
