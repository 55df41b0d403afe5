"""The whole run file as one record, and the checks that need more than one section."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pydantic import Field, model_validator

from .chaos import ChaosSettings
from .conflict import Conflict
from .control import ControlSettings
from .critic import CriticConfig
from .data import DataSettings, plain_conflicts
from .evaluation import EvalSettings
from .learning import AlgoConfig, AsyncSettings, OptimizerConfig, TrainerConfig
from .learning_checks import learning_conflicts
from .megatron import MegatronSettings
from .memory import MemorySettings
from .memory_checks import memory_conflicts
from .recorded_checks import RECORDED_DEFAULTS, recorded_conflicts
from .rewarding import RewardSettings
from .roles import RolesSettings, RolloutRole
from .sampling_checks import sampling_conflicts
from .section import Section
from .settings import (
    EngineSettings,
    GuardSettings,
    ModelSettings,
    MonitorSettings,
    RolloutSettings,
    RunSettings,
)
from .sglang import owned_conflicts
from .tables import Table, as_table
from .weights import ChannelName, WeightSettings

SFT_DEFAULTS = (
    ("rollout", "workflow", "demonstration"),
    ("rollout", "num_samples", 1),
)


class RunConfig(Section, frozen=True):
    """Everything a run needs to know. Made by `load_config`, or in Python; checked either way."""

    run: RunSettings = RunSettings()
    """Name, folder, seed, when it ends."""
    model: ModelSettings
    """The model that is trained."""
    data: DataSettings
    """The prompts that are trained on."""
    eval: EvalSettings = EvalSettings()
    """Evaluation on held-out prompts."""
    rollout: RolloutSettings = RolloutSettings()
    """How answers are generated."""
    reward: RewardSettings = RewardSettings()
    """How answers are judged."""
    algo: AlgoConfig = AlgoConfig()
    """Algorithm and batch."""
    critic: CriticConfig = CriticConfig()
    """A value model for PPO."""
    asynchrony: AsyncSettings = Field(default=AsyncSettings(), alias="async")
    """How far generation may run ahead of training."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW and its schedule."""
    trainer: TrainerConfig = TrainerConfig()
    """The training processes."""
    megatron: MegatronSettings = MegatronSettings()
    """The Megatron trainer, if `roles.trainer.kind` is that."""
    engine: EngineSettings = EngineSettings()
    """The rollout engine."""
    sglang: Table = {}
    """Arguments of launched SGLang servers, by the names of its ServerArgs fields."""
    weights: WeightSettings = WeightSettings()
    """The way of new weights to the engines."""
    memory: MemorySettings = MemorySettings()
    """Trainer and engine on the same devices."""
    guard: GuardSettings = GuardSettings()
    """Comparison of engine and trainer."""
    monitor: MonitorSettings = MonitorSettings()
    """Metrics, events, traces."""
    control: ControlSettings = ControlSettings()
    """Watching and changing a run that goes on."""
    chaos: ChaosSettings = ChaosSettings()
    """Faults on purpose."""
    roles: RolesSettings = RolesSettings()
    """Which actors run where."""

    def data_files(self) -> Iterator[tuple[str, str | tuple[str, ...]]]:
        """Every key that names data files, and what it says."""
        for name, part in self.data.parts().items():
            yield self.data.key_of(name), part.train
        yield from self.eval.files().values()

    @model_validator(mode="before")
    @classmethod
    def _fill_by_kind(cls, raw: object) -> object:
        """SFT has one sample per prompt and no use for a filter, recorded answers have an order and no use for a
        canary: values left out become that, not the defaults of RL with an engine that generates."""
        table = as_table(raw)
        if table is None:
            return raw
        filled = dict(table)
        for section, key, value in (
            *(SFT_DEFAULTS if _kind_is_sft(table.get("algo")) else ()),
            *(RECORDED_DEFAULTS if _are_recorded(table.get("roles")) else ()),
        ):
            below = as_table(filled.get(section, {}))
            if below is not None and key not in below:
                filled[section] = {**below, key: value}
        return filled

    def conflicts(self) -> Iterator[Conflict]:
        """Conflicts between sections."""
        for check in CHECKS:
            yield from check(self)


def _kind_is_sft(algo: object) -> bool:
    table = as_table(algo)
    return table.get("kind") == "sft" if table is not None else isinstance(algo, AlgoConfig) and algo.kind == "sft"


def _are_recorded(roles: object) -> bool:
    if isinstance(roles, RolesSettings):
        return roles.rollout.kind == "recorded"
    rollout = (as_table(roles) or {}).get("rollout")
    table = as_table(rollout)
    return (
        table.get("kind") == "recorded"
        if table is not None
        else isinstance(rollout, RolloutRole) and rollout.kind == "recorded"
    )


def _standby_conflicts(config: RunConfig) -> Iterator[Conflict]:
    nodes = config.roles.trainer.nodes
    if config.trainer.standby_every and (nodes == "*" or len(nodes) != 1):
        yield Conflict(
            ("trainer.standby_every", "roles.trainer.nodes"),
            "needs all ranks on one node, in whose memory the state is kept; use checkpoints on a shared disk",
        )


def _eval_conflicts(config: RunConfig) -> Iterator[Conflict]:
    for key in ("data", "sets") if config.algo.kind == "sft" else ():
        if getattr(config.eval, key):
            yield Conflict(
                (f"eval.{key}", "algo.kind"),
                'must be empty: algo.kind = "sft" has no engine that would answer; evaluate what was exported',
            )
    if config.eval.every and not config.eval.has_prompts:
        yield Conflict(("eval.every", "eval.data"), "needs eval.data, the held-out prompts")
    if config.run.stop_reward and not (config.eval.has_prompts and config.eval.every):
        yield Conflict(
            ("run.stop_reward", "eval.data", "eval.every"),
            "needs evaluation: set eval.data and eval.every",
        )
    yield from _plain_eval_conflicts(config)
    limit = config.engine.context_length
    for name, one in config.eval.sets.items():
        if limit and one.max_new_tokens >= limit:
            yield Conflict(
                (f"eval.sets.{name}.max_new_tokens", "engine.context_length"),
                f"leaves no room for a prompt in engine.context_length = {limit}",
            )


def _plain_eval_conflicts(config: RunConfig) -> Iterator[Conflict]:
    """As of the sources of `[data]`, whose rows are written like these."""
    for name, one in config.eval.sets.items() if not config.data.apply_chat_template else ():
        yield from plain_conflicts(one, f"eval.sets.{name}.", "data.apply_chat_template")


def _end_conflicts(config: RunConfig) -> Iterator[Conflict]:
    decays = config.optimizer.schedule != "constant"
    if config.run.num_steps == 0:
        if decays and config.optimizer.decay_steps == 0:
            yield Conflict(
                ("optimizer.decay_steps", "run.num_steps", "optimizer.schedule"),
                f'must be set: run.num_steps = 0 does not say where schedule = "{config.optimizer.schedule}" ends',
            )
        return
    updates = (config.run.num_steps - config.critic.warmup_steps) * config.algo.minibatches
    if not decays or config.optimizer.decay_steps:
        return
    if config.optimizer.warmup_steps >= updates:
        yield Conflict(
            ("optimizer.warmup_steps", "run.num_steps", "algo.minibatches"),
            f"is as long as the whole run of {updates} optimizer updates",
        )
    elif config.optimizer.warmup_steps + config.optimizer.wsd_decay_steps > updates:
        yield Conflict(
            ("optimizer.wsd_decay_steps", "optimizer.warmup_steps", "run.num_steps", "algo.minibatches"),
            f"and optimizer.warmup_steps are longer than the whole run of {updates} optimizer updates",
        )


def _engine_conflicts(config: RunConfig) -> Iterator[Conflict]:
    is_sglang = config.roles.rollout.kind == "sglang"
    yield from owned_conflicts(config.sglang)
    if config.engine.attach and not is_sglang:
        yield Conflict(("roles.rollout.kind", "engine.attach"), 'must be "sglang" when engine.attach is set')
    if config.sglang and (config.engine.attach or not is_sglang):
        yield Conflict(
            ("sglang", "engine.attach", "roles.rollout.kind"),
            'is for servers that are launched: roles.rollout.kind = "sglang" without engine.attach',
        )
    if config.engine.attach and config.roles.rollout.nodes == "*":
        yield Conflict(("roles.rollout.nodes", "engine.attach"), "must name the nodes when engine.attach is set")
    elif config.engine.attach:
        num_actors = config.roles.rollout.count * len(config.roles.rollout.nodes)
        if num_actors > len(config.engine.attach):
            yield Conflict(
                ("engine.attach", "roles.rollout.count"),
                f"names {len(config.engine.attach)} servers for {num_actors} rollout actors; each needs its own",
            )
    limit = config.engine.context_length
    if limit and config.rollout.max_new_tokens >= limit:
        yield Conflict(
            ("rollout.max_new_tokens", "engine.context_length"),
            f"leaves no room for a prompt in engine.context_length = {limit}",
        )


def _window_conflicts(config: RunConfig) -> Iterator[Conflict]:
    # lag <= (N + W - 2) // B with N >= B slots, so W = eta * B + 1 is the widest window that any N allows.
    limit = config.asynchrony.max_staleness * config.algo.batch_size + 1
    if config.asynchrony.policy == "pace" and config.asynchrony.window > limit:
        yield Conflict(
            ("async.window", "async.max_staleness", "algo.batch_size", "async.policy"),
            f"must be at most max_staleness * batch_size + 1 = {limit}: a wider window cannot keep the bound",
        )


def _device_conflicts(config: RunConfig) -> Iterator[Conflict]:
    trainer = config.roles.trainer
    if trainer.device_ids and len(trainer.device_ids) < trainer.count:
        yield Conflict(
            ("roles.trainer.devices", "roles.trainer.count"),
            f"names {len(trainer.device_ids)} GPUs for {trainer.count} ranks on each node; every rank needs its own",
        )
    if config.roles.rollout.kind == "embedded" and config.roles.rollout.device_ids:
        yield Conflict(
            ("roles.rollout.devices", "roles.rollout.kind"), 'must be "cpu": the embedded engine runs on the CPU'
        )


def _megatron_conflicts(config: RunConfig) -> Iterator[Conflict]:
    settings, trainer = config.megatron, config.roles.trainer
    if trainer.kind != "megatron":
        if settings != MegatronSettings():
            yield Conflict(("roles.trainer.kind", "megatron"), 'must be "megatron" for the table [megatron] to matter')
        return
    if config.trainer.strategy != "ddp":
        yield Conflict(
            ("trainer.strategy", "roles.trainer.kind"),
            "is the torch trainer's; megatron.distributed_optimizer splits optimizer state",
        )
    if config.trainer.freeze:
        yield Conflict(
            ("trainer.freeze", "roles.trainer.kind"), "is the torch trainer's: Megatron trains all parameters"
        )
    if settings.offload_optimizer and config.trainer.dtype != "bfloat16":
        yield Conflict(
            ("megatron.offload_optimizer", "trainer.dtype"), 'needs trainer.dtype = "bfloat16" and its float32 masters'
        )
    is_saved = config.trainer.checkpoint_every or config.trainer.standby_every
    if settings.offload_optimizer and (is_saved or config.trainer.resume):
        yield Conflict(
            ("megatron.offload_optimizer", "trainer.checkpoint_every", "trainer.standby_every", "trainer.resume"),
            "does not go with checkpoints yet",
        )
    if trainer.nodes == "*":
        return
    num_ranks = trainer.count * len(trainer.nodes)
    for keys, size in (
        (("tp", "pp", "cp"), settings.tp * settings.pp * settings.cp),
        (("etp", "ep", "pp"), settings.etp * settings.ep * settings.pp),
    ):
        if num_ranks % size:
            paths = ("roles.trainer.count", *(f"megatron.{key}" for key in keys))
            yield Conflict(paths, f"gives {num_ranks} ranks, which {' * '.join(keys)} = {size} does not divide")


def _weight_conflicts(config: RunConfig) -> Iterator[Conflict]:
    channel, rollout, trainer = config.weights.channel, config.roles.rollout, config.roles.trainer
    path = "weights.channel"
    between_devices = channel in ("nccl", "cuda_ipc")
    if rollout.kind != "sglang" and between_devices:
        yield Conflict((path, "roles.rollout.kind"), f'is for servers: {rollout.kind} engines take "shm" or "disk"')
    if rollout.kind == "sglang" and channel == "shm":
        yield Conflict((path, "roles.rollout.kind"), 'is not for servers: they take "nccl", "cuda_ipc" or "disk"')
    if (
        channel == "shm"
        and rollout.kind != "recorded"
        and (rollout.nodes == "*" or set(rollout.nodes) != set(trainer.nodes))
    ):
        yield Conflict((path, "roles.rollout.nodes", "roles.trainer.nodes"), "needs both roles on the same nodes")
    if channel == "cuda_ipc":
        yield from _handle_conflicts(config, path)
    shared = set(rollout.device_ids) & set(trainer.device_ids)
    if channel == "nccl" and shared and rollout.nodes == trainer.nodes:
        yield Conflict(
            (path, "roles.rollout.devices", "roles.trainer.devices"),
            f'cannot join two processes on GPU {min(shared)}; use "cuda_ipc"',
        )


def _handle_conflicts(config: RunConfig, path: str) -> Iterator[Conflict]:
    """A handle is opened on the GPU that its memory lies on: a copy to another one's paused memory is refused there."""
    rollout, trainer = config.roles.rollout, config.roles.trainer
    if not trainer.device_ids:
        yield Conflict((path, "roles.trainer.devices"), "shares memory of the trainer's GPUs, and it names none")
        return
    if not rollout.device_ids and (trainer.count > 1 or trainer.nodes != rollout.nodes):
        yield Conflict(
            (path, "roles.rollout.devices"), "hands each engine memory of its own GPU: name the GPUs of the engines"
        )
    if lone := sorted(set(rollout.device_ids) - set(trainer.rank_devices)):
        yield Conflict(
            (path, "roles.rollout.devices", "roles.trainer.devices"),
            f"hands each engine memory of its own GPU, and GPU {lone[0]} has an engine but no trainer rank; "
            'give it one, or use "disk", or "nccl" with engines on GPUs of their own',
        )
    sizes = ("pp_size",) if config.sglang.get("enable_dp_attention") else ("pp_size", "dp_size")
    for size in sizes:
        if config.sglang.get(size, 1) not in (0, 1):
            yield Conflict(
                (path, f"sglang.{size}"), "hands memory to each tensor-parallel rank of a server, and it has others"
            )
    if rollout.device_ids and rollout.nodes != trainer.nodes:
        yield Conflict(
            (path, "roles.rollout.nodes", "roles.trainer.nodes"),
            "hands each engine memory of its own GPU: both roles must be on the same nodes",
        )


def channel_conflicts(config: RunConfig, channel: ChannelName) -> Iterator[Conflict]:
    """What would be in the way of another `weights.channel` in this run."""
    weights = config.weights.model_copy(update={"channel": channel})
    return _weight_conflicts(config.model_copy(update={"weights": weights}))


def _chaos_conflicts(config: RunConfig) -> Iterator[Conflict]:
    if config.chaos.every_s and not config.control.socket:
        yield Conflict(("control.socket", "chaos.every_s"), "must be true where random faults are wanted")
    if not config.chaos.is_empty and not config.run.chaos:
        yield Conflict(("run.chaos", "chaos"), "must be true: the table [chaos] makes processes of this run fail")


def _bounded_data_conflicts(config: RunConfig) -> Iterator[Conflict]:
    endless = config.run.num_steps == 0 and config.run.max_wall_s == 0 and config.run.stop_reward == 0
    if endless and any(part.max_passes == 0 for part in config.data.parts().values()):
        yield Conflict(
            ("run.num_steps", "run.max_wall_s", "data.max_passes"),
            "makes a run that never ends: set it, run.max_wall_s, run.stop_reward or data.max_passes",
        )


CHECKS: tuple[Callable[[RunConfig], Iterator[Conflict]], ...] = (
    learning_conflicts,
    _standby_conflicts,
    _eval_conflicts,
    _end_conflicts,
    _engine_conflicts,
    sampling_conflicts,
    _window_conflicts,
    _device_conflicts,
    _megatron_conflicts,
    _weight_conflicts,
    memory_conflicts,
    recorded_conflicts,
    _chaos_conflicts,
    _bounded_data_conflicts,
)
