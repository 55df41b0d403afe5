"""The reward `math`: whether answer and label are mathematically equal. math-verify judges.

Before it, two plain numbers are compared exactly, with their units. It gets decimals as fractions, for it would round
them, and no units, for it would drop them. math-verify and sympy are imported here, in reward worker processes only:
`prepare` bounds the memory of its process, and one long operation in C, such as 9**9**9, ends only with the process.
"""

from __future__ import annotations

import contextlib
import logging
import re
import resource
import signal
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

from ...core.completions import Completion
from .extraction import TAG, JudgedText, accepted_labels, read_answer
from .numbers import NONE, Unit, contradict, is_known, last_quantity, parse_quantity, parse_unit

SECONDS = 5
MAX_MEMORY_BYTES = 2 << 30
"""That a worker may take beyond what it has when it begins."""
TAIL_CHARS = 4000
"""Of unmarked text, so much of the end is looked at."""
MAX_ANSWER_CHARS = 2000
"""What is marked as the answer and is longer is none."""
_DECIMAL = re.compile(r"(?<![\d.,A-Za-z])(\d*\.\d+)(?![\d.])(\s*\^)?")
_SCIENTIFIC = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?![\w.])")
_THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|\\,|\\!|\u00a0|\u2009|\u202f)(?=\d{3}(?!\d))")
_SIGNS = str.maketrans({**dict.fromkeys("\u2212\u2013\u2010\u2011", "-"), **dict.fromkeys("\u00a0\u2009\u202f", " ")})
_TEXT = re.compile(r"(?<!\\)\$|\\boxed")
"""In a label: the answer is somewhere in it."""
_UNIT = re.compile(
    r"(?:\\[,;:! ]|~|\s)*"
    r"((?:\\(?:text|mathrm|textrm|mbox|rm|operatorname)\s*\{[^{}]{1,40}\}(?:\s*\^\s*\{?-?\d\}?)?[\s/]*){1,3}"
    r"|\^\s*\{?\\circ\}?(?:\s*\\?(?:text|mathrm)?\s*\{?\s*[CF]\s*\}?)?)[\s.]*$"
)
_UNIT_WORD = re.compile(r"(?<=[\d})])\s{1,4}([A-Za-z]{2,20}(?:/[A-Za-z]{1,20})?(?:\^\{?\d\}?)?)\.?$")


class _TookTooLong(BaseException):
    """No Exception: math-verify takes those for texts that it cannot read."""


def math_equal(completion: Completion, *, seconds: int = SECONDS) -> float:
    """Whether answer and label are mathematically equal, by math-verify. An answer on which all of that takes longer
    than `seconds` is wrong. Raises ValueError for a label that it cannot read."""
    answer = read_answer(completion.text)
    assert answer is not None
    num_read, labels = 0, accepted_labels(completion.label.strip())
    with contextlib.suppress(_TookTooLong), _at_most(seconds):
        for label in labels:
            is_right = _is_equal(label.strip(), answer)
            num_read += is_right is not None
            if is_right:
                return 1.0
        if not num_read:
            raise ValueError(f"math-verify cannot read the label {completion.label[:80]!r}")
    return 0.0


@contextlib.contextmanager
def _at_most(seconds: int) -> Generator[None]:
    def ring(number: int, frame: FrameType | None) -> None:
        raise _TookTooLong

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _is_equal(label: str, answer: JudgedText) -> bool | None:
    """None: the label cannot be read."""
    if label and answer.text == label:
        return True
    wanted = parse_quantity(label, may_have_name=False)
    if wanted is not None and (given := parse_quantity(answer.text)) is not None:
        return given.equals(wanted)
    if answer.is_marked:
        if len(answer.text) > MAX_ANSWER_CHARS:
            return False
        (expected, unit), (text, other) = _for_library(label), _for_library(answer.text)
        return False if contradict(unit, other) else _library().is_equal(expected, text, is_whole=True)
    said = last_quantity(answer.text[-TAIL_CHARS:])
    if wanted is not None and said is not None and contradict(said.unit, wanted.unit):
        return False
    tail = TAG.sub(" ", answer.text[-TAIL_CHARS:].translate(_SIGNS).replace("\\boxed{", ""))  # what does not close
    return _library().is_equal(_for_library(label)[0], tail, is_whole=False)


def prepare() -> None:
    """Of a worker process: import what compares, have it do so once, for it is slow at first, and bound the memory."""
    for label, answer in ((r"\frac{1}{2}", r"\sqrt{2}"), ("x^2+2x+1", "(x+1)^2"), (r"(3,\infty)", "x>3")):
        _library().is_equal(label, answer, is_whole=True)
    used = int(Path("/proc/self/statm").read_bytes().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MAX_MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))


class _MathVerify:
    """Its own time limits are off: they restart for each expression."""

    def __init__(self) -> None:
        # Heavy (sympy), and only worker processes may have it.
        from math_verify import LatexExtractionConfig, parse, verify  # pyright: ignore[reportMissingTypeStubs]

        for name in ("math_verify.parser", "math_verify.grader"):
            logging.getLogger(name).setLevel(logging.ERROR)  # they warn that there is no limit
        self._parse: Callable[..., list[Any]] = parse
        self._verify: Callable[..., bool] = verify
        rules: Any = LatexExtractionConfig().normalization_config
        # No expressions of plain text: of "> 42" it would take the 42.
        self._of_whole = [LatexExtractionConfig(normalization_config=replace(rules, units=False))]

    def is_equal(self, label: str, text: str, *, is_whole: bool) -> bool | None:
        """`is_whole`: the text is one answer; else it holds one. None: the label cannot be read."""
        wanted = self._parse(label, parsing_timeout=None) if _TEXT.search(label) else self._whole(label)
        if not wanted:
            return None
        given = self._whole(text) if is_whole else self._parse(text, parsing_timeout=None)
        return any(self._are_equal(one, other) for one in wanted for other in given)

    def _whole(self, latex: str) -> list[Any]:
        return self._parse(f"\\boxed{{{latex}}}", self._of_whole, parsing_timeout=None)

    def _are_equal(self, wanted: Any, given: Any) -> bool:
        sides = [] if _sides(wanted) else [side for side in _sides(given) if not side.free_symbols]
        limits = {"float_rounding": 12, "allow_set_relation_comp": True, "timeout_seconds": None}
        return all(self._verify([wanted], [one], **limits) for one in (given, *sides))


_library = lru_cache(maxsize=1)(_MathVerify)


def _sides(of: Any) -> list[Any]:
    """Of an equation, or a chain of them: 41 = 42 is not 42."""
    parts: Sequence[Any] = [of] if _is_equation(of) else getattr(of, "_unsorted_args", ())
    is_chain = all(map(_is_equation, parts)) and all(a.rhs == b.lhs for a, b in pairwise(parts))
    return [side for part in parts for side in part.args] if is_chain else []


def _is_equation(of: Any) -> bool:
    return getattr(of, "rel_op", "") == "=="  # sympy's


def _for_library(text: str) -> tuple[str, Unit]:
    plain = _unwrapped(text.translate(_SIGNS))
    unit = NONE
    for pattern in (_UNIT, _UNIT_WORD):
        if (found := pattern.search(plain)) is not None and found.start() > 0:
            said = parse_unit(found[1])
            if said is not None and (is_known(said) or pattern is _UNIT):
                plain, unit = plain[: found.start()], said
                break
    plain = _SCIENTIFIC.sub(r"\1\\times10^{\2}", _THOUSANDS.sub("", plain))
    return _DECIMAL.sub(_as_fraction, plain), unit


def _unwrapped(text: str) -> str:
    plain = text.strip().rstrip(",;").removesuffix(".").strip()
    for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        inner = plain[len(opening) : -len(closing)]
        if plain.startswith(opening) and plain.endswith(closing) and opening not in inner:
            plain = inner.strip()
    return plain


def _as_fraction(found: re.Match[str]) -> str:
    value, power = Fraction(found[1]), found[2] or ""
    fraction = f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
    return f"({fraction}){power}" if power else fraction
