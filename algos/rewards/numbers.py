"""Reading numbers as people and models write them: signs, thousands, currency, fractions, exponents, LaTeX.

Exact (`fractions.Fraction`), so that a tolerance of 0 means equal. math-verify does far more and takes a hundred
times as long; this is the fast path and the whole of the `numeric` reward.
"""

from __future__ import annotations

import re
from collections import deque
from fractions import Fraction

MAX_DIGITS = 400
"""More digits, or an exponent beyond this, is not a number anybody meant; it would only cost memory."""
MAX_CHARS = 4 * MAX_DIGITS

UNSIGNED = r"(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d*)?|\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?"
NUMBER = re.compile(rf"[+-]?{UNSIGNED}")
LATEX_FRACTION = re.compile(r"([+-]?)\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}")
# In running text: not glued to a word, and a sign only where it cannot be a minus between two terms.
IN_TEXT = re.compile(
    rf"[+-]?\\[dt]?frac\{{[^{{}}]*\}}\{{[^{{}}]*\}}"
    rf"|(?<![\w.])(?:(?<![)\]}}])[+-])?(?:[$€£]\s?)?{UNSIGNED}(?:\s?/\s?\d+(?!\.?\d))?"
)
WRAPPERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("(", ")"))
SPACES = re.compile(r"\\[,;:! ]|[\u00a0\u2009\u202f]|(?<=\d)_(?=\d)")
MINUS = str.maketrans({"\u2212": "-", "\u2013": "-", "\uff0b": "+"})


def parse_number(text: str) -> Fraction | None:
    """The number that the whole text writes, or None. A trailing `%`, unit-less currency signs and a final full stop
    are left out: "50%" is 50."""
    if len(text) > MAX_CHARS:
        return None
    plain = _unwrap(SPACES.sub("", text.translate(MINUS)).strip())
    latex = LATEX_FRACTION.fullmatch(plain)
    if latex is not None:
        value = _quotient(latex[2], latex[3])
        return -value if value is not None and latex[1] == "-" else value
    head, slash, tail = plain.partition("/")
    return _quotient(head, tail) if slash else _decimal(plain)


def last_number(text: str) -> Fraction | None:
    """The last number in running text, or None."""
    found = deque(IN_TEXT.finditer(text.translate(MINUS)), maxlen=1)
    return parse_number(found[0][0]) if found else None


def close(answer: Fraction, expected: Fraction, *, relative: Fraction, absolute: Fraction) -> bool:
    """Whether the two differ by at most `absolute` or `relative * |expected|`, whichever is larger."""
    return abs(answer - expected) <= max(absolute, relative * abs(expected))


def _unwrap(text: str) -> str:
    before = None
    while before != text:
        before = text
        for opening, closing in WRAPPERS:
            if len(text) > len(opening) + len(closing) and text.startswith(opening) and text.endswith(closing):
                text = text[len(opening) : -len(closing)].strip()
        text = text.removesuffix("%").removesuffix("\\").rstrip()
        sign = text[:1] if text[:1] in "+-" else ""
        text = sign + text[len(sign) :].lstrip("$€£ ")
    return text


def _quotient(head: str, tail: str) -> Fraction | None:
    above, below = _decimal(head.strip()), _decimal(tail.strip())
    if above is None or below is None or below == 0:
        return None
    return above / below


def _decimal(text: str) -> Fraction | None:
    if len(text) > MAX_DIGITS or NUMBER.fullmatch(text) is None or not text.isascii():
        return None
    mantissa, _, exponent = text.lower().partition("e")
    if exponent and (len(exponent) > 5 or abs(int(exponent)) > MAX_DIGITS):
        return None
    return Fraction(mantissa.replace(",", "").rstrip(".")) * Fraction(10) ** int(exponent or 0)
