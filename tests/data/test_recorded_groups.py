"""Dumps as data: finished groups are rows that answer themselves, and what no run could train on is told by its place."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from tests.data.opened import open_prompts
from tests.harness.dumps import write_groups

from myxa.actors.data.recorded import Recording
from myxa.actors.models.tiny import make_tiny_model
from myxa.core.config import RunConfig
from myxa.core.errors import ConfigError, DataError
from myxa.core.messages import Assignment, SamplingParams
from myxa.core.samples import NO_VERSION, Group, Message, Prompt, Sample
from myxa.launch.checks.check import CheckedRun
from myxa.launch.checks.files import train_rows

CONTEXT = 32


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
    return write_groups(path, groups)


def config(model: Path, train: str | list[str], **sections: dict[str, Any]) -> RunConfig:
    raw: dict[str, Any] = {
        "model": {"path": str(model)},
        "rollout": {"num_samples": 2, "max_new_tokens": 8, **sections.pop("rollout", {})},
        **sections,
    }
    raw["data"] = {"train": train, "preset": "recorded", "shuffle": False, **sections.get("data", {})}
    return RunConfig.model_validate(raw)


def test_finished_groups_are_prompts_as_they_were_asked_in_the_dumps_order(model: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "d.sqlite", *(group(number) for number in range(4)))
    dataset = open_prompts(config(model, [path, f"{path}@[1:3]"]))
    found = [dataset.prompt(draw) for draw in range(len(dataset))]
    assert [prompt.messages[0].content for prompt in found if prompt] == [f"question {n}" for n in (0, 1, 2, 3, 1, 2)]
    last = found[-1]
    assert last is not None
    assert (last.group_id, last.row, last.source) == (5, 1, f"{path}@[1:3]")
    assert (last.label, last.tools) == ("label 2", ({"type": "function", "function": {"name": "add"}},))
    told = {"run": "first", "group": 2, "step": 0, "version": 3, "rewards": [0.5, -1.25]}
    assert last.metadata == {"level": 2, "recorded": told}


def told(model: Path, path: Path) -> str:
    """What is said of a dump: by the plan as by the buffer."""
    settings = config(model, str(path))
    with pytest.raises(DataError) as caught:
        open_prompts(settings)
    assert caught.value.remedy
    (finding,) = train_rows(CheckedRun(settings, ()))[""].findings
    assert str(finding.error) == str(caught.value)
    return str(caught.value).replace(str(path), "d.sqlite")


def changed(path: Path, sql: str, *values: Any) -> Path:
    """A copy of a dump, with that change."""
    copy = path.with_name("changed.sqlite")
    shutil.copyfile(path, copy)
    with closing(sqlite3.connect(copy)) as db, db:
        db.execute(sql, values)
    return copy


def test_files_that_are_no_dumps_and_damaged_ones_are_told(model: Path, tmp_path: Path) -> None:
    path = Path(write(tmp_path / "d.sqlite", group(0), group(1)))
    torn = changed(path, "UPDATE payloads SET data = substr(data, 1, 90) WHERE group_id = 1")
    said = told(model, torn)
    assert said.startswith("d.sqlite: group 1: payload of group 1 is damaged: ") and said.endswith("dump the run again")
    other = changed(path, "UPDATE meta SET value = '7' WHERE key = 'format'")
    assert "has format 7, this program reads 2 -- name a file that `myxa dump` wrote" in told(model, other)
    assert "the dump holds no groups -- dump a run that" in told(model, changed(path, "DELETE FROM payloads"))
    foreign = tmp_path / "f.sqlite"
    with closing(sqlite3.connect(foreign)) as db, db:
        db.execute("CREATE TABLE a(b)")
    assert "name a file that `myxa dump` wrote" in told(model, foreign)
    (tmp_path / "cut.sqlite").write_bytes(path.read_bytes()[:5000])
    assert "name a file that `myxa dump` wrote" in told(model, tmp_path / "cut.sqlite")
    (tmp_path / "p.jsonl").write_text('{"prompt": "1+1?", "label": "2"}\n')
    assert 'is not an SQLite file, as dumps of groups are -- preset = "recorded"' in told(model, tmp_path / "p.jsonl")
    with pytest.raises(DataError, match='is an SQLite file, as dumps of groups are -- preset = "recorded"'):
        open_prompts(config(model, str(path), data={"preset": "slime"}))
    with pytest.raises(ConfigError, match=r"there is no file .*none\.sqlite"):
        open_prompts(config(model, str(tmp_path / "none.sqlite")))


def answer(settings: RunConfig, draw: int = 0) -> Group:
    prompt = open_prompts(settings).prompt(draw)
    assert prompt is not None
    num_samples = settings.rollout.num_samples
    return Recording(settings).group(Assignment(prompt, attempt=1, num_samples=num_samples, sampling=SamplingParams()))


def test_a_group_answers_as_it_was_but_for_stamps_of_engines(model: Path, tmp_path: Path) -> None:
    """One with several samples of a rollout too, and one with a masked member."""
    first, second = group(0), group(1)
    helper = replace(second.samples[0], branch=1, prompt_ids=np.array([5, 6], np.int32))
    second = replace(
        second, samples=(second.samples[0], helper, second.samples[1]), rewards=np.array([3, 3, 4], np.float32)
    )
    masked = replace(group(2), samples=group(2).samples[1:], rewards=group(2).rewards[1:], num_masked=1)
    path = write(tmp_path / "d.sqlite", first, second, masked)
    settings = config(model, path, data={"max_passes": 2})
    for draw in range(6):
        was, found = (first, second, masked)[draw % 3], answer(settings, draw)
        assert (found.rewards.tolist(), found.num_masked) == (was.rewards.tolist(), was.num_masked)
        assert found.group_id == draw and found.prompt.metadata["level"] == draw % 3
        for one, recorded in zip(found.samples, was.samples, strict=True):
            assert (one.group_id, one.index, one.branch) == (draw, recorded.index, recorded.branch)
            assert one.oldest_version() == NO_VERSION
            for name in ("prompt_ids", "response_ids", "logprobs", "loss_mask"):
                assert np.array_equal(getattr(one, name), getattr(recorded, name)), name
    fewer = answer(config(model, path, rollout={"num_samples": 1}, algo={"kind": "ppo"}), 1)
    assert ([one.branch for one in fewer.samples], fewer.rewards.tolist()) == ([0, 1], [3, 3])


def beyond(one: Group) -> Group:
    samples = (replace(one.samples[0], response_ids=np.arange(312, 321, dtype=np.int32)), one.samples[1])
    return replace(one, samples=samples)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"rollout": {"num_samples": 3}}, ": group 0: not 3 samples are recorded -- lower rollout.num_samples"),
        ({"engine": {"context_length": 11}}, "sample 0 has more tokens than the context of 11"),
        ({"algo": {"ref_urls": ["http://h:1"], "kl_coef": 0.1}}, "sample 0 has no reference log-probs"),
        ({"data": {"train": "BEYOND"}}, "name the model that it was recorded with"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_this_run_cannot_have_is_told_by_its_place(
    model: Path, tmp_path: Path, sections: dict[str, Any], said: str
) -> None:
    is_beyond = "data" in sections
    path = write(tmp_path / "d.sqlite", beyond(group(0)) if is_beyond else group(0))
    with pytest.raises(DataError) as caught:
        answer(config(model, path, **({} if is_beyond else sections)))
    assert said in str(caught.value)
