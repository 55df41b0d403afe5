r"""Reading numbers as people and models write them: signs, thousands, currency, fractions, powers, units, LaTeX.

Exact (`fractions.Fraction`), so that a tolerance of 0 means equal. It is the whole of the `numeric` reward, and spares
the `math` reward a call of math-verify, which takes a hundred times as long.

A unit is a product of names with powers: `km/h`, `\text{ cm}^2`, "square metres", "euros per day". Only units that
contradict each other are compared. They are not converted: 500 cm is not 5 m.
"""

from __future__ import annotations

import re
import unicodedata
from collections import deque
from dataclasses import dataclass
from fractions import Fraction

MAX_DIGITS = 400
"""More digits, or an exponent beyond this, is no answer that was meant; it would only cost memory."""
MAX_CHARS = 4 * MAX_DIGITS
TAIL_CHARS = 20_000
"""In running text, so much of the end is looked at."""
MAX_UNIT_CHARS = 60
_NAMES = """
mm: millimeter millimetre | cm: centimeter centimetre | dm: decimeter | m: meter metre | km: kilometer kilometre | nm:
µm: micrometer micron | in: inch inches | ft: foot feet | yd: yard | mi: mile | mg: milligram | g: gram | kg: kilogram
t: ton tonne | lb: lbs | oz: ounce | ms: millisecond | s: sec second | min: minute mins | h: hr hour hrs | day:
week: wk | month: mo | year: yr | mL: ml milliliter | L: l liter litre | gal: gallon | N: newton | J: joule | kJ:
W: watt | kW: | kWh: | V: volt | A: amp ampere | Ω: ohm | Pa: pascal | kPa: | atm: | bar: | Hz: hertz | kHz: | MHz:
GHz: | K: kelvin | cal: | kcal: | mol: mole | eV: | MB: megabyte | GB: gigabyte | °: deg degree | rad: radian
°C: celsius | °F: fahrenheit
%: percent pct percentage | $: dollar USD | €: euro EUR | £: GBP | ¥: yen yuan RMB CNY JPY 元 円
₹: rupee INR Rs | ¢: cent | ₽: ruble RUB | ₩: KRW
"""
_UNITS = {
    alias: name
    for name, _, others in (entry.partition(":") for entry in re.split(r"\s*[|\n]\s*", _NAMES.strip()))
    for alias in (name, *others.split())
}
# Said of a number, or no word for a unit.
NO_UNIT = frozenset({
    "or", "and", "not", "to", "from", "but", "nor", "either", "neither", "between", "plus", "minus", "times", "over",
    "divided", "mod", "than", "more", "less", "sin", "cos", "tan", "log", "exp", "sqrt", "infinity", "oder", "und",
})  # fmt: skip
_WRAPPED = re.compile(r"\\(?:text\w*|math(?:rm|it|bf)|mbox|operatorname|rm)\s*\{([^{}]*)\}")
_DEGREES = re.compile(r"\^\s*\{?\s*(?:\\circ|°)\s*\}?|\\degree|\\circ|º")
_UNIT_TOKEN = re.compile(
    r"\^\s*[{(]*(?P<power>-?\d)[})]*|(?P<per>/|per\b)|[\s·.]+|\\cdot"
    r"|(?P<name>(?:°\s*[CF]\b|[^\W\d_]+|[°%$€£¥¢₹₽₩]))"
)
_BEFORE = {"square": 2, "sq": 2, "cubic": 3}
_GLUED = frozenset("mgshL")
"""The letters that are units even directly behind a number; others are variables there."""
Unit = frozenset[tuple[str, int]]
"""Names and their powers."""
NONE: Unit = frozenset()
PERCENT: Unit = frozenset({("%", 1)})


def is_known(unit: Unit) -> bool:
    return all(name in _UNITS for name, _ in unit)


def contradict(one: Unit, other: Unit) -> bool:
    return bool(one) and bool(other) and one != other and (is_known(one) or is_known(other))


def parse_unit(text: str, *, is_glued: bool = False) -> Unit | None:
    """The unit that the whole text is, or None. `is_glued`: it followed its number without a space: `3x` is a
    product."""
    is_glued = is_glued and "\\" not in text
    plain = _WRAPPED.sub(r" \1 ", _DEGREES.sub("°", text[: 3 * MAX_UNIT_CHARS])).replace("\\%", "%").replace("\\$", "$")
    plain = plain.strip(" {}.,~")
    tokens = list(_UNIT_TOKEN.finditer(plain))
    if len(plain) > MAX_UNIT_CHARS or "".join(one[0] for one in tokens) != plain:
        return None
    powers: dict[str, int] = {}
    sign, next_power, last = 1, 1, ""
    for token in tokens:
        word = token["name"]
        if token["per"]:
            sign = -1
        elif token["power"]:
            powers[last] = powers.get(last, 0) + sign * (int(token["power"]) - 1)
        elif word and word.lower() in _BEFORE:
            next_power = _BEFORE[word.lower()]
        elif word:
            found = _name_of(word.replace(" ", ""), is_glued=is_glued)
            if found is None:
                return None
            powers.pop("°" if found in ("°C", "°F") else "", None)  # "degrees Celsius"
            last = found
            powers[last] = powers.get(last, 0) + sign * next_power
            next_power = 1
    return frozenset((name, power) for name, power in powers.items() if power) or None


def _name_of(word: str, *, is_glued: bool) -> str | None:
    """The name as the table has it; an unknown word as it is; None for what is no unit."""
    for one in (word, word.lower(), word.lower().removesuffix("s")):
        if one in _UNITS and (len(word) > 1 or one == word):
            is_letter = len(word) == 1 and word.isascii() and word.isalpha()
            return None if is_glued and is_letter and word not in _GLUED else _UNITS[one]
    is_variable = (word.isascii() and (is_glued or len(word) < 3)) or re.fullmatch(r"[\u0370-\u03ff]+", word)
    return None if is_variable or word.lower() in NO_UNIT else word.lower()


_SIGNS = str.maketrans({
    **dict.fromkeys("\u2212\u2013\u2010\u2011\u2012", "-"), **dict.fromkeys("×✕⨯∗", "*"), **dict.fromkeys("·⋅∙", "*"),
    "∕": "/", "÷": "/", **dict.fromkeys("’′", "'"), "º": "°",
    **{sign: f" {a}/{b}" for sign, a, b in zip("½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞", "112131234151357", "233445555668888", strict=True)},
})  # fmt: skip
_ABOVE = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-", strict=True))
_SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]{1,20}")
_ARGUMENT = rf"\s?(?:\{{([^{{}}]{{1,{MAX_DIGITS}}})\}}|(\d))"
_SPELLINGS = tuple((re.compile(pattern), instead) for pattern, instead in (
    (r"[\u200b-\u200f\u202a-\u202e\u2060\ufeff]|\\!|\\(?:left|right)(?![a-z])|\\displaystyle|(?<=\d)_(?=\d)", ""),
    (r"(?<=\d)(?:\\[,;: ]|\{\s?,\s?\}|['\u00a0\u2007\u2009\u202f]|,,)(?=\d{3}(?!\d))", ","),
    (r"\\[,;: ]|\\q?quad|~|\s+", " "),
    (rf"\\[dtc]?frac{_ARGUMENT}{_ARGUMENT}", r" \1\2/\3\4"),
    (r" ?(?:\\times|\\cdot|(?<=[\d.}])[xX](?=\s?10\s?\^)|(?<!\*)\*(?!\*)) ?", "*"),
    (r"(?<=[\w)}]) ?(?:\^|\*\*) ?(?:[{(] ?([+-]?\d{1,6}) ?[})]|([+-]?\d{1,6}))", r"^\1\2"),
    (r" +", " "),
))  # fmt: skip
_WRAPPERS = (
    ("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("(", ")"), ("{", "}"), ("`", "`"),
    ('"', '"'), ("\\boxed{", "}"), ("\\text{", "}"), ("\\textbf{", "}"), ("\\mathbf{", "}"), ("\\mathrm{", "}"),
)  # fmt: skip
_CURRENCY = re.compile(
    r"([+-]?)(?:\\text ?\{ ?)?\\?([$€£¥₹₩₽]|(?:USD|EUR|GBP|INR|JPY|CNY|RMB|KRW|RUB|Rs)\b)\}? ?(?![+-])(.+)"
)
_SPACED = re.compile(r"(?<![\d.,/])\d{1,3}(?: \d{3})+(?![\d/]| /)")
_DECIMAL_COMMA = re.compile(r"(?<=\d),(?=(?:\d{1,2}|\d{4,})(?!\d))(?<![\d,.]\d{3},)(?!\d+,)")
# `x =`, `f(3) =`, `\text{Area} =`, `\angle ABC =`: a name in front, without digits first and without operators.
_NAME = re.compile(
    r"(?:(?:[A-Za-z|]|\\[A-Za-z]+)[A-Za-z_\\{}()|' \d,.]{0,60}? ?)?(?::?=|\\approx|\\equiv|≈|≡|\\simeq) ?(?!=)"
)
_UNSIGNED = (
    r"(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d*)?|\d{1,3}(?:\.\d{3})+,\d+|\d{1,3}(?:\.\d{3}){2,}(?!\d)|\d+(?:\.\d*)?|\.\d+)"
)
_DECIMAL = rf"{_UNSIGNED}(?:[eE][+-]?\d{{1,5}})?"
# A number, or two with an operator between them; `2 1/2` is a mixed one.
_VALUE = re.compile(
    r"(?P<sign>[+-]?) ?(?:(?P<whole>\d+)(?: and)? (?=\d+ ?/ ?\d+(?![\d.])))?"
    r"(?:(?P<head>\d*\.\d*)(?:\\overline ?\{(?P<again1>\d{1,40})\}|\((?P<again2>\d{1,40})\))"
    rf"|[({{](?P<inner>[+-]?{_UNSIGNED})[)}}]|(?P<plain>{_DECIMAL}))"
    rf"(?:(?P<operator>\*10\^|\^| ?/ ?)(?P<right>[+-]?{_DECIMAL}))?"
)
# In running text: not glued to a word, and a sign only where it cannot be a minus between two terms.
_IN_TEXT = re.compile(
    r"(?<![\w.])(?:(?<![)\]}])[+-])?(?:\\?[$€£] ?)?"
    rf"(?:\d{{1,9}} \d{{1,9}}/\d{{1,9}}(?!\.?\d)"
    rf"|{_DECIMAL}(?:(?:\*10)?\^[+-]?\d{{1,4}}| ?/ ?\d+(?!\.?\d))?)"
)
_MULTIPLES = {
    "hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12,
    "万": 10**4, "亿": 10**8, "億": 10**8, "만": 10**4, "억": 10**8,
}  # fmt: skip
_MULTIPLE = re.compile(rf" ?(?:\\text ?\{{ ?)?({'|'.join(_MULTIPLES)})(?![a-z]) ?\}}?", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.;!?。；！？](?=\s|$)|\n")


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number and the unit that it was given with."""

    value: Fraction
    unit: Unit = NONE

    def equals(self, wanted: Quantity, *, relative: Fraction = Fraction(0), absolute: Fraction = Fraction(0)) -> bool:
        """Whether this is the wanted one: within `absolute` or `relative * |wanted|`, and of no other unit. 50 % is 50,
        and also 0.5."""
        if contradict(self.unit, wanted.unit):
            return False
        scales = (1, 100) if (self.unit == PERCENT) != (wanted.unit == PERCENT) else (1,)
        mine = [self.value / scale for scale in (scales if self.unit == PERCENT else (1,))]
        theirs = [wanted.value / scale for scale in (scales if wanted.unit == PERCENT else (1,))]
        return any(abs(a - b) <= max(absolute, relative * abs(b)) for a in mine for b in theirs)


def parse_quantity(text: str, *, may_have_name: bool = True) -> Quantity | None:
    """The one number that the whole text is, with a unit behind it and `x =` in front if they are there; or None."""
    if len(text) > MAX_CHARS:
        return None
    plain = _unwrapped(normalised(text))
    if may_have_name:  # it is one answer, so these are no two numbers
        plain = _DECIMAL_COMMA.sub(".", _SPACED.sub(lambda of: of[0].replace(" ", ""), plain))
    while may_have_name and (name := _NAME.match(plain)) is not None:
        plain = _unwrapped(plain[name.end() :])
    money = _CURRENCY.fullmatch(plain)
    if money is None:
        return _with_unit(plain, NONE)
    unit = parse_unit(money[2])
    return _with_unit(money[1] + money[3], unit) if unit is not None else None


def last_quantity(text: str) -> Quantity | None:
    """The last number in running text with its unit, if that is a known one; or None."""
    plain = normalised(text[-TAIL_CHARS:], keeps_lines=True)
    found = deque(_IN_TEXT.finditer(plain), maxlen=1)
    number = parse_quantity(found[0][0]) if found else None
    if number is None or number.unit:
        return number
    rest = plain[found[0].end() :][:MAX_UNIT_CHARS]
    first = _SENTENCE_END.split(rest, maxsplit=1)[0].strip(" $*")
    unit = parse_unit(first, is_glued=not rest[:1].isspace()) if first else None
    return Quantity(number.value, unit) if unit is not None and is_known(unit) else number


def normalised(text: str, *, keeps_lines: bool = False) -> str:
    """The text with one spelling for each sign, fraction and power."""
    plain = _SUPERSCRIPT.sub(lambda of: "^{" + "".join(_ABOVE[c] for c in of[0]) + "}", text).translate(_SIGNS)
    lines = plain.split("\n") if keeps_lines else [plain]
    for at, line in enumerate(lines):
        for pattern, instead in _SPELLINGS:
            line = pattern.sub(instead, line)
        lines[at] = unicodedata.normalize("NFKC", line).replace("⁄", "/").strip()
    return "\n".join(lines)


def _with_unit(plain: str, unit: Unit) -> Quantity | None:
    """The number at the beginning; the rest has to be its unit."""
    match = _VALUE.match(plain)
    if match is None or (value := _value(match)) is None:
        return None
    end = match.end()
    if (many := _MULTIPLE.match(plain, end)) is not None:
        value, end = value * _MULTIPLES[many[1].lower()], many.end()
    rest = plain[end:].strip()
    if not rest:
        return Quantity(value, unit)
    more = parse_unit(rest, is_glued=plain[end : end + 1] == rest[:1])
    return Quantity(value, more or unit) if more is not None and (not unit or more == unit) else None


def _unwrapped(text: str) -> str:
    before = None
    while before != text:
        before = text
        for opening, closing in _WRAPPERS:
            inner = text[len(opening) : -len(closing)]
            if inner and text.startswith(opening) and text.endswith(closing) and _is_whole(inner):
                text = inner.strip()
        text = text.rstrip(",;:。，").strip()
        text = text.removesuffix(".") if not text.endswith("..") else text
    return text


def _is_whole(inner: str) -> bool:
    """Whether the brackets around it belong together: `(1)+(2)` is not in brackets."""
    depth = 0
    for sign in inner:
        depth += (sign in "({") - (sign in ")}")
        if depth < 0:
            return False
    return depth == 0


def _value(match: re.Match[str]) -> Fraction | None:
    again = match["again1"] or match["again2"]
    value = _recurring(match["head"], again) if again else _decimal(match["inner"] or match["plain"])
    operator, right = (match["operator"] or "").strip(), _decimal(match["right"] or "1")
    if value is None or right is None:
        return None
    if operator == "/":
        value = value / right if right else None
    elif operator:
        value = _power(Fraction(10) if operator != "^" else value, right, value if operator != "^" else Fraction(1))
    if match["whole"] is not None:
        value = int(match["whole"]) + value if value is not None and 0 < value < 1 else None
    return -value if value is not None and match["sign"] == "-" else value


def _power(base: Fraction, exponent: Fraction, factor: Fraction) -> Fraction | None:
    num_digits = max(len(str(base.numerator)), len(str(base.denominator)))
    if exponent.denominator > 1 or abs(exponent) * num_digits > 4 * MAX_DIGITS or (base == 0 and exponent < 0):
        return None
    return factor * base ** int(exponent)


def _recurring(head: str, again: str) -> Fraction:
    whole, _, places = head.partition(".")
    begin = Fraction(int(whole or "0")) + Fraction(int(places or "0"), 10 ** len(places))
    return begin + Fraction(int(again), (10 ** len(again) - 1) * 10 ** len(places))


def _decimal(text: str) -> Fraction | None:
    mantissa, _, exponent = text.lower().partition("e")
    if len(text) > MAX_DIGITS or abs(int(exponent or 0)) > MAX_DIGITS or not text.isascii():
        return None
    if "," in mantissa and "." in mantissa and mantissa.rindex(",") > mantissa.rindex("."):
        mantissa = mantissa.replace(".", "").replace(",", ".")  # 1.234,56
    elif mantissa.count(".") > 1:
        mantissa = mantissa.replace(".", "")  # 1.234.567
    return Fraction(mantissa.replace(",", "").rstrip(".")) * Fraction(10) ** int(exponent or 0)
