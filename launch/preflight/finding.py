"""ConfigFinding: a problem or warning about a run that has not started, with the key of the run file that causes it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import ParamSpec

from ...core.config import RunConfig
from ...core.config.section import walk
from ...core.errors import MyxaError

P = ParamSpec("P")

KEY = re.compile(r"[a-z_]+(?:\.[A-Za-z0-9_]+)+")


@dataclass(frozen=True, slots=True)
class ConfigFinding:
    """A problem, or a warning."""

    key: str
    """Dotted path in the run file; empty: about no key of it."""
    error: MyxaError
    is_warning: bool = False
    """The run can start, but is probably not what was meant."""


def looked(key: str, look: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> Iterator[ConfigFinding]:
    """What `look` raises, as a finding about the key that its message begins with, else about `key`."""
    try:
        look(*args, **kwargs)
    except MyxaError as error:
        yield ConfigFinding(key_of(error.message) or key, error)


def key_of(message: str) -> str:
    """The key of the run file that a message begins with (`megatron.tp = 4: does not ...`), also one of a free table;
    or nothing."""
    match = KEY.match(message)
    if match is None:
        return ""
    parts = match[0].split(".")
    prefixes = (".".join(parts[:length]) for length in range(2, len(parts) + 1))
    return match[0] if any(prefix in _known_keys() for prefix in prefixes) else ""


@cache
def _known_keys() -> frozenset[str]:
    return frozenset(".".join(path) for path, _ in walk(RunConfig))
