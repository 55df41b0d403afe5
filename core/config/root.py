"""The whole run file as one record, and the checks that need more than one section.

`CHECKS` lists them: learning (algorithm, data, rewards, reference, critic), ends and evaluation, engines and sampling,
devices, Megatron, weight channels, memory that trainer and engine share in turns, recorded answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from pydantic import Field, model_validator

from .data import DataSettings, plain_conflicts
from .evaluation import EvalSettings
from .learning import (
    RECORDED_REFERENCE,
    AlgoConfig,
    AsyncSettings,
    CriticConfig,
    MegatronSettings,
    OptimizerConfig,
    TrainerConfig,
)
from .reward import RewardSettings
from .roles import MemorySettings, RolesSettings, RolloutRole
from .rollout import WORKFLOW_BUILTINS, ChannelName, EngineSettings, RolloutSettings, WeightSettings, owned_conflicts
from .run import ControlSettings, GuardSettings, ModelSettings, MonitorSettings, RunSettings
from .section import Conflict, Section, Table, as_table

SFT_DEFAULTS = (
    ("rollout", "workflow", "demonstration"),
    ("rollout", "num_samples", 1),
)


RECORDED_DEFAULTS = (
    ("data", "preset", "recorded"),
    ("data", "shuffle", False),
    ("guard", "every", 0),
)
"""Defaults of a run of recorded answers: the dump's groups in its order, and no canary, which could not hold."""


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
    """Watching and changing a live run."""
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


def _sft_conflicts(config: RunConfig) -> Iterator[Conflict]:
    learns = config.algo.kind == "sft"
    shows = config.rollout.workflow == "demonstration"
    if learns and not shows:
        yield Conflict(
            ("rollout.workflow", "algo.kind"),
            'must be "demonstration": algo.kind = "sft" learns from demonstrations',
        )
    if shows and not learns:
        yield Conflict(
            ("algo.kind", "rollout.workflow"),
            'must be "sft": rollout.workflow = "demonstration" gives every sample the same reward',
        )
    for name, part in config.data.parts().items() if learns else ():
        if part.preset != "chat" and not part.answer_key:
            place = f"data.sources.{name}" if name else "data"
            yield Conflict(
                (f"{place}.answer_key", f"{place}.preset", "algo.kind"),
                'algo.kind = "sft" needs demonstrations: name their column here, or use preset = "chat"',
            )
    if learns and config.data.difficulty_low != config.data.difficulty_high:
        yield Conflict(
            ("data.difficulty_high", "data.difficulty_low", "algo.kind"),
            'must be equal to data.difficulty_low: algo.kind = "sft" has no rewards to judge prompts by',
        )
    if learns and config.rollout.num_samples != 1:
        yield Conflict(
            ("rollout.num_samples", "algo.kind"), 'must be 1: algo.kind = "sft" has one demonstration per prompt'
        )


def _workflow_conflicts(config: RunConfig) -> Iterator[Conflict]:
    if config.algo.kind == "sft" or config.rollout.workflow not in WORKFLOW_BUILTINS:
        return
    for key, fn in (*config.reward.named_functions(), *config.eval.named_functions()):
        if fn == "workflow":
            yield Conflict(
                (key, "rollout.workflow"),
                f'needs a workflow of your own: rollout.workflow = "{config.rollout.workflow}" says no reward',
            )


def _reference_conflicts(config: RunConfig) -> Iterator[Conflict]:
    """Checked here, because a run that began with a KL term may continue without it."""
    if config.algo.ref_path and not config.algo.kl_coef:
        yield Conflict(
            ("algo.ref_path", "algo.kl_coef"), "needs algo.kl_coef above 0: without it no reference model is kept"
        )
    if not config.algo.ref_urls:
        return
    if not config.algo.kl_coef:
        yield Conflict(
            ("algo.ref_urls", "algo.kl_coef"), "needs algo.kl_coef above 0: without it the reference is not used"
        )
    if config.algo.kind != "sft" and config.rollout.temperature != 1:
        yield Conflict(
            ("rollout.temperature", "algo.ref_urls"),
            "must be 1: the trainer scores samples at the temperature that they were drawn at, and servers give "
            "log-probs of given tokens at temperature 1 only; or use algo.ref_path",
        )
    if config.algo.ref_urls == RECORDED_REFERENCE and config.roles.rollout.kind != "recorded":
        yield Conflict(
            ("algo.ref_urls", "roles.rollout.kind"),
            'needs roles.rollout.kind = "recorded": log-probs are recorded of those answers only',
        )


def _critic_conflicts(config: RunConfig) -> Iterator[Conflict]:
    critic, steps = config.critic, config.run.num_steps
    if not critic.enabled:
        if critic != CriticConfig():
            yield Conflict(("critic.enabled", "critic"), "must be true for the table [critic] to matter")
        return
    if config.algo.kind != "ppo":
        yield Conflict(
            ("critic.enabled", "algo.kind"),
            f'is for algo.kind = "ppo": algo.kind = "{config.algo.kind}" takes advantages without values',
        )
    if config.roles.trainer.kind != "torch":
        yield Conflict(
            ("critic.enabled", "roles.trainer.kind"),
            "is the torch trainer's: Megatron's has no value model; use roles.trainer.kind = \"torch\"",
        )
    if 0 < steps <= critic.warmup_steps:
        yield Conflict(
            ("critic.warmup_steps", "run.num_steps"),
            f"is as long as the whole run of {steps} steps: the policy would never be trained",
        )


def _exploration_conflicts(config: RunConfig) -> Iterator[Conflict]:
    if config.algo.kind == "sft":
        return
    if config.rollout.temperature == 0:
        yield Conflict(
            ("rollout.temperature", "algo.kind"),
            f'gives identical samples, from which algo.kind = "{config.algo.kind}" learns nothing; use 1.0',
        )
    if config.algo.needs_groups and config.rollout.num_samples < 2:
        yield Conflict(
            ("rollout.num_samples", "algo.kind"),
            f'must be at least 2: algo.kind = "{config.algo.kind}" compares the samples of a group',
        )
    elif config.rollout.num_samples < 2 and config.algo.group_filter == "zero_variance":
        yield Conflict(
            ("algo.group_filter", "rollout.num_samples"),
            'would leave out every group of one sample; use "none"',
        )


SHARE = "memory.share"


def _memory_conflicts(config: RunConfig) -> Iterator[Conflict]:
    """Everything in the run file that does not go with taking turns."""
    if config.memory.share == "none" or config.roles.rollout.kind == "recorded":  # which has no memory at all
        return
    yield from _turn_place_conflicts(config)
    yield from _turn_engine_conflicts(config)
    yield from _turn_trainer_conflicts(config)
    if config.roles.trainer.device_ids:
        yield from _turn_gpu_conflicts(config)
    else:
        yield from _turn_host_conflicts(config)


def _turn_place_conflicts(config: RunConfig) -> Iterator[Conflict]:
    trainer, rollout = config.roles.trainer, config.roles.rollout
    if config.algo.kind == "sft":
        yield Conflict((SHARE, "algo.kind"), 'must be "none": algo.kind = "sft" has no engine to take turns with')
    if not _are_shared(trainer.device_ids, rollout.device_ids):
        yield Conflict(
            (SHARE, "roles.trainer.devices", "roles.rollout.devices"),
            f'needs engines on devices that the trainer has, they have "{trainer.devices}" (trainer) and '
            f'"{rollout.devices}" (rollout): set both alike, or give rollout some of the trainer\'s',
        )
    nodes = config.roles.memory.nodes
    if nodes == "*" or any(role.nodes != nodes for role in (trainer, rollout)):
        yield Conflict(
            (SHARE, "roles.trainer.nodes", "roles.rollout.nodes", "roles.memory.nodes"),
            "needs trainer, rollout and memory manager on the same nodes, all of them named: set their nodes alike",
        )
    elif len(nodes) > 1 and config.weights.channel != "disk":
        yield Conflict(
            ("weights.channel", SHARE, "roles.rollout.nodes"),
            'must be "disk" when trainer and engines take turns on several nodes (with the run directory on a file '
            "system of all): shm and cuda_ipc do not leave the node of the rank that sends",
        )
    if config.weights.channel == "nccl":
        yield Conflict(
            ("weights.channel", SHARE),
            'must be "cuda_ipc" ("shm" on the CPU) or "disk" when trainer and engine take turns on a device',
        )


def _are_shared(trainers: Sequence[int], engines: Sequence[int]) -> bool:
    """Devices of the trainer alone are idle in the engines' turn; devices of an engine alone would in the trainer's,
    and need no lease then."""
    return bool(engines) == bool(trainers) and set(engines) <= set(trainers)


def _turn_engine_conflicts(config: RunConfig) -> Iterator[Conflict]:
    attach, rollout = config.engine.attach, config.roles.rollout
    if len(attach) > rollout.count or config.engine.router:
        yield Conflict(
            ("engine.attach", "engine.router", SHARE),
            "must be one server for each rollout actor when trainer and engine take turns on a device: name as many in "
            "engine.attach as roles.rollout.count says, without engine.router",
        )
    if "enable_memory_saver" in config.sglang:
        yield Conflict(
            ("sglang.enable_memory_saver", SHARE),
            'is myxa\'s own; leave it out, memory.share = "switch" sets it',
        )


def _turn_trainer_conflicts(config: RunConfig) -> Iterator[Conflict]:
    if config.roles.trainer.kind == "torch" and config.trainer.strategy != "ddp":
        yield Conflict(
            ("trainer.strategy", SHARE),
            'must be "ddp": sharded parameters of the torch trainer cannot leave a device; '
            'or use roles.trainer.kind = "megatron"',
        )
    if config.roles.trainer.kind == "torch" and config.memory.params == "rematerialise":
        yield Conflict(
            ("memory.params", "roles.trainer.kind"),
            'must be "backup": parameters of the torch trainer are the float32 masters themselves',
        )
    if config.roles.trainer.kind == "torch" and config.memory.backend == "torch_memory_saver":
        yield Conflict(("memory.backend", "roles.trainer.kind"), 'is for roles.trainer.kind = "megatron"; use "auto"')
    has_masters = config.trainer.dtype == "bfloat16" and config.megatron.distributed_optimizer
    if config.roles.trainer.kind == "megatron" and config.memory.params == "rematerialise" and not has_masters:
        yield Conflict(
            ("memory.params", "trainer.dtype", "megatron.distributed_optimizer"),
            'needs trainer.dtype = "bfloat16" and megatron.distributed_optimizer: there are no float32 masters else; '
            'use "auto"',
        )
    if config.megatron.offload_optimizer:
        yield Conflict(
            ("megatron.offload_optimizer", SHARE),
            "must be 0: the optimizer leaves the device as a whole between steps",
        )


def _turn_gpu_conflicts(config: RunConfig) -> Iterator[Conflict]:
    trainer = config.roles.trainer
    if len(trainer.device_ids) != trainer.count:
        yield Conflict(
            ("roles.trainer.count", "roles.trainer.devices", SHARE),
            f"must be {len(trainer.device_ids)}, one rank for each GPU: memory of a GPU without a rank is in no turn",
        )
    if config.memory.backend == "host_vmm":
        yield Conflict(("memory.backend", "roles.trainer.devices"), 'is for runs on the CPU; use "auto"')
    if not config.memory.workspace_mb:
        yield Conflict(
            ("memory.workspace_mb", SHARE),
            "must be set on GPUs: MiB that a step's activations take, e.g. 3072 for every 1024 of "
            "trainer.max_tokens_per_microbatch (1.7B, no recomputation)",
        )
    launches = config.roles.rollout.kind == "sglang" and not config.engine.attach
    if launches and "mem_fraction_static" not in config.sglang:
        yield Conflict(
            ("sglang.mem_fraction_static", SHARE),
            "must be set, e.g. 0.85: the share of the GPU that weights and cache take in the engine's turn",
        )


def _turn_host_conflicts(config: RunConfig) -> Iterator[Conflict]:
    if config.roles.trainer.kind == "megatron":
        yield Conflict(
            (SHARE, "roles.trainer.kind", "roles.trainer.devices"),
            'needs GPUs in roles.trainer.devices, or roles.trainer.kind = "torch" on the CPU',
        )
    if config.roles.rollout.kind != "embedded":
        yield Conflict(
            (SHARE, "roles.rollout.kind", "roles.rollout.devices"),
            'needs roles.rollout.kind = "embedded" on the CPU, or GPUs for both roles',
        )
    if config.memory.backend not in ("auto", "host_vmm"):
        yield Conflict(
            ("memory.backend", "roles.trainer.devices"),
            'needs GPUs in roles.trainer.devices; use "auto"',
        )
    trainer, rollout, num_devices = config.roles.trainer, config.roles.rollout, config.memory.host_devices
    for name, count in (("trainer", trainer.count), ("rollout", rollout.count)):
        if count % num_devices and num_devices % count:
            yield Conflict(
                ("memory.host_devices", f"roles.{name}.count"),
                f"cannot be dealt out among {count} actors: set it to a divisor or a multiple",
            )
    if trainer.count < num_devices:
        yield Conflict(
            ("memory.host_devices", "roles.trainer.count"),
            f"gives {num_devices} devices to {trainer.count} trainer ranks, each of which uses one: lower it",
        )
    if not config.memory.capacity_mb:
        yield Conflict(
            ("memory.capacity_mb", SHARE), "must be set on the CPU: MiB of the host memory that is used as a device"
        )


ENGINE = "roles.rollout.kind"


def _recorded_conflicts(config: RunConfig) -> Iterator[Conflict]:
    """What needs an engine that generates, and what needs one that does not."""
    if config.roles.rollout.kind != "recorded":
        return
    if config.algo.kind == "sft":
        yield Conflict((ENGINE, "algo.kind"), 'is an engine, and algo.kind = "sft" has none: leave it out')
    for name, part in config.data.parts().items():
        if part.preset != "recorded":
            place = f"data.sources.{name}.preset" if name else "data.preset"
            yield Conflict((place, ENGINE), 'must be "recorded": only prompts of a dump have an answer there')
    for key in ("data", "sets"):
        if getattr(config.eval, key):
            yield Conflict((f"eval.{key}", ENGINE), "must be empty: to held-out prompts no answers are recorded")
    if config.guard.every:
        yield Conflict(
            ("guard.every", ENGINE),
            "must be 0: recorded log-probs are of the weights of then, and the trainer's of those of now",
        )
    if config.memory.share != "none":
        yield Conflict(("memory.share", ENGINE), 'must be "none": an engine without a model has no turn')
    if config.roles.rollout.device_ids:
        yield Conflict(("roles.rollout.devices", ENGINE), 'must be "cpu": nothing is generated')


def _recorded_reward_conflicts(config: RunConfig) -> Iterator[Conflict]:
    for key, fn in config.reward.named_functions():
        if fn != "recorded":
            continue
        if config.roles.rollout.kind != "recorded":
            yield Conflict((key, ENGINE), f'needs {ENGINE} = "recorded": rewards are recorded of those answers only')
        for more, is_set in (
            ("truncated", config.reward.truncated != "score"),
            ("overlong_tokens", config.reward.overlong_tokens > 0),
        ):
            if is_set:
                yield Conflict((f"reward.{more}", key), "is for rewards that are computed in this run: leave it out")


def _sampling_conflicts(config: RunConfig) -> Iterator[Conflict]:
    """Seeds need servers that draw by them, and those cannot cut by min-p."""
    rollout, is_sglang = config.rollout, config.roles.rollout.kind == "sglang"
    if config.algo.kind == "sft" or not is_sglang:
        return
    draws_by_seed = config.sglang.get("enable_deterministic_inference") is True
    if rollout.deterministic and not config.engine.attach and not draws_by_seed:
        yield Conflict(
            ("rollout.deterministic", "sglang.enable_deterministic_inference"),
            "needs sglang.enable_deterministic_inference = true: SGLang does not look at requests' seeds without",
        )
    if rollout.min_p and (rollout.deterministic or draws_by_seed):
        yield Conflict(
            ("rollout.min_p", "rollout.deterministic", "sglang.enable_deterministic_inference"),
            "must be 0 with seeds: SGLang's sampler ends the server when it is to do both; use top_p or top_k",
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
            (path, "roles.rollout.devices"), "hands each engine memory of its GPU: name the GPUs of the engines"
        )
    if lone := sorted(set(rollout.device_ids) - set(trainer.rank_devices)):
        yield Conflict(
            (path, "roles.rollout.devices", "roles.trainer.devices"),
            f"hands each engine memory of its GPU, and GPU {lone[0]} has an engine but no trainer rank; "
            'give it one, or use "disk", or "nccl" with engines on other GPUs',
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
            "hands each engine memory of its GPU: both roles must be on the same nodes",
        )


def channel_conflicts(config: RunConfig, channel: ChannelName) -> Iterator[Conflict]:
    """What would be in the way of another `weights.channel` in this run."""
    weights = config.weights.model_copy(update={"channel": channel})
    return _weight_conflicts(config.model_copy(update={"weights": weights}))


def _bounded_data_conflicts(config: RunConfig) -> Iterator[Conflict]:
    endless = config.run.num_steps == 0 and config.run.max_wall_s == 0 and config.run.stop_reward == 0
    if endless and any(part.max_passes == 0 for part in config.data.parts().values()):
        yield Conflict(
            ("run.num_steps", "run.max_wall_s", "data.max_passes"),
            "makes a run that never ends: set it, run.max_wall_s, run.stop_reward or data.max_passes",
        )


CHECKS: tuple[Callable[[RunConfig], Iterator[Conflict]], ...] = (
    _sft_conflicts,
    _workflow_conflicts,
    _reference_conflicts,
    _critic_conflicts,
    _exploration_conflicts,
    _standby_conflicts,
    _eval_conflicts,
    _end_conflicts,
    _engine_conflicts,
    _sampling_conflicts,
    _window_conflicts,
    _device_conflicts,
    _megatron_conflicts,
    _weight_conflicts,
    _memory_conflicts,
    _recorded_reward_conflicts,
    _recorded_conflicts,
    _bounded_data_conflicts,
)
