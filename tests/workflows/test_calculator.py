"""examples/calculator in this process: its data, its workflow, its reward, its run files."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType

import pytest
from tests.data.opened import open_prompts
from tests.harness.group_runner import delta, runner_of
from tests.harness.scripts import loaded as loaded_script

from myxa.actors.models.tiny import make_tiny_model
from myxa.actors.models.tokenizer import FolderTokenizer, load_tokenizer
from myxa.actors.rewards.rewarder import Rewarder
from myxa.actors.user_code.functions import WORKFLOW, load_function
from myxa.actors.workflows import named
from myxa.actors.workflows.episode import Episode, ModelAccess, WorkflowContext
from myxa.core.config import RunConfig, load_config
from myxa.core.messages import Assignment, SamplingParams
from myxa.core.protocols import Delta, GenerateRequest
from myxa.core.samples import Prompt

EXAMPLE = Path(__file__).parents[2] / "examples" / "calculator"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return loaded_script("examples/calculator/calculator.py")


@pytest.fixture(scope="module")
def folder(example: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `python calculator.py` makes, smaller."""
    path = tmp_path_factory.mktemp("calculator")
    example.write(path / "data" / "train.jsonl", 60, seed=1)
    example.write(path / "data" / "heldout.jsonl", 8, seed=2)
    make_tiny_model(path / "model", preset="0p5m")
    make_tiny_model(path / "model-sft", preset="0p5m")
    for name in ("sft.toml", "rl.toml", "calculator.py"):
        (path / name).write_text((EXAMPLE / name).read_text())
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> FolderTokenizer:
    return load_tokenizer(folder / "model")


def loaded(folder: Path, name: str) -> tuple[RunConfig, list[Prompt]]:
    config = load_config([str(folder / name)], [])
    data = open_prompts(config)
    return config, [prompt for draw in range(len(data)) if (prompt := data.prompt(draw)) is not None]


async def test_demonstrations_have_turns_and_the_tool_s_replies(folder: Path, tokenizer: FolderTokenizer) -> None:
    config, prompts = loaded(folder, "sft.toml")
    nobody = ModelAccess(generate=None, sampling=SamplingParams(), context_length=128)  # pyright: ignore[reportArgumentType]
    num_right = 0
    for prompt in prompts:
        episode = Episode(prompt=prompt, index=0, tokenizer=tokenizer, model=nobody)
        sample = await named.replay_demonstration(
            WorkflowContext(episode=episode, tokenizer=tokenizer, max_turns=config.rollout.max_turns, index=0), prompt
        )
        turns = prompt.metadata["demonstration_turns"]
        assert sample.turns == tuple(turn["content"] for turn in turns if turn["role"] == "assistant")
        said = tokenizer.decode(sample.response_ids.tolist(), skip_special=False)
        written = "".join(f"<|{turn['role']}|>{turn['content']}<|end|>" for turn in turns)
        assert f"<|assistant|>{said}" == written
        num_right += sample.turns[-1] == prompt.label
    assert 0 < num_right < len(prompts) / 2, "most demonstrations are wrong somewhere"


class Solver:
    """A model that asks the tool and says what it replied; every other sample guesses."""

    def __init__(self, tokenizer: FolderTokenizer) -> None:
        self._tokenizer = tokenizer

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        context = self._tokenizer.decode(request.input_ids.tolist(), skip_special=False)
        _, index, turn = request.request_id.rsplit(".", 2)
        question = context.partition("<|user|>")[2].partition("=<|end|>")[0]
        text = "1" if int(index) % 2 else f"@{question}"
        if int(turn):
            text = context.rpartition("<|tool|>")[2].partition("<|end|>")[0]
        yield delta(self._tokenizer.encode(f"{text}<|end|>"), "stop")


async def test_the_tool_s_reply_answers(
    folder: Path, tokenizer: FolderTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    config, prompts = loaded(folder, "rl.toml")
    rewarder = Rewarder(config.reward)
    flow, turns = load_function(config.rollout.workflow, WORKFLOW).fn, config.rollout.max_turns
    runner = runner_of(flow, rewarder, tokenizer, Solver(tokenizer).generate, context_length=128, max_turns=turns)
    prompt = next(one for one in prompts if one.label != "1")
    sampling = SamplingParams(max_new_tokens=config.rollout.max_new_tokens)
    group = await runner.run(Assignment(prompt=prompt, attempt=0, num_samples=4, sampling=sampling))
    await rewarder.close()
    assert group.rewards.tolist() == [1.0, 0.0, 1.0, 0.0]
    assert [parts["used_tool"] for parts in group.reward_parts] == [1.0, 0.0, 1.0, 0.0]
    assert [message.role for message in group.samples[0].conversation()] == ["assistant", "tool", "assistant"]
    assert group.samples[0].turns[-1] == prompt.label
    assert int(group.samples[0].loss_mask.sum()) == sum(
        len(tokenizer.encode(f"{turn}<|end|>")) for turn in group.samples[0].turns
    )
