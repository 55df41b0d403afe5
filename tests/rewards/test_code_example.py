"""examples/code: its rows are judged as they should, its run files are read, and make steps."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import ModuleType

import pytest
from tests.harness.commands import run as run_command
from tests.harness.scripts import loaded as loaded_script

from myxa.actors.data import open_data
from myxa.actors.rewards.call import RewardSpec, load_reward
from myxa.core.completions import Completion
from myxa.core.config import load_config

EXAMPLE = Path(__file__).parents[2] / "examples" / "code"
MODEL = ("--set", "model.path=model")


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return loaded_script("examples/code/formulas.py")


@pytest.fixture(scope="module")
def folder(example: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `python formulas.py` makes, smaller."""
    path = tmp_path_factory.mktemp("code")
    example.main(path, num_rows=60)
    for name in ("sft.toml", "rl.toml"):
        (path / name).write_text((EXAMPLE / name).read_text())
    return path


async def test_right_lines_pass_and_slips_do_not(example: ModuleType, folder: Path) -> None:
    settings = load_config([str(folder / "rl.toml")], ["model.path=model"]).reward
    judge = load_reward(RewardSpec(fn=settings.fn, pattern="", args=settings.args)).fn
    first, second = ("plus", 74), ("times", 34)
    lines = {
        example.written(first, second): 1.0,
        example.written(first, second, has_parentheses=False): 0.0,
        example.written(second, first): 0.0,
        example.written(first, second) + ")": 0.0,
        "f = lambda x: 34 * x + 2516": 1.0,
    }
    for line, expected in lines.items():
        answer = Completion(group_id=1, index=0, messages=(), prompt="", text=line, label=example.tests(first, second))
        assert await judge(answer) == expected, line


def test_about_three_demonstrations_in_ten_are_right(example: ModuleType) -> None:
    rng = random.Random(3)
    steps = [((rng.choice(("plus", "minus", "times")), 5), ("times", 7)) for _ in range(500)]
    right = sum(example.demonstration(*one, rng) == example.written(*one) for one in steps)
    assert 0.25 < right / len(steps) < 0.6, "some slips are none: without parentheses that are not needed"


@pytest.mark.timeout(240)
def test_its_files_are_read_and_it_makes_steps(folder: Path) -> None:
    """With an untrained model, whose lines are no Python: what is learnt is in its README."""
    assert open_data(load_config(str(folder / "sft.toml"))).by_name
    small = (
        "run.num_steps=2", "algo.batch_size=2", "rollout.num_samples=2", "algo.group_filter=none",
        "eval.num_prompts=2", "rollout.max_groups=4",
    )  # fmt: skip
    more = (part for one in small for part in ("--set", one))
    done = run_command("up", str(folder / "rl.toml"), "--quiet", *MODEL, *more, folder=folder, timeout_s=180)
    assert done.returncode == 0, done.stdout + done.stderr
    (run_dir,) = [path for path in (folder / "runs").iterdir() if not path.is_symlink()]
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert max(row["step"] for row in rows if "train/loss" in row["values"]) == 2
    assert not any(row["values"].get("reward/num_errors", 0.0) for row in rows)
