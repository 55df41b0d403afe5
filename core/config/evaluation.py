"""The section about evaluation: one set of held-out prompts, or several with names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated

from pydantic import Field, field_validator

from .data import SOURCE_NAME, RowSource, check_sources
from .reward import REWARD_BUILTINS, check_pattern
from .section import (
    CodeName,
    Conflict,
    CountInt,
    MaybeTemperature,
    PositiveInt,
    Section,
    SourceText,
    Table,
    Temperature,
    TopK,
    check_code_name,
)

MAX_SETS = 32
TAKEN_NAMES = frozenset(("reward", "response_length", "truncated_ratio", "num_errors"))
"""Names of metrics of an evaluation without sets."""


class EvalSetSettings(RowSource, frozen=True):
    """One of several sets of held-out prompts, `NAME` is its own: letters, digits, `_`, `-`, at most 64. What is left
    out is as in `[eval]`, rows are read as in `[data]`, but for the columns of a set with its own preset."""

    num_prompts: CountInt = 0
    """Prompts used in one evaluation: the first ones of the file; 0 = as in `[eval]`."""
    num_samples: CountInt = 0
    """Answers per prompt; 0 = as in `[eval]`."""
    temperature: MaybeTemperature = -1.0
    """Sampling temperature; 0 = greedy, -1 = as in `[eval]`."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus; 1 = off."""
    top_k: TopK = -1
    """Only the k most likely tokens; -1 = off."""
    max_new_tokens: CountInt = 0
    """Tokens a model turn may have at most; 0 = as in `[rollout]`."""
    pass_reward: float = 1.0
    """Reward from which on an answer counts as solved, for `pass_at_1` and further."""
    reward: CodeName = ""
    """Reward function, as `reward.fn`; empty = the run's own, with its arguments."""
    reward_pattern: str = ""
    """As `reward.pattern`, for a function named here."""
    reward_args: Table = {}
    """As `reward.args`, for a function named here."""

    @field_validator("temperature")
    @classmethod
    def _temperature_is_one(cls, value: float) -> float:
        if -1 < value < 0:
            raise ValueError("must be at least 0, or -1 (as in [eval])")
        return value

    @field_validator("reward")
    @classmethod
    def _function_is_named(cls, value: str) -> str:
        return check_code_name(value, REWARD_BUILTINS) if value else value

    @field_validator("reward_pattern")
    @classmethod
    def _pattern_compiles(cls, value: str) -> str:
        return check_pattern(value)

    def conflicts(self) -> Iterator[Conflict]:
        """Arguments of no function, and a function without its argument."""
        if not self.reward and (self.reward_pattern or self.reward_args):
            named = "reward_pattern" if self.reward_pattern else "reward_args"
            yield Conflict((named, "reward"), "is for a function of the set's own: name it in `reward`")
        if self.reward == "regex" and not self.reward_pattern:
            yield Conflict(("reward_pattern", "reward"), 'reward = "regex" needs a pattern')


class EvalSettings(Section, frozen=True):
    """Evaluation on held-out prompts, beside training. Read with the keys and preset of `[data]`."""

    data: SourceText = ""
    """JSONL or parquet file(s) with held-out prompts; empty = no evaluation, or that on `sets`."""
    sets: dict[str, EvalSetSettings] = {}
    """Several sets instead of `data`, each a table `[eval.sets.NAME]`: see there."""
    every: CountInt = 0
    """Steps between evaluations; 0 = only at the start (see `at_start`) or never."""
    num_prompts: PositiveInt = 1024
    """Prompts used in one evaluation at most: the first ones. Rows beyond are named by plan, at the start and with
    every result."""
    num_samples: PositiveInt = 1
    """Answers per prompt."""
    temperature: Temperature = 1.0
    """Sampling temperature of evaluation; 0 = greedy."""
    at_start: bool = True
    """Whether the untrained weights are evaluated too."""

    @field_validator("data")
    @classmethod
    def _sources_parse(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        return check_sources(value)

    @property
    def has_prompts(self) -> bool:
        """Whether there is anything to evaluate on."""
        return bool(self.data or self.sets)

    def files(self) -> Mapping[str, tuple[str, str | tuple[str, ...]]]:
        """Name of each set -> the key of the run file that names its files, and what it says; one without sets is
        called ""."""
        if self.data:
            return {"": ("eval.data", self.data)}
        return {name: (f"eval.sets.{name}.path", one.path) for name, one in sorted(self.sets.items())}

    def named_functions(self) -> Iterator[tuple[str, str]]:
        """Every key of the run file that names a set's own reward function, and what it says."""
        for name, one in sorted(self.sets.items()):
            if one.reward:
                yield f"eval.sets.{name}.reward", one.reward

    def conflicts(self) -> Iterator[Conflict]:
        """Sets that do not go together."""
        if self.data and self.sets:
            yield Conflict(("data", "sets"), "does not go with [eval.sets]: make it one of them, with a name")
        if len(self.sets) > MAX_SETS:
            yield Conflict(("sets",), f"has {len(self.sets)} sets, at most {MAX_SETS} are evaluated")
        for name in self.sets:
            if not SOURCE_NAME.fullmatch(name):
                yield Conflict((f"sets.{name}",), "a set's name is 1 to 64 letters, digits, '_' or '-', no sign first")
            elif name in TAKEN_NAMES or name.startswith("pass_at_"):
                yield Conflict((f"sets.{name}",), "is the name of a metric; choose another one")
