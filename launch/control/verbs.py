"""All verbs of the control socket: the union of what the `*_verbs` modules declare."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import msgspec

from .verb import Verb, VerbTable

MODULES = (
    "run_verbs", "ps_verbs", "status_verbs", "watch_verbs", "knob_verbs", "config_verbs", "process_verbs",
    "look_verbs", "data_verbs", "why_verbs", "trace_verbs", "chaos_verbs",
)  # fmt: skip


def all_verbs() -> VerbTable:
    """The table that the server serves."""
    verbs: list[Verb[Any]] = []
    for name in MODULES:
        verbs.extend(import_module(f".{name}", __package__).VERBS)
    return VerbTable(verbs)


def describe(verb: Verb[Any]) -> dict[str, Any]:
    """A verb for people and programs: name, access, help, arguments as a JSON schema."""
    schema = msgspec.json.schema(verb.arguments)
    own = schema["$defs"][verb.arguments.__name__]
    return {
        "name": verb.name,
        "access": verb.access,
        "help": verb.help,
        "is_stream": verb.stream is not None,
        "arguments": own.get("properties", {}),
        "required": own.get("required", []),
    }
