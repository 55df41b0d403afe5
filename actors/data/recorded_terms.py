"""What a run asks of recordings that are to answer in it. Knows the run file and the model's; must not know dumps."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from ...core.config import RunConfig
from ...core.config.learning import RECORDED_REFERENCE
from ...core.config.rollout import WORKFLOW_BUILTINS
from ...core.errors import ModelError
from ..models.hf_folder import read_config

ANY = 1 << 31
"""Stands for what only the model says."""


@dataclass(frozen=True, slots=True)
class RecordedTerms:
    """See the module's head."""

    num_samples: int
    temperature: float
    max_new_tokens: int
    """Of one turn; 0: a workflow of the user's says it."""
    context_length: int
    vocab_size: int
    wants_reference: bool = False
    """Whether the reference log-probs are those that are recorded."""


def terms_of(config: RunConfig) -> RecordedTerms | None:
    """Of this run; None if an engine generates its answers. A model that cannot be read here is told of elsewhere, and
    recordings are asked nothing of it."""
    if config.roles.rollout.kind != "recorded":
        return None
    vocab_size, context_length = ANY, config.engine.context_length
    with contextlib.suppress(ModelError):
        model = read_config(config.model.path)
        vocab_size, context_length = model.vocab_size, context_length or model.context_length
    return RecordedTerms(
        num_samples=config.rollout.num_samples,
        temperature=config.rollout.temperature,
        max_new_tokens=config.rollout.max_new_tokens if config.rollout.workflow in WORKFLOW_BUILTINS else 0,
        context_length=context_length or ANY,
        vocab_size=vocab_size,
        wants_reference=config.algo.ref_urls == RECORDED_REFERENCE,
    )
