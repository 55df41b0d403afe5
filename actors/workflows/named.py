"""The workflow that a run file names, with its arguments."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy

from ...core.config import RolloutSettings
from ...core.samples import Prompt, Sample
from ..user_code import WORKFLOW, load_function
from . import demonstration, single_turn
from .context import Workflow, WorkflowContext

BUILTINS: Mapping[str, Workflow] = {
    "single_turn": single_turn.generate,
    "demonstration": demonstration.generate,
}


def workflow_of(settings: RolloutSettings) -> Workflow:
    """Raises ConfigError or UserCodeError for a function that cannot be loaded, or does not take these arguments."""
    if settings.workflow in BUILTINS:
        return BUILTINS[settings.workflow]
    fn, args = load_function(settings.workflow, WORKFLOW, settings.workflow_args).fn, settings.workflow_args

    async def generate(ctx: WorkflowContext, prompt: Prompt) -> Sample:
        # Its own copy each time: what one sample changes in it must not reach another, or the same one run again.
        return await fn(ctx, prompt, **deepcopy(args))

    return generate if args else fn
