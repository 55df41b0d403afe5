"""A4, F7: every failure of a reward is counted, is an event, and reaches the console once; what it returned is taken
exactly or refused by name."""

from __future__ import annotations

import io
import json
import sys
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from tests.harness.run_job import events, make_job

from myxa.actors.rewards.guard import kind_of_cause
from myxa.actors.rewards.rewarder import Rewarder
from myxa.algos.rewards.outcome import RewardOutcome, outcome_of
from myxa.core.completions import Completion
from myxa.core.config import RewardSettings
from myxa.core.errors import UserCodeError
from myxa.launch.screen import Screen
from myxa.launch.views.live_state import LiveState

CODE = """
def strict(completion):
    if completion.text == "odd":
        raise KeyError(completion.metadata["row"])
    if completion.text == "text":
        return "0.5"
    return 1.0
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "mine.py"
    file.write_text(CODE)
    return file


def answer(group_id: int, text: str, index: int = 0) -> Completion:
    row = f"q{group_id}"
    return Completion(group_id=group_id, index=index, messages=(), prompt="?", text=text, metadata={"row": row})


async def judged(made: Rewarder, one: Completion) -> float | None:
    try:
        return (await made.score(one)).value
    except UserCodeError:
        return None


def listened(file: Path, **settings: Any) -> tuple[Rewarder, list[tuple[str, str]]]:
    told: list[tuple[str, str]] = []
    made = Rewarder(RewardSettings(fn=f"{file}:strict", isolate=False, pause_after=0, **settings))
    made.listen(lambda kind, text: told.append((kind, text)))
    return made, told


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("on_error", "value", "then"), [("zero", 0.0, "its answer gets 0"), ("drop", None, "its group is lost")]
)
async def test_a4_each_kind_of_failure_is_told_at_once_and_counted_later(
    file: Path, on_error: str, value: float | None, then: str
) -> None:
    made, told = listened(file, on_error=on_error, max_error_rate=1.0)
    for number in range(12):
        assert await judged(made, answer(number, "odd")) == value
        assert await judged(made, answer(number, "fine")) == 1.0
    assert await judged(made, answer(50, "text")) == value
    what = f'reward function "{file}:strict"'
    assert told == [
        ("reward-failed", f"{what} raised KeyError: 'q0' at {file}:4 (group 0): {then}"),
        ("reward-failed", f"{what} raised KeyError: 'q9' at {file}:4 (group 9): {then}; 10 such failures so far"),
        (
            "reward-failed",
            f"{what} returned a value of type str, not a number (defined at {file}:2) (group 50): {then}",
        ),
    ]
    assert made.num_errors == 13 and made.gauges()["reward/num_errors"] == 13.0


@pytest.mark.asyncio
async def test_a4_groups_that_few_failed_calls_lose_count_against_the_run(file: Path) -> None:
    made, _ = listened(file, max_error_rate=0.1)
    for group in range(25):
        for index in range(8):
            fails = group % 4 == 0 and index == 3
            await judged(made, answer(group, "odd" if fails else "fine", index))
    assert made.too_many_errors == (
        f'reward function "{file}:strict" lost 7 of the last 25 groups, by 3 of the last 100 calls, more than '
        f"reward.max_error_rate = 0.1 allows; last: raised KeyError: 'q24' at {file}:4"
    )
    made.allow(0.5)
    assert made.too_many_errors == ""


@pytest.mark.asyncio
async def test_with_zero_no_group_is_lost(file: Path) -> None:
    made, _ = listened(file, max_error_rate=0.1, on_error="zero")
    for group in range(25):
        for index in range(8):
            await judged(made, answer(group, "odd" if index == 3 and group % 2 else "fine", index))
    assert made.too_many_errors == ""


def test_causes_are_told_apart_by_type_and_line_not_by_value() -> None:
    one, other = "raised KeyError: 'a17' at f.py:3", 'raised KeyError: "b" at f.py:3'
    assert kind_of_cause(one) == kind_of_cause(other) != kind_of_cause("raised KeyError: 'a17' at f.py:4")
    assert kind_of_cause("returned 3 rewards for 4 answers") == kind_of_cause("returned 1 rewards for 4 answers")


def test_a4_the_console_says_each_cause_once_and_its_counts(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"

    def happened(kind: str, text: str, *, is_whole: bool = True) -> None:
        with events.open("a") as file:
            file.write(
                json.dumps({"source": "rollout/0", "wall_s": 1.0, "kind": kind, "text": text}, separators=(",", ":"))
            )
            file.write("\n" if is_whole else "")

    happened("reward-failed", 'reward function "f" of an earlier life (group 1): its group is lost')
    out = io.StringIO()
    screen = Screen(Console(file=out, width=300), tmp_path)
    state = LiveState(now_wall_s=1.0, started_wall_s=0.0)
    happened("reward-failed", "reward function \"f\" raised KeyError: 'a' at f.py:3 (group 7): its answer gets 0")
    screen.show(state)
    happened("reward-failed", "reward function \"f\" raised KeyError: 'b' at f.py:3 (group 8): its answer gets 0")
    happened("group-dropped", "group 8: no reward")
    happened(
        "reward-failed",
        "reward function \"f\" raised KeyError: 'c' at f.py:3 (group 9): its answer gets 0; 10 such failures so far",
    )
    happened("reward-paused", 'reward function "f" failed for 5 groups', is_whole=False)
    screen.show(state)
    with events.open("a") as file:
        file.write("\nno json\n")
    screen.show(state)
    screen.show(state)
    said = [line for line in out.getvalue().splitlines() if "reward function" in line]
    assert said == [
        "reward-failed: reward function \"f\" raised KeyError: 'a' at f.py:3 (group 7): its answer gets 0",
        "reward-failed: reward function \"f\" raised KeyError: 'c' at f.py:3 (group 9): its answer gets 0; 10 such failures so far",
        'reward-paused: reward function "f" failed for 5 groups',
    ]


@pytest.mark.parametrize(
    ("returned", "value"),
    [
        (np.bool_(True), 1.0), (np.bool_(False), 0.0), (True, 1.0), (3, 3.0), (np.float16(0.5), 0.5), (np.float32(0.5), 0.5), (np.float64(0.25), 0.25),
        (np.longdouble(0.5), 0.5), (np.int64(-2), -2.0), (np.uint8(7), 7.0), (np.array(0.25), 0.25), (np.array(True), 1.0), (Decimal("0.5"), 0.5), (Fraction(1, 4), 0.25),
        (torch.tensor(0.5), 0.5), (torch.tensor(True), 1.0), (torch.tensor(2), 2.0), (torch.tensor(0.5, dtype=torch.bfloat16), 0.5), (torch.tensor(0.5, requires_grad=True), 0.5),
    ],
)  # fmt: skip
def test_f7_numbers_of_any_library_are_taken_exactly(returned: object, value: float) -> None:
    assert outcome_of(returned) == RewardOutcome(value)
    assert outcome_of({"reward": returned, "part": returned}) == RewardOutcome(value, {"part": value})


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (np.array([0.25]), "returned a value of type ndarray and of shape (1,), not a number"), (torch.tensor([0.5, 1.0]), "returned a value of type Tensor and of shape (2,), not a number"),
        ((0.5, {"a": 1}), "returned a value of type tuple, not a number"), ({"score": 1.0}, "returned a dict without \"reward\"; it has 'score'"), ("1.0", "returned a value of type str, not a number"),
        (1 + 0j, "returned a value of type complex, not a number"), (np.complex64(1), "returned a value of type complex64, not a number"), (np.str_("1"), "returned a value of type str_, not a number"),
        (np.float32("nan"), "returned nan"), (torch.tensor(float("inf")), "returned inf"), (Decimal("NaN"), "returned nan"), (Decimal("Infinity"), "returned inf"), (np.datetime64("2020-01-01"), "returned a value of type datetime64, not a number"),
        (10**400, "returned a number that is too large"), (1e39, "returned 1e+39, which is too large for a float32"), (b"1", "returned a value of type bytes, not a number"), ({"reward": np.array([1.0])}, 'returned a value of type ndarray and of shape (1,) as "reward", not a number'),
    ],
)  # fmt: skip
def test_what_is_no_finite_number_is_refused_by_name(returned: object, words: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        outcome_of(returned)
    assert str(caught.value) == words


@pytest.mark.timeout(300)
def test_a4_a_run_tells_what_its_reward_does_wrong_and_goes_on(tmp_path: Path) -> None:
    """`on_error = "zero"` lost the cause: no event, no line (A4)."""
    job = make_job(tmp_path)
    (tmp_path / "mine.py").write_text(
        "import numpy as np\n\ndef score(completion):\n    if completion.index == 1:\n"
        "        return completion.metadata[completion.prompt]\n    return np.bool_(len(completion.text) > 3)\n"
    )
    code, said, run_dir = job.run(
        "reward.fn=mine.py:score", "reward.on_error=zero", "reward.max_error_rate=1", "run.num_steps=2", timeout_s=280
    )
    assert code == 0, said
    told = [event["text"] for event in events(run_dir, "reward-failed")]
    assert "raised KeyError: " in told[0] and "mine.py:5 (group " in told[0] and told[0].endswith("its answer gets 0")
    lines = [line for line in said.splitlines() if "reward-failed" in line and "so far" not in line]
    assert len(lines) == 1 and told[0] in lines[0]
