"""The live knobs of a rollout actor: how much it takes at once, how patient it is, how weights meet running requests.

Every rollout actor owns its own, so that one engine may be treated otherwise than the others. All are used "now". Knows
the values; the role puts them where they act.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast, get_args

from ...core.knobs import KnobValue, Tunable
from ...core.protocols import PauseMode
from ..knobs.owner import Knob

OWNER = "rollout"

_CONCURRENCY = Tunable(
    name="concurrency",
    kind="int",
    boundary="now",
    owner=OWNER,
    key="rollout.max_groups",
    low=1,
    high=65536,
    unit="groups",
    help="Groups in flight at one rollout actor. Raised, it asks for more at once; lowered, running groups end first. "
    "Of their samples an engine decodes engine.max_running together, which is fixed when it starts (for SGLang "
    "max_running_requests); the others wait inside it.",
)
_TIMEOUT = Tunable(
    name="workflow_timeout_s",
    kind="float",
    boundary="now",
    owner=OWNER,
    key="rollout.timeout_s",
    low=0.0,
    is_low_open=True,
    high=7 * 86400.0,
    unit="s",
    help="How long a workflow may take for one sample; samples that are begun from now on. Code that blocks the event "
    "loop is judged by the run file's value.",
)
_ERROR_RATE = Tunable(
    name="max_error_rate",
    kind="float",
    boundary="now",
    owner=OWNER,
    key="reward.max_error_rate",
    low=0.0,
    high=1.0,
    help="Share of failed reward calls, and of groups lost to workflow or engine, above which the run ends; judged "
    "again with the next failure.",
)
_PAUSE_MODE = Tunable(
    name="pause_mode",
    kind="choice",
    boundary="now",
    owner=OWNER,
    key="rollout.pause_mode",
    choices=get_args(PauseMode),
    help="What the next swap of weights does to running requests: in_place (they keep their KV cache), retract (it is "
    "rebuilt under the new weights), abort (they end and are continued from their tokens).",
)

TUNABLES: tuple[Tunable, ...] = (_CONCURRENCY, _TIMEOUT, _ERROR_RATE, _PAUSE_MODE)


@dataclass(slots=True)
class RolloutLive:
    """The values in force."""

    concurrency: int
    workflow_timeout_s: float
    max_error_rate: float
    pause_mode: PauseMode | None
    """None: there is no engine, or it cannot change it."""


def rollout_knobs(live: RolloutLive, apply: Callable[[], None]) -> tuple[Knob, ...]:
    """The knobs over `live`. `apply` puts what it says into force, wherever that is."""

    def concurrency(value: KnobValue) -> None:
        live.concurrency = int(value)
        apply()

    def timeout(value: KnobValue) -> None:
        live.workflow_timeout_s = float(value)
        apply()

    def error_rate(value: KnobValue) -> None:
        live.max_error_rate = float(value)
        apply()

    def pause_mode(value: KnobValue) -> None:
        live.pause_mode = cast("PauseMode", value)
        apply()

    knobs = (
        Knob(tunable=_CONCURRENCY, read=lambda: live.concurrency, use=concurrency),
        Knob(tunable=_TIMEOUT, read=lambda: live.workflow_timeout_s, use=timeout),
        Knob(tunable=_ERROR_RATE, read=lambda: live.max_error_rate, use=error_rate),
    )
    if live.pause_mode is None:
        return knobs
    return (*knobs, Knob(tunable=_PAUSE_MODE, read=lambda: live.pause_mode or "", use=pause_mode))


def crowding(concurrency: int, num_samples: int, max_running: int) -> str:
    """What the operator should know of a concurrency that the engine cannot follow; empty: nothing.

    `num_samples`: of a group, as far as one was seen; `max_running`: sequences that the engine decodes together.
    """
    wanted = concurrency * num_samples
    if not max_running or wanted <= max_running:
        return ""
    return (
        f"{concurrency} groups of {num_samples} samples are {wanted} requests, and the engine decodes {max_running} "
        "together (fixed since its start): the others wait inside it"
    )
