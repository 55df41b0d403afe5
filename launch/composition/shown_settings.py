"""The run file as sinks may send it elsewhere: dotted keys and plain values, nothing that looks like a secret. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

from ...actors.sinks.public_address import public_address
from ...core.config import RunConfig

Shown = str | int | float | bool
HIDDEN = "(hidden)"
_SECRET = re.compile(r"key|token|secret|passw|credential", re.IGNORECASE)
_FREE = re.compile(r".+[._]args|data\.chat_template_kwargs|sglang|megatron\.(model|ddp|optimizer)")
"""Tables whose keys are not ours: one that looks like a secret's is hidden."""
_LEFT_OUT = re.compile(r"roles\.[a-z]+\.env|monitor\.options")
"""Environments, and what sinks are told."""


def shown_settings(config: RunConfig) -> dict[str, Shown]:
    """Key of the run file -> its value, defaults included; lists are written as text."""
    return dict(_flat("", config.model_dump(by_alias=True), is_free=False))


def _flat(place: str, table: Mapping[str, Any], *, is_free: bool) -> Iterator[tuple[str, Shown]]:
    for key, value in table.items():
        path = f"{place}.{key}" if place else key
        if _LEFT_OUT.fullmatch(path):
            continue
        if isinstance(value, Mapping):
            inner = cast("Mapping[str, Any]", value)
            yield from _flat(path, inner, is_free=is_free or bool(_FREE.fullmatch(path)))
        elif tables := _numbered(value):
            yield from _flat(path, tables, is_free=is_free)
        elif is_free and _SECRET.search(key):
            yield path, HIDDEN
        else:
            yield path, _plain(value)


def _numbered(value: object) -> dict[str, object]:
    """A list of tables, which have keys too; nothing of any other value."""
    items = cast("list[object]", value) if isinstance(value, list) else []
    has_tables = any(isinstance(one, Mapping) for one in items)
    return {str(number): one for number, one in enumerate(items)} if has_tables else {}


def _plain(value: object) -> Shown:
    if isinstance(value, (list, tuple)):
        return ", ".join(str(_plain(one)) for one in cast("tuple[object, ...]", value))
    if isinstance(value, (bool, int, float)):
        return value
    return public_address(str(value))
