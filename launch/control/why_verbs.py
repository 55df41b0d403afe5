"""The verb `why`: what holds the run back, and which knob may help.

It asks the run for shares, gauges and knobs. An actor that does not answer is left out: without the
coordinator there is still a verdict, only no knob to turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, get_args

from ...actors.contracts import BufferContract, CoordinatorContract, MonitorContract
from ...core.config import RoleName, RunConfig
from ...core.errors import ConfigError, LaunchError
from ...core.knobs import KnobState, KnobTable, Operator
from ...core.messages import BufferStats
from ...core.refs import with_deadline
from ..host import look_at_gpus
from ..supervisor.placement import Present, staff
from ..views.why import Facts, Reason, actors_of, explain, explain_actors, most_on_cores, num_cores
from . import verbs
from .server import Handler, VerbContext, answer_or_none

Gauges = Mapping[str, Mapping[str, float]]
ASK_S = 5.0
_LOOK_UP_TO = 4
"""No move makes a number more than so many times what it was."""


async def _why(context: VerbContext, arguments: verbs.WhyArguments, who: Operator) -> Reason:
    """Asks monitor, coordinator and buffer at the same time."""
    node, window_s = context.node, arguments.window_s
    monitor = with_deadline(node.ref(MonitorContract, "monitor"), ASK_S)
    coordinator = with_deadline(node.ref(CoordinatorContract, "coordinator"), ASK_S)
    buffer = with_deadline(node.ref(BufferContract, "buffer"), ASK_S)
    shares, snapshot, table, stats = await asyncio.gather(
        answer_or_none(monitor.shares(window_s)),
        answer_or_none(monitor.snapshot()),
        answer_or_none(coordinator.knob_table()),
        answer_or_none(buffer.stats()),
    )
    if shares is None or snapshot is None:
        raise LaunchError("the monitor does not answer: the time shares are not known", remedy="`myxa ps`")
    facts = facts_of(context, shares, snapshot, table, stats)
    if not arguments.target:
        return explain(shares, facts, window_s=window_s)
    return explain_actors(actors_of(arguments.target, shares), shares, facts, window_s=window_s)


def facts_of(
    context: VerbContext, shares: Gauges, snapshot: Gauges, table: KnobTable | None, stats: BufferStats | None
) -> Facts:
    """Numbers of the run as they are now; where an answer is missing, as the run file has them."""
    config, cores = context.config, num_cores()
    knobs: dict[str, KnobState] = {}
    for state in (state for sheet in (table.sheets if table is not None else ()) for state in sheet.knobs):
        knobs.setdefault(state.tunable.name, state)
    samples = knobs.get("num_samples")
    num_rollouts = max(sum(name.startswith("rollout/") for name in shares), 1)
    most, devices = room_for_rollouts(config, context.supervisor.present(), num_rollouts, cores)
    return Facts(
        gauges=snapshot,
        disk=stats.disk if stats is not None else "",
        cores=cores,
        most_rollouts=most,
        more_devices=devices,
        knobs=knobs,
        num_rollouts=num_rollouts,
        num_samples=int(samples.value) if samples is not None else config.rollout.num_samples,
        max_running=config.engine.max_running,
        slots_total=stats.slots_total if stats is not None else 0,
        reward_workers=config.reward.workers,
        is_data_endless=not any(part.max_passes for part in config.data.parts().values()),
    )


def room_for_rollouts(config: RunConfig, present: Present, num_there: int, cores: int) -> tuple[int, str]:
    """How many rollout actors there may be, and the GPUs that more of them would need beside the role's own. 0: not
    known, since other machines take part."""
    role = config.roles.rollout
    if not role.device_ids:
        is_alone = len(present.nodes) <= 1 and not config.engine.attach
        return (max(num_there, most_on_cores(cores, role.threads)) if is_alone else 0), ""
    for devices in ("", _idle_gpus(config) if len(present.nodes) <= 1 else ""):
        most = num_there
        while most < _LOOK_UP_TO * num_there and _is_possible(config, present, most + 1, devices):
            most += 1
        if most > num_there:
            return most, devices
    return num_there, ""


def _is_possible(config: RunConfig, present: Present, count: int, devices: str) -> bool:
    try:
        staff(config, "rollout", count, present, devices)
    except ConfigError:
        return False
    return True


def _idle_gpus(config: RunConfig) -> str:
    named = {device for role in get_args(RoleName) for device in config.roles[role].device_ids}
    return ",".join(str(number) for number in range(len(look_at_gpus().found)) if number not in named)


WHY_HANDLERS: dict[verbs.Verb[Any], Handler] = {verbs.WHY: _why}
