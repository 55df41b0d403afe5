"""Calling a reward function, wherever it runs: load it by name, call it, judge the result, say what went wrong."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...algos.rewards import BUILTINS, RewardOutcome, bind_builtin, outcome_of
from ...core.completions import Completion
from ..user_call import is_the_callers
from ..user_code import REWARD, load_function, what_was_raised, words_of


class BadReward(Exception):
    """A reward function raised or returned nonsense; the text is the cause."""

    def __init__(self, cause: str, *, is_deadly: bool = False) -> None:
        """`is_deadly`: it ended the process that ran it."""
        super().__init__(cause)
        self.is_deadly = is_deadly


@dataclass(frozen=True, slots=True)
class RewardFn:
    """A loaded reward function."""

    name: str
    fn: Callable[[Completion], Any]
    is_async: bool = False
    is_light: bool = False
    """A built-in that is quick enough for an actor's loop."""
    needs_process: bool = False
    """A built-in that must not run in an actor's process."""


def load_reward(name: str, *, pattern: str, args: Mapping[str, Any]) -> RewardFn:
    """The function with its arguments bound. Raises ConfigError or UserCodeError."""
    if name in BUILTINS:
        bound = bind_builtin(name, pattern=pattern, args=args)
        needs_process = BUILTINS[name].needs_process
        return RewardFn(name, bound, is_light=not needs_process, needs_process=needs_process)
    extra = {**args, "pattern": pattern} if pattern else dict(args)
    found = load_function(name, REWARD, extra)
    return RewardFn(name, partial(found.fn, **extra), is_async=found.is_async)


def call_reward(reward: RewardFn, completion: Completion) -> RewardOutcome:
    """Call a function that is not async. Raises BadReward."""
    try:
        returned = reward.fn(completion)
    except BaseException as error:
        raise raised(error) from error
    if inspect.iscoroutine(returned):
        returned.close()
        raise BadReward("returned a coroutine; declare it with `async def`")
    return judged(returned)


async def await_reward(reward: RewardFn, completion: Completion) -> RewardOutcome:
    """Call an async function. Raises BadReward, and CancelledError only if the caller's task is cancelled."""
    try:
        returned = await reward.fn(completion)
    except BaseException as error:
        if is_the_callers(error):
            raise
        raise raised(error) from error
    return judged(returned)


def judged(returned: object) -> RewardOutcome:
    """The outcome of what a function returned. Raises BadReward."""
    try:
        return outcome_of(returned)
    except (TypeError, ValueError) as error:
        raise BadReward(words_of(error)) from error
    except BaseException as error:
        raise BadReward(f"returned a {type(returned).__name__} that raised {what_was_raised(error)}") from error


def raised(error: BaseException) -> BadReward:
    """What the function raised, and where."""
    return BadReward(f"raised {what_was_raised(error)}")
