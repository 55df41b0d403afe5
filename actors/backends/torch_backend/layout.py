"""How the samples of one micro-batch lie in memory: packed tokens, rectangles of attention, rows that predict; and one
value per loss token beside them (`MicroBatch`).

    tokens    all sequences behind one another, no padding: every matrix product works on [T, ...]
    bundles   samples with the same prompt share one copy of it: prompt, answer 1, answer 2, ... One bundle is one row
              of attention; its mask lets an answer see the prompt and itself, never another answer
    blocks    rows of similar length, padded to one rectangle [n, L], for `scaled_dot_product_attention`; or rows of any
              length behind one another, where there is a kernel for them (`packed_attention`)
    rows      hidden states that predict a loss token; only they pass the language-model head

Sharing a prompt changes no number: a token's hidden state depends on the tokens before it alone, and every answer's
positions continue from the end of its prompt. Nothing is computed for what no loss depends on: samples without loss
tokens, tokens behind the last loss token, the last token itself.

A micro-batch's tensors are on the token axis M of the layout: loss tokens of all its samples, one after another. Masked
tokens do not appear, so every mask over M is True.

Library considered: `torch.nn.attention.flex_attention` expresses the same masks, but needs a compiler; on a CPU the
padded rectangle was the fastest of five layouts measured. (Prefix sharing as in the tree attention of SpecInfer, arXiv
2305.09781.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ....algos.ratios import Segments
from ....core.errors import TrainError, raised_as
from ....core.samples import F32, NO_VERSION, LossPart, Sample, TrainSample, TrainShard, check_sample, joined_kept
from ..packed_attention import PackedRows, may_have_plan
from ..vocab_scores import Temperature
from .tensors import from_array

I64 = npt.NDArray[np.int64]

MAX_SHARED_ROW = 4096
"""Longest row with several answers: its mask has the square of this many bytes."""

MIN_FILL = 0.75
"""A row shorter than this share of its block's length opens a new block."""


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """A rectangle of attention: `num_rows` rows of `row_len` slots; or packed rows, the longest of `row_len` slots."""

    num_rows: int
    row_len: int
    mask_nLL: Tensor | None
    """bool [num_rows, 1, row_len, row_len], True = may attend; None: plain causal rows."""
    packed: PackedRows | None = None
    """Where packed rows lie, from the block's first slot on; None: a rectangle."""

    @property
    def num_slots(self) -> int:
        return self.num_rows * self.row_len if self.packed is None else sum(self.packed.lengths)


@dataclass(frozen=True, slots=True)
class Layout:
    """One micro-batch as index tensors on the model's device. M = loss tokens, T = packed tokens, N = packed tokens
    that predict a loss token, S = slots of all blocks."""

    token_ids_T: Tensor
    """int64 [T]"""
    positions_T: Tensor
    """int64 [T]: position inside its sequence, 0-based."""
    blocks: tuple[AttentionBlock, ...]
    index_S: Tensor
    """int64 [S]: packed token in each slot of the blocks, which follow one another; padding slots hold token 0."""
    is_token_S: Tensor
    """bool [S]: False: padding."""
    slots_T: Tensor
    """int64 [T]: the one slot of each token."""
    is_in_order: bool
    """Whether slots are the packed tokens themselves, so that nothing has to be moved."""
    rows_N: Tensor
    """int64 [N]: packed tokens whose hidden state predicts something."""
    row_of_M: Tensor
    """int64 [M]: which of these predicts loss token m (answers to one shared prompt begin at the same row)."""
    targets_M: Tensor
    """int64 [M]: the loss tokens' ids."""
    kept_MK: Tensor | None
    """int64 [M, any]: what each was drawn from (`Sample.kept`); None: from all tokens."""
    members: tuple[int, ...]
    """Indexes (into the samples given) that have loss tokens, in the order of their tokens."""
    offsets: I64
    """int64 [len(members) + 1]: loss tokens of member k are `offsets[k]:offsets[k + 1]`."""
    temperature: Temperature
    """That the loss tokens were drawn at."""

    @property
    def num_tokens(self) -> int:
        """T: tokens that the model really computes."""
        return int(self.token_ids_T.shape[0])


@dataclass(slots=True)
class _Bundle:
    prompt_len: int
    members: list[int]
    num_tokens: int


def plan_layout(
    samples: Sequence[Sample],
    members: Sequence[int],
    *,
    linear_cost: float | None,
    packs_rows: bool = False,
    device: torch.device | str = "cpu",
) -> Layout:
    """Lay out `samples[i] for i in members`.

    linear_cost: number of attended tokens whose attention costs as much as a token's matrix products; decides when
    sharing a prompt (fewer tokens, but a longer and half-empty attention row) pays. None: never.
    packs_rows: causal rows of unequal lengths are packed; without, they are padded rectangles.
    Members without loss tokens are left out; a micro-batch without any loss token gives a layout of one token and
    M = 0, so that a rank with nothing to do can still take part in collective forwards.
    """
    # Response tokens that must be fed in so that the last loss token is predicted; -1: there is none.
    lengths = {i: int(np.append(-1, np.flatnonzero(samples[i].loss_mask))[-1]) for i in members}
    packer = _Packer(samples, lengths)
    for bundle in _bundle(samples, [i for i in members if lengths[i] >= 0], lengths, linear_cost):
        packer.add(bundle)
    return packer.layout(device, packs_rows)


def _bundle(
    samples: Sequence[Sample], active: Sequence[int], lengths: dict[int, int], linear_cost: float | None
) -> list[_Bundle]:
    """Put samples with equal prompts together as long as a joint row is cheaper than separate ones."""
    open_bundles: dict[bytes, _Bundle] = {}
    bundles: list[_Bundle] = []
    for i in active:
        sample = samples[i]
        prompt = sample.prompt_ids.tobytes()
        total = len(sample.prompt_ids) + lengths[i]
        bundle = open_bundles.get(prompt)
        if bundle is not None and _sharing_pays(bundle.num_tokens, lengths[i], total, linear_cost):
            bundle.members.append(i)
            bundle.num_tokens += lengths[i]
            continue
        bundle = _Bundle(len(sample.prompt_ids), [i], total)
        open_bundles[prompt] = bundle
        bundles.append(bundle)
    return bundles


def _sharing_pays(row_len: int, extra_len: int, alone: int, linear_cost: float | None) -> bool:
    """Compare costs in attended tokens: a masked row computes its whole square, a causal row half of it."""
    joined = row_len + extra_len
    if linear_cost is None or joined > MAX_SHARED_ROW:
        return False
    extra = joined * (linear_cost + joined) - row_len * (linear_cost + row_len)
    return extra <= alone * (linear_cost + alone / 2)


class _Row(NamedTuple):
    """Of attention."""

    start: int
    """Its first packed token."""
    length: int
    is_shared: bool
    """Whether several answers share it."""


class _Packer:
    """Appends bundles and closes with the index tensors."""

    def __init__(self, samples: Sequence[Sample], lengths: dict[int, int]) -> None:
        self._samples = samples
        self._lengths = lengths
        self._num_tokens = 0
        self._tokens: list[npt.NDArray[np.int32]] = []
        self._positions: list[I64] = []
        self._segments: list[I64] = []
        self._rows: list[I64] = [np.zeros(0, np.int64)]
        self._targets: list[npt.NDArray[np.int32]] = [np.zeros(0, np.int32)]
        self._columns: list[I64] = []
        self._members: list[int] = []
        self._attended: list[_Row] = []

    def add(self, bundle: _Bundle) -> None:
        start = self._num_tokens
        prompt_len = bundle.prompt_len
        self._append(self._samples[bundle.members[0]].prompt_ids, 0, 0)
        for number, i in enumerate(bundle.members):
            sample = self._samples[i]
            columns = np.flatnonzero(sample.loss_mask)
            rows = self._num_tokens + columns - 1
            rows[columns == 0] = start + prompt_len - 1
            self._rows.append(rows)
            self._columns.append(columns)
            self._targets.append(sample.response_ids[columns])
            self._members.append(i)
            self._append(sample.response_ids[: self._lengths[i]], prompt_len, number + 1)
        self._attended.append(_Row(start, self._num_tokens - start, len(bundle.members) > 1))

    def _append(self, tokens: npt.NDArray[np.int32], position: int, segment: int) -> None:
        count = len(tokens)
        self._tokens.append(tokens)
        self._positions.append(np.arange(position, position + count))
        self._segments.append(np.full(count, segment))
        self._num_tokens += count

    def layout(self, device: torch.device | str, packs_rows: bool) -> Layout:
        if not self._attended:
            self._append(np.zeros(1, np.int32), 0, 0)
            self._attended.append(_Row(0, 1, is_shared=False))
        segments_T = np.concatenate(self._segments)
        slots_T = np.empty(self._num_tokens, dtype=np.int64)
        blocks: list[AttentionBlock] = []
        indexes: list[I64] = []
        offset = 0
        for block_rows, is_packed in _blocks_of(self._attended, packs_rows):
            block, index = _block(block_rows, is_packed, segments_T, slots_T, offset, device)
            offset += len(index)
            blocks.append(block)
            indexes.append(index)
        is_token_S = np.zeros(offset, dtype=np.bool_)
        is_token_S[slots_T] = True
        rows_N, row_of_M = np.unique(np.concatenate(self._rows), return_inverse=True)
        counts = [len(columns) for columns in self._columns]
        rows = [self._samples[i].kept_rows for i in self._members]
        drawn = [None if row is None else row[columns] for row, columns in zip(rows, self._columns, strict=True)]
        kept = joined_kept(list(zip(drawn, counts, strict=True)))
        return Layout(
            token_ids_T=_to_device(np.concatenate(self._tokens), device),
            positions_T=_to_device(np.concatenate(self._positions), device),
            blocks=tuple(blocks),
            index_S=_to_device(np.concatenate(indexes), device),
            is_token_S=from_array(is_token_S).to(device),
            slots_T=_to_device(slots_T, device),
            is_in_order=offset == self._num_tokens and bool((slots_T == np.arange(offset)).all()),
            rows_N=_to_device(rows_N, device),
            row_of_M=_to_device(row_of_M, device),
            targets_M=_to_device(np.concatenate(self._targets), device),
            members=tuple(self._members),
            offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            kept_MK=None if kept is None else _to_device(kept, device),
            temperature=temperature_of([self._samples[i] for i in self._members], counts, device),
        )


def _blocks_of(rows: Sequence[_Row], packs_rows: bool) -> Iterator[tuple[list[_Row], bool]]:
    """Rows of each block, and whether they are packed: causal ones if they may be, unless they make a rectangle that
    has a plan. Others lie with rows of similar length, masked and causal ones apart."""
    packed = [row for row in rows if packs_rows and not row.is_shared]
    if packed:
        lengths = {row.length for row in packed}
        yield packed, len(packed) == 1 or len(lengths) > 1 or not may_have_plan(len(packed), *lengths)
    padded = [row for row in rows if row.is_shared or not packs_rows]
    block: list[_Row] = []
    for row in sorted(padded, key=lambda row: (row.is_shared, -row.length, row.start)):
        if block and (row.is_shared != block[0].is_shared or row.length < MIN_FILL * block[0].length):
            yield block, False
            block = []
        block.append(row)
    if block:
        yield block, False


def _block(
    rows: Sequence[_Row], is_packed: bool, segments_T: I64, slots_T: I64, offset: int, device: torch.device | str
) -> tuple[AttentionBlock, I64]:
    """(block, index [its slots]); the slots of its tokens, from `offset` on, are written into `slots_T`."""
    starts = np.asarray([row.start for row in rows])
    lengths = np.asarray([row.length for row in rows])
    row_len = int(lengths.max())
    index_nL = starts[:, None] + np.arange(row_len)
    valid_nL = np.arange(row_len) < lengths[:, None]
    if is_packed:
        index = index_nL[valid_nL]
        slots_T[index] = offset + np.arange(len(index))
        return AttentionBlock(len(rows), row_len, None, PackedRows.of(lengths.tolist(), device)), index
    index_nL[~valid_nL] = 0
    slots_T[index_nL[valid_nL]] = offset + np.flatnonzero(valid_nL)
    mask: Tensor | None = None
    if rows[0].is_shared:
        mask = _tree_mask(_to_device(np.where(valid_nL, segments_T[index_nL], -1), device))
    return AttentionBlock(num_rows=len(rows), row_len=row_len, mask_nLL=mask), index_nL.reshape(-1)


def _tree_mask(segments_nL: Tensor) -> Tensor:
    """Mask [n, 1, L, L], True = visible: earlier tokens of the prompt (segment 0) and of the token's own segment."""
    row_len = segments_nL.shape[1]
    query, key = segments_nL[:, :, None], segments_nL[:, None, :]
    causal_LL = torch.ones(row_len, row_len, dtype=torch.bool, device=segments_nL.device).tril()
    return (((key == query) | (key == 0)) & causal_LL).unsqueeze(1)


def temperature_of(samples: Sequence[Sample], counts: Sequence[int], device: torch.device | str) -> Temperature:
    """Of each sample's loss tokens (`counts`), one sample after another; one number if they are all alike."""
    temperatures = [sample.temperature or 1.0 for sample in samples]  # engines give log-probs of greedy tokens at 1
    if len(set(temperatures)) < 2:
        return float(temperatures[0]) if temperatures else 1.0
    return from_array(np.repeat(np.asarray(temperatures, dtype=np.float32), counts)).to(device)


def _to_device(array: npt.NDArray[np.integer], device: torch.device | str) -> Tensor:
    return from_array(array.astype(np.int64)).to(device)


class ScoredRows(Protocol):
    """The position of each loss token of a micro-batch in its sample; see `Layout`."""

    @property
    def members(self) -> tuple[int, ...]: ...
    @property
    def offsets(self) -> I64: ...

    @property
    def num_tokens(self) -> int: ...


L = TypeVar("L", bound=ScoredRows)


@dataclass(slots=True)
class MicroBatch(Generic[L]):
    """One forward and backward pass. The fields at the end are filled in by the passes before training."""

    layout: L
    group_ids: tuple[int, ...]
    behaviour_M: Tensor
    """float32 [M]"""
    segments: Segments
    """Which of the layout's members each loss token belongs to."""
    scalar_S: Tensor
    """float32 [S]: sample-level advantages."""
    advantages_M: Tensor
    """float32 [M]"""
    given_M: Tensor | None = None
    """float32 [M]: advantages per token, where a function of the user's gave such, or turns have their own."""
    weights_M: Tensor | None = None
    """float32 [M]: factor of each token's loss; None: 1."""
    turn_rewards_M: Tensor | None = None
    """float32 [M]: what turns earned, at their last tokens."""
    parts: Mapping[LossPart, Tensor] = field(default_factory=dict[LossPart, Tensor])
    """int64: which of the M tokens belong to each part of the loss; empty: all to "algo"."""
    proximal_M: Tensor | None = None
    reference_M: Tensor | None = None
    pair_S: Tensor | None = None
    """int64 [S]: which group of these each member is of, from 0; for losses of pairs."""
    values_M: Tensor | None = None
    """float32 [M]: the critic's, under its weights at the step's start."""
    returns_M: Tensor | None = None
    """float32 [M]: what its values are drawn to."""

    @property
    def num_tokens(self) -> int:
        return self.layout.num_tokens


def trained_members(shard: TrainShard, micro: Sequence[int], *, skips_neutral: bool) -> list[int]:
    return [i for i in micro if not (skips_neutral and _is_neutral(shard.samples[i]))]


def _is_neutral(sample: TrainSample) -> bool:
    rows = (sample.token_advantages, sample.token_rewards)
    return sample.loss == "algo" and sample.advantage == 0.0 and not any(row is not None and row.any() for row in rows)


def check_samples(samples: Sequence[Sample], vocab_size: int) -> None:
    """Raise TrainError naming the first sample whose arrays disagree or that holds an impossible token, or that was
    drawn at a temperature that has no log-probs."""
    for sample in samples:
        with raised_as(TrainError, "", ValueError, remedy="engine and trainer must use the same model folder"):
            check_sample(sample, vocab_size)
        if not sample.prompt_ids.size and sample.loss_mask[:1].any():
            raise TrainError(
                f"sample {sample.name}: its first token has nothing in front that could predict it",
                remedy="a prompt needs at least one token",
            )
        if not (math.isfinite(sample.temperature) and sample.temperature >= 0):
            raise TrainError(
                f"sample {sample.name}: temperature = {sample.temperature} gives no log-probs to train on",
                remedy="tokens must be drawn at a temperature of 0 (greedy) or above",
            )


def batch_of(layout: L, samples: Sequence[TrainSample], device: torch.device) -> MicroBatch[L]:
    members = [samples[i] for i in layout.members]
    counts = np.diff(layout.offsets)
    behaviour = np.concatenate([s.logprobs[s.loss_mask != 0] for s in members] or [np.zeros(0, np.float32)])
    sample_M = from_array(np.repeat(np.arange(len(members)), counts))
    scalar = torch.tensor([s.advantage for s in members], dtype=torch.float32)
    return MicroBatch(
        layout=layout,
        group_ids=tuple(sorted({s.group_id for s in members})),
        behaviour_M=from_array(behaviour.astype(np.float32)).to(device),
        segments=Segments(sample_M.to(device), len(members)),
        scalar_S=scalar.to(device),
        advantages_M=scalar[sample_M].to(device),
        given_M=_rows(members, [(s.token_advantages, s.advantage) for s in members], device),
        weights_M=_rows(members, [(s.loss_weights, 1.0) for s in members], device),
        turn_rewards_M=_rows(members, [(s.token_rewards, 0.0) for s in members], device),
        parts=_parts(members, counts, device),
    )


def _parts(samples: Sequence[TrainSample], counts: I64, device: torch.device) -> dict[LossPart, Tensor]:
    if all(s.loss == "algo" for s in samples):
        return {}
    names = np.repeat([s.loss for s in samples], counts)
    return {s.loss: from_array(np.flatnonzero(names == s.loss)).to(device) for s in samples}


def to_score(sample: TrainSample) -> TrainSample:
    """The sample with one loss token, behind its last: the state before it, which is the last token's, is scored."""
    longer = {
        "response_ids": (sample.response_ids, 0),
        "logprobs": (sample.logprobs, 0),
        "versions": (sample.versions, NO_VERSION),
        "loss_mask": (np.zeros_like(sample.loss_mask), 1),
    }
    changes = {name: np.append(row, np.asarray(end, row.dtype)) for name, (row, end) in longer.items()}
    return msgspec.structs.replace(sample, **cast("dict[str, Any]", changes))


def group_numbers(layout: ScoredRows, samples: Sequence[TrainSample], device: torch.device) -> Tensor:
    """Which group of its members each of them is of, from 0: int64 [S]."""
    _, number_S = np.unique([samples[i].group_id for i in layout.members], return_inverse=True)
    return from_array(number_S.astype(np.int64)).to(device)


def served_reference(layout: ScoredRows, samples: Sequence[TrainSample], device: torch.device) -> Tensor:
    """Reference log-probs of the loss tokens of a layout of these samples, float32 [M], as the samples bring them.
    Raises TrainError naming one that does not."""
    rows: list[F32] = [np.zeros(0, np.float32)]
    for sample in (samples[i] for i in layout.members):
        if sample.reference_logprobs is None:
            raise TrainError(
                f"sample {sample.name}: there is a KL term, no reference model, and no reference log-probs with it",
                remedy="a bug in the planner, which looks for them",
            )
        rows.append(sample.reference_logprobs[sample.loss_mask != 0])
    return from_array(np.concatenate(rows).astype(np.float32)).to(device)


def _rows(
    samples: Sequence[TrainSample], values: Sequence[tuple[F32 | None, float]], device: torch.device
) -> Tensor | None:
    """Of all loss tokens, a row or one number for each sample; None if no sample has a row."""
    if all(row is None for row, _ in values):
        return None
    rows = [
        (np.full(len(s.loss_mask), number, np.float32) if row is None else row)[s.loss_mask != 0]
        for s, (row, number) in zip(samples, values, strict=True)
    ]
    return from_array(np.concatenate(rows).astype(np.float32)).to(device)
