"""The reward `math`: whether answer and label are mathematically equal. math-verify judges.

Before it, two plain numbers are compared exactly, with their units. It gets decimals as fractions, for it would round
them, and no units, for it would drop them. math-verify and sympy are imported here, in reward worker processes only.

It runs in a forked copy of this process, which is killed at its time limit (`last_byte`): a signal does not interrupt
one long operation in C, such as 9**9**9. The memory of the copy is bounded too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import resource
import select
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from ...core.completions import Completion
from .extraction import TAG, JudgedText, accepted_labels, read_answer
from .numbers import NONE, Unit, are_same, last_quantity, parse_quantity, parse_unit

MAX_MEMORY_BYTES = 2 << 30
"""That the copy may take more than there was."""
Say = Callable[[bytes], object]
ENDED = b"-"
"""The copy ended without a word: it raised, or had no memory left."""


def last_byte(compute: Callable[[Say], None], deadline_s: float) -> bytes:
    """What the computation said last, one byte at a time, before it ended or its time was over; `ENDED` if it ended
    without a word, nothing if it had said nothing by then. `deadline_s`: of the monotonic clock."""
    mine, its = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # of threads: the copy uses none, and locks none that they hold
        pid = os.fork()
    if pid == 0:
        _in_the_copy(compute, its)
    os.close(its)
    said = b""
    try:
        while (left_s := deadline_s - time.monotonic()) > 0:
            if select.select([mine], [], [], left_s)[0]:
                more = os.read(mine, 1)
                if not more:
                    return said or ENDED
                said = more
        return said
    finally:
        os.close(mine)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _in_the_copy(compute: Callable[[Say], None], its: int) -> NoReturn:
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        used = int(Path("/proc/self/statm").read_bytes().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MAX_MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        compute(lambda byte: os.write(its, byte))
    finally:
        os._exit(0)


TAIL_CHARS = 4000
"""Of unmarked text, so much of the end is looked at."""
MAX_ANSWER_CHARS = 2000
"""What is marked as the answer and is longer is none."""
READ, RIGHT, WRONG = b"?", b"1", b"0"
_DECIMAL = re.compile(r"(?<![\d.,A-Za-z])(\d*\.\d+)(?![\d.])(\s*\^)?")
_SCIENTIFIC = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?![\w.])")
_RECURRING = re.compile(r"(?<![\d.,])(\d*)\.(\d*)\\overline\s*\{(\d{1,40})\}")
_THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|\\,|\\!|\u00a0|\u2009|\u202f)(?=\d{3}(?!\d))")
_SIGNS = str.maketrans(
    {"\u2212": "-", "\u2013": "-", "\u2010": "-", "\u2011": "-", "\u00a0": " ", "\u2009": " ", "\u202f": " "}
)
_TEXT = re.compile(r"(?<!\\)\$|\\boxed")
"""In a label: the answer is somewhere in it."""
_UNIT = re.compile(
    r"(?:\\[,;:! ]|~|\s)*"
    r"((?:\\(?:text|mathrm|textrm|mbox|rm|operatorname)\s*\{[^{}]{1,40}\}(?:\s*\^\s*\{?-?\d\}?)?[\s/]*){1,3}"
    r"|\^\s*\{?\\circ\}?(?:\s*\\?(?:text|mathrm)?\s*\{?\s*[CF]\s*\}?)?)[\s.]*$"
)
_UNIT_WORD = re.compile(r"(?<=[\d})])\s{1,4}([A-Za-z]{2,20}(?:/[A-Za-z]{1,20})?(?:\^\{?\d\}?)?)\.?$")
_WARM_UP = (
    (r"\frac{1}{2}", r"\sqrt{2}"), ("x^2+2x+1", "(x+1)^2"), (r"\{1,2\}", r"2,1"), ("(1,2]", "(1,3]"),
    (r"(3,\infty)", "x>3"), ("x=3", "y=4"), (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\3\end{pmatrix}"),
    (r"2\pi\sin(x)", r"\pi"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Pair:
    """What is left for math-verify to compare."""

    label: str
    answer: str
    is_whole: bool
    """The text is one answer; else it holds one."""


def math_equal(completion: Completion, *, seconds: int = 5) -> float:
    """Whether answer and label are mathematically equal, by math-verify. An answer on which all of that takes longer
    than `seconds` is wrong. Raises ValueError for a label that it cannot read."""
    labels = accepted_labels(completion.label.strip())
    answer = read_answer(completion.text)
    assert answer is not None
    judged = [_at_once(label.strip(), answer) for label in labels]
    if True in judged:
        return 1.0
    pairs = [one for one in judged if isinstance(one, _Pair)]
    if not pairs:
        return 0.0
    compare = prepare()
    said = last_byte(lambda say: _compare_all(compare, pairs, say), time.monotonic() + seconds)
    if said in (RIGHT, WRONG, READ):
        return float(said == RIGHT)
    why = f"within {seconds} s" if not said else ""
    raise ValueError(f"math-verify cannot read the label {completion.label[:80]!r} {why}".rstrip())


@lru_cache(maxsize=1)
def prepare() -> Compare:
    """Import what compares, and have it do so once: it is slow at first. Where this was called before, a call of
    `math_equal` has all its time for the answer."""
    compare = Compare()
    for label, answer in _WARM_UP:
        compare(label, answer, is_whole=True)
    return compare


class Compare:
    """math-verify. Its own time limits are off: they restart for each expression."""

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

    def __call__(self, label: str, text: str, *, is_whole: bool, say: Say | None = None) -> bool:
        """Whether they are equal. `say` is called when the label was read. Raises ValueError if it cannot be."""
        wanted = self._parse(label, parsing_timeout=None) if _TEXT.search(label) else self._whole(label)
        if not wanted:
            raise ValueError(label)
        if say is not None:
            say(READ)
        given = self._whole(text) if is_whole else self._parse(text, parsing_timeout=None)
        return any(self._equal(one, other) for one in wanted for other in given)

    def _whole(self, latex: str) -> list[Any]:
        return self._parse(f"\\boxed{{{latex}}}", self._of_whole, parsing_timeout=None)

    def _equal(self, wanted: Any, given: Any) -> bool:
        limits = {"float_rounding": 12, "allow_set_relation_comp": True, "timeout_seconds": None}
        if not self._verify([wanted], [given], **limits):
            return False
        numbers = (
            []
            if isinstance(given, str) or _sides(wanted)
            else [side for side in _sides(given) if not side.free_symbols]
        )
        return all(self._verify([wanted], [side], **limits) for side in numbers)


def _sides(of: Any) -> list[Any]:
    """Of an equation, or a chain of them: 41 = 42 is not 42."""
    parts: Sequence[Any] = [of] if _is_equation(of) else getattr(of, "_unsorted_args", ())
    is_chain = all(map(_is_equation, parts)) and all(a.rhs == b.lhs for a, b in pairwise(parts))
    return [side for part in parts for side in part.args] if is_chain else []


def _is_equation(of: Any) -> bool:
    return getattr(of, "rel_op", "") == "=="  # sympy's


def _compare_all(compare: Compare, pairs: Sequence[_Pair], say: Say) -> None:
    num_read = 0
    for pair in pairs:
        try:
            is_right = compare(pair.label, pair.answer, is_whole=pair.is_whole, say=say)
        except ValueError:
            continue
        num_read += 1
        if is_right:
            say(RIGHT)
            return
    if num_read:
        say(WRONG)


def _at_once(label: str, answer: JudgedText) -> bool | _Pair:
    """The judgement, where it takes no algebra; else what is to be compared."""
    if label and answer.text == label:
        return True
    wanted = parse_quantity(label, may_have_name=False)
    if wanted is not None and (given := parse_quantity(answer.text)) is not None:
        return given.equals(wanted)
    if not answer.is_marked:
        said = last_quantity(answer.text[-TAIL_CHARS:])
        if wanted is not None and said is not None and not are_same(said.unit, wanted.unit):
            return False
        tail = answer.text[-TAIL_CHARS:].translate(_SIGNS)
        tail = TAG.sub(" ", tail.replace("\\boxed{", ""))  # what does not close
        return _Pair(_for_library(label)[0], tail, is_whole=False)
    if len(answer.text) > MAX_ANSWER_CHARS:
        return False
    (expected, unit), (text, other) = _for_library(label), _for_library(answer.text)
    return _Pair(expected, text, is_whole=True) if are_same(unit, other) else False


def _for_library(text: str) -> tuple[str, Unit]:
    plain = _unwrapped(text.translate(_SIGNS))
    unit = NONE
    for pattern in (_UNIT, _UNIT_WORD):
        if (found := pattern.search(plain)) is not None and found.start() > 0:
            said = parse_unit(found[1])
            if said is not None and (said.is_known or pattern is _UNIT):
                plain, unit = plain[: found.start()], said
                break
    plain = _THOUSANDS.sub("", plain)
    plain = _RECURRING.sub(_as_fraction, _SCIENTIFIC.sub(r"\1\\times10^{\2}", plain))
    return _DECIMAL.sub(_as_fraction, plain), unit


def _unwrapped(text: str) -> str:
    plain = text.strip().rstrip(",;").removesuffix(".").strip()
    for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        inner = plain[len(opening) : -len(closing)]
        if plain.startswith(opening) and plain.endswith(closing) and opening not in inner:
            plain = inner.strip()
    return plain


def _as_fraction(found: re.Match[str]) -> str:
    if found.re is _RECURRING:
        whole, places, again = found.groups()
        value = Fraction(int(whole + places or "0"), 10 ** len(places))
        value += Fraction(int(again), (10 ** len(again) - 1) * 10 ** len(places))
        power = ""
    else:
        value, power = Fraction(found[1]), found[2] or ""
    fraction = f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
    return f"({fraction}){power}" if power else fraction
