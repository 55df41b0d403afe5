"""What is wrong with a run file, in words: place, dotted path, value, cause, suggestion."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ..suggestion import suggest
from .root import RunConfig
from .section import CONFLICTS, Conflict, KeyPath, OrElse, Table, find, keys_of, table_at

SHOWN_CHARS = 60

_TUNNEL = "is no key any more: reach the control socket from another host by `ssh -L` (docs/control.md)"
_BY_HAND = "is no key any more: `myxa kill` makes processes of a run fail"
FORMER_KEYS: Mapping[KeyPath, str] = {
    ("control", "tcp"): _TUNNEL,
    ("control", "key_file"): _TUNNEL,
    ("control", "allow_file"): _TUNNEL,
    ("control", "autopilot"): "is no key any more: `myxa why` names the knob to turn, `myxa set` turns it",
    ("chaos",): _BY_HAND,
    ("run", "chaos"): _BY_HAND,
}
"""Keys of earlier run files -> what to do instead."""


@dataclass(frozen=True, slots=True)
class KeyOrigin:
    """Where a value was written: a file and line, or a flag (line 0)."""

    place: str
    line: int

    def __str__(self) -> str:
        return f"{self.place}:{self.line}" if self.line else self.place


class KeyOrigins:
    """Where every key was written last."""

    def __init__(self, first_file: str) -> None:
        self._first_file = first_file
        self._by_path: dict[KeyPath, KeyOrigin] = {}

    def note(self, path: KeyPath, origin: KeyOrigin) -> None:
        """A key was written there; earlier places are forgotten."""
        self._by_path[path] = origin

    def of(self, path: KeyPath) -> KeyOrigin:
        """Where the key, or the innermost table around it, was written; the first file if nowhere."""
        for length in range(len(path), 0, -1):
            if path[:length] in self._by_path:
                return self._by_path[path[:length]]
        return KeyOrigin(self._first_file, 0)


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong."""

    path: KeyPath
    cause: str
    origin: KeyOrigin | None
    shown: str = ""
    """The value as text; empty when there is none to show."""
    involved: tuple[KeyPath, ...] = ()
    """Other values that have a part in it."""
    is_required: bool = False
    """The value is missing and has no default."""

    @property
    def text(self) -> str:
        """Without the place."""
        what = ".".join(_key_text(key) for key in self.path)
        value = f" = {self.shown}" if self.shown else ""
        return f"{what}{value}{': ' if what else ''}{self.cause}"

    def __str__(self) -> str:
        return f"{self.origin}: {self.text}" if self.origin else self.text


def _key_text(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else json.dumps(key)


def render(problems: Sequence[Problem], files: Sequence[str]) -> str:
    """One problem in one line; several as a list under a heading, file by file and line by line, flags last."""
    if len(problems) == 1:
        return str(problems[0])
    order = {file: number for number, file in enumerate(files)}

    def place(problem: Problem) -> tuple[int, int]:
        origin = problem.origin
        return (order.get(origin.place, len(files)), origin.line) if origin else (len(files) + 1, 0)

    lines = "\n".join(f"  {problem}" for problem in sorted(problems, key=place))
    return f"{', '.join(files)}: {len(problems)} problems\n{lines}"


def problems_of(error: ValidationError, table: Table, origins: KeyOrigins) -> list[Problem]:
    """All problems of one validation, in the order of the sections; one per path."""
    found: dict[KeyPath, Problem] = {}
    for detail in error.errors(include_url=False):
        for problem in _problems(detail, table):
            earlier = found.get(problem.path)
            if earlier is None:
                found[problem.path] = replace(problem, origin=origins.of(problem.path))
            elif problem.cause not in earlier.cause:
                # A value with several allowed forms fails once per form.
                cause = f"{earlier.cause}, or {problem.cause.removeprefix('must be ')}"
                found[problem.path] = replace(earlier, cause=cause)
    return list(found.values())


def misspelt_aliases(table: Table, origins: KeyOrigins) -> list[Problem]:
    """Take sections out that are called by their Python name (`asynchrony`) instead of the one in files (`async`)."""
    found: list[Problem] = []
    for name, field in RunConfig.model_fields.items():
        if field.alias and field.alias != name and name in table:
            del table[name]
            cause = f'is not a known section; did you mean "{field.alias}"?'
            found.append(Problem((name,), cause, origins.of((name,))))
    return found


def described(problem: Problem, table: Table) -> Problem:
    """The problem with its value as the user wrote it, or the default that was used."""
    above = table_at(table, problem.path[:-1])
    if problem.is_required or not problem.path:
        return problem
    if above is None or problem.path[-1] not in above:
        return replace(problem, shown=_default_text(problem.path))
    value = above[problem.path[-1]]
    return problem if isinstance(value, dict) else replace(problem, shown=value_text(value))


def _default_text(path: KeyPath) -> str:
    _, field, rest = find(RunConfig, path)
    if field is None or rest or field.is_required():
        return ""
    return f"{value_text(field.default)} (default)"


def value_text(value: object) -> str:
    """A value in TOML's spelling, cut when long."""
    if isinstance(value, (tuple, list)):
        items = cast("Sequence[object]", value)
        text = f"[{', '.join(value_text(one) for one in items)}]"
    elif isinstance(value, (str, bool)):
        text = json.dumps(value, ensure_ascii=False)
    else:
        text = str(value)
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 3] + "..."


def _problems(detail: ErrorDetails, table: Table) -> list[Problem]:
    path = _file_path(detail["loc"], table)
    kind = detail["type"]
    context = detail.get("ctx", {})
    if kind == CONFLICTS:
        conflicts: tuple[Conflict, ...] = context["conflicts"]
        return [_conflict(path, conflict) for conflict in conflicts]
    if kind == "extra_forbidden":
        return [_unknown(path)]
    if kind == "missing" and path == tuple(str(part) for part in detail["loc"]):
        return _missing(path)
    return [Problem(path, _cause(detail), None)]


def _conflict(prefix: KeyPath, conflict: Conflict) -> Problem:
    paths = [(*prefix, *dotted.split(".")) for dotted in conflict.paths]
    return Problem(paths[0], conflict.cause, None, involved=tuple(paths[1:]))


def _unknown(path: KeyPath) -> Problem:
    if path in FORMER_KEYS:
        return Problem(path, FORMER_KEYS[path], None)
    section, _, _ = find(RunConfig, path)
    what = "section" if len(path) == 1 else "role" if path[0] == "roles" and len(path) == 2 else "key"
    return Problem(path, f"is not a known {what}; {suggest(path[-1], keys_of(section))}", None)


def _missing(path: KeyPath) -> list[Problem]:
    section, field, _ = find(RunConfig, path)
    if field is None:  # the whole table is missing: name the keys that it must have
        required = [(*path, key) for key, info in keys_of(section).items() if info.is_required()]
        return [problem for one in required for problem in _missing(one)]
    about = (field.description or "").splitlines()[0].rstrip(".")
    others = tuple((*path[:-1], mark.key) for mark in field.metadata if isinstance(mark, OrElse))
    return [Problem(path, f"is missing: {about}", None, involved=others, is_required=True)]


def _file_path(location: tuple[int | str, ...], table: Table) -> KeyPath:
    """Pydantic's location without the names of union members, tuple types and array positions."""
    path: list[str] = []
    for part in location:
        section, field, _ = find(RunConfig, path)
        above = table_at(table, path) or {}
        is_key = field is None and part in keys_of(section)
        if not (is_key or part in above):
            break
        path.append(str(part))
    return tuple(path)


def _bound(words: str, key: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda context: f"must be {words} {context[key]:g}"


def _fixed(text: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda context: text


CAUSES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "int_type": _fixed("must be a whole number"),
    "float_type": _fixed("must be a number"),
    "finite_number": _fixed("must be a finite number"),
    "string_type": _fixed("must be text in quotes"),
    "bool_type": _fixed("must be true or false"),
    "tuple_type": _fixed("must be an array"),
    "dict_type": _fixed("must be a table"),
    "model_type": _fixed("must be a table"),
    "model_attributes_type": _fixed("must be a table"),
    "missing": _fixed("has too few elements"),
    "too_long": _fixed("has too many elements"),
    "string_too_short": _fixed("must not be empty"),
    "too_short": _fixed("must not be empty"),
    "greater_than": _bound("greater than", "gt"),
    "greater_than_equal": _bound("at least", "ge"),
    "less_than": _bound("below", "lt"),
    "less_than_equal": _bound("at most", "le"),
}


def _cause(detail: ErrorDetails) -> str:
    context = detail.get("ctx", {})
    value = detail["input"]
    if detail["type"] == "literal_error":
        choices = [choice.strip("'") for choice in str(context["expected"]).replace(" or ", ", ").split(", ")]
        listed = ", ".join(f'"{choice}"' for choice in choices)
        near = suggest(value, choices) if isinstance(value, str) else ""
        return f"must be {'one of ' if len(choices) > 1 else ''}{listed}" + (f"; {near}" if "did you" in near else "")
    if detail["type"] == "value_error":
        return str(context["error"])
    if detail["type"] == "int_from_float":
        return "must be a whole number"
    make = CAUSES.get(detail["type"])
    return make(context) if make else detail["msg"]
