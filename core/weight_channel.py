"""What trainer ranks and engines send each other about weights that travel from device to device.

A *sender* is a trainer rank that has whole tensors; a *channel* is a process group of one sender and the ranks of one
engine. Order of events:

    plan    which tensors lie in which bucket, byte for byte; the same for every version of one model
    join    the sender opens a rendezvous and waits there; the engine is asked to join (once per engine incarnation)
    send    the sender broadcasts every bucket of one version into the channel; the engine is called for each in turn
    share   instead of join and send, on one GPU: handles of the buckets' memory
    leave   the channel is given up, by either side, for a reason

    fetch   over tcp alone: a piece of a file that rank 0 has written
"""

from __future__ import annotations

from typing import Generic, Literal, TypeVar

from .messages import Record, TensorSpec, WeightChannel
from .samples import U8

A = TypeVar("A")

CollectiveBackend = Literal["nccl", "gloo"]

SENT_CHANNELS: frozenset[WeightChannel] = frozenset({"nccl", "cuda_ipc"})
"""Between devices, from every rank that holds whole tensors; over the others rank 0 writes what engines read."""

WRITTEN_CHANNELS: frozenset[WeightChannel] = frozenset({"disk", "tcp"})
"""By folders that rank 0 writes."""

SHARED_CHANNELS: frozenset[WeightChannel] = frozenset({"cuda_ipc"})
"""Of these: memory is opened by processes on the GPU that it lies on, and by no others. So every sender has the whole
model, for the engines of its GPU; over the others each has a part, for all engines."""


ANSWER_S = 5.0


class Bucket(Record, frozen=True):
    """Tensors that lie one behind the other in one flat buffer; `TensorSpec.offset` counts from its start."""

    tensors: tuple[TensorSpec, ...]
    num_bytes: int
    parameters: tuple[TensorSpec, ...] = ()
    """The same bytes as an engine's own parameters, see `actors/weights/channels/plan.py`; empty: not cut so."""


class SenderOrder(Record, Generic[A], frozen=True):
    """What an engine asks of a sender, which answers with an A: the verbs of weight sync are its subclasses."""

    @property
    def answer_s(self) -> float:
        """How long the answer may take, on top of what the order itself may."""
        return getattr(self, "timeout_s", 25.0) + ANSWER_S


class PlanReply(Record, frozen=True, tag="plan"):
    """How one sender's part of a version is cut."""

    digest: str
    """Of this version's bytes, see `actors/weights/channels/staging.py`; empty: not computed."""
    buckets: tuple[Bucket, ...] = ()
    has_channel: bool = False
    """Whether the channel asked about exists, on the sender's side."""


class PlanRequest(SenderOrder[PlanReply], frozen=True, tag="plan"):
    """How is a version cut into buckets? Refused when it is not staged."""

    version: int
    channel: str = ""
    """Channel the asker means to use; empty: none yet."""


class JoinOffer(Record, frozen=True, tag="join"):
    """Where the channel's ranks meet."""

    address: str
    port: int
    backend: CollectiveBackend


class JoinRequest(SenderOrder[JoinOffer], frozen=True, tag="join"):
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


class SendOrder(SenderOrder[None], frozen=True, tag="send"):
    """Broadcast a version's buckets into a channel, in order."""

    channel: str
    version: int
    timeout_s: float


class ShareReply(Record, frozen=True, tag="share"):
    """`payloads[bucket][rank]`: what each rank is handed, base64 (see `actors/weights/channels/cuda_ipc.py`)."""

    payloads: tuple[tuple[str, ...], ...]
    load_format: str = "flattened_bucket"
    """What SGLang is said to get; "direct": a bucket's parameters."""


class ShareRequest(SenderOrder[ShareReply], frozen=True, tag="share"):
    """Handles of a version's buckets, for processes on the sender's GPU."""

    version: int
    num_ranks: int
    takes_parameters: bool = False
    """Whether the engine holds its parameters whole, in the layout that SGLang loads them in."""
    """Ranks of the engine on that GPU; each opens its own handles."""


class LeaveOrder(SenderOrder[None], frozen=True, tag="leave"):
    """Give a channel up; a send into it ends with an error. Unknown channels are ignored."""

    channel: str
    reason: str

    @property
    def answer_s(self) -> float:
        return ANSWER_S


class FetchReply(Record, frozen=True, tag="fetch"):
    """What was asked for."""

    data: U8
    files: dict[str, int]
    """Name -> bytes."""


class FetchRequest(SenderOrder[FetchReply], frozen=True, tag="fetch"):
    """A piece of a file of a version's folder; without a name: which files it has."""

    version: int
    file: str = ""
    offset: int = 0
    num_bytes: int = 0
    """FETCH_BYTES at most."""


FETCH_BYTES = 8 << 20

AnyOrder = PlanRequest | JoinRequest | SendOrder | LeaveOrder | ShareRequest | FetchRequest
AnyAnswer = PlanReply | JoinOffer | ShareReply | FetchReply | None


class WeightProgress(Record, frozen=True):
    """How far an engine is with the version that it is bringing in."""

    at: str
    """For people: "receive bucket 2 of 5 from trainer/0"."""
    num_done: int = 0
    """Grows with every tensor or bucket that has come: the same number twice means that nothing moved."""
    is_counted: bool = False
    """Whether the current phase moves `num_done`; a server that reads a folder by itself reports nothing meanwhile."""
