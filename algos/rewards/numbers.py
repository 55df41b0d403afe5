r"""Reading numbers as people and models write them: signs, thousands, currency, fractions, powers, units, LaTeX.

Exact (`fractions.Fraction`), so that a tolerance of 0 means equal. math-verify does far more and takes a hundred
times as long; this is the fast path and the whole of the `numeric` reward.

A unit is a product of names with powers: `km/h`, `\text{ cm}^2`, "square metres", "euros per day". Names that are in
the table are compared by what they mean, other words as words. Units are not converted: 500 cm is not 5 m.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from fractions import Fraction
from itertools import product

MAX_UNIT_CHARS = 60
_NAMES = """
mm: millimeter millimetre | cm: centimeter centimetre | dm: decimeter decimetre | m: meter metre
km: kilometer kilometre | nm: nanometer nanometre
µm: um micrometer micron | in: inch inches | ft: foot feet | yd: yard | mi: mile
mg: milligram | g: gram gramme gm | kg: kilogram kilo | t: ton tonne | lb: lbs pound_mass | oz: ounce
ms: millisecond | µs: us microsecond | ns: nanosecond | s: sec second | min: minute mins | h: hr hour hrs | day:
week: wk | month: mo | year: yr | mL: ml milliliter millilitre | cL: cl | L: l liter litre | gal: gallon | cc:
N: newton | J: joule | kJ: kilojoule | W: watt | kW: kilowatt | MW: megawatt | kWh: | V: volt | A: amp ampere | Ω: ohm
Pa: pascal | kPa: | atm: atmosphere | bar: | Hz: hertz | kHz: | MHz: | GHz: | K: kelvin | cal: calorie | kcal:
mol: mole | C: coulomb | F: farad | T: tesla | eV: | B: byte | KB: kB kilobyte | MB: megabyte | GB: gigabyte | bit:
°: deg degree | rad: radian | °C: celsius centigrade | °F: fahrenheit | %: percent pct percentage 百分之 | ha: hectare
$: dollar usd USD bucks | €: euro eur EUR | £: pound gbp GBP quid | ¥: yen yuan rmb CNY JPY 元 円 | ₹: rupee inr INR rs
¢: cent | ₽: ruble rub RUB | ₩: won krw KRW | rpm: | kph: kmh | mph: | unit: units
"""
_PRODUCTS = {"kph": (("km", 1), ("h", -1)), "mph": (("mi", 1), ("h", -1)), "cc": (("cm", 3),)}
"""Names of what has other names too."""
_TABLE = {
    alias: name
    for name, _, others in (entry.partition(":") for entry in re.split(r"\s*[|\n]\s*", _NAMES.strip()))
    for alias in (name, *others.split())
}

# Said of a number, or no word for a unit.
NO_UNIT = frozenset({
    "or", "and", "not", "to", "from", "if", "but", "nor", "either", "neither", "between", "plus", "minus", "times",
    "over", "divided", "mod", "than", "more", "less", "least", "most", "sin", "cos", "tan", "log", "ln", "exp",
    "sqrt", "pi", "max", "infinity", "inf", "oder", "ou", "und", "et", "y", "o",
})  # fmt: skip
_WRAPPED = re.compile(
    r"\\(?:text|textrm|textup|textit|textbf|mathrm"
    r"|mathit|mathbf|mbox|operatorname|rm|unit|si)\s*\{([^{}]*)\}"
)
_DEGREES = re.compile(r"\^\s*\{?\s*(?:\\circ|°)\s*\}?|\\degree|\\circ|º")
_UNIT_POWER = re.compile(r"\^\s*(?:\{\s*\(?\s*(-?\d)\s*\)?\s*\}|\(?(-?\d)\)?)")
_BELOW = re.compile(r"/\s*\(([^()]*)\)$")
_MICRO = re.compile(r"(?:\\mu|μ)\s*(?=[A-Za-z])")
_TOKEN = re.compile(
    r"(?P<power>\^-?\d)|(?P<per>/|\bper\b)|(?P<join>[\s·⋅.\-]+|\\cdot)|(?P<name>°[CF]\b|[^\W\d_]+|[°%$€£¥¢₹₽₩])(?P<digit>[23](?!\d))?"
)
_POWERS_BEFORE = {"square": 2, "sq": 2, "cubic": 3}
_POWERS_BEHIND = {"squared": 2, "cubed": 3}
_SHORT = 2
"""Unknown names of so few letters are variables."""
_GLUED = frozenset("mgshL")
"""The letters that are units even directly behind a number; others are variables there."""


class Unit(frozenset[tuple[str, int]]):
    """Names and their powers."""

    @property
    def is_known(self) -> bool:
        return all(name in _TABLE for name, _ in self)


NONE = Unit()


def parse_unit(text: str, *, is_glued: bool = False) -> Unit | None:
    """The unit that the whole text is, or None. `is_glued`: it followed its number without a space, so that words in
    Latin letters must be in the table: `3xy` is a product."""
    if len(text) > 2 * MAX_UNIT_CHARS:
        return None
    is_text = "\\" in text
    plain = _UNIT_POWER.sub(r"^\1\2", _DEGREES.sub("°", text))
    plain = _WRAPPED.sub(r" \1 ", plain.replace("\\%", "%").replace("\\$", "$").replace("~", " ")).strip(" {}.,")
    plain = _BELOW.sub(r"/\1", _MICRO.sub("µ", _UNIT_POWER.sub(r"^\1\2", plain.replace("\\Omega", "Ω"))))
    plain = re.sub(r"°\s*([CF])\b", r"°\1", plain)
    tokens = list(_TOKEN.finditer(plain))
    if len(plain) > MAX_UNIT_CHARS or "".join(token[0] for token in tokens) != plain:
        return None
    return _product(tokens, is_glued=is_glued and not is_text)


def are_same(unit: Unit, expected: Unit) -> bool:
    """Whether nothing speaks against it: one of them is not said, or they mean the same."""
    if not unit or not expected or unit == expected:
        return True
    if unit.is_known or expected.is_known:
        return False
    names, expected_names = {name for name, _ in unit}, {name for name, _ in expected}
    return names <= expected_names or expected_names <= names


def _product(tokens: list[re.Match[str]], *, is_glued: bool) -> Unit | None:
    powers: dict[str, int] = {}
    sign, next_power, previous = 1, 1, ""
    for token in tokens:
        word = (token["name"] or "").lower()
        if token["per"]:
            sign = -1
        elif previous and (token["power"] or word in _POWERS_BEHIND):
            power = int(token["power"][1:]) if token["power"] else _POWERS_BEHIND[word]
            powers[previous] += (power - 1) * sign
        elif word in _POWERS_BEFORE:
            next_power = _POWERS_BEFORE[word]
        elif word:
            unit = _name_of_unit(token["name"], is_glued=is_glued)
            if unit is None:
                return None
            if unit in ("°C", "°F"):
                powers.pop("°", None)  # "degrees Celsius"
            for previous, power in _PRODUCTS.get(unit, ((unit, 1),)):
                powers[previous] = powers.get(previous, 0) + sign * power * int(token["digit"] or next_power)
            next_power = 1
    return Unit((name, power) for name, power in powers.items() if power) or None


def _name_of_unit(name: str, *, is_glued: bool) -> str | None:
    """The name as the table has it; an unknown word in its singular; None for what is no unit."""
    lower = name.lower()
    if lower in NO_UNIT:
        return None
    is_latin = name.isascii() and name.isalpha()
    if is_latin and is_glued and len(name) == 1 and name not in _GLUED:
        return None
    for spelling in (name, lower, lower.removesuffix("s")):
        if spelling in _TABLE and (len(name) > 1 or spelling == name):
            return _TABLE[spelling]
    if (is_latin and (is_glued or len(name) <= _SHORT)) or re.fullmatch(r"[\u0370-\u03ff]+", name):
        return None
    return lower.removesuffix("s") if is_latin else lower


MAX_DIGITS = 400
"""More digits, or an exponent beyond this, is no answer that was meant; it would only cost memory."""
MAX_CHARS = 4 * MAX_DIGITS
TAIL_CHARS = 20_000
"""In running text, so much of the end is looked at."""

UNSIGNED = (
    r"(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d*)?|\d{1,3}(?:\.\d{3})+,\d+|\d{1,3}(?:\.\d{3}){2,}(?!\d)|\d+(?:\.\d*)?|\.\d+)"
)
EXPONENT = r"(?:[eE][+-]?\d+)"
_DEN = r"(?:\s?/\s?\d+(?!\.?\d))"
_TIMES = r"\s{0,2}(?:\\times|\\cdot|[*xX])\s{0,2}"
_POWER = r"\s?(?:\^|\*\*)\s?(?:\{\s?(?P<p1>[+-]?\d{1,6})\s?\}|\((?P<p2>[+-]?\d{1,6})\)|(?P<p3>[+-]?\d{1,6}))"
_SIGN = r"(?P<sign>(?:[+-]\s?)?)"
FORMS = tuple(
    re.compile(f"{_SIGN}{form}")
    for form in (
        (
            r"(?P<whole>\d{1,400}(?!\d))?(?:\s?|(?<=\d) and )"
            r"\\frac\{(?P<above>[^{}]{1,400})\}\{(?P<below>[^{}]{1,400})\}"
        ),
        r"(?P<whole>\d{1,400})(?:\s| and )(?P<above>\d{1,400})\s?/\s?(?P<below>\d{1,400})(?![\d.])",
        (
            r"(?P<head>\d{0,400}\.\d{0,400})"
            r"(?:\\overline\s?\{(?P<again1>\d{1,40})\}|\((?P<again2>\d{1,40})\)|\\dot\{?(?P<again3>\d)\}?)"
        ),
        rf"(?P<factor>{UNSIGNED}){_TIMES}(?P<ten>10){_POWER}",
        rf"(?:\((?P<inner>[+-]?{UNSIGNED})\)|\{{(?P<inner2>{UNSIGNED})\}}|(?P<base>{UNSIGNED})){_POWER}",
        rf"(?P<above>{UNSIGNED}{EXPONENT}?)\s?/\s?(?P<below>[+-]?{UNSIGNED}{EXPONENT}?)",
        rf"(?P<plain>{UNSIGNED}{EXPONENT}?)",
    )
)
# In running text: not glued to a word, and a sign only where it cannot be a minus between two terms.
IN_TEXT = re.compile(
    r"[+-]?(?:(?<![\w.])\d+\s?)?\\frac\{[^{}]*\}\{[^{}]*\}"
    r"|(?<![\w.])(?:(?<![)\]}])[+-])?(?:\\?[$€£]\s?)?"
    rf"(?:\d{{1,9}}\s\d{{1,9}}/\d{{1,9}}(?!\.?\d)|{UNSIGNED}{EXPONENT}?"
    rf"(?:{_TIMES}10\s?\^\s?\{{?[+-]?\d{{1,4}}\}}?|\^\{{?[+-]?\d{{1,4}}\}}?|{_DEN})?)"
)
WRAPPERS = (
    ("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("(", ")"), ("{", "}"), ("`", "`"),
    ('"', '"'),
)  # fmt: skip
DRESS = re.compile(
    r"\\(?:f?boxed|fbox|underline|boldsymbol|text(?:bf|it|rm|up)?|math(?:bf|it|rm|sf)|(?:text)?color\s?\{\w{1,20}\})(?=\{)"
)
"""Commands that say how something looks, and not what it is."""
CURRENCIES = "$€£¥₹₩₽"
CURRENCY = re.compile(
    rf"(?:\\text\s?\{{\s?)?(?:(?:US|A|C|HK|NZ)(?=\\?\$))?\\?([{CURRENCIES}]|(?:USD|EUR|GBP|INR|JPY|CNY|RMB|KRW|RUB|Rs)\b)"
    r"\.?\s?\}?\s?"
)
SPACED = re.compile(r"(?<![\d.,/])\d{1,3}(?: \d{3})+(?![\d/]| /)")
DECIMAL_COMMA = re.compile(r"(?<=\d),(?=(?:\d{1,2}|\d{4,})(?!\d))(?<![\d,.]\d{3},)(?!\d+,)")
GROUP = r"(?=\d{3}(?!\d))"
SPACES = (
    (re.compile(rf"(?<=\d)(?:\\[,;:! ]|\{{\s?,\s?\}}|\\thinspace|['’\u00a0\u2009\u202f\u2007]){GROUP}"), ","),
    (
        re.compile(
            r"(?<=\d)_(?=\d{3}(?!\d))|\\!|[\u200b-\u200f\u202a-\u202e\u2060\ufeff]"
            r"|\\left(?![a-z])|\\right(?![a-z])|\\displaystyle"
        ),
        "",
    ),
    (re.compile(r"\\[,;: ]|\\q?quad|[\u00a0\u2000-\u200a\u202f\u205f\u3000\s]+|~"), " "),
    (re.compile(r"(?<=\d),,(?=\d)"), ","),
    (re.compile(r"(?<!\\)\$([^$]+)(?<!\\)\$(?!\d)|(?:\\\\)+\s*$"), r"\1"),
    (re.compile(r"(?<=\d)\s?(?:\^\s?\{?\s?)?(?:\\text\s?\{\s?)?(?:st|nd|rd|th)(?![a-z])[\s}]{0,4}"), ""),
    (
        re.compile(r"\\[dtc]?frac\s?(?:(\d)|\{([^{}]{1,400})\})\s?(?:(\d)|\{([^{}]{1,400})\})"),
        r"\\frac{\1\2}{\3\4}",
    ),
)
FULL_WIDTH = {chr(0xFF01 + i): chr(0x21 + i) for i in range(94) if i != 12}  # but for the comma
SIGNS = {
    **dict.fromkeys("\u2212\u2013\u2010\u2011\u2012\ufe63\uff0d", "-"),
    **dict.fromkeys("×✕⨯", "\\times "), **dict.fromkeys("·⋅∙", "\\cdot "),
    "⁄": "/", "∕": "/", "÷": "/", "′": "'", "\uffe5": "¥", "\uffe1": "£",
    **FULL_WIDTH,
    **{chr(zero + i): str(i) for zero in (0x0660, 0x06F0, 0x0966, 0x09E6) for i in range(10)}, "٫": ".", "٬": ",",
    **{sign: f" {a}/{b}" for sign, a, b in zip("½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞", "112131234151357", "233445555668888", strict=True)},
}  # fmt: skip
TRANSLATED = str.maketrans(SIGNS)
_ABOVE = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-", strict=True))
_SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]{1,20}")
# `x =`, `f(3) =`, `\text{Area} =`, `\angle ABC =`: a name in front, without digits first and without operators.
NAME = re.compile(
    r"(?:(?:[A-Za-z|]|\\[A-Za-z]+)[A-Za-z_\\{}()|' \d,.]{0,60}?\s?)?(?::?=|\\approx|\\equiv|≈|≡|\\simeq)\s?(?!=)"
)
MULTIPLES = {
    "hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12,
    "万": 10**4, "萬": 10**4, "亿": 10**8, "億": 10**8, "만": 10**4, "억": 10**8,
}  # fmt: skip
MULTIPLE = re.compile(
    r"\s?(?:\\text\s?\{\s?)?(hundred|thousand|million|billion|trillion|dozen|[万萬亿億만억])(?![a-z])\s?\}?",
    re.IGNORECASE,
)
SENTENCE_END = re.compile(r"[.;!?。；！？](?=\s|$)|\n")


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number and the unit that it was given with."""

    value: Fraction
    unit: Unit = NONE

    def equals(self, expected: Quantity, *, relative: Fraction = Fraction(0), absolute: Fraction = Fraction(0)) -> bool:
        """Whether this is the wanted one: near enough, and of no other unit. 50 % is 50, and also 0.5."""
        if not are_same(self.unit, expected.unit):
            return False
        values, expected_values = self._readings(), expected._readings()
        is_like = len(values) == len(expected_values)
        pairs = zip(values, expected_values, strict=True) if is_like else product(values, expected_values)
        return any(close(a, b, relative=relative, absolute=absolute) for a, b in pairs)

    def _readings(self) -> tuple[Fraction, ...]:
        return (self.value, self.value / 100) if self.unit == PERCENT else (self.value,)


PERCENT = Unit((("%", 1),))


def parse_quantity(text: str, *, may_have_name: bool = True) -> Quantity | None:
    """The one number that the whole text is, with a unit behind it and `x =` in front if they are there; or None."""
    if len(text) > MAX_CHARS:
        return None
    plain = with_powers(text).translate(TRANSLATED)
    for pattern, instead in SPACES:
        plain = pattern.sub(instead, plain)
    plain = _unwrap(plain.strip())
    if may_have_name:  # it is one answer, so these are no two numbers
        plain = DECIMAL_COMMA.sub(".", SPACED.sub(lambda match: match[0].replace(" ", ""), plain))
    while may_have_name and (name := NAME.match(plain)) is not None:
        plain = _unwrap(plain[name.end() :])
    sign = plain[:1] if plain[:1] in ("+", "-") else ""
    money = plain[len(sign) :].lstrip()
    currency = CURRENCY.match(money)
    if currency is None:
        return _with_unit(plain, NONE)
    money = CURRENCY.sub("", money, count=1)
    if sign and money[:1] in ("+", "-"):
        return None
    unit = parse_unit(currency[1])
    return _with_unit(sign + money, unit) if unit is not None else None


def last_quantity(text: str) -> Quantity | None:
    """The last number in running text with its unit, if that is a known one; or None. If the last number is in
    formulas, the last formula is judged whole, or what it ends with after a `=`."""
    plain = text[-TAIL_CHARS:].translate(TRANSLATED)
    matches = deque(IN_TEXT.finditer(plain), maxlen=1)
    if not matches:
        return None
    match = matches[0]
    number = parse_quantity(match[0])
    if number is None or number.unit:
        return number
    behind = SENTENCE_END.split(plain[match.end() : match.end() + MAX_UNIT_CHARS], maxsplit=1)[0].strip(" $*")
    unit = parse_unit(behind, is_glued=not plain[match.end() : match.end() + 1].isspace()) if behind else None
    return Quantity(number.value, unit) if unit is not None and unit.is_known else number


def close(answer: Fraction, expected: Fraction, *, relative: Fraction, absolute: Fraction) -> bool:
    """Whether the two differ by at most `absolute` or `relative * |expected|`, whichever is larger."""
    return abs(answer - expected) <= max(absolute, relative * abs(expected))


def _with_unit(plain: str, unit: Unit) -> Quantity | None:
    """The number at the beginning; the rest has to be its unit."""
    for form in FORMS:
        match = form.match(plain)
        if match is None or (value := _value(match)) is None:
            continue
        end = match.end()
        many = MULTIPLE.match(plain, end)
        if many is not None:
            value, end = value * MULTIPLES[many[1].lower()], many.end()
        behind = plain[end:].strip()
        if not behind or behind == "}" * (many is not None):
            return Quantity(value, unit)
        behind_unit = parse_unit(behind, is_glued=plain[end : end + 1] == behind[:1])
        if behind_unit is not None and (not unit or behind_unit == unit):
            return Quantity(value, behind_unit or unit)
    return None


def with_powers(text: str) -> str:
    """With `^{2}` for a raised 2."""
    return _SUPERSCRIPT.sub(lambda raised: "^{" + "".join(_ABOVE[sign] for sign in raised[0]) + "}", text)


def _unwrap(text: str) -> str:
    before = None
    while before != text:
        before = text
        if (dress := DRESS.match(text)) is not None and text.endswith("}") and _is_whole(text[dress.end() + 1 : -1]):
            text = text[dress.end() :]
        for opening, closing in WRAPPERS:
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
    groups = match.groupdict()
    value: Fraction | None
    if groups.get("above") is not None:
        value = _quotient(groups["above"], groups["below"])
        if groups.get("whole") is not None:
            value = int(groups["whole"]) + value if value is not None and 0 < value < 1 else None
    elif groups.get("head") is not None:
        value = recurring(groups["head"], groups["again1"] or groups["again2"] or groups["again3"] or "0")
    elif any(groups.get(f"p{i}") is not None for i in (1, 2, 3)):
        value = _power(groups)
    else:
        value = _decimal(groups["plain"])
    return -value if value is not None and groups["sign"].startswith("-") else value


def _power(groups: dict[str, str | None]) -> Fraction | None:
    exponent = int(groups["p1"] or groups["p2"] or groups["p3"] or "0")
    base = _decimal(groups.get("ten") or groups.get("inner") or groups.get("inner2") or groups.get("base") or "")
    factor = _decimal(groups.get("factor") or "1")
    if base is None or factor is None or (base == 0 and exponent < 0):
        return None
    if abs(exponent) * max(len(str(base.numerator)), len(str(base.denominator))) > 4 * MAX_DIGITS:
        return None
    return factor * base**exponent


def recurring(head: str, again: str) -> Fraction:
    """The decimal number `head` with `again` behind it for ever."""
    integer, _, places = head.partition(".")
    begin = Fraction(int(integer or "0")) + Fraction(int(places or "0"), 10 ** len(places))
    return begin + Fraction(int(again), (10 ** len(again) - 1) * 10 ** len(places))


def _quotient(head: str, tail: str) -> Fraction | None:
    above, below = _decimal(head.strip()), _decimal(tail.strip())
    return above / below if above is not None and below else None


def _decimal(text: str) -> Fraction | None:
    if len(text) > MAX_DIGITS or _NUMBER.fullmatch(text) is None or not text.isascii():
        return None
    mantissa, _, exponent = text.lower().partition("e")
    if exponent and (len(exponent) > 5 or abs(int(exponent)) > MAX_DIGITS):
        return None
    if "," in mantissa and "." in mantissa and mantissa.rindex(",") > mantissa.rindex("."):
        mantissa = mantissa.replace(".", "").replace(",", ".")  # 1.234,56
    elif mantissa.count(".") > 1:
        mantissa = mantissa.replace(".", "")  # 1.234.567
    return Fraction(mantissa.replace(",", "").rstrip(".")) * Fraction(10) ** int(exponent or 0)


_NUMBER = re.compile(rf"[+-]?{UNSIGNED}{EXPONENT}?")
