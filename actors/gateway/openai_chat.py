"""OpenAI's `/v1/chat/completions` and `/v1/completions`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import msgspec

from ...core.samples import Message
from .exchange import (
    MAX_CHOICES,
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
from .session import HALF, Answer, RequestFault, TurnRequest, as_text

_TYPES = {"auth": "authentication_error", "busy": "server_error", "engine": "server_error"}
_CODES = {"auth": "invalid_api_key", "too-long": "context_length_exceeded", "too-large": "request_too_large"}
DONE = "data: [DONE]\n\n"
SAMPLING_FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "seed",
)  # fmt: skip


def openai_fault(fault: RequestFault) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    kind = _TYPES.get(fault.kind, "invalid_request_error")
    return {"error": {"message": fault.text, "type": kind, "param": fault.param, "code": _CODES.get(fault.kind)}}


class _Shared(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: str = MODEL
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    n: int | None = None
    logit_bias: dict[str, float] | None = None
    parallel_tool_calls: bool | None = None

    @property
    def num(self) -> int:
        return 1 if self.n is None else self.n

    def sampling(self, max_tokens: int | None) -> dict[str, Any]:
        """Raises RequestFault."""
        refuse(self.logit_bias, "logit_bias", "would change what is learnt: leave it out")
        refuse(not 1 <= self.num <= MAX_CHOICES, "n", f"is {self.n}: use 1 to {MAX_CHOICES}")
        values = {name: getattr(self, name) for name in SAMPLING_FIELDS}
        return sampling_of(**values, stop=self.stop, max_new_tokens=max_tokens)


class CalledFunction(msgspec.Struct):
    """Of a tool call in a history."""

    name: str
    arguments: str | dict[str, Any] | None = None


class CalledTool(msgspec.Struct):
    """A tool call in a history."""

    function: CalledFunction
    id: str | None = None


class ChatMessage(msgspec.Struct):
    """A message as clients send it; fields that are not read are theirs."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    function_call: dict[str, Any] | None = None
    refusal: str | None = None


class ToolFunction(msgspec.Struct):
    """What a tool does."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ChatTool(msgspec.Struct):
    """A tool that the model may call."""

    type: Literal["function"]
    function: ToolFunction


class ChatBody(_Shared, forbid_unknown_fields=True, kw_only=True):
    """What a client sends to `/v1/chat/completions`."""

    messages: list[ChatMessage]
    tools: list[ChatTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None


class CompletionBody(_Shared, forbid_unknown_fields=True, kw_only=True):
    """What a client sends to `/v1/completions`."""

    prompt: str | list[Any]
    max_tokens: int | None = None
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


def read_message(message: ChatMessage, place: str) -> Message:
    """Of a chat history. Raises RequestFault."""
    refuse(message.function_call is not None, f"{place}.function_call", "is of an old form: use tool_calls")
    if message.role != "assistant":
        check_has(message, ("content",), place)
    thought = message.reasoning_content or message.reasoning
    return Message(
        role="system" if message.role == "developer" else message.role,
        content=text_of(message.content, f"{place}.content", ("text", "refusal")) or message.refusal or "",
        name=message.name or "",
        tool_calls=tuple(
            call_table(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ()
        ),
        tool_call_id=message.tool_call_id or "",
        extra={"reasoning_content": thought} if thought else {},
    )


class _Completion(Exchange):
    """What both have."""

    fault = staticmethod(openai_fault)
    kind: ClassVar[str]
    """Of a stream's events."""

    def _take(self, body: ChatBody | CompletionBody) -> None:
        self.model, self.num, self.is_stream = body.model, body.num, bool(body.stream)
        self._tells_usage = bool((body.stream_options or {}).get("include_usage"))
        self._tells_logprobs = body.logprobs is not None and body.logprobs is not False

    def _head(self, kind: str) -> dict[str, Any]:
        prefix = "cmpl" if kind == TextCompletion.kind else "chatcmpl"
        return {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}

    def _whole(self, kind: str, choices: list[dict[str, Any]], answers: Sequence[Answer]) -> dict[str, Any]:
        usage, facts = usage_of(answers), facts_of(answers)
        return {**self._head(kind), "choices": choices, "usage": usage, "myxa": facts}

    def close(self, answers: Sequence[Answer]) -> str:
        return (event(self._whole(self.kind, [], answers)) if self._tells_usage else "") + DONE


class ChatCompletion(_Completion):
    """A chat and its next turn."""

    path: ClassVar[str] = "/v1/chat/completions"
    kind = "chat.completion.chunk"

    def __init__(self, raw: bytes, key: bytes) -> None:
        super().__init__()
        body = read_body(raw, ChatBody)
        is_text = body.response_format in (None, {"type": "text"})
        refuse(not is_text, "response_format", "must be text: no grammar is applied")
        refuse(body.modalities not in (None, ["text"]), "modalities", "must be text")
        refuse(body.top_logprobs, "top_logprobs", "must be 0: engines tell those of drawn tokens")
        functions = [tool.function for tool in body.tools or ()]
        messages = [read_message(message, f"messages[{number}]") for number, message in enumerate(body.messages)]
        limit_name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        self.request = TurnRequest(
            messages=checked_messages(messages),
            tools=tuple(function_tool(tool.name, tool.description, tool.parameters) for tool in functions),
            may_call=may_call(body.tool_choice),
            max_calls=1 if body.parallel_tool_calls is False else None,
            sampling=body.sampling(getattr(body, limit_name)),
            client_names={"max_new_tokens": limit_name},
            fingerprint=key,
        )
        self._take(body)

    def body(self, answers: Sequence[Answer]) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": {
                    "role": "assistant",
                    "content": answer.text.content or (None if answer.text.calls else ""),
                    "refusal": None,
                    **self._more(answer),
                },
                "logprobs": self._logprobs(answer),
                "finish_reason": finish_of(answer),
                "token_ids": list(answer.token_ids),
            }
            for index, answer in enumerate(answers)
        ]
        return self._whole("chat.completion", choices, answers)

    def _more(self, answer: Answer) -> dict[str, Any]:
        message = answer.message()
        calls = list(map(as_text, message.tool_calls))
        return {**message.extra, **({"tool_calls": calls} if calls else {})}

    def _logprobs(self, answer: Answer) -> dict[str, Any] | None:
        if not self._tells_logprobs:
            return None
        texts = [self.decode([token]) for token in answer.token_ids]
        return {
            "content": [
                {"token": text, "logprob": value, "bytes": _bytes_of(text), "top_logprobs": []}
                for text, value in zip(texts, answer.logprobs, strict=True)
            ],
            "refusal": None,
        }

    def _chunk(self, index: int, delta: dict[str, Any], finish: str | None = None, **more: Any) -> str:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish, **more}
        return event({**self._head(self.kind), "choices": [choice]})

    def begin(self, num_prompt: int) -> str:
        return "".join(self._chunk(index, {"role": "assistant", "content": ""}) for index in range(self.num))

    def delta(self, index: int, reasoning: str, content: str) -> str:
        thought = self._chunk(index, {"reasoning_content": reasoning}) if reasoning else ""
        return thought + (self._chunk(index, {"content": content}) if content else "")

    def end(self, index: int, answer: Answer) -> str:
        calls = [{"index": number, **call} for number, call in enumerate(self._more(answer).get("tool_calls", []))]
        calls_chunk = self._chunk(index, {"tool_calls": calls}) if calls else ""
        more = {"logprobs": self._logprobs(answer), "token_ids": list(answer.token_ids)}
        return calls_chunk + self._chunk(index, {}, finish_of(answer), **more)


class TextCompletion(_Completion):
    """A text and how it continues. No chat template is applied; each is a sample of its own."""

    path: ClassVar[str] = "/v1/completions"
    kind = "text_completion"

    def __init__(self, raw: bytes, key: bytes) -> None:
        super().__init__()
        body = read_body(raw, CompletionBody)
        one: Any = body.prompt[0] if isinstance(body.prompt, list) and len(body.prompt) == 1 else body.prompt
        text: str | list[int] = ""
        with contextlib.suppress(msgspec.ValidationError):
            text = msgspec.convert([one] if isinstance(one, int) else one, str | list[int])
        refuse(not text, "prompt", "must be one text, or the token ids of one")
        others = body.echo or body.suffix or body.best_of not in (None, 1)
        refuse(others, "echo", "is not supported, nor are suffix and best_of: leave them out")
        refuse((body.logprobs or 0) > 1, "logprobs", "must be 0 or 1: engines tell those of drawn tokens")
        limit = 16 if body.max_tokens is None else body.max_tokens
        self.request = TurnRequest(text=text, sampling=body.sampling(limit), may_call=False, fingerprint=key)
        self._take(body)

    def body(self, answers: Sequence[Answer]) -> dict[str, Any]:
        choices = [self._choice(index, answer.text.content, answer) for index, answer in enumerate(answers)]
        return self._whole(self.kind, choices, answers)

    def _choice(self, index: int, text: str, answer: Answer | None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
        if answer is None:
            return choice
        if self._tells_logprobs:
            texts = [self.decode([token]) for token in answer.token_ids]
            choice["logprobs"] = {"tokens": texts, "token_logprobs": list(answer.logprobs), "top_logprobs": None}
        return {**choice, "finish_reason": answer.finish, "token_ids": list(answer.token_ids)}

    def delta(self, index: int, reasoning: str, content: str) -> str:
        return event({**self._head(self.kind), "choices": [self._choice(index, content, None)]})

    def end(self, index: int, answer: Answer) -> str:
        return event({**self._head(self.kind), "choices": [self._choice(index, "", answer)]})


def _bytes_of(text: str) -> list[int] | None:
    """Of a token; None: it is a part of a character, which its text does not say."""
    return None if HALF in text else list(text.encode())


def json_text(arguments: dict[str, Any]) -> str:
    """Of a tool call, as the dialect has them: JSON in a text."""
    return msgspec.json.encode(arguments).decode()


def finish_of(answer: Answer) -> str:
    """Why a turn of a chat ended."""
    return "tool_calls" if answer.text.calls and answer.finish == "stop" else answer.finish


def usage_of(answers: Sequence[Answer]) -> dict[str, int]:
    """Tokens that were read and drawn."""
    num_prompt, num_drawn = answers[0].num_prompt, sum(len(answer.token_ids) for answer in answers)
    return {"prompt_tokens": num_prompt, "completion_tokens": num_drawn, "total_tokens": num_prompt + num_drawn}
