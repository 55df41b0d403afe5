"""Calling a reward function, wherever it runs: load it by name, call it, judge the result, say what went wrong.

Also what a rewarder and its worker processes say to each other, in the frames of `actors/user_code/process.py`.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from ...algos.rewards.builtin import BUILTINS, as_the_only_one, bind_builtin
from ...algos.rewards.outcome import RewardOutcome, Unusable, outcome_of, outcomes_of
from ...core.completions import Completion
from ..user_code.functions import load_function, reward_expected, what_was_raised, words_of
from ..user_code.process import Blocked, Cancel, Ended, Stuck, Waits, is_cancelled

Answers = tuple[Completion, ...]
"""What one call judges: a single answer, or all of a group in the order of their numbers."""
Outcomes = tuple[RewardOutcome, ...]
UNIT_TESTS = "unit_tests"
"""The built-in that runs answers, see `unit_tests.py`."""
AT_ONCE = 4 * (os.cpu_count() or 1)
"""Sandboxes of a rollout actor: many answers wait, for their time to be over."""
OVERLOAD_S = 60.0
"""For a sandbox to end by its own limit, on a machine that is busy."""
REMOTE = "remote"
"""The built-in that is no function: a service is asked, see `remote.py`."""
JUDGE = "judge"
"""Another one: a language model is asked, see `judge.py`."""


class RewardKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where in the run file a function and its arguments are named, for messages."""

    fn: str = "reward.fn"
    args: str = "reward.args"

    @classmethod
    def of_one(cls, name: str) -> RewardKeys:
        return cls(f"reward.functions.{name}.fn", f"reward.functions.{name}.args")

    @classmethod
    def of_eval_set(cls, name: str) -> RewardKeys:
        return cls(f"eval.sets.{name}.reward", f"eval.sets.{name}.reward_args")


ALONE = RewardKeys()
"""Of the run's only function."""


class CallFailed(Exception):
    """What was called raised or answered with nonsense. The text is a sentence without its subject."""

    def __init__(self, cause: str, *, is_deadly: bool = False, is_late: bool = False, is_refusal: bool = False) -> None:
        """`is_deadly`: it ended its process. `is_late`: killed at its limit. `is_refusal`: it is well, and says no."""
        super().__init__(cause)
        self.is_deadly = is_deadly
        self.is_late = is_late
        self.is_refusal = is_refusal


@dataclass(frozen=True, slots=True)
class RewardFn:
    """A loaded reward function."""

    name: str
    fn: Callable[[Any], Any]
    is_async: bool = False
    is_light: bool = False
    """A built-in that is quick enough for an actor's loop."""
    seconds: float = 0.0
    """A built-in that must not run in an actor's process, and its time limit; 0: another function."""
    takes_group: bool = False
    at_once: int = 1 << 30
    """Calls of an async function in one worker process; the others wait, and their time does not begin."""


def load_reward(spec: RewardSpec) -> RewardFn:
    """The function with its arguments bound; built-ins judge single answers. Raises ConfigError or UserCodeError."""
    name, keys = spec.fn, spec.keys
    if name in BUILTINS:
        bound = bind_builtin(
            name, pattern=spec.pattern, args=spec.args, strip_thinking=spec.strip_thinking, key=keys.args
        )
        bound = as_the_only_one(bound, name) if keys == ALONE else bound
        usual_s = BUILTINS[name].seconds
        seconds = max(float(spec.args.get("seconds", usual_s)), 1.0) if usual_s else 0.0
        return RewardFn(name, bound, is_light=not (seconds or spec.pattern), seconds=seconds)
    if name == UNIT_TESTS:
        from .unit_tests import unit_test_options, unit_tests_reward  # sandboxes, which no other reward needs

        options = unit_test_options(spec.args, keys.args)
        fn = unit_tests_reward(options, strip_thinking=spec.strip_thinking)
        return RewardFn(name, fn, is_async=True, seconds=options.total_seconds + OVERLOAD_S, at_once=AT_ONCE)
    extra = {**spec.args, "pattern": spec.pattern} if spec.pattern else spec.args
    function = load_function(name, reward_expected(keys.fn, takes_group=spec.takes_group), extra)
    return RewardFn(name, partial(function.fn, **extra), is_async=function.is_async, takes_group=spec.takes_group)


async def call_reward(reward: RewardFn, answers: Answers) -> Outcomes:
    """Raises CallFailed, CancelledError only if its task is cancelled. Suspends for async functions only."""
    try:
        returned = reward.fn(answers if reward.takes_group else answers[0])
        if reward.is_async:
            returned = await returned
    except BaseException as error:
        if is_cancelled(error):
            raise
        if isinstance(error, Blocked):
            raise CallFailed(f"{error}; a plain def may, and so may asyncio.to_thread") from error
        raised = what_was_raised(error)
        is_nested = isinstance(error, RuntimeError) and "event loop" in raised  # asyncio.run in a plain function
        remedy = "; declare it with `async def`, and `await` there" if is_nested else ""
        raise CallFailed(f"raised {raised}{remedy}") from error
    if inspect.iscoroutine(returned):
        returned.close()
        raise CallFailed("returned a coroutine; declare it, and what wraps it, with `async def`")
    return judged(returned, len(answers) if reward.takes_group else None)


def judged(returned: object, num_answers: int | None) -> Outcomes:
    """What a function returned, as outcomes. `num_answers`: of the group; None: a single answer. Raises CallFailed."""
    try:
        return (outcome_of(returned),) if num_answers is None else outcomes_of(returned, num_answers)
    except Unusable as error:
        raise CallFailed(words_of(error)) from error
    except BaseException as error:
        raise CallFailed(f"returned a {type(returned).__name__} that raised {what_was_raised(error)}") from error


class RewardSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """First frame to a worker: what it is to call."""

    fn: str
    pattern: str
    args: dict[str, Any]
    takes_group: bool = False
    strip_thinking: bool = True
    keys: RewardKeys = ALONE
    max_block_s: float = 0.0
    """So long one of many calls may hold the loop of all; 0: there is one call at a time."""


class Judge(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A call."""

    call: int
    answers: Answers
    timeout_s: float


class Replied(Ended, frozen=True, tag=True):
    """How it ended."""

    outcomes: Outcomes = ()
    cause: str = ""
    """Of its failure."""
    lasted_s: float = 0.0
    """In the function."""


spec_decoder = msgspec.msgpack.Decoder(RewardSpec)
to_worker: msgspec.msgpack.Decoder[Judge | Cancel] = msgspec.msgpack.Decoder(Judge | Cancel)
from_worker: msgspec.msgpack.Decoder[Replied | Waits | Stuck] = msgspec.msgpack.Decoder(Replied | Waits | Stuck)
