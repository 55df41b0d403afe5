"""The base of every section of a run file: strict, frozen, unknown keys refused.

Field types, the markers for what a text means, conflicts (values that are right one by one and wrong together), the
relations between keys that most of them break, and a section's fields as dotted paths. pydantic reports all errors in
one go; `loading.py` adds file, line and "did you mean".
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, cast, get_args, get_origin
from urllib.parse import urlsplit

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from ..sampling import MAX_PENALTY, MAX_TOP_K, MIN_FACTOR
from ..suggestion import nearest

MAX_BITS = 64
CONFLICTS = "conflicts"
"""Type of the pydantic error whose context holds all conflicts found in one section."""


class Conflict(NamedTuple):
    """Values that cannot go together."""

    path: str
    """The key to change, with dots, relative to the section that found it."""
    cause: str


def clashes(*rules: tuple[object, str, str]) -> Iterator[Conflict]:
    """A conflict for each rule that holds: whether it does, the key to change, and the cause."""
    return (Conflict(path, cause) for holds, path, cause in rules if holds)


class Term(NamedTuple):
    """What a relation says of one key: `key` (it is set to another value than its default), `!key` (it is not),
    `key=a,b` (it is one of these; texts without quotes) or `key!=a,b` (it is none of these)."""

    key: str
    values: tuple[str, ...]
    is_denied: bool

    @classmethod
    def parse(cls, text: str) -> Self:
        """The term that is written so."""
        key, equals, values = text.partition("=")
        return cls(key.strip("!"), tuple(values.split(",")) if equals else (), "!" in key)

    def holds(self, section: Section) -> bool:
        """Whether it is so."""
        value, default = value_at(section, self.key)
        return (_word(value) in self.values if self.values else value != default) != self.is_denied

    def describe(self, section: Section, is_found: bool = False) -> str:
        """What it asks for; `is_found`: the value that it has found."""
        value: Any = value_at(section, self.key)[0]
        name = f"the table {self.key}" if isinstance(value, (Section, dict)) else self.key
        values = [_word(value)] if self.values and is_found else self.values
        quote = '"' if isinstance(value, (str, tuple)) else ""
        shown = " or ".join(f"{quote}{word}{quote}" for word in values)
        return f"{name} {'other than' if self.is_denied and not is_found else '='} {shown}" if shown else name


def _word(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, cast("tuple[object, ...]", value)))
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


@cache
def _relation(line: str) -> tuple[bool, list[Term], list[Term], str]:
    relation, _, reason = line.partition(": ")
    left, verb, right = re.split(" (needs|for) ", relation)
    wants, offers = (left, right) if verb == "needs" else (right, left)
    return verb == "needs", [*map(Term.parse, wants.split())], [*map(Term.parse, offers.split())], reason


def relation_conflicts(section: Section, relations: Iterable[str]) -> Iterator[Conflict]:
    """A conflict for each key of which a relation does not hold.

    A relation is a line. `a b=1 needs c=x,y d: why`: if `a` is set, then `c` must be x or y, or `d` set; so too if `b`
    is 1. `c=x,y d for a b=1: why` is the same, but `c` is the key to change.
    """
    causes: dict[str, list[str]] = {}
    for line in relations:
        is_first, wants, offers, reason = _relation(line)
        if any(offer.holds(section) for offer in offers):
            continue
        verb = "does not go with" if offers[0].is_denied and not offers[0].values else "needs"
        asks = f"{verb} {' or '.join(offer.describe(section) for offer in offers)}{': ' if reason else ''}{reason}"
        for want in filter(lambda term: term.holds(section), wants):
            key, cause = (want.key, asks) if is_first else (offers[0].key, f"{want.describe(section, True)} {asks}")
            causes.setdefault(key, []).append(cause)
    return (Conflict(key, "; and ".join(all_of_it)) for key, all_of_it in causes.items())


def value_at(section: Section, path: str) -> tuple[Any, object]:
    """The value of a key, and its default; None for what a free table lacks. Raises AttributeError for an unknown
    key."""
    value: Any = section
    default: object = None
    for key in path.split("."):
        if isinstance(value, Section):
            name = attribute_of(type(value), key)
            value, default = getattr(value, name), value.default_of(name)
        else:
            value, default = value.get(key), None
    return value, default


@cache
def attribute_of(section: type[Section], key: str) -> str:
    """The attribute that holds the key of a file."""
    return next((name for name, info in section.model_fields.items() if info.alias == key), key)


Meaning = Literal["path", "model", "sources", "code", "program"]


@dataclass(frozen=True, slots=True)
class Means:
    """What a string in the run file names, so that relative paths in it can be resolved.

    path: a file or folder; model: a folder, or a name of the hub; sources: one or several `path@[start:stop]`, or names
    of the hub; code: `module:attr` or `file.py:attr` or a
    built-in name; program: an executable, a path only if it holds a slash.
    """

    meaning: Meaning


ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SHELL_VARIABLE = re.compile(r"(?:^|[/:=])\$[A-Za-z_]|\$[{(]\w")


IS_FROZEN: ContextVar[bool] = ContextVar("is_frozen", default=False)
"""Whether the file that is checked was frozen by a run: what ran before still loads."""


def has_shell_variable(text: str) -> bool:
    """Whether a shell would replace a part of it; none does here."""
    return not IS_FROZEN.get() and SHELL_VARIABLE.search(text) is not None


def check_name_text(text: str) -> str:
    """Text that the operating system takes as a name; raises ValueError otherwise, and for what a shell replaces."""
    if "\0" in text:
        raise ValueError("must not hold the character NUL")
    if has_shell_variable(text):
        raise ValueError("has a variable of the environment, which is not replaced: write what it stands for")
    return text


def check_path_text(text: str, choices: str = "a file or folder") -> str:
    """The same, and no address."""
    if "://" in text and not IS_FROZEN.get():
        raise ValueError(f"is an address: name {choices}")
    return check_name_text(text)


def check_env(table: dict[str, str]) -> dict[str, str]:
    """Variables that a process can be given; raises ValueError otherwise, and for what a shell replaces."""
    for name, text in table.items():
        if not ENV_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a name of an environment variable")
        if "\0" in text:
            raise ValueError(f"the value of {name} contains a NUL character")
        if has_shell_variable(text) or (text.startswith("~/") and not IS_FROZEN.get()):
            cause = f"the value of {name} has what a shell replaces, and none does here"
            raise ValueError(f"{cause}: write the value, or set it where you start the run")
    return table


PathText = Annotated[str, AfterValidator(lambda text: check_path_text(text)), Means("path")]
CodeName = Annotated[str, AfterValidator(check_name_text), Means("code")]
ProgramName = Annotated[str, AfterValidator(check_name_text), Means("program")]

PositiveInt = Annotated[int, Field(ge=1)]
CountInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
UnitFloat = Annotated[float, Field(ge=0, le=1)]

EnvTable = Annotated[dict[str, str], AfterValidator(check_env)]

IntTuple = Annotated[tuple[int, ...], Strict(False)]
"""A TOML array of integers; the elements stay strict."""
TextTuple = Annotated[tuple[str, ...], Strict(False)]
"""A TOML array of text."""


def code_names(*builtins: str) -> AfterValidator:
    """The marker of a name of code: one of these, `module:attr` or `file.py:attr`. An empty text is let through; it is
    refused where the built-ins are all that may be left out."""

    def checked(value: str) -> str:
        if not value or value in builtins or CODE_NAME.fullmatch(value):
            return value
        near = nearest(value, builtins)
        hint = f'; did you mean "{near}"?' if near else ""
        choices = f"one of {', '.join(builtins)}, or " if builtins else ""
        raise ValueError(f"must be {choices}module:function, or file.py:function{hint}")

    return AfterValidator(checked)


TABLE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
CODE_NAME = re.compile(r"[^:\s][^:]*:[A-Za-z_][A-Za-z0-9_.]*")


def check_pattern(value: str) -> str:
    """Accept a regular expression; raise ValueError otherwise."""
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f'"{value}" is not a regular expression: {error}') from error
    return value


def check_name(value: str) -> str:
    """Accept a name of the user's for a table; raise ValueError otherwise."""
    if not TABLE_NAME.fullmatch(value):
        raise ValueError("a name is 1 to 64 letters, digits, '_' or '-', no sign first")
    return value


def check_once(values: tuple[str, ...]) -> tuple[str, ...]:
    """Values that all differ; raises ValueError otherwise."""
    if twice := [value for value in dict.fromkeys(values) if values.count(value) > 1]:
        raise ValueError(f'names "{twice[0]}" twice')
    return values


HTTP_URL = re.compile(r"https?://[^\s/]+(/\S*)?")


def check_urls(urls: tuple[str, ...]) -> tuple[str, ...]:
    """Addresses of different servers; raises ValueError otherwise."""
    for url in map(check_name_text, urls):
        if not HTTP_URL.fullmatch(url):
            raise ValueError(f'"{url}" must look like http://host:port')
        try:
            _ = urlsplit(url).port
        except ValueError as error:
            raise ValueError(f'"{url}" is no address: {error}; an IPv6 host is written in [...]') from None
    check_once(tuple(url.rstrip("/") for url in urls))
    return urls


def _off_or_positive(value: int) -> int:
    if value != -1 and value < 1:
        raise ValueError("must be -1 (off) or at least 1")
    if value > MAX_TOP_K:
        raise ValueError(f"must be at most {MAX_TOP_K}")
    return value


def check_divisor(value: float) -> float:
    """Logits are divided by it in float32."""
    if 0 < value < MIN_FACTOR:
        raise ValueError(f"must be at least {MIN_FACTOR:g} where it is not 0")
    return value


TableName = Annotated[str, AfterValidator(check_name)]
Pattern = Annotated[str, AfterValidator(check_pattern)]
TopK = Annotated[int, AfterValidator(_off_or_positive)]
Temperature = Annotated[float, Field(ge=0, le=10), AfterValidator(check_divisor)]
RepetitionPenalty = Annotated[float, Field(gt=0, le=MAX_PENALTY), AfterValidator(check_divisor)]
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

    relations: ClassVar[tuple[str, ...]] = ()
    """Which keys need which others, a line each: see `relation_conflicts`."""

    def conflicts(self) -> Iterator[Conflict]:
        """Further values of this section (or of the sections in it) that cannot go together."""
        return iter(())

    def default_of(self, name: str) -> object:
        """What a field would be if the file left it out; None for what is no field."""
        field = type(self).model_fields.get(name)
        return field.default if field else None

    @model_validator(mode="after")
    def _values_fit(self) -> Self:
        large = [key for key, value in self if isinstance(value, int) and value.bit_length() > MAX_BITS]
        conflicts = tuple(Conflict(key, f"must be a number of at most {MAX_BITS} bits") for key in large)
        conflicts = conflicts or (*relation_conflicts(self, self.relations), *self.conflicts())
        if conflicts:
            text = "; ".join(f"{conflict.path}: {conflict.cause}" for conflict in conflicts)
            # The text goes in through the context: pydantic would read braces in a template as its own.
            raise PydanticCustomError(CONFLICTS, "{text}", {"text": text, "conflicts": conflicts})
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
    return check_sent(table)


def check_sent(table: Table) -> Table:
    """The table, if another process gets it as it is; raises ValueError otherwise."""
    try:
        is_same = msgspec.msgpack.decode(msgspec.msgpack.encode(table)) == table
    except OverflowError:
        is_same = False
    if not is_same:
        raise ValueError("must not hold nan, dates, times without a zone or numbers of more than 64 bits; write text")
    return table


JsonTable = Annotated[Table, AfterValidator(check_json)]
SentTable = Annotated[Table, AfterValidator(check_sent)]


def as_array(value: object) -> list[Any] | None:
    """The value if it is an array, else None."""
    return cast("list[Any]", value) if isinstance(value, list) else None


def table_at(table: Table, path: Sequence[str]) -> Table | None:
    """The table at a path, or None if the way there is not made of tables."""
    level: Table | None = table
    for key in path:
        level = as_table(level.get(key)) if level is not None else None
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


@cache
def keys_of(section: type[Section]) -> dict[str, FieldInfo]:
    """The keys of a section as they are written in a file; its own before those that it shares with others."""
    fields = sorted(section.model_fields.items(), key=lambda item: item[0] not in section.__annotations__)
    return {field.alias or name: field for name, field in fields}


def walk(section: type[Section], prefix: KeyPath = ()) -> Iterator[tuple[KeyPath, FieldInfo]]:
    """Every key of a section and of the sections in it, tables before their keys; `ANY_NAME` is used for names of the
    user's."""
    for key, field in keys_of(section).items():
        path = (*prefix, key)
        yield path, field
        if (below := section_of(field)) is not None:
            yield from walk(below, path)
        if (below := named_section_of(field)) is not None:
            yield from walk(below, (*path, ANY_NAME))


def find(section: type[Section], path: Sequence[str]) -> tuple[type[Section], FieldInfo | None, KeyPath]:
    """The innermost section on the way of `path`, its field (None: unknown, or the section itself), what is left."""
    position = 0
    while position < len(path):
        field = keys_of(section).get(path[position])
        if field is None:
            return section, None, tuple(path[position:])
        below, named_section = section_of(field), named_section_of(field)
        position += 1
        if named_section is not None and position < len(path):
            below, position = named_section, position + 1
        if below is None:
            return section, field, tuple(path[position:])
        section = below
    return section, None, ()
