"""The section that says how answers are judged.

Every field's docstring says what it is, its unit and what the special values mean; `docs/config.md` is generated
from them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator

from ..suggestion import suggest
from .section import CodeName, Conflict, CountInt, PositiveFloat, Section, Table, UnitFloat, check_code_name

REWARD_BUILTINS = ("exact", "numeric", "math", "f1", "choice", "regex", "format", "workflow", "recorded", "remote")
FUNCTION_NAME = re.compile(r"(?=.{1,32}\Z)[A-Za-z0-9][A-Za-z0-9_-]*(/[A-Za-z0-9_-]+)*")
"""Data names its sources like "openai/gsm8k"."""
MAX_FUNCTIONS = 16
OVERLONG = "overlong"
"""Part of a reward: what the answer's length costs."""
WHOLE = "reward"
"""No part: the number that is learnt from."""


def check_pattern(value: str) -> str:
    """Accept a regular expression; raise ValueError otherwise."""
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"is not a regular expression: {error}") from error
    return value


class FunctionSettings(Section, frozen=True):
    """One of several reward functions, `NAME` is its own: letters, digits, `_`, `-`, `/` inside, at most 32. What it
    says becomes the part NAME of the reward, its own parts NAME/PART. All else is as in `[reward]`; each function has
    its own `workers` and its own count of errors."""

    fn: CodeName = ""
    """As `reward.fn`; empty = the built-in called NAME."""
    weight: float = 1.0
    """What its reward is multiplied by before it is added to the others'; 0 = only a metric."""
    scope: Literal["sample", "group"] = "sample"
    """As `reward.scope`."""
    pattern: str = ""
    """As `reward.pattern`."""
    args: Table = {}
    """As `reward.args`."""

    @field_validator("fn")
    @classmethod
    def _function_is_named(cls, value: str) -> str:
        return check_code_name(value, REWARD_BUILTINS) if value else value

    @field_validator("pattern")
    @classmethod
    def _pattern_compiles(cls, value: str) -> str:
        return check_pattern(value)


class RewardSettings(Section, frozen=True):
    """How answers are judged."""

    fn: CodeName = "exact"
    """exact, numeric, math, f1, choice, regex, format, workflow (what your workflow says:
    `episode.sample(reward=...)`), recorded (what the answer was given when it was recorded), remote (a service is
    asked), or your own `module:function` or `file.py:function`."""
    scope: Literal["sample", "group"] = "sample"
    """What one call judges: one answer (sample), or, where a function of your own or remote judges, all answers to a
    prompt at once (group): it gets a sequence of them, and returns a reward for each."""
    workers: Annotated[int, Field(ge=0, le=256)] = 0
    """Worker processes per rollout actor, each for one call at a time; 0 = what the function needs: `math` one, a plain
    `def` of your own and patterns up to four, an `async def` one for all its calls side by side, the rest none."""
    isolate: bool = True
    """Whether a function of your own gets processes although `workers = 0`; without, a plain `def` runs in threads of
    the rollout actor, an `async def` in its loop, and can stop or kill it together with the engine."""
    max_block_s: PositiveFloat = 5.0
    """Seconds for which an `async def` may hold the loop that all its calls share, by one that blocks; then that call
    is interrupted, and fails."""
    timeout_s: PositiveFloat = 30.0
    """Seconds one call may take; a worker process that takes longer is killed and replaced."""
    max_error_rate: UnitFloat = 0.1
    """Share of failed calls (over at least 20) above which the run ends; also of groups lost to the reward, the
    workflow or the engine."""
    on_error: Literal["drop", "zero"] = "drop"
    """What a failed call means: drop (the group is not trained on) or zero (the answer gets 0; it still counts as an
    error). So too for a workflow that raises PolicyFailure, which counts with drop only."""
    pause_after: Annotated[int, Field(ge=0, le=1000)] = 5
    """Groups in a row whose calls fail, after it worked, until the function is left alone: answers wait and are judged
    later; 0 = never."""
    cool_down_s: PositiveFloat = 5.0
    """Seconds until a function that is left alone is tried again; doubled, up to 60, each time that it still fails."""
    max_outage_s: PositiveFloat = 300.0
    """Seconds for which answers wait for a function that is left alone, or for which all groups are lost through their
    workflow's environment; then the run ends."""
    quarantine_after: CountInt = 3
    """Failures of reward or workflow after which a prompt is not drawn again in later passes (`quarantine.jsonl`); one
    that ended its worker process is not given a second chance; 0 = prompts are always drawn, also those on the list."""
    pass_reward: float = 1.0
    """Reward from which on an answer counts as right: in `reward/pass_rate` and the shares of groups all right and all
    wrong, and for `pass_at_k` of `eval.data`; sets of `[eval.sets]` have their own."""
    pattern: str = ""
    """Regular expression of `regex` and `format` (Python syntax)."""
    strip_thinking: bool = True
    """Whether `exact`, `numeric`, `math`, `f1`, `choice` and `regex` read only what follows the last `</think>` or the
    like; a thought that does not end has no answer. A pattern that names "think" sees the whole text."""
    truncated: Literal["score", "zero"] = "score"
    """What an answer cut off by `max_new_tokens` gets: score (judged like any other) or zero."""
    overlong_tokens: CountInt = 0
    """Response tokens (tool replies included) at which an answer's reward is lowered by the whole `overlong_penalty`
    (DAPO's soft over-long punishment), usually `rollout.max_new_tokens`; 0 = length costs nothing."""
    overlong_buffer: CountInt = 0
    """Tokens before `overlong_tokens` over which that grows from nothing, in proportion."""
    overlong_penalty: PositiveFloat = 1.0
    """By how much the reward of an answer of that length is lowered."""
    args: Table = {}
    """Further named arguments of the reward function, for example `tolerance = 0.01` for numeric."""

    functions: dict[str, FunctionSettings] = {}
    """Several functions instead of `fn`, each a table `[reward.functions.NAME]`: see there. The reward is the sum of
    all, by their weights, or what the one says that the row chooses."""
    choose_by: str = ""
    """Key of the row's metadata that names the function that judges its answers, for example "rm_type", or
    "data_source" where each source of prompts has its own; empty = all functions do."""
    choose_else: str = ""
    """The function of rows that name none; empty = such a row is a bad row."""

    @field_validator("fn")
    @classmethod
    def _function_is_named(cls, value: str) -> str:
        return check_code_name(value, REWARD_BUILTINS)

    @field_validator("pattern")
    @classmethod
    def _pattern_compiles(cls, value: str) -> str:
        return check_pattern(value)

    def alone(self, fn: str, *, pattern: str = "", args: Mapping[str, Any] | None = None) -> Self:
        """A section in which one function says all, whatever this one's say; limits and errors are as here."""
        nothing: dict[str, Any] = {"functions": {}, "choose_by": "", "choose_else": "", "overlong_tokens": 0}
        return self.model_copy(
            update={**nothing, "fn": fn, "scope": "sample", "pattern": pattern, "args": dict(args or {})}
        )

    def parts(self) -> Mapping[str, Self]:
        """Each function by its name, as a complete section; the only one is called ""."""
        if not self.functions:
            return {"": self}
        return {
            name: self.alone(of.fn or name, pattern=of.pattern, args=of.args).model_copy(update={"scope": of.scope})
            for name, of in self.functions.items()
        }

    def named_functions(self) -> Iterator[tuple[str, str]]:
        """Every key of the run file that names a function, and what it says."""
        for name, part in self.parts().items():
            yield (f"reward.functions.{name}.fn" if name else "reward.fn"), part.fn

    def conflicts(self) -> Iterator[Conflict]:
        """Functions without their arguments, and keys that do not go together."""
        for name, part in self.parts().items():
            yield from _function_conflicts(part, f"functions.{name}." if name else "")
        yield from _several_conflicts(self)
        if bool(self.overlong_tokens) != bool(self.overlong_buffer) or self.overlong_buffer > self.overlong_tokens:
            yield Conflict(
                ("overlong_buffer", "overlong_tokens"),
                f"must be from 1 to overlong_tokens = {self.overlong_tokens}"
                if self.overlong_tokens
                else "needs overlong_tokens, the length that it ends at",
            )


def _function_conflicts(part: RewardSettings, place: str) -> Iterator[Conflict]:
    fn = f"{place}fn"
    if part.fn == "regex" and not part.pattern:
        yield Conflict((f"{place}pattern", fn), 'fn = "regex" needs a pattern')
    if part.fn == "remote" and part.workers:
        yield Conflict(("workers", fn), 'must be 0: fn = "remote" is asked by the rollout actor itself')
    if part.scope == "group" and part.fn in REWARD_BUILTINS and part.fn != "remote":
        yield Conflict(
            (f"{place}scope", fn), f'is for a function of your own or "remote": "{part.fn}" judges one answer by itself'
        )


def _several_conflicts(reward: RewardSettings) -> Iterator[Conflict]:
    if not reward.functions:
        for key in ("choose_by", "choose_else"):
            if getattr(reward, key):
                yield Conflict((key, "functions"), "needs [reward.functions.NAME], the functions to choose from")
        return
    for key in ("fn", "pattern", "scope", "args"):
        if getattr(reward, key) != RewardSettings.model_fields[key].default:
            yield Conflict((key, "functions"), "does not go with [reward.functions]: make it one of them, with a name")
    yield from _name_conflicts(reward.functions)
    if not any(of.weight for of in reward.functions.values()):
        paths = tuple(f"functions.{name}.weight" for name in reward.functions)
        yield Conflict(paths, "so every reward is 0: give one of them a weight")
    if reward.choose_else and not reward.choose_by:
        yield Conflict(("choose_else", "choose_by"), "needs choose_by, the key of the metadata that chooses")
    elif reward.choose_else and reward.choose_else not in reward.functions:
        near = suggest(reward.choose_else, tuple(reward.functions))
        yield Conflict(("choose_else", "functions"), f"is none of reward.functions; {near}")


def _name_conflicts(functions: Mapping[str, FunctionSettings]) -> Iterator[Conflict]:
    if len(functions) > MAX_FUNCTIONS:
        yield Conflict(("functions",), f"has {len(functions)} functions, but there may be {MAX_FUNCTIONS}")
    for name, of in functions.items():
        if not FUNCTION_NAME.fullmatch(name) or name in (OVERLONG, WHOLE):
            words = "a function's name is 1 to 32 letters, digits, '_', '-' or '/', no sign first"
            yield Conflict((f"functions.{name}",), f'{words}, and not "{OVERLONG}" or "{WHOLE}"')
        elif above := next((other for other in functions if name.startswith(f"{other}/")), ""):
            yield Conflict((f"functions.{name}",), f'is named like a part of "{above}": choose another name')
        elif not of.fn and name not in REWARD_BUILTINS:
            yield Conflict((f"functions.{name}.fn",), f'must be set: "{name}" is no built-in reward')
