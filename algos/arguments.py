"""The arguments that the run file gives a built-in function, checked and bound once, before its first call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from math import inf
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_type_hints

from ..core.errors import ConfigError
from ..core.suggestion import suggest

T = TypeVar("T")


def bind(fn: Callable[..., T], arguments: Mapping[str, Any], *, key: str, what: str) -> Callable[..., T]:
    """`fn` with these keyword-only arguments, of `key`; `what`: in words. Raises ConfigError for others."""
    accepted = [
        name
        for name, parameter in inspect.signature(fn).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    ]
    hints = get_type_hints(fn)
    for argument, value in arguments.items():
        if argument not in accepted:
            remedy = suggest(argument, accepted) if accepted else "leave it out"
            raise ConfigError(f"{key}.{argument}: {what} takes no such argument", remedy=remedy)
        _check_type(f"{key}.{argument}", value, hints[argument])
    return partial(fn, **arguments) if arguments else fn


def _check_type(key: str, value: object, hint: Any) -> None:
    if isinstance(hint, UnionType):  # with None, which a run file cannot write
        (hint,) = (member for member in get_args(hint) if member is not NoneType)
    allowed = (int, float) if hint is float else (hint,)
    is_bool = isinstance(value, bool)
    if not isinstance(value, allowed) or (is_bool and hint is not bool):
        raise ConfigError(f"{key} = {value!r}: must be of type {hint.__name__}")
    if isinstance(value, (int, float)) and not is_bool and not 0 <= value < inf:
        raise ConfigError(f"{key} = {value!r}: must {'not be negative' if value < 0 else 'be finite'}")
