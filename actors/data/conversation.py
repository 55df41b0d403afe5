"""The prompt of a row: a text, or a list of chat messages with text in them."""

from __future__ import annotations

from typing import Any, cast

from ...core.samples import Message
from .row_file import RowError

CARRIED_KEYS = frozenset({"role", "content"})


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
            "messages carry role and content only; put the rest into the text or the metadata",
        )
    role, content = table.get("role"), table.get("content")
    if not isinstance(role, str) or not role:
        raise RowError(f"{where} has no role", 'write {"role": ..., "content": ...}')
    if isinstance(content, list):
        raise RowError(f"{where} has content in parts (images?)", "only text is supported; join the parts to one text")
    if not isinstance(content, str):
        raise RowError(f"{where} has no text as content", 'write {"role": ..., "content": ...}')
    return Message(role=role, content=content)
