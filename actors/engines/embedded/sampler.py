"""Drawing tokens from logits, one random number per token, and the log-prob of what was drawn.

Penalties come first: meaning and order are SGLang's under its overlap schedule. Frequency, early ends and presence are
taken off, then repetition divides, then the temperature. They count the tokens of this request's answer: a request that
continues an earlier one has the earlier tokens in its prompt, and prompts are not penalised. Counts are made from the
row's tokens in each step: a table of counts would be as large as slots times vocabulary.

Log-probs are those of the penalised `logits / temperature` over the whole vocabulary, before top-p, top-k and min-p cut
it: what SGLang returns and what a trainer that divides its logits by the temperature computes. Where `draw` tells which
tokens were left (`tells_kept`), they are those over these tokens. Greedy requests
(temperature 0) report the log-prob at temperature 1, as SGLang does.

Randomness is counter-based: the number for a token depends on the request's seed and the token's position only, so a
seeded request draws the same tokens alone or in a batch, and when it is continued after an abort. (Logits themselves
differ by about 1e-7 with the size of the batch; a draw can only change where it falls that close to a boundary.)
Libraries considered: torch.multinomial has one generator for the whole batch; `exponential_` over the whole vocabulary
costs more than a layer of a small model.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ....core.messages import SamplingParams
from ....core.samples import F32, I32
from .tensors import F64, U64, Flags, Index, Records, as_tensor

MASK_64 = (1 << 64) - 1
GOLDEN_GAMMA = 0x9E3779B97F4A7C15
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)
TILE = 32
"""Rows that are computed together where results must not depend on how many there are: whole vectors on every CPU."""
SAMPLING_FIELDS = [("temperature", np.float32), ("top_p", np.float32), ("top_k", np.int64), ("min_p", np.float32)]
"""Of `SamplingParams`: what each of the rows is drawn by."""


def stream_state(seed: int) -> int:
    """Start of a request's stream of random numbers; neighbouring seeds start far apart."""
    z = (seed * GOLDEN_GAMMA + GOLDEN_GAMMA) & MASK_64
    for shift, factor in zip(SHIFTS, (*FACTORS, 1), strict=True):
        z = ((z ^ (z >> shift)) * factor) & MASK_64
    return z


def uniforms(states: U64, positions: Index) -> F64:
    """Numbers in [0, 1), one per (stream, position): step `position` of SplitMix64 (Steele, Lea and Flood 2014)."""
    z = states + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN_GAMMA)
    z = (z ^ (z >> np.uint64(SHIFTS[0]))) * np.uint64(FACTORS[0])
    z = (z ^ (z >> np.uint64(SHIFTS[1]))) * np.uint64(FACTORS[1])
    z ^= z >> np.uint64(SHIFTS[2])
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


class DrawnTokens(NamedTuple):
    """Of n rows. Where the logits hold NaN or infinity, `is_finite` is False and the rest means nothing."""

    ids: Index
    logprobs: F32
    is_finite: Flags
    kept: dict[int, I32]
    """Row -> the tokens that were left, where some were cut and that is told."""


def draw(logits: Tensor, rows: Records, numbers: F64, *, tells_kept: bool = False) -> DrawnTokens:
    """One token per row of float32 logits [n, vocabulary], by inversion of the cumulative distribution at `numbers`;
    `rows` have the SAMPLING_FIELDS."""
    greedy = rows["temperature"] == 0
    scale = np.where(greedy, np.float32(1), rows["temperature"])
    if bool((scale != 1).any()):
        logits = logits / as_tensor(scale)[:, None]
    peaks = logits.amax(dim=-1, keepdim=True)
    masses = (logits - peaks).exp_()
    cumulated = masses.cumsum(dim=-1, dtype=torch.float64)
    totals = cumulated[:, -1:]
    thresholds = as_tensor(numbers)[:, None]
    ids = torch.searchsorted(cumulated, thresholds * totals, right=True).clamp_(max=logits.shape[-1] - 1)
    kept: dict[int, I32] = {}
    cut = np.flatnonzero(((rows["top_p"] < 1) | (rows["top_k"] > 0) | (rows["min_p"] > 0)) & ~greedy)
    if cut.size:
        index = as_tensor(cut)
        ids[index], left, orders, stays = _draw_cut(masses[index], totals[index], thresholds[index], rows[cut])
        if tells_kept:
            totals = totals.index_copy(0, index, left)
            kept = {row: orders[i][stays[i]].int().numpy() for i, row in enumerate(cut.tolist())}
    if bool(greedy.any()):
        index = as_tensor(np.flatnonzero(greedy))
        ids[index] = logits[index].argmax(dim=-1, keepdim=True)
    logprobs = logits.gather(1, ids) - peaks - totals.log().float()
    is_finite = np.isfinite(totals[:, 0].numpy()) & np.isfinite(peaks[:, 0].numpy())
    return DrawnTokens(ids[:, 0].numpy(), logprobs[:, 0].numpy(), is_finite, kept)


def draw_tiles(logits: Tensor, rows: Records, numbers: F64, *, tells_kept: bool = False) -> DrawnTokens:
    """The same by tiles of rows, so that a row's draw depends on no other row."""
    num_rows = len(logits)
    tiles = [np.minimum(np.arange(start, start + TILE), num_rows - 1) for start in range(0, num_rows, TILE)]
    found = [draw(logits[as_tensor(tile)], rows[tile], numbers[tile], tells_kept=tells_kept) for tile in tiles]
    columns = zip(*(one[:3] for one in found), strict=True)
    ids, logprobs, is_finite = (np.concatenate(parts)[:num_rows] for parts in columns)
    kept = {number * TILE + row: left for number, one in enumerate(found) for row, left in one.kept.items()}
    return DrawnTokens(ids, logprobs, is_finite, {row: left for row, left in kept.items() if row < num_rows})


def _draw_cut(
    masses: Tensor, totals: Tensor, thresholds: Tensor, rows: Records
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw from the likeliest tokens only: ids and the mass of what is left, [m, 1]; all ids in order of probability
    and whether each is left, [m, vocabulary]. A token stays if those before it in order of probability sum
    to less than top_p, it is among the first top_k, and it is at least min_p times as likely as the first; all are
    judged on the full distribution (SGLang's joint order)."""
    ordered, order = masses.sort(dim=-1, descending=True)
    before = ordered.cumsum(dim=-1, dtype=torch.float64) - ordered
    limits = np.where(rows["top_k"] > 0, rows["top_k"], masses.shape[-1])
    stays = before < as_tensor(rows["top_p"].astype(np.float64))[:, None] * totals
    stays &= torch.arange(masses.shape[-1]) < as_tensor(limits)[:, None]
    stays &= ordered >= as_tensor(rows["min_p"].copy())[:, None] * ordered[:, :1]
    stays[:, 0] = True
    cumulated = (ordered * stays).cumsum(dim=-1, dtype=torch.float64)
    ranks = torch.searchsorted(cumulated, thresholds * cumulated[:, -1:], right=True)
    return order.gather(1, ranks.clamp_(max=masses.shape[-1] - 1)), cumulated[:, -1:], order, stays


def is_penalised(sampling: SamplingParams) -> bool:
    return bool(
        sampling.min_new_tokens
        or sampling.frequency_penalty
        or sampling.presence_penalty
        or sampling.repetition_penalty != 1
    )


def penalise(logits: Tensor, sampling: SamplingParams, answer: I32, end_ids: frozenset[int]) -> None:
    """Change one row of float32 logits [vocabulary] in place, by the tokens of its answer so far. `end_ids` are kept
    away before the least length."""
    if len(answer):
        ids, counts = np.unique(answer, return_counts=True)
        index = as_tensor(ids.astype(np.int64))
        seen = logits[index]
        seen -= sampling.frequency_penalty * as_tensor(counts.astype(np.float32))
        seen -= sampling.presence_penalty
        scale = sampling.repetition_penalty
        logits[index] = torch.where(seen < 0, seen * scale, seen / scale)
    if len(answer) < sampling.min_new_tokens and end_ids:
        logits[list(end_ids)] = -torch.inf
