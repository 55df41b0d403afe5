"""What a trainer rank is built from: backend, communicators, checkpoints, the gang's start, weight channels.

Part of the composition root: this file and `program.py` name the concrete classes. It imports torch, so only trainers
import it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from ...actors.backends.torch_backend.world import Gang
from ...actors.checkpoints.folder import OTHERS_ONE, list_checkpoints
from ...actors.models.hf_folder import read_config
from ...actors.trainer.checkpoints import CheckpointOptions
from ...actors.trainer.start_point import StartPoint
from ...actors.weights.publish import ChannelEnd
from ...core.clock import Clock
from ...core.config import RunConfig
from ...core.errors import ConfigError, LaunchError, TrainError, raised_as
from ...core.messages import SamplingParams, WeightChannel
from ...core.process import boot_id
from ...core.protocols import TrainBackend, WeightSender
from ...core.samples import PAIR, Group, Prompt
from ...core.weight_channel import SENT_CHANNELS, SHARED_CHANNELS
from ...memory.communicators.reload import ReloadComms, missing_for_build, proxied_name
from ..actor_spec import ActorSpec
from ..run_lineage.origin import CHECKPOINTS, UNDONE, RunOrigin, origin_events, past_of, put_away, start_keeper
from ..run_lineage.resume_point import named_checkpoint
from .memory_parts import MIB, MakeComms, megatron_offload, takes_turns, torch_offload
from .weight_channels import choose_channel, has_reader, held_fp8

REPEATABLE_ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "TORCHINDUCTOR_DETERMINISTIC": "1",
}
"""For libraries that choose kernels and the order of sums by timing."""
FEW_CHANNELS = ("NCCL_MAX_NCHANNELS", "1")
"""A gang of one rank sends nothing: 10 MiB of the GPU per group instead of 512. It does not apply where weights go to
engines by NCCL: both ends of a group need the same number, or messages are truncated."""

# -- the backend


def make_backend(spec: ActorSpec, config: RunConfig, gang: Gang, clock: Clock) -> TrainBackend:
    """The rank's backend, not set up yet. Deterministic on GPUs: operations without such a kernel raise."""
    from ...actors.backends.rank_backend import RankSettings

    if config.rollout.deterministic and spec.devices:
        _use_repeatable_kernels()
    settings: dict[str, Any] = {
        "model_path": config.model.path,
        "algo": config.algo,
        "optimizer": config.optimizer,
        "trainer": config.trainer,
        "lora": config.lora,
        "critic": config.critic,
        "max_new_tokens": config.rollout.max_new_tokens,
        "num_steps": config.run.num_steps,
        "seed": config.run.seed,
        "device": "cuda" if spec.devices else "cpu",
        "num_threads": spec.threads,
        "gang": gang,
        # The engines' number type, for servers, to which tensors may go from device to device; else the trainer's own.
        "serving_dtype": config.engine.dtype if config.roles.rollout.kind == "sglang" else "",
    }
    if spec.kind != "megatron":
        from ...actors.backends.torch_backend.backend import TorchBackend

        return TorchBackend(RankSettings(**settings), clock, offload=torch_offload(spec, config))
    from ...actors.backends.megatron.backend import MegatronBackend, MegatronRankSettings

    if spec.devices:  # before CUDA starts: one queue, so that overlapped collectives run in the order of their calls
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    megatron = config.megatron
    if config.rollout.deterministic:  # else its embedding sums gradients in any order
        megatron = megatron.model_copy(update={"model": {"deterministic_mode": True, **megatron.model}})
    offload = megatron_offload(spec, config)
    return MegatronBackend(MegatronRankSettings(megatron=megatron, **settings), clock, offload=offload)


def _use_repeatable_kernels() -> None:
    """Before CUDA starts."""
    import torch
    from torch.utils import deterministic

    for name, value in REPEATABLE_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)
    # Nothing here reads memory that was not written.
    deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue] -- set by a property


def shard_of_rank(spec: ActorSpec, config: RunConfig, world_size: int) -> tuple[int, ...]:
    """The shard that each rank trains: its own, or that of the replica of which it holds a part."""
    if spec.kind != "megatron":
        return tuple(range(world_size))
    from ...actors.backends.megatron.layout import ParallelLayout

    layout = ParallelLayout.of(config.megatron)
    return tuple(layout.dp_rank_of(rank, world_size) for rank in range(world_size))


def pair_maker(config: RunConfig) -> Callable[[Prompt], Group] | None:
    """Makes the samples of a held-out pair as rollout actors make those that are trained on."""
    if not (config.algo.learns_pairs and config.eval.has_prompts):
        return None
    from ...actors.models.tokenizer import load_tokenizer
    from ...actors.rollout.group_runner import no_engine
    from ...actors.workflows.episode import Episode, ModelAccess
    from ...actors.workflows.named import answer_of_pair
    from ...actors.workflows.turn_renderer import TurnRenderer

    path = config.model.path
    tokenizer, length = load_tokenizer(path, config.data), config.engine.context_length
    renderer, sampling = TurnRenderer(tokenizer), SamplingParams(temperature=config.rollout.temperature)
    model = ModelAccess(
        generate=no_engine, sampling=sampling, context_length=length or read_config(path).context_length
    )

    def make(prompt: Prompt) -> Group:
        answers = tuple(
            answer_of_pair(
                Episode(prompt=prompt, index=index, tokenizer=tokenizer, model=model, renderer=renderer), prompt, index
            )
            for index in range(len(PAIR))
        )
        rewards = np.asarray([answer.reward for answer in answers], np.float32)
        return Group(prompt=prompt, samples=answers, rewards=rewards)

    return make


# -- communicators


def gang_comms(config: RunConfig, gang: Gang, *, on_gpus: bool) -> tuple[Gang, MakeComms]:
    """The gang with the backend that it must be initialised with, and a factory of its communicators' residency,
    called after initialisation; None: they stay. A gang of one rank has no communicators to release.

    Raises ConfigError for a method that this process does not have.
    """
    if gang.world_size == 1 and on_gpus and choose_channel(config) != "nccl":
        os.environ.setdefault(*FEW_CHANNELS)
    if config.memory.share == "none" or gang.world_size == 1:
        return gang, None
    setting = config.memory.communicators
    lacking = missing_for_build()
    if setting == "reload" and lacking:
        raise ConfigError(
            f'memory.communicators = "reload": {lacking}', remedy='install it, or set "auto" or "keep": they stay'
        )
    if setting == "keep" or lacking or (setting == "auto" and not on_gpus):  # gloo holds no device memory
        return gang, None
    comms = ReloadComms()
    comms.register()
    return replace(gang, backend=proxied_name("nccl" if on_gpus else "gloo")), lambda: comms


# -- the start of the gang, its checkpoints


class GangStart:
    """A `StartFinder`: the checkpoint that a gang begins from. Rank 0 asks for all ranks.

    First start: what `trainer.resume` names, else the model folder. A resumed run falls back to an older checkpoint of
    its own, which its ledger can go back to, if the named one is torn.
    Restart: the newest one that this run wrote, and that was not undone since; else as at the first start.

    Here only file sizes are checked; loading checks the bytes, and what is torn then is passed in as `torn`. Once all
    ranks have begun, newer checkpoints are put away: training continues under the same version numbers, so the next
    restart would take a checkpoint that was skipped for a transient error for the newest.
    """

    def __init__(self, spec: ActorSpec, config: RunConfig, run_dir: Path) -> None:
        self._attempt = spec.attempt
        self._start_name = config.trainer.resume
        self._run_dir = run_dir
        self._checkpoints = run_dir / CHECKPOINTS

    def find(self, torn: Mapping[str, str]) -> StartPoint:
        """See `StartFinder`. Raises TrainError if `trainer.resume` names nothing whole, or nothing older will do."""
        origin = RunOrigin.load(self._run_dir)
        floor = origin.lives[-1].floor if origin.lives else 0
        place, passed_over = "", list[str]()
        # whether the checkpoint that this run was resumed from turned out to be torn
        falls_back = bool(torn) and Path(self._start_name).resolve().parent == self._checkpoints.resolve()
        checkpoints, too_old = list_checkpoints(self._checkpoints) if self._attempt or falls_back else (), list[int]()
        for info in sorted(checkpoints, key=lambda info: info.version, reverse=True):
            problem = torn.get(str(info.path)) or info.problem or origin.why_undone(info)
            if not problem and info.version < floor:
                too_old.append(info.version)
                problem = f"the run's own ledger goes back to version {floor} at most"
            if not problem:
                place = str(info.path)
                break
            passed_over.append(problem if str(info.path) in problem else f"{info.path}: {problem}")
        if falls_back and not place:
            raise self._nothing(passed_over, too_old)
        return StartPoint(
            checkpoint=place or self._start_checkpoint(torn), is_restart=bool(self._attempt),
            passed_over=tuple(passed_over), life=len(origin.lives), attempt=self._attempt,
        )  # fmt: skip

    def begun(self, start: StartPoint, version: int) -> None:
        if not (start.is_restart or start.passed_over):
            return
        problem = f"what is newer than version {version} cannot be put away"
        with raised_as(TrainError, problem, OSError, LaunchError, remedy=f"check disk and rights of {self._run_dir}"):
            for info in list_checkpoints(self._checkpoints):
                if info.version > version and str(info.path) != start.checkpoint:
                    put_away(info.path, past_of(self._run_dir, start.life) / UNDONE)
            RunOrigin.load(self._run_dir).went_back(start.attempt, version).save(self._run_dir)
            if (place := Path(start.checkpoint)).parent == self._checkpoints:
                start_keeper(self._run_dir)(place)

    def _nothing(self, passed_over: list[str], too_old: list[int]) -> TrainError:
        """Nothing is moved: a transient disk error may be over when the run is resumed the next time."""
        causes = "".join(f"\n  {text}" for text in passed_over)
        again = f"`myxa resume {self._run_dir} --from"
        return TrainError(
            f"no checkpoint in {self._checkpoints} can be used:{causes}",
            remedy=f"end the run, then {again} {too_old[0]}`, with the copy of the ledger in that checkpoint"
            if too_old
            else "start a new run with its config.toml",
        )

    def _start_checkpoint(self, torn: Mapping[str, str]) -> str:
        if not self._start_name:
            return ""
        place = str(named_checkpoint(self._start_name))
        if place in torn:
            raise TrainError(torn[place], remedy=f"name an older one; if a file is missing: {OTHERS_ONE}")
        return place


def checkpoint_options(spec: ActorSpec, config: RunConfig, run_dir: Path) -> CheckpointOptions:
    return CheckpointOptions(
        run_dir=str(run_dir),
        trainer=config.trainer,
        at_stop=config.trainer.checkpoint_at_stop and not config.megatron.offload_optimizer,
        origin=tuple if spec.attempt else lambda: origin_events(run_dir),
        keep_start=start_keeper(run_dir),
        writer=(len(RunOrigin.load(run_dir).lives), spec.attempt),
    )


BOUNDS: Mapping[str, float] = {"float32": 1e-3, "float16": 0.02, "bfloat16": 0.05, "fp8": 0.15}
"""Coarsest precision on either side, from fine to coarse -> nats; about 2.5 times what was seen of sound pairs on GPUs
(bf16 0.02)."""
COARSE_WORDS = ("fp8", "int8", "int4", "awq", "gptq", "w4a", "w8a", "fp4")
"""Beginnings and parts of names of quantisations."""


def guard_bound(config: RunConfig) -> float:
    """Nats by which engines may differ from the trainer; 0: as they like. Penalties change what an engine draws from,
    which the trainer does not repeat; recorded log-probs are of the weights of then."""
    rollout, bound = config.rollout, config.guard.bound
    penalties = rollout.frequency_penalty or rollout.presence_penalty or rollout.repetition_penalty != 1
    if config.data.is_recorded or penalties or rollout.min_new_tokens:
        return 0.0
    if bound != "auto":
        return bound
    shapes = config.engine.shapes(config.sglang)
    keys = ("quantization", "kv_cache_dtype")
    precisions = " ".join(str(shape.table.get(key, "")) for shape in shapes for key in keys).lower()
    if any(word in precisions for word in COARSE_WORDS) or held_fp8(config, read_config(config.model.path)):
        return BOUNDS["fp8"]
    return max(BOUNDS[config.trainer.dtype], BOUNDS[config.engine.dtype])


# -- weight channels


def channel_end(config: RunConfig, run_dir: Path, rank: int, *, local_rank: int) -> ChannelEnd:
    from ...actors.weights.channels.host import ReadChannel, make_writer

    channel = choose_channel(config)
    if channel in SENT_CHANNELS:
        return ChannelEnd(channel, sender=weight_sender(config, rank, channel, local_rank=local_rank))
    if rank:
        return ChannelEnd(channel)
    folder, every = run_dir / "weights", config.weights.full_every
    lora = {"rank": config.lora.rank, "alpha": config.lora.alpha} if config.lora.rollout == "adapter" else {}
    writer = make_writer(cast(ReadChannel, channel), folder, Path(config.model.path), full_every=every, lora=lora)
    return ChannelEnd(channel, writer=writer)


def weight_sender(config: RunConfig, rank: int, channel: WeightChannel, *, local_rank: int) -> WeightSender:
    from ...actors.weights.channels.plan import joins_parameters
    from ...actors.weights.channels.sender import DeviceWeightSender, Fp8Rule, SentChannel

    is_shared = channel in SHARED_CHANNELS
    return DeviceWeightSender(
        f"trainer/{rank}", channel=cast(SentChannel, channel), bucket_bytes=config.weights.bucket_mb * MIB,
        host=boot_id(), quantise=Fp8Rule.of_folder(Path(config.served_path)), keeps_buffers=not takes_turns(config),
        is_needed=not is_shared or has_reader(config, local_rank),
        joins=is_shared and joins_parameters(read_config(config.model.path)),
    )  # fmt: skip
