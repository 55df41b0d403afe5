"""The whole run file as one record, and the checks that need more than one section (`CHECKS`)."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping

from pydantic import Field, model_validator

from ..suggestion import nearest
from .data import SOURCE_NAME, DataSettings, EvalSettings, JudgeSettings, RewardSettings, parse_sources, plain_conflicts
from .learning import (
    AlgoConfig,
    AsyncSettings,
    CriticConfig,
    MegatronSettings,
    OptimizerConfig,
    TrainerConfig,
)
from .run import (
    AGENT_WORKFLOW,
    ENVIRONMENT_WORKFLOW,
    KINDS_WITH_ROWS,
    POLICY,
    WORKFLOW_BUILTINS,
    AgentSettings,
    ChannelName,
    ControlSettings,
    EngineSettings,
    EnvironmentSettings,
    FrozenModelSettings,
    GatewayRole,
    GatewaySettings,
    GuardSettings,
    MemorySettings,
    ModelSettings,
    MonitorSettings,
    RolesSettings,
    RolloutSettings,
    RunSettings,
    WeightSettings,
    owned_conflicts,
)
from .section import Conflict, Section, Table, as_table, clashes

SFT_DEFAULTS = {"rollout": {"workflow": "demonstration", "num_samples": 1}}


class RunConfig(Section, frozen=True):
    """Everything a run needs to know. Made by `load_config`, or in Python; checked either way."""

    run: RunSettings = RunSettings()
    model: ModelSettings
    data: DataSettings
    eval: EvalSettings = EvalSettings()
    rollout: RolloutSettings = RolloutSettings()
    agent: AgentSettings = AgentSettings()
    gateway: GatewaySettings = GatewaySettings()
    environments: dict[str, EnvironmentSettings] = {}
    """Where rollouts take place, each a table `[environments.NAME]`. A row's metadata `environment` chooses."""
    reward: RewardSettings = RewardSettings()
    judge: JudgeSettings = JudgeSettings()
    algo: AlgoConfig = AlgoConfig()
    critic: CriticConfig = CriticConfig()
    asynchrony: AsyncSettings = Field(default=AsyncSettings(), alias="async")
    optimizer: OptimizerConfig = OptimizerConfig()
    trainer: TrainerConfig = TrainerConfig()
    megatron: MegatronSettings = MegatronSettings()
    engine: EngineSettings = EngineSettings()
    sglang: Table = {}
    """Arguments of launched SGLang servers, by the names of its ServerArgs fields."""
    models: dict[str, FrozenModelSettings] = {}
    """Models of the run's own beside the policy, each a table `[models.NAME]`: see there."""
    weights: WeightSettings = WeightSettings()
    memory: MemorySettings = MemorySettings()
    guard: GuardSettings = GuardSettings()
    monitor: MonitorSettings = MonitorSettings()
    control: ControlSettings = ControlSettings()
    roles: RolesSettings = RolesSettings()

    def data_files(self) -> Iterator[tuple[str, str | tuple[str, ...]]]:
        """Every key that names data files, and what it says."""
        for name, part in self.data.parts().items():
            yield self.data.key_of(name), part.train
        yield from self.eval.files().values()

    def of_model(self, name: str) -> RunConfig:
        """A run whose policy is that of `[models.NAME]`: for what serves it, and for checks."""
        one, rollout = self.models[name], self.rollout
        sampling = RolloutSettings(
            temperature=one.temperature, max_new_tokens=one.max_new_tokens, deterministic=rollout.deterministic
        )
        template = {"apply_chat_template": True, "chat_template_kwargs": one.chat_template_kwargs}
        # With the policy's seed a copy of it would say what it says.
        seed = self.run.seed + 1 + zlib.crc32(name.encode()) % 100_000
        return self.model_copy(update={
            "run": self.run.model_copy(update={"seed": seed}), "model": ModelSettings(path=one.path),
            "engine": one.engine, "sglang": one.sglang, "rollout": sampling,
            "roles": self.roles.model_copy(update={"rollout": one}), "weights": WeightSettings(channel="disk"),
            "data": self.data.model_copy(update=template), "eval": EvalSettings(), "memory": MemorySettings(),
        })  # fmt: skip

    def named_rewards(self) -> Iterator[tuple[str, str]]:
        """Every key that names a reward function, and what it says."""
        yield from self.reward.named_functions()
        yield from self.eval.named_functions()

    @model_validator(mode="before")
    @classmethod
    def _fill_by_kind(cls, raw: object) -> object:
        """SFT has one sample per prompt and no use for a filter: values left out become that, not the defaults of RL
        with an engine that generates."""
        table = as_table(raw)
        if table is None or _algo_kind(table) != "sft":
            return raw
        filled = dict(table)
        for section, values in SFT_DEFAULTS.items():
            below = as_table(filled.get(section, {}))
            if below is not None:
                filled[section] = {**values, **below}
        return filled

    @property
    def generates(self) -> bool:
        """Otherwise samples are demonstrations or recorded: no engine takes part, no weights travel."""
        return self.algo.kind != "sft" and not self.data.is_recorded

    def conflicts(self) -> Iterator[Conflict]:
        """Conflicts between sections."""
        for check in CHECKS:
            yield from check(self)


def _algo_kind(table: Mapping[str, object]) -> object:
    """Of a section that is a table of a file, or made in Python."""
    algo = table.get("algo")
    below = as_table(algo)
    return getattr(algo, "kind", None) if below is None else below.get("kind")


def _sft_conflicts(config: RunConfig) -> Iterator[Conflict]:
    learns, rollout, data = config.algo.kind == "sft", config.rollout, config.data
    shows = rollout.workflow == "demonstration"
    yield from clashes(
        (learns and not shows, "rollout.workflow algo.kind",
         'must be "demonstration": algo.kind = "sft" learns from demonstrations'),
        (shows and not learns, "algo.kind rollout.workflow",
         'must be "sft": rollout.workflow = "demonstration" gives every sample the same reward'),
        (learns and data.difficulty_low != data.difficulty_high,
         "data.difficulty_high data.difficulty_low algo.kind",
         'must be equal to data.difficulty_low: algo.kind = "sft" has no rewards to judge prompts by'),
        (learns and rollout.num_samples != 1, "rollout.num_samples algo.kind",
         'must be 1: algo.kind = "sft" has one demonstration per prompt'),
        *((learns and getattr(config.eval, key), f"eval.{key} algo.kind",
           'must be empty: algo.kind = "sft" has no engine that would answer; evaluate what was exported')
          for key in ("data", "sets")),
    )  # fmt: skip
    for name, part in data.parts().items() if learns else ():
        place = f"data.sources.{name}" if name else "data"
        lacks_answer = part.preset != "chat" and not part.answer_key
        cause = 'algo.kind = "sft" needs demonstrations: name their column here, or use preset = "chat"'
        yield from clashes((lacks_answer, f"{place}.answer_key {place}.preset algo.kind", cause))


def _exploration_conflicts(config: RunConfig) -> Iterator[Conflict]:
    kind, rollout, is_single = config.algo.kind, config.rollout, config.rollout.num_samples < 2
    if kind == "sft":
        return
    compares = is_single and config.algo.needs_groups
    yield from clashes(
        (rollout.temperature == 0, "rollout.temperature algo.kind",
         f'gives identical samples, from which algo.kind = "{kind}" learns nothing; use 1.0'),
        (compares, "rollout.num_samples algo.kind",
         f'must be at least 2: algo.kind = "{kind}" compares the samples of a group'),
        (is_single and not compares and config.algo.group_filter == "zero_variance",
         "algo.group_filter rollout.num_samples", 'would leave out every group of one sample; use "none"'),
    )  # fmt: skip
    for key, fn in config.named_rewards():
        is_silent = fn == "workflow" and rollout.workflow in WORKFLOW_BUILTINS
        cause = f'needs a workflow of your own: rollout.workflow = "{rollout.workflow}" says no reward'
        yield from clashes((is_silent, f"{key} rollout.workflow", cause))


def _reference_conflicts(config: RunConfig) -> Iterator[Conflict]:
    """Checked here, because a run that began with a KL term may continue without it."""
    algo, coef = config.algo, "algo.kl_coef"
    return clashes(
        (algo.ref_path and not algo.kl_coef, f"algo.ref_path {coef}",
         "needs algo.kl_coef above 0: without it no reference model is kept"),
        (algo.ref_urls and not algo.kl_coef, f"algo.ref_urls {coef}",
         "needs algo.kl_coef above 0: without it the reference is not used"),
        (algo.ref_urls and algo.kind != "sft" and config.rollout.temperature != 1, "rollout.temperature algo.ref_urls",
         ("must be 1: servers give log-probs of given tokens at temperature 1 only, and the trainer scores samples "
          "at the temperature that they were drawn at; or use algo.ref_path")),
    )  # fmt: skip


def _agent_conflicts(config: RunConfig) -> Iterator[Conflict]:
    agent, is_asked = config.agent, config.rollout.workflow == AGENT_WORKFLOW
    role, has_key = config.roles.gateway, config.gateway.eval_requests > 0
    plain = AgentSettings(dir=agent.dir)
    if has_key:
        plain = AgentSettings(dir=agent.dir, host=agent.host, port=agent.port)
    return clashes(
        (is_asked and not (agent.command or agent.url or agent.polls), "agent.command rollout.workflow",
         f'is empty, and agent.url too: rollout.workflow = "{AGENT_WORKFLOW}" needs a program or a service'),
        (not is_asked and agent != plain, "rollout.workflow agent",
         f'must be "{AGENT_WORKFLOW}" for the table [agent] to matter'),
        (has_key and not config.generates, "gateway.eval_requests algo.kind data.preset",
         "needs an engine that generates, and this run has none"),
        (role.count and not (is_asked or has_key), "roles.gateway.count rollout.workflow gateway.eval_requests",
         f'has nothing to serve: rollout.workflow is not "{AGENT_WORKFLOW}" and gateway.eval_requests is 0'),
        (role.count and config.roles.rollout.nodes != role.nodes and agent.host in ("127.0.0.1", "localhost", "::1"),
         "agent.host roles.rollout.nodes roles.gateway.nodes",
         'is out of reach of a gateway on another node: set "0.0.0.0", or the address of each node\'s network'),
        (not role.count and role != GatewayRole(), "roles.gateway.count roles.gateway",
         "must be 1 for the table [roles.gateway] to matter"),
        (is_asked and agent.reward != "verifier" and config.reward.fn != "workflow", "reward.fn agent.reward",
         f'must be "workflow": agent.reward = "{agent.reward}" says the reward'),
    )  # fmt: skip


def _judge_conflicts(config: RunConfig) -> Iterator[Conflict]:
    is_asked = any(fn == "judge" for _, fn in config.named_rewards())
    cause = 'must be "judge", or that of a set or one of several, for the table [judge] to matter'
    return clashes((config.judge != JudgeSettings() and not is_asked, "reward.fn judge", cause))


def _environment_conflicts(config: RunConfig) -> Iterator[Conflict]:
    is_asked, known = config.rollout.workflow == ENVIRONMENT_WORKFLOW, config.environments
    yield from clashes(
        (is_asked and not known, "environments rollout.workflow",
         f'is empty: rollout.workflow = "{ENVIRONMENT_WORKFLOW}" needs a table [environments.NAME]'),
        (known and not is_asked, "rollout.workflow environments",
         f'must be "{ENVIRONMENT_WORKFLOW}" for the tables [environments.NAME] to matter'),
    )  # fmt: skip
    for name in known:
        if not SOURCE_NAME.fullmatch(name):
            cause = "an environment's name is 1 to 64 letters, digits, '_' or '-', no sign first"
            yield Conflict((f"environments.{name}",), cause)
    for key, value in config.data_files():
        for name in filter(None, (source.environment for source in parse_sources(value))):
            near = nearest(name, known)
            preset = config.data.preset
            yield from clashes(
                (name not in known, f"{key} environments",
                 f'there is no [environments.{name}]{f"; did you mean {near}?" if near else ""}'),
                (name in known and known[name].kind not in KINDS_WITH_ROWS, f"{key} environments.{name}.kind",
                 f'has no rows of its own: name a file; those of {" and ".join(KINDS_WITH_ROWS)} have'),
                (preset != "slime", f"data.preset {key}", 'must be "slime": rows of an environment are laid out so'),
            )  # fmt: skip


def _critic_conflicts(config: RunConfig) -> Iterator[Conflict]:
    critic, steps, kind = config.critic, config.run.num_steps, config.algo.kind
    is_on = critic.enabled
    return clashes(
        (not is_on and critic != CriticConfig(), "critic.enabled critic",
         "must be true for the table [critic] to matter"),
        (is_on and kind != "ppo", "critic.enabled algo.kind",
         f'is for algo.kind = "ppo": algo.kind = "{kind}" takes advantages without values'),
        (is_on and config.roles.trainer.kind != "torch", "critic.enabled roles.trainer.kind",
         "is the torch trainer's: Megatron's has no value model; use roles.trainer.kind = \"torch\""),
        (is_on and 0 < steps <= critic.warmup_steps, "critic.warmup_steps run.num_steps",
         f"is as long as the whole run of {steps} steps: the policy would never be trained"),
    )  # fmt: skip


# -- devices in turns --------------------------------------------------------------------------------------------------

SHARE = "memory.share"


def _memory_conflicts(config: RunConfig) -> Iterator[Conflict]:
    """Everything in the run file that does not go with taking turns."""
    if config.memory.share == "none" or config.data.is_recorded:  # refused below
        return
    yield from _turn_place_conflicts(config)
    yield from _turn_part_conflicts(config)
    if config.roles.trainer.device_ids:
        yield from _turn_gpu_conflicts(config)
    else:
        yield from _turn_host_conflicts(config)


def _turn_place_conflicts(config: RunConfig) -> Iterator[Conflict]:
    trainer, rollout, channel = config.roles.trainer, config.roles.rollout, config.weights.channel
    # Devices of the trainer alone are idle in the engines' turn; devices of an engine alone would in the trainer's.
    are_shared = bool(rollout.device_ids) == bool(trainer.device_ids)
    are_shared = are_shared and set(rollout.device_ids) <= set(trainer.device_ids)
    nodes = config.roles.memory.nodes
    are_apart = nodes == "*" or any(role.nodes != nodes for role in (trainer, rollout))
    return clashes(
        (config.algo.kind == "sft", f"{SHARE} algo.kind",
         'must be "none": algo.kind = "sft" has no engine to take turns with'),
        (not are_shared, f"{SHARE} roles.trainer.devices roles.rollout.devices",
         (f'needs engines on devices that the trainer has, they have "{trainer.devices}" (trainer) and '
          f'"{rollout.devices}" (rollout): set both alike, or give rollout some of the trainer\'s')),
        (are_apart, f"{SHARE} roles.trainer.nodes roles.rollout.nodes roles.memory.nodes",
         "needs trainer, rollout and memory manager on the same nodes, all of them named: set their nodes alike"),
        (not are_apart and len(nodes) > 1 and channel != "disk", f"weights.channel {SHARE} roles.rollout.nodes",
         ('must be "disk" when trainer and engines take turns on several nodes (with the run directory on a file '
          "system of all): shm and cuda_ipc do not leave the node of the rank that sends")),
        (channel == "nccl", f"weights.channel {SHARE}",
         'must be "cuda_ipc" ("shm" on the CPU) or "disk" when trainer and engine take turns on a device'),
    )  # fmt: skip


def _turn_part_conflicts(config: RunConfig) -> Iterator[Conflict]:
    engine, trainer = config.engine, config.trainer
    is_torch = config.roles.trainer.kind == "torch"
    return clashes(
        (engine.router, f"engine.router {SHARE}",
         "must be empty when trainer and engine take turns on a device: each server answers its own actor's requests"),
        ("enable_memory_saver" in config.sglang, f"sglang.enable_memory_saver {SHARE}",
         'is myxa\'s own; leave it out, memory.share = "switch" sets it'),
        (is_torch and trainer.strategy != "ddp", f"trainer.strategy {SHARE}",
         ('must be "ddp": sharded parameters of the torch trainer cannot leave a device; or use '
          'roles.trainer.kind = "megatron"')),
        (config.megatron.offload_optimizer, f"megatron.offload_optimizer {SHARE}",
         "must be 0: the optimizer leaves the device as a whole between steps"),
    )  # fmt: skip


def _turn_gpu_conflicts(config: RunConfig) -> Iterator[Conflict]:
    trainer, memory = config.roles.trainer, config.memory
    launches = config.roles.rollout.kind == "sglang" and not config.engine.attach
    return clashes(
        (len(trainer.device_ids) != trainer.count, f"roles.trainer.count roles.trainer.devices {SHARE}",
         f"must be {len(trainer.device_ids)}, one rank for each GPU: memory of a GPU without a rank is in no turn"),
        (not memory.workspace_mb, f"memory.workspace_mb {SHARE}",
         ("must be set on GPUs: MiB that a step's activations take, e.g. 3072 for every 1024 of "
          "trainer.max_tokens_per_microbatch (1.7B, no recomputation)")),
        (launches and "mem_fraction_static" not in config.sglang, f"sglang.mem_fraction_static {SHARE}",
         "must be set, e.g. 0.85: the share of the GPU that weights and cache take in the engine's turn"),
    )  # fmt: skip


def _turn_host_conflicts(config: RunConfig) -> Iterator[Conflict]:
    trainer, rollout, memory = config.roles.trainer, config.roles.rollout, config.memory
    yield from clashes(
        (trainer.kind == "megatron", f"{SHARE} roles.trainer.kind roles.trainer.devices",
         'needs GPUs in roles.trainer.devices, or roles.trainer.kind = "torch" on the CPU'),
        (rollout.kind != "embedded", f"{SHARE} roles.rollout.kind roles.rollout.devices",
         'needs roles.rollout.kind = "embedded" on the CPU, or GPUs for both roles'),
        (not memory.capacity_mb, f"memory.capacity_mb {SHARE}",
         "must be set on the CPU: MiB of the host memory that is used as a device"),
    )  # fmt: skip


# -- engines -----------------------------------------------------------------------------------------------------------

ENGINE = "roles.rollout.kind"


def _recorded_conflicts(config: RunConfig) -> Iterator[Conflict]:
    """What needs an engine that generates."""
    is_recorded, preset = config.data.is_recorded, "data.preset"
    return clashes(
        (is_recorded and config.algo.kind == "sft", f"{preset} algo.kind",
         'is for groups with rewards, and algo.kind = "sft" has none'),
        *((is_recorded and getattr(config.eval, key), f"eval.{key} {preset}",
           "must be empty: nothing answers held-out prompts where groups are recorded") for key in ("data", "sets")),
        (is_recorded and config.memory.share != "none", f"{SHARE} {preset}",
         'must be "none": there is no engine to take turns with'),
    )  # fmt: skip


def _engine_conflicts(config: RunConfig) -> Iterator[Conflict]:
    engine, rollout, is_sglang = config.engine, config.roles.rollout, config.roles.rollout.kind == "sglang"
    limit, attach = engine.context_length, engine.attach
    num_actors = 0 if rollout.nodes == "*" else rollout.count * len(rollout.nodes)
    no_room = f"leaves no room for a prompt in engine.context_length = {limit}"
    yield from owned_conflicts(config.sglang)
    yield from clashes(
        (attach and not is_sglang, f"{ENGINE} engine.attach", 'must be "sglang" when engine.attach is set'),
        (config.sglang and (attach or not is_sglang), f"sglang engine.attach {ENGINE}",
         'is for servers that are launched: roles.rollout.kind = "sglang" without engine.attach'),
        (attach and rollout.nodes == "*", "roles.rollout.nodes engine.attach",
         "must name the nodes when engine.attach is set"),
        (attach and num_actors and num_actors != len(attach), "engine.attach roles.rollout.count",
         f"names {len(attach)} servers for {num_actors} rollout actors; each has one of its own: make them as many"),
        (limit and config.rollout.max_new_tokens >= limit, "rollout.max_new_tokens engine.context_length", no_room),
        *((limit and one.max_new_tokens >= limit, f"eval.sets.{name}.max_new_tokens engine.context_length", no_room)
          for name, one in config.eval.sets.items()),
        (rollout.kind == "embedded" and rollout.device_ids, f"roles.rollout.devices {ENGINE}",
         'must be "cpu": the embedded engine runs on the CPU'),
    )  # fmt: skip


def _sampling_conflicts(config: RunConfig) -> Iterator[Conflict]:
    """What was cut must be told and scored. Seeds need servers that draw by them, and those cannot cut by min-p."""
    rollout, seeds, roles = config.rollout, "sglang.enable_deterministic_inference", config.roles
    if rollout.replay_sampling:
        yield from clashes(
            (roles.rollout.kind != "embedded", "rollout.replay_sampling roles.rollout.kind",
             f'needs the embedded engine: "{roles.rollout.kind}" does not tell which tokens its sampler left'),
            (roles.trainer.kind != "torch", "rollout.replay_sampling roles.trainer.kind",
             f'needs the torch trainer, not "{roles.trainer.kind}"'),
            (config.algo.ref_urls, "rollout.replay_sampling algo.ref_urls",
             "does not go with served log-probs, which are of all tokens"),
        )  # fmt: skip
    if config.algo.kind == "sft" or roles.rollout.kind != "sglang":
        return
    draws_by_seed = config.sglang.get("enable_deterministic_inference") is True
    yield from clashes(
        (rollout.deterministic and not config.engine.attach and not draws_by_seed, f"rollout.deterministic {seeds}",
         f"needs {seeds} = true: SGLang does not look at requests' seeds without"),
        (rollout.min_p and (rollout.deterministic or draws_by_seed), f"rollout.min_p rollout.deterministic {seeds}",
         "must be 0 with seeds: SGLang's sampler ends the server when it is to do both; use top_p or top_k"),
    )  # fmt: skip


MODEL_NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}")


_KEY = re.compile(r"(?<![\w.])(roles\.rollout|rollout|model|engine|sglang)(\.(?=[a-z])|$)")
_TABLES = {"engine": ".engine", "sglang": ".sglang"}


def model_key(name: str, text: str) -> str:
    """A key of a run whose policy is the model `name` (`RunConfig.of_model`), or a text with such keys -> as the run
    itself has them."""
    return _KEY.sub(lambda match: f"models.{name}{_TABLES.get(match[1], '')}{match[2]}", text)


def _model_conflicts(config: RunConfig) -> Iterator[Conflict]:
    """Names, places, and for each what an engine of the run's own cannot be."""
    placed = {f"roles.{role}": config.roles[role] for role in ("trainer", "rollout")}
    served = {url.rstrip("/"): "engine.attach" for url in config.engine.attach}
    named = f"a model's name is 1 to 32 lower-case letters, digits, '_' or '-', a letter first, and not {POLICY}"
    for name, one in config.models.items():
        key = f"models.{name}"
        yield from clashes(
            (not MODEL_NAME.fullmatch(name) or name == POLICY, key, named),
            (one.nodes == "*", f"{key}.nodes", "must name the nodes"),
            (config.algo.kind == "sft", f"{key} algo.kind", 'is never asked: algo.kind = "sft" has no rollouts'),
        )
        for other, of in placed.items():
            shared = sorted(set(one.device_ids) & set(of.device_ids))
            meet = "*" in (one.nodes, of.nodes) or set(one.nodes) & set(of.nodes)
            cause = f"names GPU {', '.join(map(str, shared))}, as {other}.devices does: each needs its own"
            yield from clashes((shared and meet, f"{key}.devices {other}.devices", cause))
        placed[key] = one
        for url in {url.rstrip("/") for url in one.engine.attach} & set(served):
            cause = f"names {url}, as {served[url]} does: that server would change under one of them"
            yield Conflict((f"{key}.engine.attach", served[url]), cause)
        served |= {url.rstrip("/"): f"{key}.engine.attach" for url in one.engine.attach}
        for found in _engine_conflicts(config.of_model(name)):
            yield Conflict(tuple(model_key(name, path) for path in found.paths), model_key(name, found.cause))


# -- weights -----------------------------------------------------------------------------------------------------------


def _weight_conflicts(config: RunConfig) -> Iterator[Conflict]:
    channel, rollout, trainer = config.weights.channel, config.roles.rollout, config.roles.trainer
    path, are_beside = "weights.channel", rollout.nodes != "*" and set(rollout.nodes) == set(trainer.nodes)
    shared = sorted(set(rollout.device_ids) & set(trainer.device_ids))
    yield from clashes(
        (rollout.kind != "sglang" and channel in ("nccl", "cuda_ipc"), f"{path} {ENGINE}",
         f'is for servers: {rollout.kind} engines take "shm" or "disk"'),
        (rollout.kind == "sglang" and channel == "shm", f"{path} {ENGINE}",
         'is not for servers: they take "nccl", "cuda_ipc" or "disk"'),
        (channel == "shm" and not are_beside,
         f"{path} roles.rollout.nodes roles.trainer.nodes", "needs both roles on the same nodes"),
        (channel == "nccl" and shared and rollout.nodes == trainer.nodes,
         f"{path} roles.rollout.devices roles.trainer.devices",
         f'cannot join two processes on GPU {", ".join(map(str, shared[:1]))}; use "cuda_ipc"'),
    )  # fmt: skip
    if channel == "cuda_ipc":
        yield from _handle_conflicts(config, path)


def _handle_conflicts(config: RunConfig, path: str) -> Iterator[Conflict]:
    """A handle is opened on the GPU that its memory lies on: a copy to another one's paused memory is refused there."""
    rollout, trainer, devices = config.roles.rollout, config.roles.trainer, "roles.rollout.devices"
    if not trainer.device_ids:
        cause = "shares memory of the trainer's GPUs, and it names none"
        return clashes((True, f"{path} roles.trainer.devices", cause))
    lone = ", ".join(map(str, sorted(set(rollout.device_ids) - set(trainer.rank_devices))[:1]))
    is_apart = rollout.nodes != trainer.nodes
    sizes = ("pp_size",) if config.sglang.get("enable_dp_attention") else ("pp_size", "dp_size")
    return clashes(
        (not rollout.device_ids and (trainer.count > 1 or is_apart), f"{path} {devices}",
         "hands each engine memory of its GPU: name the GPUs of the engines"),
        (lone, f"{path} {devices} roles.trainer.devices",
         (f"hands each engine memory of its GPU, and GPU {lone} has an engine but no trainer rank; give it one, or use "
          '"disk", or "nccl" with engines on other GPUs')),
        *((config.sglang.get(size, 1) not in (0, 1), f"{path} sglang.{size}",
           "hands memory to each tensor-parallel rank of a server, and it has others") for size in sizes),
        (rollout.device_ids and is_apart, f"{path} roles.rollout.nodes roles.trainer.nodes",
         "hands each engine memory of its GPU: both roles must be on the same nodes"),
    )  # fmt: skip


def channel_conflicts(config: RunConfig, channel: ChannelName) -> Iterator[Conflict]:
    """What would be in the way of another `weights.channel` in this run."""
    weights = config.weights.model_copy(update={"channel": channel})
    return _weight_conflicts(config.model_copy(update={"weights": weights}))


# -- steps, ranks, evaluation ------------------------------------------------------------------------------------------


def _step_conflicts(config: RunConfig) -> Iterator[Conflict]:
    """Ends of run, schedule and data, and the staleness window."""
    run, optimizer, settings = config.run, config.optimizer, config.asynchrony
    updates = (run.num_steps - config.critic.warmup_steps) * config.algo.updates_per_step
    ends_here = optimizer.schedule != "constant" and not optimizer.decay_steps
    is_endless = not (run.num_steps or run.max_wall_s or run.stop_reward)
    warmup, wsd = optimizer.warmup_steps, optimizer.wsd_decay_steps
    # lag <= (N + W - 2) // B with N >= B slots, so W = eta * B + 1 is the widest window that any N allows.
    widest = settings.max_staleness * config.algo.batch_size + 1
    whole = f"the whole run of {updates} optimizer updates"
    return clashes(
        (is_endless and any(part.max_passes == 0 for part in config.data.parts().values()),
         "run.num_steps run.max_wall_s data.max_passes",
         "makes a run that never ends: set it, run.max_wall_s, run.stop_reward or data.max_passes"),
        (not run.num_steps and ends_here, "optimizer.decay_steps run.num_steps optimizer.schedule",
         f'must be set: run.num_steps = 0 does not say where schedule = "{optimizer.schedule}" ends'),
        (run.num_steps and ends_here and warmup >= updates,
         "optimizer.warmup_steps run.num_steps algo.minibatches algo.epochs", f"is as long as {whole}"),
        (run.num_steps and ends_here and warmup < updates < warmup + wsd,
         "optimizer.wsd_decay_steps optimizer.warmup_steps run.num_steps algo.minibatches algo.epochs",
         f"and optimizer.warmup_steps are longer than {whole}"),
        (config.algo.ref_update_every and not config.algo.kl_coef, "algo.ref_update_every algo.kl_coef",
         "needs a reference model: begin with kl_coef above 0"),
        (settings.policy == "pace" and settings.window > widest,
         "async.window async.max_staleness algo.batch_size async.policy",
         f"must be at most max_staleness * batch_size + 1 = {widest}: a wider window cannot keep the bound"),
    )  # fmt: skip


def _rank_conflicts(config: RunConfig) -> Iterator[Conflict]:
    trainer, role, megatron = config.trainer, config.roles.trainer, config.megatron
    is_megatron, offloads = role.kind == "megatron", megatron.offload_optimizer
    is_saved = trainer.checkpoint_every or trainer.resume
    has_muon = config.optimizer.name == "muon"
    yield from clashes(
        (role.device_ids and len(role.device_ids) < role.count, "roles.trainer.devices roles.trainer.count",
         f"names {len(role.device_ids)} GPUs for {role.count} ranks on each node; every rank needs its own"),
        (not is_megatron and megatron != MegatronSettings(), "roles.trainer.kind megatron",
         'must be "megatron" for the table [megatron] to matter'),
        (is_megatron and trainer.strategy != "ddp", "trainer.strategy roles.trainer.kind",
         "is the torch trainer's; megatron.distributed_optimizer splits optimizer state"),
        (is_megatron and trainer.impl != "own", "trainer.impl roles.trainer.kind", "is the torch trainer's"),
        (is_megatron and trainer.activation_checkpointing, "trainer.activation_checkpointing roles.trainer.kind",
         'is the torch trainer\'s; use megatron.recompute = "full"'),
        (trainer.impl == "hf" and config.critic.enabled, "trainer.impl critic.enabled",
         "does not go with a critic: its layers are our own code's"),
        (is_megatron and trainer.freeze, "trainer.freeze roles.trainer.kind",
         "is the torch trainer's: Megatron trains all parameters"),
        (has_muon and not is_megatron, "optimizer.name roles.trainer.kind",
         '"muon" is the Megatron trainer\'s; the torch trainer has "adamw"'),
        (has_muon and is_megatron and (megatron.distributed_optimizer or offloads),
         "optimizer.name megatron.distributed_optimizer megatron.offload_optimizer",
         "needs whole matrices on the device: set distributed_optimizer = false and leave out offload_optimizer"),
        (has_muon and config.memory.share == "switch", "optimizer.name memory.share",
         "keeps its momentum on the device, so the trainer cannot take turns with an engine"),
        (is_megatron and offloads and trainer.dtype != "bfloat16", "megatron.offload_optimizer trainer.dtype",
         'needs trainer.dtype = "bfloat16" and its float32 masters'),
        (is_megatron and offloads and is_saved,
         "megatron.offload_optimizer trainer.checkpoint_every trainer.resume",
         "does not go with checkpoints yet"),
    )  # fmt: skip
    num_ranks = role.count * len(role.nodes)
    for keys in (("tp", "pp", "cp"), ("etp", "ep", "pp")) if is_megatron and role.nodes != "*" else ():
        size = math.prod(getattr(megatron, key) for key in keys)
        paths = " ".join(("roles.trainer.count", *(f"megatron.{key}" for key in keys)))
        cause = f"gives {num_ranks} ranks, which {' * '.join(keys)} = {size} does not divide"
        yield from clashes((num_ranks % size, paths, cause))


def _eval_conflicts(config: RunConfig) -> Iterator[Conflict]:
    every, has_prompts = config.eval.every, config.eval.has_prompts
    yield from clashes(
        (every and not has_prompts, "eval.every eval.data", "needs eval.data, the held-out prompts"),
        (config.run.stop_reward and not (has_prompts and every), "run.stop_reward eval.data eval.every",
         "needs evaluation: set eval.data and eval.every"),
    )  # fmt: skip
    for name, one in config.eval.sets.items() if not config.data.apply_chat_template else ():
        yield from plain_conflicts(one, f"eval.sets.{name}.", "data.apply_chat_template")


CHECKS: tuple[Callable[[RunConfig], Iterator[Conflict]], ...] = (
    _sft_conflicts,
    _exploration_conflicts,
    _reference_conflicts,
    _agent_conflicts,
    _judge_conflicts,
    _environment_conflicts,
    _critic_conflicts,
    _eval_conflicts,
    _step_conflicts,
    _engine_conflicts,
    _model_conflicts,
    _sampling_conflicts,
    _rank_conflicts,
    _weight_conflicts,
    _memory_conflicts,
    _recorded_conflicts,
)
