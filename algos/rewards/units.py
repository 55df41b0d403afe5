r"""The unit that follows a number: whether two of them are the same.

A unit is a product of names with powers: `km/h`, `\text{ cm}^2`, "square metres", "euros per day". Names that are in
the table are compared by what they mean, other words as words. Units are not converted: 500 cm is not 5 m.
"""

from __future__ import annotations

import re

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
_POWER = re.compile(r"\^\s*\{?\s*\(?\s*(-?\d)\s*\)?\s*\}?")
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
        """Whether all of it is in the table."""
        return all(name in _TABLE for name, _ in self)


NONE = Unit()


def parse_unit(text: str, *, is_glued: bool = False) -> Unit | None:
    """The unit that the whole text is, or None. `is_glued`: it followed its number without a space, so that words in
    Latin letters must be in the table: `3xy` is a product."""
    if len(text) > 2 * MAX_UNIT_CHARS:
        return None
    is_text = "\\" in text
    plain = _DEGREES.sub("°", text)
    plain = _WRAPPED.sub(r" \1 ", plain)
    plain = _POWER.sub(r"^\1", plain.replace("\\%", "%").replace("\\$", "$").replace("~", " ")).strip(" {}.,")
    plain = re.sub(r"°\s*([CF])\b", r"°\1", plain)
    tokens = list(_TOKEN.finditer(plain))
    if len(plain) > MAX_UNIT_CHARS or "".join(one[0] for one in tokens) != plain:
        return None
    return _product(tokens, is_glued=is_glued and not is_text)


def are_same(one: Unit, other: Unit) -> bool:
    """Whether nothing speaks against it: one of them is not said, or they mean the same."""
    if not one or not other or one == other:
        return True
    if one.is_known or other.is_known:
        return False
    words, others = ({name for name, _ in unit} for unit in (one, other))
    return words <= others or others <= words


def _product(tokens: list[re.Match[str]], *, is_glued: bool) -> Unit | None:
    powers: dict[str, int] = {}
    sign, next_power, last = 1, 1, ""
    for token in tokens:
        word = (token["name"] or "").lower()
        if token["per"]:
            sign = -1
        elif last and (token["power"] or word in _POWERS_BEHIND):
            power = int(token["power"][1:]) if token["power"] else _POWERS_BEHIND[word]
            powers[last] += (power - 1) * sign
        elif word in _POWERS_BEFORE:
            next_power = _POWERS_BEFORE[word]
        elif word:
            found = _known(token["name"], is_glued=is_glued)
            if found is None:
                return None
            if found in ("°C", "°F"):
                powers.pop("°", None)  # "degrees Celsius"
            for last, power in _PRODUCTS.get(found, ((found, 1),)):
                powers[last] = powers.get(last, 0) + sign * power * int(token["digit"] or next_power)
            next_power = 1
    return Unit((name, power) for name, power in powers.items() if power) or None


def _known(name: str, *, is_glued: bool) -> str | None:
    """The name as the table has it; an unknown word in its singular; None for what is no unit."""
    lower = name.lower()
    if lower in NO_UNIT:
        return None
    is_latin = name.isascii() and name.isalpha()
    if is_latin and is_glued and len(name) == 1 and name not in _GLUED:
        return None
    for one in (name, lower, lower.removesuffix("s")):
        if one in _TABLE and (len(name) > 1 or one == name):
            return _TABLE[one]
    if (is_latin and (is_glued or len(name) <= _SHORT)) or re.fullmatch(r"[\u0370-\u03ff]+", name):
        return None
    return lower.removesuffix("s") if is_latin else lower
