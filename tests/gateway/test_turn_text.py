"""What is read out of a turn's text: thoughts, words, tool calls, and calls that cannot be read."""

from __future__ import annotations

import pytest

from myxa.actors.gateway.turn_text import ToolCall, ToolForm, TurnText, form_of, read_turn

HERMES = '<tool_call>\n{"name": "find", "arguments": {"q": "a"}}\n</tool_call>'
GLM = "<tool_call>find\n<arg_key>q</arg_key>\n<arg_value>a</arg_value>\n<arg_key>n</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
LLAMA = '{"name": "find", "parameters": {"q": "a"}}'
DEEPSEEK_R1 = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n```json\n{"q": "a"}\n```<｜tool▁call▁end｜>'
DEEPSEEK_V3 = '<｜tool▁call▁begin｜>find<｜tool▁sep｜>{"q": "a"}<｜tool▁call▁end｜>'
AROUND = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
CODER = "<tool_call>\n<function=find>\n<parameter=q>\na\n</parameter>\n</function>\n</tool_call>"
MINIMAX = '<minimax:tool_call>\n<invoke name="find">\n<parameter name="q">a</parameter>\n</invoke>\n<invoke name="find">\n</invoke>\n</minimax:tool_call>'
KIMI = '<|tool_calls_section_begin|><|tool_call_begin|>functions.find:0<|tool_call_argument_begin|>{"q": "a"}<|tool_call_end|><|tool_calls_section_end|>'
FIND = ToolCall("find", {"q": "a"})

WITHOUT_ARGUMENTS: list[tuple[ToolForm, str, str]] = [
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', ""),
    ("hermes", '<tool_call>{"name": "now", "arguments": ""}</tool_call>', ""),
    ("hermes", '<tool_call>{"name": "now", "arguments": "null"}</tool_call>', ""),
    ("deepseek", "<｜tool▁call▁begin｜>now<｜tool▁sep｜><｜tool▁call▁end｜>", ""),
    ("mistral", "[TOOL_CALLS]now[ARGS]", ""),
    ("kimi", "<|tool_call_begin|>now<|tool_call_argument_begin|><|tool_call_end|>", "now"),
]
CASES: list[tuple[ToolForm | None, str, TurnText]] = [
    ("hermes", "Hello", TurnText(content="Hello")),
    ("hermes", f"Look.\n{HERMES}", TurnText(content="Look.", calls=(FIND,))),
    ("hermes", '<tool_call>[{"name": "now"}, {"name": "find", "arguments": {"q": "a"}}]</tool_call>', TurnText(calls=(ToolCall("now", {}), FIND))),
    ("hermes", '<tool_call>[]</tool_call>', TurnText(content='<tool_call>[]</tool_call>', is_malformed=True)),
    ("qwen_xml", "<tool_call>\n<function=now>\n</function>\n<function=find>\n<parameter=q>\na\n</parameter>\n</function>\n</tool_call>", TurnText(calls=(ToolCall("now", {}), FIND))),
    ("hermes", f"{HERMES}\n{HERMES}", TurnText(calls=(FIND, FIND))),
    ("hermes", f"<think>\nhm\n</think>\n\n{HERMES}", TurnText("hm", calls=(FIND,))),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"q\\": 1}"}</tool_call>', TurnText(calls=(ToolCall("f", {"q": 1}),))),
    ("hermes", '<tool_call>{"name": 3}</tool_call>', TurnText(content='<tool_call>{"name": 3}</tool_call>', is_malformed=True)),
    ("hermes", 'ok <tool_call>{"name": "a"', TurnText(content='ok <tool_call>{"name": "a"', is_malformed=True)),
    (None, HERMES, TurnText(content=HERMES)),
    ("glm", f"x{GLM}", TurnText(content="x", calls=(ToolCall("find", {"q": "a", "n": 2}),))),
    ("glm", "<tool_call><arg_key>q</arg_key></tool_call>",
     TurnText(content="<tool_call><arg_key>q</arg_key></tool_call>", is_malformed=True)),
    ("llama", LLAMA, TurnText(calls=(FIND,))),
    ("llama", f"<|python_tag|>{LLAMA}; {LLAMA}", TurnText(calls=(FIND, FIND))),
    ("llama", '{"name": "run", "parameters": {"code": "a = 1; {"}};{"name": "run", "parameters": {"code": "; {\\"a"}}',
     TurnText(calls=(ToolCall("run", {"code": "a = 1; {"}), ToolCall("run", {"code": '; {"a'})))),
    ("llama", "plain words", TurnText(content="plain words")),
    *(("llama", text, TurnText(content=text)) for text in ('{"answer": 5}', '{"name": "Bob", "age": 3}', '{"name": "a"', "{", '{"a": {"parameters": 1}}')),
    ("llama", '{"name": "find", "parameters": {"q"', TurnText(content='{"name": "find", "parameters": {"q"', is_malformed=True)),
    ("llama", f'{LLAMA}; {{"name": "b", "parameters": 3}}',
     TurnText(content=f'{LLAMA}; {{"name": "b", "parameters": 3}}', is_malformed=True)),
    ("llama", '{"type": "function", "name": "find", "parameters": {"q": "a"}}', TurnText(calls=(FIND,))),
    ("deepseek", f"x{AROUND[0]}{DEEPSEEK_R1}{AROUND[1]}", TurnText(content="x", calls=(FIND,))),
    ("deepseek", f"{AROUND[0]}{DEEPSEEK_V3}\n{DEEPSEEK_V3}{AROUND[1]}", TurnText(calls=(FIND, FIND))),
    ("deepseek", f"x{AROUND[1]}{AROUND[0]}{DEEPSEEK_V3}{AROUND[1]}y", TurnText(content=f"x{AROUND[1]}y", calls=(FIND,))),
    ("hermes", '<tool_call>{"name": "find", "arguments": {"q": "a"}, "id": 7}</tool_call>', TurnText(calls=(FIND,))),
    ("qwen_xml", f"x\n{CODER}\n{CODER}", TurnText(content="x", calls=(FIND, FIND))),
    ("qwen_xml", "<tool_call>\n<function=find>\n</function>\n</tool_call>", TurnText(calls=(ToolCall("find", {}),))),
    *(("qwen_xml", text, TurnText(content=text, is_malformed=True)) for text in (
        CODER.replace("</parameter>", ""), CODER.replace("</function>", ""), CODER.replace("function=find", "function="),
        f"{CODER[:-3]}", CODER.replace("</parameter>", "</parameter>more"))),
    ("minimax", f"x\n{MINIMAX}", TurnText(content="x", calls=(FIND, ToolCall("find", {})))),
    ("kimi", f"x{KIMI}", TurnText(content="x", calls=(ToolCall("find", {"q": "a"}, "functions.find:0"),))),
    ("kimi", "<|tool_call_begin|>find<|tool_call_end|>",
     TurnText(content="<|tool_call_begin|>find<|tool_call_end|>", is_malformed=True)),
    ("mistral", '[TOOL_CALLS] [{"name": "find", "arguments": {"q": "a"}, "id": "no"}, {"name": "find", "arguments": {}}]',
     TurnText(calls=(FIND, ToolCall("find", {})))),
    ("mistral", 'x[TOOL_CALLS]find[ARGS]{"q": "a"}[TOOL_CALLS]find[CALL_ID]abcdefgh1[ARGS]{}',
     TurnText(content="x", calls=(FIND, ToolCall("find", {}, "abcdefgh1")))),
    ("mistral", "[TOOL_CALLS]find", TurnText(content="[TOOL_CALLS]find", is_malformed=True)),
    *((form, text, TurnText(calls=(ToolCall("now", {}, number),))) for form, text, number in WITHOUT_ARGUMENTS),
    *(("hermes", f'<tool_call>{{"name": "w", "arguments": {{"q": "{text}"}}}}</tool_call>{HERMES}',
       TurnText(calls=(ToolCall("w", {"q": text}), FIND))) for text in ("</tool_call>", "a</tool_call><tool_call>" * 3)),
    ("kimi", KIMI.replace('"a"', '"<|tool_call_end|>"'), TurnText(calls=(ToolCall("find", {"q": "<|tool_call_end|>"}, "functions.find:0"),))),
    ("minimax", "<minimax:tool_call>find</minimax:tool_call>",
     TurnText(content="<minimax:tool_call>find</minimax:tool_call>", is_malformed=True)),
    ("deepseek", f"x{AROUND[0]}find{AROUND[1]}", TurnText(content=f"x{AROUND[0]}find{AROUND[1]}", is_malformed=True)),
    ("hermes", "<think>cut off", TurnText("cut off")),
    ("hermes", "a < b and <tool is a word", TurnText(content="a < b and <tool is a word")),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "read"), CASES)
def test_a_turn_is_read(form: ToolForm | None, text: str, read: TurnText) -> None:
    assert read_turn(text, form) == read


@pytest.mark.parametrize(("form", "text", "read"), CASES)
def test_what_was_streamed_is_never_taken_back(form: ToolForm | None, text: str, read: TurnText) -> None:
    told = TurnText()
    for size in range(len(text) + 1):
        part = read_turn(text[:size], form, is_whole=False)
        assert part.reasoning.startswith(told.reasoning)
        assert part.content.startswith(told.content)
        told = part
    assert read.reasoning.startswith(told.reasoning)
    assert read.content.startswith(told.content)


def test_an_argument_that_is_a_text_by_its_schema_is_no_number() -> None:
    text = "<tool_call>find\n<arg_key>q</arg_key>\n<arg_value>007</arg_value>\n<arg_key>n</arg_key>\n<arg_value>12</arg_value>\n</tool_call>"
    for texts in ({}, {("find", "n"): False}, {("find", "n"): True}, {("other", "n"): False}):
        wanted = {"q": "007", "n": "12" if ("find", "n") in texts else 12}
        assert read_turn(text, "glm", texts=texts).calls == (ToolCall("find", wanted),)


def test_a_thought_that_the_prompt_began() -> None:
    assert read_turn("hm</think>\n\nHello", None, begins_inside=True) == TurnText("hm", "Hello")
    assert read_turn("hm", None, begins_inside=True) == TurnText("hm")


@pytest.mark.parametrize(
    ("written", "form"),
    [
        (HERMES, "hermes"),
        (GLM, "glm"),
        (LLAMA, "llama"),
        (DEEPSEEK_V3, "deepseek"),
        (CODER, "qwen_xml"),
        (KIMI, "kimi"),
        (MINIMAX, "minimax"),
        ("[TOOL_CALLS] []", "mistral"),
        ("a template without", "hermes"),
    ],
)
def test_the_form_is_seen_in_what_a_template_writes(written: str, form: ToolForm) -> None:
    assert form_of(written) == form
