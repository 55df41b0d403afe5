"""The live knobs of a rollout actor: how much it takes at once, how patient it is, how weights meet running requests.

All rollout actors have the same values. All are used "now".
"""

from __future__ import annotations

from ...core.knobs import Tunable
from ..knobs.owner import knob_maker

OWNER = "rollout"
_knob = knob_maker(OWNER, "now")

# fmt: off
TUNABLES: tuple[Tunable, ...] = (
    _knob("rollout.max_groups",
          "Raised, it asks for more at once; lowered, running groups end first. Of their samples an engine decodes "
          "engine.max_running together, which is fixed when it starts; the others wait inside it.",
          name="concurrency", high=65536, unit="groups"),
    _knob("rollout.timeout_s", "Of samples that are begun from now on.",
          name="workflow_timeout_s", high=7 * 86400.0, unit="s"),
    _knob("rollout.workers", "Lowered, surplus ones end with what runs in them.", unit="processes"),
    _knob("reward.max_error_rate", "Judged again with the next failure."),
    _knob("rollout.pause_mode"),
    _knob("gateway.eval_requests", "Further ones are refused as busy.", unit="requests"),
)
# fmt: on
