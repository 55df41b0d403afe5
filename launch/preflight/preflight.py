"""Finds what is wrong with a run before any process starts: interpreters, packages, model, functions, data, devices,
ports.

The actor that needs a thing checks it again. This check takes a second, makes no run directory and starts no process.
Each node checks what its own actors need; `myxa plan` runs the same checks and more. Imports no torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ...actors.backends.megatron.layout import ParallelLayout
from ...actors.backends.megatron.verbatim import check_tables
from ...actors.checkpoints.folder import check_model, read_manifest
from ...actors.data.data_files import check_data_files, needs_pyarrow
from ...actors.data.prompts import open_data
from ...actors.ledger.file import is_in_use
from ...actors.ledger.resume import LEDGER, dataset_of
from ...actors.models.chat_template import PlainText
from ...actors.models.hf_folder import check_values, open_weights, read_config
from ...actors.models.model_config import ModelConfig, frozen_names
from ...actors.models.second_model import check_critic, check_reference
from ...actors.models.tokenizer import load_tokenizer
from ...actors.sinks.names import SHIPPED, check_name
from ...core.config import RunConfig
from ...core.config.data import parse_sources
from ...core.errors import ConfigError, LedgerError, ModelError, MyxaError, TrainError
from ..actor_spec import ActorSpec
from ..run_lineage.resume_point import named_checkpoint
from .chat_template_checks import row_findings, template_findings
from .disk import disk_findings, disk_of
from .finding import ConfigFinding, looked
from .interpreters import AskedInterpreter, Installed, ask_interpreters
from .machine import Gpus, check_port, free_at, look_at_gpus, nearest_folder
from .server_checks import ABSENT_S, attached_findings, sglang_findings
from .user_functions import function_findings


class Need(NamedTuple):
    """A module that an actor cannot do without."""

    module: str
    what: str
    """Follows the module's name in the message: what needs it."""
    remedy: str = "install it there"


def package_findings(
    config: RunConfig, actors: Sequence[ActorSpec], answers: Mapping[str, AskedInterpreter]
) -> Iterator[ConfigFinding]:
    """What is missing where, one finding per role and module; interpreters that cannot be used at all."""
    seen_roles: set[str] = set()
    for actor in actors:
        answer = answers.get(actor.role)
        if actor.role in seen_roles or answer is None:
            continue
        seen_roles.add(actor.role)
        key = f"roles.{actor.role}.python"
        if isinstance(answer, MyxaError):
            yield ConfigFinding(key, answer)
        else:
            yield from _missing(config, actor, answer, key)


def _missing(config: RunConfig, actor: ActorSpec, installed: Installed, key: str) -> Iterator[ConfigFinding]:
    place = f"{key}: {installed.python or sys.executable}"
    for need in needs(config, actor):
        if need.module not in installed.folders:
            yield ConfigFinding(
                key, ConfigError(f'{place} has no module "{need.module}", {need.what}', remedy=need.remedy)
            )
    core = installed.folders.get("megatron.core")
    if actor.role == "trainer" and actor.kind == "megatron" and core:
        settings = config.megatron
        tables = {"model": settings.model, "ddp": settings.ddp, "optimizer": settings.optimizer}
        yield from looked("megatron", check_tables, tables, Path(core))


def needs(config: RunConfig, actor: ActorSpec) -> Iterator[Need]:
    """The modules that this actor needs beside myxa's own dependencies."""
    if actor.role in _OF_ROLE:
        yield from _OF_ROLE[actor.role](config, actor)
    shares = config.memory.share == "switch" and bool(config.roles.trainer.device_ids)
    if shares and actor.role in ("trainer", "rollout", "memory"):
        yield Need("pynvml", 'which memory.share = "switch" needs on GPUs', "install nvidia-ml-py there (extra gpu)")


def _of_trainer(config: RunConfig, actor: ActorSpec) -> Iterator[Need]:
    yield Need("torch", "which every trainer needs")
    if actor.kind == "megatron":
        what = 'which roles.trainer.kind = "megatron" needs'
        yield Need("megatron.core", what, "install megatron-core there")
    if config.memory.share == "switch" and config.memory.backend == "torch_memory_saver":
        what = 'which memory.backend = "torch_memory_saver" needs'
        yield Need("torch_memory_saver", what, "install torch-memory-saver there (extra gpu)")


def _of_rollout(config: RunConfig, actor: ActorSpec) -> Iterator[Need]:
    if config.algo.kind == "sft":
        return
    if actor.kind == "embedded":
        yield Need("torch", "which every rollout needs")
    named = (*config.reward.named_functions(), *config.eval.named_functions())
    if key := next((key for key, fn in named if fn == "math"), ""):
        yield Need("math_verify", f'which {key} = "math" needs', "install math-verify there (extra math)")


def _of_buffer(config: RunConfig, actor: ActorSpec) -> Iterator[Need]:
    sources = (source for _, value in config.data_files() for source in parse_sources(value))
    if any(needs_pyarrow(source.path) for source in sources):
        yield Need("pyarrow", "which parquet, Arrow and .zst files need", "install pyarrow there (extra parquet)")


def _of_monitor(config: RunConfig, actor: ActorSpec) -> Iterator[Need]:
    for name in config.monitor.sinks:
        if name in SHIPPED:
            remedy = f"install it there (extra {name}), or take it out of monitor.sinks"
            yield Need(name, f'which monitor.sinks = ["{name}"] needs', remedy)


_OF_ROLE = {"trainer": _of_trainer, "rollout": _of_rollout, "buffer": _of_buffer, "monitor": _of_monitor}


Check = Callable[[RunConfig, Sequence[ActorSpec]], Iterator[ConfigFinding]]

LOOPBACK = "127.0.0.1"
MAX_READ_BYTES = 2 << 30
"""Of weights, within about two seconds; the embedded engine reads all of them when it loads them."""


def check_node(config: RunConfig, actors: Iterable[ActorSpec], checks: Sequence[Check] | None = None) -> None:
    """Raise what is wrong for these actors of this node: one error as it is, several as one of the first one's kind."""
    mine = tuple(actors)
    found = list(find_problems(config, mine, checks))
    if any(one.is_warning and one.key == "engine.attach" for one in found):
        found = [one for one in found if one.key != "engine.attach"]
        found += attached_findings(config, mine, _model_type(config), wait_s=ABSENT_S)
    errors = [one.error for one in found if not one.is_warning]
    if len(errors) == 1:
        raise errors[0]
    if errors:
        lines = "\n".join(f"  {error}" for error in errors)
        raise type(errors[0])(f"the run cannot start: {len(errors)} problems\n{lines}")


def find_problems(
    config: RunConfig, actors: Iterable[ActorSpec], checks: Sequence[Check] | None = None
) -> Iterator[ConfigFinding]:
    """Everything that is wrong for these actors of this node. `checks`: all of them, unless said otherwise."""
    mine = tuple(actors)
    for check in CHECKS if checks is None else checks:
        yield from check(config, mine)


def _check_interpreters(config: RunConfig, actors: Sequence[ActorSpec]) -> Iterator[ConfigFinding]:
    answers = ask_interpreters(actors)
    yield from package_findings(config, actors, answers)
    yield from sglang_findings(config, actors, answers)


def _check_model(config: RunConfig, actors: Sequence[ActorSpec]) -> Iterator[ConfigFinding]:
    roles = {actor.role for actor in actors}
    if not roles & {"trainer", "rollout"}:
        return
    try:
        model = read_config(config.model.path)
    except MyxaError as error:
        yield ConfigFinding("model.path", error)
        return
    if "rollout" in roles:
        tokenizer = tuple(looked("model.path", load_tokenizer, config.model.path, PlainText()))
        yield from tokenizer
        reported = {str(finding.error) for finding in tokenizer}  # both read what the tokenizer was saved with
        yield from (finding for finding in template_findings(config) if str(finding.error) not in reported)
    yield from looked("model.path", _check_weights, config.model.path, model)
    if config.trainer.freeze and "trainer" in roles:
        yield from looked("trainer.freeze", _check_freeze, config, model)
    if config.algo.ref_path and "trainer" in roles:
        yield from looked("algo.ref_path", _check_reference, config, model)
    if config.critic.path and "trainer" in roles:
        yield from looked("critic.path", check_critic, config.critic, model)
    if config.weights.served_folder:
        yield from looked("weights.served_folder", _check_served, config.weights.served_folder)


def _check_fit(config: RunConfig, actors: Sequence[ActorSpec]) -> Iterator[ConfigFinding]:
    """Whether trainer and engine can run a model of this kind, cut like this."""
    model = readable_model(config)
    if model is None:
        return
    kinds = {(actor.role, actor.kind) for actor in actors}
    if any(role == "rollout" for role, _ in kinds):
        yield from looked("engine.context_length", _check_context, config, model.context_length)
    if ("trainer", "torch") in kinds:
        yield from looked("model.path", model.require_plain, "the torch trainer")
    if ("rollout", "embedded") in kinds and config.algo.kind != "sft":
        yield from looked("model.path", model.require_plain, "the embedded engine")
    if ("trainer", "megatron") in kinds:
        yield from looked("megatron", _check_layout, config, model)
        if config.megatron.routing_replay:
            yield from looked("megatron.routing_replay", _check_replay, config, model)


def readable_model(config: RunConfig) -> ModelConfig | None:
    """The model's config; None where it cannot be read, a finding of `_check_model`."""
    try:
        return read_config(config.model.path)
    except MyxaError:
        return None


def _check_weights(path: str, model: ModelConfig) -> None:
    with open_weights(path, model) as tensors:
        check_values(model.tensor_shapes(), tensors, path, max_bytes=MAX_READ_BYTES)


def _check_freeze(config: RunConfig, model: ModelConfig) -> None:
    try:
        with open_weights(config.model.path, model) as weights:
            names = [name for name in weights if not (model.tie_word_embeddings and name.startswith("lm_head."))]
    except MyxaError:  # a finding of model.path
        return
    frozen_names(config.trainer.freeze, names)


def _check_reference(config: RunConfig, model: ModelConfig) -> None:
    reference = check_reference(config.algo, model, is_any_shape=config.roles.trainer.kind == "torch")
    try:
        _check_weights(config.algo.ref_path, reference)
    except ModelError as error:
        raise ConfigError(f"algo.ref_path: {error.message}", remedy=error.remedy) from error


def _check_served(path: str) -> None:
    try:
        read_config(path)
    except MyxaError as error:
        raise ConfigError(
            f"weights.served_folder: {error.message}", remedy="name the folder that the servers were started with"
        ) from error


def _check_layout(config: RunConfig, model: ModelConfig) -> None:
    ParallelLayout.of(config.megatron).check_model(model, config.megatron.model)


def _check_replay(config: RunConfig, model: ModelConfig) -> None:
    """As `check_routing` of the backend, which imports torch."""
    if not model.num_experts:
        raise ConfigError(
            f"megatron.routing_replay = true: a {model.model_type} model has no experts", remedy="leave it out"
        )
    if config.megatron.recompute != "none":
        raise ConfigError(
            f'megatron.recompute = "{config.megatron.recompute}" would choose experts a second time, against '
            "megatron.routing_replay",
            remedy='set megatron.recompute = "none", or leave routing_replay out',
        )


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


def _check_resume(config: RunConfig, actors: Sequence[ActorSpec]) -> Iterator[ConfigFinding]:
    roles = {actor.role for actor in actors} if config.trainer.resume else set[str]()
    if "trainer" in roles:
        yield from looked("trainer.resume", _find_checkpoint, config.trainer.resume)
        yield from looked("model.path", _check_model_of, config)
        yield from looked("critic.enabled", _check_critic_of, config)
    if "buffer" in roles:
        yield from looked("data.train", _check_data_of, config)


def _find_checkpoint(path: str) -> None:
    try:
        named_checkpoint(path)
    except TrainError as error:
        raise ConfigError(f"trainer.resume: {error.message}", remedy=error.remedy) from error


def _check_model_of(config: RunConfig) -> None:
    """A resumed run keeps its model and its kind of trainer."""
    model = readable_model(config)
    try:
        place = named_checkpoint(config.trainer.resume)
        manifest = read_manifest(place)
    except TrainError:  # a finding of trainer.resume; the ranks report a torn one
        return
    if model is None:
        return
    try:
        check_model(place, manifest, model, config.roles.trainer.kind)
    except TrainError as error:
        raise ConfigError(error.message, remedy=error.remedy) from error


def _check_data_of(config: RunConfig) -> None:
    """A resumed run keeps the prompts that its ledger was written for. Reads all data, as the buffer does."""
    try:
        checkpoint = named_checkpoint(config.trainer.resume)
    except TrainError:  # a finding of trainer.resume
        return
    own = checkpoint.parent.parent / LEDGER
    ledger = checkpoint / LEDGER if is_in_use(own) or not own.is_file() else own
    try:
        known = dataset_of(ledger)
    except LedgerError:  # the choice of the ledger reports it
        return
    try:
        data = open_data(config)
    except ConfigError:  # a finding of the files themselves
        return
    if data.fingerprint != known:
        raise ConfigError(
            f"data: the prompts are not those that the run of {checkpoint.name} began with ({own.parent}): other rows, "
            "other order, or another run.seed",
            remedy="take data.* and run.seed back to what they were, or start a new run: myxa up RUN.TOML",
        )


def _check_critic_of(config: RunConfig) -> None:
    """A resumed run keeps its critic, or has none as before."""
    try:
        manifest = read_manifest(named_checkpoint(config.trainer.resume))
    except TrainError:  # a finding of trainer.resume; the ranks report a torn one
        return
    if bool(manifest.critic) != config.critic.enabled:
        has, goes_on = ("a", "false") if manifest.critic else ("no", "true")
        raise ConfigError(
            f"critic.enabled = {goes_on}: the checkpoint that trainer.resume names has {has} critic",
            remedy="set it as it was, or start from the exported model folder",
        )


def _check_functions(config: RunConfig, actors: Sequence[ActorSpec]) -> Iterator[ConfigFinding]:
    for roles in (("rollout", "buffer"), ("trainer",)):
        callers = [actor for actor in actors if actor.role in roles]
        if callers:
            sees_modules = not any(actor.python or "PYTHONPATH" in actor.env for actor in callers)
            yield from function_findings(config, roles, sees_modules=sees_modules)


def _check_data(config: RunConfig, actors: Sequence[ActorSpec]) -> Iterator[ConfigFinding]:
    if not any(actor.role == "buffer" for actor in actors):
        return
    for key, value in config.data_files():
        for source in parse_sources(value):
            yield from looked(key, check_data_files, source.path, key)
    if any(actor.role == "rollout" for actor in actors):
        yield from row_findings(config)


def _check_devices(config: RunConfig, actors: Sequence[ActorSpec]) -> Iterator[ConfigFinding]:
    if any(actor.visible_devices for actor in actors):
        yield from device_findings(actors, look_at_gpus())


def device_findings(actors: Sequence[ActorSpec], gpus: Gpus) -> Iterator[ConfigFinding]:
    """Roles that name GPUs which this machine does not have."""
    seen_roles: set[str] = set()
    for actor in actors:
        beyond = [number for number in actor.visible_devices if number >= len(gpus.found)]
        if not beyond or actor.role in seen_roles:
            continue
        seen_roles.add(actor.role)
        have = f"{len(gpus.found)}" if gpus.source else f"none that can be seen ({gpus.trouble})"
        key = f"roles.{actor.role}.devices"
        error = ConfigError(
            f"{key} names GPU {', '.join(map(str, beyond))}, and this machine has {have}",
            remedy='see nvidia-smi; GPUs count from 0, "cpu" is none',
        )
        yield ConfigFinding(key, error, is_warning=not gpus.source)


def _check_sinks(config: RunConfig, actors: Sequence[ActorSpec]) -> Iterator[ConfigFinding]:
    """Names and options. The monitor checks sinks from packages of another interpreter."""
    if not any(actor.role == "monitor" and not (actor.python or "PYTHONPATH" in actor.env) for actor in actors):
        return
    for name in config.monitor.sinks:
        if name in SHIPPED:
            from ...actors.sinks.registry import make_sink  # which takes longer than to look at a run file

            yield from looked("monitor.sinks", make_sink, name, config.monitor.options.get(name, {}))
        else:
            yield from looked("monitor.sinks", check_name, name)


def _check_key(config: RunConfig, actors: Sequence[ActorSpec]) -> Iterator[ConfigFinding]:
    rollouts = [actor for actor in actors if actor.role == "rollout"]
    name = config.engine.key_env
    if name and rollouts and not (os.environ.get(name) or rollouts[0].env.get(name)):
        error = ConfigError(
            f'engine.key_env = "{name}": that variable is not set where the rollout actors run',
            remedy="set it in the environment of `myxa up`",
        )
        yield ConfigFinding("engine.key_env", error)


def _check_attached(config: RunConfig, actors: Sequence[ActorSpec]) -> Iterator[ConfigFinding]:
    yield from attached_findings(config, actors, _model_type(config))


def _model_type(config: RunConfig) -> str:
    model = readable_model(config)
    return "" if model is None else model.model_type


def _check_ports(config: RunConfig, actors: Sequence[ActorSpec]) -> Iterator[ConfigFinding]:
    ports = (("monitor", "monitor.prometheus_port", config.monitor.prometheus_port),
             ("coordinator", "control.dashboard_port", config.control.dashboard_port))  # fmt: skip
    remedy = "set another one, 0 (any free port) or -1 (off)"
    for role, key, port in ports:
        if port > 0 and any(actor.role == role for actor in actors):
            yield from looked(key, check_port, f"{key} = {port}", LOOPBACK, port, remedy)


def _check_run_dir(config: RunConfig, actors: Sequence[ActorSpec]) -> Iterator[ConfigFinding]:
    """Node 0 makes the run directory there, and the folders above it that are not there yet."""
    if not any(actor.role == "coordinator" for actor in actors):
        return
    folder = nearest_folder(config.run.dir)
    why = "is no folder" if not folder.is_dir() else "" if os.access(folder, os.W_OK | os.X_OK) else "is not writable"
    if why:
        yield ConfigFinding(
            "run.dir", ConfigError(f"run.dir: {folder} {why}", remedy="set run.dir to a folder of yours")
        )


def _check_disk(config: RunConfig, actors: Sequence[ActorSpec]) -> Iterator[ConfigFinding]:
    """Where the first trainer rank writes."""
    if any(actor.role == "trainer" and actor.index == 0 for actor in actors):
        model = readable_model(config)
        if model is not None:
            yield from disk_findings(disk_of(config, model, free_at(config.run.dir)))


CHECKS: tuple[Check, ...] = (
    _check_interpreters,
    _check_devices,
    _check_model,
    _check_fit,
    _check_resume,
    _check_functions,
    _check_data,
    _check_sinks,
    _check_key,
    _check_attached,
    _check_ports,
    _check_run_dir,
    _check_disk,
)
NAMED_CHECKS: tuple[Check, ...] = (_check_model, _check_resume, _check_functions, _check_data)
"""Of the files that a run file names, each by itself."""
RESUME_CHECKS: tuple[Check, ...] = (_check_resume,)
"""Of what a run resumes from, on any machine."""
FIT_CHECKS: tuple[Check, ...] = (_check_fit,)
"""Of what the model's config and the run file come to, on whatever machine."""
