"""The base of every section of a run file: strict, frozen, unknown keys refused.

Knows pydantic and the markers that say what a string stands for. Must not know any section.
Library: pydantic (reports all errors in one go, with paths). The layer around it, in `loading.py`, is ours because no
kept library adds file and line, "did you mean" and all errors at once (pydantic-settings and jsonargparse were tried).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict, model_validator

from ..sampling_ranges import MAX_PENALTY, MAX_TOP_K, MIN_FACTOR
from .conflict import Conflict, conflict_error

Meaning = Literal["path", "sources", "code", "program"]


@dataclass(frozen=True, slots=True)
class Means:
    """What a string in the run file stands for, so that relative paths in it can be resolved.

    path: a file or folder; sources: one or several `path@[start:stop]`; code: `module:attr` or `file.py:attr` or a
    built-in name; program: an executable, a path only if it holds a slash.
    """

    meaning: Meaning


@dataclass(frozen=True, slots=True)
class OrElse:
    """A required key that may be left out where that one beside it says something."""

    key: str


PathText = Annotated[str, Means("path")]
SourceText = Annotated[str | Annotated[tuple[str, ...], Strict(False)], Means("sources")]
CodeName = Annotated[str, Means("code")]
ProgramName = Annotated[str, Means("program")]

PositiveInt = Annotated[int, Field(ge=1)]
CountInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
UnitFloat = Annotated[float, Field(ge=0, le=1)]

IntTuple = Annotated[tuple[int, ...], Strict(False)]
"""A TOML array of integers; the elements stay strict."""
TextTuple = Annotated[tuple[str, ...], Strict(False)]
"""A TOML array of text."""


def _off_or_positive(value: int) -> int:
    if value != -1 and value < 1:
        raise ValueError("must be -1 (off) or at least 1")
    if value > MAX_TOP_K:
        raise ValueError(f"must be at most {MAX_TOP_K}")
    return value


def _divides(value: float) -> float:
    """Logits are divided by it in float32."""
    if 0 < value < MIN_FACTOR:
        raise ValueError(f"must be at least {MIN_FACTOR:g} where it is not 0")
    return value


TopK = Annotated[int, AfterValidator(_off_or_positive)]
Temperature = Annotated[float, Field(ge=0, le=10), AfterValidator(_divides)]
MaybeTemperature = Annotated[float, Field(ge=-1, le=10), AfterValidator(_divides)]
"""-1: as elsewhere."""
RepetitionPenalty = Annotated[float, Field(gt=0, le=MAX_PENALTY), AfterValidator(_divides)]
OtherPenalty = Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)]


class Section(BaseModel, frozen=True):
    """A table of the run file. Equal values make equal sections; nothing can be changed after loading."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        validate_default=False,
        validate_by_name=True,
        validate_by_alias=True,
        use_attribute_docstrings=True,
    )

    def conflicts(self) -> Iterator[Conflict]:
        """Values of this section (or of the sections in it) that cannot go together."""
        return iter(())

    @model_validator(mode="after")
    def _values_fit(self) -> Self:
        found = tuple(self.conflicts())
        if found:
            raise conflict_error(found)
        return self
