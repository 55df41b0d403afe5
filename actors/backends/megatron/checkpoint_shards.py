"""Writing Megatron's shards (torch_dist) in three parts: copied away, written, made known.

    begin    collective: what each rank writes is planned, and its bytes are copied to the host
    write    files only; any thread, at any time after, while training changes the originals
    finish   collective: who wrote what is gathered into the index

megatron.core has an asynchronous save of its own; it forks or keeps a process, which outlives a trainer that is killed.
Here it plans and writes as it does there, in a thread of this process.
"""

from __future__ import annotations

import inspect
import queue
from typing import Any, cast

import torch
from torch import Tensor

from ....core.errors import TrainError
from . import mcore

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
        """This rank's files."""
        if self._request.async_fn is None:  # nothing of it lies here
            return
        writer = mcore.module(FILES).FileSystemWriterAsync
        if hasattr(writer, "write_preloaded_data_multiproc"):  # before 0.18: forks for each bucket
            _write_here(writer, self._request, self._arguments)
        else:
            self._request.async_fn(*self._arguments, **self._request.async_fn_kwargs)

    def finish(self) -> None:
        """Gather what all ranks wrote; rank 0 writes the index. Collective."""
        for finalize in self._request.finalize_fns:
            finalize()


def begin_shards(shards: dict[str, Any], folder: str) -> PendingShards:
    """Plan the writing of a state dict of shards and copy what this rank writes. Collective."""
    files = mcore.module(FILES)
    if files._results_queue is None:
        files._results_queue = queue.Queue()  # its only writer and its only reader are in this process
    base = mcore.module("dist_checkpointing.strategies.torch").TorchDistSaveShardedStrategy
    found: list[Any] = []

    class Held(base):  # a class of a class known at run time only
        def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
            chosen = "async_strategy" in inspect.signature(self.async_save).parameters
            ways = {"async_strategy": "mcore"} if chosen else {}
            found.append(self.async_save(sharded_state_dict, checkpoint_dir, **ways))

    strategy = Held("torch_dist", 1, thread_count=1)
    mcore.module("dist_checkpointing").save(shards, folder, sharded_strategy=strategy)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    pending = PendingShards(found[0])
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # the copies to the host are under way until now
    return pending


def _apart(bucket: Any) -> Any:
    """A bucket whose tensors on the host are copies: the next step changes the originals."""
    name, key, (texts, tensors) = bucket
    return name, key, (texts, [(item, cast(Tensor, tensor).clone()) for item, tensor in tensors])


def _write_here(writer: Any, request: Any, arguments: list[Any]) -> None:
    """What the request does, without forking for each file."""
    transforms = request.async_fn.args[0]
    results: dict[int, Any] = {}
    for number, bucket in enumerate(arguments[1]):
        done: queue.Queue[Any] = queue.Queue()
        ended: queue.Queue[int] = queue.Queue()
        ended.put(number)
        writer.write_preloaded_data(transforms, number, bucket, done, ended, True)
        _, outcome = done.get_nowait()
        if isinstance(outcome, Exception):
            raise TrainError(f"cannot write {bucket[0]}: {outcome}", remedy="check disk and rights") from outcome
        results[number] = outcome
    arguments[2].put(results)
