"""The built-in rewards: pure functions of a completion. 1.0 is right, 0.0 is wrong, nothing between.

`math_equal` imports math-verify and sympy, whose time limits use signals: it runs in reward worker processes only.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import Any, cast

from ...core.completions import Completion
from .extraction import Extract, boxed, extract
from .numbers import close, last_number, parse_number

DEFAULT_FORMAT = r"\s*<think>.*</think>\s*<answer>.*</answer>\s*"
MATH_TAIL_CHARS = 4000
"""Without a box, math looks for the answer in this much of the end of the text."""


def exact(completion: Completion, *, extract_from: Extract = "all", ignore_case: bool = False) -> float:
    """Whether the answer is the label, character by character, after runs of white space are made one space."""
    answer = extract(completion.text, extract_from)
    if answer is None:
        return 0.0
    given, wanted = " ".join(answer.split()), " ".join(completion.label.split())
    if ignore_case:
        given, wanted = given.casefold(), wanted.casefold()
    return float(given == wanted)


def numeric(
    completion: Completion, *, extract_from: Extract = "auto", tolerance: float = 1e-6, absolute: float = 0.0
) -> float:
    """Whether the answer is the label as a number, within `tolerance * |label|` or `absolute`.

    The answer is what is boxed, marked or tagged; if that is no number, the last number in it. Raises ValueError for
    a label that is no number.
    """
    wanted = parse_number(completion.label)
    if wanted is None:
        raise ValueError(f"the label {completion.label[:80]!r} is not a number")
    answer = extract(completion.text, extract_from)
    if answer is None:
        return 0.0
    given = parse_number(answer)
    given = last_number(answer) if given is None else given
    if given is None:
        return 0.0
    return float(close(given, wanted, relative=Fraction(tolerance), absolute=Fraction(absolute)))


def regex(completion: Completion, *, pattern: str) -> float:
    """Whether the pattern is found; with a group in it, whether the last match's first group is the label."""
    compiled = _compiled(pattern)
    if not compiled.groups:
        return float(compiled.search(completion.text) is not None)
    found = deque(compiled.finditer(completion.text), maxlen=1)
    return float(bool(found) and (found[0][1] or "").strip() == completion.label.strip())


def text_format(completion: Completion, *, pattern: str = DEFAULT_FORMAT) -> float:
    """Whether the whole answer matches the pattern (a dot matches line ends too)."""
    return float(_compiled(pattern, re.DOTALL).fullmatch(completion.text) is not None)


def workflow(completion: Completion) -> float:
    """What the workflow said that its sample is worth. Raises ValueError if it said nothing."""
    if completion.reward is None:
        raise ValueError("the workflow said no reward; it does so by `return ctx.episode.sample(reward=...)`")
    return completion.reward


def recorded(completion: Completion) -> float:
    """What the answer was given when it was recorded. Raises ValueError if it was not."""
    told: object = completion.metadata.get("recorded")
    rewards = cast("dict[str, list[float]]", told).get("rewards", []) if isinstance(told, dict) else []
    if completion.index >= len(rewards):
        raise ValueError('of this answer no reward is recorded; data.preset = "recorded" reads those of dumps')
    return rewards[completion.index]


def math_equal(completion: Completion, *, seconds: int = 5) -> float:
    """Whether answer and label are mathematically equal, by math-verify. An answer on which it takes longer than
    `seconds` is wrong. Raises ValueError for a label that it cannot read."""
    box = boxed(completion.text)
    label = completion.label.strip()
    if box is not None and _fast_equal(box, label):
        return 1.0
    parse, verify = _math_verify()
    wanted = parse(label if "$" in label or "\\boxed" in label else f"\\boxed{{{label}}}", parsing_timeout=seconds)
    if not wanted:
        raise ValueError(f"math-verify cannot read the label {label[:80]!r}")
    text = f"\\boxed{{{box}}}" if box is not None else completion.text[-MATH_TAIL_CHARS:]
    given = parse(text, parsing_timeout=seconds)
    return float(bool(given) and verify(wanted, given, timeout_seconds=seconds))


def _math_verify() -> tuple[Callable[..., list[Any]], Callable[..., bool]]:
    # Heavy (sympy), and only worker processes may have it.
    from math_verify import parse, verify  # pyright: ignore[reportMissingTypeStubs]

    return parse, verify


def _fast_equal(answer: str, label: str) -> bool:
    if answer == label:
        return True
    given, wanted = parse_number(answer), parse_number(label)
    return given is not None and given == wanted


@lru_cache(maxsize=16)
def _compiled(pattern: str, flags: int = 0) -> re.Pattern[str]:
    return re.compile(pattern, flags)
