"""Saving and restoring the state of training in Megatron's own format (torch_dist), inside our kind of folder.

    version_00000040/
        __0_0.distcp ...         weights, masters and moments as shards that know their place in the whole
        .metadata, common.pt     where each shard lies; what all ranks share
        rank-00000.safetensors   RNG state of rank 0
        manifest.json            written last: names, sizes and digests of all files, model, layout, counters, `extra`

Shards are put together as the reader's layout wants them, so a run may go on with other tp, pp, vpp, cp and dp. The
folder rules (grows under a hidden name, digests are checked before anything is loaded, torn ones are told apart) are
the torch backend's.

megatron.core.dist_checkpointing keeps its index as a pickle. Digests show that the bytes are those that were written,
not who wrote them: resume from folders of your own runs only.

Library considered: megatron.core.dist_checkpointing does the resharding; around it we keep three things that it lacks
or does badly: digests with an atomic commit, writing without child processes (it forks, and keeps a manager process
that outlives a killed trainer), and moments of torch's AdamW, over whose `step` its loader trips.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
from torch import Tensor, nn

from ....core.errors import TrainError
from ...models.hf_folder import ModelConfig
from ...models.safetensors_file import open_safetensors, write_safetensors
from ..torch_backend.checkpoint import RNG_CPU, RNG_CUDA, check_extra, check_model, identity_of
from ..torch_backend.checkpoint_folder import (
    FORMAT,
    FileEntry,
    Manifest,
    begin,
    check_digest,
    commit,
    describe_file,
    find_checkpoint,
    partial_of,
    rank_file,
    read_manifest,
)
from ..torch_backend.export import named_array
from ..torch_backend.tensors import from_bytes
from . import mcore
from .checkpoint_files import files_of, list_of
from .optimizer import MegatronAdamW
from .world import MegatronWorld

SHARDING = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}
"""How optimizer state is cut: by parameter, so that any layout can read it."""


@dataclass(frozen=True, slots=True)
class TrainingState:
    """What a checkpoint is made of."""

    world: MegatronWorld
    optimizer: MegatronAdamW
    model: ModelConfig


def save_checkpoint(folder: str | Path, state: TrainingState, extra: Mapping[str, Any]) -> None:
    """Write a checkpoint to `folder`; it appears there when it is complete on all ranks. Collective.

    `extra` must be JSON. Raises TrainError (on every rank) if any rank fails; an older checkpoint there then stays.
    """
    world, target = state.world, Path(folder)
    what = f"saving checkpoint {target}"
    check_extra(extra)
    with world.together(what):
        if world.rank == 0:
            begin(target)
    partial = partial_of(target)
    with world.together(what):
        state.optimizer.settle()
        mcore.module("dist_checkpointing").save(
            _sharded(state, is_loading=False), str(partial), sharded_strategy=_strategy()
        )
        write_safetensors(partial / rank_file(world.rank), _random_state(world.device))
    with world.together(what):
        own = [describe_file(path) for path in files_of(partial, world.rank)]
        (partial / list_of(world.rank)).write_bytes(msgspec.json.encode(own))
    with world.together(what):
        if world.rank == 0:
            commit(target, _manifest(state, partial, extra))


def load_checkpoint(folder: str | Path, state: TrainingState) -> dict[str, Any]:
    """Restore weights, optimizer and RNG; returns `extra`. Collective.

    Raises TrainError if the checkpoint is torn, of another model or of another kind of trainer; weights are untouched
    then.
    """
    found: list[tuple[Path, Manifest]] = []
    world = state.world
    with world.together(f"loading checkpoint {folder}"):
        path = find_checkpoint(folder)
        manifest = read_manifest(path)
        check_model(path, manifest, state.model, "megatron")
        _check_layout(path, manifest, state)
        for number, entry in enumerate(manifest.files):
            if number % world.size == world.rank:  # one reading by somebody is enough: what is told is told to all
                check_digest(path, entry)
        found.append((path, manifest))
    path, manifest = found[0]
    with world.together(f"loading checkpoint {path}"):
        loaded = mcore.module("dist_checkpointing").load(_sharded(state, is_loading=True), str(path))
        for name, chunk in _named_chunks(state.optimizer.chunks):
            chunk.load_state_dict(loaded[name], strict=True)
        _restore_optimizer(state.optimizer.megatron, loaded["optimizer"])
        state.optimizer.num_updates = manifest.num_updates
        _restore_random(path / rank_file(world.rank), world.device)
    return manifest.extra


# -- what Megatron saves and loads


def _sharded(state: TrainingState, *, is_loading: bool) -> dict[str, Any]:
    """Megatron's state dict of shards; keys of its tensors are global, those of the dict are this rank's stages."""
    group = mcore.parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {**SHARDING, "dp_cp_group": group}
    shards: dict[str, Any] = {
        name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in _named_chunks(state.optimizer.chunks)
    }
    shards["optimizer"] = state.optimizer.megatron.sharded_state_dict(shards, is_loading=is_loading, metadata=metadata)
    return shards


def _named_chunks(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, Any]]:
    """The bare models under their wrappers, by the names that Megatron gives to virtual stages."""
    for number, chunk in enumerate(chunks):
        bare: Any = chunk
        while hasattr(bare, "module"):
            bare = bare.module
        yield (f"model{number}" if len(chunks) > 1 else "model"), bare


def _restore_optimizer(optimizer: Any, saved: Any) -> None:
    """Load state cut by parameter. Where torch's AdamW is inside, its `step` is taken out of the way: Megatron copies
    every entry of a parameter's state from the shards, and there is none for `step`."""
    parts = list(getattr(optimizer, "chained_optimizers", [optimizer]))
    states = [saved] if len(parts) == 1 else [value for _, value in sorted(saved.items())]
    for part, state in zip(parts, states, strict=True):
        if state.get("param_state_sharding_type") != "fully_reshardable":
            part.load_state_dict(state)
            continue
        rest = {name: value for name, value in state.items() if name != "param_state"}
        part.load_state_dict(rest)
        moments: dict[Any, dict[str, Tensor]] = part.optimizer.state
        steps = {parameter: values.pop("step") for parameter, values in moments.items() if "step" in values}
        part.load_parameter_state_from_fully_reshardable(state["param_state"])
        for parameter, step in steps.items():
            moments[parameter]["step"] = step.detach().clone()


def _strategy() -> Any:
    """torch_dist, written by this process itself: no fork, no manager process, no thread."""
    files = mcore.module("dist_checkpointing.strategies.filesystem_async")
    if files._results_queue is None:
        files._results_queue = queue.Queue()  # its only writer and its only reader are this thread
    base = mcore.module("dist_checkpointing.strategies.torch").TorchDistSaveShardedStrategy
    if not hasattr(files.FileSystemWriterAsync, "write_preloaded_data_multiproc"):
        return base("torch_dist", 1, thread_count=1)  # since 0.18 one bucket is written in place

    class InPlace(base):  # a class of a class known at run time only
        def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
            _write_in_place(files.FileSystemWriterAsync, self.async_save(sharded_state_dict, checkpoint_dir))

    return InPlace("torch_dist", 1, thread_count=1)


def _write_in_place(writer: Any, request: Any) -> None:
    """What `AsyncRequest.execute_sync` does, without forking for each file."""
    if request.async_fn is not None:
        transforms = request.async_fn.args[0]
        results: dict[int, Any] = {}
        for number, bucket in enumerate(request.preload_fn()):
            done: queue.Queue[Any] = queue.Queue()
            ended: queue.Queue[int] = queue.Queue()
            ended.put(number)
            writer.write_preloaded_data(transforms, number, bucket, done, ended, True)
            _, outcome = done.get_nowait()
            if isinstance(outcome, Exception):
                raise TrainError(f"cannot write {bucket[0]}: {outcome}", remedy="check disk and rights") from outcome
            results[number] = outcome
        request.async_fn_args[2].put(results)
    cast(Any, torch.distributed).barrier()
    for finish in request.finalize_fns:
        finish()


# -- what lies beside


def _manifest(state: TrainingState, partial: Path, extra: Mapping[str, Any]) -> Manifest:
    """The manifest from every rank's list of files; the lists go."""
    entries: list[FileEntry] = []
    for rank in range(state.world.size):
        place = partial / list_of(rank)
        entries.extend(msgspec.json.decode(place.read_bytes(), type=list[FileEntry]))
        place.unlink()
    return Manifest(
        format=FORMAT,
        model=identity_of(state.model),
        world_size=state.world.size,
        num_updates=state.optimizer.num_updates,
        files=tuple(entries),
        extra=dict(extra),
        backend="megatron",
        layout=asdict(state.world.layout),
    )


def _check_layout(path: Path, manifest: Manifest, state: TrainingState) -> None:
    had_experts_apart = manifest.layout.get("ep", 1) > 1
    if state.model.num_experts and had_experts_apart != (state.world.layout.ep > 1):
        raise TrainError(
            f"checkpoint {path} was written with megatron.ep = {manifest.layout.get('ep', 1)}; Megatron keeps the "
            "optimizer state of experts apart if ep > 1 only",
            remedy="resume with ep > 1 if it was above 1, else with ep = 1",
        )


def _random_state(device: torch.device) -> list[Any]:
    found = [named_array(RNG_CPU, torch.get_rng_state())]
    if device.type == "cuda":
        found.append(named_array(RNG_CUDA, torch.cuda.get_rng_state(device)))
    return found


def _restore_random(path: Path, device: torch.device) -> None:
    if not path.exists():  # a larger gang than the one that saved
        return
    with open_safetensors(path) as own:
        torch.set_rng_state(from_bytes(own[RNG_CPU]))
        if RNG_CUDA in own and device.type == "cuda":
            torch.cuda.set_rng_state(from_bytes(own[RNG_CUDA]), device)
