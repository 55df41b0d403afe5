"""Good data in every preset and format becomes the prompts it means."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from myxa.actors.data import PromptDataset, open_prompts
from myxa.core.config import RunConfig
from myxa.core.errors import DataError
from myxa.core.samples import Message, Prompt

Rows = list[dict[str, Any]]
Store = Callable[[Path, Rows], str]


def store_jsonl(folder: Path, rows: Rows) -> str:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def store_parquet(folder: Path, rows: Rows) -> str:
    file = folder / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), file)
    return str(file)


def config(train: str | list[str], **sections: dict[str, Any]) -> RunConfig:
    raw: dict[str, Any] = {"model": {"path": "m"}, **sections}
    raw["data"] = {"train": train, "shuffle": False, **sections.get("data", {})}
    return RunConfig.model_validate(raw)


def prompts(dataset: PromptDataset) -> list[Prompt]:
    found = [dataset.prompt(draw) for draw in range(len(dataset))]
    return [prompt for prompt in found if prompt is not None]


def said(prompt: Prompt) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in prompt.messages]


@pytest.fixture(params=[store_jsonl, store_parquet])
def store(request: pytest.FixtureRequest) -> Store:
    return request.param


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def test_tools_and_their_calls_are_carried_as_they_are(tmp_path: Path, store: Store) -> None:
    talk = [
        {"role": "user", "content": "1+1?", "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    ]
    path = store(tmp_path, [{"prompt": talk, "tools": json.dumps([TOOL])}])
    (prompt,) = prompts(open_prompts(config(path, reward={"fn": "format"})))
    assert prompt.tools == (TOOL,)
    assert prompt.messages == (
        Message(role="user", content="1+1?", name="ann"),
        Message(role="assistant", content="", tool_calls=(CALL,), keys=("role", "tool_calls")),
        Message(role="tool", content="2", tool_call_id="c1"),
    )


def test_a_call_of_a_tool_can_be_the_demonstration(tmp_path: Path, store: Store) -> None:
    talk = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    path = store(tmp_path, [{"messages": talk, "tools": [TOOL]}])
    (prompt,) = prompts(open_prompts(config(path, data={"preset": "chat"}, algo={"kind": "sft"})))
    assert prompt.tools == (TOOL,)
    assert prompt.metadata["demonstration_turns"] == [{"role": "assistant", "content": "", "tool_calls": [CALL]}]


def test_without_a_chat_template_a_prompt_is_a_text(tmp_path: Path) -> None:
    rows: Rows = [{"prompt": "Q: 1+1?\nA:", "tools": [TOOL]}, {"prompt": [{"role": "user", "content": "1+1?"}]}]
    plain = config(
        store_jsonl(tmp_path, rows), data={"apply_chat_template": False, "on_bad_line": "skip"}, reward={"fn": "format"}
    )
    found = open_prompts(plain)
    assert [(said(prompt), prompt.tools) for prompt in prompts(found)] == [([("user", "Q: 1+1?\nA:")], ())]
    assert "not the text that data.apply_chat_template = false wants" in found.bad_rows[0]


def test_slime_text_prompt(tmp_path: Path, store: Store) -> None:
    path = store(
        tmp_path, [{"prompt": "1+1?", "label": "2", "metadata": {"level": 3}}, {"prompt": "2+2?", "label": "4"}]
    )
    first, second = prompts(open_prompts(config(path)))
    assert first == Prompt(
        group_id=0,
        row=0,
        pass_index=0,
        messages=(Message(role="user", content="1+1?"),),
        label="2",
        metadata={"level": 3},
        source=path,
    )
    assert (second.group_id, second.row, second.label, second.metadata) == (1, 1, "4", {})


def test_slime_chat_prompt_with_a_system_message_put_in_front(tmp_path: Path, store: Store) -> None:
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes?"},
        {"role": "user", "content": "?"},
    ]
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "hi"}]
    path = store(tmp_path, [{"prompt": turns, "label": "x"}, {"prompt": own, "label": "y"}])
    first, second = prompts(open_prompts(config(path, data={"system": "be brief"})))
    assert said(first) == [("system", "be brief"), ("user", "hi"), ("assistant", "yes?"), ("user", "?")]
    assert said(second) == [("system", "own"), ("user", "hi")]


def test_verl(tmp_path: Path, store: Store) -> None:
    row = {
        "data_source": "gsm8k",
        "prompt": [{"role": "user", "content": "1+1?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"split": "train", "index": 7},
    }
    (prompt,) = prompts(open_prompts(config(store(tmp_path, [row]), data={"preset": "verl"})))
    assert said(prompt) == [("user", "1+1?")]
    assert prompt.label == "2"
    assert prompt.metadata == {"split": "train", "index": 7, "data_source": "gsm8k"}


def test_plain_with_renamed_and_nested_keys(tmp_path: Path, store: Store) -> None:
    rows = [{"q": {"text": "1+1?"}, "a.b": "2"}]
    data = {"preset": "plain", "prompt_key": "q.text", "label_key": "a.b"}
    (prompt,) = prompts(open_prompts(config(store(tmp_path, rows), data=data)))
    assert (said(prompt), prompt.label) == ([("user", "1+1?")], "2")


def test_chat_takes_the_last_assistant_message_as_demonstration(tmp_path: Path, store: Store) -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    path = store(tmp_path, [{"messages": turns}])
    (prompt,) = prompts(open_prompts(config(path, data={"preset": "chat"}, algo={"kind": "sft"})))
    assert said(prompt) == [("user", "hi")]
    assert prompt.metadata == {"demonstration": "hello"}


def test_chat_without_an_answer_is_a_prompt_unless_demonstrations_are_learnt(tmp_path: Path) -> None:
    path = store_jsonl(tmp_path, [{"messages": [{"role": "user", "content": "hi"}], "label": "x"}])
    (prompt,) = prompts(open_prompts(config(path, data={"preset": "chat"})))
    assert (said(prompt), prompt.label, prompt.metadata) == ([("user", "hi")], "x", {})


def test_an_answer_column_holds_a_text_or_turns(tmp_path: Path, store: Store) -> None:
    sections: dict[str, dict[str, Any]] = {"data": {"answer_key": "completion"}, "algo": {"kind": "sft"}}
    path = store(tmp_path, [{"prompt": "hi", "completion": "hello"}])
    (prompt,) = prompts(open_prompts(config(path, **sections)))
    assert prompt.metadata == {"demonstration": "hello"}
    turns = [
        {"role": "assistant", "content": "a"},
        {"role": "tool", "content": "t"},
        {"role": "assistant", "content": "b"},
    ]
    path = store(tmp_path, [{"prompt": "hi", "completion": turns}])
    (prompt,) = prompts(open_prompts(config(path, **sections)))
    assert prompt.metadata == {"demonstration_turns": turns}


def test_several_files_with_slices_follow_each_other(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    one = store_jsonl(tmp_path, [{"prompt": f"a{i}", "label": "x"} for i in range(5)])
    two = store_parquet(tmp_path / "b", [{"prompt": f"b{i}", "label": "x"} for i in range(4)])
    found = prompts(open_prompts(config([f"{one}@[1:3]", two + "@[-2:]", one + "@[4:]"])))
    assert [prompt.messages[0].content for prompt in found] == ["a1", "a2", "b2", "b3", "a4"]
    assert [prompt.row for prompt in found] == [0, 1, 0, 1, 0]
    assert [prompt.group_id for prompt in found] == [0, 1, 2, 3, 4]
    assert found[2].source == two + "@[-2:]"


def test_blank_lines_a_byte_order_mark_and_a_missing_last_line_end(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt":"a","label":"1"}\r\n\r\n  \n{"prompt":"b","label":"2"}')
    assert [prompt.label for prompt in prompts(open_prompts(config(str(file))))] == ["1", "2"]


def test_held_out_prompts_have_ids_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "held").mkdir()
    train = store_jsonl(tmp_path, [{"prompt": "t", "label": "x"}])
    held = store_jsonl(tmp_path / "held", [{"prompt": f"h{i}", "label": "x"} for i in range(3)])
    dataset = open_prompts(config(train, eval={"data": held, "every": 1}))
    assert [prompt.group_id for prompt in dataset.eval_prompts(2)] == [-1, -2]
    assert [prompt.messages[0].content for prompt in dataset.eval_prompts(9)] == ["h0", "h1", "h2"]
    assert open_prompts(config(train)).eval_prompts(5) == ()


def test_every_evaluation_set_is_read_in_its_own_way(tmp_path: Path) -> None:
    train = store_jsonl(tmp_path, [{"prompt": "t", "label": "x"}])
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    a = store_jsonl(tmp_path / "a", [{"prompt": f"a{i}", "label": "x"} for i in range(3)])
    b = store_jsonl(tmp_path / "b", [{"question": f"b{i}"} for i in range(3)])
    free = {"path": b, "prompt_key": "question", "reward": "format", "system": "be brief"}
    dataset = open_prompts(config(train, eval={"sets": {"a": {"path": a}, "b": free}, "every": 1}))
    assert [prompt.messages[0].content for prompt in dataset.eval_prompts(2, "a")] == ["a0", "a1"]
    assert [m.content for m in dataset.eval_prompts(1, "b")[0].messages] == ["be brief", "b0"]
    assert dataset.eval_prompts(5) == dataset.eval_prompts(5, "c") == ()
    with pytest.raises(
        DataError, match=r'b/rows.jsonl:1: column "label" is missing'
    ):  # which compares with a label that there is not
        open_prompts(config(train, eval={"sets": {"b": free | {"reward": "exact"}}, "every": 1}))


def test_reading_jsonl_does_not_import_pyarrow_or_torch(tmp_path: Path) -> None:
    path = store_jsonl(tmp_path, [{"prompt": "t", "label": "x"}])
    code = (
        "import sys; from myxa.actors.data import open_prompts; from myxa.core.config import RunConfig;"
        f"c = RunConfig.model_validate({{'model': {{'path': 'm'}}, 'data': {{'train': {path!r}}}}});"
        "assert len(open_prompts(c)) == 1; print(sorted({'torch', 'pyarrow', 'zmq'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
