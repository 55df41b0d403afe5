"""A shard cut into packed micro-batches for Megatron: all sequences behind one another (thd), split over context ranks.

    sequence   a sample's tokens up to its last loss token, which is predicted but not fed in; padded so that it divides
               into two chunks per context rank
    pack       the sequences of one micro-batch; padded at its end so that its part on a context rank divides over the
               tensor-parallel group (sequence parallelism)
    zigzag     of every sequence, context rank r of n holds chunks r and 2n - 1 - r, so causal attention costs all alike
    rows       positions of this rank's part that predict a loss token

Padding comes after a sequence, so causal attention never sees it and no loss depends on it. Every rank of a replica
(tensor, context and pipeline ranks) builds the same micro-batch from the same shard; only rows differ over context
ranks. Values beside the tokens are on the axis M of all loss tokens of the micro-batch, as in the torch backend.

Knows samples, not models. Library considered: megatron.core's own data sets and `get_batch_on_this_cp_rank`; they cut
[batch, sequence] rectangles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ....core.samples import U8, ExpertChoices, Sample
from ..torch_backend.layout import I64, temperature_of
from ..torch_backend.tensors import from_array
from ..vocab_scores import Temperature
from . import mcore

LENGTHS = "myxa_lengths"
"""Attribute of a micro-batch's PackedSeqParams: lengths of its padded sequences, so that no pass asks the device."""


@dataclass(frozen=True, slots=True)
class PackCutting:
    """How samples become micro-batches on this rank."""

    device: torch.device
    num_chunks: int
    pack_multiple: int
    cp_rank: int
    multiple_of_micros: int = 1
    """Micro-batches of a mini-batch are filled up with empty ones to a multiple of this (interleaved schedules)."""
    has_mtp: bool = False
    """The tokens after the next are predicted too."""
    choices: ExpertChoices | None = None
    """Of the model, where the experts that engines chose are replayed."""
    part: tuple[int, int] = (0, 1)
    """Which of how many equal parts of a context rank's tokens this rank's routers see (sequence parallelism)."""


@dataclass(frozen=True, slots=True)
class AfterNext:
    """What the MTP layer is to predict in a micro-batch: the same loss tokens, each one position earlier."""

    next_ids_1t: Tensor
    """int64 [1, t]: the token behind each of this context rank's."""
    rows_A: Tensor
    """int64 [A]: positions in the part that predict the token after the next."""
    targets_A: Tensor
    """int64 [A]: and its id."""


@dataclass(frozen=True, slots=True)
class Pack:
    """One micro-batch as index tensors on this rank's device. T: tokens of the pack, M: loss tokens, N: those here."""

    token_ids_1t: Tensor
    """int64 [1, t]: this context rank's part, t = T / context ranks."""
    sequences: Any
    """PackedSeqParams: cumulative lengths [sequences + 1] of the whole, padded sequences."""
    rows_N: Tensor
    """int64 [N]: positions in the part that predict something."""
    places_N: Tensor
    """int64 [N]: which of the M loss tokens each of them predicts."""
    targets_N: Tensor
    """int64 [N]: and that token's id."""
    members: tuple[int, ...]
    offsets: I64
    """int64 [members + 1]: loss tokens of member k are `offsets[k]:offsets[k + 1]`."""
    num_tokens: int
    """T, padding included."""
    temperature: Temperature
    """That the N tokens were drawn at; float32 [N] if they differ."""
    experts: Mapping[int, Tensor]
    """Layer, from 0 -> int32 [tokens that its router sees here, top_k] on the host: the experts that engines chose, -1
    where none did. Empty: routers choose."""
    after_next: AfterNext | None = None

    @property
    def num_loss_tokens(self) -> int:
        return int(self.offsets[-1])


def pack_samples(samples: Sequence[Sample], members: Sequence[int], cutting: PackCutting) -> Pack:
    """Pack `samples[i] for i in members`. Members without loss tokens are left out; without any loss token the pack
    holds one padding sequence and M = 0, so that this rank can still take part in the others' passes."""
    active = [i for i in members if samples[i].loss_mask.any()]
    columns = [np.flatnonzero(samples[i].loss_mask) for i in active]
    fed = [len(samples[i].prompt_ids) + int(c[-1]) for i, c in zip(active, columns, strict=True)]
    lengths = [_round_up(max(1, length), cutting.num_chunks) for length in fed or [1]]
    lengths[-1] += _round_up(sum(lengths), cutting.pack_multiple) - sum(lengths)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens_T = np.zeros(starts[-1], dtype=np.int64)
    rows: list[I64] = [np.zeros(0, np.int64)]
    targets: list[I64] = [np.zeros(0, np.int64)]
    for k, i in enumerate(active):
        sample = samples[i]
        middle = starts[k] + len(sample.prompt_ids)
        tokens_T[starts[k] : middle] = sample.prompt_ids
        tokens_T[middle : starts[k] + fed[k]] = sample.response_ids[: columns[k][-1]]
        rows.append(middle + columns[k] - 1)
        targets.append(sample.response_ids[columns[k]].astype(np.int64))
    here_t = zigzag(lengths, cutting.num_chunks, cutting.cp_rank)
    where_T = np.full(starts[-1], -1, dtype=np.int64)
    where_T[here_t] = np.arange(len(here_t))
    local_M = where_T[np.concatenate(rows)]
    places_N = np.flatnonzero(local_M >= 0)
    counts = [len(c) for c in columns]
    device = cutting.device
    experts = [samples[i].experts for i in active]
    return Pack(
        token_ids_1t=from_array(tokens_T[here_t]).unsqueeze(0).to(device),
        sequences=_sequences(starts, int(max(lengths)), device),
        rows_N=from_array(local_M[places_N]).to(device),
        places_N=from_array(places_N).to(device),
        targets_N=from_array(np.concatenate(targets)[places_N]).to(device),
        members=tuple(active),
        offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        num_tokens=int(starts[-1]),
        temperature=_here(temperature_of([samples[i] for i in active], counts, "cpu"), places_N, device),
        experts=_experts_here(experts, starts, fed, here_t, cutting) if cutting.choices is not None else {},
        after_next=_after_next(tokens_T, starts, rows, targets, where_T, here_t, device) if cutting.has_mtp else None,
    )


def _after_next(
    tokens_T: I64, starts: I64, rows: list[I64], targets: list[I64], where_T: I64, here_t: I64, device: torch.device
) -> AfterNext:
    """`rows`, `targets`: of each sequence, behind an empty one."""
    firsts = np.repeat(starts[: len(rows) - 1], [len(row) for row in rows[1:]])
    earlier_M = np.concatenate(rows) - 1
    local_M = np.where(earlier_M >= firsts, where_T[earlier_M], -1)
    is_here = local_M >= 0
    next_T = np.append(tokens_T[1:], 0)  # the token after a sequence's last one is of another sequence
    return AfterNext(
        next_ids_1t=from_array(next_T[here_t]).unsqueeze(0).to(device),
        rows_A=from_array(local_M[is_here]).to(device),
        targets_A=from_array(np.concatenate(targets)[is_here]).to(device),
    )


def _experts_here(
    choices_of_samples: Sequence[U8 | None], starts: I64, fed: Sequence[int], here_t: I64, cutting: PackCutting
) -> dict[int, Tensor]:
    """See `Pack.experts`. `told`: of each sequence; `fed`: its tokens without padding."""
    choices, (number, num_parts) = cutting.choices, cutting.part
    assert choices is not None
    whole_Tlk = np.full((starts[-1], len(choices.layers), choices.top_k), -1, np.int32)
    for start, length, experts in zip(starts[:-1], fed, choices_of_samples, strict=bool(choices_of_samples)):
        if experts is not None:
            whole_Tlk[start : start + length] = choices.ids(experts[:length])
    size = len(here_t) // num_parts
    here_tlk = whole_Tlk[here_t[number * size : (number + 1) * size]]
    return {layer: from_array(here_tlk[:, column].copy()) for column, layer in enumerate(choices.layers)}


def _here(temperature: Temperature, places_N: I64, device: torch.device) -> Temperature:
    return temperature[from_array(places_N)].to(device) if isinstance(temperature, Tensor) else temperature


def zigzag(lengths: Sequence[int], num_chunks: int, cp_rank: int) -> I64:
    """Positions in the pack that a context rank holds, in its order: of every sequence chunks r and num_chunks-1-r."""
    if num_chunks == 1:
        return np.arange(sum(lengths), dtype=np.int64)
    parts: list[I64] = []
    start = 0
    for length in lengths:
        size = length // num_chunks
        firsts = [start + chunk * size for chunk in (cp_rank, num_chunks - 1 - cp_rank)]
        parts.extend(np.arange(first, first + size, dtype=np.int64) for first in firsts)
        start += length
    return np.concatenate(parts)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _sequences(starts: npt.NDArray[np.int64], longest: int, device: torch.device) -> Any:
    bounds = from_array(starts.astype(np.int32)).to(device)
    packed = mcore.module("packed_seq_params").PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        cu_seqlens_q_padded=bounds,
        cu_seqlens_kv_padded=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    setattr(packed, LENGTHS, tuple(np.diff(starts).tolist()))
    return packed
