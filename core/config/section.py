"""The base of every section of a run file: strict, frozen, unknown keys refused.

Here are the field types, the markers for what a text means, conflicts (values that are right one by one and wrong
together), typed views of raw TOML tables, and what pydantic knows of a section's fields as dotted paths.

Library: pydantic (reports all errors in one go, with paths). The layer around it, in `loading.py`, is ours because no
kept library adds file and line, "did you mean" and all errors at once (pydantic-settings and jsonargparse were tried).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, cast, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from ..sampling import MAX_PENALTY, MAX_TOP_K, MIN_FACTOR
from ..suggestion import nearest

CONFLICTS = "conflicts"
"""Type of the pydantic error whose context holds all conflicts found in one section."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """Dotted paths that cannot go together, relative to the section that found it; the first is the one to change."""

    paths: tuple[str, ...]
    cause: str


def clashes(*rules: tuple[object, str, str]) -> Iterator[Conflict]:
    """A conflict for each rule that holds: whether it does, its paths with spaces between them, and the cause."""
    return (Conflict(tuple(paths.split()), cause) for holds, paths, cause in rules if holds)


Meaning = Literal["path", "sources", "code", "program"]


@dataclass(frozen=True, slots=True)
class Means:
    """What a string in the run file names, so that relative paths in it can be resolved.

    path: a file or folder; sources: one or several `path@[start:stop]`; code: `module:attr` or `file.py:attr` or a
    built-in name; program: an executable, a path only if it holds a slash.
    """

    meaning: Meaning


PathText = Annotated[str, Means("path")]
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


def named(*builtins: str) -> AfterValidator:
    """The marker of a name of code: one of these, `module:attr` or `file.py:attr`. An empty text is let through; it is
    refused where the built-ins are all that may be left out."""
    return AfterValidator(lambda value: check_code_name(value, builtins) if value else value)


CODE_NAME = re.compile(r"[^:\s][^:]*:[A-Za-z_][A-Za-z0-9_.]*")


def check_code_name(value: str, builtins: tuple[str, ...]) -> str:
    """Accept a built-in name, `module:attr` or `file.py:attr`; raise ValueError otherwise."""
    if value in builtins or CODE_NAME.fullmatch(value):
        return value
    near = nearest(value, builtins)
    hint = f'; did you mean "{near}"?' if near else ""
    known = f"one of {', '.join(builtins)}, or " if builtins else ""
    raise ValueError(f"must be {known}module:function, or file.py:function{hint}")


def check_pattern(value: str) -> str:
    """Accept a regular expression; raise ValueError otherwise."""
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f'"{value}" is not a regular expression: {error}') from error
    return value


def check_once(values: tuple[str, ...]) -> tuple[str, ...]:
    """Values that all differ; raises ValueError otherwise."""
    if twice := [value for value in dict.fromkeys(values) if values.count(value) > 1]:
        raise ValueError(f'names "{twice[0]}" twice')
    return values


HTTP_URL = re.compile(r"https?://[^\s/]+(/\S*)?")


def check_urls(urls: tuple[str, ...]) -> tuple[str, ...]:
    """Addresses of different servers; raises ValueError otherwise."""
    for url in urls:
        if not HTTP_URL.fullmatch(url):
            raise ValueError(f'"{url}" must look like http://host:port')
    check_once(tuple(url.rstrip("/") for url in urls))
    return urls


def _off_or_positive(value: int) -> int:
    if value != -1 and value < 1:
        raise ValueError("must be -1 (off) or at least 1")
    if value > MAX_TOP_K:
        raise ValueError(f"must be at most {MAX_TOP_K}")
    return value


def divides(value: float) -> float:
    """Logits are divided by it in float32."""
    if 0 < value < MIN_FACTOR:
        raise ValueError(f"must be at least {MIN_FACTOR:g} where it is not 0")
    return value


Pattern = Annotated[str, AfterValidator(check_pattern)]
TopK = Annotated[int, AfterValidator(_off_or_positive)]
Temperature = Annotated[float, Field(ge=0, le=10), AfterValidator(divides)]
RepetitionPenalty = Annotated[float, Field(gt=0, le=MAX_PENALTY), AfterValidator(divides)]
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
            text = "; ".join(f"{conflict.paths[0]}: {conflict.cause}" for conflict in found)
            # The text goes in through the context: pydantic would read braces in a template as its own.
            raise PydanticCustomError(CONFLICTS, "{text}", {"text": text, "conflicts": found})
        return self


Table = dict[str, Any]
KeyPath = tuple[str, ...]


def as_table(value: object) -> Table | None:
    """The value if it is a table, else None. TOML keys are always text."""
    return cast("Table", value) if isinstance(value, dict) else None


def check_json(table: Table) -> Table:
    """The table, if all that is in it can be written as JSON; raises ValueError otherwise: TOML has dates, and numbers
    that are none."""
    try:
        json.dumps(table, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"must hold JSON values only ({error}); write it as text") from None
    return table


def as_array(value: object) -> list[Any] | None:
    """The value if it is an array, else None."""
    return cast("list[Any]", value) if isinstance(value, list) else None


def table_at(table: Table, path: Sequence[str]) -> Table | None:
    """The table at a path, or None if the way there is not made of tables."""
    level: Table | None = table
    for key in path:
        level = as_table(level.get(key)) if level is not None else None
    return level


def table_made_at(table: Table, path: Sequence[str]) -> Table:
    """The table at a path; whatever is in the way is replaced by tables."""
    level = table
    for key in path:
        below = as_table(level.get(key))
        if below is None:
            below = {}
            level[key] = below
        level = below
    return level


ANY_NAME = "*"
"""In a path: any key of a table whose keys are names of the user's."""


def section_of(field: FieldInfo) -> type[Section] | None:
    """The section class of a field that is a table with fixed keys, else None."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def named_section_of(field: FieldInfo) -> type[Section] | None:
    """The section class of the tables in a field that is a table of tables by names of the user's, else None."""
    kind: Any = field.annotation
    inner: Any = get_args(kind)[-1] if get_origin(kind) is dict else None
    return inner if isinstance(inner, type) and issubclass(inner, Section) else None


def keys_of(section: type[Section]) -> dict[str, FieldInfo]:
    """The keys of a section as they are written in a file; its own before those that it shares with others."""
    fields = sorted(section.model_fields.items(), key=lambda one: one[0] not in section.__annotations__)
    return {field.alias or name: field for name, field in fields}


def walk(section: type[Section], prefix: KeyPath = ()) -> Iterator[tuple[KeyPath, FieldInfo]]:
    """Every key of a section and of the sections in it, tables before their keys; `ANY_NAME` is used for names of the
    user's."""
    for key, field in keys_of(section).items():
        path = (*prefix, key)
        yield path, field
        below = section_of(field)
        if below is not None:
            yield from walk(below, path)
        named = named_section_of(field)
        if named is not None:
            yield from walk(named, (*path, ANY_NAME))


def find(section: type[Section], path: Sequence[str]) -> tuple[type[Section], FieldInfo | None, KeyPath]:
    """The innermost section on the way of `path`, its field (None: unknown, or the section itself), what is left."""
    at = 0
    while at < len(path):
        field = keys_of(section).get(path[at])
        if field is None:
            return section, None, tuple(path[at:])
        below, named = section_of(field), named_section_of(field)
        at += 1
        if named is not None and at < len(path):
            below, at = named, at + 1
        if below is None:
            return section, field, tuple(path[at:])
        section = below
    return section, None, ()
