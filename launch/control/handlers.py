"""The handler of every verb."""

from __future__ import annotations

from typing import Any

from ...core.knobs import Operator
from . import verbs
from .context import VerbContext
from .data_verbs import DATA_HANDLERS
from .knob_verbs import KNOB_HANDLERS
from .look_verbs import LOOK_HANDLERS
from .process_verbs import PROCESS_HANDLERS
from .run_verbs import RUN_HANDLERS
from .server import Handler
from .why_verbs import WHY_HANDLERS


async def _verbs(context: VerbContext, arguments: verbs.Arguments, who: Operator) -> list[dict[str, Any]]:
    del context, arguments, who
    return [verbs.describe(verb) for verb in verbs.ALL]


HANDLERS: dict[verbs.Verb[Any], Handler] = {
    verbs.VERBS: _verbs, **RUN_HANDLERS, **KNOB_HANDLERS, **PROCESS_HANDLERS, **LOOK_HANDLERS, **DATA_HANDLERS,
    **WHY_HANDLERS,
}  # fmt: skip
