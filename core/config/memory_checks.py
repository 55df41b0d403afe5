"""What a run whose trainer and engine take turns on a device must look like: `[memory] share = "switch"`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from .conflict import Conflict

if TYPE_CHECKING:
    from .root import RunConfig

SHARE = "memory.share"


def memory_conflicts(config: RunConfig) -> Iterator[Conflict]:
    """Everything in the run file that does not go with taking turns."""
    if config.memory.share == "none" or config.roles.rollout.kind == "recorded":  # which has no memory at all
        return
    yield from _place_conflicts(config)
    yield from _engine_conflicts(config)
    yield from _trainer_conflicts(config)
    if config.roles.trainer.device_ids:
        yield from _gpu_conflicts(config)
    else:
        yield from _host_conflicts(config)


def _place_conflicts(config: RunConfig) -> Iterator[Conflict]:
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
    """Devices of the trainer alone stand idle in the engines' turn; devices of an engine alone would in the trainer's,
    and need no lease then."""
    return bool(engines) == bool(trainers) and set(engines) <= set(trainers)


def _engine_conflicts(config: RunConfig) -> Iterator[Conflict]:
    attach, rollout = config.engine.attach, config.roles.rollout
    if len(attach) > rollout.count or config.engine.router:
        yield Conflict(
            ("engine.attach", "engine.router", SHARE),
            "must be one server for each rollout actor when trainer and engine take turns on a device: name as many in "
            "engine.attach as roles.rollout.count says, without engine.router",
        )
    if "enable_memory_saver" in config.sglang:
        yield Conflict(
            ("sglang.enable_memory_saver", SHARE), 'is myxa\'s own; leave it out, memory.share = "switch" sets it'
        )


def _trainer_conflicts(config: RunConfig) -> Iterator[Conflict]:
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
            ("megatron.offload_optimizer", SHARE), "must be 0: the optimizer leaves the device as a whole between steps"
        )


def _gpu_conflicts(config: RunConfig) -> Iterator[Conflict]:
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


def _host_conflicts(config: RunConfig) -> Iterator[Conflict]:
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
            ("memory.capacity_mb", SHARE), "must be set on the CPU: MiB of the memory that stands for a device"
        )
