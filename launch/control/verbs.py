"""All verbs of the control socket, and the verb that lists them."""

from __future__ import annotations

from typing import Any

import msgspec

from ...core.knobs import Operator
from .data_verbs import DATA_VERBS
from .knob_verbs import CONFIG_VERBS, KNOB_VERBS
from .look_verbs import LOOK_VERBS, PS_VERBS, STATUS_VERBS, TRACE_VERBS
from .process_verbs import CHAOS_VERBS, PROCESS_VERBS
from .run_verbs import RUN_VERBS
from .verb import Arguments, Verb, VerbContext, VerbTable
from .watch_verbs import WATCH_VERBS
from .why_verbs import WHY_VERBS


def all_verbs() -> VerbTable:
    """The table that the server serves."""
    return VerbTable((
        Verb("verbs", "view", Arguments, "every verb with its arguments", run=_verbs),
        *RUN_VERBS, *PS_VERBS, *STATUS_VERBS, *WATCH_VERBS, *KNOB_VERBS, *CONFIG_VERBS, *PROCESS_VERBS, *LOOK_VERBS,
        *DATA_VERBS, *WHY_VERBS, *TRACE_VERBS, *CHAOS_VERBS,
    ))  # fmt: skip


async def _verbs(context: VerbContext, arguments: Arguments, who: Operator) -> list[dict[str, Any]]:
    del context, arguments, who
    return [describe(verb) for verb in all_verbs()]


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
