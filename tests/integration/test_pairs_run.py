"""Learning from pairs of answers: the recipe as a user runs it, and rows as they come."""

from __future__ import annotations

import contextlib
import json
import math
import os
import runpy
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from tests.data.opened import open_prompts
from tests.harness.commands import Command, run
from tests.harness.run_job import metrics, worker_pids
from tests.harness.waiting import wait_until

from myxa.actors.models.tiny import make_tiny_model
from myxa.core.completions import Completion
from myxa.core.config import load_config
from myxa.core.errors import DataError, MyxaError
from myxa.core.samples import Message

pytestmark = pytest.mark.timeout(300)
EXAMPLES = Path(__file__).parents[2] / "examples"
RECIPES, EXAMPLE = EXAMPLES / "pairs", EXAMPLES / "reward_model"


@pytest.fixture(autouse=True)
def compiler_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which transformers' models have torch make."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))


def asked(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def recipe(folder: Path) -> Path:
    shutil.copytree(RECIPES, folder, dirs_exist_ok=True)
    make_tiny_model(folder / "model", preset="0p5m", seed=0)
    return folder / "dpo.toml"


def num_steps(folder: Path) -> int:
    found = list((folder / "runs").glob("*-*/metrics.jsonl"))
    return len({row["step"] for path in found for row in metrics(path.parent) if "train/loss" in row["values"]})


def test_the_recipe_learns_and_trains_each_pair_once_a_pass(tmp_path: Path) -> None:
    file = recipe(tmp_path)
    sets = ("data.max_passes=6", 'eval.data="pairs.jsonl"', "eval.every=4")
    done = run("up", str(file), *(part for one in sets for part in ("--set", one)), folder=tmp_path, timeout_s=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\nloss: 0.693 -> " in done.stdout and "\nheld-out reward: " in done.stdout
    (run_dir,) = (tmp_path / "runs").glob("dpo-*")
    rows = [row["values"] for row in metrics(run_dir) if "train/loss" in row["values"]]
    assert len(rows) == 12
    assert rows[0]["train/loss"] == pytest.approx(math.log(2), abs=1e-5)  # the policy is its own reference
    assert rows[0]["train/margin"] == pytest.approx(0, abs=1e-5)
    assert rows[-1]["train/loss"] < 0.3
    assert rows[-1]["train/accuracy"] == 1.0
    assert rows[-1]["train/rewards/chosen"] > rows[-1]["train/rewards/rejected"]
    assert not any(name.startswith("reward/") for name in rows[-1])
    told = {row["step"]: row["values"] for row in metrics(run_dir) if "eval/loss" in row["values"]}
    assert told[0]["eval/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert told[12]["eval/accuracy"] == 1.0
    assert told[12]["eval/rewards/chosen"] - told[12]["eval/rewards/rejected"] == pytest.approx(
        told[12]["eval/margin"], abs=1e-5
    )
    with contextlib.closing(sqlite3.connect(run_dir / "ledger.sqlite")) as ledger:
        trained = ledger.execute("select draw, num_samples from groups where step >= 0 order by draw").fetchall()
    assert trained == [(draw, 2) for draw in range(48)]  # 8 rows, 6 passes


def killed_twice(folder: Path, file: Path, *more: str) -> Path:
    """The folder of a run of 40 steps that lost its trainer and its rollout actor."""
    sets = ("run.num_steps=40", "trainer.checkpoint_every=3", *more)
    with Command(["up", str(file), *(part for one in sets for part in ("--set", one))], folder) as process:
        for name, after in (("trainer/0", 5), ("rollout/0", 12)):
            wait_until(lambda after=after: num_steps(folder) > after, f"step {after}")
            os.kill(worker_pids(process.pid, name)[0], signal.SIGKILL)
        said, _ = process.communicate(timeout=200)
    assert process.returncode == 0, said
    (run_dir,) = (folder / "runs").glob("*-*")
    return run_dir


def example(folder: Path) -> None:
    shutil.copytree(EXAMPLE, folder, dirs_exist_ok=True)
    subprocess.run([sys.executable, "pairs.py"], cwd=folder, check=True, timeout=30)
    make_tiny_model(folder / "model", preset="0p5m", seed=0)


@pytest.mark.soak
def test_a_run_learns_what_the_reward_model_likes(tmp_path: Path) -> None:
    """The example's commands."""
    example(tmp_path)
    run_dir = tmp_path
    for name in ("reward", "rl"):
        done = run("up", f"{name}.toml", folder=tmp_path, timeout_s=140)
        assert done.returncode == 0, done.stdout + done.stderr
        (run_dir,) = (tmp_path / "runs").glob(f"{name}-*")
        if name == "reward":
            shutil.copytree(run_dir / "export", tmp_path / "judge")
    rewards = [row["values"]["reward/mean"] for row in metrics(run_dir) if "reward/mean" in row["values"]]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 1.5


def test_a_reward_model_is_trained_on_each_pair_once_through_kills_and_judges_others(tmp_path: Path) -> None:
    """The example, whose reward function then loads what was exported."""
    example(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "heldout.jsonl").read_text().splitlines()]
    too_long = {"prompt": "a", "chosen": "b" * 3000, "rejected": "c"}
    (tmp_path / "heldout.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (*rows, too_long)))
    run_dir = killed_twice(tmp_path, tmp_path / "reward.toml", "eval.every=4")  # a kill may end one of them
    with contextlib.closing(sqlite3.connect(run_dir / "ledger.sqlite")) as ledger:
        trained = ledger.execute("select draw, step from groups where step >= 0").fetchall()
    assert sorted(draw for draw, _ in trained) == list(range(640))
    shutil.copytree(run_dir / "export", tmp_path / "judge")
    score = runpy.run_path(str(tmp_path / "score.py"))["score"]

    def judged(row: dict[str, str], name: str) -> float:
        answer = Message(role="assistant", content=row[name])
        asked = (Message(role="user", content=row["prompt"]),)
        said = Completion(group_id=0, index=0, messages=asked, prompt="", text=row[name], conversation=(answer,))
        return score(said)

    right = [judged(row, "chosen") > judged(row, "rejected") for row in rows]
    assert sum(right) / len(right) > 0.7
    told = {row["step"]: row["values"] for row in metrics(run_dir) if "eval/loss" in row["values"]}
    assert told[0]["eval/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert told[40]["eval/accuracy"] == pytest.approx(sum(right) / len(right))
    assert told[40]["eval/num_errors"] == 1
    assert told[40]["eval/reward"] == told[40]["eval/accuracy"]
    assert len(told) >= 3


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2 + 3 =", "chosen": "5", "rejected": "23", "metadata": {"margin": "wide"}},
        {"prompt": asked("2 + 3 ="), "chosen": said("5"), "rejected": said("23")},
        {"chosen": asked("2 + 3 =") + said("5"), "rejected": asked("2 + 3 =") + said("23")},
        {"prompt": "2 + 3 =", "chosen": asked("2 + 3 =") + said("5"), "rejected": asked("2 + 3 =") + said("23")},
        {"chosen": "2 + 3 =5", "rejected": "2 + 3 =23"},
        {"question": "2 + 3 =", "answer": {"good": "5", "bad": said("23")}},
    ],
    ids=["texts", "messages", "no-prompt", "prompt-twice", "texts-without-prompt", "columns-of-other-names"],
)
def test_the_forms_of_a_pair_mean_the_same(tmp_path: Path, row: dict[str, object]) -> None:
    file = recipe(tmp_path)
    (tmp_path / "pairs.jsonl").write_text(json.dumps(row) + "\n")
    names = ("prompt_key=question", "chosen_key=answer.good", "rejected_key=answer.bad") if "question" in row else ()
    prompt = open_prompts(load_config(file, [f"data.{name}" for name in names])).prompt(0)
    assert [(one.role, one.content) for one in prompt.messages] == [("user", "2 + 3 =")]
    assert [[one["content"] for one in prompt.metadata[name]] for name in ("chosen", "rejected")] == [["5"], ["23"]]
    assert prompt.metadata["margin"] == 0.0


def test_a_pair_of_which_one_answer_is_too_long_is_left_out_whole(tmp_path: Path) -> None:
    file = recipe(tmp_path)
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c" * 5000}]
    rows += [{"prompt": f"{k} =", "chosen": f"{k}", "rejected": "no"} for k in range(8)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sets = ("run.num_steps=2", "data.shuffle=false", "data.max_passes=1")
    done = run("up", str(file), *(part for one in sets for part in ("--set", one)), folder=tmp_path, timeout_s=200)
    assert done.returncode == 0, done.stdout + done.stderr
    (run_dir,) = (tmp_path / "runs").glob("dpo-*")
    with contextlib.closing(sqlite3.connect(run_dir / "ledger.sqlite")) as ledger:
        found = ledger.execute("select draw, step from groups order by draw").fetchall()
    assert [draw for draw, step in found if step is not None and step >= 0] == list(range(1, 9))


def test_a_space_before_the_first_difference_belongs_to_the_answers(tmp_path: Path) -> None:
    """As in TRL: the tokens of a word begin with it."""
    file = recipe(tmp_path)
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"chosen": "2 + 3 = 5", "rejected": "2 + 3 = 23"}) + "\n")
    prompt = open_prompts(load_config(file)).prompt(0)
    assert prompt.messages[-1].content == "2 + 3 ="
    assert [prompt.metadata[name][0]["content"] for name in ("chosen", "rejected")] == [" 5", " 23"]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "a", "chosen": "b"}, 'column "rejected" is missing; the row has chosen, prompt'),
        ({"prompt": "a", "chosen": "", "rejected": "b"}, '"chosen" holds nothing'),
        ({"prompt": "a", "chosen": [], "rejected": "b"}, '"chosen" holds nothing'),
        ({"prompt": "a", "chosen": "b", "rejected": 7}, '"rejected" holds int'),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "gap": -1}, '"gap" holds -1'),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "gap": "2"}, "\"gap\" holds '2'"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "both answers are the same"),
        ({"chosen": "ab", "rejected": "abc"}, "beginning of the other"),
        ({"chosen": asked("a") + said("b"), "rejected": asked("c") + said("d")}, "no prompt"),
        ({"prompt": "a", "chosen": said("b"), "rejected": asked("d") + said("c")}, "does not begin with an assistant"),
        ({"chosen": said("b"), "rejected": said("c")}, "no prompt"),
    ],
)
def test_a_row_that_is_no_pair_is_refused_with_its_place(tmp_path: Path, row: dict[str, object], says: str) -> None:
    file = recipe(tmp_path)
    (tmp_path / "pairs.jsonl").write_text(json.dumps(row) + "\n")
    sets = ("algo.kind=reward", "data.margin_key=gap") if "gap" in row else ()
    with pytest.raises(DataError, match=says) as caught:
        open_prompts(load_config(file, sets))
    assert "pairs.jsonl" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("algo.loss=ppo", "algo.loss"),
        ("algo.kl_coef=0.1", "algo.kl_coef"),
        ("algo.label_smoothing=0.5", "algo.label_smoothing"),
        ("rollout.num_samples=4", "rollout.num_samples"),
        ("data.preset=chat", "data.preset"),
        ("eval.data=pairs.jsonl eval.num_samples=2", "eval.num_samples"),
        ("eval.every=2", "eval.every"),
        ("data.chosen_key=good data.preset=slime", "data.chosen_key"),
        ("algo.center_coef=0.1", "algo.center_coef"),
        ("data.margin_key=gap", "data.margin_key"),
        ("algo.loss=bradley_terry", "algo.loss"),
        ("algo.kind=reward algo.beta=0.2", "algo.beta"),
        ("algo.kind=reward algo.loss=dpo", "algo.loss"),
        ("algo.kind=reward algo.ref_path=model", "algo.ref_path"),
        ("algo.kind=reward roles.trainer.kind=megatron", "roles.trainer.kind"),
        ("algo.kind=reward trainer.impl=hf", "trainer.impl"),
        ("algo.kind=reward lora.rank=4", "lora.rank"),
    ],
)
def test_what_does_not_go_with_pairs_is_named(tmp_path: Path, change: str, says: str) -> None:
    with pytest.raises(MyxaError, match=says):
        load_config(recipe(tmp_path), change.split())
