"""Where in a text the answer stands."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myxa.algos.rewards.extraction import Extract, boxed, extract

EXTRACTS: tuple[Extract, ...] = get_args(Extract)


@pytest.mark.parametrize(("text", "answer"), [
    (r"\boxed{1}", "1"), (r"\fbox{ 9 }", "9"), (r"\boxed {a{b}c}", "a{b}c"), (r"\boxed{1} then \boxed{2}", "2"),
    (r"\boxed{\frac{1}{2}} and \boxed{3", r"\frac{1}{2}"), (r"\boxed{\{1,2\}}", r"\{1,2\}"), (r"f{ \boxed{x}", "x"),
    (r"} } \boxed{x} }", "x"), (r"\boxed{", None), (r"\boxed{\}", None), ("boxed{1}", None), ("", None),
])  # fmt: skip
def test_boxed(text: str, answer: str | None) -> None:
    assert boxed(text) == answer


@pytest.mark.parametrize(("how", "text", "answer"), [
    ("marker", "7 + 3 = 10\n#### 10\nbye", "10"), ("marker", "no marker", None), ("tag", "<answer>a", None),
    ("tag", "<answer>a</answer><answer> b </answer> c", "b"), ("tag", "a</answer>", None), ("boxed", "x", None),
    ("last_line", "a\n b \n\n", "b"), ("last_line", " \n", None), ("all", " a b ", "a b"),
    ("auto", r"\boxed{1} #### 2", "1"), ("auto", "#### 2 <answer>3</answer>", "2 <answer>3</answer>"),
    ("auto", "<answer>3</answer>", "3"), ("auto", " plain ", "plain"),
])  # fmt: skip
def test_extract(how: Extract, text: str, answer: str | None) -> None:
    assert extract(text, how) == answer


balanced = st.recursive(
    st.text(st.characters(exclude_characters="{}\\", codec="utf-8"), max_size=4),
    lambda inner: st.lists(inner, max_size=3).map(lambda parts: "{" + "".join(parts) + "}"),
    max_leaves=8,
)


@settings(max_examples=40)
@given(st.text(st.characters(exclude_characters="{}\\", codec="utf-8"), max_size=10), balanced, balanced)
def test_whatever_is_balanced_comes_back(before: str, inside: str, after: str) -> None:
    assert boxed(f"{before}\\boxed{{{inside}}}{after}") == inside.strip()


@given(st.text(max_size=80), st.sampled_from(EXTRACTS))
def test_any_text(text: str, how: Extract) -> None:
    answer = extract(text, how)
    assert answer is None or answer in text


@pytest.mark.timeout(20)
@pytest.mark.parametrize("piece", ["\\boxed{", "{", "}", "\\", "<answer>", "####", "\n"])
def test_long_hostile_texts_take_linear_time(piece: str) -> None:
    for how in EXTRACTS:
        extract(piece * (200_000 // len(piece)), how)
