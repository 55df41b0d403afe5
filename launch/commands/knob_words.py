"""How knobs are written on the command line and shown on the screen. Pure."""

from __future__ import annotations

import argparse
import math
import re
import tomllib
from collections.abc import Sequence
from typing import Any

from ...core.errors import ConfigError
from .whole import at_least

_BARE = re.compile(r"[A-Za-z_][A-Za-z0-9_.:/*,-]*|\d+,(\d+,)*\d*")
_WORDS = {"True": "true", "False": "false"}
_LASTING = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>steps?|s|min|h)")
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}


def assignments(words: Sequence[str], what: str) -> dict[str, Any]:
    """["lr=1e-4", "on_stale=drop"] as a table. Raises ConfigError naming the word."""
    table: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"{what} {word!r}: must look like NAME=VALUE", remedy='for example "lr=1e-4"')
        if name.strip() in table:
            raise ConfigError(f"{what} {word!r}: {name.strip()} is given twice", remedy="say it once")
        table[name.strip()] = value(name.strip(), text.strip())
    return table


def value(name: str, text: str) -> Any:
    """A TOML value; a bare word is text, for shells eat quotes."""
    try:
        found = tomllib.loads(f"value = {_WORDS.get(text, text)}")["value"]
    except tomllib.TOMLDecodeError as error:
        if _BARE.fullmatch(text):
            return text
        raise ConfigError(f"{name} = {text}: is no TOML value: {error}", remedy='write 1e-4, true or "text"') from None
    if isinstance(found, float) and not math.isfinite(found):
        raise ConfigError(f"{name} = {text}: must be finite", remedy=f"`myxa explain {name}` tells its range")
    if not isinstance(found, bool | int | float | str):
        raise ConfigError(f"{name} = {text}: knobs are numbers, text, true or false", remedy=f"`myxa explain {name}`")
    return found


def lasting(text: str) -> dict[str, Any]:
    """A time such as 50steps or 30s, as arguments of `set`. Raises ConfigError."""
    found = _LASTING.fullmatch(text.strip())
    is_steps = found is not None and found["unit"].startswith("step")
    if found is None or (is_steps and "." in found["number"]) or float(found["number"]) == 0:
        raise ConfigError(f"--for {text}: is no time", remedy="write 50steps, 30s, 10min or 2h")
    if is_steps:
        return {"for_steps": int(found["number"])}
    return {"for_s": float(found["number"]) * _SECONDS[found["unit"]]}


def add_change_flags(parser: argparse.ArgumentParser) -> None:
    """What every command that changes knobs takes."""
    parser.add_argument("-m", "--reason", default="", metavar="WHY", help="your own words, for the audit log")
    parser.add_argument("--for", dest="lasting", default="", metavar="TIME",
                        help="go back by itself after 50steps, 30s, 10min, 2h")  # fmt: skip
    parser.add_argument("--if", dest="expect", action="append", default=[], metavar="NAME=VALUE",
                        help="only if that knob has that value now; may be repeated")  # fmt: skip
    parser.add_argument("--target", default="", metavar="WHO",
                        help="only these owners: rollout, rollout/3, rollout/*, node:1")  # fmt: skip
    parser.add_argument("--at", type=at_least(0), default=0, metavar="N", dest="not_before",
                        help="not before boundary number N (training step, version)")  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="ask the owners, change nothing")
    parser.add_argument("--force", action="store_true", help="also beyond a guard, such as ten times the file's lr")


def change_arguments(options: argparse.Namespace, values: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the verb `set`."""
    return {
        "values": values,
        "reason": options.reason,
        "target": options.target,
        "expect": assignments(options.expect, "--if"),
        "not_before": options.not_before,
        "dry_run": options.dry_run,
        "force": options.force,
        **(lasting(options.lasting) if options.lasting else {}),
    }


def shown(found: Any) -> str:
    """A value as TOML has it."""
    if isinstance(found, bool):
        return "true" if found else "false"
    if isinstance(found, float):
        return f"{found:.10g}"
    return f'"{found}"' if isinstance(found, str) else str(found)


def change_text(reply: dict[str, Any]) -> str:
    """What became of a change."""
    if reply["refused"]:
        return ""  # told as an error
    lines = [
        f"{m['name']}  {shown(m['old'])} -> {shown(m['new'])}  {m['owner']}, {_boundary(m, reply['at'])}"
        for m in reply["moves"]
    ]
    lines += [f"warning: {text}" for text in reply["warnings"]]
    lines.append(f"epoch {reply['epoch']}" if reply["epoch"] else "nothing was changed")
    return "\n".join(lines)


def _boundary(move: dict[str, Any], at: int) -> str:
    kind = move["boundary"]
    return {"now": "at once", "request": "from the next request on"}.get(kind, f"at {kind} {at}")


def check_reply(reply: dict[str, Any]) -> None:
    """Raises ConfigError for a change that was refused."""
    if reply["refused"]:
        raise ConfigError(reply["refused"], remedy="nothing was changed")
