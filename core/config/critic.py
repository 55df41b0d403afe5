"""The value model beside the policy."""

from __future__ import annotations

from .section import CountInt, NonNegativeFloat, PathText, Section


class CriticConfig(Section, frozen=True):
    """A critic for `algo.kind = "ppo"`: a value model that the torch trainer trains beside the policy."""

    enabled: bool = False
    """Whether advantages are taken against the values of a critic (docs/algorithms.md)."""
    path: PathText = ""
    """HuggingFace folder that its layers begin as, of the same vocabulary; a value head in it (`value_head.weight` or
    `score.weight`) is taken over, else the head begins at zero. Empty = `model.path`."""
    lr: NonNegativeFloat = 0.0
    """Its learning rate, constant after `optimizer.warmup_steps` of its updates; 0 = `optimizer.lr`."""
    value_clip: NonNegativeFloat = 0.2
    """How far a value may move from that of the step's start before its loss stops pulling; 0 = off."""
    warmup_steps: CountInt = 0
    """Steps at the start of the run in which the critic alone is trained; versions count up all the same."""
