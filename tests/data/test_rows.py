"""A row is one prompt, whatever preset, keys and format it is written in, with every value as it was written; or it is
refused by place and column (findings A2, F7 and G)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.data.opened import open_prompts, prompts, run_on, write_rows

from myxa.core.errors import DataError
from myxa.core.samples import Message, Prompt

Row = Any  # an object, or the text of a line
Said = list[tuple[str, str]]


def stored(folder: Path, rows: list[Row], kind: str = "jsonl") -> str:
    folder.mkdir(exist_ok=True)
    path = folder / f"t.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        write_rows(path, *rows)
    return str(path)


def opened(train: str | list[str], **sections: Any) -> Any:
    return open_prompts(run_on(train, **{**sections, "data": {"shuffle": False, **sections.get("data", {})}}))


def first(folder: Path, row: Row, kind: str = "jsonl", **sections: Any) -> Prompt:
    return prompts(opened(stored(folder, [row], kind), **sections))[0]


def said(prompt: Prompt) -> Said:
    return [(message.role, message.content) for message in prompt.messages]


def of(*talk: str) -> list[dict[str, Any]]:
    """`of("user hi", "assistant yes")`."""
    return [dict(zip(("role", "content"), turn.split(" ", 1), strict=True)) for turn in talk]


SFT: dict[str, Any] = {"algo": {"kind": "sft"}}
FORMAT: dict[str, Any] = {"reward": {"fn": "format"}}
OWN: dict[str, Any] = {"reward": {"fn": "mine.py:reward"}}
ASK: Said = [("user", "2+2?")]
TALK = [{"from": "system", "value": "be brief"}, {"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]
BRIEF: Said = [("system", "be brief"), *ASK]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TURNS = of("assistant a", "tool t", "assistant b")
GSM = {"question": "2+2?", "answer": "two and two #### 4"}


def data(**keys: Any) -> dict[str, Any]:
    return {"data": keys}


Case = tuple[Row, dict[str, Any], Said, str, dict[str, Any]]
CASES: dict[str, Case] = {
    "text": ({"prompt": "2+2?", "label": "4", "metadata": {"level": 3}}, {}, ASK, "4", {"level": 3}),
    "chat": ({"prompt": of("user hi", "assistant yes", "user ?"), "label": "x"}, data(system="be brief"),
             [("system", "be brief"), ("user", "hi"), ("assistant", "yes"), ("user", "?")], "x", {}),
    "own system": ({"prompt": of("system own", "user hi"), "label": "y"}, data(system="be brief"),
                   [("system", "own"), ("user", "hi")], "y", {}),
    "verl": ({"data_source": "gsm8k", "prompt": of("user 2+2?"), "ability": "math",
              "reward_model": {"style": "rule", "ground_truth": "4"}, "extra_info": {"split": "train", "index": 7}},
             data(preset="verl"), ASK, "4", {"split": "train", "index": 7, "data_source": "gsm8k"}),
    "nested keys": ({"q": {"text": "2+2?"}, "a.b": "4"}, data(preset="plain", prompt_key="q.text", label_key="a.b"),
                    ASK, "4", {}),
    "demonstration": ({"messages": of("user 2+2?", "assistant 4")}, {**data(preset="chat"), **SFT}, ASK, "",
                      {"demonstration": "4"}),
    "chat without answer": ({"messages": of("user 2+2?"), "label": "x"}, data(preset="chat"), ASK, "x", {}),
    "answer column": ({"prompt": "2+2?", "completion": " 4"}, {**data(answer_key="completion"), **SFT}, ASK, "",
                      {"demonstration": " 4"}),
    "answer of turns": ({"prompt": of("user 2+2?"), "completion": TURNS}, {**data(answer_key="completion"), **SFT}, ASK,
                        "", {"demonstration_turns": TURNS}),
    "answer in plain": ({"prompt": "2+2?", "completion": " 4"}, {**data(preset="plain", answer_key="completion"), **SFT},
                        ASK, "", {"demonstration": " 4"}),
    "sharegpt": ({"id": "x", "conversations": TALK}, {**data(preset="chat"), **SFT}, BRIEF, "", {"demonstration": "4"}),
    "sharegpt as text": ({"conversations": json.dumps(TALK)}, {**data(preset="chat"), **SFT}, BRIEF, "",
                         {"demonstration": "4"}),
    "sharegpt, system apart": ({"system": "be brief", "conversations": TALK[1:]}, {**data(preset="chat", system="other"), **SFT},
                               BRIEF, "", {"demonstration": "4"}),
    **{f"{column} apart": ({column: "be brief", "prompt": "2+2?", "label": "4"}, data(system="other"), BRIEF, "4", {})
       for column in ("system", "system_prompt")},
    "system apart, beside one's own": ({"system": "x", "messages": of("system be brief", "user 2+2?"), "label": "4"},
                                       data(preset="chat"), BRIEF, "4", {}),
    "system apart, empty": ({"system": "", "prompt": "2+2?", "label": "4"}, data(system="be brief"), BRIEF, "4", {}),
    "the prompt is called system": ({"system": "2+2?", "label": "4"}, data(prompt_key="system"), ASK, "4", {}),
    "alpaca without input": ({"instruction": "2+2?", "input": "", "output": "4"},
                             {**data(prompt_key="instruction", answer_key="output"), **SFT}, ASK, "", {"demonstration": "4"}),
    "sharegpt of calls": ({"conversations": [TALK[1], {"from": "gpt", "value": None, "tool_calls": [CALL]}, {"from": "tool", "value": "4"}],
                           "label": "4"}, data(preset="chat"), [*ASK, ("assistant", ""), ("tool", "4")], "4", {}),
    "chat with a byte order mark": ({"prompt": "\ufeff" + json.dumps(of("user 2+2?")), "label": "4"}, {}, ASK, "4", {}),
    "answer of turns as text": ({"prompt": of("user 2+2?"), "completion": json.dumps(TURNS)},
                                {**data(answer_key="completion"), **SFT}, ASK, "", {"demonstration_turns": TURNS}),
    "answer that is JSON": ({"prompt": "2+2?", "completion": '[{"role": "nurse", "age": 4}]'},
                            {**data(answer_key="completion"), **SFT}, ASK, "",
                            {"demonstration": '[{"role": "nurse", "age": 4}]'}),
    "image of a sandbox": ({"prompt": "2+2?", "label": "4", "image": "python:3.11", "enable_thinking": None}, {}, ASK, "4", {}),
    "arguments of all": ({"prompt": "2+2?", "label": "4", "chat_template_kwargs": {"enable_thinking": False}},
                         data(chat_template_kwargs={"enable_thinking": False}), ASK, "4", {}),
    "sharegpt, named": ({"talk": TALK}, {**data(preset="chat", messages_key="talk"), **SFT}, BRIEF, "",
                        {"demonstration": "4"}),
    "sharegpt prompt": ({"prompt": TALK[:2], "label": "4"}, {}, BRIEF, "4", {}),
    "messages first": ({"messages": of("user own"), "conversations": TALK, "label": "x"}, data(preset="chat"),
                       [("user", "own")], "x", {}),
    "gsm8k": (GSM, {**data(prompt_key="question", label_key="answer"), "reward": {"fn": "numeric"}}, ASK, GSM["answer"], {}),
    "gsm8k to learn": (GSM, {**data(prompt_key="question", answer_key="answer"), **SFT}, ASK, "",
                       {"demonstration": GSM["answer"]}),
    "null label, learnt": ({"prompt": "2+2?", "label": None, "answer": "4"}, {**data(answer_key="answer"), **SFT}, ASK, "",
                           {"demonstration": "4"}),
    "metadata as text": ({"prompt": "2+2?", "label": "4", "metadata": '{"level": 2}'}, {}, ASK, "4", {"level": 2}),
    "odd metadata": ({"prompt": "2+2?", "label": "4", "metadata": {"level": None, "parts": [None, {"a": None}], "d": [[[1]]]}},
                     {}, ASK, "4", {"level": None, "parts": [None, {"a": None}], "d": [[[1]]]}),
    "chat as text": ({"prompt": json.dumps(of("system be brief", "user 2+2?")), "label": "4"}, {}, BRIEF, "4", {}),
    **{f"text {text}": ({"prompt": text, "label": "4"}, {}, [("user", text)], "4", {})
       for text in ('[{"role": "user", "content": "hi"}] Who asks?', '{"role": 1}', "[1, 2] is a list", "[1, 2]", "[]", "[0.12345678901234567890123]",
                    "\U0001f600 e\u0301 \u200b \u0000 \u2028 x")},
    "names of tools": ({"prompt": "2+2?", "label": "4", "tools": ["search"], "functions": "none"}, data(preset="plain"), ASK, "4", {}),
    "plain text": ({"prompt": "Q: 2?\nA:", "tools": [TOOL]}, {**data(apply_chat_template=False), **FORMAT},
                   [("user", "Q: 2?\nA:")], "", {}),
}  # fmt: skip
JSON_ONLY = {"odd metadata"}  # a column of parquet has one type


@pytest.mark.parametrize(
    ("kind", "name"), [(k, n) for k in ("jsonl", "parquet") for n in CASES if k == "jsonl" or n not in JSON_ONLY]
)
def test_a_row_is_the_prompt_that_it_means(tmp_path: Path, kind: str, name: str) -> None:
    row, sections, messages, label, metadata = CASES[name]
    prompt = first(tmp_path, row, kind, **sections)
    assert (said(prompt), prompt.label, prompt.metadata) == (messages, label, metadata)
    assert (prompt.group_id, prompt.row, prompt.pass_index, prompt.source) == (0, 0, 0, str(tmp_path / f"t.{kind}"))


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_tools_and_their_calls_are_carried_as_they_are(tmp_path: Path, kind: str) -> None:
    talk = [
        {"role": "user", "content": "1+1?", "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    ]
    prompt = first(tmp_path, {"prompt": talk, "tools": json.dumps([TOOL])}, kind, **FORMAT)
    assert prompt.tools == (TOOL,)
    assert prompt.messages == (
        Message(role="user", content="1+1?", name="ann"),
        Message(role="assistant", content="", tool_calls=(CALL,), keys=("role", "tool_calls")),
        Message(role="tool", content="2", tool_call_id="c1"),
    )
    named = {"input": {"messages": of("user 1+1?"), "tools": [TOOL]}, "functions": [], "label": "2"}
    prompt = first(tmp_path, named, kind, **data(prompt_key="input.messages", tools_key="input.tools"))
    assert prompt.tools == (TOOL,)
    learnt = {
        "messages": [*of("user 1+1?"), {"role": "assistant", "content": "", "tool_calls": [CALL]}],
        "tools": [TOOL],
    }
    prompt = first(tmp_path, learnt, kind, **data(preset="chat"), **SFT)
    assert prompt.tools == (TOOL,)
    assert prompt.metadata["demonstration_turns"] == [{"role": "assistant", "content": "", "tool_calls": [CALL]}]


LABELS: list[tuple[str, str]] = [
    ("5", "5"), ("-0.5", "-0.5"), ("5.0", "5.0"), ("true", "true"), ("false", "false"), ("0", "0"), ('""', ""),
    ('" 5 "', " 5 "), ("[1, 2]", "[1,2]"), ("[]", "[]"), ('{"a": null}', '{"a":null}'), ("[null]", "[null]"),
    ("9007199254740993", "9007199254740993"), ("18446744073709551615", "18446744073709551615"),
    ("0.10000000000000001", "0.1"),
]  # fmt: skip


@pytest.mark.parametrize(("written", "label"), LABELS)
def test_a2_a_label_that_is_no_text_arrives_as_json(tmp_path: Path, written: str, label: str) -> None:
    assert first(tmp_path, f'{{"prompt": "?", "label": {written}}}', **OWN).label == label


@pytest.mark.parametrize("number", ["0.1", "-2.5e-7", "1e22"])
def test_a2_numbers_and_lists_of_labels_arrive_exactly(tmp_path: Path, number: str) -> None:
    assert float(first(tmp_path, f'{{"prompt": "?", "label": {number}}}').label) == float(number)
    accepted = ["4", "four", 'a "b" \u00e9']
    assert json.loads(first(tmp_path, {"prompt": "?", "label": accepted}).label) == accepted


PAIRS: dict[str, Any] = {"data": {"preset": "pairs"}, "algo": {"kind": "dpo"}}
WHOLE = (of("user 2+2?", "assistant 4"), of("user 2+2?", "assistant 5"))


@pytest.mark.parametrize("prompt", [None, "2+2?", of("user 2+2?"), json.dumps(of("user 2+2?"))])
@pytest.mark.parametrize("is_text", [False, True])
@pytest.mark.parametrize("is_whole", [False, True])
def test_a2_both_answers_of_a_pair_may_be_json_text_and_begin_with_the_prompt(
    tmp_path: Path, prompt: Any, is_text: bool, is_whole: bool
) -> None:
    better, worse = (talk if is_whole else talk[1:] for talk in WHOLE)
    row = {"chosen": json.dumps(better) if is_text else better, "rejected": json.dumps(worse) if is_text else worse}
    if prompt is None and not is_whole:
        with pytest.raises(DataError, match="the row has no prompt"):
            first(tmp_path, row, **PAIRS)
        return
    found = first(tmp_path, row if prompt is None else {**row, "prompt": prompt}, **PAIRS)
    assert said(found) == ASK
    assert [found.metadata[name] for name in ("chosen", "rejected")] == [talk[1:] for talk in WHOLE]


def test_a2_a_pair_that_begins_with_another_prompt_than_its_own_is_refused(tmp_path: Path) -> None:
    for prompt in ("3+3?", of("system be brief", "user 2+2?")):
        with pytest.raises(DataError, match='both answers begin with another prompt than "prompt"'):
            first(tmp_path, {"prompt": prompt, "chosen": WHOLE[0], "rejected": WHOLE[1]}, **PAIRS)


def labelled(value: str) -> str:
    return f'{{"prompt": "?", "label": {value}}}'


OLD_CALL = {"role": "assistant", "content": "let me", "function_call": {"name": "add", "arguments": "{}"}}
NULLS = {"function": {"name": "f", "arguments": {"city": None}}, "type": "function"}
FUNCTION = [{"from": "human", "value": "?"}, {"from": "function_call", "value": "{}"}]
HI = of("user hi")
BROKEN = (str(HI), str(HI[0]), json.dumps(HI[0]), json.dumps({"messages": HI}), json.dumps(json.dumps(HI)),
          json.dumps(HI)[:-1] + ",]", json.dumps(HI).replace('"hi"', "NaN"), json.dumps(HI).replace("hi", r"\ud83d"))  # fmt: skip
"""Conversations in a text that is no JSON array of messages."""
REFUSED: list[tuple[Row, dict[str, Any], str]] = [
    *(({"prompt": text, "label": "4"}, {}, '"prompt" holds a text that means messages') for text in BROKEN),
    ({"prompt": "?", "answer": str(TURNS)}, {**data(answer_key="answer"), **SFT}, '"answer" holds a text that means messages'),
    *(({"prompt": f"<{name}>?", "label": "3", name: f"a.{name}"}, {}, f'"{name}" is not empty') for name in ("image", "video", "audio")),
    ({"prompt": "?", "label": "3", "chat_template_kwargs": {"enable_thinking": False}}, {}, '"chat_template_kwargs" says'),
    ({"messages": of("user ?", "assistant 3"), "enable_thinking": True},
     {**data(preset="chat", chat_template_kwargs={"enable_thinking": False}), **SFT}, '"enable_thinking" says'),
    ({"prompt": "?", "answer": "4", "metadata": {"demonstration_turns": of("assistant 5")}}, {**data(answer_key="answer"), **SFT},
     '"demonstration_turns" in the metadata'),
    ({"prompt": "?", "reward_model": '{"ground_truth": "4"}'}, data(preset="verl"), '"reward_model" is a text'),
    ({"conversations": FUNCTION}, {**data(preset="chat"), **SFT}, "'function_call'"),
    *(({"messages": [*of("user ?"), {**OLD_CALL, "content": content}, *of("function 3", "assistant 3")]}, {**data(preset="chat"), **SFT},
       'message 2 of "messages" holds function_call') for content in ("let me", None)),
    *(({"prompt": "?", "label": "3", "reward_model": {"ground_truth": "3"}, name: tools}, data(preset=preset), f'"{name}" holds tools')
      for preset, name, tools in (("slime", "functions", [TOOL["function"]]), ("slime", "tool_defs", json.dumps([TOOL])), ("verl", "tools", [TOOL]),
                                  ("plain", "tools", [TOOL]))),
    ({"input": {"messages": of("user ?"), "tools": [TOOL]}, "label": "3"}, data(prompt_key="input.messages"), '"input.tools" holds tools'),
    ({"prompt": "2+2?"}, {**data(answer_key="completion"), **SFT}, '"completion" is missing'),
    ({"instruction": "Add.", "input": "2, 2", "output": "4"}, {**data(prompt_key="instruction", answer_key="output"), **SFT},
     'column "input" is not empty, and belongs to the prompt in "instruction"'),
    ({"conversations": [*TALK[:2], {"from": "gpt", "value": None}]}, {**data(preset="chat"), **SFT}, "has no text as content"),
    ('{"prompt": "?", "label"' + "\0" * 9, {}, "it holds bytes of 0"),
    (GSM, {}, '"prompt" is missing; the row has answer, question'),
    ({"prompt": "?", "label": None}, OWN, '"label" is null'),
    *(({"prompt": "?", "label": value}, {"reward": {"fn": fn}}, f'"label" is a list {how}')
      for value, how in (([], "without answers"), (["4", None], "that holds null"), (["4", " "], "that holds an empty text")) for fn in ("exact", "numeric", "math")),
    ({"prompt": of("user  "), "label": "4"}, {}, 'no message of "prompt" says anything'),
    *(({"prompt": "?", "label": value}, {"reward": {"fn": "exact"}}, '"label" is empty, and the reward compares') for value in ("", " ")),
    *((f'{{"prompt": "Name the {half} here", "label": "cat"}}', {}, "half a character")
      for half in (r"\ud83d", r"\ude00", r"\ud83d\ud83d")),
    *((row, {}, "comes twice") for row in (
        r'{"prompt": "a \"key\"", "label": "1", "l\u0061bel": "2"}',
        r'{"prompt": "\\", "label": "1", "metadata": {"b": 1, "b": 1}}',
        '{"prompt": "a", "label": "1", "metadata": "{\\"b\\": 1, \\"b\\": 2}"}')),
    *((f'{{"prompt": "?", "label": "4", "metadata": {{"d": {value}}}}}', {}, cause) for value, cause in (
        ("NaN", "NaN"), ("Infinity", "Infinity"), ("-Infinity", "Infinity"), ("nan", "NaN"), ("1e999", "rounded"), ("1e99999999999999999999", "rounded"))),
    *((labelled(value), {}, "rounded") for value in ("0.12345678901234567890123", "9007199254740993.0", "1e-400")),
    (labelled("36893488147419103232"), {}, '"label"'),
    ({"prompt": of("user hi")}, {**data(apply_chat_template=False), **FORMAT}, "data.apply_chat_template"),
]  # fmt: skip
REFUSED_PARQUET: list[tuple[Row, dict[str, Any], str]] = [
    *(({"prompt": "?", "label": "x", "metadata": {"m": value}}, {}, '"metadata" holds')
      for value in (float("nan"), float("inf"), b"\x00")),
    *(({"prompt": "<image>?", "label": "3", column: [{"bytes": b"PNG", "path": None}]}, data(preset=preset),
       f'"{column}" is not empty') for column in ("images", "videos", "audios", "image") for preset in ("slime", "plain")),
    ({"prompt": [*of("user go"), {"role": "assistant", "content": "", "tool_calls": [NULLS]}, *of("user on")], "label": "x"},
     {}, 'tool calls in column "prompt" hold null'),
    ({"prompt": "?", "label": "x", "tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": None, "b": 1}}}]},
     {}, 'tools in column "tools" hold null'),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "row", "sections", "named"),
    [*(("jsonl", *case) for case in REFUSED), *(("parquet", *case) for case in REFUSED_PARQUET)],
)
def test_what_cannot_arrive_as_it_was_written_is_refused_by_place(
    tmp_path: Path, kind: str, row: Row, sections: dict[str, Any], named: str
) -> None:
    with pytest.raises(DataError) as caught:
        first(tmp_path, row, kind, **sections)
    place = "t.jsonl:1: " if kind == "jsonl" else "t.parquet, row 0: "
    assert place in str(caught.value) and named in str(caught.value) and " -- " in str(caught.value), caught.value


def test_a2_the_remedies_of_parquet_work(tmp_path: Path) -> None:
    """Calls as JSON text keep their nulls; an empty column of images is none."""
    talk = [*of("user go"), {"role": "assistant", "content": "", "tool_calls": [NULLS]}, *of("user on")]
    prompt = first(tmp_path, {"prompt": json.dumps(talk), "label": "x"}, "parquet")
    assert list(prompt.messages[1].tool_calls) == [NULLS]
    assert first(tmp_path, {"prompt": "?", "label": "3", "images": []}, "parquet").label == "3"


# -- several files and sets


def test_several_files_with_slices_follow_each_other(tmp_path: Path) -> None:
    one = stored(tmp_path / "a", [{"prompt": f"a{i}", "label": "x"} for i in range(5)])
    two = stored(tmp_path / "b", [{"prompt": f"b{i}", "label": "x"} for i in range(4)], "parquet")
    found = prompts(opened([f"{one}@[1:3]", f"{two}@[-2:]", f"{one}@[4:]"]))
    assert [(p.group_id, p.row, p.messages[0].content) for p in found] == [
        (0, 0, "a1"), (1, 1, "a2"), (2, 0, "b2"), (3, 1, "b3"), (4, 0, "a4"),
    ]  # fmt: skip
    assert found[2].source == f"{two}@[-2:]"


def test_two_files_with_byte_order_marks_may_be_put_together(tmp_path: Path) -> None:
    lines = "".join(f'\ufeff{{"prompt": "{name}", "label": "x"}}\n' for name in "ab")
    (tmp_path / "t.jsonl").write_text(lines)
    found = prompts(opened(str(tmp_path / "t.jsonl")))
    assert [said(prompt) for prompt in found] == [[("user", "a")], [("user", "b")]]


def test_blank_lines_a_byte_order_mark_and_a_missing_last_line_end(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt":"a","label":"1"}\r\n\r\n  \n{"prompt":"b","label":"2"}')
    assert [prompt.label for prompt in prompts(opened(str(file)))] == ["1", "2"]


def test_every_evaluation_set_is_read_in_its_own_way_with_ids_of_its_own(tmp_path: Path) -> None:
    train = stored(tmp_path, [{"prompt": "t", "label": "x"}])
    assert opened(train).eval_prompts(5) == ()
    a = stored(tmp_path / "a", [{"prompt": f"a{i}", "label": "x"} for i in range(3)])
    b = stored(tmp_path / "b", [{"question": f"b{i}"} for i in range(3)])
    held_out = opened(train, eval={"data": a, "every": 1})
    assert [(p.group_id, p.messages[0].content) for p in held_out.eval_prompts(2)] == [(-1, "a0"), (-2, "a1")]
    assert len(held_out.eval_prompts(9)) == 3
    free = {"path": b, "prompt_key": "question", "reward": "format", "system": "be brief"}
    dataset = opened(train, eval={"sets": {"a": {"path": a}, "b": free}, "every": 1})
    assert [prompt.messages[0].content for prompt in dataset.eval_prompts(2, "a")] == ["a0", "a1"]
    assert [m.content for m in dataset.eval_prompts(1, "b")[0].messages] == ["be brief", "b0"]
    assert dataset.eval_prompts(5) == dataset.eval_prompts(5, "c") == ()
    with pytest.raises(DataError, match=r'b/t.jsonl:1: column "label" is missing'):  # "exact" compares with it
        opened(train, eval={"sets": {"b": free | {"reward": "exact"}}, "every": 1})


def test_a5_all_held_out_rows_are_evaluated_and_those_left_out_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = stored(tmp_path, [{"prompt": str(row), "label": "1"} for row in range(100)])
    every = run_on(path, eval={"data": path}).eval
    assert len(opened(path, eval={"data": path}).eval_prompts(every.num_prompts)) == 100
    assert not caplog.messages
    assert opened(path, eval={"data": path, "num_prompts": 64}).num_held_out() == 100
    assert "64" in caplog.text and "36" in caplog.text


def test_neither_a_run_file_nor_jsonl_needs_a_heavy_import(tmp_path: Path) -> None:
    path = stored(tmp_path, [{"prompt": "t", "label": "x"}])
    code = (
        "import sys, myxa.core.config; print(sorted({'torch', 'numpy', 'zmq', 'pyarrow'} & set(sys.modules)));"
        "from myxa.actors.data import open_data; from myxa.core.config import RunConfig;"
        f"c = RunConfig.model_validate({{'model': {{'path': 'm'}}, 'data': {{'train': {path!r}}}}});"
        "assert len(open_data(c).by_name['']) == 1; print(sorted({'torch', 'pyarrow', 'zmq'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["[]", "[]"]
