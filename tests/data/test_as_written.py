"""Every value of a row arrives as it was written, or the row is refused by name (findings A2 and F7)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from myxa.actors.data import open_prompts
from myxa.core.config import RunConfig
from myxa.core.errors import DataError
from myxa.core.samples import Prompt


def first(path: Path, **data: Any) -> Prompt:
    rows = open_prompts(RunConfig.model_validate({"model": {"path": "m"}, "data": {"train": str(path), **data}}))
    prompt = rows.prompt(0)
    assert prompt is not None
    return prompt


def line(folder: Path, text: str) -> Path:
    path = folder / "t.jsonl"
    path.write_text(text + "\n")
    return path


def parquet(folder: Path, row: dict[str, Any]) -> Path:
    path = folder / "t.parquet"
    pq.write_table(pa.Table.from_pylist([row]), path)
    return path


@pytest.mark.parametrize(
    ("number", "cause"),
    [
        ("0.12345678901234567890123", "rounded"),
        ("9007199254740993.0", "rounded"),
        ("1e-400", "rounded"),
        ("36893488147419103232", '"label"'),
        ('{"a": 1, "a": 2}', '"a" comes twice'),
    ],
)
def test_a2_a_number_or_key_that_would_be_lost_is_refused(tmp_path: Path, number: str, cause: str) -> None:
    with pytest.raises(DataError) as caught:
        first(line(tmp_path, f'{{"prompt": "?", "label": {number}}}'))
    assert "t.jsonl:1: " in str(caught.value)
    assert cause in str(caught.value)


@pytest.mark.parametrize(
    "number", ["9007199254740993", "18446744073709551615", "0.1", "-2.5e-7", "1e22", "0.10000000000000001"]
)
def test_a2_numbers_arrive_exactly(tmp_path: Path, number: str) -> None:
    label = first(line(tmp_path, f'{{"prompt": "?", "label": {number}}}')).label
    assert label == number or float(label) == float(number)
    assert "." in number or "e" in number or label == number


@pytest.mark.parametrize("value", [float("nan"), float("inf"), b"\x00"])
@pytest.mark.parametrize("column", ["label", "metadata"])
def test_a2_parquet_values_that_json_has_not_are_refused(tmp_path: Path, value: object, column: str) -> None:
    row = {"prompt": "?", "label": "x", column: {"m": value} if column == "metadata" else value}
    with pytest.raises(DataError, match=rf't.parquet, row 0: column "{column}" holds '):
        first(parquet(tmp_path, row))


@pytest.mark.parametrize("column", ["images", "videos", "audios"])
@pytest.mark.parametrize("preset", ["slime", "plain"])
def test_a2_images_column_is_refused(tmp_path: Path, column: str, preset: str) -> None:
    row = {"prompt": "<image>How many sides?", "label": "3", column: [{"bytes": b"PNG", "path": None}]}
    with pytest.raises(DataError, match=f't.parquet, row 0: column "{column}" is not empty'):
        first(parquet(tmp_path, row), preset=preset)
    assert first(parquet(tmp_path, {**row, column: []}), preset=preset).label == "3"


def call(city: str | None) -> list[dict[str, Any]]:
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"city": city, "expr": "1"}}}]
    return [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "user", "content": "on"},
    ]


def test_a2_nulls_in_tool_calls_and_tools_of_parquet_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match='row 0: tool calls in column "prompt" hold null'):
        first(parquet(tmp_path, {"prompt": call(None), "label": "x"}))
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"a": None, "b": 1}}}]
    with pytest.raises(DataError, match='row 0: tools in column "tools" hold null'):
        first(parquet(tmp_path, {"prompt": "?", "label": "x", "tools": tools}))


def test_a2_the_remedy_json_text_keeps_nulls_as_written(tmp_path: Path) -> None:
    wanted = call(None)
    text = msgspec.json.encode(wanted).decode()
    prompt = first(parquet(tmp_path, {"prompt": text, "label": "x"}))
    assert list(prompt.messages[1].tool_calls) == wanted[1]["tool_calls"]


def test_a2_a_conversation_as_json_text_is_parsed(tmp_path: Path) -> None:
    text = r"[{\"role\": \"system\", \"content\": \"be brief\"}, {\"role\": \"user\", \"content\": \"2+2\"}]"
    path = line(tmp_path, f'{{"prompt": "{text}", "label": "4"}}')
    assert [(one.role, one.content) for one in first(path).messages] == [("system", "be brief"), ("user", "2+2")]
    assert len(first(path, apply_chat_template=False).messages) == 1
    assert first(line(tmp_path, r'{"prompt": "?", "label": "4", "metadata": "{\"level\": 2}"}')).metadata == {
        "level": 2
    }


@pytest.mark.parametrize("text", ["[1, 2] is a list", "[1, 2]", "[]", "[0.12345678901234567890123]"])
def test_a2_other_text_in_brackets_stays_text(tmp_path: Path, text: str) -> None:
    (message,) = first(line(tmp_path, f'{{"prompt": "{text}", "label": "4"}}')).messages
    assert message.content == text


def test_a5_all_held_out_rows_are_evaluated_and_those_left_out_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "h.jsonl"
    path.write_text("".join(f'{{"prompt": "{row}", "label": "1"}}\n' for row in range(100)))
    raw: dict[str, Any] = {"model": {"path": "m"}, "data": {"train": str(path)}, "eval": {"data": str(path)}}
    rows = open_prompts(RunConfig.model_validate(raw))
    assert len(rows.eval_prompts(RunConfig.model_validate(raw).eval.num_prompts)) == 100
    assert not caplog.messages
    raw["eval"]["num_prompts"] = 64
    assert open_prompts(RunConfig.model_validate(raw)).num_held_out() == 100
    assert "64" in caplog.text and "36" in caplog.text
