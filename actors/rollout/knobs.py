"""The live knobs of a rollout actor: how much it takes at once, how patient it is, how weights meet running requests.

All rollout actors have the same values. All are used "now".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

from ...core.knobs import KnobValue, Tunable, knob_maker
from ...core.protocols import PauseMode
from ..knobs.owner import Knob
from .group_runner import RolloutOptions

OWNER = "rollout"
_knob = knob_maker(OWNER, "now")

# fmt: off
TUNABLES: tuple[Tunable, ...] = (
    _knob("concurrency", "int", "rollout.max_groups",
          "Groups in flight at one rollout actor. Raised, it asks for more at once; lowered, running groups end first. "
          "Of their samples an engine decodes engine.max_running together, which is fixed when it starts (for SGLang "
          "max_running_requests); the others wait inside it.", low=1, high=65536, unit="groups"),
    _knob("workflow_timeout_s", "float", "rollout.timeout_s",
          "How long a workflow may take for one sample; samples that are begun from now on. Code that blocks the event "
          "loop is judged by the run file's value.", low=0.0, is_low_open=True, high=7 * 86400.0, unit="s"),
    _knob("workers", "int", "rollout.workers",
          "Worker processes per rollout actor at most, of the workflow or of each environment. Raised, further ones "
          "start as they are needed; lowered, surplus ones end with what runs in them.",
          low=1, high=256, unit="processes"),
    _knob("max_error_rate", "float", "reward.max_error_rate",
          "Share of failed reward calls, and of groups lost to workflow or engine, above which the run ends; judged "
          "again with the next failure.", low=0.0, high=1.0),
    _knob("pause_mode", "choice", "rollout.pause_mode",
          "What the next swap of weights does to running requests: in_place (they keep their KV cache), retract (it is "
          "rebuilt under the new weights), abort (they end and are continued from their tokens).",
          choices=get_args(PauseMode)),
    _knob("eval_requests", "int", "gateway.eval_requests",
          "Requests with the run's eval key that a rollout actor answers at a time; further ones are refused as busy.",
          low=0, high=4096, unit="requests"),
)
# fmt: on


def rollout_knobs(options: RolloutOptions, apply: Callable[[], None]) -> tuple[Knob, ...]:
    """The knobs over `options`. `apply` puts what they say into force, wherever that is."""

    def knob(tunable: Tunable) -> Knob:
        name = tunable.name

        def use(value: KnobValue) -> None:
            setattr(options, name, value)
            apply()

        return Knob(tunable, lambda: getattr(options, name), use)

    return tuple(knob(t) for t in TUNABLES if getattr(options, t.name) is not None)
