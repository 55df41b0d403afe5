"""From TOML files and `--set` flags to a checked `RunConfig`, or one error that lists everything wrong at once.

Files are merged left to right, key by key; flags win over files. A relative path in a file is relative to that file's
folder, in a flag to the current folder.
"""

from __future__ import annotations

import copy
import json
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, time
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..errors import ConfigError
from .fields import ANY_NAME, find, paths_with_meaning
from .key_lines import key_lines
from .problems import Origin, Origins, Problem, described, misspelt_aliases, problems_of, render
from .root import RunConfig
from .section import Meaning
from .tables import KeyPath, Table, as_array, as_table, holds, single_path, table_at, table_made_at

DECODE_PLACE = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")


@dataclass(slots=True)
class _Layers:
    """What has been read so far: merged values, where each came from, what could not be read."""

    origins: Origins
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
    origins: Origins
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
    """The same for who wants to go on looking: problems are returned. Raises ConfigError for a file that cannot be read
    or is no TOML."""
    if not files:
        raise ConfigError("no run file was given", remedy="name a TOML file")
    layers = _Layers(Origins(str(files[0])))
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
        layers.origins.note(key, Origin(str(file), line))


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
    origin = Origin(f"--set {override}", 0)
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
    """The paths that a pattern stands for: itself, or one for each name that the user has written in that place."""
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
