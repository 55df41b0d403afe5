"""Checks of the node where actors will run: packages by interpreter, SGLang, devices, sinks, keys, ports. No torch.

Packages are found without importing them, SGLang's arguments in its source text. Attached servers are asked over HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from shutil import which
from typing import Any, NamedTuple

from ... import __version__
from ...actors.backends.megatron.verbatim import check_tables, class_fields
from ...actors.data.data_files import needs_pyarrow
from ...actors.engines.sglang.server_args import BACKEND_MODULES, PAIR_DEFAULTS, needed_modules, tools_path
from ...actors.engines.sglang.wire import FACTS_ROUTE, MODEL_ROUTE, ServerAnswer, attach_fault
from ...actors.rewards.call import UNIT_TESTS
from ...actors.rewards.unit_tests import unit_test_options
from ...actors.sinks.registry import SHIPPED, check_name, make_sink
from ...actors.user_code.sandbox import REMEDIES, namespaces_trouble, trouble_with
from ...core.config import RunConfig
from ...core.config.data import parse_sources
from ...core.config.loading import Finding, Severity
from ...core.config.run import SandboxName
from ...core.config.servers import guesser
from ...core.errors import ConfigError, LaunchError, MyxaError
from ...core.suggestion import suggest
from ...core.tried_versions import TRIED, UNTRIED_REMEDY, untried
from ...transport.address import LOOPBACK, PORTS_VARIABLE, ports_to_try
from ..actor_spec import ActorSpec
from ..host import Gpus, check_port, look_at_gpus, nearest_folder
from .check import CheckedRun, looked, warnings

# -- interpreters and packages -----------------------------------------------------------------------------------------

SERVER_MODULES = ("sglang", *sorted({name for names in BACKEND_MODULES.values() for name in names.values()}))
MODULES = (
    "torch", "transformers", "megatron.core", "pynvml", "torch_memory_saver", "math_verify", "pyarrow", "wandb",
    "mlflow", *SERVER_MODULES,
)  # fmt: skip
PROBE = (
    "import json, myxa, myxa.launch.worker; from myxa.launch.checks.node import folders;"
    "print(); print(json.dumps([myxa.__version__, folders()]))"
)
SERVER_PROBE = (
    f"import json; from importlib.util import find_spec; found = {{n: find_spec(n) for n in {SERVER_MODULES}}};"
    "places = {n: [*(s.submodule_search_locations or ()), ''][0] for n, s in found.items() if s};"
    "print(); print(json.dumps(places))"
)
PATHS = "PYTHONPATH"
"""Set for a role, it has the role's processes see other packages than ours, in the same interpreter."""
PROBE_S = 120.0
"""A cold network file system under a Python environment can be that slow."""


AskedInterpreter = Mapping[str, str] | MyxaError
"""Module of `MODULES` -> its folder, of those that the interpreter has; or why it cannot be used."""


def _spec(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ModuleNotFoundError, ValueError):  # not even the package around it; a module without a spec
        return None


def has_module(name: str) -> bool:
    """Whether a module can be imported here, without importing it."""
    return _spec(name) is not None


def module_folder(name: str) -> str:
    """Where that package lies; empty if it is none."""
    spec = _spec(name)
    return next(iter(spec.submodule_search_locations or ()), "") if spec is not None else ""


def version_of(package: str, place: Path | None = None) -> str:
    """Of a package that is installed here, or in that place; empty: it is not."""
    path = [str(place)] if place is not None else sys.path
    return next((installed.version for installed in metadata.distributions(name=package, path=path)), "")


def folders() -> dict[str, str]:
    """Where each module of `MODULES` lies in this interpreter."""
    return {name: module_folder(name) for name in MODULES if has_module(name)}


def sees_our_modules(actor: ActorSpec) -> bool:
    """Whether the actor's processes find the packages that this process finds."""
    return not (actor.python or PATHS in actor.env)


def one_by_role(actors: Iterable[ActorSpec]) -> dict[str, ActorSpec]:
    firsts: dict[str, ActorSpec] = {}
    for actor in actors:
        firsts.setdefault(actor.role, actor)
    return firsts


def interpreters(run: CheckedRun) -> dict[str, AskedInterpreter]:
    """Role -> what its interpreter has, or why it cannot be used; they are asked at the same time."""
    firsts = one_by_role(run.actors)
    with ThreadPoolExecutor(max(1, len(firsts))) as pool:
        return dict(zip(firsts, pool.map(_asked, firsts.values()), strict=True))


def _asked(actor: ActorSpec) -> AskedInterpreter:
    if sees_our_modules(actor):
        return folders()
    python, place = actor.python or sys.executable, f"roles.{actor.role}.python: {actor.python or sys.executable}"
    try:
        return _probe_ours(place, python, PROBE, actor.env)
    except MyxaError as error:
        return error


def _probe_ours(place: str, python: str, code: str, env: Mapping[str, str]) -> Any:
    """What the code prints there behind the version of myxa. Raises ConfigError for another one, or none."""
    answer = _probe(place, python, code, env, "myxa", "cannot import myxa", "install myxa there")
    version, result = json.loads(answer)
    if version != __version__:
        cause = f"{place} has myxa {version}, the launcher has {__version__}"
        raise ConfigError(cause, remedy="install the same one there")
    return result


def server_folders(python: str, env: Mapping[str, str]) -> dict[str, str]:
    """Where that interpreter has SGLang and what servers may need beside it. Raises ConfigError if it cannot be run."""
    remedy, place = "name a Python interpreter that has SGLang", f"engine.python: {python}"
    return json.loads(_probe(place, python, SERVER_PROBE, env, "SGLang", "does not work", remedy))


def _probe(place: str, python: str, code: str, env: Mapping[str, str], package: str, failure: str, remedy: str) -> str:
    """The last line that the code prints there."""
    command, env = [python, "-c", code], {**os.environ, **env}
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PROBE_S, check=False)
    except OSError as error:
        another = f"name a Python interpreter that has {package}"
        raise ConfigError(f"{place} cannot be run: {error.strerror}", remedy=another) from error
    except subprocess.TimeoutExpired as error:
        raise LaunchError(f"{place} did not answer within {PROBE_S:g} s", remedy="try it by hand") from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise ConfigError(f"{place} {failure}: {last}", remedy=remedy)
    return done.stdout.splitlines()[-1]


TORCH_REMEDY = "pip install 'myxa[cpu]' there, on GPUs 'myxa[gpu]' (torch of PyPI has CUDA for Linux: gigabytes)"


class Need(NamedTuple):
    """A module that an actor cannot do without."""

    module: str
    purpose: str
    """Follows the module's name in the message: what needs it."""
    remedy: str = "install it there"


def needs(config: RunConfig, actor: ActorSpec) -> Iterator[Need]:
    """Beside myxa's own dependencies."""
    generates = actor.role == "rollout" and not config.algo.is_given
    turns = config.memory.share == "switch"
    if actor.role == "trainer" or (generates and actor.kind == "embedded"):
        yield Need("torch", f"which every {actor.role} needs", TORCH_REMEDY)
    if actor.role == "trainer" and actor.kind == "megatron":
        yield Need("megatron.core", 'which roles.trainer.kind = "megatron" needs', "install megatron-core there")
    rewards = config.named_rewards() if generates else ()
    if key := next((key for key, fn in rewards if fn == "math"), ""):
        yield Need("math_verify", f'which {key} = "math" needs', "install math-verify there (extra math)")
    if actor.role == "buffer":
        sources = (source for _, value in config.data_files() for source in parse_sources(value))
        if any(needs_pyarrow(source.path) for source in sources):
            yield Need("pyarrow", "which parquet, Arrow and .zst files need", "install pyarrow there (extra parquet)")
    for name in config.monitor.sinks if actor.role == "monitor" else ():
        if name in SHIPPED:
            remedy = f"install it there (extra {name}), or take it out of monitor.sinks"
            yield Need(name, f'which monitor.sinks = ["{name}"] needs', remedy)
    if turns and config.roles.trainer.device_ids and actor.role in ("trainer", "rollout", "memory"):
        yield Need("pynvml", 'which memory.share = "switch" needs on GPUs', "install nvidia-ml-py there (extra gpu)")


def packages(run: CheckedRun) -> Iterator[Finding]:
    """Missing modules by role, interpreters that cannot be used, versions that were not tried."""
    config, answers = run.config, run.once(interpreters)
    used: dict[tuple[str, str], str] = {}
    for actor in one_by_role(run.actors).values():
        key, answer = f"roles.{actor.role}.python", answers[actor.role]
        if isinstance(answer, MyxaError):
            yield Finding(key, answer)
            continue
        place = f"{key}: {actor.python or sys.executable}"
        for need in needs(config, actor):
            if need.module not in answer:
                text = f'{place} has no module "{need.module}", {need.purpose}'
                yield Finding(key, ConfigError(text, remedy=need.remedy))
        for module in ("transformers", *(need.module for need in needs(config, actor))):
            used.setdefault((module, answer.get(module, "")), key)
        core = answer.get("megatron.core")
        if actor.role == "trainer" and actor.kind == "megatron" and core:
            settings = config.megatron
            tables = {"model": settings.model, "ddp": settings.ddp, "optimizer": settings.optimizer}
            yield from looked("megatron", check_tables, tables, Path(core))
    for (module, folder), key in used.items():
        yield from untried_version(key, module, folder)


def untried_version(key: str, module: str, folder: str) -> Iterator[Finding]:
    """A warning if the package in that folder is of a version that was not tried."""
    package = module.replace(".", "-")
    if package in TRIED and folder:
        text = untried(package, version_of(package, Path(folder).parents[module.count(".")]))
        yield from warnings((text, f"{key}:", text, UNTRIED_REMEDY))


# -- environments ------------------------------------------------------------------------------------------------------

ENVIRONMENT_PROBE = (
    "import json, myxa, myxa.actors.environments.worker; from importlib.util import find_spec;"
    "print(); print(json.dumps([myxa.__version__, find_spec({name!r}) is not None]))"
)


def environments(run: CheckedRun) -> Iterator[Finding]:
    """Their interpreters can be run, and have this myxa and the package."""
    actor = next(iter(run.of("rollout")), None)
    for name, settings in run.config.environments.items() if actor is not None else ():
        key, kind = f"environments.{name}.python", settings.kind
        python = settings.python or (actor.python if actor else "") or sys.executable
        package = "json" if kind == "gym" and ":" in settings.id else {"gym": "gymnasium"}.get(kind, kind)
        try:
            if not _probe_ours(f"{key}: {python}", python, ENVIRONMENT_PROBE.format(name=package), settings.env):
                text = f'{key}: {python} has no module "{package}", which kind = "{kind}" needs'
                raise ConfigError(text, remedy=f"install {package} there, beside myxa")
        except MyxaError as error:
            yield Finding(key, error)


# -- SGLang ------------------------------------------------------------------------------------------------------------

SOURCES = {"srt/server_args.py": "ServerArgs", "srt/arg_groups/fields/*.py": ""}
"""Files of SGLang -> the class in them whose fields are its arguments; empty: all. The second since 0.5.18 or later."""


def launched_servers(run: CheckedRun) -> Iterator[Finding]:
    """The interpreter of servers has SGLang, and SGLang knows the arguments of `[sglang]`."""
    config = run.config
    actor = next((actor for actor in run.of("rollout") if actor.kind == "sglang"), None)
    if actor is None or config.engine.attach or not config.generates:
        return
    key = "engine.python" if config.engine.python else "roles.rollout.python"
    if config.engine.python:
        try:
            there: Mapping[str, str] = server_folders(config.engine.python, actor.env)
        except MyxaError as error:
            yield Finding(key, error)
            return
    else:
        answer = run.once(interpreters)["rollout"]
        if isinstance(answer, MyxaError):  # a finding of the packages
            return
        there = answer
    folder = there.get("sglang", "")
    if not folder:
        shown = config.engine.python or actor.python or "the launcher's own interpreter"
        text = f'{key}: {shown} has no module "sglang", which roles.rollout.kind = "sglang" needs to launch servers'
        remedy = "set engine.python to an interpreter that has SGLang, or name running servers in engine.attach"
        yield Finding(key, ConfigError(text, remedy=remedy))
        return
    names = server_arguments(Path(folder))
    for shape in config.engine.shapes(config.sglang):
        for name in shape.table if names else ():
            if name not in names:
                text = f"{shape.key}.{name}: the installed SGLang has no such argument"
                yield Finding(f"{shape.key}.{name}", ConfigError(text, remedy=suggest(name, names)))
        table = {**(PAIR_DEFAULTS if shape.kind != "regular" else {}), **shape.table}
        env = {**os.environ, **actor.env}
        env["PATH"] = tools_path(env, config.engine.python or actor.python or sys.executable)
        yield from _backends(table, shape.key, there, env)


def _backends(
    table: Mapping[str, Any], key: str, there: Mapping[str, str], env: Mapping[str, str]
) -> Iterator[Finding]:
    """What the values of a table of arguments need: libraries that the servers' interpreter lacks, programs that their
    PATH lacks."""
    compiler = (env.get("CXX", "").split() or ["c++"])[0]
    for program in (compiler, "ninja") if guesser(table) == "NGRAM" else ():
        if which(program, path=env.get("PATH")) is None:
            name = f"{key}.speculative_algorithm"
            text = f'{name} = "NGRAM" needs the program "{program}": SGLang compiles it when a server starts'
            remedy = "install it (`pip install ninja`, a C++ compiler) in the PATH of the rollout actors"
            yield Finding(name, ConfigError(text, remedy=remedy))
    for name, modules in needed_modules(table).items():
        value = guesser(table) if name == "speculative_algorithm" else str(table.get(name, ""))
        if modules.get(value, "sglang") not in there:
            usable = " and ".join(f'"{choice}"' for choice, module in modules.items() if module in there)
            remedy = f"install it there; what would work now: {usable or 'none of its kind'}"
            text = f'{name} = "{value}" needs the module "{modules[value]}", which the servers\' interpreter lacks'
            yield Finding(f"{key}.{name}", ConfigError(f"{key}.{text}", remedy=remedy))


@cache
def server_arguments(folder: Path) -> frozenset[str]:
    """Fields of ServerArgs by its source; empty if they are not where they were in 0.5.17 or 0.5.23."""
    with contextlib.suppress(OSError, SyntaxError, ValueError):
        fields = [class_fields(path, name) for pattern, name in SOURCES.items() for path in folder.glob(pattern)]
        return frozenset(name for names in fields for name in names if not name.startswith("_"))
    return frozenset()


ANSWER_S = 2.0
"""Within which a server must answer a look."""
LOOK_EVERY_S = 0.2


def attached_servers(run: CheckedRun) -> Iterator[Finding]:
    """Servers of `engine.attach` that do not fit. A missing one is a warning, unless it was waited for."""
    from ...actors.http_client import key_from  # aiohttp is slow to import

    engine, rollouts = run.config.engine, run.of("rollout")
    if not rollouts or not engine.attach:
        return
    try:
        key = key_from({**os.environ, **rollouts[0].env}, engine.key_env, "engine.key_env")
    except ConfigError as error:
        yield Finding("engine.key_env", error)
        return
    model_type = run.model.model_type if run.model else ""
    fault_of = partial(attach_fault, model_type=model_type, tells_experts=run.config.replays_rollout)
    with ThreadPoolExecutor(1) as thread:  # a loop of its own: there may be one here
        answers = thread.submit(asyncio.run, _look_at(engine.attach, key, fault_of, run.wait_s)).result()
    for url, (fault, remedy, severity) in zip(engine.attach, answers, strict=True):
        if fault:
            yield Finding("engine.attach", ConfigError(f"engine.attach: {url}: {fault}", remedy=remedy), severity)


async def _look_at(
    urls: Sequence[str], key: str, fault_of: Callable[[ServerAnswer, ServerAnswer], tuple[str, str]], wait_s: float
) -> list[tuple[str, str, Severity]]:
    """Of each server what is wrong, what to do, and how bad it is."""
    from ...actors.engines.sglang.http_client import SglangHttp

    until = time.monotonic() + wait_s

    async def look(url: str) -> tuple[str, str, Severity]:
        link = SglangHttp(url, name="server", call_s=ANSWER_S, admin_key=key)
        link.open()
        try:
            while True:
                model, facts = [await link.answer(route, ANSWER_S) for route in (MODEL_ROUTE, FACTS_ROUTE)]
                fault, remedy = fault_of(model, facts)
                may_come = model.may_come or facts.may_come
                if not fault:
                    return untried("sglang", str(facts.value.get("version", ""))), UNTRIED_REMEDY, "warning"
                if not may_come or time.monotonic() + ANSWER_S > until:
                    return fault, remedy, "warning" if may_come and not wait_s else "error"
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            await link.close()

    return await asyncio.gather(*map(look, urls))


# -- devices, sinks, ports ---------------------------------------------------------------------------------------------


def gpus(_: CheckedRun) -> Gpus:
    return look_at_gpus()


def devices(run: CheckedRun) -> Iterator[Finding]:
    if not any(actor.visible_devices for actor in run.actors):
        return
    there, text = run.once(gpus), os.environ.get("CUDA_VISIBLE_DEVICES")
    have = f"{len(there.found)}" if there.driver else f"none that can be seen ({there.trouble})"
    lent = {entry.strip() for entry in (text or "").split(",")}
    for role in one_by_role(run.actors):
        key, numbers = f"roles.{role}.devices", {number for actor in run.of(role) for number in actor.visible_devices}
        if beyond := [number for number in sorted(numbers) if number >= len(there.found)]:
            cause = f"{key} names GPU {', '.join(map(str, beyond))}, and this machine has {have}"
            error = ConfigError(cause, remedy='see nvidia-smi; GPUs count from 0, "cpu" is none')
            yield Finding(key, error, "error" if there.driver else "warning")
        foreign = [number for number in sorted(numbers) if not lent & _names_of(number, there)]
        if foreign and text is not None:
            error = ConfigError(
                f"{key} names GPU {', '.join(map(str, foreign))}, and CUDA_VISIBLE_DEVICES = {text!r} leaves them out",
                remedy="name those GPUs in the run file, which counts as nvidia-smi does, or unset the variable",
            )
            yield Finding(key, error)


def _names_of(number: int, gpus: Gpus) -> set[str]:
    """Of a GPU in CUDA_VISIBLE_DEVICES: beginnings of its UUID are names, too."""
    uuid = gpus.found[number].uuid if number < len(gpus.found) else ""
    return {str(number), *(uuid[:end] for end in range(len("GPU-") + 1, len(uuid) + 1))}


def sinks(run: CheckedRun) -> Iterator[Finding]:
    """Names and options. The monitor checks sinks from packages of another interpreter."""
    if not any(map(sees_our_modules, run.of("monitor"))):
        return
    monitor = run.config.monitor
    for name in monitor.sinks:
        if name in SHIPPED:
            yield from looked("monitor.sinks", make_sink, name, monitor.options.get(name, {}))
        else:
            yield from looked("monitor.sinks", check_name, name)


def sandboxes(run: CheckedRun) -> Iterator[Finding]:
    """Where this node's rollout actors start programs that are not trusted."""
    agent = run.config.agent
    used: list[tuple[str, SandboxName, str]] = [("agent.sandbox", agent.sandbox, agent.image)]
    with contextlib.suppress(ConfigError):  # the check of functions says it
        parts = run.config.reward.parts().values()
        used += [("reward.args", *unit_test_options(part.args).place) for part in parts if part.fn == UNIT_TESTS]
    for key, name, image in used if run.of("rollout") else ():
        if trouble := trouble_with(name, image):
            yield Finding(key, ConfigError(f'{key} = "{name}": {trouble}', remedy=REMEDIES[name]))
        elif name == "rlimits":
            weak = "is without namespaces here, so it hides neither files nor network"
            yield from warnings((namespaces_trouble(), key, f"{weak}: {namespaces_trouble()}", REMEDIES[name]))


def listened_ports(run: CheckedRun) -> Iterator[Finding]:
    yield from looked(PORTS_VARIABLE, ports_to_try)
    key, port = "control.dashboard_port", run.config.control.dashboard_port
    if port > 0 and run.of("coordinator"):
        remedy = "set another one, 0 (any free port) or -1 (off)"
        yield from looked(key, check_port, f"{key} = {port}", LOOPBACK, port, remedy)


def run_folder(run: CheckedRun) -> Iterator[Finding]:
    """Node 0 makes the run directory, and the folders above it."""
    folder = nearest_folder(run.config.run.dir)
    why = "is no folder" if not folder.is_dir() else "" if os.access(folder, os.W_OK | os.X_OK) else "is not writable"
    if why and run.of("coordinator"):
        error = ConfigError(f"run.dir: {folder} {why}", remedy="set run.dir to a folder of yours")
        yield Finding("run.dir", error)
