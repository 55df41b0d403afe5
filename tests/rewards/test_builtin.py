"""The built-in rewards, their arguments, and what any reward may return."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from tests.rewards.world import answer

from myxa.algos.rewards.builtin import BUILTINS, bind_builtin
from myxa.algos.rewards.outcome import RewardOutcome, outcome_of, overlong_penalty
from myxa.core.config.data import REWARD_BUILTINS
from myxa.core.errors import ConfigError


def score(name: str, text: str, label: str = "", pattern: str = "", **args: Any) -> object:
    return bind_builtin(name, pattern=pattern, args=args)(answer(text, label))


def test_a_thought_that_the_template_opened_may_count_as_opened_by_the_answer() -> None:
    text = "a\n</think><answer>4</answer>"
    for pattern in ("", r".*</think><answer>.*", r"<think>.*</think>.*"):
        judge = bind_builtin("format", pattern=pattern)
        assert judge(answer(text, begins_in_thought=True)) == 1.0
    assert bind_builtin("format")(answer(text)) == 0.0


def test_the_run_file_knows_the_same_names() -> None:
    assert (*BUILTINS, "remote", "judge", "unit_tests") == REWARD_BUILTINS


CASES: dict[str, list[tuple[str, str, dict[str, Any], float]]] = {
    "exact": [
        ("1 2 3", "1 2 3", {}, 1.0), (" 1  2\n3 ", "1 2 3", {}, 1.0), ("1 2", "1 2 3", {}, 0.0), ("ABC", "abc", {}, 0.0),
        ("ABC", "abc", {"ignore_case": True}, 1.0), ("", "", {}, 1.0),
    ],
    "numeric": [
        (r"\boxed{0.333}", "1/3", {}, 0.0), (r"\boxed{0.333}", "1/3", {"tolerance": 0.01}, 1.0),
        ("1.05", "1", {"absolute": 0.1}, 1.0), ("100.9", "100", {"tolerance": 0.01}, 1.0),
        ("-100.9", "-100", {"tolerance": 0.01}, 1.0), ("11.5", "10", {"tolerance": 0.1, "absolute": 1.0}, 0.0),
        ("9007199254740993", "9007199254740992", {"tolerance": 0}, 0.0),
    ],
    "regex": [
        ("well, yes!", "", {"pattern": "yes"}, 1.0), ("no", "", {"pattern": "yes"}, 0.0),
        ("answer: 1, answer: 2", "2", {"pattern": r"answer: (\d+)"}, 1.0),
        ("answer: 1, answer: 2", "1", {"pattern": r"answer: (\d+)"}, 0.0),
        ("answer: ", "", {"pattern": r"answer: (\d+)?"}, 1.0), ("nothing", "", {"pattern": r"answer: (\d+)"}, 0.0),
    ],
    "format": [
        ("<think>a\nb</think>\n<answer>c</answer>", "", {}, 1.0), ("<think>a</think>", "", {}, 0.0),
        ("x <think>a</think><answer>c</answer>", "", {}, 0.0), ("a\nb", "", {"pattern": "a.b"}, 1.0),
        ("ab", "", {"pattern": "a"}, 0.0),
    ],
    "f1": [
        ("The Eiffel Tower!", "eiffel tower", {}, 1.0), ("tower eiffel", "eiffel tower", {}, 2 * (1 * 1) / (1 + 1)),
        ("the tower of london", "eiffel tower", {}, 2 * (1 / 3) * (1 / 2) / (1 / 3 + 1 / 2)),
        ("tower tower tower", "tower", {}, 0.5), (r"so it is \boxed{eiffel tower}", "eiffel tower", {}, 1.0),
        ("paris", "eiffel tower", {}, 0.0), ("yes it is", "yes", {}, 0.0), ("Yes.", "yes", {}, 1.0),
        ("", "eiffel", {}, 0.0), ("the", "", {}, 1.0),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("name", "case"), [(name, case) for name, cases in CASES.items() for case in cases])
def test_what_each_says(name: str, case: tuple[str, str, dict[str, Any], float]) -> None:
    text, label, args, value = case
    assert score(name, text, label, **args) == pytest.approx(value)


@pytest.mark.parametrize(("name", "label", "says"), [
    ("numeric", "many", "the label 'many' is not a number"), ("math", "", "math-verify cannot read the label ''"),
    ("choice", "Paris", "the label 'Paris' is not the letter of a choice"),
])  # fmt: skip
def test_a_label_that_the_reward_cannot_use_is_refused(name: str, label: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        score(name, "3", label)


@pytest.mark.parametrize(("name", "args", "message"), [
    ("numeric", {"tolerence": 1}, 'reward.args.tolerence: reward "numeric" takes no such argument -- did you mean "tolerance"?'),
    ("math", {"x": 1}, 'reward.args.x: reward "math" takes no such argument -- known: seconds'),
    ("exact", {"ignore_case": 1}, "reward.args.ignore_case = 1: must be of type bool"),
    ("numeric", {"tolerance": True}, "reward.args.tolerance = True: must be of type float"),
    ("numeric", {"tolerance": -1}, "reward.args.tolerance = -1: must not be negative"),
    ("math", {"seconds": 1.5}, "reward.args.seconds = 1.5: must be of type int"),
])  # fmt: skip
def test_wrong_arguments(name: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        bind_builtin(name, args=args)
    assert str(caught.value) == message


@pytest.mark.parametrize(("returned", "value"), [
    (np.bool_(True), 1.0), (np.bool_(False), 0.0), (True, 1.0), (3, 3.0), (np.float16(0.5), 0.5), (np.float32(0.5), 0.5), (np.float64(0.25), 0.25),
    (np.longdouble(0.5), 0.5), (np.int64(-2), -2.0), (np.uint8(7), 7.0), (np.array(0.25), 0.25), (np.array(True), 1.0), (Decimal("0.5"), 0.5), (Fraction(1, 4), 0.25),
    (torch.tensor(0.5), 0.5), (torch.tensor(True), 1.0), (torch.tensor(2), 2.0), (torch.tensor(0.5, dtype=torch.bfloat16), 0.5), (torch.tensor(0.5, requires_grad=True), 0.5), (-0.5, -0.5),
])  # fmt: skip
def test_f7_numbers_of_any_library_are_taken_exactly(returned: object, value: float) -> None:
    assert outcome_of(returned) == RewardOutcome(value)
    assert outcome_of({"reward": returned, "part": returned}) == RewardOutcome(value, {"part": value})


@pytest.mark.parametrize(("returned", "words"), [
    (None, "returned a value of type NoneType, not a number"), ([1.0], "returned a value of type list, not a number"), ({}, 'returned a dict without "reward"; it has nothing'),
    ({"reward": 1, 2: 3}, "returned a dict with the key 2, which is not text"), ({"reward": None}, 'returned a value of type NoneType as "reward", not a number'), ({"reward": 1, "x": math.inf}, 'returned inf as "x"'),
    (np.array([0.25]), "returned a value of type ndarray and of shape (1,), not a number"), (torch.tensor([0.5, 1.0]), "returned a value of type Tensor and of shape (2,), not a number"),
    ((0.5, {"a": 1}), "returned a value of type tuple, not a number"), ({"score": 1.0}, "returned a dict without \"reward\"; it has 'score'"), ("1.0", "returned a value of type str, not a number"),
    (1 + 0j, "returned a value of type complex, not a number"), (np.complex64(1), "returned a value of type complex64, not a number"), (np.str_("1"), "returned a value of type str_, not a number"),
    (np.float32("nan"), "returned nan"), (torch.tensor(float("inf")), "returned inf"), (Decimal("NaN"), "returned nan"), (Decimal("Infinity"), "returned inf"), (np.datetime64("2020-01-01"), "returned a value of type datetime64, not a number"),
    (10**400, "returned a number that is too large"), (1e39, "returned 1e+39, which is too large for a float32"), (b"1", "returned a value of type bytes, not a number"), ({"reward": np.array([1.0])}, 'returned a value of type ndarray and of shape (1,) as "reward", not a number'),
])  # fmt: skip
def test_what_is_no_finite_number_is_refused_by_name(returned: object, words: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        outcome_of(returned)
    assert str(caught.value) == words


def test_length_costs_what_dapo_says() -> None:
    costs = [overlong_penalty(n, max_tokens=100, buffer=20) for n in (0, 80, 81, 90, 100, 101, 10_000)]
    assert costs == pytest.approx([0, 0, -0.05, -0.5, -1, -1, -1])
