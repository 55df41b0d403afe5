"""Where in a text the answer stands."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myxa.algos.rewards.extraction import JudgedText, boxed, read_answer


@pytest.mark.parametrize(("text", "answer"), [
    (r"\boxed{1}", "1"), (r"\fbox{ 9 }", "9"), (r"\boxed {a{b}c}", "a{b}c"), (r"\boxed{1} then \boxed{2}", "2"),
    (r"\boxed{\frac{1}{2}} and \boxed{3", r"\frac{1}{2}"), (r"\boxed{\{1,2\}}", r"\{1,2\}"), (r"f{ \boxed{x}", "x"),
    (r"} } \boxed{x} }", "x"), (r"\boxed{", None), (r"\boxed{\}", None), ("boxed{1}", None), ("", None),
])  # fmt: skip
def test_boxed(text: str, answer: str | None) -> None:
    assert boxed(text) == answer


@pytest.mark.parametrize(("text", "answer", "is_marked"), [
    (r"\boxed{1} #### 2", "1", True), ("7 + 3 = 10\n#### 10\nbye", "10", True), ("#### 2 <answer>3</answer>", "2", True),
    ("<answer>a</answer><answer> b </answer> c", "b", True), ("a</answer>", "a</answer>", False), (" plain ", "plain", False),
])  # fmt: skip
def test_what_is_read_and_whether_it_is_said_to_be_the_answer(text: str, answer: str, is_marked: bool) -> None:
    assert read_answer(text) == JudgedText(answer, is_marked)


balanced = st.recursive(
    st.text(st.characters(exclude_characters="{}\\", codec="utf-8"), max_size=4),
    lambda inner: st.lists(inner, max_size=3).map(lambda parts: "{" + "".join(parts) + "}"),
    max_leaves=8,
)


@settings(max_examples=40)
@given(st.text(st.characters(exclude_characters="{}\\", codec="utf-8"), max_size=10), balanced, balanced)
def test_whatever_is_balanced_comes_back(before: str, inside: str, after: str) -> None:
    assert boxed(f"{before}\\boxed{{{inside}}}{after}") == inside.strip()


@given(st.text(max_size=80))
def test_any_text(text: str) -> None:
    assert read_answer(text).text in text


@pytest.mark.timeout(20)
@pytest.mark.parametrize("piece", ["\\boxed{", "{", "}", "\\", "<answer>", "####", "\n"])
def test_long_hostile_texts_take_linear_time(piece: str) -> None:
    read_answer(piece * (200_000 // len(piece)))
