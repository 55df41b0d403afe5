"""The workflow that a run file names, with its arguments.

One of the user's own is an async function, a plain function, or a class: one object of it per episode, with a method
for each phase. `run(ctx, prompt)` is needed; `setup(ctx, prompt)`, `finalize(ctx, sample)`, `score(ctx, sample)` and
`teardown()` may be there. Each may be async or plain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...core.errors import ConfigError
from ..user_code import WORKFLOW, load_function, load_workflow_class
from . import demonstration, single_turn
from .context import Workflow

BUILTINS: Mapping[str, Workflow] = {
    "single_turn": single_turn.generate,
    "demonstration": demonstration.generate,
}
"""They run in the actor's own process; all others in workers."""
PHASES = ("setup", "run", "finalize", "score", "teardown")


@dataclass(frozen=True, slots=True)
class OwnWorkflow:
    """One of the user's own."""

    fn: Callable[..., Any]
    args: Mapping[str, Any]
    is_class: bool

    def made(self) -> dict[str, Callable[..., Any]]:
        """Phase -> what to call, for one episode."""
        # A copy of the arguments each time: what one sample changes in it must not reach another.
        args = deepcopy(dict(self.args))
        if not self.is_class:
            return {"run": partial(self.fn, **args) if args else self.fn}
        one = self.fn(**args)
        return {name: getattr(one, name) for name in PHASES if hasattr(one, name)}


def load_workflow(name: str, args: Mapping[str, Any]) -> OwnWorkflow:
    """Raises ConfigError or UserCodeError for one that cannot be loaded, or does not take these arguments."""
    found = load_workflow_class(name, args)
    if found is None:
        return OwnWorkflow(load_function(name, WORKFLOW, args).fn, args, is_class=False)
    if not callable(getattr(found, "run", None)):
        raise ConfigError(
            f'rollout.workflow = "{name}" is a class without a method run', remedy=f"it must have: {WORKFLOW.signature}"
        )
    return OwnWorkflow(found, args, is_class=True)
