"""A short fingerprint of a type as it travels, so that two processes with different code notice when they meet.

Textual on purpose: field names, their types and whether they are required, recursively. Defaults and docstrings do
not count. `msgspec.json.schema` was considered: it refuses numpy arrays and knows nothing of tuple order.
"""

from __future__ import annotations

import enum
import hashlib
import typing
from typing import Any

import msgspec


def fingerprint(*parts: Any) -> str:
    """Eight hexadecimal digits over types and strings."""
    text = "|".join(part if isinstance(part, str) else describe(part) for part in parts)
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def describe(kind: Any, seen: frozenset[type] = frozenset()) -> str:
    """One line of text that changes whenever the wire form of `kind` changes."""
    origin = typing.get_origin(kind)
    if origin is not None:
        args = ",".join(describe(a, seen) for a in typing.get_args(kind))
        return f"{_name(origin)}[{args}]"
    if not isinstance(kind, type):
        return repr(kind)
    if kind in seen:
        return _name(kind)
    inner = seen | {kind}
    if issubclass(kind, msgspec.Struct):
        fields = ",".join(_field(f, inner) for f in msgspec.structs.fields(kind))
        return f"{_name(kind)}({fields})"
    if hasattr(typing.cast("Any", kind), "__dataclass_fields__"):
        hints = typing.get_type_hints(typing.cast("Any", kind))
        fields = ",".join(f"{name}:{describe(hint, inner)}" for name, hint in sorted(hints.items()))
        return f"{_name(kind)}({fields})"
    if issubclass(kind, enum.Enum):
        return f"{_name(kind)}({','.join(repr(m.value) for m in kind)})"
    return _name(kind)


def _field(field: msgspec.structs.FieldInfo, seen: frozenset[type]) -> str:
    return f"{field.encode_name}{'!' if field.required else ''}:{describe(field.type, seen)}"


def _name(kind: Any) -> str:
    return getattr(kind, "__qualname__", None) or repr(kind)
