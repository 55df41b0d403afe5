"""One request and its answer, whatever the dialect: the seam that dialects stand behind, and what they share."""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, ClassVar, TypeVar, cast

import msgspec

from ...core.ids import POLICY
from ...core.samples import Message
from .session import Answer, RequestFault, TurnRequest

T = TypeVar("T")
MODEL = POLICY
"""The name of what is trained. Any name that a client says is taken, but for those of `[models.NAME]`."""
MAX_CHOICES = 128
Decode = Callable[[Sequence[int]], str]
_PLACE = re.compile(r"(?:at `\$\.?|field `)([^`]*)`")


class Exchange(ABC):
    """A request that was read, and how its answer is written. Streams are server-sent events."""

    path: ClassVar[str]
    request: TurnRequest
    num: int = 1
    """How many answers are wanted."""
    is_stream: bool = False

    def __init__(self) -> None:
        self.id = ""
        """Set by the server."""
        self.created = int(time.time())
        self.decode: Decode = lambda ids: ""
        """Special tokens kept; set by the server."""

    @abstractmethod
    def body(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""

    def begin(self, num_prompt: int) -> str:
        """Events before the first text. `num_prompt`: tokens before the turn."""
        return ""

    @abstractmethod
    def delta(self, index: int, reasoning: str, content: str) -> str:
        """Events for more text of answer number `index`; either may be empty."""

    @abstractmethod
    def end(self, index: int, answer: Answer) -> str:
        """Events for the end of an answer whose text was sent: its calls, why it ended."""

    @abstractmethod
    def close(self, answers: Sequence[Answer]) -> str:
        """Events after the last answer."""

    @staticmethod
    @abstractmethod
    def fault(fault: RequestFault) -> dict[str, Any]:
        """The body of a refusal; as an event, if the stream has begun."""


STATUS: Mapping[str, int] = {
    "invalid": 400, "auth": 401, "not-found": 404, "too-large": 413, "too-long": 400, "busy": 503, "engine": 503,
}  # fmt: skip
"""By the kind of a fault."""


WITHOUT_EFFECT = frozenset((
    "cache_control", "client_metadata", "context_management", "diagnostics", "inference_geo", "metadata",
    "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "reasoning", "reasoning_effort",
    "return_token_ids", "safety_identifier", "service_tier", "speed", "store", "stream_options", "thinking",
    "truncation", "user", "verbosity",
))  # fmt: skip
"""Fields of requests that change no answer. Each answer has its token ids."""


def read_body(body: bytes, kind: type[T]) -> T:
    """A JSON body as a struct; without nulls and, of the fields that it does not know, those WITHOUT_EFFECT. Raises
    RequestFault, which names the field."""
    try:
        table = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        left_out = WITHOUT_EFFECT.difference(getattr(kind, "__struct_fields__", ()))
        said = {name: value for name, value in table.items() if name not in left_out and bytes(value) != b"null"}
        return msgspec.json.decode(msgspec.json.encode(said), type=kind)
    except (RecursionError, UnicodeError) as error:
        raise RequestFault("invalid", f"the body is nested too deeply, or is no UTF-8: {error}") from None
    except msgspec.DecodeError as error:
        param = ".".join(reversed(_PLACE.findall(str(error)))) or None
        raise RequestFault("invalid", f"the body cannot be read: {error}", param=param) from None


def fingerprint(path: str, body: bytes, retry_key: str) -> bytes:
    """Of a request; `retry_key`: what its client says to mark repetitions."""
    return blake2b(b"\0".join((path.encode(), retry_key.encode(), body)), digest_size=16).digest()


_LINE_ENDS = str.maketrans({end: f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"})


def event(data: Mapping[str, Any], name: str = "") -> str:
    """A server-sent event. What some clients take for ends of lines inside its text is escaped."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {msgspec.json.encode(data).decode().translate(_LINE_ENDS)}\n\n"


def text_of(content: object, param: str, kinds: tuple[str, ...] = ("text",)) -> str:
    """Content that is a text, a list of texts or nothing. Raises RequestFault for images and other kinds."""
    if content is None or isinstance(content, str):
        return content or ""
    refuse(not isinstance(content, list), param, "is neither a text nor a list of parts")
    texts: list[str] = []
    for part in cast("list[object]", content):
        table = cast("dict[str, Any]", part) if isinstance(part, dict) else dict[str, Any]()
        kind = table.get("type", "none")
        text = table.get("refusal" if kind == "refusal" else "text")
        is_text = kind in kinds and isinstance(text, str)
        refuse(not is_text, param, f"has a part of type {kind!r}: this model reads text")
        texts.append(str(text))
    return "".join(texts)


def check_has(entry: object, names: Sequence[str], place: str) -> None:
    """Raises RequestFault for an entry of a request without a field that its kind has."""
    for name in names:
        refuse(getattr(entry, name) is None, f"{place}.{name}", "is missing or null")


def arguments_of(text: object) -> Any:
    """Of a tool call in a history: as templates expect them, a table, where the text is one or there is none."""
    if not isinstance(text, str) or not text.strip():
        return text or {}
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError:
        return text


def call_table(number: str | None, name: str, arguments: object) -> dict[str, Any]:
    """A tool call as chat templates know it."""
    return {"id": number or "", "type": "function", "function": {"name": name, "arguments": arguments_of(arguments)}}


def function_tool(name: str, description: str | None, parameters: dict[str, Any] | None) -> dict[str, Any]:
    """A tool as chat templates know it."""
    about = {"description": description} if description else {}
    return {"type": "function", "function": {"name": name, **about, "parameters": parameters or {"type": "object"}}}


def refuse(is_wrong: object, param: str, fault: str) -> None:
    """Raises RequestFault for a field that is wrong. `fault`: behind its name."""
    if is_wrong:
        raise RequestFault("invalid", f"{param} {fault}", param=param)


def may_call(choice: str | dict[str, Any] | None) -> bool:
    """Whether the model may call tools. Raises RequestFault for a call that is forced."""
    kind = choice.get("type") if isinstance(choice, dict) else choice
    fault = "must be auto or none: a call that is forced is none of the model's own"
    refuse(kind not in (None, "auto", "none"), "tool_choice", fault)
    return kind != "none"


def sampling_of(**values: object) -> dict[str, Any]:
    """What a client says, without what it leaves out."""
    sampling: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
    if "stop" in sampling:
        sampling["stop"] = (sampling["stop"],) if isinstance(sampling["stop"], str) else tuple(sampling["stop"])
    return sampling


def checked_messages(messages: Sequence[Message], param: str = "messages") -> tuple[Message, ...]:
    """Raises RequestFault for none."""
    refuse(not messages, param, "is empty: send at least one")
    return tuple(messages)


def facts_of(answers: Sequence[Answer]) -> dict[str, Any]:
    """What no dialect has a field for."""
    return {
        "versions": [min(answer.versions[0] for answer in answers), max(answer.versions[1] for answer in answers)],
        "answers": [answer.id for answer in answers],
        "is_malformed": any(answer.text.is_malformed for answer in answers),
    }
