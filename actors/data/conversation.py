"""The prompt of a row: a text, or a list of chat messages with text in them; and the tools that go with it."""

from __future__ import annotations

from typing import Any, cast

import orjson

from ...core.samples import Message
from .row_file import Columns, RowError, exact_json

CARRIED_KEYS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id"})


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
    return tuple(_message(one, f'message {number} of "{key}"') for number, one in enumerate(messages, start=1))


def parse_json_messages(value: object) -> object:
    """The list that a text holds, if it is a JSON array of messages; anything else as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        found: object = orjson.loads(value)
    except ValueError:
        return value
    messages = cast("list[object]", found)
    are_messages = bool(messages) and all(isinstance(one, dict) and "role" in one for one in messages)
    return exact_json(value) if are_messages else value


def check_unified(value: object, key: str, *, is_tools: bool) -> None:
    """Columnar files give all rows one schema: a key of another row's tool comes back as null here. Whether the null
    was written cannot be known. Raises RowError for one inside a tool or a tool call."""
    if is_tools:
        parts = [value]
    else:
        rows = cast("list[object]", value) if isinstance(value, list) else []
        parts = [cast("Columns", one).get("tool_calls") for one in rows if isinstance(one, dict)]
    if any(_holds_null(part) for part in parts if part is not None):
        what = "tools" if is_tools else "tool calls"
        raise RowError(
            f'{what} in column "{key}" hold null, written or added by the file\'s one schema for all rows',
            "store the column as JSON text, or write the file as JSONL",
        )


def _holds_null(value: object) -> bool:
    if isinstance(value, dict):
        return any(_holds_null(one) for one in cast("dict[str, object]", value).values())
    if isinstance(value, list):
        return any(_holds_null(one) for one in cast("list[object]", value))
    return value is None


def _message(value: object, where: str) -> Message:
    if not isinstance(value, dict):
        raise RowError(f"{where} is not an object", 'write {"role": ..., "content": ...}')
    table = cast("dict[str, Any]", value)
    unsupported = sorted(
        name for name, one in table.items() if name not in CARRIED_KEYS and one not in (None, [], {}, "")
    )
    if unsupported:
        raise RowError(
            f"{where} holds {', '.join(unsupported)}, which cannot be rendered",
            f"messages carry {', '.join(sorted(CARRIED_KEYS))} only; put the rest into the text or the metadata",
        )
    role, content = table.get("role"), table.get("content")
    if not isinstance(role, str) or not role:
        raise RowError(f"{where} has no role", 'write {"role": ..., "content": ...}')
    calls = _objects(table.get("tool_calls"), f"tool_calls of {where}", '[{"type": "function", "function": {...}}]')
    if calls and content is None:
        content = ""
    if isinstance(content, list):
        raise RowError(f"{where} has content in parts (images?)", "only text is supported; join the parts to one text")
    if not isinstance(content, str):
        raise RowError(f"{where} has no text as content", 'write {"role": ..., "content": ...}')
    name, call = (_text(table.get(key), f"{key} of {where}") for key in ("name", "tool_call_id"))
    return Message(role=role, content=content, name=name, tool_calls=calls, tool_call_id=call)


def parse_tools(value: object, key: str) -> tuple[dict[str, Any], ...]:
    """Tools as chat templates want them, from a list of objects or such a list as JSON text. Raises RowError."""
    if isinstance(value, str) and value.strip():
        try:
            value = exact_json(value)
        except ValueError as error:
            raise RowError(f'column "{key}" holds a text that is not JSON: {error}', "write a list of tools") from error
    return _objects(value, f'column "{key}"', 'a list of tools: [{"type": "function", "function": {...}}]')


def _objects(value: object, where: str, example: str) -> tuple[dict[str, Any], ...]:
    if value in (None, "", [], {}):
        return ()
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in cast("list[object]", value)):
        raise RowError(f"{where} is not a list of objects", f"write {example}")
    return tuple(cast("list[dict[str, Any]]", value))


def _text(value: object, where: str) -> str:
    if value is not None and not isinstance(value, str):
        raise RowError(f"{where} is not a text", "write it in quotes")
    return value or ""
