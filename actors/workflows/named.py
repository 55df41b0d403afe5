"""The workflow that a run file names, with its arguments: a built-in one, or the user's own.

`single_turn` asks the model once. `demonstration` is supervised fine-tuning: the sample is the row's own answer, in
`metadata["demonstration"]` (one assistant answer) or `metadata["demonstration_turns"]` (a list of `{"role",
"content"}`); `actors/data` puts them there from the configured answer column.

A user's workflow is an async function, a plain function, or a class with a method for each phase; each episode gets
its own object. `run(ctx, prompt)` is required; `setup(ctx, prompt)`, `finalize(ctx, sample)`, `score(ctx, sample)`
and `teardown()` are optional. Each may be async or plain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from ...core.errors import ConfigError, DataError
from ...core.samples import DEMONSTRATION, DEMONSTRATION_TURNS, MARGIN, PAIR, Message, Prompt, Sample
from ..user_code.functions import WORKFLOW, load_function
from .episode import Episode, Workflow, WorkflowContext


async def answer_once(ctx: WorkflowContext, prompt: Prompt) -> Sample:
    """Ask the model once."""
    await ctx.episode.generate()
    return ctx.episode.sample()


async def replay_demonstration(ctx: WorkflowContext, prompt: Prompt) -> Sample:
    """The demonstration as a sample: assistant turns masked in, everything else masked out."""
    return ctx.episode.demonstration(shown_turns(prompt))


async def replay_pair(ctx: WorkflowContext, prompt: Prompt) -> Sample:
    return answer_of_pair(ctx.episode, prompt, ctx.index)


def answer_of_pair(episode: Episode, prompt: Prompt, index: int) -> Sample:
    """One answer of a pair as a sample, with reward 1 and the pair's margin if it is the better one, else 0."""
    sample = episode.demonstration(shown_turns(prompt, PAIR[index]), is_whole=True)
    return msgspec.structs.replace(sample, loss="algo", reward=(index == 0) * (1.0 + prompt.metadata.get(MARGIN, 0.0)))


def shown_turns(prompt: Prompt, key: str = DEMONSTRATION_TURNS) -> list[Message]:
    """The turns of the row's demonstration, or of one answer of its pair. Raises DataError."""
    metadata: dict[str, Any] = prompt.metadata
    if key in metadata:
        try:
            turns = msgspec.convert(metadata[key], list[Message])
        except msgspec.ValidationError as err:
            raise DataError(
                f"row {prompt.row} of {prompt.source}: demonstration turns are not messages ({err})",
                remedy='write them as [{"role": ..., "content": ...}, ...]',
            ) from err
        if not turns or turns[0].role != "assistant":
            raise DataError(
                f"row {prompt.row} of {prompt.source}: the demonstration does not begin with an assistant's turn",
                remedy="put the messages before it into the prompt",
            )
        return turns
    answer = metadata.get(DEMONSTRATION)
    if not isinstance(answer, str):
        raise DataError(
            f"row {prompt.row} of {prompt.source} has no demonstration",
            remedy='name the answer column with data.answer_key, or use preset = "chat"',
        )
    return [Message(role="assistant", content=answer)]


BUILTINS: Mapping[str, Workflow] = {
    "single_turn": answer_once,
    "demonstration": replay_demonstration,
    "preference": replay_pair,
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
        # A copy of the arguments each time: what one sample changes in it must not reach another.
        args = deepcopy(dict(self.args))
        if not self.is_class:
            return {"run": partial(self.fn, **args) if args else self.fn}
        workflow = self.fn(**args)
        return {name: getattr(workflow, name) for name in PHASES if hasattr(workflow, name)}


def load_workflow(name: str, args: Mapping[str, Any]) -> OwnWorkflow:
    """Raises ConfigError or UserCodeError for one that cannot be loaded, or does not take these arguments."""
    fn = load_function(name, WORKFLOW, args).fn
    is_class = isinstance(fn, type)
    if is_class and not callable(getattr(fn, "run", None)):
        fault = f'rollout.workflow = "{name}" is a class without a method run'
        raise ConfigError(fault, remedy=f"it must have: {WORKFLOW.signature}")
    return OwnWorkflow(fn, args, is_class)
