"""A `RunConfig` as TOML text. tomli-w would do, but is one more dependency for forty lines."""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from .root import RunConfig

BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
HEADER = "# Resolved configuration of a run: every value, defaults included. `myxa up` takes it as it is.\n"


def dump_config(config: RunConfig) -> str:
    """TOML text with every value; `load_config` of it gives an equal configuration (paths are absolute then)."""
    lines: list[str] = [HEADER]
    for key, value in config.model_dump(by_alias=True).items():
        _write_table(lines, (key,), value)
    return "\n".join(lines)


def _write_table(lines: list[str], path: tuple[str, ...], table: Mapping[str, Any]) -> None:
    # `roles` holds tables only; free tables such as `args` and `env` are written inline.
    below = {key: value for key, value in table.items() if path == ("roles",)}
    if not below:
        lines.append(f"[{'.'.join(_key(part) for part in path)}]")
        lines.extend(f"{_key(key)} = {toml_value(value)}" for key, value in table.items())
        lines.append("")
    for key, value in below.items():
        _write_table(lines, (*path, key), value)


def _key(text: str) -> str:
    return text if BARE_KEY.fullmatch(text) else _string(text)


def _string(text: str) -> str:
    # JSON's escapes are TOML's; DEL is the one character that JSON leaves alone and TOML refuses.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_value(value: object) -> str:
    """One value in TOML's spelling; raises TypeError for what TOML cannot say."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (dt.datetime, dt.date, dt.time)):
        return value.isoformat()
    if isinstance(value, Mapping):
        table = cast("Mapping[str, object]", value)
        return "{" + ", ".join(f"{_key(key)} = {toml_value(one)}" for key, one in table.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml_value(one) for one in cast("Sequence[object]", value)) + "]"
    raise TypeError(f"TOML cannot hold a value of type {type(value).__name__}: {value!r}")
