"""examples/search: its index, its workflow with the tool's time, and a short run of its run files."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType

import pytest
from tests.data.opened import open_prompts
from tests.harness.commands import run as run_command
from tests.harness.group_runner import delta, runner_of
from tests.harness.scripts import loaded as loaded_script

from myxa.actors.models.tokenizer import FolderTokenizer, load_tokenizer
from myxa.actors.rewards.rewarder import Rewarder
from myxa.actors.user_code.functions import WORKFLOW, load_function
from myxa.core.config import load_config
from myxa.core.messages import Assignment, SamplingParams
from myxa.core.protocols import Delta, GenerateRequest

EXAMPLE = Path(__file__).parents[2] / "examples" / "search"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return loaded_script("examples/search/search.py")


@pytest.fixture(scope="module")
def folder(example: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `python search.py` makes, smaller."""
    path = tmp_path_factory.mktemp("search")
    example.main(path, num_rows=60, num_places=30)
    for name in ("sft.toml", "rl.toml", "search.py"):
        (path / name).write_text((EXAMPLE / name).read_text())
    return path


def test_the_tool_takes_whatever_the_model_writes(example: ModuleType, folder: Path) -> None:
    index = folder / "index.sqlite"
    place, things = next(iter(example.corpus(1, 30).items()))
    assert example.search(f"{place} ships", index).splitlines()[0] == f"{place} ships {things['ships']}"
    assert len(example.search(place, index).splitlines()) == example.NUM_PASSAGES
    for query in ("", " ", '"', "a AND", "NEAR(", "text:*", "x" * 100_000, "\x00", "nosuchword"):
        assert example.search(query, index) == "nothing", query[:20]


class Searcher:
    """A model that searches for the words of its question and answers with the first number; every other one guesses."""

    def __init__(self, tokenizer: FolderTokenizer) -> None:
        self._tokenizer = tokenizer

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        context = self._tokenizer.decode(request.input_ids.tolist(), skip_special=False)
        question = context.partition("<|user|>")[2].partition("?")[0]
        text = "<answer>1</answer>" if request.index % 2 else f"<search>{question}</search>"
        if request.turn > 1:
            text = f"<answer>{context.rpartition('<|tool|>')[2].split()[2]}</answer>"
        yield delta(self._tokenizer.encode(f"{text}<|end|>"), "stop")


async def test_its_passages_answer_and_their_time_is_the_tool_s(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    config, tokenizer = load_config([str(folder / "rl.toml")], ["model.path=model"]), load_tokenizer(folder / "model")
    (prompt,) = [one for draw in range(1) if (one := open_prompts(config).prompt(draw)) is not None]
    rewarder = Rewarder(config.reward)
    flow, turns = load_function(config.rollout.workflow, WORKFLOW).fn, config.rollout.max_turns
    runner = runner_of(flow, rewarder, tokenizer, Searcher(tokenizer).generate, max_turns=turns)
    sampling = SamplingParams(max_new_tokens=config.rollout.max_new_tokens)
    group = await runner.run(Assignment(prompt=prompt, attempt=0, num_samples=4, sampling=sampling))
    await rewarder.close()
    assert group.rewards.tolist() == [1.0, 0.0, 1.0, 0.0]
    assert [parts["searched"] for parts in group.reward_parts] == [1.0, 0.0, 1.0, 0.0]
    assert [message.role for message in group.samples[0].conversation()] == ["assistant", "tool", "assistant"]
    assert runner.seconds()["rollouts/tool"] > 0.0


@pytest.mark.timeout(240)
def test_it_is_planned_and_makes_steps(folder: Path) -> None:
    """With an untrained model, which does not search: what is learnt is in its README."""
    planned = run_command("plan", str(folder / "sft.toml"), folder=folder, timeout_s=60)
    assert planned.returncode == 0, planned.stdout + planned.stderr
    small = (
        "model.path=model",
        "run.num_steps=2",
        "algo.batch_size=2",
        "algo.group_filter=none",
        "eval.num_prompts=4",
        "rollout.max_groups=4",
    )
    more = (part for one in small for part in ("--set", one))
    done = run_command("up", str(folder / "rl.toml"), "--quiet", *more, folder=folder, timeout_s=180)
    assert done.returncode == 0, done.stdout + done.stderr
    (run_dir,) = [path for path in (folder / "runs").iterdir() if not path.is_symlink()]
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert max(row["step"] for row in rows if "train/loss" in row["values"]) == 2
    assert any(row["values"].get("time/rollouts/workflow", 0.0) > 0.0 for row in rows)
    assert any(row["values"].get("time/rollouts/engine", 0.0) > 0.0 for row in rows)
    names = {event["name"] for event in json.loads((run_dir / "trace.json").read_text())}
    assert names >= {"engine", "generate", "workflow"}, "what a rollout did is in the trace"
