"""Keys of the run file ("optimizer.lr") and what a configuration says at them. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from pydantic import BaseModel

from ..core.config import RunConfig


def value_at(config: RunConfig, key: str) -> Any:
    """The value at "section.key"; None where there is none. Names are the file's ("async"), not the attributes'."""
    place: Any = config
    for name in key.split("."):
        if isinstance(place, BaseModel):
            fields = type(place).model_fields
            found = next((f for f, info in fields.items() if name in (f, info.alias)), None)
            place = getattr(place, found) if found is not None else None
        elif isinstance(place, dict):
            place = cast(dict[str, Any], place).get(name)
        else:
            return None
    return place


def default_at(kind: type[BaseModel], key: str) -> Any:
    """What a run file means that leaves "section.key" out; None where there is no such key, or it has to be given."""
    name, _, rest = key.partition(".")
    info = next((info for field, info in kind.model_fields.items() if name in (field, info.alias)), None)
    if info is None:
        return None
    inner = info.annotation
    if rest:
        return default_at(inner, rest) if isinstance(inner, type) and issubclass(inner, BaseModel) else None
    return None if info.is_required() else info.get_default(call_default_factory=True)


def flat(table: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """("optimizer.lr", 1e-4) for every leaf of nested tables."""
    for name, value in table.items():
        key = f"{above}.{name}" if above else name
        if isinstance(value, dict):
            yield from flat(cast(dict[str, Any], value), key)
        else:
            yield key, value
