"""Every kind of bad data is told with its place, cause and remedy, or skipped and counted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from myxa.actors.data import jsonl, open_prompts, prompts, row_set
from myxa.actors.rollout.group_pull import DRAW_AT_ONCE
from myxa.core.config import RunConfig
from myxa.core.errors import ConfigError, DataError
from myxa.transport.session.frames import FrameLimits

GOOD = '{"prompt": "1+1?", "label": "2"}'
USER = '{"role": "user", "content": "hi"}'


def config(train: str, **sections: dict[str, Any]) -> RunConfig:
    raw: dict[str, Any] = {"model": {"path": "m"}, **sections}
    raw["data"] = {"train": train, **sections.get("data", {})}
    return RunConfig.model_validate(raw)


def failure(folder: Path, content: str | bytes, name: str = "t.jsonl", **sections: dict[str, Any]) -> str:
    file = folder / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError) as caught:
        open_prompts(config(str(file), **sections))
    assert caught.value.exit_code == 5
    return str(caught.value).replace(str(file), name)


BAD_LINES: list[tuple[str, str]] = [
    ('{"prompt": "a"', "the line is not JSON from column 15 on -- mend the line"),
    ("not json", "the line is not JSON from column 1 on -- mend the line"),
    (
        '{"prompt": NaN}',
        "the line is not JSON from column 12 on: JSON has no NaN -- write the value as a text, or null",
    ),
    ("[1, 2]", "the line holds an array, not a JSON object -- write one object per line"),
    ("null", "the line holds null, not a JSON object -- write one object per line"),
    ("3", "the line holds a number, not a JSON object -- write one object per line"),
    ("{", "the JSON goes over several lines -- write one object per line (`jq -c .` does it)"),
    (
        '{"question": "?", "promt": "a", "label": "b"}',
        'column "prompt" is missing; the row has label, promt, question -- name it with data.prompt_key; did you mean "promt"?',
    ),
    ("{}", 'column "prompt" is missing; the row has no columns -- name it with data.prompt_key'),
    (
        '{"prompt": "a", "answer": "b"}',
        'column "label" is missing; the row has answer, prompt -- name it with data.label_key',
    ),
    ('{"prompt": "a", "label": null}', 'column "label" is null -- fill it, or name another column with data.label_key'),
    ('{"prompt": null}', 'column "prompt" is null -- fill it, or name another column with data.prompt_key'),
    ('{"prompt": " "}', 'column "prompt" is empty -- fill it or leave the row out'),
    ('{"prompt": []}', 'column "prompt" is an empty list -- fill it or leave the row out'),
    (
        '{"prompt": 3}',
        (
            'column "prompt" holds int, not a text or a list of messages -- write a text or '
            '[{"role": "user", "content": "..."}]'
        ),
    ),
    ('{"prompt": ["a"]}', 'message 1 of "prompt" is not an object -- write {"role": ..., "content": ...}'),
    (
        f'{{"prompt": [{USER}, {{"content": "x"}}]}}',
        'message 2 of "prompt" has no role -- write {"role": ..., "content": ...}',
    ),
    (
        '{"prompt": [{"role": "user", "content": [{"type": "text"}]}]}',
        (
            'message 1 of "prompt" has a part that is no text (an image?) -- only text is trained on: write '
            '{"type": "text", "text": "..."}, or leave such rows out'
        ),
    ),
    (
        '{"prompt": [{"role": "user", "content": 3}]}',
        'message 1 of "prompt" has no text as content -- write {"role": ..., "content": ...}',
    ),
    (
        '{"prompt": [{"role": "user", "content": "x", "tool_calls": [1], "name": ""}]}',
        (
            'tool_calls of message 1 of "prompt" is not a list of objects -- '
            'write [{"type": "function", "function": {...}}]'
        ),
    ),
    (
        '{"prompt": [{"role": "user", "content": "x", "images": ["a.png"], "name": ""}]}',
        ('message 1 of "prompt" holds images: only text is trained on -- leave such rows out'),
    ),
    (
        '{"prompt": "x", "tools": "{"}',
        'column "tools" holds a text that is not JSON: unexpected end of data: line 1 column 2 (char 1) -- write a list of tools',
    ),
    (
        '{"prompt": "x", "tools": ["search"]}',
        'column "tools" is not a list of objects -- write a list of tools: [{"type": "function", "function": {...}}]',
    ),
    (
        '{"prompt": [{"role": "system", "content": "s"}, {"role": "assistant", "content": "x"}], "label": "b"}',
        (
            'the prompt in "prompt" ends with a message from assistant: there is nothing to answer -- '
            'end it with a user message, or use preset = "chat" if the last message is the answer'
        ),
    ),
    (
        '{"prompt": "a", "label": "b", "metadata": "x"}',
        'column "metadata" holds str, not an object -- make it an object, or name another column with data.metadata_key',
    ),
]


@pytest.mark.parametrize(("line", "expected"), BAD_LINES, ids=[str(i) for i in range(len(BAD_LINES))])
def test_a_bad_line_is_told_with_its_place(tmp_path: Path, line: str, expected: str) -> None:
    assert failure(tmp_path, f"{GOOD}\n\n{line}\n{GOOD}\n") == f"t.jsonl:3: {expected}"


@pytest.mark.parametrize("line", [line for line, _ in BAD_LINES])
def test_a_bad_line_is_skipped_and_counted_on_demand(tmp_path: Path, line: str) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text(f"{GOOD}\n{line}\n{GOOD}\n")
    dataset = open_prompts(config(str(file), data={"on_bad_line": "skip", "shuffle": False}))
    assert (len(dataset), dataset.num_bad) == (2, 1)
    assert dataset.bad_rows[0].startswith(f"{file}:2: ")
    rows = [dataset.prompt(draw) for draw in range(2)]
    assert [prompt.row for prompt in rows if prompt] == [0, 2]


def test_presets_say_what_they_miss(tmp_path: Path) -> None:
    row = '{"prompt": "a", "reward_model": {"style": "rule", "ground_thruth": "x"}}'
    assert failure(tmp_path, row, data={"preset": "verl"}) == (
        't.jsonl:1: column "reward_model.ground_truth" is missing; "reward_model" has ground_thruth, style -- '
        'name it with data.label_key; did you mean "ground_thruth"?'
    )
    assert failure(tmp_path, '{"message": []}', data={"preset": "chat"}) == (
        't.jsonl:1: column "messages" is missing; the row has message -- '
        'name it with data.messages_key; did you mean "message"?'
    )
    sft: dict[str, Any] = {"algo": {"kind": "sft"}, "data": {"preset": "chat"}}
    assert failure(tmp_path, f'{{"messages": [{USER}]}}', **sft) == (
        't.jsonl:1: the last message of "messages" is from user: there is no demonstration -- '
        "end the conversation with an assistant message, or name a column with data.answer_key"
    )
    only = '{"messages": [{"role": "assistant", "content": "x"}]}'
    assert 'the prompt in "messages" ends with a message from none' in failure(tmp_path, only, **sft)
    wide = "{" + ", ".join(f'"c{i:02}": 1' for i in range(20)) + "}"
    shown = ", ".join(f"c{i:02}" for i in range(12))
    assert f"the row has {shown}, ... -- " in failure(tmp_path, wide)


def test_a_label_may_be_missing_when_nothing_compares_with_it(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text('{"prompt": "a"}\n')
    dataset = open_prompts(config(str(file), reward={"fn": "format"}))
    prompt = dataset.prompt(0)
    assert prompt is not None
    assert prompt.label == ""
    assert 'column "answer" is missing' in failure(
        tmp_path, '{"prompt": "a"}', reward={"fn": "format"}, data={"label_key": "answer"}
    )


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "t.jsonl: the file is empty -- write one JSON object per line"),
        (b"\n \n\r\n", "t.jsonl: the file holds no rows -- write one JSON object per line"),
        (b'{"prompt": "\xff"}', "t.jsonl:1: the line is not UTF-8 (byte 13 of it) -- save the file as UTF-8"),
        (
            b"\x1f\x8b\x08\x00",
            "t.jsonl: is cut off: its gzip data ends in the middle -- copy it again; `gzip -t` checks it",
        ),
    ],
)
def test_a_file_that_is_not_jsonl(tmp_path: Path, content: bytes, expected: str) -> None:
    assert failure(tmp_path, content) == expected


def test_an_over_long_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", 100)
    long = '{"prompt": "' + "a" * 450 + '", "label": "x"}'
    assert failure(tmp_path, f"{GOOD}\n{long}\n{GOOD}\n") == (
        "t.jsonl:2: the line has 479 bytes, the limit is 100 -- is the file one JSON value without line ends?"
    )
    dataset = open_prompts(config(str(tmp_path / "t.jsonl"), data={"on_bad_line": "skip"}))
    assert (len(dataset), dataset.num_bad) == (2, 1)


def test_rows_that_no_message_would_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fits = FrameLimits().body - (8 << 20)  # the rest is room for what surrounds them
    assert fits >= DRAW_AT_ONCE * row_set.MAX_ROW_BYTES
    assert fits >= prompts.MAX_HELD_OUT_BYTES
    monkeypatch.setattr(row_set, "MAX_ROW_BYTES", 200)
    monkeypatch.setattr(prompts, "MAX_HELD_OUT_BYTES", 200)
    large = f'{{"prompt": "a", "label": "b", "metadata": {{"tests": "{"x" * 200}"}}}}'
    assert failure(tmp_path, f"{GOOD}\n{large}\n").startswith(
        "t.jsonl:2: prompt, label and metadata come to 280 bytes, the limit is 200 -- keep what is large in a file"
    )
    file = tmp_path / "t.jsonl"
    assert len(open_prompts(config(str(file), data={"on_bad_line": "skip"}))) == 1
    file.write_text(f"{GOOD}\n" * 3)
    with pytest.raises(DataError, match=r"eval\.data: 3 rows, .* come to \d+ bytes, the limit is 200 -- lower eval"):
        open_prompts(config(str(file), eval={"data": str(file)}))
    assert open_prompts(config(str(file), eval={"data": str(file), "num_prompts": 2})).eval_prompts(5)


def test_deep_nesting_is_refused_not_a_crash(tmp_path: Path) -> None:
    deep = '{"prompt": "a", "label": "x", "metadata": {"m": ' + "[" * 5000 + "]" * 5000 + "}}"
    assert "t.jsonl:1: the line is not JSON" in failure(tmp_path, deep)
    shallower = '{"prompt": "a", "label": "x", "metadata": {"m": ' + "[" * 500 + "]" * 500 + "}}"
    assert 'column "metadata" cannot be written as JSON' in failure(tmp_path, shallower)


def test_slices_and_skipping_that_leave_nothing(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text(f"{GOOD}\n{GOOD}\n")
    with pytest.raises(DataError) as caught:
        open_prompts(config(f"{file}@[5:9]"))
    assert str(caught.value) == f"{file}@[5:9]: the slice is empty; the file has 2 rows -- mend the slice"
    file.write_text("x\ny\n")
    with pytest.raises(DataError) as caught:
        open_prompts(config(str(file), data={"on_bad_line": "skip"}))
    assert str(caught.value) == (
        f"data.train: none of the 2 rows is good; the first: {file}:1: the line is not JSON from column 1 on -- mend them, "
        "or see whether data.preset is right"
    )


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(GOOD)
    with pytest.raises(ConfigError) as caught:
        open_prompts(config(str(tmp_path / "trian.jsonl")))
    assert str(caught.value) == (
        f"data.train: there is no file {tmp_path}/trian.jsonl -- check data.train; its folder holds train.jsonl"
    )
    with pytest.raises(ConfigError, match=r"there is no folder .*/none"):
        open_prompts(config(str(tmp_path / "none" / "x.jsonl")))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"data\.train: .*pipe is a pipe or a device -- write what it gives"):
        open_prompts(config(str(tmp_path / "pipe")))
    with pytest.raises(ConfigError, match=r"eval\.data: there is no file"):
        open_prompts(config(str(tmp_path / "train.jsonl"), eval={"data": str(tmp_path / "x"), "every": 1}))


def test_bad_parquet(tmp_path: Path) -> None:
    file = tmp_path / "t.parquet"
    file.write_bytes(b"PAR1 and then nonsense")
    with pytest.raises(DataError, match=r"t\.parquet: is not a readable parquet file: .* -- write it again"):
        open_prompts(config(str(file)))
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), file)
    with pytest.raises(DataError, match=r"t\.parquet: the file holds no rows -- name a file with rows"):
        open_prompts(config(str(file)))
    pq.write_table(pa.table({"question": ["a"], "label": ["b"], "prompts": ["c"]}), file)
    with pytest.raises(DataError) as caught:
        open_prompts(config(str(file)))
    assert str(caught.value) == (
        f'{file}, row 0: column "prompt" is missing; the row has label, prompts, question -- '
        'name it with data.prompt_key; did you mean "prompts"?'
    )


def test_rows_that_change_during_the_run(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text(f"{GOOD}\n{GOOD}\n")
    dataset = open_prompts(config(str(file), data={"shuffle": False}))
    assert dataset.prompt(0) is not None
    file.write_text(f"{GOOD}\n{GOOD.replace('2', '3')}\n")
    assert dataset.prompt(0) is not None
    with pytest.raises(DataError) as caught:
        dataset.prompt(1)
    assert str(caught.value) == f"{file}:2: the row has changed since the run started -- leave data alone during a run"
    file.write_text("")
    with pytest.raises(DataError, match=r":1: the row has changed"):
        dataset.prompt(0)
