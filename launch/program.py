"""The composition root: which concrete class plays which role. Nothing else names concrete classes.

Each builder imports what its role needs when it is called, so that a coordinator or a buffer never imports torch and
a rollout actor that only tokenises starts in a fraction of a second.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ..actors.models.model_config import ModelConfig
from ..actors.workflows.context import Workflow
from ..core.actor import Actor
from ..core.clock import Clock, SystemClock
from ..core.config import RoleName, RunConfig
from ..core.messages import SamplingParams
from ..core.protocols import Engine, WeightWriter
from ..core.samples import Group
from .actor_spec import ActorSpec

Builder = Callable[[ActorSpec, RunConfig, Path, Clock], Actor]


def build_actor(spec: ActorSpec, config: RunConfig, run_dir: Path, clock: Clock | None = None) -> Actor:
    """The actor that `spec` describes, not started yet. Raises the errors of whatever it loads."""
    return _BUILDERS[spec.role](spec, config, run_dir, clock or SystemClock())


def train_sampling(config: RunConfig) -> SamplingParams:
    """How training samples are drawn."""
    rollout = config.rollout
    return SamplingParams(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_new_tokens=rollout.max_new_tokens,
        stop_token_ids=rollout.stop_token_ids,
    )


def eval_sampling(config: RunConfig) -> SamplingParams:
    """How held-out prompts are answered: the whole distribution at the evaluation temperature."""
    return SamplingParams(
        temperature=config.eval.temperature,
        max_new_tokens=config.rollout.max_new_tokens,
        stop_token_ids=config.rollout.stop_token_ids,
    )


def num_actors(config: RunConfig, role: RoleName, num_nodes: int) -> int:
    """Actors of a role in the whole run."""
    settings = config.roles[role]
    return settings.count * (num_nodes if settings.nodes == "*" else len(settings.nodes))


def is_supervised(config: RunConfig) -> bool:
    """Whether samples come from demonstrations: no engine takes part, no weights travel."""
    return config.algo.kind == "sft"


def _coordinator(spec: ActorSpec, config: RunConfig, run_dir: Path, clock: Clock) -> Actor:
    from ..actors.coordinator import Coordinator, CoordinatorOptions

    return Coordinator(
        options=CoordinatorOptions(
            name=config.run.name,
            num_steps=config.run.num_steps,
            has_engines=not is_supervised(config),
            max_wall_s=config.run.max_wall_s,
            stop_reward=config.run.stop_reward,
            eval_every=config.eval.every,
            eval_at_start=config.eval.at_start,
            eval_prompts=config.eval.num_prompts if config.eval.data else 0,
            eval_samples=config.eval.num_samples,
            eval_sampling=eval_sampling(config),
        ),
        clock=clock,
    )


def _buffer(spec: ActorSpec, config: RunConfig, run_dir: Path, clock: Clock) -> Actor:
    from ..actors.buffer import Buffer
    from ..actors.data.prompts import open_prompts
    from ..algos.staleness import Admission

    prompts = open_prompts(config)
    prompts.check_batch(config.algo.batch_size)
    return Buffer(
        source=prompts,
        ledger_path=run_dir / "ledger.sqlite",
        run=run_dir.name,
        admission=Admission(
            config.asynchrony.policy,
            max_staleness=config.asynchrony.max_staleness,
            batch_size=config.algo.batch_size,
            window=config.asynchrony.window,
        ),
        num_samples=config.rollout.num_samples,
        sampling=train_sampling(config),
        group_filter=_group_filter(config),
        resume_from=_earlier_ledger(config),
    )


def _resume_point(config: RunConfig) -> Path | None:
    """The checkpoint that the run goes on from, if any. Raises TrainError if there is none where it should be."""
    from ..actors.backends.torch_backend.checkpoint_folder import find_checkpoint

    return find_checkpoint(config.trainer.resume) if config.trainer.resume else None


def _earlier_ledger(config: RunConfig) -> Path | None:
    """The ledger beside that checkpoint: `<run>/checkpoints/<version>` lies in the run that wrote both."""
    checkpoint = _resume_point(config)
    return checkpoint.parent.parent / "ledger.sqlite" if checkpoint is not None else None


def _group_filter(config: RunConfig) -> Callable[[Group], str | None]:
    from ..actors.group_filter import load_group_filter

    return load_group_filter(config.algo.group_filter)


def _monitor(spec: ActorSpec, config: RunConfig, run_dir: Path, clock: Clock) -> Actor:
    from ..actors.monitor import Monitor
    from ..actors.sinks.registry import choose_sinks

    sinks = choose_sinks(
        tensorboard=config.monitor.tensorboard,
        prometheus_port=config.monitor.prometheus_port,
        trace=config.monitor.trace,
    )
    return Monitor(run_dir, sinks, run_name=config.run.name, clock=clock)


def _rollout(spec: ActorSpec, config: RunConfig, run_dir: Path, clock: Clock) -> Actor:
    from ..actors.models.hf_folder import read_config
    from ..actors.models.tokenizer import load_tokenizer
    from ..actors.rewarder import make_rewarder
    from ..actors.rollout import Rollout, RolloutOptions

    model = read_config(config.model.path)
    return Rollout(  # the engine last: it imports torch, and a mistake in the others is to be told at once
        workflow=_workflow(config),
        scorer=make_rewarder(config),
        tokenizer=load_tokenizer(config.model.path),
        engine=None if is_supervised(config) else _engine(spec, config, model),
        options=RolloutOptions(
            max_groups=config.rollout.max_groups,
            max_turns=config.rollout.max_turns,
            context_length=config.engine.context_length or model.context_length,
            workflow_timeout_s=config.rollout.timeout_s,
            max_error_rate=config.reward.max_error_rate,
        ),
        clock=clock,
    )


def _engine(spec: ActorSpec, config: RunConfig, model: ModelConfig) -> Engine:
    engine = config.engine
    if spec.kind == "sglang":
        from ..actors.engines.sglang import SglangEngine, SglangOptions

        return SglangEngine(
            engine.url,
            SglangOptions(
                vocab_size=model.vocab_size,
                context_length=engine.context_length,
                max_running=engine.max_running,
                pause_mode=config.rollout.pause_mode,
                name=spec.name,
            ),
        )
    from ..actors.engines.embedded.engine import EmbeddedEngine, EmbeddedOptions
    from ..actors.weights.channel import ChannelReader

    options = EmbeddedOptions(
        max_running=engine.max_running,
        context_length=engine.context_length,
        dtype=engine.dtype,
        seed=config.run.seed * 1000 + engine.seed + spec.index,
        pause_mode=config.rollout.pause_mode,
        num_threads=spec.threads,
        memory_share=0.6 / config.roles.rollout.count,
        name=spec.name,
    )
    return EmbeddedEngine(config.model.path, options, reader=ChannelReader())


def _workflow(config: RunConfig) -> Workflow:
    from ..actors.user_code import WORKFLOW, load_function
    from ..actors.workflows import demonstration, single_turn

    built_in: dict[str, Workflow] = {
        "single_turn": single_turn.generate,
        "demonstration": demonstration.generate,
    }
    name = config.rollout.workflow
    return built_in[name] if name in built_in else load_function(name, WORKFLOW).fn


def _trainer(spec: ActorSpec, config: RunConfig, run_dir: Path, clock: Clock) -> Actor:
    from ..actors.backends.torch_backend.backend import TorchBackend, TorchBackendConfig
    from ..actors.backends.torch_backend.world import Gang
    from ..actors.leader import LeaderOptions
    from ..actors.step_plan import PlanOptions
    from ..actors.trainer import Trainer, TrainerOptions

    gang = Gang.from_environment(os.environ)
    backend = TorchBackend(
        TorchBackendConfig(
            model_path=config.model.path,
            algo=config.algo,
            optimizer=config.optimizer,
            trainer=config.trainer,
            temperature=config.rollout.temperature or 1.0,
            max_new_tokens=config.rollout.max_new_tokens,
            num_steps=config.run.num_steps,
            seed=config.run.seed,
            device="cuda" if spec.devices else "cpu",
            num_threads=spec.threads,
            gang=gang,
        ),
        clock,
    )
    plan = PlanOptions(
        kind=config.algo.kind,
        normalise_std=config.algo.normalise_std,
        num_ranks=gang.world_size,
        max_tokens=config.trainer.max_tokens_per_microbatch,
        minibatches=config.algo.minibatches,
    )
    leader = LeaderOptions(
        world_size=gang.world_size,
        num_steps=config.run.num_steps,
        plan=plan,
        publishes=not is_supervised(config),
        run_dir=str(run_dir),
        checkpoint_every=config.trainer.checkpoint_every,
        keep_last=config.trainer.keep_last,
        export_at_end=config.trainer.export_at_end,
    )
    options = TrainerOptions(rank=gang.rank, leader=leader, resume=str(_resume_point(config) or ""))
    return Trainer(backend=backend, writer=_weight_writer(config, run_dir), options=options, clock=clock)


def _weight_writer(config: RunConfig, run_dir: Path) -> WeightWriter:
    """Shared memory for engines of this host that read it; folders for everything else."""
    from ..actors.weights.channel import make_writer

    reads_folders = config.roles.rollout.kind == "sglang"
    is_spread = config.roles.rollout.nodes == "*" or set(config.roles.rollout.nodes) != set(config.roles.trainer.nodes)
    return make_writer("disk" if reads_folders or is_spread else "shm", run_dir / "weights", Path(config.model.path))


_BUILDERS: dict[RoleName, Builder] = {
    "coordinator": _coordinator,
    "buffer": _buffer,
    "monitor": _monitor,
    "rollout": _rollout,
    "trainer": _trainer,
}
