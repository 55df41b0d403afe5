"""The verb `trace`: has everything that was told so far written, and says where the file is."""

from __future__ import annotations

from typing import Any

from ...actors.contracts.roles import MonitorContract
from ...actors.sinks.chrome_trace import TRACE_FILE
from ...core.actor import with_deadline
from ...core.errors import ConfigError
from ...core.knobs import Operator
from .verb import Arguments, Room, Verb

FLUSH_S = 20.0


async def _trace(room: Room, arguments: Arguments, who: Operator) -> dict[str, Any]:
    if not room.config.monitor.trace:
        raise ConfigError("this run writes no trace", remedy="set monitor.trace = true in the run file")
    await with_deadline(room.node.ref(MonitorContract, "monitor"), FLUSH_S).finish()
    path = room.run_dir.path.resolve() / TRACE_FILE
    return {"file": str(path), "num_bytes": path.stat().st_size}


VERBS: tuple[Verb[Any], ...] = (
    Verb("trace", "view", Arguments, "write the trace up to now; the file opens in ui.perfetto.dev", run=_trace),
)
