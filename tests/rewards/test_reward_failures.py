"""A4: every failure of a reward is counted, is an event, and reaches the console once."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.rewards.world import answer

from myxa.actors.rewards.guard import kind_of_cause
from myxa.actors.rewards.rewarder import Rewarder
from myxa.core.completions import Completion
from myxa.core.config import RewardSettings
from myxa.core.errors import UserCodeError
from myxa.launch.views.run_view import RunView
from myxa.launch.views.screen import Screen

CODE = """
def strict(completion):
    if completion.text == "odd":
        raise KeyError(completion.metadata["row"])
    if completion.text == "text":
        return "0.5"
    return 1.0
"""


pytestmark = pytest.mark.usefixtures("called_here")


@pytest.fixture
def file(write_code: Callable[[str], Path]) -> Path:
    return write_code(CODE)


def answer_of(group_id: int, text: str, index: int = 0) -> Completion:
    return answer(text, index=index, group_id=group_id, metadata={"row": f"q{group_id}"})


async def judged(made: Rewarder, one: Completion) -> float | None:
    try:
        return (await made.score(one)).value
    except UserCodeError:
        return None


def listened(file: Path, **settings: Any) -> tuple[Rewarder, list[tuple[str, str]]]:
    told: list[tuple[str, str]] = []
    made = Rewarder(RewardSettings(fn=f"{file}:strict", pause_after=0, **settings))
    made.listen(lambda kind, text: told.append((kind, text)))
    return made, told


@pytest.mark.parametrize(
    ("on_error", "value", "then"), [("zero", 0.0, "its answer gets 0"), ("drop", None, "its group is lost")]
)
async def test_a4_each_kind_of_failure_is_told_at_once_and_counted_later(
    file: Path, on_error: str, value: float | None, then: str
) -> None:
    made, told = listened(file, on_error=on_error, max_error_rate=1.0)
    for number in range(12):
        assert await judged(made, answer_of(number, "odd")) == value
        assert await judged(made, answer_of(number, "fine")) == 1.0
    assert await judged(made, answer_of(50, "text")) == value
    what = f'reward function "{file}:strict"'
    assert told == [
        ("reward-failed", f"{what} raised KeyError: 'q0' at {file}:4 (group 0): {then}"),
        ("reward-failed", f"{what} raised KeyError: 'q9' at {file}:4 (group 9): {then}; 10 such failures so far"),
        (
            "reward-failed",
            f"{what} returned a value of type str, not a number (group 50): {then}",
        ),
    ]
    assert made.num_errors == 13 and made.gauges()["reward/num_errors"] == 13.0


async def test_a4_groups_that_few_failed_calls_lose_count_against_the_run(file: Path) -> None:
    made, _ = listened(file, max_error_rate=0.1)
    for group in range(25):
        for index in range(8):
            fails = group % 4 == 0 and index == 3
            await judged(made, answer_of(group, "odd" if fails else "fine", index))
    assert made.too_many_errors == (
        f'reward function "{file}:strict" lost 7 of the last 25 groups, by 3 of the last 100 calls, more than '
        f"reward.max_error_rate = 0.1 allows; last: raised KeyError: 'q24' at {file}:4"
    )
    made.allow(0.5)
    assert made.too_many_errors == ""


async def test_with_zero_no_group_is_lost(file: Path) -> None:
    made, _ = listened(file, max_error_rate=0.1, on_error="zero")
    for group in range(25):
        for index in range(8):
            await judged(made, answer_of(group, "odd" if index == 3 and group % 2 else "fine", index))
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
    state = RunView(now_wall_s=1.0, started_wall_s=0.0)
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
