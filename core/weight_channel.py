"""What trainer ranks and engines send each other about weights that travel from device to device.

A *sender* is a trainer rank that has whole tensors; a *channel* is a process group of one sender and the ranks of one
engine. Order of events:

    plan    which tensors lie in which bucket, byte for byte; the same for every version of one model
    join    the sender opens a rendezvous and waits there; the engine is asked to join (once per engine incarnation)
    send    the sender broadcasts every bucket of one version into the channel; the engine is called for each in turn
    share   instead of join and send, on one GPU: handles of the buckets' memory
    leave   the channel is given up, by either side, for a reason
"""

from __future__ import annotations

from typing import Literal

from .messages import Record, TensorSpec, WeightChannel

CollectiveBackend = Literal["nccl", "gloo"]

SENT_CHANNELS: frozenset[WeightChannel] = frozenset({"nccl", "cuda_ipc"})
"""Between devices, from every rank that holds whole tensors; over the others rank 0 writes what engines read."""

SHARED_CHANNELS: frozenset[WeightChannel] = frozenset({"cuda_ipc"})
"""Of these: memory is opened by processes on the GPU that it lies on, and by no others. So every sender has the whole
model, for the engines of its GPU; over the others each has a part, for all engines."""


class Bucket(Record, frozen=True):
    """Tensors that lie one behind the other in one flat buffer; `TensorSpec.offset` counts from its start."""

    tensors: tuple[TensorSpec, ...]
    num_bytes: int


class PlanRequest(Record, frozen=True):
    """Asks a sender how a version is cut into buckets."""

    version: int
    known: str = ""
    """Fingerprint of the plan that the asker has already; the buckets are then left out of the answer."""
    channel: str = ""
    """Channel the asker means to use; empty: none yet."""


class PlanReply(Record, frozen=True):
    """How one sender's part of a version is cut."""

    fingerprint: str
    digest: str
    """Of this version's bytes, see `actors/weights/channels/staging.py`; empty: not computed."""
    buckets: tuple[Bucket, ...] = ()
    has_channel: bool = False
    """Whether the channel asked about exists, on the sender's side."""


class JoinRequest(Record, frozen=True):
    """An engine is about to join a channel; the sender opens the meeting place."""

    channel: str
    """Unique: a channel that failed is never built again under its name."""
    engine: str
    """Whom errors name."""
    num_ranks: int
    """Ranks of the engine; the sender is rank 0 of the group, they are 1 to `num_ranks`."""
    engine_host: str
    """Host part of the engine's address, as its rollout actor sees it."""
    asker_host: str
    """Boot id of the rollout actor's host."""
    timeout_s: float


class JoinOffer(Record, frozen=True):
    """Where the channel's ranks meet."""

    address: str
    port: int
    backend: CollectiveBackend


class SendOrder(Record, frozen=True):
    """Broadcast a version's buckets into a channel, in order."""

    channel: str
    version: int
    timeout_s: float


class SendReport(Record, frozen=True):
    """What the sender saw."""

    num_bytes: int
    join_s: float
    """Time to build the group; about 0 after the first time."""
    send_s: float


class ShareRequest(Record, frozen=True):
    """Handles of a version's buckets, for processes on the sender's GPU."""

    version: int
    num_ranks: int
    """Ranks of the engine on that GPU; each opens its own handles."""


class ShareReply(Record, frozen=True):
    """`payloads[bucket][rank]`: what each rank is handed, base64 (see `actors/weights/channels/cuda_ipc.py`)."""

    payloads: tuple[tuple[str, ...], ...]
    fingerprint: str = ""
    """Of the plan by which the buckets are cut: ranks of one server may be handed memory of several senders."""


class SampleRequest(Record, frozen=True):
    """A few numbers of a version, to hold against what an engine says it serves."""

    version: int
    names: tuple[str, ...]
    num_values: int


class SampleReply(Record, frozen=True):
    """The first values of each tensor in row order, as float; in the order of the names."""

    values: tuple[tuple[float, ...], ...]


class WeightProgress(Record, frozen=True):
    """How far an engine is with the version that it is bringing in."""

    at: str
    """For people: "receive bucket 2 of 5 from trainer/0"."""
    num_done: int = 0
    """Grows with every tensor or bucket that has come: the same number twice means that nothing moved."""
    is_counted: bool = False
    """Whether the current phase moves `num_done`; a server that reads a folder by itself reports nothing meanwhile."""
