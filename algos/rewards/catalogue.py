"""The built-in rewards by name, and their arguments bound and checked once, before the first completion."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from ...core.completions import Completion
from ..arguments import bind
from .builtin import exact, numeric, recorded, regex, text_format, workflow
from .extraction import after_thought
from .mathematics import math_equal, prepare
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
    prepare: Callable[[], object] | None = None
    """What a worker process does before the first completion, for it is slow."""
    reads_answer: bool = False
    """It judges what is answered, not what was thought before."""


WORKFLOW = "workflow"
"""Not judged here: the workflow says it."""
RECORDED = "recorded"
"""The same: it was judged before."""
BUILTINS: Mapping[str, Builtin] = {
    "exact": Builtin(exact, reads_answer=True),
    "numeric": Builtin(numeric, reads_answer=True),
    "math": Builtin(math_equal, needs_process=True, prepare=prepare, reads_answer=True),
    "f1": Builtin(f1, reads_answer=True),
    "choice": Builtin(choice, reads_answer=True),
    "regex": Builtin(regex, takes_pattern=True, reads_answer=True),
    "format": Builtin(text_format, takes_pattern=True),
    WORKFLOW: Builtin(workflow),
    RECORDED: Builtin(recorded),
}


def bind_builtin(
    name: str,
    *,
    pattern: str = "",
    args: Mapping[str, Any] | None = None,
    strip_thinking: bool = True,
    key: str = "reward.args",
) -> RewardFunction:
    """The named reward with its arguments, which stand at `key` of the run file. `strip_thinking`: it reads only what
    follows a model's thoughts, unless its pattern speaks of them. Raises ConfigError for arguments that it does not
    take."""
    builtin = BUILTINS[name]
    given = dict(args or {})
    if pattern and builtin.takes_pattern:
        given["pattern"] = pattern
    fn = bind(builtin.fn, given, key=key, what=f'reward "{name}"')
    is_stripped = strip_thinking and builtin.reads_answer and "think" not in pattern
    return partial(_after_thought, fn) if is_stripped else fn


def _after_thought(fn: RewardFunction, completion: Completion) -> RewardValue:
    text = after_thought(completion.text, begins_inside=completion.begins_in_thought)
    return 0.0 if text is None else fn(msgspec.structs.replace(completion, text=text))


def as_the_only_one(fn: RewardFunction, name: str) -> RewardFunction:
    """A built-in that alone judges: it would overrule what the workflow said without anybody noticing."""
    return fn if name in (WORKFLOW, RECORDED) else partial(_judged_by_text, fn, name)


def _judged_by_text(fn: RewardFunction, name: str, completion: Completion) -> RewardValue:
    if completion.reward is not None:
        raise ValueError(
            f'the workflow said a reward, and reward.fn = "{name}" does not heed it; set reward.fn = "{WORKFLOW}"'
        )
    return fn(completion)
