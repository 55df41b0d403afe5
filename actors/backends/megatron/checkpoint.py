"""Saving and restoring the state of training in Megatron's own format (torch_dist), inside our kind of folder.

    version_00000040/
        __0_0.distcp ...         weights, masters and moments as shards that know their place in the whole
        .metadata, common.pt     where each shard lies; what all ranks share
        rank-00000.safetensors   RNG state of rank 0
        manifest.json            written last: names, sizes and digests of all files, model, layout, counters, `extra`

Shards are put together as the reader's layout wants them, so a run may continue with other tp, pp, vpp, cp and dp. What
is collective, and the folder rules, are those of all checkpoints (`../checkpoint.py`).

megatron.core.dist_checkpointing keeps its index as a pickle. Digests show that the bytes are those that were written,
not who wrote them: resume from folders of your own runs only. It does the resharding; around it we keep three things
that it lacks or does badly: digests with an atomic commit, an asynchronous write without a child process (its own forks
or keeps a process, which outlives a trainer that is killed), and moments of torch's AdamW, whose `step` its loader
does not handle.
"""

from __future__ import annotations

import inspect
import queue
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from ....core.errors import TrainError
from ...checkpoints.folder import Manifest, check_model, rank_file
from ...models.safetensors_file import open_safetensors
from ..checkpoint import RankCopy, TrainingState, random_state, restore_random
from ..rank_backend import named_array
from . import mcore
from .adapters import MegatronAdapters
from .hf_weights import unwrapped
from .layout import ParallelLayout
from .schedule import MegatronPolicy

FILES = "dist_checkpointing.strategies.filesystem_async"


class PendingShards:
    """What one rank is about to write."""

    def __init__(self, request: Any) -> None:
        """`request`: megatron's AsyncRequest, planned and not yet run."""
        self._request = request
        self._arguments = list(request.async_fn_args)
        if request.preload_fn is not None:
            self._arguments[1] = [_apart(bucket) for bucket in request.preload_fn()]

    def write(self) -> None:
        """This rank's files. Raises TrainError when the disk refuses."""
        if self._request.async_fn is None:  # nothing of it lies here
            return
        writer = mcore.module(FILES).FileSystemWriterAsync
        if hasattr(writer, "write_preloaded_data_multiproc"):  # before 0.18: forks for each bucket
            _write_here(writer, self._request, self._arguments)
        else:
            _write_once(self._request, self._arguments)

    def finish(self) -> None:
        """Gather what all ranks wrote; rank 0 writes the index. Collective."""
        with as_train_error("finishing"):
            for finalize in self._request.finalize_fns:
                finalize()


def begin_shards(shards: dict[str, Any], folder: str) -> PendingShards:
    """Plan the writing of a state dict of shards and copy what this rank writes. Collective."""
    # Its only writer and its only reader are in this process. A new one for each: what was written and never finished
    # must not be read for what is written next.
    mcore.module(FILES)._results_queue = queue.Queue()
    save = mcore.module("dist_checkpointing").save
    strategy = mcore.module("dist_checkpointing.strategies.torch").TorchDistSaveShardedStrategy(
        "torch_dist", 1, thread_count=1
    )
    ways = {"async_strategy": "mcore"} if "async_strategy" in inspect.signature(save).parameters else {}
    with as_train_error("planning"):
        request = save(shards, folder, sharded_strategy=strategy, async_sharded_save=True, **ways)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    pending = PendingShards(request)
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # the copies to the host are under way until now
    return pending


@contextmanager
def as_train_error(action: str) -> Generator[None]:
    """Raise TrainError for what torch's checkpoints raise, which is no `Exception`: no other handler catches it."""
    try:
        yield
    except CheckpointException as error:
        first = next(iter(error.failures.values()), None)
        raise TrainError(
            f"{action} a checkpoint failed: {first[0] if first else error}", remedy="check disk and rights"
        ) from error


def _write_once(request: Any, arguments: list[Any]) -> None:
    """What the request does, with its own outcome looked at: a failure is put beside the results instead of raised."""
    outcomes: queue.Queue[Any] = queue.Queue()
    request.async_fn(*arguments[:2], outcomes, *arguments[3:], **request.async_fn_kwargs)
    outcome = outcomes.get_nowait()
    if not isinstance(outcome, dict):
        raise TrainError(f"cannot write shards: {outcome}", remedy="check disk and rights")
    failed = next((value for value in cast("dict[Any, Any]", outcome).values() if isinstance(value, Exception)), None)
    if failed is not None:
        raise TrainError(f"cannot write shards: {failed}", remedy="check disk and rights") from failed
    arguments[2].put(outcome)


def _apart(bucket: Any) -> Any:
    """A bucket whose tensors on the host are copies: the next step changes the originals."""
    name, key, (texts, tensors) = bucket
    return name, key, (texts, [(item, cast(Tensor, tensor).clone()) for item, tensor in tensors])


def _write_here(writer: Any, request: Any, arguments: list[Any]) -> None:
    """What the request does, without forking for each file."""
    transforms = request.async_fn.args[0]
    results: dict[int, Any] = {}
    for number, bucket in enumerate(arguments[1]):
        outbox: queue.Queue[Any] = queue.Queue()
        ended: queue.Queue[int] = queue.Queue()
        ended.put(number)
        writer.write_preloaded_data(transforms, number, bucket, outbox, ended, True)
        _, outcome = outbox.get_nowait()
        if isinstance(outcome, Exception):
            raise TrainError(f"cannot write {bucket[0]}: {outcome}", remedy="check disk and rights") from outcome
        results[number] = outcome
    arguments[2].put(results)


REFERENCE = "reference."
"""Before the names of the reference model's tensors."""
SHARDING = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}
"""How optimizer state is cut: by parameter, so that any layout can read it."""


@dataclass(frozen=True, kw_only=True)
class MegatronTrainingState(TrainingState):
    """What a checkpoint is made of."""

    policy: MegatronPolicy
    layout: ParallelLayout
    adapters: MegatronAdapters | None = None

    def facts(self) -> dict[str, Any]:
        return {"backend": "megatron", "layout": asdict(self.layout)}

    def copy(self, partial: Path) -> RankCopy:
        self.policy.optimizer.settle()
        shards = begin_shards(_sharded(self, is_loading=False), str(partial))
        return RankCopy([named_array(name, state) for name, state in random_state(self.world.device)], shards)

    def check(self, path: Path, manifest: Manifest) -> None:
        check_model(path, manifest, self.model, "megatron")
        before, now = manifest.layout.get("ep", 1), self.layout.ep
        if self.model.num_experts and (before > 1) != (now > 1):
            raise TrainError(
                f"checkpoint {path} was written with megatron.ep = {before}; Megatron keeps the optimizer state of "
                "experts apart if ep > 1 only",
                remedy="resume with ep > 1 if it was above 1, else with ep = 1",
            )

    def restore(self, path: Path, manifest: Manifest) -> None:
        with as_train_error("reading"):
            loaded = mcore.module("dist_checkpointing").load(_sharded(self, is_loading=True), str(path))
        if self.adapters is not None:
            self.adapters.restore(loaded["adapters"])
        for name, chunk in _named_chunks(self.policy.chunks) if self.adapters is None else ():
            chunk.load_state_dict(loaded[name], strict=True)
        _restore_optimizer(self.policy.optimizer.megatron, loaded["optimizer"])
        if self.reference is not None and self.reference.version:
            for name, chunk in _named_chunks(self.reference.model.chunks):
                parameters = {key.removeprefix(REFERENCE): value for key, value in loaded[f"{REFERENCE}{name}"].items()}
                chunk.load_state_dict(parameters, strict=True)
        own_file = path / rank_file(self.world.rank)
        if own_file.exists():  # not in a larger gang than the one that saved
            with open_safetensors(own_file) as own_tensors:
                restore_random(own_tensors, self.world.device)


def _sharded(state: MegatronTrainingState, *, is_loading: bool) -> dict[str, Any]:
    """Megatron's state dict of shards; keys of its tensors are global, those of the dict are this rank's stages."""
    group = mcore.parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {**SHARDING, "dp_cp_group": group}
    chunks = _named_chunks(state.policy.chunks)
    shards: dict[str, Any] = (
        {name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in chunks}
        if state.adapters is None
        else {"adapters": state.adapters.sharded()}
    )
    if state.reference is not None and state.reference.version:
        for name, chunk in _named_chunks(state.reference.model.chunks):
            shards[f"{REFERENCE}{name}"] = chunk.sharded_state_dict(prefix=REFERENCE, metadata=metadata)
    shards["optimizer"] = state.policy.optimizer.megatron.sharded_state_dict(
        shards, is_loading=is_loading, metadata=metadata
    )
    return shards


def _named_chunks(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, Any]]:
    for number, chunk in enumerate(chunks):
        yield (f"model{number}" if len(chunks) > 1 else "model"), unwrapped(chunk)


def _restore_optimizer(optimizer: Any, saved: Any) -> None:
    """Load state cut by parameter; options (decay rates of moments, kernels) stay those of this run. Where torch's
    AdamW is inside, its `step` is taken out of the way: Megatron copies every entry of a parameter's state from the
    shards, and there is none for `step`."""
    parts = list(getattr(optimizer, "chained_optimizers", [optimizer]))
    states = [saved] if len(parts) == 1 else [value for _, value in sorted(saved.items())]
    for part, state in zip(parts, states, strict=True):
        options = [{k: v for k, v in group.items() if k not in ("params", "step")} for group in part.param_groups]
        if state.get("param_state_sharding_type") != "fully_reshardable":
            part.load_state_dict(state)
        else:
            part.load_state_dict({name: value for name, value in state.items() if name != "param_state"})
            moments: dict[Any, dict[str, Tensor]] = part.optimizer.state
            steps = {parameter: values.pop("step") for parameter, values in moments.items() if "step" in values}
            part.load_parameter_state_from_fully_reshardable(state["param_state"])
            for parameter, step in steps.items():
                moments[parameter]["step"] = step.detach().clone()
        for group, own in zip(part.param_groups, options, strict=True):
            group.update(own)
