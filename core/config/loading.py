"""From TOML files and `--set` flags to a checked `RunConfig`, or one error that lists everything wrong; and back.

Files are merged left to right, key by key; flags win over files. A relative path in a file is relative to that file's
folder, in a flag to the current folder. `key_lines` finds the line of each key, because `tomllib` keeps no positions.
"""

from __future__ import annotations

import copy
import datetime as dt
import json
import os
import re
import tomllib
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ..errors import ConfigError, MyxaError
from ..suggestion import nearest, suggest
from .data import ENVIRONMENT
from .hub import KINDS, hub_text
from .peers import names_elsewhere
from .root import RunConfig
from .section import (
    ANY_NAME,
    CONFLICTS,
    IS_FROZEN,
    Conflict,
    KeyPath,
    Meaning,
    Means,
    Table,
    as_array,
    as_table,
    find,
    keys_of,
    table_at,
    walk,
)

DECODE_PLACE = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")
SHOWN_CHARS = 60


@dataclass(frozen=True, slots=True)
class KeyOrigin:
    """Where a value was written: a file and line, or a flag (line 0)."""

    place: str
    line: int

    def __str__(self) -> str:
        return f"{self.place}:{self.line}" if self.line else self.place


@dataclass(slots=True)
class KeyOrigins:
    """Where every key was written last."""

    first_file: str
    by_path: dict[KeyPath, KeyOrigin] = field(default_factory=dict[KeyPath, KeyOrigin])

    def of(self, path: KeyPath) -> KeyOrigin:
        """Where the key, or the innermost table around it, was written; the first file if nowhere."""
        parts = (path[:length] for length in range(len(path), 0, -1))
        return next((self.by_path[part] for part in parts if part in self.by_path), KeyOrigin(self.first_file, 0))


Severity = Literal["ok", "warning", "error"]
"""ok: only `myxa doctor` says so; warning: the run can start, but is probably not what was meant."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, or worth a look: in a run file, in what it names, on a machine."""

    key: str
    """Dotted path in the run file, of a machine the check's name; empty: about no key."""
    error: MyxaError
    severity: Severity = "error"
    origin: KeyOrigin = KeyOrigin("", 0)
    """Where the key's value was written, if that is known."""

    def __str__(self) -> str:
        return f"{self.origin}: {self.error}" if self.origin.place else str(self.error)


def in_order(findings: Iterable[Finding], files: Sequence[str]) -> tuple[Finding, ...]:
    """Errors first; file by file and line by line, flags last; each once."""
    order = {file: number for number, file in enumerate(files)}

    def rank(finding: Finding) -> tuple[bool, int, int]:
        origin = finding.origin
        return (finding.severity == "warning", order.get(origin.place, len(files)), origin.line)

    return tuple(sorted({(finding.severity, str(finding)): finding for finding in findings}.values(), key=rank))


PLAIN_KEY = re.compile(r"[A-Za-z0-9_-]+")


def _problem(path: KeyPath, cause: str, origin: KeyOrigin, shown: str = "") -> Finding:
    """`shown`: the value as text; empty when there is none to show."""
    key = ".".join(map(_key, path))
    message, _, remedy = f"{key}{f' = {shown}' if shown else ''}{': ' if key else ''}{cause}".partition(" -- ")
    return Finding(".".join(path), ConfigError(message, remedy=remedy), origin=origin)


@dataclass(frozen=True, slots=True)
class Inspected:
    """What run files mean, or what is wrong with them."""

    config: RunConfig | None
    """None if anything is wrong."""
    problems: tuple[Finding, ...]
    origins: KeyOrigins


def load_config(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    overrides: Sequence[str] = (),
    *,
    text: str | None = None,
) -> RunConfig:
    """Read, merge and check run files. `text`: what the first of them is to say, whatever it holds.

    `path`: one TOML file or several, later ones winning; `overrides`: `section.key=value` texts (TOML values; a bare
    word is text). Raises ConfigError with every problem found: file and line, dotted path, value, cause, suggestion.
    """
    files = [path] if isinstance(path, (str, os.PathLike)) else list(path)
    inspected = inspect_config(files, overrides, text=text)
    if inspected.config is not None:
        return inspected.config
    names = [str(file) for file in files]
    problems = [str(problem) for problem in in_order(inspected.problems, names)]
    if len(problems) == 1:
        raise ConfigError(problems[0])
    raise ConfigError("\n  ".join((f"{', '.join(names)}: {len(problems)} problems", *problems)))


def inspect_config(
    files: Sequence[str | os.PathLike[str]], overrides: Sequence[str] = (), *, text: str | None = None
) -> Inspected:
    """The same, but problems are returned, also of files that cannot be read."""
    if not files:
        raise ConfigError("no run file was given", remedy="name a TOML file")
    layers = _Layers(KeyOrigins(str(files[0])))
    for number, file in enumerate(files):
        layers.read_file(Path(file), text if number == 0 else None)
    for override in overrides:
        layers.read_override(override)
    layers.table.setdefault("data", {})  # it says which key is missing
    run = as_table(layers.table.setdefault("run", {}))
    if run is not None:
        run["dir"] = run.get("dir") or str(Path.cwd() / "runs")
    _set_agent_dir(layers.table, Path(files[0]))  # of a command in an override
    config = layers.check() if layers.is_whole else None
    return Inspected(None if layers.problems else config, tuple(layers.problems), layers.origins)


@dataclass(slots=True)
class _Layers:
    """What has been read so far: merged values, where each came from, what is wrong."""

    origins: KeyOrigins
    table: Table = field(default_factory=dict[str, Any])
    problems: list[Finding] = field(default_factory=list[Finding])
    is_whole: bool = True
    """Whether every file could be read."""
    is_frozen: bool = False
    """Whether one of them is the resolved file of a run."""

    def read_file(self, file: Path, text: str | None) -> None:
        try:
            text = file.read_bytes().decode("utf-8-sig") if text is None else text
            table = tomllib.loads(text)
        except (OSError, ValueError, RecursionError) as error:
            self.problems.append(_unreadable(file, text or "", error))
            self.is_whole = False
            return
        if text.startswith(HEADER):
            self.is_frozen = True
            _from_earlier(table)
        _rename(table, partial(_resolve, folder=file.absolute().parent))
        _set_agent_dir(table, file)
        _merge(self.table, table)
        for key, line in key_lines(text, table).items():
            self.origins.by_path[key] = KeyOrigin(str(file), line)

    def read_override(self, override: str) -> None:
        origin = KeyOrigin(f"--set {override}", 0)
        key_text, equals, value_text = override.partition("=")
        path, shown = _override_path(key_text) if equals else None, value_text.strip()
        if path is None:
            meant = _meant((key_text.strip(),), is_table=False) if equals else ""
            hint = f"; {meant}" if meant.startswith(("there is", "here it is")) else ""
            self.problems.append(_problem((), f"must look like section.key=value{hint}", origin))
            return
        _, field, keys_below = find(RunConfig, path)
        form = None if field is None else field.annotation
        takes_text = (form is str and not keys_below) or (form == dict[str, str] and len(keys_below) == 1)
        try:
            value = _override_value(shown, takes_text)
            if value == shown:
                _check_bare(shown, takes_text, is_free=bool(keys_below) and form == Table)
        except ValueError as error:
            self.problems.append(_problem(path, f"is not a TOML value: {error}", origin, shown))
            return
        if takes_text and not isinstance(value, str):
            value = shown  # the shell took the quotes
        nested: Any = value
        for key in reversed(path):
            nested = {key: nested}
        _rename(nested, partial(_resolve, folder=Path.cwd()))
        if isinstance(value, dict):  # takes the place of a file's table, whose keys could not be taken away otherwise
            (table_at(self.table, path[:-1]) or {}).pop(path[-1], None)
        _merge(self.table, nested)
        self.origins.by_path = {path[:length]: origin for length in range(1, len(path))} | self.origins.by_path
        self.origins.by_path[path] = origin

    def check(self) -> RunConfig | None:
        for path in () if self.is_frozen else _slips(self.table):
            self.problems.append(_problem(path, SLIP_CAUSE, self.origins.of(path)))
        before = IS_FROZEN.set(self.is_frozen)
        try:
            return RunConfig.model_validate(self.table, by_alias=True, by_name=False)
        except ValidationError as error:
            self.problems += self._problems_of(error)
            return None
        finally:
            IS_FROZEN.reset(before)

    def _problems_of(self, error: ValidationError) -> list[Finding]:
        """All problems of the validation, in the order of the sections; one per path, with its value as the user wrote
        it, or the default that was used."""
        causes: dict[KeyPath, str] = {}
        for detail in error.errors(include_url=False):
            for path, cause in _causes_of(detail, self.table):
                earlier = causes.setdefault(path, cause)
                if cause not in earlier:  # a value with several allowed forms fails once per form
                    causes[path] = f"{earlier}, or {cause.removeprefix('must be ')}"
        return [
            _problem(path, cause, self.origins.of(path), "" if cause.startswith(MISSING) else _shown(path, self.table))
            for path, cause in causes.items()
        ]


# -- what pydantic found, in words -------------------------------------------------------------------------------------

MISSING = "is missing: "
Causes = list[tuple[KeyPath, str]]


def _shown(path: KeyPath, table: Table) -> str:
    above = table_at(table, path[:-1])
    if above is not None and path[-1] in above:
        return "" if isinstance(above[path[-1]], dict) else value_text(above[path[-1]])
    _, field, keys_below = find(RunConfig, path)
    return "" if field is None or keys_below or field.is_required() else f"{value_text(field.default)} (default)"


def value_text(value: object) -> str:
    """A value in TOML's spelling, cut when long."""
    text = toml_value(value)
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 3] + "..."


def _causes_of(detail: ErrorDetails, table: Table) -> Causes:
    path, kind, context = _file_path(detail["loc"], table), detail["type"], detail.get("ctx", {})
    if kind == CONFLICTS:
        conflicts: tuple[Conflict, ...] = context["conflicts"]
        return [((*path, *conflict.path.split(".")), conflict.cause) for conflict in conflicts]
    if kind == "extra_forbidden":
        if path in GONE:
            return [(path, f"is gone: {GONE[path]}")]
        noun = "section" if len(path) == 1 else "role" if path[0] == "roles" and len(path) == 2 else "key"
        meant = _meant(path, is_table=isinstance(detail["input"], dict))
        return [(path, f"is not a known {noun}{_odd_character(path[-1])}; {meant}")]
    if kind == "missing" and path == tuple(str(part) for part in detail["loc"]):
        return _missing(path)
    return [(path, _cause(detail))]


def _missing(path: KeyPath) -> Causes:
    section, field, _ = find(RunConfig, path)
    if field is None:  # the whole table is missing: name the keys that it must have
        keys = [key for key, info in keys_of(section).items() if info.is_required()]
        return [cause for key in keys for cause in _missing((*path, key))]
    meaning = re.split(r"[.:;](?:\s|$)", " ".join((field.description or "").split()))[0]
    return [(path, f"{MISSING}{meaning}")]


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


CAUSES = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be text in quotes",
    "bool_type": "must be true or false",
    "tuple_type": "must be an array, in [...]",
    "dict_type": "must be a table",
    "model_type": "must be a table",
    "model_attributes_type": "must be a table",
    "missing": "has too few elements",
    "too_long": "has too many elements",
    "string_too_short": "must not be empty",
    "too_short": "must not be empty",
    "greater_than": "must be greater than {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than": "must be below {lt:g}",
    "less_than_equal": "must be at most {le:g}",
    "value_error": "{error}",
}


def _cause(detail: ErrorDetails) -> str:
    context, value = detail.get("ctx", {}), detail["input"]
    if detail["type"] == "int_type" and isinstance(value, float):
        return "must be a whole number, without a point or an exponent"
    if detail["type"] != "literal_error":
        return CAUSES.get(detail["type"], detail["msg"].replace("{", "{{").replace("}", "}}")).format(**context)
    choices = [choice.strip("'") for choice in str(context["expected"]).replace(" or ", ", ").split(", ")]
    listed = ", ".join(f'"{choice}"' for choice in choices)
    near = suggest(value, choices) if isinstance(value, str) else ""
    odd = _odd_character(str(value))
    return f"must be {'one of ' if len(choices) > 1 else ''}{listed}{odd}" + (f"; {near}" if "did you" in near else "")


def _odd_character(text: str) -> str:
    """The first one that no key has: it may look like another, or like nothing."""
    odd = next((character for character in text if not character.isascii()), "")
    return f" (it has U+{ord(odd):04X}, {unicodedata.name(odd, 'which has no name')})" if odd else ""


def _meant(path: KeyPath, *, is_table: bool) -> str:
    """What an unknown key may be: one that another program calls so, one of its section, or one that is spelt so in
    another."""
    keys, key = keys_of(find(RunConfig, path)[0]), path[-1]
    places = [place for place, _ in walk(RunConfig) if place[-1] == key and len(place) > 1 and ANY_NAME not in place]
    places = [place for place in places if place[-2:] == path[-2:]] or places
    name = key.lower().replace("-", "_")
    elsewhere = [] if places or name in keys else names_elsewhere().get(name, [])
    if elsewhere:
        return f"here it is {max(elsewhere, key=lambda place: place.startswith(f'{path[0]}.'))}"
    if nearest(key, keys) is None if len(path) > 1 else not is_table:
        if key in RunConfig.model_fields:
            return f"did you mean the table [{key}]?"
        if 0 < len(places) <= 3:
            return f"there is {' and '.join(map('.'.join, places))}"
    return suggest(key, keys)


PROMETHEUS_PORT = ("monitor", "prometheus_port")
GONE: dict[KeyPath, str] = {
    PROMETHEUS_PORT: "the Prometheus page is `/metrics` at control.dashboard_port -- set that one",
    ("async", "window"): "each place of the window took a slot from generation -- for younger tokens lower "
    "async.max_staleness",
}
"""Keys of earlier versions, and what serves instead."""


def _from_earlier(table: Table) -> None:
    """A resolved file of an earlier version may say keys that are gone. The port for the Prometheus page (-1: none, 0:
    any free one) becomes the dashboard's."""
    said = {path: (as_table(table.get(path[0])) or {}).pop(path[1], 0) for path in GONE}
    port, control = said[PROMETHEUS_PORT], as_table(table.get("control"))
    if control is not None and isinstance(port, int) and port > 0 and control.get("dashboard_port") == -1:
        control["dashboard_port"] = port


# -- files and flags ---------------------------------------------------------------------------------------------------


def _unreadable(file: Path, text: str, error: Exception) -> Finding:
    place, line = str(file), 0
    if isinstance(error, tomllib.TOMLDecodeError):
        match = DECODE_PLACE.search(str(error))
        line = int(match[1]) if match and match[1] else text.rstrip().count("\n") + 1
        column = int(match[2]) if match and match[2] else 0
        cause = f"is not TOML{f', column {column}' if column else ''}: {DECODE_PLACE.sub('', str(error))}"
        code = text.split("\n")[line - 1] if column else ""
        before, after = code[: max(column - 1, 0)], code[max(column - 1, 0) :]
        cause += _odd_character(re.split("[ \t]", after)[0])
        if file.suffix in (".yaml", ".yml", ".json", ".sh"):
            cause += " -- a run file is TOML: `myxa migrate` makes one of slime's or verl's"
        else:
            marked = f"{before}\0{after}"
            cause += next((f" -- {remedy}" for form, remedy in WRONG_VALUES.items() if re.search(form, marked)), "")
    elif isinstance(error, UnicodeDecodeError):
        cause = f"is not UTF-8 text (byte {error.start}) -- save it as UTF-8"
    elif isinstance(error, FileNotFoundError):
        remedy = "write --set before each section.key=value" if "=" in place else "check the path"
        cause = f"there is no such run file -- {remedy}"
    else:
        cause = f"cannot be read: {getattr(error, 'strerror', error)} -- name a readable TOML file"
    return _problem((), cause, KeyOrigin(place, line))


NO_NULL = "TOML has no null: leave the key out"
WRONG_VALUES = {
    r"=\s*\0(None|null)\b": NO_NULL,
    r"=\s*([+-]?\.?\d[^\s,]*\0|\0[+-]?\.?\d)": "a number is written like 1000, 0.5 or 1e-6, without a unit",
    r"=\s*\{\s*\0?$|,\s*\0\}": "{...} is on one line, without a comma at its end: or write a table [section.key]",
    r"\"[^\"]*\0?\\": "a backslash in double quotes is written twice; in single quotes once",
    r"=\s*\0[^\s\"'\[{]": "write text in quotes, lists in [...], true and false in small letters",
}
"""What is in a line that is no TOML, with NUL where it stops to be, and what to write."""
SLIP = re.compile(r"[\b\f][A-Za-z]")
SLIP_CAUSE = (
    r'has a control character, which \b and \f in double quotes are ("\boxed") -- write the text in single quotes'
)


def _slips(value: object, path: KeyPath = ()) -> Iterator[KeyPath]:
    """Keys of texts in which a backslash was meant."""
    for key, item in (as_table(value) or {}).items():
        yield from _slips(item, (*path, key))
    for item in as_array(value) or ():
        yield from _slips(item, path)
    if isinstance(value, str) and SLIP.search(value):
        yield path


def _single_path(parsed: Table) -> KeyPath:
    """The keys down a nesting in which every table has one key, through arrays of tables; stops at anything else."""
    path: list[str] = []
    level: object = parsed
    while True:
        if array := as_array(level):
            level = array[0]
            continue
        table = as_table(level)
        if table is None or len(table) != 1:
            return tuple(path)
        key, level = next(iter(table.items()))
        path.append(key)


def _override_path(text: str) -> KeyPath | None:
    try:
        path = _single_path(tomllib.loads(f"{text} = 0"))
    except tomllib.TOMLDecodeError:
        return None
    return path if len(path) >= 2 else None


def _override_value(text: str, takes_text: bool) -> Any:
    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError as error:
        if text[:1] in ("'", '"') or (text[:1] in ("[", "{") and not takes_text):
            remedy = "write text in quotes, and the whole flag in single ones: a shell takes quotes"
            raise ValueError(f"{DECODE_PLACE.sub('', str(error))} -- {remedy}") from error
        table = tomllib.loads(f"value = {toml_value(text)}")
    if len(table) != 1:
        raise ValueError("it holds more than one value")
    return table["value"]


def _check_bare(word: str, takes_text: bool, *, is_free: bool) -> None:
    """Raises ValueError for a word without quotes that other languages do not take as text."""
    if word in ("None", "null") and (takes_text or is_free):
        raise ValueError(f"{NO_NULL}, or write the text in quotes within quotes")
    if is_free and word.lower() in ("true", "false"):
        raise ValueError("write true or false in small letters, or the text in quotes")
    if not takes_text and re.fullmatch(r"[+-]?(\d+\.|\.\d+)([eE][+-]?\d+)?", word):
        raise ValueError("a number has digits on both sides of its point, such as 0.5")


def _merge(base: Table, layer: Mapping[str, Any]) -> None:
    for key, value in layer.items():
        below, above = as_table(base.get(key)), as_table(value)
        if below is not None and above is not None:
            _merge(below, above)
        else:
            base[key] = copy.deepcopy(value)


def _set_agent_dir(table: Table, file: Path) -> None:
    agent = as_table(table.get("agent")) or {}
    if agent.get("command") and not agent.get("dir"):
        agent["dir"] = str(file.absolute().parent)


Rename = Callable[[str, Meaning, KeyPath], str | tuple[str, ...]]
"""From what a text of the run file names, and its key, to what it shall say; several in place of one of `sources`."""


def with_named(config: RunConfig, rename: Rename) -> RunConfig:
    """The configuration with other names in its texts that name something; itself if all stay."""
    is_other = False

    def renamed(text: str, meaning: Meaning, key: KeyPath) -> str | tuple[str, ...]:
        nonlocal is_other
        name = rename(text, meaning, key)
        is_other |= name != text
        return name

    table = config.model_dump(by_alias=True)
    _rename(table, renamed)
    return RunConfig.model_validate(table, by_alias=True, by_name=False) if is_other else config


def _rename(table: Table, rename: Rename, above: KeyPath = ()) -> None:
    """Change what the texts of a file's table say that name something."""
    for key, value in table.items():
        path = (*above, key)
        if (below := as_table(value)) is not None:
            _rename(below, rename, path)
        _, field, keys_below = find(RunConfig, path)
        for mark in field.metadata if field is not None and not keys_below else ():
            if isinstance(mark, Means):
                table[key] = _rename_value(value, mark.meaning, path, rename)


def _rename_value(value: Any, meaning: Meaning, key: KeyPath, rename: Rename) -> Any:
    names, is_tuple = as_table(value), isinstance(value, tuple)
    array = list(value) if is_tuple else as_array(value)
    if array is not None and meaning in ("sources", "code"):
        new_names: list[Any] = []
        for name in array:
            new_name = _rename_value(name, meaning, key, rename)
            new_names += new_name if isinstance(new_name, tuple) else [new_name]
        return tuple(new_names) if is_tuple else new_names
    if names is not None and meaning == "code":
        return {_rename_value(name, meaning, key, rename): options for name, options in names.items()}
    if not isinstance(value, str) or not value or (meaning == "sources" and value.startswith(ENVIRONMENT)):
        return value
    return rename(value, meaning, key)


def _resolve(value: str, meaning: Meaning, key: KeyPath, *, folder: Path) -> str:
    """With relative paths made absolute."""
    if meaning == "code":
        file, colon, attr = value.rpartition(":")
        return f"{_absolute(file, folder)}:{attr}" if colon and file.endswith(".py") else value
    if meaning == "program" and "/" not in value:
        return value
    kind = KINDS.get(meaning)
    return (kind and hub_text(value, kind, folder)) or _absolute(value, folder)


def _absolute(text: str, folder: Path) -> str:
    # normpath takes "a/../b" apart without asking the disk: symbolic links stay as they are written, but for a run
    # folder's "latest", which points at the run to be started by the time that its actors follow it.
    if text.startswith("$") or "://" in text:
        return text  # refused where it is checked
    path = Path(os.path.normpath(folder / os.path.expanduser(text)))  # noqa: PTH111 -- that of Path fails for a user without a home
    for above in (path, *path.parents):
        if above.name == "latest" and above.is_symlink():
            return str(above.resolve() / path.relative_to(above))
    return str(path)


_NAME = r"""(?:"(?:\\.|[^"\\])*"|'[^']*'|[A-Za-z0-9_-]+)"""
_KEY = re.compile(rf"\s*({_NAME}(?:\s*\.\s*{_NAME})*)\s*=")


def key_lines(text: str, table: Table) -> dict[KeyPath, int]:
    """Line (from 1) of every table header and key of a text that is valid TOML and says `table`; the first mention
    counts. Keys of an inline table are where it is."""
    lines: dict[KeyPath, int] = {}
    prefix: KeyPath = ()
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), start=1):
        is_header, key = line.lstrip().startswith("["), _KEY.match(line)
        if not is_header and key is None:
            continue
        try:
            name: str = key[1] if key else ""
            is_plain = PLAIN_KEY.fullmatch(name)
            path = (name,) if is_plain else _single_path(tomllib.loads(f"{name} = 0" if name else line))
        except tomllib.TOMLDecodeError:  # inside of an array or a text of several lines
            continue
        path = path if is_header else (*prefix, *path)
        if path and path[-1] in (table_at(table, path[:-1]) or {}):
            first = len(path) if is_header else len(prefix) + 1  # the tables of a dotted key begin with it
            prefix = path if is_header else prefix
            for length in range(first, len(path) + 1):
                lines.setdefault(path[:length], number)
    return lines


HEADER = "# Resolved configuration of a run: every value, defaults included. `myxa up` takes it as it is.\n"


def dump_config(config: RunConfig) -> str:
    """TOML text with every value; `load_config` of it gives an equal configuration (paths are absolute then)."""
    sections = config.model_dump(by_alias=True)
    roles = {f"roles.{name}": role for name, role in sections.pop("roles").items()}
    lines = [HEADER]
    for title, table in (sections | roles).items():  # free tables such as `args` and `env` are written inline
        lines += [f"[{title}]", *(f"{_key(key)} = {toml_value(value)}" for key, value in table.items()), ""]
    return "\n".join(lines)


def _key(text: str) -> str:
    return text if PLAIN_KEY.fullmatch(text) else toml_value(text)


def toml_value(value: object) -> str:
    """One value in TOML's spelling; raises TypeError for what TOML cannot say."""
    if isinstance(value, Mapping):
        table = cast("Mapping[str, object]", value)
        return "{" + ", ".join(f"{_key(key)} = {toml_value(item)}" for key, item in table.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml_value(item) for item in cast("Sequence[object]", value)) + "]"
    if isinstance(value, (dt.datetime, dt.date, dt.time)):
        return value.isoformat()
    if isinstance(value, float):
        return repr(value)
    # JSON's escapes are TOML's; DEL is the one character that JSON leaves alone and TOML refuses.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


# -- the schema --------------------------------------------------------------------------------------------------------

UNITS = {"_s": "seconds", "_mb": "MiB", "_gb": "GiB"}


def json_schema() -> dict[str, Any]:
    """For editors: every key with its type, range, default and meaning; `x-unit` where its name says one."""
    schema = RunConfig.model_json_schema()
    for section in schema["$defs"].values():
        for key, row in section.get("properties", {}).items():
            unit = next((unit for ending, unit in UNITS.items() if key.endswith(ending)), "")
            row |= {"x-unit": unit} if unit else {}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
