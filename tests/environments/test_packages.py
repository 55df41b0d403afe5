"""Environments of the packages themselves, each in an interpreter of its own: this one, or the one that the variable
MYXA_PYTHON_<PACKAGE> names, which has this myxa too. What is not installed is skipped."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.environments.test_environments import Bench, bench, counts
from tests.gateway.scripted import CALL
from tests.harness.waiting import wait_until

from myxa.core.config import RunConfig, load_config
from myxa.launch.frozen_code import freeze

pytestmark = pytest.mark.timeout(180)

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[1] / "examples" / "verifiers_env"


def python_with(package: str) -> str:
    """An interpreter that has the package; skips the test where there is none."""
    name = f"MYXA_PYTHON_{package.upper()}"
    if found := os.environ.get(name, ""):
        return found
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed, and {name} names no interpreter that has it")
    return sys.executable


@asynccontextmanager
async def packaged(tmp_path: Path, answer: Any, **settings: Any) -> AsyncIterator[Bench]:
    async with bench(tmp_path, answer, workers=1, **settings) as made:
        yield made


@contextmanager
def served(python: str, name: str, path: str) -> Iterator[str]:
    """The address of a server of this folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([python, str(HERE / name), str(port)])

    def answers() -> bool:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=1)
        except urllib.error.HTTPError:
            return True
        except OSError:
            assert process.poll() is None
            return False
        return True

    try:
        wait_until(answers, "the server answers")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def calls_weather(prompt: str) -> str:
    """A broken call, a call, one that fails, one of a picture, and the answer."""
    num_turns = prompt.count("<|im_start|>assistant") - 1
    picture = CALL.replace('"weather"', '"picture"')
    return ["<tool_call>{broken</tool_call>", CALL, CALL.replace("Bern", "Nowhere"), picture, "It rains."][num_turns]


@pytest.mark.parametrize("way", ["stdio", "http"])
async def test_tools_of_mcp_servers(tmp_path: Path, way: str) -> None:
    python = python_with("mcp")

    async def run(server: dict[str, Any]) -> None:
        settings = {"kind": "mcp", "id": "", "python": python, "args": {"servers": {"weather": server}}}
        async with packaged(tmp_path, calls_weather, malformed_reward=-0.5, **settings) as made:
            (sample,) = (await made.run()).samples
        assert sample.turns[-1] == "It rains." and sample.metadata["num_tool_calls"] == 3
        assert [reply[0].role for reply in sample.replies] == ["user", "tool", "tool", "tool"]
        assert sample.replies[3][0].content == "[image]\n"
        assert sample.replies[1][0].content == "rain in Bern" and sample.replies[2][0].content.startswith("error: ")
        assert sample.reward == -0.5

    if way == "stdio":
        await run({"command": [python, str(HERE / "mcp_server.py")]})
    else:
        with served(python, "mcp_server.py", "/mcp") as url:
            await run({"url": f"{url}/mcp"})


async def test_a_server_of_openenv(tmp_path: Path) -> None:
    python = python_with("openenv")
    with served(python, "openenv_server.py", "/health") as url:
        async with packaged(tmp_path, counts, kind="openenv", id=url, python=python) as made:
            group = await made.run(3)
        turns = iter(["one", "1", "[1]", '{"number": 2}', "3"])
        async with packaged(tmp_path, lambda prompt: next(turns), kind="openenv", id=url, python=python) as made:
            other = await made.run()
    assert group.rewards.tolist() == [1.5] * 3 and other.rewards.tolist() == [1.5]
    assert all(one.turns == ("1", "2", "3") for one in group.samples)
    assert ["seed 7" in one.messages[-1].content for one in group.samples] == [True] * 3
    assert "no action" in other.samples[0].replies[0][0].content


async def test_a_toy_text_game_of_gymnasium(tmp_path: Path) -> None:
    python = python_with("gymnasium")
    settings = {"id": "FrozenLake-v1", "args": {"is_slippery": False, "render_mode": "ansi"}, "python": python}
    moves = iter(["left", "1", "1", "2", "2"])  # no action; down, down, right, right
    async with packaged(tmp_path, lambda prompt: next(moves), **settings) as made:
        (sample,) = (await made.run()).samples
    assert sample.num_turns == 5 and sample.metadata["ended_by"] == "max_turns" and sample.reward == 0
    assert "no action" in sample.replies[0][0].content and "SFFF" in re.sub(
        r"\x1b\[\d+m", "", sample.replies[1][0].content
    )


def rows_of(tmp_path: Path, environment: dict[str, Any]) -> list[dict[str, Any]]:
    """What a run would train on."""
    settings: dict[str, Any] = {"environments": {"one": environment}, "rollout": {"workflow": "environment"}}
    rest: dict[str, Any] = {
        "data": {"train": "environment:one@[:3]"},
        "model": {"path": "m"},
        "reward": {"fn": "workflow"},
    }
    frozen = freeze(RunConfig(**settings, **rest), tmp_path)
    path, found, slice_ = str(frozen.config.data.train).partition("@")
    assert found + slice_ == "@[:3]" and f"rows/one.jsonl{found}{slice_}" in frozen.text
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


async def test_puzzles_of_reasoning_gym(tmp_path: Path) -> None:
    """Some of its tasks raise for an answer that is no number."""
    of = {"kind": "reasoning_gym", "id": "prime_factorization", "args": {"size": 5}}
    of["python"] = python_with("reasoning_gym")
    rows = rows_of(tmp_path, of)
    assert len(rows) == 5 and rows == rows_of(tmp_path, of)
    for answer, reward in ((rows[2]["label"], 1.0), (f"<answer>{rows[2]['label']}</answer>", 1.0), ("no number", 0.0)):
        async with packaged(tmp_path, lambda prompt, answer=answer: answer, **of) as made:
            assert (await made.run(1, **rows[2]["metadata"])).rewards.tolist() == [reward]


async def test_the_example_of_verifiers(tmp_path: Path) -> None:
    python = python_with("verifiers")
    config = load_config([EXAMPLE / "run.toml"], [f'environments.digits.python="{python}"'])
    of = config.environments["digits"].model_dump()
    rows = rows_of(tmp_path, of)
    label = "".join(sorted(rows[1]["prompt"][0]["content"].split()[1]))
    async with packaged(tmp_path, lambda prompt: label, **of) as made:
        group = await made.run(3, **rows[1]["metadata"])
        assert group.rewards.tolist() == [1.0] * 3 and group.samples[0].metadata["in_place"] == 1.0
        assert (await made.run(1, index=99999 % len(rows))).rewards.tolist() < [1.0]
