"""Dumps as data: finished groups are rows, and what no run could train on is told by its line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from tests.data.opened import open_prompts
from tests.harness.dumps import write_groups
from tests.harness.group_runner import runner_of

from myxa.actors.data import Dataset, open_data
from myxa.actors.data.recorded import RecordedAnswers
from myxa.actors.models.tiny import make_tiny_model
from myxa.actors.models.tokenizer import load_tokenizer
from myxa.actors.rewards.rewarder import make_rewarder
from myxa.actors.rollout.group_runner import GroupRunner
from myxa.actors.workflows.turn_renderer import TurnRenderer
from myxa.core.config import RunConfig, load_config
from myxa.core.errors import DataError
from myxa.core.messages import Assignment, SamplingParams
from myxa.core.samples import NO_VERSION, Group, Message, Prompt, Sample
from myxa.launch.checks.check import CheckedRun
from myxa.launch.checks.files import train_rows

CONTEXT = 32
Line = dict[str, Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder, "0p5m", seed=0, context_length=CONTEXT, vocab_size=320)
    return folder


def sample(group_id: int, index: int) -> Sample:
    """Four tokens of the model's, two of a reply, three of the model's."""
    mask = np.array([1, 1, 1, 1, 0, 0, 1, 1, 1], dtype=np.uint8)
    return Sample(
        group_id=group_id,
        index=index,
        prompt_ids=np.array([1, 2, group_id], dtype=np.int32),
        response_ids=np.arange(10, 19, dtype=np.int32),
        logprobs=np.where(mask == 1, -0.5 - index, 0).astype(np.float32),
        loss_mask=mask,
        versions=np.where(mask == 1, 3, -1).astype(np.int32),
        finish="stop",
        num_turns=2,
    )


def group(group_id: int, *messages: Message) -> Group:
    prompt = Prompt(
        group_id=group_id,
        row=7,
        pass_index=2,
        messages=messages or (Message(role="user", content=f"question {group_id}"),),
        tools=({"type": "function", "function": {"name": "add"}},),
        label=f"label {group_id}",
        metadata={"level": group_id},
        source="first.jsonl",
    )
    rewards = np.array([0.5, -1.25], dtype=np.float32)
    return Group(prompt=prompt, samples=tuple(sample(group_id, index) for index in range(2)), rewards=rewards)


def write(path: Path, *groups: Group) -> str:
    return write_groups(path, groups, lambda number: 4)


def config(model: Path, train: str | list[str], **sections: dict[str, Any]) -> RunConfig:
    raw: dict[str, Any] = {
        "model": {"path": str(model)},
        "roles": {"rollout": {"kind": "recorded"}},
        "rollout": {"num_samples": 2, "max_new_tokens": 8, **sections.pop("rollout", {})},
        "reward": {"fn": "recorded"},
        **sections,
    }
    raw["data"] = {"train": train, **sections.get("data", {})}
    return RunConfig.model_validate(raw)


def test_finished_groups_are_prompts_as_they_were_asked_in_the_dumps_order(model: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", *(group(number) for number in range(4)))
    dataset = open_prompts(config(model, [path, f"{path}@[1:3]"]))
    found = [dataset.prompt(draw) for draw in range(len(dataset))]
    assert [prompt.messages[0].content for prompt in found if prompt] == [f"question {n}" for n in (0, 1, 2, 3, 1, 2)]
    last = found[-1]
    assert last is not None
    assert (last.group_id, last.row, last.source) == (5, 1, f"{path}@[1:3]")
    assert (last.label, last.tools) == ("label 2", ({"type": "function", "function": {"name": "add"}},))
    told = {"run": "first", "group": 2, "step": 4, "version": 3, "rewards": [0.5, -1.25]}
    assert last.metadata == {"level": 2, "recorded": told}


def test_plain_texts_are_plain_texts_again(model: Path, tmp_path: Path) -> None:
    texts = write(tmp_path / "d.jsonl", group(0))
    dataset = open_prompts(config(model, texts, data={"apply_chat_template": False}))
    prompt = dataset.prompt(0)
    assert prompt is not None and prompt.messages == (Message(role="user", content="question 0"),)
    talk = write(tmp_path / "t.jsonl", group(0, Message(role="system", content="s"), Message(role="user", content="q")))
    with pytest.raises(DataError, match=r"t.jsonl:2: .* not the text that data.apply_chat_template = false wants"):
        open_prompts(config(model, talk, data={"apply_chat_template": False}))


def test_prompts_of_dumps_are_data_for_an_engine_too(model: Path, tmp_path: Path) -> None:
    """Whatever their answers were like."""
    first, second = write(tmp_path / "a.jsonl", group(0)), write(tmp_path / "b.jsonl", group(1))
    (tmp_path / "run.toml").write_text(
        f'[model]\npath = "{model}"\n[rollout]\nnum_samples = 16\ntemperature = 0.5\n[data.sources]\n'
        f'a = {{ path = "{first}", preset = "recorded" }}\nb = {{ path = "{second}", preset = "recorded" }}\n'
    )
    settings = load_config(tmp_path / "run.toml")
    dataset = open_data(settings)
    assert isinstance(dataset, Dataset)
    prompt = dataset.by_name["b"].prompt(0)
    assert prompt is not None
    assert (prompt.label, prompt.source_name, prompt.metadata["data_source"]) == ("label 1", "b", "b")


def lines(path: str) -> list[Line]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def told(model: Path, path: Path, text: str, **sections: dict[str, Any]) -> str:
    """What is said of a dump with this content: by the plan as by the buffer."""
    path.write_text(text)
    settings = config(model, str(path), **sections)
    with pytest.raises(DataError) as caught:
        open_prompts(settings)
    assert caught.value.remedy
    (finding,) = train_rows(CheckedRun(settings, ()))[""].findings
    assert str(finding.error) == str(caught.value)
    return str(caught.value).replace(str(path), "d.jsonl")


def of_sample(key: str, value: Any) -> Callable[[Line], None]:
    return lambda line: line["group"]["samples"][1].update({key: value})


def of_group(key: str, value: Any) -> Callable[[Line], None]:
    return lambda line: line["group"].update({key: value})


WHERE = "$.group.samples[1]."
BAD: list[tuple[Callable[[Line], None], str]] = [
    (of_sample("response_ids", [1, 2]), "sample 1/1: logprobs has shape (9,)"),
    (of_sample("logprobs", [-0.5]), "sample 1/1: logprobs has shape (1,)"),
    (of_sample("logprobs", [-1e300] * 9), "sample 1/1: a behaviour log-prob"),
    (of_sample("logprobs", [0.5] * 9), "sample 1/1: a behaviour log-prob"),
    *(
        (of_sample("response_ids", value), f"{WHERE}response_ids")
        for value in ([1.5] * 9, [1 << 40] * 9, [[1]] * 9, "abc")
    ),
    (of_sample("logprobs", [None] * 9), f"{WHERE}logprobs"),
    (of_sample("finish", "abort"), "sample 1 was not finished"),
    (of_sample("finish", "eos"), f"{WHERE}finish"),
    (of_sample("colour", "red"), "`colour`"),
    *((of_group("rewards", value), "2 samples have rewards") for value in ([1.0], [1.0, 1e300])),
    (of_group("samples", []), "0 samples have rewards"),
    (of_group("prompt", None), "$.group.prompt"),
    (lambda line: line.pop("state"), "`state`"),
    (lambda line: line["group"]["prompt"].update(messages=[]), '"messages"'),
]


@pytest.mark.parametrize(("change", "named"), BAD, ids=[f"{at} {named[:40]}" for at, (_, named) in enumerate(BAD)])
def test_a_line_that_no_run_can_be_answered_from_is_told(
    model: Path, tmp_path: Path, change: Callable[[Line], None], named: str
) -> None:
    path = tmp_path / "d.jsonl"
    found = lines(write(path, group(0), group(1)))
    change(found[2])
    said = told(model, path, "".join(json.dumps(line) + "\n" for line in found))
    assert said.startswith("d.jsonl:3: ") and named in said


def test_torn_files_and_other_files_are_told(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    text = Path(write(path, group(0), group(1))).read_text()
    header = text.partition("\n")[0]
    assert told(model, path, text[:-40]).startswith("d.jsonl:3: is no dumped group: Input data was truncated -- use")
    assert "d.jsonl:4: is no dumped group: JSON is malformed" in told(model, path, text + "\x00\n")
    assert "d.jsonl:4: is no dumped group: " in told(model, path, text + "[" * 100_000 + "\n")
    assert "the dump holds no groups -- dump a run that" in told(model, path, header + "\n")
    assert "d.jsonl is no dump of groups: " in told(model, path, '{"prompt": "1+1?", "label": "2"}\n')
    assert "this version reads 'myxa-groups/2' -- write a new one" in told(model, path, text.replace("ups/2", "ups/7"))
    (tmp_path / "p.parquet").write_bytes(b"PAR1" + b"\0" * 100)
    with pytest.raises(DataError, match=r"p.parquet is no dump of groups"):
        open_prompts(config(model, str(tmp_path / "p.parquet")))


def answers_of(settings: RunConfig, model: Path) -> GroupRunner:
    tokenizer = load_tokenizer(model, settings.data)
    return runner_of(RecordedAnswers(settings), make_rewarder(settings), tokenizer, context_length=CONTEXT)


def asked_as(model: Path, one: Group) -> Group:
    """With the prompt's tokens of that model."""
    ids = TurnRenderer(load_tokenizer(model)).prompt(one.prompt)
    return replace(one, samples=tuple(replace(sample, prompt_ids=ids) for sample in one.samples))


async def test_the_samples_of_a_dump_answer_without_an_engine_several_of_a_rollout_too(
    model: Path, tmp_path: Path
) -> None:
    first, second = (asked_as(model, replace(group(n), prompt=replace(group(n).prompt, tools=()))) for n in (0, 1))
    helper = replace(second.samples[0], branch=1, prompt_ids=np.array([5, 6], np.int32))
    second = replace(
        second, samples=(second.samples[0], helper, second.samples[1]), rewards=np.array([3, 3, 4], np.float32)
    )
    path = write(tmp_path / "d.jsonl", first, second)
    settings = config(model, path, data={"max_passes": 2})
    dataset, runner = open_prompts(settings), answers_of(settings, model)
    for draw in range(4):
        prompt, was = dataset.prompt(draw), (first, second)[draw % 2]
        assert prompt is not None
        given = Assignment(prompt=prompt, attempt=1, num_samples=2, sampling=SamplingParams())
        found = await runner.run(given)
        assert found.rewards.tolist() == was.rewards.tolist()
        for one, recorded in zip(found.samples, was.samples, strict=True):
            assert (one.group_id, one.index, one.branch) == (draw, recorded.index, recorded.branch)
            assert one.oldest_version() == NO_VERSION
            for name in ("prompt_ids", "response_ids", "logprobs", "loss_mask"):
                assert np.array_equal(getattr(one, name), getattr(recorded, name)), name


@pytest.mark.parametrize(
    ("num_samples", "context", "breaks", "said"),
    [
        (3, CONTEXT, False, "d.jsonl:2: no sample 2 is recorded -- lower rollout.num_samples"),
        (2, CONTEXT, True, "d.jsonl:2: is no dumped group: "),
        (2, 11, False, "sample 0 has more tokens than the context of 11"),
        (1, CONTEXT, False, "d.jsonl:2: its prompt was asked by other tokens than this run asks by -- name the model"),
    ],
)
async def test_what_cannot_answer_is_told_by_its_place(
    model: Path, tmp_path: Path, num_samples: int, context: int, breaks: bool, said: str
) -> None:
    path = tmp_path / "d.jsonl"
    one = group(0) if num_samples == 1 else asked_as(model, group(0))
    settings = config(model, write(path, one), engine={"context_length": context})
    prompt = open_prompts(settings).prompt(0)
    assert prompt is not None
    runner = answers_of(settings, model)
    if breaks:
        path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(DataError) as caught:
        await runner.run(Assignment(prompt=prompt, attempt=1, num_samples=num_samples, sampling=SamplingParams()))
    assert said in str(caught.value)
