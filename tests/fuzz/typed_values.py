"""Random values that fit an annotation, and an independent look at whether a value fits one."""

from __future__ import annotations

import enum
import functools
import random
import types
import typing
from typing import Any, Literal, Union

import msgspec
import numpy as np

CODE = "__import__('os').system('true')"
TEXTS = ("", "a", "rollout/0", "trainer/3", "\u00e4\u00f6", "x" * 50, "\x00", "[1,2]", CODE)


@functools.cache
def hints_of(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def learn(kind: Any, known: set[Any]) -> None:
    """Resolve all annotations below `kind` now: while frames come in nothing may be compiled."""
    for inner in typing.get_args(kind):
        learn(inner, known)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind not in known:
        known.add(kind)
        for hint in hints_of(kind).values():
            learn(hint, known)


def is_array(kind: Any) -> bool:
    return kind is np.ndarray or typing.get_origin(kind) is np.ndarray


def array_dtype(kind: Any) -> np.dtype[Any]:
    try:
        return np.dtype(typing.get_args(typing.get_args(kind)[1])[0])
    except (IndexError, TypeError):
        return np.dtype(np.float32)


def random_value(kind: Any, rng: random.Random, depth: int = 0) -> Any:
    """A tree of dicts, lists, numbers, text and numpy arrays that `kind` accepts."""
    origin = typing.get_origin(kind)
    args = typing.get_args(kind)
    if origin is typing.Annotated:
        return random_value(args[0], rng, depth)
    if is_array(kind):
        shape = [rng.randrange(0, 5) for _ in range(rng.randrange(1, 3))]
        return (np.arange(int(np.prod(shape))) % 7).reshape(shape).astype(array_dtype(kind))
    if origin in (Union, types.UnionType):
        return random_value(rng.choice(args), rng, depth)
    if origin is Literal:
        return rng.choice(args)
    if origin is tuple and args[-1:] != (Ellipsis,):
        return [random_value(a, rng, depth + 1) for a in args]
    if origin in (list, tuple, set, frozenset):
        return [random_value(args[0], rng, depth + 1) for _ in range(rng.randrange(0, 3 if depth < 4 else 1))]
    if origin is dict:
        return {f"k{i}": random_value(args[1], rng, depth + 1) for i in range(rng.randrange(0, 3))}
    return random_plain(kind, rng, depth)


def random_plain(kind: Any, rng: random.Random, depth: int) -> Any:
    if kind is Any:
        return random_json(rng, 3)
    if kind in (None, type(None)):
        return None
    if kind is bool:
        return rng.random() < 0.5
    if kind is int:
        return rng.choice((0, 1, -1, rng.randrange(-(2**31), 2**31)))
    if kind is float:
        return rng.choice((0.0, 1.5, -2.25, 1e300, float("nan"), float("inf"), rng.random()))
    if kind is str:
        return rng.choice(TEXTS)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return rng.choice([member.value for member in kind])
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = hints_of(kind)
        return {
            field.encode_name: random_value(hints[field.name], rng, depth + 1)
            for field in msgspec.structs.fields(kind)
            if field.required or rng.random() < 0.7
        }
    if hasattr(kind, "__dataclass_fields__"):
        hints = typing.get_type_hints(kind)
        return {name: random_value(hint, rng, depth + 1) for name, hint in hints.items()}
    if hasattr(kind, "__supertype__"):
        return random_value(kind.__supertype__, rng, depth)
    raise TypeError(f"no random value for {kind}")


def random_json(rng: random.Random, depth: int) -> Any:
    """Any JSON at all."""
    shape = rng.randrange(8)
    if depth <= 0 or shape < 5:
        return rng.choice((
            None, True, 0, -1, 2**63, -(2**63), 2**64 - 1, 1e308, 0.1, "", "float32", "object", "nan", [], {}, rng.choice(TEXTS),
        ))  # fmt: skip
    if shape < 7:
        return [random_json(rng, depth - 1) for _ in range(rng.randrange(4))]
    return {rng.choice(TEXTS): random_json(rng, depth - 1) for _ in range(rng.randrange(3))}


def fits(value: Any, kind: Any) -> bool:
    """Whether a value that a handler was given is of the declared type. Does not use the code under test."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return True
    if origin is typing.Annotated:
        return fits(value, args[0])
    if is_array(kind):
        return isinstance(value, np.ndarray) and value.flags.writeable and value.dtype.kind in "biufc"
    if origin in (Union, types.UnionType):
        return any(fits(value, a) for a in args)
    if origin is Literal:
        return value in args
    if origin is tuple and args[-1:] != (Ellipsis,):
        return isinstance(value, tuple) and len(value) == len(args) and all(map(fits, value, args))
    if origin in (list, tuple, set, frozenset):
        return isinstance(value, origin) and all(fits(v, args[0]) for v in value)
    if origin is dict:
        return isinstance(value, dict) and all(fits(k, args[0]) and fits(v, args[1]) for k, v in value.items())
    if kind in (None, type(None)):
        return value is None
    if kind is float:
        return isinstance(value, float | int) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hasattr(kind, "__supertype__"):
        return fits(value, kind.__supertype__)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = hints_of(kind)
        return isinstance(value, kind) and all(fits(getattr(value, n), hints[n]) for n in kind.__struct_fields__)
    return isinstance(value, kind)
