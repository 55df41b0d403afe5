"""A trainer rank's end of the channels between devices. Fulfils `core.protocols.WeightSender`.

    publish   export -> staging buckets (+ digest)        in the backend's thread, between two steps
    join      rendezvous, group built in a thread         while the engine generates
    send      broadcast from staging                      while the engine is paused, and the trainer trains
    share     handles of the staging buckets              instead of join and send, on one GPU

`plan.py` cuts, `staging.py` keeps, `cuda_ipc.py` shares, `Fp8Rule` quantises on the way. There is one group per engine:

    join   -> building (waits for the engine's ranks) -> standing -> [sending] -> standing ...
                 any error, deadline or leave -> gone (a later attempt has another name)

Every blocking call runs in a daemon thread with a deadline, and its caller waits on an event. A group whose peer is
dead or stopped costs one thread until its deadline: training continues, the trainer can end, other engines do not
notice.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from ....core.config.run import LOCAL_HOSTS
from ....core.errors import LaunchError, ModelError, TrainError
from ....core.messages import WeightManifest
from ....core.weight_channel import (
    CollectiveBackend,
    JoinOffer,
    JoinRequest,
    LeaveOrder,
    PlanReply,
    PlanRequest,
    SenderOrder,
    SendOrder,
    ShareReply,
    ShareRequest,
)
from ....transport.address import LOOPBACK, own_address_towards
from ...models.fp8 import SCALE_INV, served_fp8
from ...models.hf_folder import CONFIG, read_json, tensor_specs
from ...torch_store import host_store, own_address
from .cuda_ipc import WrittenPart, bucket_metadata, bucket_payload, parameters_payload
from .plan import WeightPlan
from .process_group import ChannelGroup
from .staging import Staged, Staging, beside_training

A = TypeVar("A")
Tensors = Iterator[tuple[str, Any]]
SentChannel = Literal["nccl", "cuda_ipc"]


IDLE_VERSIONS = 8
"""A channel idle for so many published versions is closed: its engine died silently, or joins again."""


@dataclass(slots=True)
class Channel:
    """One group, on the sender's side."""

    request: JoinRequest
    is_built: threading.Event = field(default_factory=threading.Event)
    """The group was built, or cannot be."""
    gone: threading.Event = field(default_factory=threading.Event)
    why_gone: str = ""
    group: ChannelGroup | None = None
    at: str = "waiting for the engine's ranks"
    """Progress, for error messages."""
    num_idle: int = 0
    """Versions published since something was sent."""
    sending: threading.Lock = field(default_factory=threading.Lock)
    over: threading.Event = field(default_factory=threading.Event)
    """The running send has ended, or is no longer waited for."""

    def give_up(self, reason: str) -> None:
        """Wake everybody who waits for this channel."""
        self.why_gone = reason
        self.gone.set()
        self.is_built.set()
        self.over.set()
        if self.group is not None:
            self.group.abort()


@dataclass(eq=False)
class DeviceWeightSender:
    """One rank. `name` is its actor's, under which engines ask for it."""

    name: str
    _: KW_ONLY
    channel: SentChannel
    bucket_bytes: int
    host: str
    """Boot id of this host."""
    quantise: Fp8Rule | None = None
    """Turns exported tensors into those that the engines hold."""
    keeps_buffers: bool = True
    """See `Staging`."""
    is_needed: bool = True
    """False: no engine asks this rank for what it is given, so it keeps nothing, and only takes part in gathering."""
    joins: bool = False
    """Whether buckets can be read as the parameters that SGLang holds, see `make_plan`."""

    def __post_init__(self) -> None:
        self._staging = Staging(self.bucket_bytes, keeps_buffers=self.keeps_buffers, joins=self.joins)
        self._lock = threading.Lock()
        self._channels: dict[str, Channel] = {}
        self._is_closed = False
        self._metadata: tuple[WrittenPart, ...] = ()
        """Of the buckets, which are those of every version."""

    def publish(self, version: int, export: Callable[[], Tensors]) -> WeightManifest | None:
        rule = self.quantise if self.is_needed else None
        batches = None if rule is None else lambda: rule.batches(export())
        staged = self._staging.publish(version, lambda: self._wanted(export()), batches)
        if staged is None:
            return None
        self._close_idle()
        return WeightManifest(
            version=version,
            channel=self.channel,
            location=self.name,
            num_bytes=staged.buffers.plan.num_bytes,
            tensors=(),
            digest=staged.digest,
            host=self.host,
        )

    def _wanted(self, tensors: Tensors) -> Tensors:
        """What is staged of an export, which is gone through to its end either way."""
        if not self.is_needed:
            for _ in tensors:
                pass
        elif self.quantise is None:
            yield from tensors
        else:
            yield from self.quantise.apply(tensors)

    def release(self, version: int) -> None:
        self._staging.release(version)

    def answer(self, order: SenderOrder[A]) -> A:
        verbs: dict[type, Callable[[Any], Any]] = {
            PlanRequest: self._plan,
            JoinRequest: self._join,
            SendOrder: self._send,
            ShareRequest: self._share,
            LeaveOrder: lambda order: self._leave(order.channel, order.reason),
        }
        if (verb := verbs.get(type(order))) is None:
            raise TrainError(
                f"{self.name} sends weights and has no {type(order).__name__}", remedy="see weights.channel"
            )
        return verb(order)

    def _plan(self, request: PlanRequest) -> PlanReply:
        staged = self._staging.read(request.version)
        self._staging.done(staged)
        return PlanReply(
            digest=staged.digest,
            buckets=staged.buffers.plan.buckets,
            has_channel=request.channel in self._channels,
        )

    def _share(self, request: ShareRequest) -> ShareReply:
        staged = self._staging.read(request.version)
        buffers = staged.buffers
        is_direct = request.takes_parameters and self.joins and keeps_layout(buffers.device, self.quantise is not None)

        def payload(number: int) -> str:
            flat = buffers.bucket(number)
            if is_direct:
                return parameters_payload(flat, buffers.plan.buckets[number])
            return bucket_payload(flat, self._metadata_of(buffers.plan)[number])

        try:
            with beside_training(buffers.device):
                payloads = tuple(
                    tuple(payload(number) for _ in range(request.num_ranks))
                    for number in range(len(buffers.plan.buckets))
                )
        finally:
            self._staging.done(staged)
        return ShareReply(payloads=payloads, load_format="direct" if is_direct else "flattened_bucket")

    def _metadata_of(self, plan: WeightPlan) -> tuple[WrittenPart, ...]:
        if not self._metadata:
            self._metadata = tuple(bucket_metadata(bucket) for bucket in plan.buckets)
        return self._metadata

    def _close_idle(self) -> None:
        """There is one more version."""
        with self._lock:
            for channel in self._channels.values():
                channel.num_idle += 1
            idle = [name for name, channel in self._channels.items() if channel.num_idle > IDLE_VERSIONS]
        for name in idle:
            self._leave(name, f"none of the last {IDLE_VERSIONS} versions was asked for")

    def _join(self, request: JoinRequest) -> JoinOffer:
        """Open a meeting place and wait there in a thread. Raises TrainError for a name that was used."""
        device = self._staging.device
        if device is None:
            raise TrainError(f"{self.name} has published nothing yet", remedy="publish a version first")
        channel = Channel(request)
        with self._lock:
            if self._is_closed or request.channel in self._channels:
                state = "is closing" if self._is_closed else "has a channel of that name"
                raise TrainError(f"{self.name} {state}: {request.channel}", remedy="ask again under another name")
            self._channels[request.channel] = channel
        world_size = request.num_ranks + 1
        try:
            address = address_for(request, self.host)
            store = host_store(address, 0, world_size, request.timeout_s)
        except (RuntimeError, OSError, LaunchError) as err:
            self._leave(request.channel, f"no meeting place: {err}")
            raise TrainError(f"{self.name}: cannot open a meeting place: {err}", remedy="is a port free?") from err

        def build() -> None:
            try:
                with beside_training(device):
                    channel.group = ChannelGroup.join(
                        store, request.channel, 0, world_size, device, request.timeout_s, channel.gone, address=address
                    )
            except (RuntimeError, OSError) as err:
                self._leave(request.channel, f"{request.engine} did not join within {request.timeout_s:g} s ({err})")
            finally:
                channel.is_built.set()
                if channel.gone.is_set() and channel.group is not None:
                    channel.group.abort()

        _start(build, f"join {request.channel}")
        backend: CollectiveBackend = "nccl" if device.type == "cuda" else "gloo"
        return JoinOffer(address=address, port=store.port, backend=backend)

    def _send(self, order: SendOrder) -> None:
        """Broadcast all buckets, in order; the channel is given up on any error. The buckets are read until the thread
        that sends has ended, which after a missed deadline may be later than the return. A broadcast of NCCL's that
        missed it may then still be queued on the device, until the group's abort has ended it; what it sends counts for
        nothing, because the engine's version has failed and is loaded again as a whole: buckets may be overwritten.
        Raises TrainError that names the sender, the engine, the phase and the bucket."""
        staged = self._staging.read(order.version)
        channel = self._channels.get(order.channel)
        if channel is None:
            self._staging.done(staged)
            raise TrainError(f"{self.name} has no channel {order.channel}", remedy="join again under another name")
        channel.num_idle = 0
        outcome: list[BaseException | None] = []
        is_over = channel.over = threading.Event()

        def work() -> None:
            try:
                self._broadcast(channel, staged, order.timeout_s)
                outcome.append(None)
            except (RuntimeError, TimeoutError, TrainError) as err:
                outcome.append(err)
            finally:
                self._staging.done(staged)
                is_over.set()

        _start(work, f"send {order.version} to {channel.request.engine}")
        is_over.wait(order.timeout_s)
        result = outcome[0] if outcome else TimeoutError(f"no end within {order.timeout_s:g} s")
        if result is None:
            return
        why = channel.why_gone or f"{type(result).__name__}: {result}"
        at = channel.at
        self._leave(order.channel, f"sending version {order.version} failed at {at}: {why}")
        raise TrainError(
            f"{self.name} could not send weight version {order.version} to {channel.request.engine}: {at}: {why}",
            remedy="the engine gets it again through a new channel, or is restarted",
        ) from result

    def _broadcast(self, channel: Channel, staged: Staged, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        channel.is_built.wait(timeout_s)
        group = channel.group
        if group is None or channel.gone.is_set():
            raise TrainError(channel.why_gone or "the group was not built in time", remedy="is the engine alive?")
        num_buckets = len(staged.buffers.plan.buckets)
        with channel.sending, beside_training(staged.buffers.device):
            for number in range(num_buckets):
                channel.at = f"bucket {number + 1} of {num_buckets}"
                group.broadcast(staged.buffers.bucket(number), channel.gone, deadline - time.monotonic())
            channel.at = "between versions"

    def _leave(self, name: str, reason: str) -> None:
        """Give a channel up; never waits."""
        with self._lock:
            channel = self._channels.pop(name, None)
        if channel is not None:
            channel.give_up(reason)

    def close(self) -> None:
        self._is_closed = True
        for name in list(self._channels):
            self._leave(name, f"{self.name} ends")
        self._staging.close()


def keeps_layout(device: torch.device, is_fp8: bool) -> bool:
    """Whether SGLang's own choice of kernels leaves parameters as they were loaded: on Blackwell (10) and later experts
    and scales are laid out again, before Ada (8.9) weights in FP8."""
    if device.type != "cuda":
        return False
    return ((8, 9) if is_fp8 else (0, 0)) <= torch.cuda.get_device_capability(device) < (10, 0)


def _start(work: Callable[[], None], name: str) -> None:
    threading.Thread(target=work, name=name, daemon=True).start()


def address_for(request: JoinRequest, own_host: str) -> str:
    """Loopback for an engine on this host, else the address of ours from which a packet to it would leave. An engine
    with a loopback address seen from another host is on that other host. Raises OSError for an unknown name."""
    if request.engine_host in LOCAL_HOSTS:
        return LOOPBACK if request.asker_host == own_host else own_address()
    return own_address_towards(request.engine_host)


# -- fp8 on the way

LARGEST = 448.0
"""Of float8_e4m3fn."""


WAITING_BYTES = 1 << 28
"""Quantised together at most, plus one tensor."""


def quantise_blocks(
    weights: Tensor, block: tuple[int, int] = (128, 128), *, scale_fmt: str = ""
) -> tuple[Tensor, Tensor]:
    """(Q float8_e4m3fn [..., m, n], S float32 [..., blocks down, blocks across]) of matrices [..., m, n] of any float
    type. NaN or infinity in a block makes its scale infinite. Raises ValueError for what is no matrix."""
    if weights.dim() < 2:
        raise ValueError(f"a matrix is needed, not {list(weights.shape)}")
    *more, rows, columns = weights.shape
    high, wide = block
    down, across = -(-rows // high), -(-columns // wide)
    if (down * high, across * wide) != (rows, columns):
        weights = pad(weights, (0, across * wide - columns, 0, down * high - rows))
    blocks = weights.view(*more, down, high, across, wide)
    amax = torch.maximum(blocks.amax(dim=(-3, -1)), -blocks.amin(dim=(-3, -1))).float()
    scale = amax.nan_to_num(nan=torch.inf, posinf=torch.inf) / LARGEST
    # Zeros, and numbers so small that the scale is none that can be divided by: such a block becomes zeros.
    scale = torch.where(scale > torch.finfo(torch.float32).tiny, scale, torch.ones_like(scale))
    if scale_fmt:  # the exponent alone, one more where there was a fraction
        scale = (scale.view(torch.int32).add(0x7FFFFF) & -0x800000).view(torch.float32)
    quantised = (blocks / scale[..., :, None, :, None]).to(torch.float8_e4m3fn)  # 448 and a rounding error makes 448
    return quantised.view(*more, down * high, across * wide)[..., :rows, :columns].contiguous(), scale


@dataclass(frozen=True, slots=True)
class Fp8Rule:
    """Block-wise FP8 for engines that hold their weights so (convention of DeepSeek-V3 and Qwen3-FP8, or that of
    compressed-tensors, whose scales are called `<name>_scale`). Use `of_folder`.

    A matrix W [m, n] becomes Q [m, n] in float8_e4m3fn and `<name>_scale_inv` S [ceil(m / 128), ceil(n / 128)] in
    float32:

        S[i, j] = max |W block i, j| / 448        Q = W / S, rounded to nearest even        W ~= Q * S

    A block of zeros has scale 1, not 0: dividing by 0 makes NaN. Blocks at the edges are smaller. Where the folder's
    `scale_fmt` is "ue8m0" (DeepSeek-V3.1), S is rounded up to a power of two. Which matrices: those of which the
    engines' own model folder holds scales, so that routers, embeddings, heads and whatever a recipe left out
    stay as they are there. Matrices of one shape are quantised together, as the experts of a layer are: 18,000 of a
    model by one launch each would take seconds. Triton kernels (slime's) were considered: they are not faster here."""

    names: frozenset[str]
    block: tuple[int, int]
    scale_fmt: str = ""
    suffix: str = SCALE_INV

    @staticmethod
    def of_folder(folder: Path) -> Fp8Rule | None:
        """As the folder's own weights are; None for a folder that is not quantised. Raises ConfigError for a
        quantisation of another kind, ModelError for a folder that cannot be read."""
        place = folder / CONFIG
        fp8 = served_fp8(read_json(place, remedy="see weights.served_folder"), str(place))
        if fp8 is None:
            return None
        fp8.check_sent(str(place))
        names = (name.removesuffix(fp8.suffix) for name in tensor_specs(folder) if name.endswith(fp8.suffix))
        return Fp8Rule(frozenset(names), fp8.block, fp8.scale_fmt, fp8.suffix)

    def apply(self, tensors: Tensors) -> Tensors:
        """The stream with its matrices quantised, each followed by its scales. Raises as `batches`."""
        for names, tensor in self.batches(tensors, 0):
            yield (names, tensor) if isinstance(names, str) else (names[0], tensor[0])

    def batches(self, tensors: Tensors, most_bytes: int = WAITING_BYTES) -> Iterator[tuple[str | tuple[str, ...], Any]]:
        """What stays as it is as (name, tensor); matrices of one shape together as (their names, Q stacked), then (the
        names of their scales, S stacked). Raises ModelError at its end if one held NaN or infinity: engines must never
        be handed those, but to look at each would stop the device each time."""
        waiting, num_bytes = dict[tuple[Any, ...], tuple[list[str], list[Tensor]]](), 0
        judged = list[tuple[tuple[str, ...], Tensor]]()
        for name, tensor in tensors:
            if name not in self.names:
                yield name, tensor
                continue
            names, alike = waiting.setdefault((tensor.dtype, tensor.shape), ([], []))
            names.append(name)
            alike.append(tensor)
            num_bytes += tensor.nbytes
            if num_bytes >= most_bytes:
                yield from self._quantised(waiting.values(), judged)
                waiting, num_bytes = {}, 0
        yield from self._quantised(waiting.values(), judged)
        for of_batch, are_finite in judged:
            for name, is_finite in zip(of_batch, cast(Any, are_finite).tolist(), strict=True):
                if not is_finite:
                    raise _unfit(name, "it holds NaN or infinity")

    def _quantised(
        self, waiting: Iterable[tuple[list[str], list[Tensor]]], judged: list[tuple[tuple[str, ...], Tensor]]
    ) -> Iterator[tuple[tuple[str, ...], Tensor]]:
        for names, alike in waiting:
            if alike[0].dim() != 2:
                raise _unfit(names[0], f"a matrix is needed, not {list(alike[0].shape)}")
            values, scales = quantise_blocks(torch.stack(alike), self.block, scale_fmt=self.scale_fmt)
            judged.append((tuple(names), torch.isfinite(scales).flatten(1).all(1)))
            yield tuple(names), values
            yield tuple(name + self.suffix for name in names), scales


def _unfit(name: str, why: str) -> ModelError:
    return ModelError(f"weight {name} cannot be quantised: {why}", remedy="look at the trainer's gradient norm")
