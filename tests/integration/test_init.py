"""`myxa init` writes what the tutorial shows, and it learns."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.harness.commands import run

from myxa.actors.models.tiny import make_tiny_model
from myxa.core.config import load_config

TUTORIAL = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text()


def block(kind: str, number: int = 0) -> str:
    return re.findall(rf"^```{kind}\n(.*?)^```", TUTORIAL, re.MULTILINE | re.DOTALL)[number]


def test_the_files_are_those_of_the_tutorial_and_none_is_overwritten(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "big model", preset="0p5m", seed=0)
    done = run("init", "mine", "--model", "big model", folder=tmp_path, timeout_s=60)
    assert done.returncode == 0, done.stderr
    made = tmp_path / "mine"
    assert (made / "my_task.py").read_text() == block("python")
    for number, name in enumerate(("run.toml", "warm_up.toml")):
        shown = (made / name).read_text().replace(json.dumps(str(tmp_path / "big model")), '"model"')
        assert shown == block("toml", number)
    row = json.loads((made / "heldout.jsonl").read_text().splitlines()[0])
    assert row["label"] == "".join(sorted(row["prompt"].removeprefix("sort "), reverse=True))
    for name in ("run.toml", "warm_up.toml"):
        planned = run("plan", name, folder=made, timeout_s=60)
        assert planned.returncode == 0, planned.stdout + planned.stderr

    (made / "my_task.py").write_text("mine")
    again = run("init", "mine", folder=tmp_path, timeout_s=60)
    assert again.returncode == 2 and "mine/my_task.py is there already" in again.stderr
    assert (made / "my_task.py").read_text() == "mine"
    named = run("init", "named", "--model", "Qwen/Qwen3-0.6B", folder=tmp_path, timeout_s=60)
    assert named.returncode == 0 and load_config(tmp_path / "named" / "run.toml").model.path == "hf://Qwen/Qwen3-0.6B"
    onto_file = run("init", "mine/run.toml", folder=tmp_path, timeout_s=60)
    assert onto_file.returncode == 2 and "mine/run.toml is a file" in onto_file.stderr
    nowhere = run("init", "other", "--model", "nowhere", folder=tmp_path, timeout_s=60)
    assert nowhere.returncode == 2 and "nowhere/config.json" in nowhere.stderr
    assert not (tmp_path / "other").exists()


@pytest.mark.soak
def test_it_learns_from_nothing(tmp_path: Path) -> None:
    made = run("init", 'my "task', folder=tmp_path, timeout_s=300)
    assert made.returncode == 0
    assert "warm-up/" not in made.stdout, "that folder is gone"
    done = run("up", "run.toml", "--quiet", folder=tmp_path / 'my "task', timeout_s=600)
    assert done.returncode == 0, done.stderr
    (metrics,) = (tmp_path / 'my "task' / "runs").glob("my-task-*/metrics.jsonl")
    points = [json.loads(line)["values"] for line in metrics.read_text().splitlines()]
    rewards = [values["eval/reward"] for values in points if "eval/reward" in values]
    assert rewards[0] < 0.2 and max(rewards) > 0.4
