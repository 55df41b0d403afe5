"""What is learnt, from which data and by which rewards: keys of several sections that do not go together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .conflict import Conflict
from .critic import CriticConfig
from .learning import RECORDED_REFERENCE
from .settings import WORKFLOW_BUILTINS

if TYPE_CHECKING:
    from .root import RunConfig


def learning_conflicts(config: RunConfig) -> Iterator[Conflict]:
    """Of all kinds below."""
    for check in (_sft_conflicts, _workflow_conflicts, _reference_conflicts, _critic_conflicts, _exploration_conflicts):
        yield from check(config)


def _sft_conflicts(config: RunConfig) -> Iterator[Conflict]:
    learns = config.algo.kind == "sft"
    shows = config.rollout.workflow == "demonstration"
    if learns and not shows:
        yield Conflict(
            ("rollout.workflow", "algo.kind"),
            'must be "demonstration": algo.kind = "sft" learns from demonstrations',
        )
    if shows and not learns:
        yield Conflict(
            ("algo.kind", "rollout.workflow"),
            'must be "sft": rollout.workflow = "demonstration" gives every sample the same reward',
        )
    for name, part in config.data.parts().items() if learns else ():
        if part.preset != "chat" and not part.answer_key:
            place = f"data.sources.{name}" if name else "data"
            yield Conflict(
                (f"{place}.answer_key", f"{place}.preset", "algo.kind"),
                'algo.kind = "sft" needs demonstrations: name their column here, or use preset = "chat"',
            )
    if learns and config.data.difficulty_low != config.data.difficulty_high:
        yield Conflict(
            ("data.difficulty_high", "data.difficulty_low", "algo.kind"),
            'must be equal to data.difficulty_low: algo.kind = "sft" has no rewards to judge prompts by',
        )
    if learns and config.rollout.num_samples != 1:
        yield Conflict(
            ("rollout.num_samples", "algo.kind"), 'must be 1: algo.kind = "sft" has one demonstration per prompt'
        )


def _workflow_conflicts(config: RunConfig) -> Iterator[Conflict]:
    if config.algo.kind == "sft" or config.rollout.workflow not in WORKFLOW_BUILTINS:
        return
    for key, fn in (*config.reward.named_functions(), *config.eval.named_functions()):
        if fn == "workflow":
            yield Conflict(
                (key, "rollout.workflow"),
                f'needs a workflow of your own: rollout.workflow = "{config.rollout.workflow}" says no reward',
            )


def _reference_conflicts(config: RunConfig) -> Iterator[Conflict]:
    """Here, for a run that began with a KL term may go on without."""
    if config.algo.ref_path and not config.algo.kl_coef:
        yield Conflict(
            ("algo.ref_path", "algo.kl_coef"), "needs algo.kl_coef above 0: without it no reference model is kept"
        )
    if not config.algo.ref_urls:
        return
    if not config.algo.kl_coef:
        yield Conflict(
            ("algo.ref_urls", "algo.kl_coef"), "needs algo.kl_coef above 0: without it nobody looks at the reference"
        )
    if config.algo.kind != "sft" and config.rollout.temperature != 1:
        yield Conflict(
            ("rollout.temperature", "algo.ref_urls"),
            "must be 1: the trainer scores samples at the temperature that they were drawn at, and servers tell "
            "log-probs of given tokens at temperature 1 only; or use algo.ref_path",
        )
    if config.algo.ref_urls == RECORDED_REFERENCE and config.roles.rollout.kind != "recorded":
        yield Conflict(
            ("algo.ref_urls", "roles.rollout.kind"),
            'needs roles.rollout.kind = "recorded": log-probs are recorded of those answers only',
        )


def _critic_conflicts(config: RunConfig) -> Iterator[Conflict]:
    critic, steps = config.critic, config.run.num_steps
    if not critic.enabled:
        if critic != CriticConfig():
            yield Conflict(("critic.enabled", "critic"), "must be true for the table [critic] to matter")
        return
    if config.algo.kind != "ppo":
        yield Conflict(
            ("critic.enabled", "algo.kind"),
            f'is for algo.kind = "ppo": algo.kind = "{config.algo.kind}" takes advantages without values',
        )
    if config.roles.trainer.kind != "torch":
        yield Conflict(
            ("critic.enabled", "roles.trainer.kind"),
            "is the torch trainer's: Megatron's has no value model; use roles.trainer.kind = \"torch\"",
        )
    if 0 < steps <= critic.warmup_steps:
        yield Conflict(
            ("critic.warmup_steps", "run.num_steps"),
            f"is as long as the whole run of {steps} steps: the policy would never be trained",
        )


def _exploration_conflicts(config: RunConfig) -> Iterator[Conflict]:
    if config.algo.kind == "sft":
        return
    if config.rollout.temperature == 0:
        yield Conflict(
            ("rollout.temperature", "algo.kind"),
            f'gives identical samples, from which algo.kind = "{config.algo.kind}" learns nothing; use 1.0',
        )
    if config.algo.needs_groups and config.rollout.num_samples < 2:
        yield Conflict(
            ("rollout.num_samples", "algo.kind"),
            f'must be at least 2: algo.kind = "{config.algo.kind}" compares the samples of a group',
        )
    elif config.rollout.num_samples < 2 and config.algo.group_filter == "zero_variance":
        yield Conflict(
            ("algo.group_filter", "rollout.num_samples"),
            'would leave out every group of one sample; use "none"',
        )
