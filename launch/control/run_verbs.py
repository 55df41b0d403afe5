"""Verbs about the run as a whole: pause, resume, step, checkpoint, evaluation, end."""

from __future__ import annotations

import asyncio
import signal
from typing import Annotated, Any

import msgspec

from ...actors.contracts import MemoryContract
from ...core.device_memory import MemoryView
from ...core.errors import ConfigError
from ...core.knobs import Operator
from ...core.refs import with_deadline
from ..composition.memory_parts import manager_name, takes_turns
from .verb import Arguments, Verb, VerbContext, coordinator_call

ASK_S = 10.0
CONDUCT_S = 30.0
CHECKPOINT_S = 1800.0
EVALUATION_S = 600.0
MAX_STEPS = 1_000_000
MAX_REASON_CHARS = 1000

Reason = Annotated[str, msgspec.Meta(max_length=MAX_REASON_CHARS)]
"""The operator's own words."""


class WithReason(Arguments, frozen=True, kw_only=True):
    """Arguments of a verb that takes only a reason."""

    reason: Reason = ""


class StepArguments(WithReason, frozen=True, kw_only=True):
    """Of `step`."""

    num_steps: Annotated[int, msgspec.Meta(ge=1, le=MAX_STEPS)] = 1


class CheckpointArguments(WithReason, frozen=True, kw_only=True):
    """Of `ckpt`."""

    export: bool = False
    """A HuggingFace folder instead of a checkpoint."""


class EvalArguments(WithReason, frozen=True, kw_only=True):
    """Of `eval`."""

    name: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """One of the evaluation sets; empty: all of them."""


async def _pause(context: VerbContext, arguments: WithReason, who: Operator) -> dict[str, int]:
    async with coordinator_call(context, CONDUCT_S) as coordinator:
        return {"rests_at": await coordinator.pause_run(who, arguments.reason)}


async def _resume(context: VerbContext, arguments: WithReason, who: Operator) -> dict[str, bool]:
    async with coordinator_call(context, CONDUCT_S) as coordinator:
        await coordinator.resume_run(who, arguments.reason)
    return {"resumed": True}


async def _step(context: VerbContext, arguments: StepArguments, who: Operator) -> dict[str, int]:
    async with coordinator_call(context, CONDUCT_S) as coordinator:
        return {"pauses_at": await coordinator.step_run(who, arguments.reason, arguments.num_steps)}


async def _checkpoint(context: VerbContext, arguments: CheckpointArguments, who: Operator) -> dict[str, str]:
    async with coordinator_call(context, CHECKPOINT_S) as coordinator:
        return {"folder": await coordinator.checkpoint_now(who, arguments.reason, arguments.export)}


async def _evaluate(context: VerbContext, arguments: EvalArguments, who: Operator) -> dict[str, float]:
    async with coordinator_call(context, EVALUATION_S) as coordinator:
        result = await coordinator.evaluate_now(who, arguments.reason, arguments.name)
    return {"eval_reward": result.mean_reward, **result.metrics}


async def _down(context: VerbContext, arguments: WithReason, who: Operator) -> dict[str, str]:
    """The launcher's own loop ends the run, as after Ctrl-C; this only asks for it."""
    reason = arguments.reason or f"{who.user} asked for it (myxa down)"
    context.supervisor.request_stop(reason, signal.SIGTERM)
    return {"ending": reason}


async def _memory(context: VerbContext, arguments: Arguments, who: Operator) -> MemoryView:
    if not takes_turns(context.config):
        raise ConfigError(
            "this run has no memory manager",
            remedy='trainer and engines have their own memory there; see memory.share = "switch"',
        )
    name = manager_name(context.config)
    async with asyncio.timeout(ASK_S):
        await context.node.wait_for(name, timeout_s=ASK_S)
        return await with_deadline(context.node.ref(MemoryContract, name), ASK_S).view()


RUN_VERBS: tuple[Verb[Any], ...] = (
    Verb("mem", "view", Arguments, "who holds which device memory", run=_memory),
    Verb(
        "pause", "operate", WithReason, "no new work and no new step; the current step ends",
        run=_pause, is_noted_elsewhere=True,
    ),
    Verb("resume", "operate", WithReason, "continue after a pause", run=_resume, is_noted_elsewhere=True),
    Verb("step", "operate", StepArguments, "so many training steps, then pause", run=_step, is_noted_elsewhere=True),
    Verb(
        "ckpt", "operate", CheckpointArguments, "a checkpoint, or a HuggingFace folder, at the next step boundary",
        run=_checkpoint, is_noted_elsewhere=True,
    ),
    Verb(
        "eval", "operate", EvalArguments, "held-out reward now, beside training", run=_evaluate, is_noted_elsewhere=True
    ),
    Verb("down", "operate", WithReason, "end the run cleanly", run=_down),
)  # fmt: skip
