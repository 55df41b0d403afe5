"""Memory of runs whose trainer and engines take turns on a device: the manager, both tenants, arenas, estimates.

Part of the composition root. It imports concrete classes where it builds them, because every process imports this file.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, cast

from ...actors.models.model_config import ITEM_BYTES, ModelConfig
from ...core.actor import Actor
from ...core.clock import Clock
from ...core.config import RunConfig
from ...core.device_memory import Tag, TagPolicy, TagReport
from ...core.errors import ConfigError
from ...core.protocols import Engine, ReleasesMemory
from ...memory.communicators.residency import CommResidency
from ..actor_spec import ActorSpec
from ..memory_part import GIB, MIB

if TYPE_CHECKING:
    from ...actors.backends.megatron.offload import MegatronOffload
    from ...actors.backends.torch_backend.offload import TorchOffload
    from ...actors.rollout.tenant import Tenancy
    from ...actors.tenancy.time_share import TimeShareOptions
    from ...actors.trainer.tenant import TrainerTenancy
    from ...memory.arenas.arena import Arena

HOST_CHUNK_BYTES = 4 * MIB
POOL_SLACK = 1.05
"""Factor on the planned size: tensors are padded and sizes rounded up."""
START_SLACK_S = 120.0
"""Time for the processes themselves to start."""

GRAPH_BYTES = 2 * GIB
"""Captured graphs and workspaces: an estimate until the server reports."""

MakeComms = Callable[[], CommResidency] | None
"""Called once the gang is initialised; None: its communicators stay on their devices."""
Planned = Mapping[Tag, tuple[int, TagPolicy]]


def takes_turns(config: RunConfig) -> bool:
    return config.memory.share == "switch"


def manager_name(config: RunConfig) -> str:
    return f"memory/{shared_nodes(config)[0]}"


def devices_of(spec: ActorSpec, config: RunConfig) -> tuple[str, ...]:
    """The names under which the actor's devices are leased. Raises ConfigError for a GPU that is not there."""
    if not spec.devices:
        return (host_device(spec.node, config),)
    from ...actors.tenancy.memory_manager import gpu_uuid

    return tuple(gpu_uuid(number) for number in spec.devices)


def host_device(node: int, config: RunConfig) -> str:
    """Name of a node's stand-in for a GPU in runs on the CPU, which all its actors use; unique within the run."""
    return "host:0" if len(shared_nodes(config)) == 1 else f"host:0@{node}"


def shared_nodes(config: RunConfig) -> tuple[int, ...]:
    """Nodes with shared devices, which a valid run file names; the manager is on the first."""
    return cast("tuple[int, ...]", config.roles.memory.nodes)


def share_options(config: RunConfig) -> TimeShareOptions:
    from ...actors.tenancy.time_share import TimeShareOptions

    num_nodes = len(shared_nodes(config))
    return TimeShareOptions(
        manager=manager_name(config),
        trainers=tuple(f"trainer/{rank}" for rank in range(num_nodes * config.roles.trainer.count)),
        rollouts=tuple(f"rollout/{index}" for index in range(num_nodes * config.roles.rollout.count)),
        switch_s=config.memory.switch_s,
        start_s=config.engine.start_s + START_SLACK_S,
    )


def start_timeout_s(config: RunConfig) -> float:
    """How long the coordinator waits for the trainer and the first engine; in turns they load one after the other."""
    waited = max(300.0, config.engine.start_s + 60.0)
    return waited + config.engine.start_s + 3 * config.memory.switch_s if takes_turns(config) else waited


def memory_manager(spec: ActorSpec, config: RunConfig, clock: Clock) -> Actor:
    """The manager on the first node with shared devices, its agent on the others. Neither imports torch."""
    from ...actors.tenancy.memory_manager import ManagerOptions, MemoryManager, NodeAgent
    from ...actors.tenancy.time_share import ROLLOUT, TRAINER
    from ...memory.leases.switch import LeaseOptions

    on_gpus = bool(config.roles.trainer.device_ids)
    agent = NodeAgent({} if on_gpus else {host_device(spec.node, config): config.memory.capacity_mb * MIB})
    if spec.name != manager_name(config):
        return agent
    reserve_bytes, share = config.memory.reserve_mb * MIB, share_options(config)
    return MemoryManager(
        agent=agent,
        options=ManagerOptions(
            gangs={TRAINER: share.trainers, ROLLOUT: share.rollouts},
            limits=LeaseOptions(reserve_bytes) if on_gpus else LeaseOptions(reserve_bytes=0, margin_bytes=0),
            node=spec.node,
            agents={node: f"memory/{node}" for node in shared_nodes(config) if node != spec.node},
        ),
    )


# -- the trainer -------------------------------------------------------------------------------------------------------


def trainer_tenancy(spec: ActorSpec, config: RunConfig, comms: MakeComms) -> TrainerTenancy | None:
    """The rank as a tenant; None if its device is not shared."""
    if not takes_turns(config):
        return None
    from ...actors.tenancy.tenant import WORKSPACE
    from ...actors.trainer.tenant import TrainerTenancy
    from ...memory.arenas.cuda_memory import taken_bytes, vacate

    planned = dict(trainer_plan(spec, config))
    if config.memory.workspace_mb:
        planned[WORKSPACE] = (config.memory.workspace_mb * MIB, "discard")
    if comms is not None:
        planned["nccl"] = (0, "rematerialise")
    device = devices_of(spec, config)[0]
    return TrainerTenancy(
        device=device, node=spec.node, planned=planned, share=share_options(config),
        taken=functools.partial(taken_bytes, device), vacate=functools.partial(vacate, device), comms=comms,
    )  # fmt: skip


def trainer_plan(spec: ActorSpec, config: RunConfig, model: ModelConfig | None = None) -> Planned:
    """Sizes that the rank will hold, by tag. `model`: None reads the folder's."""
    from ...actors.models.hf_folder import read_config

    model = model or read_config(config.model.path, has_mtp=config.megatron.mtp > 0)
    if spec.kind == "megatron":
        from ...actors.backends.megatron.offload import planned as planned_by_megatron

        world_size = config.roles.trainer.count * len(shared_nodes(config))
        return planned_by_megatron(
            model, config.megatron, config.trainer, world_size, has_reference=config.algo.keeps_reference
        )
    from ...actors.backends.torch_backend.offload import planned
    from ...actors.models.hf_folder import critic_parameters

    trained = model.num_parameters + critic_parameters(config.critic, model)
    return planned(trained, num_reference=model.num_parameters * config.algo.keeps_reference)


def torch_offload(spec: ActorSpec, config: RunConfig) -> TorchOffload | None:
    """Memory of the torch trainer that can leave its device; None if it stays there."""
    if not takes_turns(config):
        return None
    from ...actors.backends.torch_backend.offload import TorchOffload

    num_bytes = pool_bytes(config, trainer_plan(spec, config))
    if not spec.devices:
        return TorchOffload(host_arena(spec, config, num_bytes))
    from ...memory.arenas.cuda_memory import open_cuda

    return TorchOffload(open_cuda(spec.rank.local_rank if spec.rank else 0, num_bytes).arena)


def megatron_offload(spec: ActorSpec, config: RunConfig) -> MegatronOffload | None:
    """Memory of the Megatron trainer that can leave its device; None if it stays there."""
    if not takes_turns(config):
        return None
    from ...actors.backends.megatron.offload import MegatronOffload, rebuilds_params
    from ...memory.arenas.cuda_memory import CudaMemory, open_cuda

    def open_memory(local_gpu: int) -> CudaMemory:
        return open_cuda(local_gpu, pool_bytes(config, trainer_plan(spec, config)))

    rebuilds = rebuilds_params(config.megatron, config.trainer)
    return MegatronOffload(open_memory, config.megatron, rebuilds=rebuilds)


def pool_bytes(config: RunConfig, plan: Planned) -> int:
    """Host memory for what leaves the device."""
    if config.memory.host_pool_gb:
        return int(config.memory.host_pool_gb * GIB)
    return int(sum(size for size, policy in plan.values() if policy == "backup") * POOL_SLACK) + 64 * MIB


def host_arena(spec: ActorSpec, config: RunConfig, num_bytes: int = 0) -> Arena:
    """Of runs on the CPU: memory that can leave what they take for a GPU."""
    from ...memory.arenas.arena import Arena
    from ...memory.arenas.host_pool import HostPool
    from ...memory.arenas.host_vmm import HostVmmDriver

    driver = HostVmmDriver(host_device(spec.node, config), config.memory.capacity_mb * MIB)
    return Arena(driver, HostPool(num_bytes), chunk_bytes=HOST_CHUNK_BYTES)


# -- the engines -------------------------------------------------------------------------------------------------------


def rollout_tenancy(spec: ActorSpec, config: RunConfig, engine: Engine | None) -> Tenancy | None:
    """The engine as a tenant; None: its device is not shared. Raises ConfigError for one that keeps its memory."""
    if not takes_turns(config):
        return None
    if not isinstance(engine, ReleasesMemory):
        raise ConfigError(f"{spec.name}: this kind of engine keeps its memory", remedy='set memory.share = "none"')
    from ...actors.rollout.tenant import Tenancy

    return Tenancy(memory=engine, devices=devices_of(spec, config), node=spec.node)


def sglang_plan(spec: ActorSpec, config: RunConfig, model: ModelConfig) -> tuple[TagReport, ...] | None:
    """What a launched server will hold on each GPU, as far as this is known before it starts; None if its memory is
    not shared. A valid [sglang] says how much it may take then."""
    if not takes_turns(config):
        return None
    from ...actors.tenancy.memory_manager import read_gpu

    num_gpus = max(1, len(spec.devices))
    weights = ITEM_BYTES[config.engine.dtype] * model.num_parameters // num_gpus
    static = int(read_gpu(spec.devices[0]).capacity_bytes * float(config.sglang["mem_fraction_static"]))
    sizes: dict[Tag, int] = {"weights": weights, "kv_cache": max(0, static - weights), "cuda_graph": GRAPH_BYTES}
    return tuple(
        TagReport(tag=tag, num_bytes=size, policy="discard", backing="discarded") for tag, size in sizes.items()
    )
