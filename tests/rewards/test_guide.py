"""examples/own_functions.py and the rows of docs/rewards-and-data.md do what the page says."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.data.opened import open_prompts, prompts, run_on, write_rows
from tests.rewards.world import answer, rewarder

from myxa.actors.buffer.filters import load_sample_filter
from myxa.actors.user_code.functions import GROUP_FILTER, WORKFLOW, load_function
from myxa.algos.rewards.builtin import BUILTINS
from myxa.algos.rewards.outcome import RewardOutcome
from myxa.core.samples import Group, Prompt, Sample

PAGE = (Path(__file__).parents[2] / "docs" / "rewards-and-data.md").read_text()
EXAMPLES = (Path(__file__).parents[2] / "examples" / "own_functions.py").read_text()
JSON_LINES = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)[0].splitlines()


@pytest.fixture
def file(write_code: Callable[[str], Path]) -> Path:
    return write_code(EXAMPLES)


@pytest.mark.parametrize(("line", "preset", "label", "metadata"), [
    (JSON_LINES[0], "slime", "5", {"level": 1}), (JSON_LINES[1], "slime", "5", {}),
    (JSON_LINES[2], "chat", "", {"demonstration": "5"}),
])  # fmt: skip
def test_rows(tmp_path: Path, line: str, preset: str, label: str, metadata: dict[str, Any]) -> None:
    path = write_rows(tmp_path / "t.jsonl", line)
    (prompt,) = prompts(open_prompts(run_on(path, data={"preset": preset}, reward={"fn": "format"})))
    assert prompt.messages[-1].role == "user"
    assert (prompt.label, prompt.metadata) == (label, metadata)


@pytest.mark.usefixtures("called_here")
async def test_rewards(file: Path) -> None:
    async with rewarder(f"{file}:score", args={"weight": 0.5}) as made:
        assert await made.score(answer(" 5 ", "5", num_tokens=10)) == RewardOutcome(1.5, {"is_right": 1.0})
    async with rewarder(f"{file}:rank", scope="group") as made:
        both = [answer(text, "5", index=i, num_tokens=7 + i) for i, text in enumerate(("5", "6"))]
        assert await made.score_group(both) == (RewardOutcome(1.0, {"over": 0.0}), RewardOutcome(0.0, {"over": 1.0}))


def test_workflow_and_filter(file: Path) -> None:
    assert load_function(f"{file}:generate", WORKFLOW).is_async
    keep = load_function(f"{file}:keep", GROUP_FILTER).fn
    prompt = Prompt(group_id=0, row=0, pass_index=0, messages=())
    verdicts = [keep(Group(prompt=prompt, samples=(), rewards=np.array(r, np.float32))) for r in ([0, 1], [0, 0])]
    assert verdicts == [True, "none solved it"]


def test_sample_filter(file: Path) -> None:
    prompt = Prompt(group_id=0, row=0, pass_index=0, messages=())
    samples = tuple(
        Sample(
            group_id=0, index=i, prompt_ids=np.zeros(1, np.int32), response_ids=np.zeros(n, np.int32),
            logprobs=np.zeros(n, np.float32), loss_mask=np.ones(n, np.uint8), versions=np.zeros(n, np.int32), finish="stop",
        )
        for i, n in enumerate((3, 5))
    )  # fmt: skip
    group = Group(prompt=prompt, samples=samples, rewards=np.array([0, 1], np.float32))
    assert load_sample_filter(f"{file}:learn", {"most": 4})(group) == (None, "rambles")


def test_every_builtin_and_its_arguments_are_on_the_page() -> None:
    for name, builtin in BUILTINS.items():
        row = next(line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |"))
        for argument in set(builtin.fn.__annotations__) - {"completion", "return", "pattern"}:
            assert f"`{argument}`" in row


def test_what_the_page_shows_is_in_the_examples() -> None:
    shown = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert shown
    for block in shown:
        assert block.partition("\n\n\n")[2].strip() in EXAMPLES
