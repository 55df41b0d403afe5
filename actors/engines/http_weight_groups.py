"""SGLang's routes for weights that come by broadcast (0.5.17), on an embedded engine: the receiving end of
`sglang.device_weights.GroupRoute`, over gloo.

    /init_weights_update_group          join the group of a sender
    /update_weights_from_distributed    receive the tensors named; load_format "flattened_bucket" or one by one
    /destroy_weights_update_group       leave it
    /get_weights_by_name                a look at one weight of the served version

What differs from SGLang: tensors are collected beside the weights that serve and change places with them when a request
brings `weight_version` (or `/update_weight_version` gets one); SGLang loads each as it comes. A transfer that fails
half-way therefore harms nothing here. Answers to buckets carry the digest of what was received.

Blocking work is done in daemon threads: a sender that hangs costs a thread until `GROUP_S`, nothing else.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Literal, cast

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from aiohttp import web
from torch import Tensor

from ...core.errors import EngineError, MyxaError, RequestRefused
from ...core.messages import TensorSpec
from ...core.protocols import NamedArray
from ..daemon_thread import in_daemon_thread
from ..torch_store import find_store
from ..weights.channels.plan import ITEM_BYTES
from ..weights.channels.process_group import ChannelGroup
from ..weights.channels.staging import buffer_mark, join_marks, padded_bytes
from .embedded.engine import EmbeddedEngine
from .http_bodies import json_response, read_body, version_of

GROUP_S = 120.0
"""Deadline of joining, and of one reception."""
MAX_TENSOR_BYTES = 1 << 36


class InitGroupBody(msgspec.Struct, frozen=True, kw_only=True):
    """`/init_weights_update_group`."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: Literal["gloo", "nccl"] = "nccl"


class DestroyGroupBody(msgspec.Struct, frozen=True, kw_only=True):
    """`/destroy_weights_update_group`."""

    group_name: str = "weight_update_group"


class DistributedBody(msgspec.Struct, frozen=True, kw_only=True):
    """`/update_weights_from_distributed`; fields about caches are accepted and mean nothing here."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    group_name: str = "weight_update_group"
    abort_all_requests: bool = False
    weight_version: str | None = None
    load_format: Literal["flattened_bucket"] | None = None


class ByNameBody(msgspec.Struct, frozen=True, kw_only=True):
    """`/get_weights_by_name`."""

    name: str
    truncate_size: int = 100


class WeightGroups:
    """The groups that a server has joined, and what has come through them."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine
        self._groups: dict[str, ChannelGroup] = {}
        self._cancel_events: dict[str, threading.Event] = {}
        self._arrived: dict[str, NamedArray] = {}
        self._lent: list[Tensor] = []
        """Buffers that `_arrived` lies in."""
        self._spare: list[Tensor] = []
        self._turn = asyncio.Lock()

    async def join(self, body: InitGroupBody) -> None:
        """Raises EngineError when the group does not come about."""
        if body.backend != "gloo":
            raise EngineError(
                "this engine computes on the CPU: backend nccl is not for it", remedy='send backend "gloo"'
            )
        name = body.group_name
        if name in self._cancel_events or body.world_size < 2 or not 0 < body.rank_offset < body.world_size:
            raise EngineError(
                f"group {body.group_name!r} is there already, or rank {body.rank_offset} is not of {body.world_size}",
                remedy="every group needs its own name; the sender is rank 0",
            )

        cancel = self._cancel_events[name] = threading.Event()

        def build() -> ChannelGroup:
            store = find_store(body.master_address, body.master_port, body.world_size, GROUP_S)
            device = torch.device("cpu")
            rank, address = body.rank_offset, body.master_address
            group = ChannelGroup.join(store, name, rank, body.world_size, device, GROUP_S, address=address)
            if cancel.is_set():
                group.abort()
            return group

        try:
            group = await in_daemon_thread(build, f"join {name}")
        except BaseException as err:
            self._drop(name)
            if not isinstance(err, RuntimeError | ValueError | OSError):
                raise
            raise EngineError(f"group {name!r} did not meet: {err}", remedy="is the sender alive?") from err
        if cancel.is_set():
            raise EngineError(f"group {name!r} was left while it met", remedy="join under another name")
        self._groups[name] = group

    def leave(self, name: str) -> None:
        """A group that still meets is left once it has met. Raises EngineError for one that is not there."""
        if not self._drop(name):
            raise EngineError(f"group {name!r} does not exist", remedy="it was destroyed before")

    def _drop(self, name: str) -> bool:
        """End it, and whatever is under way in it; whether it was there."""
        cancel, group = self._cancel_events.pop(name, None), self._groups.pop(name, None)
        if cancel is not None:
            cancel.set()
        if group is not None:
            group.abort()
        return cancel is not None

    async def receive(self, body: DistributedBody) -> str:
        """Take the tensors in; returns the digest of a flattened bucket ("" for single tensors). One request at a time,
        in the order in which they come, as SGLang's scheduler does. Raises EngineError; the group is then left."""
        group = self._groups.get(body.group_name)
        if group is None:
            raise EngineError(
                f"group {body.group_name!r} is not among {sorted(self._groups)}",
                remedy="call /init_weights_update_group first",
            )
        specs = _specs(body)
        cancel = self._cancel_events[body.group_name]
        async with self._turn:
            buffer = self._buffer(specs[-1].offset + specs[-1].num_bytes)
            whole = body.load_format is not None

            def work() -> str:
                parts = [buffer[: specs[-1].offset + specs[-1].num_bytes]]
                if not whole:
                    parts = [buffer[s.offset : s.offset + s.num_bytes] for s in specs]
                for part in parts:
                    group.broadcast(part, cancel, GROUP_S)
                return join_marks([buffer_mark(buffer)]) if whole else ""

            try:
                digest = await in_daemon_thread(work, f"receive {body.group_name}")
            except (RuntimeError, MyxaError) as err:
                self._forget()
                self._drop(body.group_name)
                raise EngineError(
                    f"reception through {body.group_name!r} failed: {err}", remedy="join it again"
                ) from err
            except asyncio.CancelledError:  # its thread still receives, and the result is dropped
                self._forget()
                self._drop(body.group_name)
                raise
            self._lent.append(buffer)
            raw = cast("npt.NDArray[np.uint8]", buffer.numpy()).data
            for spec in specs:
                self._arrived[spec.name] = NamedArray(spec=spec, data=raw[spec.offset : spec.offset + spec.num_bytes])
            return digest

    def _buffer(self, num_bytes: int) -> Tensor:
        size = padded_bytes(num_bytes)
        for number, spare in enumerate(self._spare):
            if spare.numel() == size:
                buffer = self._spare.pop(number)
                buffer[num_bytes:] = 0
                return buffer
        return torch.zeros(size, dtype=torch.uint8)

    def _forget(self) -> None:
        """Nothing of what came is used; its buffers may still be written to by a broken group."""
        self._arrived.clear()
        self._lent.clear()

    @property
    def has_news(self) -> bool:
        """Whether tensors have come that do not serve yet."""
        return bool(self._arrived)

    async def serve(self, version: int) -> None:
        """What has come becomes `version`. Raises EngineError, naming the weights, if it is not all."""
        async with self._turn:
            try:
                await self._engine.prepare_tensors(self._arrived, version)
                await self._engine.commit_weights(version)
            finally:
                self._arrived.clear()
                self._spare, self._lent = self._lent, []

    async def close(self) -> None:
        """Leave all groups."""
        for name in list(self._cancel_events):
            self._drop(name)


def _specs(body: DistributedBody) -> Sequence[TensorSpec]:
    """Places in one flat buffer, in the order of the request. Raises RequestRefused for lists that do not fit."""
    if not body.names or not len(body.names) == len(body.dtypes) == len(body.shapes):
        raise RequestRefused("names, dtypes and shapes must be of one length, at least 1", remedy="see SGLang")
    specs: list[TensorSpec] = []
    offset = 0
    for name, dtype, shape in zip(body.names, body.dtypes, body.shapes, strict=True):
        item = ITEM_BYTES.get(dtype.removeprefix("torch."), 0)
        num_bytes = item * math.prod(shape)
        if not 0 < num_bytes <= MAX_TENSOR_BYTES or min(shape, default=1) < 0 or offset % item:
            raise RequestRefused(
                f"{name}: {dtype} {list(shape)} at byte {offset} cannot be received",
                remedy="order the tensors of a bucket by item size; send no empty ones",
            )
        name_of_type = dtype.removeprefix("torch.")
        specs.append(TensorSpec(name=name, dtype=name_of_type, shape=shape, offset=offset, num_bytes=num_bytes))
        offset += num_bytes
    return specs


class WeightGroupRoutes:
    """The handlers. Refusals are 400 with SGLang's `{"success", "message"}`."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine
        self._groups = WeightGroups(engine)

    def posts(self) -> Mapping[str, Callable[[web.Request], Awaitable[web.StreamResponse]]]:
        """Path -> handler."""
        return {
            "/init_weights_update_group": self._init,
            "/destroy_weights_update_group": self._destroy,
            "/update_weights_from_distributed": self._update,
            "/get_weights_by_name": self._by_name,
        }

    async def serve_news(self, version: int) -> bool:
        """Serve what has come so far, if anything, as `version`."""
        if not self._groups.has_news:
            return False
        await self._groups.serve(version)
        return True

    async def close(self, app: web.Application) -> None:
        """With the application: leave all groups."""
        await self._groups.close()

    async def _init(self, request: web.Request) -> web.Response:
        body = await read_body(request, InitGroupBody)
        return await _answer(self._groups.join(body), "Succeeded to initialize custom process group.")

    async def _destroy(self, request: web.Request) -> web.Response:
        name = (await read_body(request, DestroyGroupBody)).group_name

        async def leave() -> None:
            self._groups.leave(name)

        return await _answer(leave(), "Succeeded to destroy custom process group.")

    async def _update(self, request: web.Request) -> web.Response:
        body = await read_body(request, DistributedBody)
        version = None if body.weight_version is None else version_of(body.weight_version)
        if body.abort_all_requests:
            await self._engine.abort()

        async def update() -> str:
            digest = await self._groups.receive(body)
            if version is not None:
                await self._groups.serve(version)
            return digest

        return await _answer(update(), "Succeeded to update parameter online.")

    async def _by_name(self, request: web.Request) -> web.Response:
        body = await read_body(request, ByNameBody)
        return json_response(await self._engine.weight_values(body.name, body.truncate_size))


async def _answer(work: Awaitable[str | None], message: str) -> web.Response:
    try:
        digest = await work
    except RequestRefused:
        raise
    except EngineError as err:
        return json_response({"success": False, "message": str(err)}, status=400)
    return json_response({"success": True, "message": message} | ({"digest": digest} if digest else {}))
