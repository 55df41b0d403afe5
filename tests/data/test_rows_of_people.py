"""Rows as people have them: ShareGPT, TRL, gsm8k, lists of labels, odd text, and prompts that are too long (finding G)."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tests.data import token_layouts

from myxa.actors.data import PromptDataset, open_data, open_prompts
from myxa.core.config import RunConfig
from myxa.core.errors import DataError
from myxa.core.samples import Prompt

SFT: dict[str, Any] = {"algo": {"kind": "sft"}}


def opened(folder: Path, rows: list[Any], **sections: Any) -> PromptDataset:
    path = folder / "t.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    raw = {"model": {"path": "m"}, **sections}
    raw["data"] = {"train": str(path), "shuffle": False, **sections.get("data", {})}
    return open_prompts(RunConfig.model_validate(raw))


def first(folder: Path, row: Any, **sections: Any) -> Prompt:
    prompt = opened(folder, [row], **sections).prompt(0)
    assert prompt is not None
    return prompt


def said(prompt: Prompt) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in prompt.messages]


TALK = [{"from": "system", "value": "be brief"}, {"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]


@pytest.mark.parametrize("value", [TALK, json.dumps(TALK)])
def test_g_sharegpt_rows_are_conversations(tmp_path: Path, value: Any) -> None:
    prompt = first(tmp_path, {"id": "x", "conversations": value}, data={"preset": "chat"}, **SFT)
    assert said(prompt) == [("system", "be brief"), ("user", "2+2?")]
    assert prompt.metadata == {"demonstration": "4"}


def test_g_sharegpt_messages_in_a_named_column_and_in_a_prompt(tmp_path: Path) -> None:
    data = {"preset": "chat", "messages_key": "talk"}
    assert said(first(tmp_path, {"talk": TALK}, data=data, **SFT))[1] == ("user", "2+2?")
    assert said(first(tmp_path, {"prompt": TALK[:2], "label": "4"}))[1] == ("user", "2+2?")


def test_g_sharegpt_the_column_messages_comes_first(tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "own"}], "conversations": TALK, "label": "x"}
    assert said(first(tmp_path, row, data={"preset": "chat"})) == [("user", "own")]


def test_g_sharegpt_an_unknown_speaker_is_refused(tmp_path: Path) -> None:
    talk = [{"from": "human", "value": "?"}, {"from": "function_call", "value": "{}"}]
    with pytest.raises(DataError, match=r"t\.jsonl:1: message 2 of .* is from 'function_call' -- known are human"):
        first(tmp_path, {"conversations": talk}, data={"preset": "chat"}, **SFT)


@pytest.mark.parametrize("preset", ["slime", "plain"])
def test_g_trl_rows_have_their_completion_learnt(tmp_path: Path, preset: str) -> None:
    turns = [{"role": "assistant", "content": "4"}]
    row = {"prompt": [{"role": "user", "content": "2+2?"}], "completion": turns}
    data = {"preset": preset, "answer_key": "completion"}
    prompt = first(tmp_path, row, data=data, **SFT)
    assert (said(prompt), prompt.metadata) == ([("user", "2+2?")], {"demonstration_turns": turns})
    prompt = first(tmp_path, {"prompt": "2+2?", "completion": " 4"}, data=data, **SFT)
    assert prompt.metadata == {"demonstration": " 4"}
    with pytest.raises(DataError, match='column "completion" is missing'):
        first(tmp_path, {"prompt": "2+2?"}, data=data, **SFT)


def test_g_gsm8k_rows_by_their_columns(tmp_path: Path) -> None:
    row = {"question": "2+2?", "answer": "two and two #### 4"}
    prompt = first(tmp_path, row, data={"prompt_key": "question", "label_key": "answer"}, reward={"fn": "numeric"})
    assert (said(prompt), prompt.label) == ([("user", "2+2?")], "two and two #### 4")
    prompt = first(tmp_path, row, data={"prompt_key": "question", "answer_key": "answer"}, **SFT)
    assert prompt.metadata == {"demonstration": "two and two #### 4"}
    with pytest.raises(DataError, match='column "prompt" is missing; the row has answer, question'):
        first(tmp_path, row)


def test_g_a_list_of_accepted_labels_is_kept_whole(tmp_path: Path) -> None:
    assert json.loads(first(tmp_path, {"prompt": "?", "label": ["4", "four", 'a "b" \u00e9']}).label) == [
        "4", "four", 'a "b" \u00e9',
    ]  # fmt: skip


def test_a2_a_null_label_is_refused_where_a_function_of_the_users_gets_it(tmp_path: Path) -> None:
    row: dict[str, Any] = {"prompt": "2+2"}
    own = {"reward": {"fn": "mine.py:reward"}}
    with pytest.raises(DataError, match=r't\.jsonl:1: column "label" is null -- write "" for a row without'):
        first(tmp_path, row | {"label": None}, **own)
    assert first(tmp_path, row, **own).label == ""
    assert first(tmp_path, row | {"label": ""}, **own).label == ""


def test_a2_a_null_label_is_nothing_to_a_run_that_learns_demonstrations(tmp_path: Path) -> None:
    row = {"prompt": "2+2", "label": None, "answer": "4"}
    prompt = first(tmp_path, row, algo={"kind": "sft"}, rollout={"num_samples": 1}, data={"answer_key": "answer"})
    assert (prompt.label, prompt.metadata) == ("", {"demonstration": "4"})


@pytest.mark.parametrize(
    ("value", "label"),
    [
        (5, "5"), (-0.5, "-0.5"), (5.0, "5.0"), (True, "true"), (False, "false"), (0, "0"), ("", ""), (" 5 ", " 5 "),
        (2**53 + 1, "9007199254740993"), ([1, 2], "[1,2]"), ([], "[]"), ({"a": None}, '{"a":null}'), ([None], "[null]"),
    ],
)  # fmt: skip
def test_a2_a_label_that_is_no_text_arrives_as_json(tmp_path: Path, value: object, label: str) -> None:
    assert first(tmp_path, {"prompt": "?", "label": value}, reward={"fn": "mine.py:reward"}).label == label


@pytest.mark.parametrize(("value", "how"), [([], "without answers"), (["4", None], "that holds null")])
@pytest.mark.parametrize("fn", ["exact", "numeric", "math"])
def test_a2_a_list_of_labels_in_which_one_is_missing_is_refused(
    tmp_path: Path, value: object, how: str, fn: str
) -> None:
    with pytest.raises(DataError, match=f'column "label" is a list {how}, and the reward compares with it'):
        first(tmp_path, {"prompt": "?", "label": value}, reward={"fn": fn})


def test_a2_odd_text_arrives_as_written(tmp_path: Path) -> None:
    text = "\U0001f600 e\u0301 \u200b \u0000 \u2028 x"
    prompt = first(tmp_path, {"prompt": text, "label": "\U0001f600"})
    assert (said(prompt), prompt.label) == ([("user", text)], "\U0001f600")


@pytest.mark.parametrize("half", [r"\ud83d", r"\ude00", r"\ud83d\ud83d"])
def test_f7_a_lone_surrogate_is_named(tmp_path: Path, half: str) -> None:
    with pytest.raises(DataError, match=r"t\.jsonl:1: .*: \\ud.* is half a character \(a lone surrogate\)"):
        first(tmp_path, f'{{"prompt": "Name the {half} here", "label": "cat"}}')


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "nan", "1e999"])
def test_f7_numbers_that_json_has_not_are_named(tmp_path: Path, value: str) -> None:
    cause = "too large for float64" if value == "1e999" else f"JSON has no {value}"
    with pytest.raises(DataError, match=rf"t\.jsonl:1: .*{cause}"):
        first(tmp_path, f'{{"prompt": "?", "label": "4", "metadata": {{"d": {value}}}}}')


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    token_layouts.plain(folder)
    (folder / "config.json").write_text("{}")
    return str(folder)


LONG = {"prompt": "x " * 300, "label": "1"}
SHORT = {"prompt": "2+2", "label": "4"}


def test_g_over_long_prompts_are_dropped_at_the_start_and_counted(
    tmp_path: Path, model: str, caplog: pytest.LogCaptureFixture
) -> None:
    sections: dict[str, Any] = {
        "model": {"path": model},
        "data": {"overlong": "drop", "max_prompt_tokens": 200, "apply_chat_template": False},
    }
    dataset = opened(tmp_path, [SHORT, LONG, SHORT], **sections)
    assert (len(dataset), dataset.num_overlong) == (2, 1)
    assert "t.jsonl:2: the prompt has " in dataset.overlong_rows[0]
    assert "tokens, the limit is 200 (data.max_prompt_tokens)" in dataset.overlong_rows[0]
    assert [prompt.row for draw in range(2) if (prompt := dataset.prompt(draw))] == [0, 2]
    raw = {**sections, "data": {**sections["data"], "train": str(tmp_path / "t.jsonl")}}
    with caplog.at_level(logging.WARNING):
        open_data(RunConfig.model_validate(raw))
    assert "1 of 3 rows are left out because their prompts are too long; the first: " in caplog.text


def test_g_over_long_prompts_are_refused_on_demand(tmp_path: Path, model: str) -> None:
    data = {"overlong": "refuse", "apply_chat_template": False}
    engine = {"context_length": 200}
    with pytest.raises(DataError, match=r't\.jsonl:2: the prompt has .* the limit is 199 .* data\.overlong = "drop"'):
        opened(tmp_path, [SHORT, LONG], model={"path": model}, data=data, engine=engine, rollout={"max_new_tokens": 20})
    assert len(opened(tmp_path, [SHORT, LONG], data={"apply_chat_template": False})) == 2


def test_g_over_long_held_out_prompts_are_dropped_and_counted_or_refused(
    tmp_path: Path, model: str, caplog: pytest.LogCaptureFixture
) -> None:
    held_out = tmp_path / "h.jsonl"
    held_out.write_text("".join(json.dumps(row) + "\n" for row in (LONG, SHORT, SHORT, LONG)))
    data = {"overlong": "drop", "max_prompt_tokens": 200, "apply_chat_template": False}
    sections: dict[str, Any] = {"model": {"path": model}, "eval": {"data": str(held_out)}}
    with caplog.at_level(logging.WARNING):
        dataset = opened(tmp_path, [SHORT], data=data, **sections)
    assert [prompt.row for prompt in dataset.eval_prompts(9)] == [1, 2]
    assert (dataset.num_held_out(), dataset.num_overlong) == (2, 0)
    assert "eval.data: 2 of 4 rows are left out because their prompts are too long; the first: " in caplog.text
    assert "h.jsonl:4: the prompt has " in caplog.text
    with pytest.raises(DataError, match=r'h\.jsonl:1: the prompt has .* data\.overlong = "drop"'):
        opened(tmp_path, [SHORT], data=data | {"overlong": "refuse"}, **sections)
    sources = {"data": {"sources": {"a": {"path": str(tmp_path / "t.jsonl")}}, **data}, **sections}
    assert open_data(RunConfig.model_validate(sources)).num_held_out() == 2


def test_g_all_over_long_is_an_error(tmp_path: Path, model: str) -> None:
    data = {"overlong": "drop", "max_prompt_tokens": 200, "apply_chat_template": False}
    with pytest.raises(DataError, match=r"data\.train: no row is left, 2 are over-long; the first: .*t\.jsonl:1: "):
        opened(tmp_path, [LONG, LONG], model={"path": model}, data=data)


def test_g_a_limit_of_prompts_without_a_choice_is_refused() -> None:
    with pytest.raises(ValueError, match="needs overlong"):
        RunConfig.model_validate({"model": {"path": "m"}, "data": {"train": "x", "max_prompt_tokens": 5}})
