"""Anthropic's `/v1/messages`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
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
)
from .openai_chat import json_text
from .session import CLIENT_NAMES, Answer, RequestFault, TurnRequest

_TYPES = {
    "auth": "authentication_error", "not-found": "not_found_error", "too-large": "request_too_large",
    "busy": "overloaded_error", "engine": "api_error",
}  # fmt: skip


def anthropic_fault(fault: RequestFault) -> dict[str, Any]:
    """An error as Anthropic's clients read it."""
    text = fault.text if fault.text.startswith(fault.param or "") else f"{fault.param}: {fault.text}"
    if fault.kind == "too-long":  # words by which Claude Code knows that it has to shorten the conversation
        text = f"prompt is too long: {fault.text}"
    details = {"details": {"error_code": fault.code}} if fault.code else {}
    kind = _TYPES.get(fault.kind, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": text, **details}}


class Block(msgspec.Struct):
    """A part of a message; fields that are not read are its client's."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    is_error: bool | None = None


_NEEDED = {"text": ("text",), "thinking": ("thinking",), "tool_use": ("name",), "tool_result": ("tool_use_id",)}


class ClientMessage(msgspec.Struct):
    """A message as clients send it."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ClientTool(msgspec.Struct):
    """A tool that the model may call."""

    name: str
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None


class MessagesBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What a client sends."""

    model: str = MODEL
    messages: list[ClientMessage]
    max_tokens: int
    system: str | list[Block] | None = None
    tools: list[ClientTool] | None = None
    tool_choice: dict[str, Any] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    thread: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None


def _text(content: str | Sequence[Block] | None, place: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for block in content:
        refuse(block.type != "text", place, f"has a block of type {block.type!r}: this model reads text")
        check_has(block, _NEEDED["text"], place)
    return "".join(str(block.text) for block in content)


def read_client_message(message: ClientMessage, place: str) -> Iterator[Message]:
    """As chat templates know it: answers of tools are messages of their own. Raises RequestFault."""
    blocks = [Block("text", text=message.content)] if isinstance(message.content, str) else message.content
    for block in blocks:
        check_has(block, _NEEDED.get(block.type, ()), place)
    if message.role == "assistant":
        calls = tuple(
            call_table(block.id, str(block.name), block.input) for block in blocks if block.type == "tool_use"
        )
        thought = "".join(str(block.thinking) for block in blocks if block.type == "thinking")
        text_blocks = [block for block in blocks if block.type not in ("tool_use", "thinking", "redacted_thinking")]
        extra = {"reasoning_content": thought} if thought else {}
        yield Message(role="assistant", content=_text(text_blocks, place), tool_calls=calls, extra=extra)
        return
    refuse(not blocks, f"{place}.content", "is an empty list")
    for is_result, group in groupby(blocks, lambda block: block.type == "tool_result"):
        if not is_result:
            yield Message(role=message.role, content=_text(list(group), place))
            continue
        for block in group:
            text = _text(block.content, place)
            text = f"<error>{text}</error>" if block.is_error else text
            yield Message(role="tool", content=text, tool_call_id=str(block.tool_use_id))


class AnthropicMessage(Exchange):
    """A conversation and its next turn."""

    path: ClassVar[str] = "/v1/messages"
    fault = staticmethod(anthropic_fault)

    def __init__(self, raw: bytes, key: bytes) -> None:
        super().__init__()
        body = read_body(raw, MessagesBody)
        if body.thread is not None:  # the SDK's tool runner then sends its request again without one
            reason = "no thread is kept here: send all messages with each request"
            raise RequestFault("invalid", reason, param="thread", code="thread_unsupported_request")
        has_format = (body.output_config or {}).get("format")
        refuse(has_format, "output_config.format", "must be left out: no grammar is applied")
        for number, tool in enumerate(body.tools or ()):
            reason = f"is of type {tool.type!r}, run by its maker's servers: give one with an input_schema"
            refuse(tool.type not in (None, "custom"), f"tools.{number}", reason)
        system = _text(body.system, "system")
        messages = [Message(role="system", content=system)] if system else []
        for number, message in enumerate(body.messages):
            messages += read_client_message(message, f"messages.{number}")
        self.request = TurnRequest(
            messages=checked_messages(messages),
            tools=tuple(function_tool(tool.name, tool.description, tool.input_schema) for tool in body.tools or ()),
            may_call=may_call(body.tool_choice),
            max_calls=1 if (body.tool_choice or {}).get("disable_parallel_tool_use") else None,
            sampling=sampling_of(
                temperature=body.temperature, top_p=body.top_p, top_k=body.top_k, max_new_tokens=body.max_tokens,
                stop=body.stop_sequences,
            ),
            client_names={**CLIENT_NAMES, "stop": "stop_sequences"}, fingerprint=key,
        )  # fmt: skip
        self.model, self.is_stream = body.model, bool(body.stream)
        self._open = ""
        self._at = -1

    def _head(self, num_prompt: int, num_drawn: int) -> dict[str, Any]:
        usage = {"input_tokens": num_prompt, "output_tokens": num_drawn}
        return {"id": f"msg_{self.id}", "type": "message", "role": "assistant", "model": self.model, "usage": usage}

    def body(self, answers: Sequence[Answer]) -> dict[str, Any]:
        answer = answers[0]
        text = answer.text
        blocks: list[dict[str, Any]] = []
        if text.reasoning:
            blocks.append({"type": "thinking", "thinking": text.reasoning, "signature": ""})
        if text.content or not text.calls:
            blocks.append({"type": "text", "text": text.content, "citations": None})
        blocks += [
            {"type": "tool_use", "id": number, "name": call.name, "input": call.arguments}
            for number, call in zip(answer.call_ids, text.calls, strict=True)
        ]
        head = self._head(answer.num_prompt, len(answer.token_ids))
        return {**head, "content": blocks, **stopped(answer), **told(answer)}

    def begin(self, num_prompt: int) -> str:
        message = {**self._head(num_prompt, 0), "content": list[Any](), "stop_reason": None, "stop_sequence": None}
        return _event("message_start", message=message)

    def delta(self, index: int, reasoning: str, content: str) -> str:
        return self._more("thinking", reasoning) + self._more("text", content)

    def _more(self, kind: str, text: str) -> str:
        if not text:
            return ""
        begun = ""
        if self._open != kind:
            empty = {"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})}
            begun = self._closed() + self._begun(kind, empty)
        return begun + _event("content_block_delta", index=self._at, delta={"type": f"{kind}_delta", kind: text})

    def _begun(self, kind: str, block: dict[str, Any]) -> str:
        self._open, self._at = kind, self._at + 1
        return _event("content_block_start", index=self._at, content_block=block)

    def _closed(self) -> str:
        kind, self._open = self._open, ""
        return _event("content_block_stop", index=self._at) if kind else ""

    def end(self, index: int, answer: Answer) -> str:
        out = self._closed()
        if self._at < 0 and not answer.text.calls:
            out += self._begun("text", {"type": "text", "text": ""}) + self._closed()
        for number, call in zip(answer.call_ids, answer.text.calls, strict=True):
            out += self._begun("tool_use", {"type": "tool_use", "id": number, "name": call.name, "input": {}})
            delta = {"type": "input_json_delta", "partial_json": json_text(call.arguments)}
            out += _event("content_block_delta", index=self._at, delta=delta) + self._closed()
        return out

    def close(self, answers: Sequence[Answer]) -> str:
        answer = answers[0]
        usage = self._head(answer.num_prompt, len(answer.token_ids))["usage"]
        return _event("message_delta", delta=stopped(answer), usage=usage, **told(answer)) + _event("message_stop")


def stopped(answer: Answer) -> dict[str, str | None]:
    """Why the turn ended."""
    ended = "tool_use" if answer.text.calls else "stop_sequence" if answer.stop else "end_turn"
    return {"stop_reason": "max_tokens" if answer.finish == "length" else ended, "stop_sequence": answer.stop or None}


def told(answer: Answer) -> dict[str, Any]:
    """What the dialect has no field for."""
    return {"token_ids": list(answer.token_ids), "myxa": facts_of([answer])}


def _event(kind: str, **data: Any) -> str:
    return event({"type": kind, **data}, kind)
