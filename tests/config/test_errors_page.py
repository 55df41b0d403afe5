"""Each row of tests/error_cases.md is tried: its input gives its error and its exit code."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.data.opened import open_prompts
from tests.harness.error_cases import PAGE, Case, block, cases
from tests.rewards.world import call_here

from myxa.actors.rewards.rewarder import Rewarder
from myxa.core.completions import Completion
from myxa.core.config import RewardSettings, RunConfig, load_config
from myxa.core.errors import MyxaError

DOCS = (Path(__file__).parents[2] / "docs" / "errors.md").read_text()


def is_told(actual: tuple[str, int], message: str, code: int) -> bool:
    """A message that docs/errors.md shows is that message; of the others, file, line and key are what counts."""
    if message in DOCS:
        return actual == (message, code)
    return (actual[0].split()[:4], actual[1]) == (message.split()[:4], code)


def outcome(action: Callable[[], Any], folder: Path) -> tuple[str, int]:
    with pytest.raises(MyxaError) as caught:
        action()
    return str(caught.value).replace(f"{folder}/", ""), caught.value.exit_code


@pytest.mark.parametrize("row", cases("Run file"), ids=lambda row: " ".join(row.inputs)[:40])
def test_run_file(row: Case, tmp_path: Path) -> None:
    _, inputs, message, code = row
    flags = [line.removeprefix("--set ") for line in inputs if line.startswith("--set ")]
    lines = "\n".join(line for line in inputs if not line.startswith("--set "))
    file = tmp_path / "run.toml"
    file.write_text(block("Run file", "toml") + lines + "\n")
    assert is_told(outcome(lambda: load_config(file, flags), tmp_path), message, code)


@pytest.mark.parametrize("row", cases("Data"), ids=lambda row: " ".join(row.inputs)[:40])
def test_data(row: Case, tmp_path: Path) -> None:
    place, inputs, message, code = row
    (tmp_path / "train.jsonl").write_text("\n".join(inputs) + "\n")
    raw = {"model": {"path": "m"}, "data": {"train": str(tmp_path / place)}}
    assert is_told(outcome(lambda: open_prompts(RunConfig.model_validate(raw)), tmp_path), message, code)


@pytest.mark.parametrize("row", cases("Your own functions"), ids=lambda row: " ".join(row.inputs)[:40])
def test_user_code(row: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    _, inputs, message, code = row
    (tmp_path / "mine.py").write_text(block("Your own functions", "python"))
    settings = dict(line.split(" = ", 1) for line in inputs)
    fn = settings["fn"].strip('"')
    fn = fn if fn.startswith("no_such") else f"{tmp_path}/{fn}" if ":" in fn else fn
    workers = int(settings.get("workers", "0"))  # only where a row is about them: a process takes a second or two
    if not workers:
        call_here(monkeypatch)
    reward_settings = RewardSettings(fn=fn, workers=workers, timeout_s=float(settings.get("timeout_s", 30)))

    async def judge() -> None:
        rewarder = Rewarder(reward_settings)
        try:
            await rewarder.score(
                Completion(group_id=7, index=2, messages=(), prompt="?", text="an answer", label="many")
            )
        finally:
            await rewarder.close()

    assert is_told(outcome(lambda: asyncio.run(judge()), tmp_path), message, code)


def test_the_page_shows_messages_of_the_cases() -> None:
    tables = DOCS.split("| place | input | message | exit code |\n")[1:]
    shown = [line for table in tables for line in table.partition("\n\n")[0].splitlines()[1:]]
    assert len(shown) >= 12
    assert [line for line in shown if line not in PAGE.splitlines()] == []
