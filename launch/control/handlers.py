"""The handler of every verb; here those about the run as a whole: pause, resume, step, checkpoint, evaluation, end."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

from ...actors.contracts import MemoryContract
from ...core.device_memory import MemoryView
from ...core.errors import ConfigError
from ...core.knobs import Operator
from ...core.refs import with_deadline
from ..composition.memory_parts import manager_name, takes_turns
from . import verbs
from .context import VerbContext, coordinator_call
from .data_verbs import DATA_HANDLERS
from .knob_verbs import KNOB_HANDLERS
from .look_verbs import LOOK_HANDLERS
from .process_verbs import PROCESS_HANDLERS
from .server import Handler
from .why_verbs import WHY_HANDLERS

ASK_S = 10.0


async def _pause(context: VerbContext, arguments: verbs.WithReason, who: Operator) -> dict[str, int]:
    async with coordinator_call(context, verbs.PAUSE.ask_s) as coordinator:
        return {"rests_at": await coordinator.pause_run(who, arguments.reason)}


async def _resume(context: VerbContext, arguments: verbs.WithReason, who: Operator) -> dict[str, bool]:
    async with coordinator_call(context, verbs.RESUME.ask_s) as coordinator:
        await coordinator.resume_run(who, arguments.reason)
    return {"resumed": True}


async def _step(context: VerbContext, arguments: verbs.StepArguments, who: Operator) -> dict[str, int]:
    async with coordinator_call(context, verbs.STEP.ask_s) as coordinator:
        return {"pauses_at": await coordinator.step_run(who, arguments.reason, arguments.num_steps)}


async def _checkpoint(context: VerbContext, arguments: verbs.CheckpointArguments, who: Operator) -> dict[str, str]:
    async with coordinator_call(context, verbs.CKPT.ask_s) as coordinator:
        return {"folder": await coordinator.checkpoint_now(who, arguments.reason, arguments.export)}


async def _evaluate(context: VerbContext, arguments: verbs.EvalArguments, who: Operator) -> dict[str, float]:
    async with coordinator_call(context, verbs.EVAL.ask_s) as coordinator:
        result = await coordinator.evaluate_now(who, arguments.reason, arguments.name)
    return {"eval_reward": result.mean_reward, **result.metrics}


async def _down(context: VerbContext, arguments: verbs.WithReason, who: Operator) -> dict[str, str]:
    """The launcher's own loop ends the run, as after Ctrl-C; this only asks for it."""
    reason = arguments.reason or f"{who.user} asked for it (myxa down)"
    context.supervisor.request_stop(reason, signal.SIGTERM)
    return {"ending": reason}


async def _memory(context: VerbContext, arguments: verbs.Arguments, who: Operator) -> MemoryView:
    if not takes_turns(context.config):
        raise ConfigError(
            "this run has no memory manager",
            remedy='trainer and engines have their own memory there; see memory.share = "switch"',
        )
    name = manager_name(context.config)
    async with asyncio.timeout(ASK_S):
        await context.node.wait_for(name, timeout_s=ASK_S)
        return await with_deadline(context.node.ref(MemoryContract, name), ASK_S).view()


async def _verbs(context: VerbContext, arguments: verbs.Arguments, who: Operator) -> list[dict[str, Any]]:
    del context, arguments, who
    return [verbs.describe(verb) for verb in verbs.ALL]


HANDLERS: dict[verbs.Verb[Any], Handler] = {
    verbs.VERBS: _verbs, verbs.MEM: _memory, verbs.PAUSE: _pause, verbs.RESUME: _resume, verbs.STEP: _step,
    verbs.CKPT: _checkpoint, verbs.EVAL: _evaluate, verbs.DOWN: _down,
    **KNOB_HANDLERS, **PROCESS_HANDLERS, **LOOK_HANDLERS, **DATA_HANDLERS, **WHY_HANDLERS,
}  # fmt: skip
