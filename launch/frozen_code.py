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
from .run_dir import RunDir

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
        file, _, attr = str(getattr(config.algo, key)).rpartition(":")
        if file.endswith(".py"):
            folder, copies = _copy_of(Path(file).absolute(), run_dir / CODE, f"algo.{key}")
            files |= {f"{CODE}/{folder}/{path}": text for path, text in copies.items()}
            names[key] = f"{CODE}/{folder}/{Path(file).name}:{attr}"
    if sum(len(text.encode()) for text in files.values()) > MAX_BYTES:
        raise ConfigError(
            f"the files of {', '.join(f'algo.{key}' for key in names)} have more than {MAX_BYTES >> 10} KiB, with what "
            "they import from beside them",
            remedy="install what is large as a module",
        )
    absolute = {key: f"{run_dir.absolute()}/{name}" for key, name in names.items()}
    used, written = _renamed(config, absolute), _renamed(config, names)
    environments = {source.environment for _, value in config.data_files() for source in parse_sources(value)} - {""}
    if environments:
        for name in sorted(environments):
            _write_rows(name, config.environments[name], run_dir / ROWS / f"{name}.jsonl")
        used, written = _with_rows(used, f"{run_dir.absolute()}/{ROWS}/"), _with_rows(written, f"{ROWS}/")
    return Frozen(used, dump_config(written), files)


def _write_rows(name: str, settings: EnvironmentSettings, path: Path) -> None:
    """Unless they are there. Raises ConfigError if the environment gives none."""
    if path.exists():
        return
    command = (settings.python or sys.executable, "-P", "-m", ENVIRONMENT_WORKER)
    spec = json.dumps({"name": name, "kind": settings.kind, "id": settings.id, "args": settings.args}).encode()
    env = {**os.environ, **settings.env}
    try:
        done = subprocess.run(command, input=spec, env=env, capture_output=True, timeout=MAX_ROWS_S, check=False)
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

    def in_folder(value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not isinstance(value, str):
            return tuple(str(in_folder(path)) for path in value)
        if not value.startswith(ENVIRONMENT):
            return value
        name, sign, rows = value.removeprefix(ENVIRONMENT).partition("@")
        return f"{folder}{name}.jsonl{sign}{rows}"

    data, held_out = config.data, config.eval
    sources = {name: part.model_copy(update={"path": in_folder(part.path)}) for name, part in data.sources.items()}
    sets = {name: part.model_copy(update={"path": in_folder(part.path)}) for name, part in held_out.sets.items()}
    data = data.model_copy(update={"train": in_folder(data.train), "sources": sources})
    held_out = held_out.model_copy(update={"data": in_folder(held_out.data), "sets": sets})
    return config.model_copy(update={"data": data, "eval": held_out})


def _renamed(config: RunConfig, names: Mapping[str, str]) -> RunConfig:
    return config.model_copy(update={"algo": config.algo.model_copy(update=dict(names))})


def post_run(run_dir: RunDir, config: str, files: Mapping[str, str]) -> None:
    """Make sure that the directory is there, with the run's configuration and the copies. Raises LaunchError for a path
    that leads elsewhere, or if the disk refuses."""
    RunDir.join(str(run_dir.path))
    for name, text in files.items():
        parts = PurePosixPath(name).parts
        if len(parts) < 3 or parts[0] != CODE or ".." in parts:
            raise LaunchError(f"{name} is no place for a copy of code", remedy="this is a bug; report it")
        path = run_dir.path.joinpath(*parts)
        with raised_as(LaunchError, f"{path} cannot be written", OSError, remedy="set run.dir"):
            if path.is_file() and path.read_text(encoding="utf-8") == text:
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    run_dir.post_config(config)


def _copy_of(path: Path, code: Path, key: str) -> tuple[str, dict[str, str]]:
    if path.parent.parent.resolve() == code.resolve():  # a copy already: a change of it there is meant for this run
        return path.parent.name, {
            file.relative_to(path.parent).as_posix(): _text(file, key) for file in sorted(path.parent.rglob("*.py"))
        }
    copies: dict[str, str] = {}
    _gather(path, path.parent, copies, key)
    mark = hashlib.blake2b(digest_size=6)
    for name, text in sorted(copies.items()):
        mark.update(f"{name}\0{text}\0".encode())
    return mark.hexdigest(), copies


def _gather(file: Path, folder: Path, copies: dict[str, str], key: str) -> None:
    name = file.relative_to(folder).as_posix()
    if name in copies:
        return
    copies[name] = _text(file, key)
    for module in _imported(copies[name], file, key):
        if (beside := folder / f"{module}.py").is_file():
            _gather(beside, folder, copies, key)
        elif (folder / module / "__init__.py").is_file():
            for part in sorted((folder / module).rglob("*.py")):
                _gather(part, folder, copies, key)


def _imported(text: str, file: Path, key: str) -> set[str]:
    with raised_as(ConfigError, f"{key}: {file} is no Python source", SyntaxError, ValueError, remedy="mend it"):
        nodes = list(ast.walk(ast.parse(text, filename=str(file))))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level}
    return {name.partition(".")[0] for name in names}


def _text(file: Path, key: str) -> str:
    problem, remedy = f"{key}: {file} cannot be copied", "name a readable UTF-8 file"
    with raised_as(ConfigError, problem, OSError, UnicodeDecodeError, remedy=remedy):
        return file.read_bytes().decode("utf-8-sig")
