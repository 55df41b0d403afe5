"""The reward `math`: whether answer and label are mathematically equal. math-verify judges.

Two plain numbers are compared exactly before, with their units. It gets decimals as fractions, for it would round them,
and no units. `prepare` bounds the memory of its process; one long operation in C, such as 9**9**9, ends only with that.
"""

from __future__ import annotations

import importlib
import logging
import re
import resource
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from ...core.completions import Completion
from .extraction import TAG, JudgedText, accepted_labels, answer_of_label, read_answer
from .numbers import NONE, SIGNS, Unit, are_same, last_quantity, parse_quantity, parse_unit, recurring, with_powers

SECONDS = 5
MAX_MEMORY_BYTES = 2 << 30
"""That a worker may take beyond what it has when it begins."""
TAIL_CHARS = 4000
"""Of unmarked text, so much of the end is looked at."""
MAX_ANSWER_CHARS = 2000
"""What is marked as the answer and is longer is none."""
MAX_SYMBOL_CHARS = 3
"""More letters are a word, whatever their case."""
PRECISION = 1e-9
"""Relative, of what two numbers may differ by that are equal."""
_DECIMAL = re.compile(r"(?<![\d.,A-Za-z])(\d*\.\d+)(?![\d.])(\s*\^)?")
_SCIENTIFIC = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?![\w.])")
_RECURRING = re.compile(r"(?<![\d.,])(\d*\.\d*)\\overline\s*\{(\d{1,40})\}")
_THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|\\,|\\!|\u00a0|\u2009|\u202f)(?=\d{3}(?!\d))")
_SIGNS = str.maketrans({
    **SIGNS, **dict.fromkeys("\u00a0\u2009\u202f", " "),
    "∞": "\\infty ", "∪": "\\cup ", "∩": "\\cap ", "∈": "\\in ", "∅": "\\emptyset ",
})  # fmt: skip
_ROOT = re.compile(r"([√∛]|\\sqrt(?=\s*\())\s*(?:\{([^{}]*)\}|\(([^()]*)\)|(\d+(?:\.\d+)?|[A-Za-z]))")
_PLAIN = {
    "oo": r"\infty", "log": r"\ln", "asin": r"\arcsin", "acos": r"\arccos", "atan": r"\arctan",
    **{word: f"\\{word}" for word in (
        "pi", "exp", "ln", "sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "arcsin", "arccos",
        "arctan", "alpha", "beta", "gamma", "theta", "lambda", "phi", "omega",
    )},
}  # fmt: skip
"""Words of programs and of their output, where log is the natural one."""
_PLAIN_WORD = re.compile(rf"(?<![A-Za-z\\])(?<!text\{{)(?<!rm\{{)(?:{'|'.join(_PLAIN)})(?![A-Za-z_])|\*\*(?=\S)")
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
_DEGREES = re.compile(r"(\d+(?:\.\d+)?)\s*(?:\^\s*\{?\s*\\circ\s*\}?|°|\\degree)")
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\s*\{(?:cases|aligned|align\*?|gathered|split)\}|&")
_CONDITION = re.compile(
    r"(?:[\s,;]|\\[ ,;:]|\\q?quad)*"
    r"(\\pmod.*|\((?:\\bmod|mod|\\text\s*\{\s*mod\s*\})\s[^()]*\)|\\text\s*\{\s*(?:for|where)\b[^{}]*\}.*"
    r"|\bfor (?:all|any|every)\b.*"
    r"|(?<![\w\\])\(?\s*[a-z]\s*\\in\s*\\mathbb\s*\{?[A-Z]\}?\s*\)?"
    r"|(?<=\d)_\s*\{?\s*\d{1,2}\s*\}?)$",
    re.DOTALL,
)
"""Behind an answer: for which numbers it is one, or the base of its digits."""
_SIGN = re.compile(r"\\[bp](?=mod)|[^A-Za-z0-9]")
_OPTION = re.compile(
    r"(?:\\(?:text|mathrm|mathbf|textbf|textrm)\s*\{)?\s*\(\s*([A-E])\s*\)(?:\s|\}|\\[ ,;:]|\\q?quad|~|:|$)+(.*)",
    re.DOTALL,
)
"""An answer of AMC: `\\textbf{(C)}\\ 4`."""
_WORDS = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mbox)\s*\{([^{}]*)\}|\{([:,])\}|\\[,;:! ]|[\s~$]+")
"""What is left out, but for what is in braces, where two answers are compared as words."""
_NOON = re.compile(r"(?<=\d)([ap])\.?m$", re.IGNORECASE)
_DATE = re.compile(r"\d{4}([-/])\d\d?\1\d\d?|\d\d?([-/])\d\d?\2\d{4}")
_TEXT = re.compile(r"(?<!\\)\$|\\boxed")
"""In a label: the answer is somewhere in it."""
_UNIT = re.compile(
    r"(?:\\[,;:! ]|~|\s)*"
    r"((?:\\(?:text|mathrm|textrm|mbox|rm|operatorname)\s*\{[^{}]{1,40}\}(?:\s*\^\s*\{?-?\d\}?)?[\s/]*){1,3}"
    r"|\^\s*\{?\\circ\}?(?:\s*\\?(?:text|mathrm)?\s*\{?\s*[CF]\s*\}?)?)[\s.]*$"
)
_UNIT_WORD = re.compile(r"(?<=[\d})])\s{1,4}([A-Za-z]{2,20}(?:/[A-Za-z]{1,20})?(?:\^\{?\d\}?)?)\.?$")


@dataclass(frozen=True, slots=True)
class _Pair:
    """What is left for math-verify to compare."""

    label: str
    answer: str
    is_whole: bool
    """The text is one answer; else it holds one."""


def math_equal(completion: Completion, *, seconds: int = SECONDS) -> float:
    """Whether answer and label are mathematically equal: plain numbers exactly, with their units, and all else by
    math-verify. An expression that takes longer than `seconds` is wrong. Raises ValueError for a label that it cannot
    read."""
    answer, num_read = read_answer(completion.text), 0
    for label in map(answer_of_label, accepted_labels(completion.label.strip())):
        judged = _judge_without_library(label, answer)
        if isinstance(judged, _Pair):
            expected = _parse(judged.label, seconds, is_whole=not _TEXT.search(judged.label))
            answers = _parse(judged.answer, seconds, is_whole=judged.is_whole) if expected else []
            num_read += bool(expected)
            judged = any(
                _is_equal(label_form, answer_form, seconds) for label_form in expected for answer_form in answers
            )
        else:
            num_read += 1
        if judged:
            return 1.0
    if not num_read:
        raise ValueError(f"math-verify cannot read the label {completion.label[:80]!r}")
    return 0.0


def prepare() -> None:
    """Of a worker process: import what compares, have it do so once, for it is slow at first, and bound the memory."""
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for label, answer in ((r"\frac{1}{2}", r"\sqrt{2}"), ("x^2+2x+1", "(x+1)^2"), (r"(3,\infty)", "x>3")):
        (label_form,), (answer_form,) = (_parse(latex, SECONDS, is_whole=True)[:1] for latex in (label, answer))
        _is_equal(label_form, answer_form, SECONDS)
    used = int(Path("/proc/self/statm").read_bytes().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MAX_MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _parse(text: str, seconds: int, *, is_whole: bool) -> list[Any]:
    # Heavy (sympy), and only worker processes may have it.
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse  # pyright: ignore[reportMissingTypeStubs]

    latex = LatexExtractionConfig()
    if not is_whole:
        return cast("list[Any]", parse(text, [latex, ExprExtractionConfig()], parsing_timeout=seconds))
    # No expressions of plain text: of "> 42" it would take the 42.
    rules: Any = latex.normalization_config
    kinds = [LatexExtractionConfig(normalization_config=replace(rules, units=False))]
    return cast("list[Any]", parse(f"\\boxed{{{text}}}", kinds, parsing_timeout=seconds))


def _is_equal(label: Any, answer: Any, seconds: int) -> bool:
    from math_verify import verify  # pyright: ignore[reportMissingTypeStubs]

    label, answer = _in_common_symbols(label), _in_common_symbols(answer)
    if getattr(label, "is_number", False) and getattr(answer, "is_number", False):  # it rounds them, tiny ones to 0
        try:
            difference, size = abs(label - answer).evalf(), abs(label).evalf()
        except Exception:  # noqa: BLE001 -- of 1/0 and the like
            return False
        if difference.is_comparable and size.is_comparable and difference > PRECISION * size:
            return False
    sides = [] if _sides(label) else [side for side in _sides(answer) if not side.free_symbols]
    return all(
        verify(label, side, float_rounding=12, allow_set_relation_comp=True, timeout_seconds=seconds)
        for side in (answer, *sides)
    )


def _in_common_symbols(expression: Any) -> Any:
    """It takes one letter for several, by what it assumes of them; conditions on one number are the set where all hold,
    or where any does."""
    sympy: Any = importlib.import_module("sympy")
    parts = expression.args if getattr(expression, "is_FiniteSet", False) else ()
    try:
        if parts and all(hasattr(part, "as_set") and not _is_equation(part) for part in parts):
            sets = [part.as_set() for part in parts]
            together = sympy.Intersection(*sets)
            return sympy.Union(*sets) if together.is_empty else together
        letters: Any = () if parts else getattr(expression, "free_symbols", ())
        instead = {sign: sympy.I if sign.name == "i" else sympy.Symbol(sign.name, real=True) for sign in letters}
        return expression.xreplace(instead) if any(a != b for a, b in instead.items()) else expression
    except Exception:  # noqa: BLE001 -- sympy has many, for what an answer may hold
        return expression


def _sides(expression: Any) -> list[Any]:
    parts: Sequence[Any] = [expression] if _is_equation(expression) else getattr(expression, "_unsorted_args", ())
    is_chain = all(map(_is_equation, parts)) and all(a.rhs == b.lhs for a, b in pairwise(parts))
    return [side for part in parts for side in part.args] if is_chain else []


def _is_equation(expression: Any) -> bool:
    return getattr(expression, "rel_op", "") == "=="  # sympy's


def _judge_without_library(label: str, answer: JudgedText) -> bool | _Pair:
    """The judgement, where it takes no algebra; else what is to be compared."""
    label, condition = _split(_CONDITION, label)
    text, answer_condition = _split(_CONDITION, answer.text) if answer.is_marked else (answer.text, "")
    if condition and answer_condition and _SIGN.sub("", condition) != _SIGN.sub("", answer_condition):
        return False
    (wanted, label), (letter, text) = _option(label), _option(text) if answer.is_marked else ("", text)
    if wanted and letter and (wanted != letter or not (label and text)):
        return wanted == letter
    label, answer = label or wanted, replace(answer, text=text or letter)
    if label and _as_words(answer.text) == _as_words(label):
        return True
    if any(map(_DATE.fullmatch, (label, answer.text))):  # else a difference, or a quotient
        return False
    expected_number = parse_quantity(label, may_have_name=False)
    if expected_number is not None and (number := parse_quantity(answer.text)) is not None:
        return number.equals(expected_number)
    if not answer.is_marked:
        last_number = last_quantity(answer.text[-TAIL_CHARS:])
        if expected_number and last_number and not are_same(last_number.unit, expected_number.unit):
            return False
        tail = _in_latex(answer.text[-TAIL_CHARS:])
        tail = TAG.sub(" ", tail.replace("\\boxed{", ""))  # what does not close
        return _Pair(_for_library(label)[0], tail, is_whole=False)
    if len(answer.text) > MAX_ANSWER_CHARS:
        return False
    (expected, unit), (text, answer_unit) = _for_library(label), _for_library(answer.text)
    return _Pair(expected, text, is_whole=True) if are_same(unit, answer_unit) else False


def _split(pattern: re.Pattern[str], text: str) -> tuple[str, str]:
    """What stands before the pattern, which is not all of it, and what it found."""
    match = pattern.search(text) if len(text) <= MAX_ANSWER_CHARS else None
    return (text[: match.start()], match[1]) if match is not None and match.start() else (text, "")


def _option(text: str) -> tuple[str, str]:
    """Its letter, if it has one, and the rest."""
    match = _OPTION.fullmatch(text.strip())
    letter = text.strip() if text.strip() in tuple("ABCDE") else ""
    return (match[1], match[2].strip()) if match is not None else (letter, "" if letter else text)


def _as_words(text: str) -> str:
    words = _WORDS.sub(r"\1\2", _WORDS.sub(r"\1\2", text)).removesuffix(".")
    words = _NOON.sub(lambda half: half[1].lower() + "m", words)
    return words.casefold() if len(words) > MAX_SYMBOL_CHARS and words.isalpha() else words


def _in_latex(text: str) -> str:
    """With LaTeX's words for signs that math-verify does not know."""
    plain = with_powers(text.replace("\\varnothing", "\\emptyset")).translate(_SIGNS)
    plain = re.sub(r"\\mathbb\s*([A-Z])", r"\\mathbb{\1}", plain)
    return _ROOT.sub(lambda root: f"\\sqrt{'[3]' * (root[1] == '∛')}{{{root[2] or root[3] or root[4]}}}", plain)


def _for_library(text: str) -> tuple[str, Unit]:
    plain, unit = _unwrap(_in_latex(text)), NONE
    if _ENVIRONMENT.match(plain):
        plain = _ENVIRONMENT.sub("", plain).strip().removesuffix("\\\\").replace("\\\\", ",")
    plain = _PLAIN_WORD.sub(lambda word: _PLAIN.get(word[0], "^") + " " * word[0].isalpha(), plain)
    plain = plain.replace("\\langle", "(").replace("\\rangle", ")")
    if _TRIGONOMETRIC.search(plain):
        plain = _DEGREES.sub(r"(\\frac{\1\\pi}{180})", plain)
    for pattern in (_UNIT, _UNIT_WORD):
        if (match := pattern.search(plain)) is not None and match.start() > 0:
            parsed = parse_unit(match[1])
            if parsed is not None and (parsed.is_known or pattern is _UNIT):
                plain, unit = plain[: match.start()], parsed
                break
    plain = _THOUSANDS.sub("", plain)
    plain = _RECURRING.sub(_as_fraction, _SCIENTIFIC.sub(r"\1\\times10^{\2}", plain))
    return _DECIMAL.sub(_as_fraction, plain), unit


def _unwrap(text: str) -> str:
    plain = text.strip().rstrip(",;").removesuffix(".").strip()
    for opening, closing in (("**", "**"), ("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        inner = plain[len(opening) : -len(closing)]
        if plain.startswith(opening) and plain.endswith(closing) and opening not in inner:
            plain = inner.strip()
    return plain


def _as_fraction(match: re.Match[str]) -> str:
    is_again = match.re is _RECURRING
    value, power = (recurring(match[1], match[2]), "") if is_again else (Fraction(match[1]), match[2] or "")
    fraction = f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
    return f"({fraction}){power}" if power else fraction
