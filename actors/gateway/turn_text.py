"""A turn of the model as text, read as what it is: thoughts, words and tool calls.

Each family writes its calls in a form of its own; which one is seen in a call that its chat template has written. A
call that does not parse stays in the words, as the model wrote it, and the turn is marked malformed. Pure.

| form | written as |
|---|---|
| hermes (Qwen, Hermes) | `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, or a list of such |
| qwen_xml (Qwen3-Coder, 3.5) | `<tool_call><function=name><parameter=k>v</parameter> ...</function> ...</tool_call>` |
| glm (GLM-4.5) | `<tool_call>name <arg_key>k</arg_key> <arg_value>v</arg_value> ...</tool_call>` |
| minimax (M2) | `<invoke name="name"><parameter name="k">v</parameter> ...</invoke>` |
| llama (Llama 3) | the whole turn is `{"name": ..., "parameters": {...}}`, behind `<|python_tag|>` or not |
| deepseek (V3, R1) | `<｜tool▁call▁begin｜>function<｜tool▁sep｜>name` and a JSON block, or `name<｜tool▁sep｜>{...}` |
| kimi (K2) | `<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>` |
| mistral | `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}` for each |
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec

ToolForm = Literal["hermes", "qwen_xml", "glm", "minimax", "llama", "deepseek", "kimi", "mistral"]
MAX_ENDS = 8
THOUGHT_ENDS = "</think>"
THOUGHT_BEGINS = "<think>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """What the model calls."""

    name: str
    arguments: dict[str, Any]
    id: str = ""
    """That the model gave it, in forms that have one."""


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
    id: Any = ""

    def call(self, number: str = "") -> ToolCall:
        """Raises msgspec.MsgspecError."""
        arguments = self.arguments if self.arguments is not None else self.parameters
        return ToolCall(self.name, _table(arguments) if isinstance(arguments, str) else arguments or {}, number)


_WrittenCalls = Annotated[list[_WrittenCall], msgspec.Meta(min_length=1)]
TextParameters = Mapping[tuple[str, str], bool]
"""By functions and their parameters that are texts: whether they may be null instead."""
_Reader = Callable[[str, TextParameters], Sequence[ToolCall]]
"""Of what stands between the marks of a call. Raises ValueError, msgspec.MsgspecError."""


def _table(text: str) -> dict[str, Any]:
    """Of arguments; none are often written as nothing. Raises msgspec.MsgspecError."""
    return msgspec.json.decode(text, type=dict[str, Any] | None) or {} if text.strip() else {}


def _json_calls(text: str, texts: TextParameters) -> Sequence[ToolCall]:
    listed = text.strip() if text.lstrip().startswith("[") else f"[{text}]"
    return [call.call() for call in msgspec.json.decode(listed, type=_WrittenCalls)]


def _pairs(name: str, key: str, value_ends: str, ends: str = "", *, padding: str = "") -> _Reader:
    """Reads calls whose arguments are pairs of a key and a value without quotes. `name`, `key`: patterns of what stands
    before the pairs, and before a value; `padding`: around a value. `ends`: behind the last pair."""
    call = re.compile(rf"\s*{name}\s*(.*)", re.DOTALL)
    pair = re.compile(rf"\s*{key}{padding}(.*?){padding}", re.DOTALL)

    between = re.compile(rf"(?<={ends})\s*(?=<)") if ends else None

    def read(text: str, texts: TextParameters) -> Sequence[ToolCall]:
        return [read_one(part, texts) for part in (between.split(text) if between else (text,))]

    def read_one(text: str, texts: TextParameters) -> ToolCall:
        head = call.fullmatch(text)
        function = "" if head is None else head[1].strip()
        *written, behind = ("" if head is None else head[2]).split(value_ends)
        pairs = [match for match in map(pair.fullmatch, written) if match is not None]
        if not function or behind.strip() != ends or len(pairs) < len(written):
            raise ValueError("a call is a name and pairs of a key and a value")
        values = {match[1].strip(): match[2] for match in pairs}
        return ToolCall(function, {key: _value(value, texts.get((function, key))) for key, value in values.items()})

    return read


_PYTHON_VALUES = {"True": True, "False": False, "None": None}
"""Qwen3.5's template writes these so."""


def _value(text: str, nullable: bool | None) -> Any:
    """Of an argument: JSON where it is JSON, else the text. `nullable`: of a text, whether it may be null instead."""
    word = text.strip()
    if nullable is not None and not (nullable and word in ("null", "None")):
        return text
    try:
        return _PYTHON_VALUES[word] if word in _PYTHON_VALUES else msgspec.json.decode(word)
    except msgspec.DecodeError:
        return text


def _deepseek_calls(text: str, texts: TextParameters) -> Sequence[ToolCall]:
    head, separator, arguments = text.partition("<｜tool▁sep｜>")
    if not separator:
        raise ValueError("a call has a separator")
    if head.strip() == "function":  # V3 and R1: the name, then a block of JSON
        head, _, arguments = arguments.partition("\n")
    arguments = arguments.strip().removeprefix("```json").removesuffix("```")
    return (ToolCall(head.strip(), _table(arguments)),)


_KIMI_ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")


def _kimi_calls(text: str, texts: TextParameters) -> Sequence[ToolCall]:
    number, separator, arguments = text.partition("<|tool_call_argument_begin|>")
    name = _KIMI_ID.fullmatch(number.strip())
    if not separator or name is None:
        raise ValueError("a call has an id and arguments")
    return (ToolCall(name[1], _table(arguments), number.strip()),)


def _llama_calls(text: str, texts: TextParameters) -> Sequence[ToolCall]:
    return [msgspec.json.decode(part, type=_WrittenCall).call() for part in _LLAMA_BETWEEN.split(text.strip())]


def _mistral_calls(text: str, texts: TextParameters) -> Sequence[ToolCall]:
    if text.lstrip().startswith("["):
        written = msgspec.json.decode(text.strip(), type=list[_WrittenCall])
        return [call.call(_mistral_id(call.id)) for call in written]
    calls: list[ToolCall] = []
    for part in text.split(_MISTRAL_MARK):
        head, separator, arguments = part.partition("[ARGS]")
        name, _, number = head.partition("[CALL_ID]")
        if not separator or not name.strip():
            raise ValueError("a call is a name and arguments")
        calls.append(ToolCall(name.strip(), _table(arguments), _mistral_id(number.strip())))
    return calls


def _mistral_id(number: object) -> str:
    """Templates take ids of nine letters alone."""
    return number if isinstance(number, str) and len(number) == 9 and number.isalnum() else ""


_LLAMA_TAG = "<|python_tag|>"
_LLAMA_CALL = re.compile(r'\s*\{\s*"(?:name"|type"\s*:\s*"function").*"(?:parameters|arguments)"\s*:', re.DOTALL)
"""Another turn that is JSON is an answer."""
_LLAMA_BETWEEN = re.compile(r';\s*(?=\{\s*"\w)')
"""Never inside of a text: its quotes are escaped, and behind its end is no letter."""
_MISTRAL_MARK = "[TOOL_CALLS]"


@dataclass(frozen=True, slots=True)
class _Form:
    read: _Reader
    begins: str = "<tool_call>"
    """A mark with which a call begins; words before it are words."""
    ends: str = "</tool_call>"
    """Empty: the end of the turn."""
    num_ends: int = 1
    """Places of that mark that may be a call's end: a text in JSON may hold it."""
    wrapping: tuple[str, ...] = ()
    """Marks around all calls."""
    sign: str = ""
    """A pattern that templates write in this form alone; empty: its mark."""


_FORMS: Mapping[ToolForm, _Form] = {
    "deepseek": _Form(
        _deepseek_calls, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", MAX_ENDS,
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    "kimi": _Form(
        _kimi_calls, "<|tool_call_begin|>", "<|tool_call_end|>", MAX_ENDS,
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    "mistral": _Form(_mistral_calls, _MISTRAL_MARK, ""),
    "minimax": _Form(
        _pairs(r'"([^"]+)">', r'<parameter name="([^"]+)">', "</parameter>"), "<invoke name=", "</invoke>", 1,
        ("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    "glm": _Form(
        _pairs(r"([^<]+)", r"<arg_key>([^<]*)</arg_key>\s*<arg_value>", "</arg_value>"), sign="<arg_key>"
    ),
    "qwen_xml": _Form(
        _pairs(r"<function=([^>]+)>", r"<parameter=([^>]+)>", "</parameter>", "</function>", padding=r"\n?"),
        sign="<function=",
    ),
    "hermes": _Form(_json_calls, num_ends=MAX_ENDS),
    "llama": _Form(_llama_calls, _LLAMA_TAG, "", sign=r'<\|python_tag\|>|"parameters":\s*\{(?!\s*"type")'),
}  # fmt: skip
"""In the order in which that of a template is looked for."""


def form_of(written: str) -> ToolForm:
    for name, form in _FORMS.items():
        if re.search(form.sign or re.escape(form.begins), written):
            return name
    return "hermes"


def read_turn(
    text: str,
    form: ToolForm | None,
    *,
    begins_inside: bool = False,
    is_whole: bool = True,
    is_plain: bool = False,
    texts: TextParameters = MappingProxyType({}),
) -> TurnText:
    """`text`: without the token that ends the turn. `form` None: no tool may be called. `begins_inside`: of a thought.
    `is_whole`: False while more comes; then an end that may begin a mark is held back. `is_plain`: all are words."""
    if is_plain:
        return TurnText(content=text)
    reasoning, content = _thought(text, begins_inside=begins_inside, is_whole=is_whole)
    if form is None:
        return TurnText(reasoning, content if is_whole else without_begun(content, (THOUGHT_BEGINS,)))
    marks = _FORMS[form]
    if form == "llama" and (_LLAMA_CALL.match(content) if is_whole else content.lstrip().startswith("{")):
        content = f"{_LLAMA_TAG}{content.lstrip()}"
    openings = (marks.begins, *marks.wrapping[:1])
    begin = min((place for mark in openings if (place := content.find(mark)) >= 0), default=-1)
    if begin < 0:
        return TurnText(reasoning, content if is_whole else without_begun(content, (*openings, THOUGHT_BEGINS)))
    text = content[:begin]  # an end mark in it is a word, and was streamed
    if not is_whole:
        return TurnText(reasoning, text.rstrip())
    unread, calls = _without_calls(content[begin:], marks, texts)
    if marks.begins in unread or not calls:  # a call that cannot be read, or has no end
        return TurnText(reasoning, text + unread.removeprefix(_LLAMA_TAG if form == "llama" else ""), calls, True)
    for mark in marks.wrapping:
        unread = unread.replace(mark, "")
    return TurnText(reasoning, (text + unread).rstrip(), calls)


def _without_calls(text: str, form: _Form, texts: TextParameters) -> tuple[str, tuple[ToolCall, ...]]:
    """What is left of the text without the calls that can be read, and those."""
    pieces, calls, position = list[str](), list[ToolCall](), 0
    while (begin := text.find(form.begins, position)) >= 0:
        start = begin + len(form.begins)
        ends = list(islice(re.compile(re.escape(form.ends) or r"\Z").finditer(text, start), form.num_ends))
        if not ends:
            break
        pieces.append(text[position:begin])
        for end in ends:
            with suppress(ValueError, msgspec.MsgspecError):
                calls += form.read(text[start : end.start()], texts)
                position = end.end()
                break
        else:
            position = ends[0].end()
            pieces.append(text[begin:position])
    return "".join([*pieces, text[position:]]), tuple(calls)


def _thought(text: str, *, begins_inside: bool, is_whole: bool) -> tuple[str, str]:
    """The thought, and what follows it."""
    begun = text.lstrip()
    if not begins_inside and not begun.startswith(THOUGHT_BEGINS):
        may_begin = not is_whole and THOUGHT_BEGINS.startswith(begun)
        return "", "" if may_begin else text
    inside = text if begins_inside else begun[len(THOUGHT_BEGINS) :]
    thought, ends, content = inside.partition(THOUGHT_ENDS)
    if not ends:
        return (thought if is_whole else without_begun(thought, (THOUGHT_ENDS,))).strip("\n"), ""
    return thought.strip("\n"), content.lstrip("\n")


def cut_at(text: str, stops: Sequence[str]) -> tuple[str, str]:
    """The text up to the first stop string in it, and that; empty: there is none."""
    end, stop = min(((place, stop) for stop in stops if (place := text.find(stop)) >= 0), default=(len(text), ""))
    return text[:end], stop


def without_begun(text: str, marks: Sequence[str]) -> str:
    """The text without an end that may be the beginning of a mark, white space included."""
    for size in range(max(map(len, marks), default=1) - 1, 0, -1):
        if any(len(mark) > size and text.endswith(mark[:size]) for mark in marks):
            text = text[:-size]
            break
    return text.rstrip()
