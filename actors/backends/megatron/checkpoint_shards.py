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
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

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
        with told("finishing"):
            for finalize in self._request.finalize_fns:
                finalize()


def begin_shards(shards: dict[str, Any], folder: str) -> PendingShards:
    """Plan the writing of a state dict of shards and copy what this rank writes. Collective."""
    files = mcore.module(FILES)
    # Its only writer and its only reader are in this process. A new one for each: what was written and never finished
    # must not be read for what is written next.
    files._results_queue = queue.Queue()
    base = mcore.module("dist_checkpointing.strategies.torch").TorchDistSaveShardedStrategy
    found: list[Any] = []

    class Held(base):  # a class of a class known at run time only
        def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
            chosen = "async_strategy" in inspect.signature(self.async_save).parameters
            ways = {"async_strategy": "mcore"} if chosen else {}
            found.append(self.async_save(sharded_state_dict, checkpoint_dir, **ways))

    strategy = Held("torch_dist", 1, thread_count=1)
    with told("planning"):
        mcore.module("dist_checkpointing").save(shards, folder, sharded_strategy=strategy)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    pending = PendingShards(found[0])
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # the copies to the host are under way until now
    return pending


@contextmanager
def told(what: str) -> Generator[None]:
    """Raise TrainError for what torch's checkpoints raise: it is no `Exception`, and would pass everybody by."""
    try:
        yield
    except CheckpointException as error:
        first = next(iter(error.failures.values()), None)
        raise TrainError(
            f"{what} a checkpoint failed: {first[0] if first else error}", remedy="check disk and rights"
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
        done: queue.Queue[Any] = queue.Queue()
        ended: queue.Queue[int] = queue.Queue()
        ended.put(number)
        writer.write_preloaded_data(transforms, number, bucket, done, ended, True)
        _, outcome = done.get_nowait()
        if isinstance(outcome, Exception):
            raise TrainError(f"cannot write {bucket[0]}: {outcome}", remedy="check disk and rights") from outcome
        results[number] = outcome
    arguments[2].put(results)
