"""What a run must look like whose answers were recorded: `roles.rollout.kind = "recorded"`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .conflict import Conflict

if TYPE_CHECKING:
    from .root import RunConfig

KIND = "roles.rollout.kind"
RECORDED_DEFAULTS = (
    ("data", "preset", "recorded"),
    ("data", "shuffle", False),
    ("guard", "every", 0),
)
"""Of what is left out in such a run: the dump's groups in the dump's order, and no check that cannot hold."""


def recorded_conflicts(config: RunConfig) -> Iterator[Conflict]:
    """What needs an engine that generates, and what needs one that does not."""
    yield from _reward_conflicts(config)
    if config.roles.rollout.kind != "recorded":
        return
    if config.algo.kind == "sft":
        yield Conflict((KIND, "algo.kind"), 'is an engine, and algo.kind = "sft" has none: leave it out')
    for name, part in config.data.parts().items():
        if part.preset != "recorded":
            place = f"data.sources.{name}.preset" if name else "data.preset"
            yield Conflict((place, KIND), 'must be "recorded": only prompts of a dump have an answer there')
    for key in ("data", "sets"):
        if getattr(config.eval, key):
            yield Conflict((f"eval.{key}", KIND), "must be empty: to held-out prompts no answers are recorded")
    if config.guard.every:
        yield Conflict(
            ("guard.every", KIND),
            "must be 0: recorded log-probs are of the weights of then, and the trainer's of those of now",
        )
    if config.memory.share != "none":
        yield Conflict(("memory.share", KIND), 'must be "none": an engine without a model has no turn')
    if config.roles.rollout.device_ids:
        yield Conflict(("roles.rollout.devices", KIND), 'must be "cpu": nothing is generated')


def _reward_conflicts(config: RunConfig) -> Iterator[Conflict]:
    for key, fn in config.reward.named_functions():
        if fn != "recorded":
            continue
        if config.roles.rollout.kind != "recorded":
            yield Conflict((key, KIND), f'needs {KIND} = "recorded": rewards are recorded of those answers only')
        for more, is_set in (
            ("truncated", config.reward.truncated != "score"),
            ("overlong_tokens", config.reward.overlong_tokens > 0),
        ):
            if is_set:
                yield Conflict((f"reward.{more}", key), "is for rewards that are judged anew: leave it out")
