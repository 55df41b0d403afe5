"""Numbers as people and models write them."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from myxa.algos.rewards.numbers import last_number, parse_number

WRITTEN = [
    ("3", 3),
    ("-3", -3),
    ("+3", 3),
    ("\u22123", -3),
    ("3.", 3),
    (".5", Fraction(1, 2)),
    ("1,234.5", Fraction(2469, 2)),
    ("1,234,567", 1234567),
    ("1_000", 1000),
    ("1\u202f000", 1000),
    ("1e3", 1000),
    ("2.5E-1", Fraction(1, 4)),
    ("1/2", Fraction(1, 2)),
    ("-1 / 4", Fraction(-1, 4)),
    (r"\frac{1}{2}", Fraction(1, 2)),
    (r"-\dfrac{3}{4}", Fraction(-3, 4)),
    ("$3.50", Fraction(7, 2)),
    ("-$5", -5),
    ("\u20ac 7", 7),
    ("50%", 50),
    (r"50\%", 50),
    ("$-2$", -2),
    (r"\(7\)", 7),
    ("**8**", 8),
    ("(9)", 9),
    ("  10 ", 10),
    ("0.1", Fraction(1, 10)),
]
NOT_WRITTEN = ["", " ", "abc", "3,14", "1,23", "1/0", "1/2/3", "1 000", "--3", "3x", "e5", "1e99999", "9" * 500, "\u0663", "nan", "inf", "$", "%", "()", "1e", "0x10"]  # fmt: skip


@pytest.mark.parametrize(("text", "value"), WRITTEN)
def test_a_text_that_is_a_number(text: str, value: int | Fraction) -> None:
    assert parse_number(text) == value


@pytest.mark.parametrize("text", NOT_WRITTEN)
def test_a_text_that_is_none(text: str) -> None:
    assert parse_number(text) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("so x = -3.", -3),
        ("5-3", 3),
        ("5 - 3", 3),
        ("(2)-3", 3),
        ("it costs $1,200.50 in total", Fraction(2401, 2)),
        ("the answer is 1/2", Fraction(1, 2)),
        (r"therefore $\frac{1}{2}$.", Fraction(1, 2)),
        ("GPT4 says 10.", 10),
        ("first 1, then 2, then 3", 3),
        ("v1.2.3", None),
        ("none at all", None),
        ("", None),
    ],
)
def test_the_last_number_of_a_text(text: str, value: int | Fraction | None) -> None:
    assert last_number(text) == value


@given(st.integers(-(10**30), 10**30))
def test_integers_in_every_spelling(number: int) -> None:
    for text in (str(number), f"{number:,}", f"{number}.0", f"${number}$", f" {number} %", f"{number}e0"):
        assert parse_number(text) == number
    assert last_number(f"we find that it is {number:,}.") == number


@given(st.floats(allow_nan=False, allow_infinity=False, min_value=-1e300, max_value=1e300))
def test_floats_are_read_exactly_as_written(number: float) -> None:
    assert parse_number(repr(number)) == Fraction(repr(number))


@given(st.fractions(max_denominator=10**6))
def test_fractions(number: Fraction) -> None:
    assert parse_number(f"{number.numerator}/{number.denominator}") == number
    assert parse_number(rf"\frac{{{number.numerator}}}{{{number.denominator}}}") == number


@given(st.text(st.sampled_from("0123456789.,-+eE/$%(){}\\frac \u2212x"), max_size=60))
def test_any_text_is_read_or_not_but_never_fails(text: str) -> None:
    whole, last = parse_number(text), last_number(text)
    assert whole is None or isinstance(whole, Fraction)
    assert last is None or isinstance(last, Fraction)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("piece", ["1,111", "1/", "$", "(", "9", "\\frac{", "1e", "-", "1.", "1 ", "1,1111"])
def test_long_hostile_texts_take_linear_time(piece: str) -> None:
    text = piece * (200_000 // len(piece))
    parse_number(text)
    last_number(text)
