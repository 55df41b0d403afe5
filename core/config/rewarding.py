"""The section that says how answers are judged.

Every field's docstring says what it is, its unit and what the special values mean; `docs/config.md` is generated
from them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, field_validator

from .conflict import Conflict
from .section import CodeName, CountInt, PositiveFloat, Section, UnitFloat
from .settings import check_code_name
from .tables import Table

REWARD_BUILTINS = ("exact", "numeric", "math", "f1", "choice", "regex", "format", "remote")


class RewardSettings(Section, frozen=True):
    """How answers are judged."""

    fn: CodeName = "exact"
    """exact, numeric, math, f1, choice, regex, format, remote, or your own `module:function` or `file.py:function`."""
    scope: Literal["sample", "group"] = "sample"
    """What one call judges: one answer (sample), or, where a function of your own or remote judges, all answers to a
    prompt at once (group): it gets a sequence of them, and returns a reward for each."""
    workers: Annotated[int, Field(ge=0, le=256)] = 0
    """Worker processes per rollout actor; 0 = what the function needs: `math` one, a plain `def` of your own and
    patterns up to four, the rest none."""
    isolate: bool = True
    """Whether a plain `def` of your own gets processes although `workers = 0`; without, it runs in threads of the
    rollout actor, which it can stop or kill together with the engine."""
    timeout_s: PositiveFloat = 30.0
    """Seconds one call may take; a worker process that takes longer is killed and replaced."""
    max_error_rate: UnitFloat = 0.1
    """Share of failed calls (over at least 20) above which the run ends; also of groups lost to the workflow or the
    engine."""
    on_error: Literal["drop", "zero"] = "drop"
    """What a failed call means: drop (the group is not trained on) or zero (the answer gets 0; it still counts as an
    error)."""
    pause_after: Annotated[int, Field(ge=0, le=1000)] = 5
    """Groups in a row whose calls fail, after it worked, until the function is left alone: answers wait and are judged
    later; 0 = never."""
    cool_down_s: PositiveFloat = 5.0
    """Seconds until a function that is left alone is tried again; doubled, up to 60, each time that it still fails."""
    max_outage_s: PositiveFloat = 300.0
    """Seconds for which answers wait for a function that is left alone; then the run ends."""
    quarantine_after: CountInt = 3
    """Failures of reward or workflow after which a prompt is not drawn again in later passes (`quarantine.jsonl`); one
    that ended its worker process is not given a second chance; 0 = prompts are always drawn, also those on the list."""
    pattern: str = ""
    """Regular expression of `regex` and `format` (Python syntax)."""
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

    @field_validator("fn")
    @classmethod
    def _function_is_named(cls, value: str) -> str:
        return check_code_name(value, REWARD_BUILTINS)

    @field_validator("pattern")
    @classmethod
    def _pattern_compiles(cls, value: str) -> str:
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"is not a regular expression: {error}") from error
        return value

    def conflicts(self) -> Iterator[Conflict]:
        """A built-in without its argument."""
        if self.fn == "regex" and not self.pattern:
            yield Conflict(("pattern", "fn"), 'fn = "regex" needs a pattern')
        if self.fn == "remote" and self.workers:
            yield Conflict(("workers", "fn"), 'must be 0: fn = "remote" is asked by the rollout actor itself')
        if self.scope == "group" and self.fn in REWARD_BUILTINS and self.fn != "remote":
            yield Conflict(
                ("scope", "fn"), f'is for a function of your own or "remote": "{self.fn}" judges one answer by itself'
            )
        if bool(self.overlong_tokens) != bool(self.overlong_buffer) or self.overlong_buffer > self.overlong_tokens:
            yield Conflict(
                ("overlong_buffer", "overlong_tokens"),
                f"must be from 1 to overlong_tokens = {self.overlong_tokens}"
                if self.overlong_tokens
                else "needs overlong_tokens, the length that it ends at",
            )
