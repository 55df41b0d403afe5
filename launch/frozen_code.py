"""A copy of the functions that a run's algorithm is made of, in the run's own folder: `code/<digest>/`.

What is learnt must not change under a run because a file was edited. So files that `[algo]` names are copied when the
run starts, with the modules beside them that they import; the configuration names the copies, and they travel to all
nodes. Rows that an environment makes are written once: `rows/<name>.jsonl`, by its own interpreter.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ..core.config import RunConfig, dump_config
from ..core.config.data import ENVIRONMENT, parse_sources
from ..core.config.run import EnvironmentSettings
from ..core.errors import ConfigError, LaunchError, raised_as
from ..core.files import write_durably

CODE, ROWS = "code", "rows"
ENVIRONMENT_WORKER = "myxa.actors.environments.worker"
MAX_ROWS_S = 1800.0
"""For an environment to make all its rows: it may load a data set."""
KEYS = ("reward_post_process", "advantage_fn", "weight_fn", "loss_fn")
MAX_BYTES = 256 << 10
"""Of all files together: they go with the order to start."""


@dataclass(frozen=True, slots=True)
class Frozen:
    """A run's configuration with the names of the copies."""

    config: RunConfig
    text: str
    """The same as TOML, with names from the run directory on: it may be moved."""
    files: Mapping[str, str]
    """The copies: path below the run directory -> text."""


def freeze(config: RunConfig, run_dir: Path) -> Frozen:
    """Copy what the configuration names, in memory. Raises ConfigError for files that cannot be copied."""
    names: dict[str, str] = {}
    files: dict[str, str] = {}
    for key in KEYS:
        where, _, attr = str(getattr(config.algo, key)).rpartition(":")
        if where.endswith(".py"):
            folder, found = _copy_of(Path(where).absolute(), run_dir / CODE, f"algo.{key}")
            files |= {f"{CODE}/{folder}/{path}": text for path, text in found.items()}
            names[key] = f"{CODE}/{folder}/{Path(where).name}:{attr}"
    if sum(len(text.encode()) for text in files.values()) > MAX_BYTES:
        raise ConfigError(
            f"the files of {', '.join(f'algo.{key}' for key in names)} have more than {MAX_BYTES >> 10} KiB, with what "
            "they import from beside them",
            remedy="install what is large as a module",
        )
    whole = {key: f"{run_dir.absolute()}/{name}" for key, name in names.items()}
    used, told = _renamed(config, whole), _renamed(config, names)
    environments = {one.environment for _, value in config.data_files() for one in parse_sources(value)} - {""}
    if environments:
        for name in sorted(environments):
            _write_rows(name, config.environments[name], run_dir / ROWS / f"{name}.jsonl")
        used, told = _with_rows(used, f"{run_dir.absolute()}/{ROWS}/"), _with_rows(told, f"{ROWS}/")
    return Frozen(used, dump_config(told), files)


def _write_rows(name: str, of: EnvironmentSettings, path: Path) -> None:
    """Unless they are there. Raises ConfigError if the environment gives none."""
    if path.exists():
        return
    command = (of.python or sys.executable, "-P", "-m", ENVIRONMENT_WORKER)
    spec = json.dumps({"name": name, "kind": of.kind, "id": of.id, "args": of.args}).encode()
    try:
        done = subprocess.run(
            command, input=spec, env={**os.environ, **of.env}, capture_output=True, timeout=MAX_ROWS_S, check=False
        )
        cause = done.stderr.decode(errors="replace").strip().rpartition("\n")[2] if done.returncode else ""
        cause = cause or ("" if done.stdout else "it has no rows")
        rows = done.stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        cause, rows = str(error), b""
    if cause:
        remedy = f"try it with {command[0]}: it must have this myxa and the package of that environment"
        raise ConfigError(f"environments.{name}: rows cannot be made: {cause}", remedy=remedy)
    with raised_as(LaunchError, f"{path} cannot be written", OSError, remedy="set run.dir"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, rows)


def _with_rows(config: RunConfig, folder: str) -> RunConfig:
    """With the files in place of the environments."""

    def named(value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not isinstance(value, str):
            return tuple(str(named(one)) for one in value)
        if not value.startswith(ENVIRONMENT):
            return value
        name, found, rest = value.removeprefix(ENVIRONMENT).partition("@")
        return f"{folder}{name}.jsonl{found}{rest}"

    data, held_out = config.data, config.eval
    sources = {name: one.model_copy(update={"path": named(one.path)}) for name, one in data.sources.items()}
    sets = {name: one.model_copy(update={"path": named(one.path)}) for name, one in held_out.sets.items()}
    return config.model_copy(
        update={
            "data": data.model_copy(update={"train": named(data.train), "sources": sources}),
            "eval": held_out.model_copy(update={"data": named(held_out.data), "sets": sets}),
        }
    )


def _renamed(config: RunConfig, names: Mapping[str, str]) -> RunConfig:
    return config.model_copy(update={"algo": config.algo.model_copy(update=dict(names))})


def write_code(run_dir: Path, files: Mapping[str, str]) -> None:
    """Write the copies. Raises LaunchError for a path that leads elsewhere, or if the disk refuses."""
    for name, text in files.items():
        parts = PurePosixPath(name).parts
        if len(parts) < 3 or parts[0] != CODE or ".." in parts:
            raise LaunchError(f"{name} is no place for a copy of code", remedy="this is a bug; report it")
        path = run_dir.joinpath(*parts)
        with raised_as(LaunchError, f"{path} cannot be written", OSError, remedy="set run.dir"):
            if path.is_file() and path.read_text(encoding="utf-8") == text:
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")


def _copy_of(path: Path, code: Path, key: str) -> tuple[str, dict[str, str]]:
    if path.parent.parent.resolve() == code.resolve():  # a copy already: a change of it there is meant for this run
        return path.parent.name, {
            file.relative_to(path.parent).as_posix(): _text(file, key) for file in sorted(path.parent.rglob("*.py"))
        }
    found: dict[str, str] = {}
    _gather(path, path.parent, found, key)
    mark = hashlib.blake2b(digest_size=6)
    for name, text in sorted(found.items()):
        mark.update(f"{name}\0{text}\0".encode())
    return mark.hexdigest(), found


def _gather(file: Path, folder: Path, found: dict[str, str], key: str) -> None:
    name = file.relative_to(folder).as_posix()
    if name in found:
        return
    found[name] = _text(file, key)
    for module in _imported(found[name], file, key):
        if (beside := folder / f"{module}.py").is_file():
            _gather(beside, folder, found, key)
        elif (folder / module / "__init__.py").is_file():
            for part in sorted((folder / module).rglob("*.py")):
                _gather(part, folder, found, key)


def _imported(text: str, file: Path, key: str) -> set[str]:
    with raised_as(ConfigError, f"{key}: {file} is no Python source", SyntaxError, ValueError, remedy="mend it"):
        nodes = list(ast.walk(ast.parse(text, filename=str(file))))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level}
    return {name.partition(".")[0] for name in names}


def _text(file: Path, key: str) -> str:
    try:
        return file.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}: {file} cannot be copied: {error}", remedy="name a readable UTF-8 file") from error
