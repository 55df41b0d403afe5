"""From TOML files and `--set` flags to a checked `RunConfig`, or one error that lists everything wrong; and back.

Files are merged left to right, key by key; flags win over files. A relative path in a file is relative to that file's
folder, in a flag to the current folder.

`key_lines` finds the line of each key, because `tomllib` and tomlkit keep no positions. It cuts the text into
statements (a header, or a key with its value) that `tomllib` parses one by one: a value over several lines never parses
before its last line, because its bracket or quotes are still open.

`dump_config` writes TOML; tomli-w was considered, but is one more dependency for forty lines. `missing_paths` is apart
from loading, so that a run can be planned on another machine.
"""

from __future__ import annotations

import copy
import datetime as dt
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, time
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from ..errors import ConfigError
from .data import parse_sources
from .problems import KeyOrigin, KeyOrigins, Problem, described, misspelt_aliases, problems_of, render
from .root import RunConfig
from .section import (
    ANY_NAME,
    KeyPath,
    Meaning,
    Table,
    as_array,
    as_table,
    find,
    holds,
    paths_with_meaning,
    single_path,
    table_at,
    table_made_at,
)

DECODE_PLACE = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")


@dataclass(slots=True)
class _Layers:
    """What has been read so far: merged values, where each came from, what could not be read."""

    origins: KeyOrigins
    table: Table = field(default_factory=dict[str, Any])
    problems: list[Problem] = field(default_factory=list[Problem])
    bad: set[KeyPath] = field(default_factory=set[KeyPath])
    """Keys whose values were left out."""


@dataclass(frozen=True, slots=True)
class Inspected:
    """Everything that can be said of run files: what is wrong, and what the rest of them means."""

    config: RunConfig | None
    """With the defaults for what is wrong; None if even that makes no run."""
    problems: tuple[Problem, ...]
    origins: KeyOrigins
    bad: frozenset[KeyPath]
    """Keys whose values could not be used; what `config` says of them is not the user's."""


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
    found = inspect_config(files, overrides, text=text)
    if found.config is None or found.problems:
        raise ConfigError(render(found.problems, [str(file) for file in files]))
    return found.config


def inspect_config(
    files: Sequence[str | os.PathLike[str]], overrides: Sequence[str] = (), *, text: str | None = None
) -> Inspected:
    """The same, but problems are returned. Raises ConfigError for a file that cannot be read
    or is no TOML."""
    if not files:
        raise ConfigError("no run file was given", remedy="name a TOML file")
    layers = _Layers(KeyOrigins(str(files[0])))
    for number, file in enumerate(files):
        _read_file(layers, Path(file), text if number == 0 else None)
    for override in overrides:
        _read_override(layers, override)
    _default_run_dir(layers)
    config = _check(layers)
    return Inspected(config, tuple(layers.problems), layers.origins, frozenset(layers.bad))


def _check(layers: _Layers) -> RunConfig | None:
    """Validate; when values are wrong, leave them out and look again, so that conflicts of the others show too."""
    table = copy.deepcopy(layers.table)
    bad = layers.bad
    bad.update(problem.path for problem in layers.problems if problem.path)
    layers.problems.extend(misspelt_aliases(table, layers.origins))
    while True:
        try:
            return RunConfig.model_validate(table)
        except ValidationError as error:
            found = problems_of(error, table, layers.origins)
        fresh = [problem for problem in found if not _touches(problem, bad)]
        layers.problems.extend(described(problem, layers.table) for problem in fresh)
        progress = [_leave_out(table, problem, bad) for problem in found]
        if not any(progress):
            return None


def _touches(problem: Problem, bad: set[KeyPath]) -> bool:
    paths = (problem.path, *problem.involved)
    is_in_bad = any(path[:length] in bad for path in paths for length in range(1, len(path) + 1))
    return is_in_bad or any(path[: len(table)] == table for table in problem.involved for path in bad)


def _leave_out(table: Table, problem: Problem, bad: set[KeyPath]) -> bool:
    """Take the wrong value out (or, if it is a default, those it conflicts with); whether anything changed."""
    bad.add(problem.path)
    if problem.is_required:
        above = table_made_at(table, problem.path[:-1])
        above[problem.path[-1]] = "?"  # all required values are texts; the run is refused anyway
        return True
    if _remove(table, problem.path):
        return True
    bad.update(problem.involved)
    removed = [_remove(table, path) for path in problem.involved]
    return any(removed)


def _remove(table: Table, path: KeyPath) -> bool:
    above = table_at(table, path[:-1])
    if above is None or path[-1] not in above:
        return False
    del above[path[-1]]
    return True


def _read_file(layers: _Layers, file: Path, text: str | None) -> None:
    text = _read_text(file) if text is None else text
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(_syntax_message(file, text, str(error))) from error
    _resolve(table, file.absolute().parent)
    _merge(layers.table, table)
    for key, line in key_lines(text).items():
        layers.origins.note(key, KeyOrigin(str(file), line))


def _read_text(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{file}: there is no such run file", remedy="check the path") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: is not UTF-8 text (byte {error.start})", remedy="save it as UTF-8") from error
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}", remedy="name a readable TOML file") from error


def _syntax_message(file: Path, text: str, error: str) -> str:
    match = DECODE_PLACE.search(error)
    line = int(match[1]) if match and match[1] else text.rstrip().count("\n") + 1
    column = f", column {match[2]}" if match and match[2] else ""
    return f"{file}:{line}: is not TOML{column}: {DECODE_PLACE.sub('', error)}"


def _read_override(layers: _Layers, override: str) -> None:
    origin = KeyOrigin(f"--set {override}", 0)
    key_text, equals, value_text = override.partition("=")
    path = _override_path(key_text) if equals else None
    if path is None:
        layers.problems.append(Problem((), "must look like section.key=value", origin))
        return
    try:
        value = _override_value(value_text.strip())
        if isinstance(value, (int, float, date, time)) and _is_text(path):
            value = value_text.strip()  # the shell took the quotes
    except ValueError as error:
        layers.problems.append(Problem(path, f"is not a TOML value: {error}", origin, shown=value_text.strip()))
        return
    nested: Table = {}
    table_made_at(nested, path[:-1])[path[-1]] = value
    _resolve(nested, Path.cwd())
    if isinstance(value, dict):  # takes the place of a file's table, whose keys could not be taken away otherwise
        _remove(layers.table, path)
    _merge(layers.table, nested)
    layers.origins.note(path, origin)


def _override_path(text: str) -> KeyPath | None:
    try:
        path = single_path(tomllib.loads(f"{text} = 0"))
    except tomllib.TOMLDecodeError:
        return None
    return path if len(path) >= 2 else None


def _override_value(text: str) -> Any:
    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError as error:
        if text[:1] in ('"', "'", "[", "{"):
            raise ValueError(DECODE_PLACE.sub("", str(error))) from error
        table = tomllib.loads(f"value = {json.dumps(text)}")
    if len(table) != 1:
        raise ValueError("it holds more than one value")
    return table["value"]


def _is_text(path: KeyPath) -> bool:
    _, found, left = find(RunConfig, path)
    return found is not None and not left and found.annotation is str


def _merge(base: Table, layer: Mapping[str, Any]) -> None:
    for key, value in layer.items():
        below, above = as_table(base.get(key)), as_table(value)
        if below is not None and above is not None:
            _merge(below, above)
        else:
            base[key] = copy.deepcopy(value)


def _default_run_dir(layers: _Layers) -> None:
    run = as_table(layers.table.setdefault("run", {}))
    if run is not None and "dir" not in run:
        run["dir"] = str(Path.cwd() / "runs")


def _resolve(table: Table, folder: Path) -> None:
    for pattern, meaning in paths_with_meaning(RunConfig):
        for path in _paths_like(pattern, table):
            if holds(table, path):
                above = table_made_at(table, path[:-1])
                above[path[-1]] = _resolve_value(above[path[-1]], meaning, folder)


def _paths_like(pattern: KeyPath, table: Table) -> list[KeyPath]:
    """The paths that a pattern matches: itself, or one for each name that the user has written in that place."""
    if ANY_NAME not in pattern:
        return [pattern]
    at = pattern.index(ANY_NAME)
    named = table_at(table, pattern[:at]) or {}
    return [(*pattern[:at], name, *pattern[at + 1 :]) for name in named]


def _resolve_value(value: Any, meaning: Meaning, folder: Path) -> Any:
    array = as_array(value)
    if array is not None and meaning == "sources":
        return [_resolve_value(one, meaning, folder) for one in array]
    if not isinstance(value, str) or not value:
        return value
    if meaning == "code":
        file, colon, attr = value.rpartition(":")
        return f"{_absolute(file, folder)}:{attr}" if colon and file.endswith(".py") else value
    if meaning == "program" and "/" not in value:
        return value
    return _absolute(value, folder)


def _absolute(text: str, folder: Path) -> str:
    # normpath takes "a/../b" apart without asking the disk: symbolic links stay as they are written, but for a run
    # folder's "latest", which points at the run to be started by the time that its actors follow it.
    path = Path(os.path.normpath(folder / Path(text).expanduser()))
    for above in (path, *path.parents):
        if above.name == "latest" and above.is_symlink():
            return str(above.resolve() / path.relative_to(above))
    return str(path)


def key_lines(text: str) -> dict[KeyPath, int]:
    """Line (from 1) of every table header and key of a text that is valid TOML; the first mention counts."""
    lines = text.replace("\r\n", "\n").split("\n")
    found: dict[KeyPath, int] = {}
    prefix: KeyPath = ()
    at = 0
    while at < len(lines):
        head = lines[at].strip()
        if not head or head.startswith("#"):
            at += 1
            continue
        parsed, end = _statement(lines, at)
        if head.startswith("["):
            prefix = single_path(parsed)
            found.setdefault(prefix, at + 1)
        else:
            _note(found, prefix, parsed, at + 1)
        at = end
    return found


def _statement(lines: list[str], at: int) -> tuple[Table, int]:
    for end in range(at + 1, len(lines) + 1):
        try:
            return tomllib.loads("\n".join(lines[at:end])), end
        except tomllib.TOMLDecodeError:
            continue
    return {}, len(lines)


def _note(found: dict[KeyPath, int], prefix: KeyPath, table: Table, line: int) -> None:
    for key, value in table.items():
        path = (*prefix, key)
        found.setdefault(path, line)
        below = as_table(value)
        if below is not None:
            _note(found, path, below, line)


BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
HEADER = "# Resolved configuration of a run: every value, defaults included. `myxa up` takes it as it is.\n"


def dump_config(config: RunConfig) -> str:
    """TOML text with every value; `load_config` of it gives an equal configuration (paths are absolute then)."""
    lines: list[str] = [HEADER]
    for key, value in config.model_dump(by_alias=True).items():
        _write_table(lines, (key,), value)
    return "\n".join(lines)


def _write_table(lines: list[str], path: tuple[str, ...], table: Mapping[str, Any]) -> None:
    # `roles` holds tables only; free tables such as `args` and `env` are written inline.
    below = {key: value for key, value in table.items() if path == ("roles",)}
    if not below:
        lines.append(f"[{'.'.join(_key(part) for part in path)}]")
        lines.extend(f"{_key(key)} = {toml_value(value)}" for key, value in table.items())
        lines.append("")
    for key, value in below.items():
        _write_table(lines, (*path, key), value)


def _key(text: str) -> str:
    return text if BARE_KEY.fullmatch(text) else _string(text)


def _string(text: str) -> str:
    # JSON's escapes are TOML's; DEL is the one character that JSON leaves alone and TOML refuses.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_value(value: object) -> str:
    """One value in TOML's spelling; raises TypeError for what TOML cannot say."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (dt.datetime, dt.date, dt.time)):
        return value.isoformat()
    if isinstance(value, Mapping):
        table = cast("Mapping[str, object]", value)
        return "{" + ", ".join(f"{_key(key)} = {toml_value(one)}" for key, one in table.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml_value(one) for one in cast("Sequence[object]", value)) + "]"
    raise TypeError(f"TOML cannot hold a value of type {type(value).__name__}: {value!r}")


def missing_paths(config: RunConfig) -> tuple[str, ...]:
    """One sentence per file or folder that the run will read and that does not exist on this machine."""
    return tuple(
        f"{key} = {path}: there is no such {kind}"
        for key, path, kind in _named_paths(config)
        if not (Path(path).is_dir() if kind == "folder" else Path(path).is_file())
    )


def _named_paths(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    yield "model.path", config.model.path, "folder"
    folders = (
        ("algo.ref_path", config.algo.ref_path),
        ("critic.path", config.critic.path),
        ("trainer.resume", config.trainer.resume),
        ("weights.served_folder", config.weights.served_folder),
    )
    yield from ((key, folder, "folder") for key, folder in folders if folder)
    for key, value in config.data_files():
        yield from ((key, source.path, "file") for source in parse_sources(value))
    code = (
        ("rollout.workflow", config.rollout.workflow),
        *config.reward.named_functions(),
        ("algo.group_filter", config.algo.group_filter),
        ("algo.sample_filter", config.algo.sample_filter),
        ("algo.reward_post_process", config.algo.reward_post_process),
        ("algo.advantage_fn", config.algo.advantage_fn),
        ("algo.weight_fn", config.algo.weight_fn),
        ("algo.loss_fn", config.algo.loss_fn),
        *config.eval.named_functions(),
    )
    for key, name in code:
        file, colon, _ = name.rpartition(":")
        if colon and file.endswith(".py"):
            yield key, file, "file"
    if "/" in config.engine.python:
        yield "engine.python", config.engine.python, "file"
    for name, role in config.roles.by_name():
        if "/" in role.python:
            yield f"roles.{name}.python", role.python, "file"
