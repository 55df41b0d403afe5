"""The prompt of a row: a text, or a list of chat messages with text in them; and the tools that go with it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, cast

import orjson
from msgspec.structs import replace

from ...core.samples import LOSS_KEYS, REASONING_KEYS, Message
from .row_file import Columns, NotJson, RowError, exact_json

KNOWN_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id")
MEDIA_KEYS = ("image", "images", "image_url", "video", "videos", "audio", "audios")
"""Of a message; the model would read their place holders as text."""

SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
"""Of ShareGPT's form, with their roles."""
ROLES = (*SPEAKERS, "developer", "function")
WRAPPERS = ("messages", "conversations", "conversation", "prompt")
MESSAGES = re.compile(rf"""['"](?:role|from)['"]\s*:\s*['"](?:{"|".join(ROLES)})['"]""")
"""In messages as Python shows them, and in JSON that is broken."""


def parse_messages(value: object, key: str) -> tuple[Message, ...]:
    """A text becomes one user message. Raises RowError for anything but text or a list of messages."""
    if isinstance(value, str):
        if not value.strip():
            raise RowError(f'column "{key}" is empty', "fill it or leave the row out")
        return (Message(role="user", content=value),)
    if not isinstance(value, list):
        raise RowError(
            f'column "{key}" holds {type(value).__name__}, not a text or a list of messages',
            'write a text or [{"role": "user", "content": "..."}]',
        )
    messages = cast("list[object]", value)
    if not messages:
        raise RowError(f'column "{key}" is an empty list', "fill it or leave the row out")
    return tuple(
        _plain_message(value) or _message(value, f'message {number} of "{key}"')
        for number, value in enumerate(messages, start=1)
    )


def parse_json_messages(value: object, key: str) -> object:
    """The list that a text holds, if it is a JSON array of messages; anything else as it is. Raises RowError for a text
    that means messages in another form: they would be read as the words of one message."""
    if not isinstance(value, str) or value.lstrip("\ufeff \t\r\n")[:1] not in ("[", "{", '"'):
        return value
    text = value.strip("\ufeff \t\r\n")
    try:
        parsed: object = orjson.loads(text)
    except ValueError:
        is_other = text[-1] in "]}" and text[0] != '"' and MESSAGES.search(text) is not None
    else:
        if _are_messages(parsed):
            return exact_json(text)
        table = cast("Columns", parsed) if isinstance(parsed, dict) else {}
        is_other = any(map(_are_messages, ([table], *(table.get(name) for name in WRAPPERS))))
        is_other = is_other or (isinstance(parsed, str) and parse_json_messages(parsed, key) is not parsed)
    if is_other:
        raise RowError(
            f'column "{key}" holds a text that means messages, and is no JSON array of them',
            "store the list itself, or the text that `json.dumps` makes of it",
        )
    return value


def _are_messages(value: object) -> bool:
    """Whether it is a list of nothing else."""
    items = cast("list[object]", value) if isinstance(value, list) else []
    tables = [cast("Columns", item) for item in items if isinstance(item, dict)]
    messages = [t for t in tables if t.get("role", t.get("from")) in ROLES or {"role", "content"} <= t.keys()]
    return bool(items) and len(messages) == len(items)


def check_unified(value: object, key: str, *, is_tools: bool) -> None:
    """Columnar files give all rows one schema: a key of another row's tool comes back as null here. Whether the null
    was written cannot be known. Raises RowError for one inside a tool or a tool call."""
    parts: list[tuple[str, object]] = [("tools", value)] if is_tools else []
    if not is_tools and isinstance(value, list):
        tables = [cast("Columns", item) for item in cast("list[object]", value) if isinstance(item, dict)]
        parts = [(name, part) for table in tables for name, part in table.items() if name != "content"]
    for name, part in parts:
        if part is None or not _holds_null(part):
            continue
        raise RowError(
            f'{name.replace("_", " ")} in column "{key}" hold null, written or added by the one schema of all rows',
            "store the column as JSON text, or write the file as JSONL",
        )


def check_switches(messages: Sequence[Message], key: str) -> None:
    """Whether messages are learnt must be said clearly. Raises RowError."""
    for number, message in enumerate(messages, start=1):
        switches = {name: message.extra[name] for name in LOSS_KEYS if name in message.extra}
        place = f'message {number} of "{key}"'
        if any(not isinstance(switch, (bool, int, float)) or switch not in (0, 1) for switch in switches.values()):
            shown = ", ".join(f"{name} = {switch!r}" for name, switch in switches.items())
            raise RowError(f"{place} is neither learnt nor not: {shown}", "write 1 or true, 0 or false")
        if len(set(map(float, switches.values()))) > 1:
            raise RowError(f"{place} is switched on and off: {', '.join(switches)}", "keep one of the keys")


def _holds_null(value: object) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_null, cast("dict[str, object]", value).values()))
    if isinstance(value, list):
        return any(map(_holds_null, cast("list[object]", value)))
    return value is None


def _plain_message(value: object) -> Message | None:
    """A message that is role and text, as nearly all are."""
    table = cast("dict[str, object]", value) if isinstance(value, dict) else {}
    if list(table) != ["role", "content"]:
        return None
    role, content = table["role"], table["content"]
    return Message(role=role, content=content) if role and isinstance(role, str) and isinstance(content, str) else None


def _message(value: object, place: str) -> Message:
    if not isinstance(value, dict):
        raise RowError(f"{place} is not an object", 'write {"role": ..., "content": ...}')
    table = _without_nulls(cast("object", value))
    if "from" in table and "role" not in table:
        table = _by_role(table, place)
    if media := [key for key in MEDIA_KEYS if table.get(key)]:
        raise RowError(f"{place} holds {', '.join(media)}: only text is trained on", "leave such rows out")
    if table.get("function_call"):
        raise RowError(
            f"{place} holds function_call, the old form of tool_calls, which chat templates do not write",
            'write "tool_calls": [{"type": "function", "function": {...}}], and the role "tool" for what is answered',
        )
    role, content = table.get("role"), table.get("content")
    if not isinstance(role, str) or not role:
        raise RowError(f"{place} has no role", 'write {"role": ..., "content": ...}')
    calls = _objects(table.get("tool_calls"), f"tool_calls of {place}", '[{"type": "function", "function": {...}}]')
    parts: tuple[dict[str, Any], ...] = ()
    if isinstance(content, list) and content:
        parts = tuple(_text_part(part, place) for part in cast("list[object]", content))
        content = "".join(part["text"] for part in parts)
    if content is None and (calls or any(table.get(key) for key in REASONING_KEYS)):
        content = ""
    if not isinstance(content, str):
        raise RowError(f"{place} has no text as content", 'write {"role": ..., "content": ...}')
    name, call = (_text(table.get(key), f"{key} of {place}") for key in ("name", "tool_call_id"))
    extra = {key: part for key, part in table.items() if key not in KNOWN_KEYS}
    message = Message(
        role=role, content=content, name=name, tool_calls=calls, tool_call_id=call, parts=parts, extra=extra
    )
    keys = tuple(table)
    return message if keys == tuple(message.as_template_sees()) else replace(message, keys=keys)


def _by_role(table: dict[str, Any], place: str) -> dict[str, Any]:
    """A message of ShareGPT's form: from and value are role and content. Raises RowError."""
    speaker = table["from"]
    role = SPEAKERS.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise RowError(
            f"{place} is from {speaker!r}", f"known are {', '.join(SPEAKERS)}; or write role and content instead"
        )
    others = {key: part for key, part in table.items() if key not in ("from", "value")}
    return {"role": role, "content": table.get("value"), **others}


def _without_nulls(table: object) -> dict[str, Any]:
    return {key: value for key, value in cast("dict[str, Any]", table).items() if value is not None}


def _text_part(part: object, place: str) -> dict[str, Any]:
    """A part unchanged; keys that are null are those of other parts, in files of one schema."""
    table = _without_nulls(cast("object", part)) if isinstance(part, dict) else {}
    if table.get("type", "text") != "text" or not isinstance(table.get("text"), str):
        raise RowError(
            f"{place} has a part that is no text (an image?)",
            'only text is trained on: write {"type": "text", "text": "..."}, or leave such rows out',
        )
    return table


def parse_tools(value: object, key: str) -> tuple[dict[str, Any], ...]:
    """Tools as chat templates want them, from a list of objects or such a list as JSON text. Raises RowError."""
    if isinstance(value, str) and value.strip():
        try:
            value = exact_json(value)
        except NotJson as error:
            raise RowError(f'column "{key}" holds a text that is not JSON: {error}', "write a list of tools") from error
    return _objects(value, f'column "{key}"', 'a list of tools: [{"type": "function", "function": {...}}]')


def holds_tools(value: object) -> bool:
    """Whether it is what `parse_tools` takes, and not empty."""
    try:
        return any(tool.keys() & {"function", "name"} for tool in parse_tools(value, ""))
    except RowError:
        return False


def _objects(value: object, place: str, example: str) -> tuple[dict[str, Any], ...]:
    if value in (None, "", [], {}):
        return ()
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in cast("list[object]", value)):
        raise RowError(f"{place} is not a list of objects", f"write {example}")
    return tuple(cast("list[dict[str, Any]]", value))


def _text(value: object, place: str) -> str:
    if value is not None and not isinstance(value, str):
        raise RowError(f"{place} is not a text", "write it in quotes")
    return value or ""
