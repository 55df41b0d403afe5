"""OpenAI's `/v1/responses`: a turn with its items, and conversations continued by the id of an answer."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, ClassVar, Literal

import msgspec

from ...core.samples import Message
from .exchange import (
    MODEL,
    Exchange,
    call_table,
    check_has,
    checked_messages,
    event,
    facts_of,
    function_tool,
    may_call,
    read_body,
    refuse,
    sampling_of,
    text_of,
)
from .openai_chat import json_text, openai_fault
from .session import AgentSession, Answer, RequestFault, TurnRequest

_log = logging.getLogger(__name__)
TEXT_PARTS = ("input_text", "output_text", "text", "refusal")
THOUGHT_PARTS = ("reasoning_text", "summary_text", "text")


class InputItem(msgspec.Struct):
    """An item of the input; fields that are not read are its client's."""

    type: Literal[
        "message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output", "reasoning"
    ] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[dict[str, Any]] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[dict[str, Any]] | None = None
    summary: list[dict[str, Any]] | None = None


_NEEDED = {
    "message": ("role", "content"), "function_call": ("name",), "function_call_output": ("output",),
    "custom_tool_call": ("name", "input"), "custom_tool_call_output": ("output",),
}  # fmt: skip


class Tool(msgspec.Struct):
    """A tool that the model may call: a function, one whose input is a text (`custom`), or a namespace of tools. Codex
    always names others, such as web_search."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    format: dict[str, Any] | None = None
    tools: list[Tool] | None = None


class TextFormat(msgspec.Struct):
    """How the words are written."""

    type: str = "text"


class TextSettings(msgspec.Struct):
    """Of the words."""

    format: TextFormat | None = None
    verbosity: Any = None


class ResponseBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What a client sends."""

    model: str = MODEL
    input: str | list[InputItem]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    text: TextSettings | None = None
    include: list[str] | None = None
    parallel_tool_calls: bool | None = None
    metadata: Any = None
    store: bool | None = None


def read_items(items: str | Sequence[InputItem]) -> list[Message]:
    """As messages: calls belong to the model's message before them. Raises RequestFault."""
    if isinstance(items, str):
        return [Message(role="user", content=items)]
    messages: list[Message] = []
    thought: dict[str, Any] = {}
    for number, item in enumerate(items):
        place = f"input[{number}]"
        check_has(item, _NEEDED.get(item.type, ()), place)
        if item.type == "reasoning":
            text = text_of(item.content or item.summary, f"{place}.content", THOUGHT_PARTS)
            thought = {"reasoning_content": text} if text else {}
        elif item.type == "message":
            role = "system" if item.role == "developer" else str(item.role)
            text = text_of(item.content, f"{place}.content", TEXT_PARTS)
            messages.append(Message(role=role, content=text, extra=thought if role == "assistant" else {}))
            thought = {}
        elif item.type in ("function_call", "custom_tool_call"):
            if not messages or messages[-1].role != "assistant":
                messages.append(Message(role="assistant", content="", extra=thought))
                thought = {}
            arguments = item.arguments if item.input is None else json_text({"input": item.input})
            name = shown_name(item.namespace, str(item.name))
            calls = (*messages[-1].tool_calls, call_table(item.call_id, name, arguments))
            messages[-1] = msgspec.structs.replace(messages[-1], tool_calls=calls)
        else:
            output = text_of(item.output, f"{place}.output", TEXT_PARTS)
            messages.append(Message(role="tool", content=output, tool_call_id=item.call_id or ""))
    return messages


def shown_name(namespace: str | None, name: str) -> str:
    """By which the model knows a tool of a namespace."""
    return f"{namespace.removesuffix('__')}__{name}" if namespace else name


def named_tools(tools: Sequence[Tool], place: str = "tools", namespace: str = "") -> dict[str, tuple[str, Tool]]:
    """Each with its namespace, by the name that the model knows. Raises RequestFault for one without a name."""
    named: dict[str, tuple[str, Tool]] = {}
    for number, tool in enumerate(tools):
        if tool.type not in ("function", "custom", "namespace"):
            _warn_of_left_out(tool.type)
            continue
        check_has(tool, ("name",), f"{place}[{number}]")
        if tool.type == "namespace":
            named |= named_tools(tool.tools or (), f"{place}[{number}].tools", str(tool.name))
        else:
            named[shown_name(namespace, str(tool.name))] = namespace, tool
    return named


def _shown(name: str, tool: Tool) -> dict[str, Any]:
    if tool.type == "function":
        return function_tool(name, tool.description, tool.parameters)
    grammar = (tool.format or {}).get("definition")
    about = f"{tool.description or ''}\n\nThe grammar of its input:\n{grammar}" if grammar else tool.description
    return function_tool(
        name, about, {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    )


@lru_cache(maxsize=64)
def _warn_of_left_out(kind: str) -> None:
    """Once."""
    _log.warning(
        "a client's tools of type %s are left out: the model is shown functions, custom tools and namespaces", kind
    )


class Response(Exchange):
    """A conversation, or what follows an earlier answer, and the next turn."""

    path: ClassVar[str] = "/v1/responses"
    fault = staticmethod(openai_fault)

    def __init__(self, raw: bytes, key: bytes, session: AgentSession) -> None:
        """`session`: knows conversations up to earlier answers; this one's is added by `whole` and `close`."""
        super().__init__()
        self._body = body = read_body(raw, ResponseBody)
        is_text = body.text is None or body.text.format is None or body.text.format.type == "text"
        refuse(not is_text, "text.format", "must be text: no grammar is applied")
        asks_logprobs = "message.output_text.logprobs" in (body.include or ())
        refuse(asks_logprobs, "include", "cannot ask for log-probs here: ask /v1/chat/completions")
        before: tuple[Message, ...] = ()
        if body.previous_response_id is not None:
            if body.previous_response_id not in session.conversations:
                reason = f"no response {body.previous_response_id} was given in this session"
                raise RequestFault("not-found", reason, param="previous_response_id")
            before = session.conversations[body.previous_response_id]
        self._tools = named_tools(body.tools or ())
        instructions = (Message(role="system", content=body.instructions),) if body.instructions else ()
        self._session, self._messages = session, checked_messages([*before, *read_items(body.input)], "input")
        self.request = TurnRequest(
            messages=(*instructions, *self._messages),
            tools=tuple(_shown(name, tool) for name, (_, tool) in self._tools.items()),
            may_call=may_call(body.tool_choice),
            max_calls=1 if body.parallel_tool_calls is False else None,
            sampling=sampling_of(temperature=body.temperature, top_p=body.top_p, max_new_tokens=body.max_output_tokens),
            client_names={"max_new_tokens": "max_output_tokens"},
            fingerprint=key,
        )
        self.is_stream = bool(body.stream)
        self._sent = {"reasoning": "", "content": ""}
        self._number = 0

    @property
    def _name(self) -> str:
        return f"resp_{self.id}"

    def _object(self, answer: Answer | None) -> dict[str, Any]:
        body = self._body
        is_cut = answer is not None and answer.finish == "length"
        usage = None
        if answer is not None:
            drawn = len(answer.token_ids)
            usage = {
                "input_tokens": answer.num_prompt, "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": drawn, "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": answer.num_prompt + drawn,
            }  # fmt: skip
        return {
            "id": self._name, "object": "response", "created_at": self.created, "model": body.model,
            "status": "in_progress" if answer is None else "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None, "error": None,
            "instructions": body.instructions, "previous_response_id": body.previous_response_id,
            "output": [] if answer is None else list(self._items(answer)),
            "tools": msgspec.to_builtins([tool for _, tool in self._tools.values()]),
            "tool_choice": body.tool_choice or "auto",
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "temperature": body.temperature, "top_p": body.top_p,
            "max_output_tokens": body.max_output_tokens, "metadata": body.metadata or {}, "usage": usage,
            **({} if answer is None else {"myxa": facts_of([answer]), "token_ids": list(answer.token_ids)}),
        }  # fmt: skip

    def _items(self, answer: Answer) -> Iterator[dict[str, Any]]:
        text = answer.text
        if text.reasoning:
            yield self._item("reasoning", text.reasoning)
        if text.content or not text.calls:
            yield self._item("content", text.content)
        for number, call in zip(answer.call_ids, text.calls, strict=True):
            namespace, tool = self._tools.get(call.name, ("", None))
            name = call.name if tool is None else tool.name
            item = {"id": f"fc_{number}", "call_id": number, "name": name, "status": "completed"}
            item |= {"namespace": namespace} if namespace else {}
            if tool is not None and tool.type == "custom":
                text = call.arguments.get("input")
                text = text if isinstance(text, str) else json_text(call.arguments)
                yield {**item, "type": "custom_tool_call", "id": f"ctc_{number}", "input": text}
            else:
                yield {**item, "type": "function_call", "arguments": json_text(call.arguments)}

    def _item(self, kind: str, text: str | None) -> dict[str, Any]:
        """A thought or the words; without `text`, one that has just begun."""
        status = "in_progress" if text is None else "completed"
        if kind == "reasoning":
            parts = [] if text is None else [{"type": "reasoning_text", "text": text}]
            return {"type": "reasoning", "id": f"rs_{self.id}", "summary": [], "content": parts, "status": status}
        parts = [] if text is None else [_part(text)]
        return {"type": "message", "id": f"msg_{self.id}", "role": "assistant", "content": parts, "status": status}

    def body(self, answers: Sequence[Answer]) -> dict[str, Any]:
        if self._body.store is not False:
            self._session.remember(self._name, (*self._messages, answers[0].message()))
        return self._object(answers[0])

    def _event(self, kind: str, **data: Any) -> str:
        self._number += 1
        name = f"response.{kind}"
        return event({"type": name, "sequence_number": self._number - 1, **data}, name)

    def begin(self, num_prompt: int) -> str:
        return self._event("created", response=self._object(None)) + self._event(
            "in_progress", response=self._object(None)
        )

    def delta(self, index: int, reasoning: str, content: str) -> str:
        return self._more("reasoning", reasoning) + self._more("content", content)

    def _place(self, kind: str) -> dict[str, Any]:
        after = bool(self._sent["reasoning"]) if kind == "content" else False
        item = f"{'rs' if kind == 'reasoning' else 'msg'}_{self.id}"
        return {"item_id": item, "output_index": int(after), "content_index": 0}

    def _more(self, kind: str, text: str) -> str:
        if not text:
            return ""
        place, begun = self._place(kind), ""
        if not self._sent[kind]:
            begun = self._event("output_item.added", output_index=place["output_index"], item=self._item(kind, None))
            if kind == "content":
                begun += self._event("content_part.added", **place, part=_part(""))
        self._sent[kind] += text
        name = "output_text.delta" if kind == "content" else "reasoning_text.delta"
        return begun + self._event(name, **place, delta=text, **({"logprobs": []} if kind == "content" else {}))

    def end(self, index: int, answer: Answer) -> str:
        out = ""
        if not answer.text.calls and not self._sent["content"] and not answer.text.content:
            out += self._event("output_item.added", output_index=self._place("content")["output_index"],
                               item=self._item("content", None))  # fmt: skip
        for number, item in enumerate(self._items(answer)):
            if item["type"] in ("function_call", "custom_tool_call"):
                field = "arguments" if item["type"] == "function_call" else "input"
                begun = {**item, field: "", "status": "in_progress"}
                place = {"item_id": item["id"], "output_index": number}
                out += self._event("output_item.added", output_index=number, item=begun)
                kind = f"{item['type']}_{field}"
                out += self._event(f"{kind}.delta", **place, delta=item[field])
                out += self._event(f"{kind}.done", **place, **{field: item[field]}, name=item["name"])
            elif item["type"] == "message" and self._sent["content"]:
                place = self._place("content")
                out += self._event("output_text.done", **place, text=answer.text.content, logprobs=[])
                out += self._event("content_part.done", **place, part=_part(answer.text.content))
            elif item["type"] == "reasoning":
                out += self._event("reasoning_text.done", **self._place("reasoning"), text=answer.text.reasoning)
            out += self._event("output_item.done", output_index=number, item=item)
        return out

    def close(self, answers: Sequence[Answer]) -> str:
        kind = "incomplete" if answers[0].finish == "length" else "completed"
        return self._event(kind, response=self.body(answers))


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
