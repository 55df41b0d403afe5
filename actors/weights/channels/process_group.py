"""One process group of one sender and the ranks of one engine, apart from any other group of the process.

The other side is SGLang's `/init_weights_update_group` (0.5.17), or our own server's. It meets at a TCP store and
builds its group through torch's own helper, which puts the group's name, the name again and the device in front of
every key; this module builds the very same backend on the very same keys without torch's default group, which belongs
to the trainer's gang (if there is one).

A group is used by one thread at a time; `abort` may come from any.
"""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import BackendConfig, PrefixStore, ProcessGroupGloo, Store

from ....core.errors import MyxaError, TrainError
from ....core.weight_channel import CollectiveBackend
from ....transport.address import own_address_towards

_FOR_EVER = timedelta(days=7)
"""What NCCL's watchdog waits: it would end the process. Our own deadlines are far shorter and end the group only."""
_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
POLL_S = 0.0002
"""How often a broadcast on a GPU is looked at: waiting on the device itself could not be ended by us."""
_ENVIRONMENT = threading.Lock()


class ChannelGroup:
    """A member's end of the group. Built by `join`."""

    def __init__(self, backend: Any, kind: CollectiveBackend) -> None:
        self._backend = backend
        self._kind = kind

    @staticmethod
    def join(
        store: Store,
        name: str,
        rank: int,
        world_size: int,
        device: torch.device,
        timeout_s: float,
        cancel: threading.Event | None = None,
        *,
        address: str,
    ) -> ChannelGroup:
        """Build this rank's end. With gloo it returns when all ranks are there and raises RuntimeError when they are
        not within `timeout_s`, which bounds every later broadcast too, or once `cancel` is set, which rank 0 looks at;
        NCCL connects in its first broadcast. `address`: of the store; gloo listens on the interface towards it."""
        kind: CollectiveBackend = "nccl" if device.type == "cuda" else "gloo"
        first_device = next(iter(BackendConfig(cast(Any, dist.Backend(kind))).get_device_backend_map()))
        keys = PrefixStore(f"{first_device}/", PrefixStore(f"{name}/", PrefixStore(name, store)))
        if kind == "nccl":
            backend = _nccl(keys, rank, world_size, name)
        else:
            if rank == 0:
                _await_members(keys, world_size, timeout_s, cancel or threading.Event())
            backend = ProcessGroupGloo(keys, rank, world_size, _gloo_options(address, timeout_s))
        return ChannelGroup(backend, kind)

    def broadcast(self, flat: Tensor, cancel: threading.Event, timeout_s: float) -> None:
        """Send `flat` from rank 0, or receive into it, on the current stream; returns when the bytes are through.
        Raises RuntimeError when the group fails, TimeoutError after `timeout_s`, MyxaError once `cancel` is set."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        if self._kind == "gloo":
            options.timeout = timedelta(seconds=max(timeout_s, 0.001))
            self._backend.broadcast([flat], options).wait()
            return
        self._backend.broadcast([flat], options).wait()  # the current stream waits, not the host
        done = torch.cuda.Event()
        done.record()
        deadline = time.monotonic() + timeout_s
        while not done.query():
            if cancel.wait(POLL_S):
                raise TrainError("the channel was given up meanwhile", remedy="see who left it, and why")
            if time.monotonic() > deadline:
                raise TimeoutError(f"no end within {timeout_s:g} s")

    def abort(self) -> None:
        """Break what is under way and all connections; never raises, never waits."""
        threading.Thread(target=self._abort, name="abort weight channel", daemon=True).start()

    def _abort(self) -> None:
        try:
            self._backend.abort()
        except (RuntimeError, MyxaError):
            return  # it was half-built, or broken already


def _await_members(keys: Store, world_size: int, timeout_s: float, cancel: threading.Event) -> None:
    """Until every other rank has put its address into the store, where gloo would wait without a way to cancel it."""
    addresses = [f"0/{rank}" for rank in range(1, world_size)]  # of gloo's first (and only) device
    deadline = time.monotonic() + timeout_s
    while not keys.check(addresses):
        if cancel.wait(0.002):
            raise RuntimeError("it was given up before all ranks were there")
        if time.monotonic() > deadline:
            missing = [address.removeprefix("0/") for address in addresses if not keys.check([address])]
            raise RuntimeError(f"rank {', '.join(missing)} of {world_size} never came")


def _gloo_options(address: str, timeout_s: float) -> Any:
    """Gloo itself would listen at whatever address the host's name means."""
    options = cast(Any, ProcessGroupGloo)._Options()
    options._devices = [cast(Any, ProcessGroupGloo).create_device(hostname=own_address_towards(address))]
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 2  # as many as gloo takes for one device
    return options


def _nccl(store: Store, rank: int, world_size: int, name: str) -> Any:
    """NCCL whose watchdog neither times out nor ends the process when a peer dies: a trainer outlives its engines. The
    constructor reads that choice from the environment alone, at this moment and for this group only."""
    kind = cast(Any, dist).ProcessGroupNCCL
    options = kind.Options(is_high_priority_stream=True)
    options._timeout = _FOR_EVER
    options.group_name = name
    with _ENVIRONMENT:
        before = os.environ.get(_ERROR_HANDLING)  # noqa: TID251 -- put back below
        os.putenv(_ERROR_HANDLING, "0")
        try:
            return kind(store, rank, world_size, options)
        finally:
            if before is None:
                os.unsetenv(_ERROR_HANDLING)
            else:
                os.putenv(_ERROR_HANDLING, before)
