"""States of a group as a table (which may follow which), and its payload as bytes. No file, no clock.

A payload is a msgpack header with raw little-endian arrays. It is never a pickle, since a resumed run reads the ledger.
msgspec types both directions; decoded arrays are writable.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar, get_args

import msgspec
import numpy as np

from ...core.errors import LedgerError
from ...core.messages import Record, SamplingParams
from ...core.samples import Group, Sample

T = TypeVar("T")


class Terms(Record, frozen=True):
    """What a group is dispatched under first: a sample that continues on another engine keeps its temperature."""

    knobs: int
    """Epoch of the live knobs."""
    sampling: SamplingParams


class State(enum.StrEnum):
    """Where a drawn prompt is. Every group is in exactly one of them."""

    DRAWN = "DRAWN"
    DISPATCHED = "DISPATCHED"
    REQUEUED = "REQUEUED"
    FINISHED = "FINISHED"
    REWARDED = "REWARDED"
    READY = "READY"
    CLAIMED = "CLAIMED"
    TRAINED = "TRAINED"
    DURABLE = "DURABLE"
    DROPPED = "DROPPED"


_S = State

TRANSITIONS: Mapping[State, frozenset[State]] = {
    # DROPPED: its prompt is passed over, so it is never dispatched.
    _S.DRAWN: frozenset({_S.DISPATCHED, _S.DROPPED}),
    _S.DISPATCHED: frozenset({_S.FINISHED, _S.REQUEUED, _S.DROPPED}),
    # FINISHED: the buffer was restarted meanwhile, and the first worker delivers before anybody else got the group.
    _S.REQUEUED: frozenset({_S.DISPATCHED, _S.FINISHED, _S.DROPPED}),
    _S.FINISHED: frozenset({_S.REWARDED}),
    _S.REWARDED: frozenset({_S.READY, _S.DROPPED}),
    _S.READY: frozenset({_S.CLAIMED, _S.DROPPED}),
    _S.CLAIMED: frozenset({_S.TRAINED}),
    _S.TRAINED: frozenset({_S.DURABLE}),
    _S.DURABLE: frozenset(),
    _S.DROPPED: frozenset(),
}
"""Forward: what the verbs of a running run do."""

REWIND: Mapping[State, frozenset[State]] = {
    _S.CLAIMED: frozenset({_S.TRAINED, _S.READY}),
    _S.TRAINED: frozenset({_S.READY}),
    # The newest checkpoint turned out to be damaged and the trainer went back to the one before.
    _S.DURABLE: frozenset({_S.READY}),
    # Only what was left over at the end of a run that is now continued.
    _S.DROPPED: frozenset({_S.READY, _S.REQUEUED}),
}
"""Backward: what a rewind to a checkpoint does, and nothing else may do."""

AT_REST = frozenset(State) - {State.DRAWN, State.FINISHED, State.REWARDED}
"""States in which a group may be found between two transactions."""

OPEN = (State.DISPATCHED, State.REQUEUED, State.READY)
"""Drawn and neither given up nor claimed."""

LEFTOVER = "leftover"
"""Not enough groups were left for a whole batch when the run ended."""

STALE = "stale"
"""The reason for which the prompt is drawn once more: nothing was wrong with it, only its tokens grew old."""


QUARANTINED, OUT_OF_WINDOW = "quarantined", "out-of-window"
PASSED_OVER = (QUARANTINED, OUT_OF_WINDOW)
"""Reasons of groups that were drawn and given up at once, for what their prompts did before."""


class Row(msgspec.Struct, frozen=True):
    """One group in the ledger. -1 means "none" in numbers."""

    group_id: int
    draw: int
    """Number of the draw, over all sources; differs from `group_id` once a prompt had to be drawn again."""
    redraw_of: int
    """The dropped group whose prompt this one repeats."""
    num_samples: int
    state: State = State.DRAWN
    attempt: int = 0
    """Counts dispatches; fences puts."""
    rollout: str = ""
    """Who has or had it; empty once that incarnation is known to be gone."""
    epoch: int = -1
    version: int = -1
    """Of the oldest token; while it is under way, what the engine served when it started there."""
    step: int = -1
    """Claimed for, or trained in, this step (which made version `step + 1`)."""
    reason: str = ""
    num_tokens: int = -1
    """Response tokens of all members, once known."""
    terms: int = 0
    """Under which terms it was dispatched first, as the ledger numbers them; 0: it never was."""
    source: str = ""
    """Name of the source that was drawn from; empty: there is only one."""
    source_draw: int = -1
    """Number of the draw among those from that source; -1: the only source, so it is `draw`."""
    reward: float | None = None
    """Mean over its members, once it was finished; also of a group that was filtered then."""

    @property
    def draw_of_source(self) -> int:
        return self.draw if self.source_draw < 0 else self.source_draw


def check_path(row: Row, path: tuple[State, ...], table: Mapping[State, frozenset[State]] = TRANSITIONS) -> None:
    """Raise LedgerError naming group, from and to unless every hop of the path is in the table."""
    at = row.state
    for to in path:
        allowed = table.get(at, frozenset())
        if to not in allowed:
            raise LedgerError(
                f"group {row.group_id} (attempt {row.attempt}) cannot go from {at} to {to}",
                remedy=f"from {at} it may go to {', '.join(sorted(allowed)) or 'nowhere'}",
            )
        at = to


def _array_out(value: Any) -> bytes:
    if isinstance(value, np.ndarray):
        return value.tobytes()
    raise NotImplementedError(f"{type(value).__name__} cannot be stored in the ledger")


def _array_in(kind: Any, value: bytes) -> np.ndarray[Any, Any]:
    return np.frombuffer(bytearray(value), dtype=_dtype_of(kind))


@cache
def _dtype_of(kind: Any) -> Any:
    return get_args(get_args(kind)[1])[0]


_encoder = msgspec.msgpack.Encoder(enc_hook=_array_out)
_groups = msgspec.msgpack.Decoder(Group, dec_hook=_array_in)
_partials = msgspec.msgpack.Decoder(tuple[Sample, ...], dec_hook=_array_in)


def encode(value: Group | tuple[Sample, ...]) -> bytes:
    """Bytes of a group or of unfinished samples. Raises ValueError if the prompt's metadata cannot be written."""
    try:
        return _encoder.encode(value)
    except (NotImplementedError, OverflowError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"cannot be stored: {error}") from error


def decode_group(group_id: int, data: bytes) -> Group:
    """A group back from its bytes. Raises LedgerError naming the group when they are damaged."""
    return _decoded(_groups, data, f"payload of group {group_id}")


def decode_partial(group_id: int, data: bytes) -> tuple[Sample, ...]:
    """Unfinished samples back from their bytes. Raises LedgerError naming the group when they are damaged."""
    return _decoded(_partials, data, f"unfinished samples of group {group_id}")


def _decoded(decoder: msgspec.msgpack.Decoder[T], data: bytes, what: str) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError) as error:
        raise LedgerError(f"{what} is damaged: {error}") from error
