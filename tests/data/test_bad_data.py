"""Every kind of bad data is told with its place, cause and remedy, or skipped and counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.data.opened import open_prompts, prompts, run_on

from myxa.actors.data import prompts as prompts_module
from myxa.actors.rollout.rollout import DRAW_AT_ONCE
from myxa.core.errors import ConfigError, DataError
from myxa.transport.session.frames import FrameLimits

GOOD = '{"prompt": "1+1?", "label": "2"}'
USER = '{"role": "user", "content": "hi"}'


def failure(folder: Path, content: str | bytes, name: str = "t.jsonl", **sections: dict[str, Any]) -> str:
    file = folder / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError) as caught:
        open_prompts(run_on(str(file), **sections))
    assert caught.value.exit_code == 5
    return str(caught.value).replace(str(file), name)


BAD_LINES: dict[str, str] = {
    "not json": "column 1",
    '{"prompt": NaN}': "NaN",
    "null": "it is no JSON object: null",
    "3": "it is no JSON object: 3",
    "{}": '"prompt" is missing',
    '{"prompt": "a", "answer": "b"}': "data.label_key",  # the reward compares with it
    '{"prompt": null}': '"prompt" is null',
    '{"prompt": []}': '"prompt" is an empty list',
    '{"prompt": 3}': '"prompt" holds int',
    '{"prompt": ["a"]}': 'message 1 of "prompt"',
    f'{{"prompt": [{USER}, {{"content": "x"}}]}}': 'message 2 of "prompt" has no role',
    '{"prompt": [{"role": "user", "content": [{"type": "text"}]}]}': 'message 1 of "prompt" has a part that is no text',
    '{"prompt": [{"role": "user", "content": 3}]}': 'message 1 of "prompt" has no text',
    '{"prompt": [{"role": "user", "content": "x", "tool_calls": [1], "name": ""}]}': "tool_calls of message 1",
    '{"prompt": [{"role": "user", "content": "x", "images": ["a.png"], "name": ""}]}': "images",
    '{"prompt": "x", "tools": "{"}': '"tools" holds a text that is not JSON',
    '{"prompt": "x", "tools": ["search"]}': '"tools" is not a list of objects',
    '{"prompt": [{"role": "system", "content": "s"}, {"role": "assistant", "content": "x"}], "label": "b"}': "from assistant",
}


@pytest.mark.parametrize(("line", "named"), BAD_LINES.items(), ids=[str(i) for i in range(len(BAD_LINES))])
def test_a_bad_line_is_told_with_its_place_or_skipped_and_counted_on_demand(
    tmp_path: Path, line: str, named: str
) -> None:
    told = failure(tmp_path, f"{GOOD}\n\n{line}\n{GOOD}\n")
    assert told.startswith("t.jsonl:3: ") and named in told and " -- " in told, told
    dataset = open_prompts(run_on(str(tmp_path / "t.jsonl"), data={"on_bad_line": "skip", "shuffle": False}))
    assert (len(dataset), dataset.num_bad) == (2, 1)
    assert dataset.bad_rows[0].startswith(f"{tmp_path / 't.jsonl'}:3: ")
    assert [prompt.row for prompt in prompts(dataset)] == [0, 2]


def test_presets_say_what_they_miss(tmp_path: Path) -> None:
    sft: dict[str, Any] = {"algo": {"kind": "sft"}, "data": {"preset": "chat"}}
    only = '{"messages": [{"role": "assistant", "content": "x"}]}'
    verl = '{"prompt": "a", "reward_model": {"style": "rule", "ground_thruth": "x"}}'
    cases: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
        (verl, {"data": {"preset": "verl"}}, ("reward_model.ground_truth", "data.label_key", '"ground_thruth"')),
        ('{"message": []}', {"data": {"preset": "chat"}}, ('"messages"', "data.messages_key", '"message"')),
        (f'{{"messages": [{USER}]}}', sft, ('"messages"', "from user", "data.answer_key")),
        (only, sft, ('"messages"', "from none")),
    ]
    for row, sections, words in cases:
        told = failure(tmp_path, row, **sections)
        assert told.startswith("t.jsonl:1: ") and all(word in told for word in words), told
    wide = failure(tmp_path, "{" + ", ".join(f'"c{i:02}": 1' for i in range(20)) + "}")
    assert "c11, ..." in wide and "c12" not in wide, "not all of many columns"


def test_an_over_long_line(tmp_path: Path) -> None:
    long = '{"prompt": "' + "a" * (64 << 20) + '", "label": "x"}'
    told = failure(tmp_path, f"{GOOD}\n{long}\n{GOOD}\n")
    assert told.startswith(f"t.jsonl:2: the line has {len(long) + 1} bytes")
    dataset = open_prompts(run_on(str(tmp_path / "t.jsonl"), data={"on_bad_line": "skip"}))
    assert (len(dataset), dataset.num_bad) == (2, 1)


def test_rows_that_no_message_would_take(tmp_path: Path) -> None:
    fits = FrameLimits().body - (8 << 20)  # the rest is room for what surrounds them
    assert fits >= DRAW_AT_ONCE * prompts_module.MAX_ROW_BYTES
    assert fits >= prompts_module.MAX_HELD_OUT_BYTES
    num = prompts_module.MAX_ROW_BYTES
    large, fits_alone = (
        f'{{"prompt": "a", "label": "b", "metadata": {{"tests": "{"x" * size}"}}}}' for size in (num, num - 1000)
    )
    told = failure(tmp_path, f"{GOOD}\n{large}\n")
    assert told.startswith(f"t.jsonl:2: prompt, label and metadata come to {num + 53:,} bytes")
    file = tmp_path / "t.jsonl"
    assert len(open_prompts(run_on(str(file), data={"on_bad_line": "skip"}))) == 1
    file.write_text(f"{fits_alone}\n" * 9)
    with pytest.raises(DataError, match=r"eval\.data: 9 rows"):
        open_prompts(run_on(str(file), eval={"data": str(file)}))
    assert open_prompts(run_on(str(file), eval={"data": str(file), "num_prompts": 2})).eval_prompts(5)


def test_deep_nesting_is_refused_not_a_crash(tmp_path: Path) -> None:
    deep = '{"prompt": "a", "label": "x", "metadata": {"m": ' + "[" * 5000 + "]" * 5000 + "}}"
    assert "t.jsonl:1: it is not JSON" in failure(tmp_path, deep)
    shallower = '{"prompt": "a", "label": "x", "metadata": {"m": ' + "[" * 500 + "]" * 500 + "}}"
    assert 'column "metadata" cannot be written as JSON' in failure(tmp_path, shallower)


def test_files_without_a_good_row(tmp_path: Path) -> None:
    assert failure(tmp_path, b"\n \n\r\n").startswith("t.jsonl: the file holds no rows")
    assert failure(tmp_path, b'{"prompt": "\xff"}').startswith("t.jsonl:1: it is not UTF-8")
    file = tmp_path / "t.jsonl"
    file.write_text("x\ny\n")
    with pytest.raises(DataError, match=r"data\.train: none of the 2 rows is good; the first: .*t\.jsonl:1: "):
        open_prompts(run_on(str(file), data={"on_bad_line": "skip"}))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(GOOD)
    with pytest.raises(ConfigError, match=r"data\.train: .*/none"):
        open_prompts(run_on(str(tmp_path / "none/x.jsonl")))
    with pytest.raises(ConfigError, match=r"eval\.data: there is no file"):
        open_prompts(run_on(str(tmp_path / "train.jsonl"), eval={"data": str(tmp_path / "x"), "every": 1}))


def test_bad_parquet(tmp_path: Path) -> None:
    file = tmp_path / "t.parquet"
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), file)
    with pytest.raises(DataError, match=r"t\.parquet: the file holds no rows"):
        open_prompts(run_on(str(file)))
    pq.write_table(pa.table({"question": ["a"], "label": ["b"], "prompts": ["c"]}), file)
    with pytest.raises(DataError, match=r't\.parquet, row 0: column "prompt" is missing; .*did you mean "prompts"'):
        open_prompts(run_on(str(file)))


def test_rows_that_change_or_go_during_the_run_are_those_of_its_start(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text(f"{GOOD}\n{GOOD}\n")
    dataset = open_prompts(run_on(str(file), data={"shuffle": False}))
    before = prompts(dataset)
    file.write_text(f"{GOOD}\n{GOOD.replace('2', '3')}\n")
    assert prompts(dataset) == before
    file.unlink()
    assert prompts(dataset) == before
