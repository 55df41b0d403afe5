"""The reward `math`: whether answer and label are mathematically equal. math-verify judges.

Before it, two plain numbers are compared exactly: it would round them. math-verify and sympy are imported here, in
reward worker processes only: `prepare` bounds the memory of its process, and one long operation in C, such as 9**9**9,
ends only with the process.
"""

from __future__ import annotations

import logging
import resource
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from ...core.completions import Completion
from .extraction import accepted_labels, numbers_of, read_answer

SECONDS = 5
MAX_MEMORY_BYTES = 2 << 30
"""That a worker may take beyond what it has when it begins."""
TAIL_CHARS = 4000
"""Of unmarked text, so much of the end is looked at."""
MAX_ANSWER_CHARS = 2000
"""What is marked as the answer and is longer is none."""


def math_equal(completion: Completion, *, seconds: int = SECONDS) -> float:
    """Whether answer and label are mathematically equal, by math-verify. An expression that takes longer than `seconds`
    is wrong. Raises ValueError for a label that it cannot read."""
    answer = read_answer(completion.text)
    given, num_read = numbers_of(answer.text), 0
    text = answer.text[-TAIL_CHARS:]
    if answer.is_marked:
        text = f"\\boxed{{{answer.text}}}" if len(answer.text) <= MAX_ANSWER_CHARS else ""
    for label in map(str.strip, accepted_labels(completion.label)):
        wanted = numbers_of(label)
        if (label and answer.text == label) or not set(given).isdisjoint(wanted):
            return 1.0
        expected = _parsed(label if "\\boxed" in label or "$" in label else f"\\boxed{{{label}}}", seconds)
        num_read += bool(expected)
        if not (given and wanted) and any(
            _is_equal(one, other, seconds) for one in expected for other in _parsed(text, seconds)
        ):
            return 1.0
    if not num_read:
        raise ValueError(f"math-verify cannot read the label {completion.label[:80]!r}")
    return 0.0


def prepare() -> None:
    """Of a worker process: import what compares, have it do so once, for it is slow at first, and bound the memory."""
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for label, answer in ((r"\frac{1}{2}", r"\sqrt{2}"), ("x^2+2x+1", "(x+1)^2"), (r"(3,\infty)", "x>3")):
        _is_equal(_parsed(f"${label}$", SECONDS), _parsed(f"${answer}$", SECONDS), SECONDS)
    used = int(Path("/proc/self/statm").read_bytes().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MAX_MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _parsed(text: str, seconds: int) -> list[Any]:
    # Heavy (sympy), and only worker processes may have it.
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse  # pyright: ignore[reportMissingTypeStubs]

    # Of a box no expression of plain text: of "> 42" it would take the 42.
    kinds = (
        [LatexExtractionConfig()] if text.startswith("\\boxed") else [LatexExtractionConfig(), ExprExtractionConfig()]
    )
    return cast("list[Any]", parse(text, kinds, parsing_timeout=seconds))


def _is_equal(wanted: Any, given: Any, seconds: int) -> bool:
    from math_verify import verify  # pyright: ignore[reportMissingTypeStubs]

    sides = [] if _sides(wanted) else [side for side in _sides(given) if not side.free_symbols]
    return all(
        verify(wanted, one, float_rounding=12, allow_set_relation_comp=True, timeout_seconds=seconds)
        for one in (given, *sides)
    )


def _sides(of: Any) -> list[Any]:
    """Of an equation, or a chain of them: 41 = 42 is not 42."""
    parts = [of] if _is_equation(of) else list(getattr(of, "_unsorted_args", ()))
    is_chain = all(map(_is_equation, parts)) and all(a.rhs == b.lhs for a, b in pairwise(parts))
    return [side for part in parts for side in part.args] if is_chain else []


def _is_equation(of: Any) -> bool:
    return getattr(of, "rel_op", "") == "=="  # sympy's
