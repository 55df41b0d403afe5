"""What can be seen to be wrong before a process is started: interpreters, model folder, data files, ports.

Everything here is checked again by the actor that needs it; but a message after a second, without a run directory and
without processes, is worth more than the same message after torch was imported five times. Each node looks at what its
own actors will need. No torch; knows folders and files, must not know actors.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from .. import __version__
from ..actors.backends.megatron.layout import ParallelLayout
from ..actors.backends.megatron.verbatim import check_tables
from ..actors.backends.torch_backend.checkpoint_folder import find_checkpoint
from ..actors.data.row_file import check_data_file
from ..actors.models.hf_folder import find_tokenizer, open_weights, read_config
from ..core.config import MegatronSettings, RoleName, RunConfig
from ..core.config.source import parse_sources
from ..core.errors import ConfigError, LaunchError, MyxaError, TrainError
from .actor_spec import ActorSpec
from .port import check_port

PROBE = (
    "import json, myxa, myxa.launch.worker; from myxa.launch.preflight import core_of_megatron, has_module;"
    "print(); print(json.dumps([myxa.__version__, has_module('torch'), core_of_megatron()]))"
)
PROBE_S = 120.0
"""A cold network file system under a Python environment can be that slow."""
LOOPBACK = "127.0.0.1"


def check_node(config: RunConfig, actors: Iterable[ActorSpec]) -> None:
    """Raise what is wrong for these actors of this node: one error as it is, several as one of the first one's kind."""
    errors: list[MyxaError] = []
    mine = tuple(actors)
    for check in CHECKS:
        try:
            check(config, mine)
        except MyxaError as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        lines = "\n".join(f"  {error}" for error in errors)
        raise type(errors[0])(f"the run cannot start: {len(errors)} problems\n{lines}")


def has_module(name: str) -> bool:
    """Whether a module can be imported here, without importing it."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # not even the package around it
        return False


def core_of_megatron() -> str:
    """The folder of megatron.core, empty if it is not installed; nothing is imported."""
    spec = importlib.util.find_spec("megatron.core") if has_module("megatron.core") else None
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return places[0] if places else ""


def _check_interpreters(config: RunConfig, actors: Sequence[ActorSpec]) -> None:
    seen: set[tuple[str, RoleName]] = set()
    for actor in actors:
        if (actor.python, actor.role) in seen:
            continue
        seen.add((actor.python, actor.role))
        has_torch, core = _ask(actor) if actor.python else (has_module("torch"), core_of_megatron())
        if _needs_torch(config, actor) and not has_torch:
            raise ConfigError(
                f'{_place(actor)} has no module "torch", which every {actor.role} needs', remedy="install it there"
            )
        if actor.role == "trainer" and actor.kind == "megatron":
            _check_megatron(config.megatron, actor, core)


def _check_megatron(settings: MegatronSettings, actor: ActorSpec, core: str) -> None:
    if not core:
        raise ConfigError(
            f'{_place(actor)} has no module "megatron.core", which roles.trainer.kind = "megatron" needs',
            remedy="install megatron-core there",
        )
    tables = {"model": settings.model, "ddp": settings.ddp, "optimizer": settings.optimizer}
    check_tables(tables, Path(core))


def _place(actor: ActorSpec) -> str:
    return f"roles.{actor.role}.python: {actor.python or sys.executable}"


def _needs_torch(config: RunConfig, actor: ActorSpec) -> bool:
    has_engine = actor.role == "rollout" and actor.kind == "embedded" and config.algo.kind != "sft"
    return actor.role == "trainer" or has_engine


def _ask(actor: ActorSpec) -> tuple[bool, str]:
    """Whether a role's own interpreter has torch, and its folder of megatron.core. Raises ConfigError if it does not
    run or has not this myxa."""
    command, env = [actor.python, "-c", PROBE], {**os.environ, **actor.env}
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PROBE_S, check=False)
    except OSError as error:
        raise ConfigError(
            f"{_place(actor)} cannot be run: {error.strerror}", remedy="name a Python interpreter that has myxa"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise LaunchError(
            f"{_place(actor)} did not import myxa within {PROBE_S:g} s", remedy="try it by hand"
        ) from error
    if done.returncode != 0:
        why = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise ConfigError(f"{_place(actor)} cannot import myxa: {why}", remedy="install myxa there")
    version, has_torch, core = json.loads(done.stdout.splitlines()[-1])
    if version != __version__:
        raise ConfigError(
            f"{_place(actor)} has myxa {version}, the launcher has {__version__}", remedy="install the same one there"
        )
    return bool(has_torch), str(core)


def _check_model(config: RunConfig, actors: Sequence[ActorSpec]) -> None:
    roles = {actor.role for actor in actors}
    if not roles & {"trainer", "rollout"}:
        return
    path = config.model.path
    model = read_config(path)
    if "rollout" in roles:
        find_tokenizer(path)
        _check_context(config, model.context_length)
    with open_weights(path, model):
        pass
    if any(actor.role == "trainer" and actor.kind == "megatron" for actor in actors):
        ParallelLayout.of(config.megatron).check_model(model, config.megatron.model)


def _check_context(config: RunConfig, model_context: int) -> None:
    if config.algo.kind == "sft":
        return
    length, max_new = config.engine.context_length, config.rollout.max_new_tokens
    if length > model_context:
        raise ConfigError(
            f"engine.context_length = {length}: {config.model.path} was made for at most {model_context} tokens",
            remedy="lower it, or set it to 0 for the model's own",
        )
    if max_new >= (length or model_context):
        raise ConfigError(
            f"rollout.max_new_tokens = {max_new}: leaves no room for a prompt in the context of "
            f"{length or model_context} tokens of {config.model.path}",
            remedy="lower it",
        )


def _check_resume(config: RunConfig, actors: Sequence[ActorSpec]) -> None:
    if not config.trainer.resume or not any(actor.role == "trainer" for actor in actors):
        return
    try:
        find_checkpoint(config.trainer.resume)
    except TrainError as error:
        raise ConfigError(f"trainer.resume: {error.message}", remedy=error.remedy) from error


def _check_data(config: RunConfig, actors: Sequence[ActorSpec]) -> None:
    if not any(actor.role == "buffer" for actor in actors):
        return
    for key, value in (("data.train", config.data.train), ("eval.data", config.eval.data)):
        for source in parse_sources(value):
            check_data_file(source.path, key)


def _check_ports(config: RunConfig, actors: Sequence[ActorSpec]) -> None:
    port = config.monitor.prometheus_port
    if port < 1 or not any(actor.role == "monitor" for actor in actors):
        return
    check_port(f"monitor.prometheus_port = {port}", LOOPBACK, port, "set another one, 0 (any free port) or -1 (off)")


Check = Callable[[RunConfig, Sequence[ActorSpec]], None]
CHECKS: tuple[Check, ...] = (_check_interpreters, _check_model, _check_resume, _check_data, _check_ports)
