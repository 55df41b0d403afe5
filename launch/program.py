"""The composition root: which concrete class plays which role. Nothing else names concrete classes.

Each builder imports what its role needs when it is called, so that a coordinator or a buffer never imports torch and
a rollout actor that only tokenises starts in a fraction of a second. `composition/` holds the longer builders.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from ..actors.models.model_config import ModelConfig
from ..actors.weights.receive import TrainerSenders
from ..core.actor import Actor
from ..core.clock import Clock, SystemClock
from ..core.config import RoleName, RunConfig
from ..core.config.run import AGENT_WORKFLOW, ENVIRONMENT_WORKFLOW
from ..core.config.servers import GroupKind, ServerShape
from ..core.errors import ModelError
from ..core.process import boot_id, parent_mark
from ..core.protocols import Engine
from ..core.weight_channel import SENT_CHANNELS
from .actor_spec import ActorSpec
from .composition.memory_parts import (
    host_arena,
    memory_manager,
    rollout_tenancy,
    sglang_plan,
    start_timeout_s,
    takes_turns,
    trainer_tenancy,
)
from .composition.rollout_parts import (
    eval_rewarders,
    eval_sampling,
    eval_sets,
    gateway,
    gateway_role,
    make_judges,
    other_models,
    served_reference,
    sglang_needs,
    train_sampling,
)
from .composition.weight_channels import (
    adoption_limits,
    choose_channel,
    ranks_read,
    seen_by_servers,
)
from .supervisor.placement import server_of

if TYPE_CHECKING:
    from ..actors.buffer.knobs import BufferLimits
    from ..actors.engines.sglang.engine import SglangOptions
    from ..actors.engines.sglang.launch import LaunchedSglang
    from ..actors.engines.sglang.weight_routes import Routes

NCCL_ENVIRONMENT = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
"""SGLang sets these for itself; members of a group must agree on the first, or it fails with "invalid argument"."""

MAX_DEATHS = 10
"""Bound of the live knob: one prompt may not cause more deaths than this, whatever the run allows an actor."""

Builder = Callable[[ActorSpec, RunConfig, Path, Clock], Actor]


def build_actor(spec: ActorSpec, config: RunConfig, run_dir: Path, clock: Clock | None = None) -> Actor:
    """The actor that `spec` describes, not started yet. Raises the errors of whatever it loads."""
    return _BUILDERS[spec.role](spec, config, run_dir, clock or SystemClock())


def _coordinator(spec: ActorSpec, config: RunConfig, run_dir: Path, clock: Clock) -> Actor:
    from ..actors.coordinator.audit import AUDIT_FILE
    from ..actors.coordinator.coordinator import Coordinator
    from ..actors.coordinator.options import CoordinatorOptions
    from ..actors.coordinator.run_state import JOURNAL_FILE

    return Coordinator(
        options=CoordinatorOptions(
            has_engines=config.generates,
            audit_path=run_dir / AUDIT_FILE,
            journal_path=run_dir / JOURNAL_FILE,
            launch=parent_mark(),
            file=config,
            run=config.run,
            eval=config.eval,
            weights=config.weights,
            eval_sampling=eval_sampling(config),
            eval_sets=eval_sets(config),
            start_timeout_s=start_timeout_s(config),
            takes_turns=takes_turns(config),
            limits=adoption_limits(config),
        )
    )


def _buffer(spec: ActorSpec, config: RunConfig, run_dir: Path, clock: Clock) -> Actor:
    from ..actors.buffer.buffer import Buffer
    from ..actors.buffer.filters import load_group_filters, load_sample_filter
    from ..actors.data.prompts import open_data
    from ..actors.data.recorded import Recording
    from ..algos.staleness import Admission
    from .run_lineage.resume_point import earlier_ledger

    prompts = open_data(config)
    prompts.check_batch(config.algo.batch_size)
    buffer = Buffer(
        source=prompts,
        ledger_path=run_dir / "ledger.sqlite",
        run=run_dir.name,
        admission=Admission(
            config.asynchrony.policy,
            max_staleness=config.asynchrony.max_staleness,
            batch_size=config.algo.batch_size,
        ),
        num_samples=config.rollout.num_samples,
        sampling=train_sampling(config),
        group_filter=load_group_filters(
            config.algo.group_filter,
            config.algo.group_filter_args,
            of_samples=load_sample_filter(config.algo.sample_filter, config.algo.sample_filter_args),
        ),
        limits=buffer_limits(config),
        resume_from=earlier_ledger(config, run_dir),
    )
    buffer.recorded = Recording(config).group if config.data.is_recorded else None
    return buffer


def buffer_limits(config: RunConfig) -> BufferLimits:
    """Bounds of the buffer's live knobs: the same that the run file itself is checked by."""
    from ..actors.buffer.cursor import Window
    from ..actors.buffer.knobs import MAX_ID, MAX_TOKENS, BufferLimits
    from ..actors.models.hf_folder import read_config

    data, context_length, is_supervised = config.data, config.engine.context_length, config.algo.is_given
    vocab_size = MAX_ID + 1
    with suppress(ModelError):  # it cannot be read here
        vocab_size = read_config(config.model.path).vocab_size
    return BufferLimits(
        max_new_tokens=context_length - 1 if context_length else MAX_TOKENS,
        quarantine_after=config.reward.quarantine_after,
        # One death more than that would end the run, or cost it an engine for good.
        max_deaths=min(config.roles.rollout.max_restarts, MAX_DEATHS),
        difficulty=Window(data.difficulty_low, data.difficulty_high),
        has_rewards=not is_supervised,
        samples_per_step=config.monitor.samples_per_step,
        pass_reward=config.reward.pass_reward,
        vocab_size=vocab_size,
    )


def _monitor(spec: ActorSpec, config: RunConfig, run_dir: Path, clock: Clock) -> Actor:
    """The monitor with every sink that is asked for. Raises ConfigError or UserCodeError for one that cannot be."""
    from ..actors.monitor.monitor import Monitor
    from ..actors.sinks.registry import choose_sinks

    settings = config.monitor
    if "mlflow" in settings.sinks:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # newer versions ask to be allowed it
    sinks = choose_sinks(settings)
    files = [path for name in ("metrics.jsonl", "events.jsonl") if (path := run_dir / name).exists()]
    written_s = max((path.stat().st_mtime for path in files), default=0.0)  # by an earlier monitor
    return Monitor(
        run_dir, sinks, run_name=config.run.name, clock=clock, written_until_wall_s=written_s,
        settings=shown_settings(config),
    )  # fmt: skip


Shown = str | int | float | bool
HIDDEN = "(hidden)"
_SECRET = re.compile(r"key|token|secret|passw|credential", re.IGNORECASE)
_SECRET_ADDRESS = re.compile(r"://.*[@?]")
"""One with a user, a password or a query."""
_FREE = re.compile(r".+[._]args|.+\.chat_template_kwargs|(.+\.)?sglang|megatron\.(model|ddp|optimizer)")
"""Tables whose keys are not ours: one that looks like a secret's is hidden."""
_LEFT_OUT = re.compile(r"(roles|models)\.[^.]+\.env|monitor\.options")
"""Environments, and options of sinks."""


def shown_settings(config: RunConfig) -> dict[str, Shown]:
    """Key of the run file -> its value, defaults included; lists are written as text."""
    return dict(_flat("", config.model_dump(by_alias=True), is_free=False))


def _flat(place: str, table: Mapping[str, Any], *, is_free: bool) -> Iterator[tuple[str, Shown]]:
    for key, value in table.items():
        path = f"{place}.{key}" if place else key
        if isinstance(value, list) and any(isinstance(item, Mapping) for item in cast("list[object]", value)):
            value = {str(number): item for number, item in enumerate(cast("list[object]", value))}
        if _LEFT_OUT.fullmatch(path):
            continue
        if isinstance(value, Mapping):
            inner = cast("Mapping[str, Any]", value)
            yield from _flat(path, inner, is_free=is_free or bool(_FREE.fullmatch(path)))
        else:
            yield path, HIDDEN if is_free and _SECRET.search(key) else _plain(cast("object", value))


def _plain(value: object) -> Shown:
    if isinstance(value, (list, tuple)):
        return ", ".join(str(_plain(item)) for item in cast("tuple[object, ...]", value))
    if isinstance(value, (bool, int, float)):
        return value
    return HIDDEN if _SECRET_ADDRESS.search(text := str(value)) else text


def _rollout(spec: ActorSpec, config: RunConfig, run_dir: Path, clock: Clock) -> Actor:
    from ..actors.environments.workflow import EnvironmentPools
    from ..actors.models.hf_folder import read_config
    from ..actors.models.tokenizer import load_tokenizer
    from ..actors.rewards.rewarder import make_rewarder
    from ..actors.rollout.evaluation import Evaluation
    from ..actors.rollout.group_runner import RolloutOptions
    from ..actors.rollout.rollout import Rollout
    from ..actors.weights.channels.host import RebuiltFolder
    from ..actors.workflows.named import BUILTINS
    from ..actors.workflows.pool import make_pool

    model = read_config(config.model.path)
    senders = TrainerSenders()
    models = other_models(config)
    judges = make_judges(config, models)
    scorer = make_rewarder(config, judges)
    tokenizer = load_tokenizer(config.model.path, config.data)
    reached = {name: served.reached for name, served in models.items()}
    own_gateway = gateway(spec, config, run_dir)
    if own_gateway is not None and config.rollout.workflow == AGENT_WORKFLOW:
        from ..actors.gateway.agent import AgentWorkflow

        path = os.pathsep.join((str(Path(sys.executable).parent), *os.get_exec_path()))
        workflow = AgentWorkflow(config.agent, own_gateway, reached, {**os.environ, "PATH": path})
    elif config.rollout.workflow == ENVIRONMENT_WORKFLOW:
        workflow = EnvironmentPools(config, tokenizer, os.environ)
    else:
        workflow = BUILTINS.get(config.rollout.workflow) or make_pool(config, tokenizer, reached)
    # The engine last: it imports torch, and a mistake in the others is to be reported at once.
    engine = _engine(spec, config, model, run_dir, senders) if config.generates else None
    rollout = Rollout(
        workflow=workflow,
        scorer=scorer,
        tokenizer=tokenizer,
        engine=engine,
        tenancy=rollout_tenancy(spec, config, engine),
        evaluation=Evaluation(eval_rewarders(config, judges), num_shown=config.monitor.samples_per_step),
        reference=served_reference(config, tokenizer, clock),
        rebuilder=RebuiltFolder(senders),
        options=RolloutOptions(
            rollout=config.rollout,
            reward=config.reward,
            gateway=config.gateway,
            context_length=config.engine.context_length or model.context_length,
            through_router=bool(config.engine.router),
            run_dir=str(run_dir),
            loss_parts=config.algo.loss_parts,
            choices=model.expert_choices if config.replays_rollout else None,
            eval_sampling=eval_sampling(config),
        ),
    )
    rollout.gateway, rollout.models = own_gateway, tuple(models.values())
    senders.speak_as(rollout)
    return rollout


def _model(spec: ActorSpec, config: RunConfig, run_dir: Path, clock: Clock) -> Actor:
    from ..actors.models.hf_folder import read_config
    from ..actors.models.tokenizer import load_tokenizer
    from ..actors.rollout.other_models import ModelServer

    view = config.of_model(spec.model)
    model, tokenizer = read_config(view.model.path), load_tokenizer(view.model.path, view.data)
    return ModelServer(_engine(spec, view, model, run_dir, TrainerSenders()), tokenizer)


def _sglang(spec: ActorSpec, config: RunConfig, model: ModelConfig, run_dir: Path, senders: TrainerSenders) -> Engine:
    """Its own server or servers, or one that runs already."""
    from ..actors.engines.sglang.engine import SglangEngine

    if url := server_of(spec, config):
        options, routes = _server_options(spec, config, model), _server_routes(spec, config, senders)
        return SglangEngine(url, options, routes, saves_memory=takes_turns(config))
    shapes = config.engine.actors(config.sglang)
    servers, env = shapes[spec.index % len(shapes)], seen_by_servers(config, os.environ, spec.devices)
    if len(servers) == 1:
        return _launched(spec, config, servers[0], model, run_dir, senders, env=env)
    from ..actors.engines.sglang.paired import PairedSglang

    engines: dict[GroupKind, list[LaunchedSglang]] = {"prefill": [], "decode": []}
    first = 0
    for shape in servers:
        name = f"{spec.name}/{shape.kind}.{len(engines[shape.kind])}"
        part = msgspec.structs.replace(spec, name=name, devices=spec.devices[first : first + shape.num_gpus])
        engine = _launched(part, config, shape, model, run_dir, senders, env=env, first_device=first)
        engines[shape.kind].append(engine)
        first += shape.num_gpus if spec.devices else 0
    return PairedSglang(engines["prefill"], engines["decode"])


def _server_options(spec: ActorSpec, config: RunConfig, model: ModelConfig) -> SglangOptions:
    from ..actors.engines.sglang.engine import CALL_S, SglangOptions
    from ..actors.http_client import key_from
    from ..actors.models.hf_folder import read_eos_token_ids

    engine = config.engine
    return SglangOptions(
        vocab_size=model.vocab_size, model_type=model.model_type, context_length=engine.context_length,
        model_context_length=model.context_length, max_running=engine.max_running,
        pause_mode=config.rollout.pause_mode, start_s=engine.start_s, call_s=max(CALL_S, config.weights.transfer_s),
        admin_key=key_from(os.environ, engine.key_env, "engine.key_env"), generate_url=engine.router,
        end_token_ids=read_eos_token_ids(config.model.path),
        needs=sglang_needs(config, model, "" if spec.model else choose_channel(config)),
        choices=model.expert_choices if config.replays_rollout else None, name=spec.name,
    )  # fmt: skip


def _launched(
    spec: ActorSpec, config: RunConfig, shape: ServerShape, model: ModelConfig, run_dir: Path, senders: TrainerSenders,
    **placing: Any,
) -> LaunchedSglang:  # fmt: skip
    """A server of the run's own, on the GPUs of `spec`."""
    from ..actors.engines.sglang.launch import LaunchedSglang, SglangLaunch

    config, engine = config.of_server(shape), config.engine
    launch = SglangLaunch(
        python=engine.python or sys.executable, model_path=config.served_path, table=config.sglang,
        log_path=run_dir / "logs" / f"{spec.name.replace('/', '.')}.sglang.log", dtype=engine.dtype,
        seed=_engine_seed(spec, config), num_devices=len(spec.devices), max_running=engine.max_running,
        context_length=engine.context_length, kind=shape.kind,
        key=f"models.{spec.model}.{shape.key}" if spec.model else shape.key,
        expects=sglang_plan(spec, config, model), **placing,
    )  # fmt: skip
    return LaunchedSglang(launch, _server_options(spec, config, model), _server_routes(spec, config, senders))


def _engine_seed(spec: ActorSpec, config: RunConfig) -> int:
    return config.run.seed * 1000 + spec.index


def _engine(spec: ActorSpec, config: RunConfig, model: ModelConfig, run_dir: Path, senders: TrainerSenders) -> Engine:
    engine = config.engine
    if spec.kind == "sglang":
        return _sglang(spec, config, model, run_dir, senders)
    from ..actors.engines.embedded.core import MEMORY_SHARE, EmbeddedOptions
    from ..actors.engines.embedded.engine import EmbeddedEngine

    options = EmbeddedOptions(
        max_running=engine.max_running, context_length=engine.context_length, dtype=engine.dtype,
        seed=_engine_seed(spec, config), pause_mode=config.rollout.pause_mode, num_threads=spec.threads,
        memory_share=MEMORY_SHARE / sum(role.count for role in (config.roles.rollout, *config.models.values())),
        is_invariant=config.rollout.deterministic, tells_kept=config.rollout.replay_sampling, name=spec.name,
    )  # fmt: skip
    return EmbeddedEngine(config.model.path, options, memory=host_arena(spec, config) if takes_turns(config) else None)


def _trainer(spec: ActorSpec, config: RunConfig, run_dir: Path, clock: Clock) -> Actor:
    from ..actors.backends.torch_backend.world import Gang
    from ..actors.trainer.knobs import step_values
    from ..actors.trainer.step_plan import BatchFunctions, StepPlanOptions
    from ..actors.trainer.train_loop import TrainLoopOptions
    from ..actors.trainer.trainer import Trainer, TrainerOptions
    from .composition.trainer_parts import (
        GangStart,
        channel_end,
        checkpoint_options,
        gang_comms,
        guard_bound,
        make_backend,
        pair_maker,
        shard_of_rank,
    )

    if choose_channel(config) in SENT_CHANNELS:  # before anybody looks at what NCCL can do here
        for name, value in NCCL_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
    gang, comms = gang_comms(
        config,
        Gang.from_environment(os.environ, collective_s=config.trainer.step_timeout_s),
        on_gpus=bool(spec.devices),
    )
    backend = make_backend(spec, config, gang, clock)
    shards = shard_of_rank(spec, config, gang.world_size)
    plan = StepPlanOptions(
        algo=config.algo, num_ranks=max(shards) + 1, max_tokens=config.trainer.max_tokens_per_microbatch,
        minibatches=config.algo.minibatches, sources=tuple(sorted(config.data.sources)),
        functions=BatchFunctions() if gang.rank else BatchFunctions.load(config.algo),
    )  # fmt: skip
    leader = TrainLoopOptions(
        world_size=gang.world_size, num_steps=config.run.num_steps, plan=plan, publishes=config.generates,
        make_pair=None if gang.rank else pair_maker(config), run_dir=str(run_dir),
        checkpoints=checkpoint_options(spec, config, run_dir), trainer=config.trainer,
        step_values=step_values(config.algo, config.optimizer), channel=choose_channel(config), shard_of_rank=shards,
        guard_bound=guard_bound(config), guard_fails=config.guard.above == "fail",
    )  # fmt: skip
    # For so long a rank may hold the interpreter lock while it sets up, compiles or writes.
    options = TrainerOptions(rank=gang.rank, leader=leader, block_limit_s=600.0 if spec.devices else 10.0)
    return Trainer(
        backend=backend, end=channel_end(config, run_dir, gang.rank, local_rank=gang.local_rank), options=options,
        tenancy=trainer_tenancy(spec, config, comms), start=GangStart(spec, config, run_dir),
    )  # fmt: skip


def _server_routes(spec: ActorSpec, config: RunConfig, senders: TrainerSenders) -> Routes:
    """Every channel by which a server can take weights."""
    from ..actors.engines.sglang.weight_routes import DeviceRouteOptions, adapter_routes, device_routes

    if config.lora.rollout == "adapter":
        return adapter_routes
    weights = config.weights
    options = DeviceRouteOptions(
        host=boot_id(),
        join_s=weights.join_s,
        send_s=weights.transfer_s,
        same_gpu=ranks_read(config, spec.node, spec.devices),
    )
    return device_routes(senders, options)


_BUILDERS: dict[RoleName, Builder] = {
    "coordinator": _coordinator,
    "buffer": _buffer,
    "monitor": _monitor,
    "memory": lambda spec, config, _, clock: memory_manager(spec, config, clock),
    "gateway": lambda _, config, run_dir, clock: gateway_role(config, run_dir, clock),
    "rollout": _rollout,
    "model": _model,
    "trainer": _trainer,
}
