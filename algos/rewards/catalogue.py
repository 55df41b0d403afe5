"""The built-in rewards by name, and their arguments bound and checked once, before the first completion."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...core.completions import Completion
from ..arguments import bind
from .builtin import exact, math_equal, numeric, recorded, regex, text_format, workflow
from .words import choice, f1

RewardValue = float | dict[str, float]
RewardFunction = Callable[[Completion], RewardValue]


@dataclass(frozen=True, slots=True)
class Builtin:
    """A built-in reward and where it may run."""

    fn: Callable[..., float]
    takes_pattern: bool = False
    needs_process: bool = False
    """Never inside an actor's own process."""


WORKFLOW = "workflow"
"""Not judged here: the workflow says it."""
RECORDED = "recorded"
"""The same: it was judged before."""
BUILTINS: Mapping[str, Builtin] = {
    "exact": Builtin(exact),
    "numeric": Builtin(numeric),
    "math": Builtin(math_equal, needs_process=True),
    "f1": Builtin(f1),
    "choice": Builtin(choice),
    "regex": Builtin(regex, takes_pattern=True),
    "format": Builtin(text_format, takes_pattern=True),
    WORKFLOW: Builtin(workflow),
    RECORDED: Builtin(recorded),
}


def bind_builtin(
    name: str, *, pattern: str = "", args: Mapping[str, Any] | None = None, key: str = "reward.args"
) -> RewardFunction:
    """The named reward with its arguments, which stand at `key` of the run file. Raises ConfigError for
    arguments that it does not take."""
    builtin = BUILTINS[name]
    given = dict(args or {})
    if pattern and builtin.takes_pattern:
        given["pattern"] = pattern
    return bind(builtin.fn, given, key=key, what=f'reward "{name}"')


def as_the_only_one(fn: RewardFunction, name: str) -> RewardFunction:
    """A built-in that alone judges: it would overrule what the workflow said without anybody noticing."""
    return fn if name in (WORKFLOW, RECORDED) else partial(_judged_by_text, fn, name)


def _judged_by_text(fn: RewardFunction, name: str, completion: Completion) -> RewardValue:
    if completion.reward is not None:
        raise ValueError(
            f'the workflow said a reward, and reward.fn = "{name}" does not heed it; set reward.fn = "{WORKFLOW}"'
        )
    return fn(completion)
