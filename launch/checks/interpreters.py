"""Which Python each role runs in, and which packages it has. Imports none of them to find out."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.machinery import ModuleSpec

import msgspec

from ... import __version__
from ...core.errors import ConfigError, LaunchError, MyxaError
from ..actor_spec import ActorSpec

MODULES = (
    "torch", "megatron.core", "pynvml", "torch_memory_saver", "sglang", "math_verify", "pyarrow", "wandb", "mlflow",
)  # fmt: skip
"""Modules that are looked for."""
PROBE = (
    "import json, myxa, myxa.launch.worker; from myxa.launch.checks.interpreters import folders;"
    "print(); print(json.dumps([myxa.__version__, folders()]))"
)
SGLANG_PROBE = (
    "import json; from importlib.util import find_spec; spec = find_spec('sglang');"
    "print(); print(json.dumps(list(spec.submodule_search_locations or ()) if spec else []))"
)
PATHS = "PYTHONPATH"
"""Set for a role, it has the role's processes see other packages than ours, in the same interpreter."""
PROBE_S = 120.0
"""A cold network file system under a Python environment can be that slow."""


@dataclass(frozen=True, slots=True)
class Installed:
    """What an interpreter has."""

    python: str
    """As it is named; empty: the launcher's own."""
    folders: Mapping[str, str]
    """Module of `MODULES` -> its folder; what is missing is not installed."""


def has_module(name: str) -> bool:
    """Whether a module can be imported here, without importing it."""
    return _spec(name) is not None


def folders() -> dict[str, str]:
    """Where each module of `MODULES` lies in this interpreter."""
    return {name: module_folder(name) for name in MODULES if has_module(name)}


def module_folder(name: str) -> str:
    """Where that package lies; empty if it is none."""
    spec = _spec(name)
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return places[0] if places else ""


def _spec(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ModuleNotFoundError, ValueError):  # not even the package around it; a module without a spec
        return None


AskedInterpreter = Installed | MyxaError


def ask_interpreters(actors: Iterable[ActorSpec]) -> dict[str, AskedInterpreter]:
    """Role -> what its interpreter has, or why it cannot be used; they are asked at the same time."""
    firsts: dict[str, ActorSpec] = {}
    for actor in actors:
        firsts.setdefault(actor.role, actor)
    with ThreadPoolExecutor(max(1, len(firsts))) as pool:
        return dict(zip(firsts, pool.map(_asked, firsts.values()), strict=True))


def _asked(actor: ActorSpec) -> AskedInterpreter:
    try:
        return _ask(actor) if actor.python or PATHS in actor.env else Installed("", folders())
    except MyxaError as error:
        return error


def _ask(actor: ActorSpec) -> Installed:
    python = actor.python or sys.executable
    place = f"roles.{actor.role}.python: {python}"
    done = _run(place, [python, "-c", PROBE], {**os.environ, **actor.env}, "that has myxa")
    if done.returncode != 0:
        raise ConfigError(f"{place} cannot import myxa: {_last_line(done)}", remedy="install myxa there")
    version, found = json.loads(done.stdout.splitlines()[-1])
    if version != __version__:
        raise ConfigError(
            f"{place} has myxa {version}, the launcher has {__version__}", remedy="install the same one there"
        )
    return Installed(actor.python, msgspec.convert(found, dict[str, str]))


def folder_of_sglang(python: str, env: Mapping[str, str]) -> str:
    """Where that interpreter has SGLang; empty if it has none. Raises ConfigError if it cannot be run."""
    place = f"engine.python: {python}"
    done = _run(place, [python, "-c", SGLANG_PROBE], {**os.environ, **env}, "that has SGLang")
    if done.returncode != 0:
        raise ConfigError(f"{place} does not work: {_last_line(done)}", remedy="name a Python interpreter with SGLang")
    found = msgspec.json.decode(done.stdout.splitlines()[-1], type=list[str])
    return found[0] if found else ""


def _run(place: str, command: Sequence[str], env: Mapping[str, str], which: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            list(command), env=dict(env), capture_output=True, text=True, timeout=PROBE_S, check=False
        )
    except OSError as error:
        raise ConfigError(
            f"{place} cannot be run: {error.strerror}", remedy=f"name a Python interpreter {which}"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise LaunchError(f"{place} did not answer within {PROBE_S:g} s", remedy="try it by hand") from error


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
