"""A turn of the model as text, read as what it is: thoughts, words and tool calls.

Each family writes its calls in a form of its own; which one is seen in a call that its chat template has written. A
call that does not parse stays in the words, as the model wrote it, and the turn is marked malformed. Pure.

| form | written as |
|---|---|
| hermes (Qwen, Hermes) | `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` |
| glm (GLM-4.5) | `<tool_call>name <arg_key>k</arg_key> <arg_value>v</arg_value> ...</tool_call>` |
| llama (Llama 3) | the whole turn is `{"name": ..., "parameters": {...}}`, behind `<|python_tag|>` or not |
| deepseek (V3, R1) | `<｜tool▁call▁begin｜>function<｜tool▁sep｜>name` and a JSON block, or `name<｜tool▁sep｜>{...}` |
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import msgspec

ToolForm = Literal["hermes", "glm", "llama", "deepseek"]
THOUGHT_ENDS = "</think>"
THOUGHT_BEGINS = "<think>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """What the model calls."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class TurnText:
    """A turn, or what is there of it."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[ToolCall, ...] = ()
    is_malformed: bool = False
    """It has a tool call that cannot be read."""


class _WrittenCall(msgspec.Struct):
    name: str
    arguments: dict[str, Any] | str | None = None
    parameters: dict[str, Any] | None = None


def _json_call(text: str) -> ToolCall:
    """Raises msgspec.MsgspecError."""
    call = msgspec.json.decode(text.strip(), type=_WrittenCall)
    found = call.arguments if call.arguments is not None else call.parameters
    arguments = msgspec.json.decode(found, type=dict[str, Any]) if isinstance(found, str) else found
    return ToolCall(call.name, arguments or {})


_GLM_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def _glm_call(text: str, texts: Collection[tuple[str, str]] = ()) -> ToolCall:
    name, _, rest = text.strip().partition("<arg_key>")
    pairs = _GLM_PAIR.findall("<arg_key>" + rest if rest else "")
    if not name.strip() or "<" in name or _GLM_PAIR.sub("", "<arg_key>" + rest if rest else "").strip():
        raise ValueError("a call is a name and pairs of <arg_key> and <arg_value>")
    name = name.strip()
    return ToolCall(name, {k.strip(): v if (name, k.strip()) in texts else _value(v) for k, v in pairs})


def _value(text: str) -> Any:
    """Of an argument: JSON where it is JSON, else the text."""
    try:
        return msgspec.json.decode(text.strip())
    except msgspec.DecodeError:
        return text


def _deepseek_call(text: str) -> ToolCall:
    head, found, rest = text.partition("<｜tool▁sep｜>")
    if not found:
        raise ValueError("a call has a separator")
    if head.strip() == "function":  # V3 and R1: the name, then a block of JSON
        head, _, rest = rest.partition("\n")
    body = rest.strip().removeprefix("```json").removesuffix("```").strip()
    return _json_call(msgspec.json.encode({"name": head.strip(), "arguments": body}).decode())


@dataclass(frozen=True, slots=True)
class _Form:
    begins: str
    """A mark with which a call begins; words before it are words."""
    block: re.Pattern[str]
    call: Callable[[str], ToolCall]
    wrapping: tuple[str, ...] = ()
    """Marks around all calls."""


_LLAMA_TAG = "<|python_tag|>"
_LLAMA_CALL = re.compile(r'\s*\{\s*"(?:name"|type"\s*:\s*"function").*"(?:parameters|arguments)"\s*:', re.DOTALL)
"""Another turn that is JSON is an answer."""
_LLAMA_BETWEEN = re.compile(r';\s*(?=\{\s*"\w)')
"""Never inside of a text: its quotes are escaped, and behind its end is no letter."""
_FORMS: Mapping[ToolForm, _Form] = {
    "hermes": _Form("<tool_call>", re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL), _json_call),
    "glm": _Form("<tool_call>", re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL), _glm_call),
    "llama": _Form(_LLAMA_TAG, re.compile(r"<\|python_tag\|>(.*)", re.DOTALL), _json_call),
    "deepseek": _Form(
        "<｜tool▁call▁begin｜>",
        re.compile(r"<｜tool▁call▁begin｜>(.*?)<｜tool▁call▁end｜>", re.DOTALL),
        _deepseek_call,
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
}


def form_of(written: str) -> ToolForm:
    if "tool▁call" in written:
        return "deepseek"
    if "<arg_key>" in written:
        return "glm"
    if "<tool_call>" not in written and (
        _LLAMA_TAG in written or re.search(r'"parameters":\s*\{(?!\s*"type")', written)
    ):
        return "llama"
    return "hermes"


def read_turn(
    text: str,
    form: ToolForm | None,
    *,
    begins_inside: bool = False,
    is_whole: bool = True,
    texts: Collection[tuple[str, str]] = (),
) -> TurnText:
    """`text`: without the token that ends the turn. `form` None: no tool may be called. `begins_inside`: of a thought.
    `is_whole`: False while more comes; then an end that may begin a mark is held back. `texts`: functions and their
    parameters that are texts, for forms that write a text without quotes."""
    reasoning, said = _thought(text, begins_inside=begins_inside, is_whole=is_whole)
    if form is None:
        return TurnText(reasoning, said if is_whole else without_begun(said, (THOUGHT_BEGINS,)))
    how = _FORMS[form]
    if form == "llama" and (_LLAMA_CALL.match(said) if is_whole else said.lstrip().startswith("{")):
        said = f"{_LLAMA_TAG}{said.lstrip()}"
    marks = (how.begins, *how.wrapping[:1])
    places = [at for mark in marks if (at := said.find(mark)) >= 0]
    if not is_whole:
        words = said[: min(places)].rstrip() if places else without_begun(said, (*marks, THOUGHT_BEGINS))
        return TurnText(reasoning, words)
    if not places:
        return TurnText(reasoning, said)
    calls, read = list[ToolCall](), partial(_glm_call, texts=texts) if form == "glm" else how.call

    def taken(block: re.Match[str]) -> str:
        nonlocal calls
        try:
            calls = [*calls, *map(read, _LLAMA_BETWEEN.split(block[1]) if form == "llama" else (block[1],))]
        except (ValueError, msgspec.MsgspecError):
            return block[0]
        return ""

    begin = min(places)  # an end mark in the words before it is a word, and was streamed
    rest = said[:begin] + how.block.sub(taken, said[begin:])
    if how.begins in rest:  # one that cannot be read, or has no end
        return TurnText(reasoning, rest.removeprefix(_LLAMA_TAG) if form == "llama" else rest, tuple(calls), True)
    words, rest = rest[:begin], rest[begin:]
    for mark in how.wrapping:
        rest = rest.replace(mark, "")
    return TurnText(reasoning, (words + rest).rstrip(), tuple(calls))


def _thought(text: str, *, begins_inside: bool, is_whole: bool) -> tuple[str, str]:
    """The thought, and what follows it."""
    begun = text.lstrip()
    if not begins_inside and not begun.startswith(THOUGHT_BEGINS):
        may_begin = not is_whole and THOUGHT_BEGINS.startswith(begun)
        return "", "" if may_begin else text
    inside = text if begins_inside else begun[len(THOUGHT_BEGINS) :]
    thought, ends, rest = inside.partition(THOUGHT_ENDS)
    if not ends:
        return (thought if is_whole else without_begun(thought, (THOUGHT_ENDS,))).strip("\n"), ""
    return thought.strip("\n"), rest.lstrip("\n")


def cut_at(text: str, stops: Sequence[str]) -> tuple[str, str]:
    """The text up to the first stop string in it, and that; empty: there is none."""
    at, stop = min(((at, stop) for stop in stops if (at := text.find(stop)) >= 0), default=(len(text), ""))
    return text[:at], stop


def without_begun(text: str, marks: Sequence[str]) -> str:
    """The text without an end that may be the beginning of a mark, white space included."""
    for size in range(max(map(len, marks), default=1) - 1, 0, -1):
        if any(len(mark) > size and text.endswith(mark[:size]) for mark in marks):
            text = text[:-size]
            break
    return text.rstrip()
