"""The whole run file as one record, and the checks that need more than one section (`CHECKS`)."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, model_validator

from ..ids import POLICY
from ..suggestion import nearest
from .data import DataSettings, EvalSettings, JudgeSettings, RewardSettings, parse_sources, plain_conflicts
from .learning import (
    GIVEN_KINDS,
    PAIRS,
    AlgoConfig,
    AsyncSettings,
    CriticConfig,
    LoraConfig,
    MegatronSettings,
    OptimizerConfig,
    TrainerConfig,
)
from .run import (
    AGENT_WORKFLOW,
    KINDS_WITH_ROWS,
    LOCAL_HOSTS,
    WORKFLOW_BUILTINS,
    WORKFLOW_NAMES,
    AgentSettings,
    ControlSettings,
    EngineSettings,
    EnvironmentSettings,
    FrozenModelSettings,
    GatewaySettings,
    GuardSettings,
    MemorySettings,
    ModelSettings,
    MonitorSettings,
    RolesSettings,
    RolloutSettings,
    RunSettings,
    WeightSettings,
)
from .section import (
    CONFLICTS,
    Conflict,
    Section,
    Table,
    TableName,
    Term,
    as_table,
    attribute_of,
    clashes,
    relation_conflicts,
)
from .servers import NOT_WITH_ADAPTERS, OFF, ServerShape, owned_conflicts, speculation_conflicts

SFT_DEFAULTS = {"rollout": {"workflow": "demonstration", "num_samples": 1}}
PAIR_DEFAULTS = {"rollout": {"workflow": "preference", "num_samples": 2}, "data": {"preset": "pairs"}}
GIVEN = ",".join(GIVEN_KINDS)


def _read_relations() -> dict[str, tuple[str, ...]]:
    """Those between sections: part of `relations.table` -> its lines."""
    words = {
        "GIVEN": GIVEN, "PAIRS": PAIRS, "WORKFLOWS": ",".join(WORKFLOW_NAMES), "NOT_WITH_ADAPTERS": NOT_WITH_ADAPTERS,
        "WORKFLOW_BUILTINS": ",".join(WORKFLOW_BUILTINS),
    }  # fmt: skip
    parts: dict[str, tuple[str, ...]] = {}
    part = ""
    for line in Path(__file__).with_name("relations.table").read_text("utf-8").splitlines():
        part = line.strip("[]") if line.startswith("[") else part
        if line and line[0] not in "#[":
            parts[part] = (*parts.get(part, ()), line.format_map(words))
    return parts


PARTS = _read_relations()
RELATIONS = PARTS["engine"] + PARTS["run"]
EFFECTS = PARTS["live"] + PARTS["effects"]


class RunConfig(Section, frozen=True):
    """Everything a run needs to know. Made by `load_config`, or in Python; checked either way."""

    run: RunSettings = RunSettings()
    model: ModelSettings
    data: DataSettings
    eval: EvalSettings = EvalSettings()
    rollout: RolloutSettings = RolloutSettings()
    agent: AgentSettings = AgentSettings()
    gateway: GatewaySettings = GatewaySettings()
    environments: dict[TableName, EnvironmentSettings] = {}
    """Where rollouts take place, each a table `[environments.NAME]`. A row's metadata `environment` chooses."""
    reward: RewardSettings = RewardSettings()
    judge: JudgeSettings = JudgeSettings()
    algo: AlgoConfig = AlgoConfig()
    critic: CriticConfig = CriticConfig()
    asynchrony: AsyncSettings = Field(default=AsyncSettings(), alias="async")
    optimizer: OptimizerConfig = OptimizerConfig()
    trainer: TrainerConfig = TrainerConfig()
    lora: LoraConfig = LoraConfig()
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

    relations = RELATIONS + PARTS["first"]

    def refusal(self, values: Mapping[str, object]) -> str:
        """Why a run that began with this file cannot continue with other values of its keys ("rollout.top_k"); empty:
        it can. Sections are checked as those of a file are, but for those of first values."""
        new, conflicts = self.with_values(values), list[Conflict]()
        for section in dict.fromkeys(path.partition(".")[0] for path in values):
            part = cast("Section", getattr(new, attribute_of(type(self), section)))
            try:
                type(part).model_validate({name: getattr(part, name) for name in type(part).model_fields})
            except ValidationError as error:
                for detail in error.errors():
                    path = ".".join(map(str, detail["loc"]))
                    inner = detail.get("ctx", {}).get(CONFLICTS) or [Conflict(path, detail["msg"])]
                    conflicts += [Conflict(f"{section}.{conflict.path}", conflict.cause) for conflict in inner]
        conflicts += [*relation_conflicts(new, RELATIONS), *new.conflicts()]
        conflicts += [conflict for conflict in relation_conflicts(new, PARTS["live"]) if conflict.path in values]
        return "; ".join(f"{conflict.path}: {conflict.cause}" for conflict in conflicts)

    def with_values(self, values: Mapping[str, object]) -> RunConfig:
        """With other values of keys ("rollout.top_k"); unchecked."""
        new = self
        for path, value in values.items():
            section, _, key = path.partition(".")
            name = attribute_of(type(self), section)
            new = new.model_copy(update={name: getattr(new, name).model_copy(update={key: value})})
        return new

    def without_effect(self) -> Iterator[Conflict]:
        """Each key that is set and does nothing, with what it would need."""
        return relation_conflicts(self, EFFECTS)

    @property
    def policy_updates(self) -> int:
        """Optimizer updates of the policy in the whole run; 0: it has no last step."""
        return max(0, self.run.num_steps - self.critic.warmup_steps) * self.algo.updates_per_step

    def data_files(self) -> Iterator[tuple[str, str | tuple[str, ...]]]:
        """Every key that names data files, and what it says."""
        for name, part in self.data.parts().items():
            yield self.data.key_of(name), part.train
        yield from self.eval.files().values()

    @property
    def served_path(self) -> str:
        """Model folder that servers start from."""
        return self.weights.served_folder or self.model.path

    def of_model(self, name: str) -> RunConfig:
        """A run whose policy is that of `[models.NAME]`: for what serves it, and for checks."""
        model, rollout = self.models[name], self.rollout
        sampling = RolloutSettings(
            temperature=model.temperature, max_new_tokens=model.max_new_tokens, deterministic=rollout.deterministic
        )
        template = {"apply_chat_template": True, "chat_template_kwargs": model.chat_template_kwargs}
        # With the policy's seed a copy of it would say what it says.
        seed = self.run.seed + 1 + zlib.crc32(name.encode()) % 100_000
        return self.model_copy(update={
            "run": self.run.model_copy(update={"seed": seed}), "model": ModelSettings(path=model.path),
            "engine": model.engine, "sglang": model.sglang, "rollout": sampling,
            "roles": self.roles.model_copy(update={"rollout": model}), "weights": WeightSettings(channel="disk"),
            "data": self.data.model_copy(update=template), "eval": EvalSettings(), "memory": MemorySettings(),
            "megatron": self.megatron.model_copy(update={"routing_replay": False}), "lora": LoraConfig(),
        })  # fmt: skip

    def of_server(self, shape: ServerShape) -> RunConfig:
        """A run whose servers are all of this shape."""
        engine = self.engine.model_copy(update={"groups": {}})
        return self.model_copy(update={"sglang": dict(shape.table), "engine": engine})

    def named_rewards(self) -> Iterator[tuple[str, str]]:
        """Every key that names a reward function, and what it says."""
        yield from self.reward.named_functions()
        yield from self.eval.named_functions()

    @model_validator(mode="before")
    @classmethod
    def _fill_by_kind(cls, raw: object) -> object:
        """What rows hold decides how many samples a prompt has: values left out become that, not the defaults of RL
        with an engine that generates."""
        table = as_table(raw)
        kind = None if table is None else _algo_kind(table)
        if table is None or kind not in GIVEN_KINDS:
            return raw
        filled = dict(table)
        for section, values in (SFT_DEFAULTS if kind == "sft" else PAIR_DEFAULTS).items():
            below = as_table(filled.get(section, {}))
            if below is not None:
                filled[section] = {**values, **below}
        return filled

    @property
    def replays_rollout(self) -> bool:
        """Whether engines must tell the experts of each token, for the trainer to replay."""
        return self.megatron.routing_replay == "rollout"

    @property
    def generates(self) -> bool:
        """Otherwise samples are demonstrations or recorded: no engine takes part, no weights travel."""
        return not self.algo.is_given and not self.data.is_recorded

    def conflicts(self) -> Iterator[Conflict]:
        """Conflicts between sections."""
        for check in CHECKS:
            yield from check(self)


def _algo_kind(table: Mapping[str, object]) -> object:
    """Of a section that is a table of a file, or made in Python."""
    algo = table.get("algo")
    below = as_table(algo)
    return getattr(algo, "kind", None) if below is None else below.get("kind")


def _data_conflicts(config: RunConfig) -> Iterator[Conflict]:
    """What rows must have, and environments that have rows."""
    data, environments = config.data, config.environments
    kind, engine_keys = config.algo.kind, ("eval.sets", "gateway.eval_requests", "memory.share")
    engine_keys += () if config.algo.learns_pairs else ("eval.data",)
    is_given, is_sft = config.algo.is_given, kind == "sft"
    yield from clashes(
        (is_given and data.difficulty_low != data.difficulty_high, "data.difficulty_high",
         f'must be equal to data.difficulty_low: algo.kind = "{kind}" has no rewards to judge prompts by'),
        (is_given and data.is_recorded, "data.preset",
         f'is for groups with rewards, and algo.kind = "{kind}" has none'),
        *((not config.generates and Term.parse(key).holds(config), key,
           "needs an engine that generates, and this run has none") for key in engine_keys),
    )  # fmt: skip
    for name, part in data.parts().items():
        place = f"data.sources.{name}" if name else "data"
        lacks_answer = is_sft and part.preset not in ("chat", "pairs") and not part.answer_key
        cause = 'algo.kind = "sft" needs demonstrations: name their column here, or use preset = "chat"'
        is_pairs, learns = part.preset == "pairs", config.algo.learns_pairs
        yield from clashes(
            (lacks_answer, f"{place}.answer_key", cause),
            (part.margin_key and kind != "reward", f"{place}.margin_key", 'is for algo.kind = "reward"'),
            (is_pairs != learns, f"{place}.preset", f'must{" not" * is_pairs} be "pairs" for algo.kind = "{kind}"'),
        )
    for name, eval_set in config.eval.sets.items() if not data.apply_chat_template else ():
        yield from plain_conflicts(eval_set, f"eval.sets.{name}.")
    for key, value in config.data_files():
        for name in filter(None, (source.environment for source in parse_sources(value))):
            near = nearest(name, environments)
            yield from clashes(
                (name not in environments, key,
                 f'there is no [environments.{name}]{f"; did you mean {near}?" if near else ""}'),
                (name in environments and environments[name].kind not in KINDS_WITH_ROWS, key,
                 f'has no rows of its own: name a file; those of {" and ".join(KINDS_WITH_ROWS)} have'),
                (data.preset != "slime", "data.preset", 'must be "slime": rows of an environment are laid out so'),
            )  # fmt: skip


def _reward_conflicts(config: RunConfig) -> Iterator[Conflict]:
    kind, is_given, rollout, rewards = config.algo.kind, config.algo.is_given, config.rollout, [*config.named_rewards()]
    is_single, yields_none = rollout.num_samples < 2, not is_given and rollout.workflow in WORKFLOW_BUILTINS
    yield from clashes(
        (not is_given and is_single and config.algo.needs_groups, "rollout.num_samples",
         f'must be at least 2: algo.kind = "{kind}" compares the samples of a group'),
        (not is_given and is_single and not config.algo.needs_groups and config.algo.group_filter == "zero_variance",
         "algo.group_filter", 'would leave out every group of one sample; use "none"'),
        (config.judge != JudgeSettings() and all(fn != "judge" for _, fn in rewards), "reward.fn",
         'must be "judge", or that of a set or one of several, for the table judge'),
        *((yields_none and fn == "workflow", key,
           f'needs a workflow of your own: rollout.workflow = "{rollout.workflow}" says no reward')
          for key, fn in rewards),
    )  # fmt: skip


def _agent_conflicts(config: RunConfig) -> Iterator[Conflict]:
    agent, role, has_key = config.agent, config.roles.gateway, config.gateway.eval_requests > 0
    plain = AgentSettings(dir=agent.dir)
    if has_key:
        plain = AgentSettings(dir=agent.dir, host=agent.host, port=agent.port)
    return clashes(
        (config.rollout.workflow != AGENT_WORKFLOW and agent != plain, "rollout.workflow",
         f'must be "{AGENT_WORKFLOW}" for the table agent'),
        (role.count and config.roles.rollout.nodes != role.nodes and agent.host in LOCAL_HOSTS,
         "agent.host",
         'is out of reach of a gateway on another node: set "0.0.0.0", or the address of each node\'s network'),
    )  # fmt: skip


# -- devices in turns --------------------------------------------------------------------------------------------------


def _turn_conflicts(config: RunConfig) -> Iterator[Conflict]:
    """Places that do not go with taking turns."""
    trainer, rollout, channel = config.roles.trainer, config.roles.rollout, config.weights.channel
    if config.memory.share == "none" or config.data.is_recorded:  # refused above
        return
    # Devices of the trainer alone are idle in the engines' turn; devices of an engine alone would in the trainer's.
    are_shared = bool(rollout.device_ids) == bool(trainer.device_ids)
    are_shared = are_shared and set(rollout.device_ids) <= set(trainer.device_ids)
    nodes = config.roles.memory.nodes
    are_apart = nodes == "*" or any(role.nodes != nodes for role in (trainer, rollout))
    is_on_gpus, launches = bool(trainer.device_ids), rollout.kind == "sglang" and not config.engine.attach
    shares = [shape.table.get("mem_fraction_static") for shape in config.engine.shapes(config.sglang)]
    says_share = all(isinstance(share, int | float) for share in shares)
    yield from clashes(
        (not are_shared, "memory.share",
         (f'needs engines on devices that the trainer has, they have "{trainer.devices}" (trainer) and '
          f'"{rollout.devices}" (rollout): set both alike, or give rollout some of the trainer\'s')),
        (are_apart, "memory.share",
         "needs trainer, rollout and memory manager on the same nodes, all of them named: set their nodes alike"),
        (not are_apart and len(nodes) > 1 and channel not in ("disk", "nccl"), "weights.channel",
         ('must be "disk" when trainer and engines take turns on several nodes (with the run directory on a file '
          "system of all): shm and cuda_ipc do not leave the node of the rank that sends")),
        (is_on_gpus and len(trainer.device_ids) != trainer.count, "roles.trainer.count",
         f"must be {len(trainer.device_ids)}, one rank for each GPU: memory of a GPU without a rank is in no turn"),
        (is_on_gpus and not config.memory.workspace_mb, "memory.workspace_mb",
         ("must be set on GPUs: MiB that a step's activations take, e.g. 3072 for every 1024 of "
          "trainer.max_tokens_per_microbatch (1.7B, no recomputation)")),
        (is_on_gpus and launches and not says_share, "sglang.mem_fraction_static",
         "must be set, e.g. 0.85: the share of the GPU that weights and cache take in the engine's turn"),
    )  # fmt: skip


# -- engines -----------------------------------------------------------------------------------------------------------


def _engine_conflicts(config: RunConfig) -> Iterator[Conflict]:
    engine, rollout = config.engine, config.roles.rollout
    limit, attach = engine.context_length, engine.attach
    num_actors = 0 if rollout.nodes == "*" else rollout.count * len(rollout.nodes)
    no_room = f"leaves no room for a prompt in engine.context_length = {limit}"
    yield from owned_conflicts(config.sglang)
    yield from _speculation_conflicts(config)
    yield from _group_conflicts(config)
    yield from clashes(
        (attach and num_actors and num_actors != len(attach), "engine.attach",
         f"names {len(attach)} servers for {num_actors} rollout actors; each has one of its own: make them as many"),
        (engine.key_env and any("@" in url for url in attach), "engine.key_env",
         "does not go with a user in an address of engine.attach: a request has one Authorization"),
        (limit and config.rollout.max_new_tokens >= limit, "rollout.max_new_tokens", no_room),
        *((limit and eval_set.max_new_tokens >= limit, f"eval.sets.{name}.max_new_tokens", no_room)
          for name, eval_set in config.eval.sets.items()),
    )  # fmt: skip


def _speculation_conflicts(config: RunConfig) -> Iterator[Conflict]:
    return speculation_conflicts(config.sglang | ({} if config.roles.rollout.device_ids else {"device": "cpu"}))


def _server_conflicts(config: RunConfig) -> Iterator[Conflict]:
    """What arguments of servers have a part in."""
    yield from relation_conflicts(config, RELATIONS)
    yield from _sampling_conflicts(config)
    yield from _turn_conflicts(config)
    yield from _speculation_conflicts(config)


PAIRED = "prefill and decode servers"


def _group_conflicts(config: RunConfig) -> Iterator[Conflict]:
    """Groups of servers that cannot be, or not in this run."""
    groups, count, shapes = config.engine.groups, config.roles.rollout.count, config.engine.shapes(config.sglang)
    num, kinds = len(config.engine.actors(config.sglang)), {group.kind for group in groups.values()}
    is_paired, sent = bool(kinds - {"regular"}), [key for key, value in config.sglang.items() if value not in OFF]
    yield from clashes(
        (count % num, "roles.rollout.count",
         (f"must be {num}, or a multiple: engine.groups make {num} rollout actors, one for each regular server and one "
          f"for all {PAIRED}")),
        *((key.startswith("disaggregation_") and not is_paired, f"sglang.{key}",
           f"is for {PAIRED}: name them in engine.groups") for key in sent),
        *((group.kind != "regular" and not {"prefill", "decode"} <= kinds, f"engine.groups.{name}.kind",
           "needs the other one of prefill and decode in a group too: neither answers alone")
          for name, group in groups.items()),
        (is_paired and config.memory.share != "none", "memory.share",
         f'must be "none" with {PAIRED}: what is sent between them is in no turn'),
        (is_paired and config.rollout.pause_mode != "in_place", "rollout.pause_mode",
         f'must be "in_place" with {PAIRED}: else a decode server has prompts read again, of another version'),
        (is_paired and config.rollout.deterministic, "rollout.deterministic", f"does not hold with {PAIRED}"),
        (is_paired and config.replays_rollout, "megatron.routing_replay",
         f'must not be "rollout" with {PAIRED}: those do not tell the experts of prompts; use true'),
    )  # fmt: skip
    of_run = set(_server_conflicts(config))
    for shape in shapes if groups else ():
        yield from owned_conflicts(groups[shape.key.split(".")[2]].sglang, shape.key)
        view, table = config.of_server(shape), shape.table
        for path, cause in (conflict for conflict in _server_conflicts(view) if conflict not in of_run):
            yield Conflict(path.replace("sglang.", f"{shape.key}."), cause.replace("sglang.", f"{shape.key}."))
        is_paired = shape.kind != "regular"
        yield from clashes(
            (is_paired and table.get("speculative_algorithm"), f"{shape.key}.speculative_algorithm",
             f"does not go with {PAIRED} yet"),
            (is_paired and table.get("disaggregation_transfer_backend") == "fake",
             f"{shape.key}.disaggregation_transfer_backend", 'sends nothing; use "nixl" or "mooncake"'),
        )  # fmt: skip


def _sampling_conflicts(config: RunConfig) -> Iterator[Conflict]:
    """Seeds need servers that draw by them, and those cannot cut by min-p."""
    rollout, seeds = config.rollout, "sglang.enable_deterministic_inference"
    if config.algo.is_given or config.roles.rollout.kind != "sglang":
        return
    draws_by_seed = config.sglang.get("enable_deterministic_inference") is True
    yield from clashes(
        (rollout.deterministic and not config.engine.attach and not draws_by_seed, "rollout.deterministic",
         f"needs {seeds} = true: SGLang does not look at requests' seeds without"),
        (rollout.min_p and (rollout.deterministic or draws_by_seed), "rollout.min_p",
         "must be 0 with seeds: SGLang's sampler ends the server when it is to do both; use top_p or top_k"),
        (config.replays_rollout and config.sglang.get("pp_size", 1) not in (0, 1), "sglang.pp_size",
         'must be 1 with megatron.routing_replay = "rollout": a stage tells only the experts of its own layers'),
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
    name_rule = f"a model's name is 1 to 32 lower-case letters, digits, '_' or '-', a letter first, and not {POLICY}"
    for name, model in config.models.items():
        key = f"models.{name}"
        yield from clashes(
            (not MODEL_NAME.fullmatch(name) or name == POLICY, key, name_rule),
            (model.nodes == "*", f"{key}.nodes", "must name the nodes"),
        )
        for other, role in placed.items():
            shared = sorted(set(model.device_ids) & set(role.device_ids))
            meet = "*" in (model.nodes, role.nodes) or set(model.nodes) & set(role.nodes)
            cause = f"names GPU {', '.join(map(str, shared))}, as {other}.devices does: each needs its own"
            yield from clashes((shared and meet, f"{key}.devices", cause))
        placed[key] = model
        for url in {url.rstrip("/") for url in model.engine.attach} & set(served):
            cause = f"names {url}, as {served[url]} does: that server would change under one of them"
            yield Conflict(f"{key}.engine.attach", cause)
        served |= {url.rstrip("/"): f"{key}.engine.attach" for url in model.engine.attach}
        as_policy = config.of_model(name)
        for path, cause in (*relation_conflicts(as_policy, PARTS["engine"]), *_engine_conflicts(as_policy)):
            yield Conflict(model_key(name, path), model_key(name, cause))


# -- weights -----------------------------------------------------------------------------------------------------------


def _weight_conflicts(config: RunConfig) -> Iterator[Conflict]:
    channel, rollout, trainer = config.weights.channel, config.roles.rollout, config.roles.trainer
    are_beside = rollout.nodes != "*" and set(rollout.nodes) == set(trainer.nodes)
    shared = sorted(set(rollout.device_ids) & set(trainer.device_ids))
    yield from clashes(
        (channel == "shm" and not are_beside, "weights.channel", "needs both roles on the same nodes"),
        (channel == "nccl" and shared and rollout.nodes == trainer.nodes, "weights.channel",
         f'cannot join two processes on GPU {", ".join(map(str, shared[:1]))}; use "cuda_ipc"'),
        *((is_so and urlsplit(url).hostname not in LOCAL_HOSTS, f"weights.{key}",
           f"must be {value} with engine.attach = {url}: a server on another host does not see its actor's folders")
          for key, is_so, value in (("full_every", config.weights.full_every > 1, "1"),
                                     ("channel", channel == "tcp", 'another than "tcp"'))
          for url in config.engine.attach),
    )  # fmt: skip
    yield from handle_conflicts(config) if channel == "cuda_ipc" else ()
    yield from rank_conflicts(config) if channel == "nccl" else ()


def rank_conflicts(config: RunConfig) -> Iterator[Conflict]:
    """What is in the way of weights that are sent: processes of a server beside its tensor-parallel ranks."""
    for shape in config.engine.shapes(config.sglang):
        cause = f"reaches each tensor-parallel rank of a server, and {shape.key}.{{}} makes others"
        others = (
            (shape.table.get(size, 1) not in (0, 1), "weights.channel", cause.format(size))
            for size in shape.outer_sizes
        )
        yield from clashes(*others)


def handle_conflicts(config: RunConfig) -> Iterator[Conflict]:
    """What is in the way of `weights.channel = "cuda_ipc"`. A server that this run starts sees the trainer's first GPU
    beside its own. Memory that takes turns is mapped for its own GPU alone, so a copy to it from another is refused."""
    path, rollout, trainer = "weights.channel", config.roles.rollout, config.roles.trainer
    lone = ", ".join(map(str, sorted(set(rollout.device_ids) - set(trainer.rank_devices))[:1]))
    is_blind = bool(config.engine.attach) or config.memory.share == "switch"
    is_apart, has_gpus = rollout.nodes != trainer.nodes, bool(trainer.device_ids)
    yield from rank_conflicts(config) if has_gpus else ()
    yield from clashes(
        (not has_gpus, path, "shares memory of the trainer's GPUs, and it names none"),
        (has_gpus and not rollout.device_ids and (trainer.count > 1 or is_apart), path,
         "hands each engine memory of its GPU: name the GPUs of the engines"),
        (has_gpus and lone and is_blind, path,
         (f"hands attached servers, and those that take turns, memory of their own GPU, and GPU {lone} has an engine "
          'but no trainer rank; give it one, or use "disk", or "nccl" with engines on other GPUs')),
        (has_gpus and rollout.device_ids and is_apart, path,
         "hands each engine memory of its GPU: both roles must be on the same nodes"),
    )  # fmt: skip


# -- steps, ranks, evaluation ------------------------------------------------------------------------------------------


def _step_conflicts(config: RunConfig) -> Iterator[Conflict]:
    """Ends of run, schedule and data."""
    run, optimizer, critic = config.run, config.optimizer, config.critic
    updates = config.policy_updates
    ends_here = optimizer.schedule != "constant" and not optimizer.decay_steps
    is_endless = not (run.num_steps or run.max_wall_s or run.stop_reward)
    warmup, wsd = optimizer.warmup_steps, optimizer.wsd_decay_steps
    run_length = f"the whole run of {updates} optimizer updates"
    return clashes(
        (is_endless and any(part.max_passes == 0 for part in config.data.parts().values()), "run.num_steps",
         "makes a run that never ends: set it, run.max_wall_s, run.stop_reward or data.max_passes"),
        (run.num_steps and ends_here and warmup >= updates, "optimizer.warmup_steps", f"is as long as {run_length}"),
        (run.num_steps and ends_here and warmup < updates < warmup + wsd, "optimizer.wsd_decay_steps",
         f"and optimizer.warmup_steps are longer than {run_length}"),
        (critic.enabled and 0 < run.num_steps <= critic.warmup_steps, "critic.warmup_steps",
         f"is as long as the whole run of {run.num_steps} steps: the policy would never be trained"),
    )  # fmt: skip


def _rank_conflicts(config: RunConfig) -> Iterator[Conflict]:
    role, megatron = config.roles.trainer, config.megatron
    if role.device_ids and len(role.device_ids) < role.count:
        cause = f"names {len(role.device_ids)} GPUs for {role.count} ranks on each node; every rank needs its own"
        yield Conflict("roles.trainer.devices", cause)
    num_ranks = role.count * len(role.nodes)
    for keys in (("tp", "pp", "cp"), ("etp", "ep", "pp")) if role.kind == "megatron" and role.nodes != "*" else ():
        size = math.prod(getattr(megatron, key) for key in keys)
        cause = f"gives {num_ranks} ranks, which {' * '.join(keys)} = {size} does not divide"
        yield from clashes((num_ranks % size, "roles.trainer.count", cause))


CHECKS: tuple[Callable[[RunConfig], Iterator[Conflict]], ...] = (
    _data_conflicts, _reward_conflicts, _agent_conflicts, _step_conflicts, _rank_conflicts,
    _engine_conflicts, _model_conflicts, _sampling_conflicts, _weight_conflicts, _turn_conflicts,
)  # fmt: skip
