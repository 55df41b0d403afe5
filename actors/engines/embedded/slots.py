"""Per-row state of the running sequences, in arrays: Python touches a row only when it begins, reports tokens, or ends.

Row r of every array belongs to slot r of the key-value cache; rows 0..n-1 are running. A row's newest token is known
but not in the cache yet: it is the input of the next step.

`take_waiting` and `plan_admission` choose the waiting requests that join a step and pack their contexts. Requests with
the same context (the members of a group) are prefilled once, into the row of the first of them.

Tokens are drawn with one random number each. Penalties come first: meaning and order are SGLang's under its overlap
schedule. Frequency, early ends and presence are taken off, then repetition divides, then the temperature. They count
the tokens of this request's answer: a request that continues an earlier one has the earlier tokens in its prompt, and
prompts are not penalised. Counts are made from the row's tokens in each step: a table of counts would be as large as
slots times vocabulary.

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

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ....core.errors import RequestRefused
from ....core.messages import SamplingParams
from ....core.protocols import Delta, GenerateRequest
from ....core.samples import F32, I32, FinishReason, joined_kept
from ....core.sampling import Decode, StopStrings, sampling_fault
from .model import SlotCache
from .tensors import F64, U64, Flags, Index, Records, as_tensor

MAX_NAME_CHARS = 1024


@dataclass(slots=True, eq=False)
class Running:
    """A request from its arrival to its end; its events are for `owner`."""

    request_id: str
    owner: object
    sampling: SamplingParams
    context: I32
    """int32 [P + tokens generated before the last retract]."""
    num_prompt: int
    limit: int
    """The request ends when its context has that many tokens."""
    stop_ids: frozenset[int]
    """None under `ignore_eos`."""
    end_ids: frozenset[int]
    """Kept away before the least length; as in SGLang, under `ignore_eos` too."""
    state: int
    """Random stream, see `sampler.stream_state`."""
    stops: StopStrings


def make_running(
    request: GenerateRequest, owner: object, eos_token_ids: frozenset[int], state: int, decode: Decode
) -> Running:
    sampling, context = request.sampling, request.input_ids.astype(np.int32, copy=True)
    end_ids = eos_token_ids | frozenset(sampling.stop_token_ids)
    return Running(
        request_id=request.request_id,
        owner=owner,
        sampling=sampling,
        context=context,
        num_prompt=len(context),
        limit=len(context) + sampling.max_new_tokens,
        stop_ids=frozenset() if sampling.ignore_eos else end_ids,
        end_ids=end_ids,
        state=state,
        stops=StopStrings(sampling.stop, decode),
    )


def check_request(request: GenerateRequest, *, vocab_size: int, context_length: int, place: str) -> None:
    """Raise RequestRefused with the numbers and a remedy if the request cannot be served."""
    sampling, ids = request.sampling, request.input_ids
    name = f"{place}: request {request.request_id[:MAX_NAME_CHARS]!r}"
    if not 0 < len(request.request_id) <= MAX_NAME_CHARS:
        raise RequestRefused(
            f"{name}: its request_id has {len(request.request_id)} characters",
            remedy=f"give every request its own id of 1 to {MAX_NAME_CHARS} characters",
        )
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise RequestRefused(f"{name}: input_ids are {ids.dtype}{list(ids.shape)}", remedy="pass one sequence of int32")
    if not ids.size:
        raise RequestRefused(f"{name}: the prompt is empty", remedy="send at least one token")
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0 or highest >= vocab_size:
        outside_id = lowest if lowest < 0 else highest
        raise RequestRefused(
            f"{name}: token id {outside_id} is outside the vocabulary [0, {vocab_size})",
            remedy="encode the prompt with the tokenizer of the engine's own model folder",
        )
    if wrong := sampling_fault(sampling):
        raise RequestRefused(f"{name}: {wrong.field} {wrong.fault}", remedy=wrong.remedy)
    outside = [i for i in sampling.stop_token_ids if not 0 <= i < vocab_size]
    if outside:
        raise RequestRefused(
            f"{name}: stop token id {outside[0]} is outside the vocabulary [0, {vocab_size})",
            remedy="stop ids must come from the engine's own tokenizer",
        )
    size = ids.size
    longest = size + sampling.max_new_tokens
    if longest > context_length:
        raise RequestRefused(
            f"{name}: {size} prompt tokens and max_new_tokens {sampling.max_new_tokens} make {longest}, the engine's "
            f"context is {context_length}",
            remedy=f"shorten the prompt or lower max_new_tokens to {max(context_length - size, 0)}",
        )


MASK_64 = (1 << 64) - 1
GOLDEN_GAMMA = 0x9E3779B97F4A7C15
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)
TILE = 32
"""Rows that are computed together where results must not depend on how many there are: whole vectors on every CPU."""
SAMPLING_FIELDS = [("temperature", np.float32), ("top_p", np.float32), ("top_k", np.int64), ("min_p", np.float32)]
"""Of `SamplingParams`: what each of the rows is drawn by."""
PENALTIES = ("min_new_tokens", "frequency_penalty", "presence_penalty", "repetition_penalty")
AT_REST = SamplingParams()


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
    """Row -> the tokens that were left, where some were cut and the engine tells them."""


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
        ids[index], masses_left, orders, stays = _draw_cut(masses[index], totals[index], thresholds[index], rows[cut])
        if tells_kept:
            totals = totals.index_copy(0, index, masses_left)
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
    draws = [draw(logits[as_tensor(tile)], rows[tile], numbers[tile], tells_kept=tells_kept) for tile in tiles]
    columns = zip(*(tile_draw[:3] for tile_draw in draws), strict=True)
    ids, logprobs, is_finite = (np.concatenate(parts)[:num_rows] for parts in columns)
    kept = {
        number * TILE + row: token_ids
        for number, tile_draw in enumerate(draws)
        for row, token_ids in tile_draw.kept.items()
    }
    return DrawnTokens(ids, logprobs, is_finite, {row: token_ids for row, token_ids in kept.items() if row < num_rows})


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


ROW = np.dtype(
    [
        ("length", np.int64),  # context plus tokens drawn, the newest included
        ("start", np.int64),  # length of the context: the row's own tokens begin there
        ("sent", np.int64),  # tokens before this position were handed out
        ("limit", np.int64),
        ("newest", np.int64),
        ("state", np.uint64),
        ("is_penalised", np.bool_),
        ("has_stops", np.bool_),
        *SAMPLING_FIELDS,
    ],
    align=True,
)
TOKEN = np.dtype([("id", np.int32), ("logprob", np.float32), ("version", np.int32)])


class SlotTable:
    """All running rows. `context_length` bounds prompt plus answer."""

    def __init__(self, cache: SlotCache, num_slots: int, context_length: int) -> None:
        self._cache = cache
        self.num_slots = num_slots
        self.rows: list[Running] = []
        self._table: Records = np.zeros(num_slots, dtype=ROW)
        self._tokens: Records = np.zeros((num_slots, context_length), dtype=TOKEN)
        self._kept: list[dict[int, I32]] = []
        """Of each row: position -> the tokens that one was drawn from, until they are handed out."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def num_free(self) -> int:
        return self.num_slots - len(self.rows)

    @property
    def records(self) -> Records:
        return self._table[: len(self.rows)]

    def add(self, requests: Sequence[Running]) -> None:
        """Append rows; their contexts must be in the cache already."""
        for request in requests:
            record, sampling = self._table[len(self.rows)], request.sampling
            self.rows.append(request)
            self._kept.append({})
            record["length"] = record["start"] = record["sent"] = len(request.context)
            record["limit"], record["state"] = request.limit, request.state
            record["is_penalised"] = any(getattr(sampling, name) != getattr(AT_REST, name) for name in PENALTIES)
            record["has_stops"] = bool(request.stops)
            for name, _ in SAMPLING_FIELDS:
                record[name] = getattr(sampling, name)

    def inputs(self) -> tuple[Index, Index]:
        """Newest token and its position of every row."""
        return self.records["newest"].copy(), self.records["length"] - 1

    def append(self, drawn: DrawnTokens, version: int) -> tuple[Flags, Flags]:
        """Record one token for every row. Returns (stopped by a token, ended by it or by length) per row."""
        records, ids = self.records, drawn.ids
        for row, kept in drawn.kept.items():
            self._kept[row][int(records["length"][row])] = kept
        places = np.arange(len(self.rows)), records["length"].copy()
        for name, values in (("id", ids), ("logprob", drawn.logprobs), ("version", version)):
            self._tokens[name][places] = values
        records["newest"] = ids
        records["length"] += 1
        stopped = np.fromiter(
            (i in row.stop_ids for i, row in zip(ids.tolist(), self.rows, strict=True)), np.bool_, len(self.rows)
        )
        return stopped, stopped | (records["length"] >= records["limit"])

    def matched_text(self, row: int) -> str:
        """The stop string that the newest token completes, or nothing."""
        stops = self.rows[row].stops
        tail = self.answer(row, stops.window + 1)
        match = stops.match(tail.tolist(), len(tail) - 1)
        return "" if match is None else match.text

    def answer(self, row: int, num_last: int = 0) -> I32:
        """int32: tokens that the row's request was answered with so far, all or the last ones."""
        request = self.rows[row]
        return np.concatenate([request.context[request.num_prompt :], self._own(row)["id"]])[-num_last:]

    def _own(self, row: int, first: str = "start") -> npt.NDArray[Any]:
        record = self._table[row]
        return self._tokens[row, int(record[first]) : int(record["length"])]

    def news(self, row: int, finish: FinishReason | None = None) -> Delta | None:
        """The row's tokens since the last call; None if there are none and it continues."""
        new, first = self._own(row, "sent"), int(self._table[row]["sent"])
        if not (len(new) or finish):
            return None
        self._table[row]["sent"] = self._table[row]["length"]
        ids: I32 = new["id"].copy()
        is_token = finish == "stop" and int(ids[-1]) in self.rows[row].stop_ids
        return Delta(
            output_ids=ids,
            logprobs=new["logprob"].copy(),
            versions=new["version"].copy(),
            kept=self._told_kept(row, first, len(new)),
            finish=finish,
            matched=int(ids[-1]) if is_token else None,
            matched_text=self.matched_text(row) if finish == "stop" and not is_token else "",
        )

    def _told_kept(self, row: int, first: int, count: int) -> I32 | None:
        kept, self._kept[row] = self._kept[row], {}
        rows = (kept.get(first + number) for number in range(count)) if kept else ()
        return joined_kept([(None if ids is None else ids[None], 1) for ids in rows])

    def remove(self, row: int) -> Running:
        """Take a row out; the last row moves into its place."""
        gone, last = self.rows[row], len(self.rows) - 1
        if row != last:
            length, start = int(self._table[last]["length"]), int(self._table[last]["start"])
            self._cache.copy_row(last, row, length - 1)
            self._table[row] = self._table[last]
            self._tokens[row, start:length] = self._tokens[last, start:length]
            self.rows[row], self._kept[row] = self.rows[last], self._kept[last]
        self.rows.pop()
        self._kept.pop()
        return gone

    def retract(self, row: int) -> Running:
        """Take a row out with its tokens in its context, so that it can be prefilled and continued later."""
        request = self.rows[row]
        request.context = np.concatenate([request.context, self._own(row)["id"]])
        return self.remove(row)


@dataclass(frozen=True, slots=True)
class AdmissionPlan:
    """Requests that get rows first, first + 1, ... in this order."""

    contexts: list[I32]
    """Distinct ones, shortest first, so that prompts of equal length lie side by side."""
    rows: list[int]
    """Row of each context."""
    copies: list[tuple[int, int, int]]
    """(row that is prefilled, row that gets a copy, tokens)."""
    lasts: Index
    """For each request: where the last token of its context lies in the packed contexts."""

    @property
    def lengths(self) -> list[int]:
        return [len(context) for context in self.contexts]


def take_waiting(waiting: deque[Running], num_free: int, max_tokens: int) -> list[Running]:
    """Take requests off the queue, in order, for the free rows. Their distinct contexts stay within `max_tokens`,
    except that one is always taken."""
    requests: list[Running] = []
    seen: set[bytes] = set()
    room = max_tokens
    while waiting and len(requests) < num_free:
        context = waiting[0].context
        key = context.tobytes()
        if key not in seen:
            if requests and len(context) > room:
                break
            seen.add(key)
            room -= len(context)
        requests.append(waiting.popleft())
    return requests


def plan_admission(requests: Sequence[Running], first: int) -> AdmissionPlan:
    """Pack the contexts of requests that get rows from `first` on."""
    members: dict[bytes, list[int]] = {}
    for number, request in enumerate(requests):
        members.setdefault(request.context.tobytes(), []).append(number)
    groups = sorted(members.values(), key=lambda numbers: len(requests[numbers[0]].context))
    contexts = [requests[numbers[0]].context for numbers in groups]
    lasts: Index = np.zeros(len(requests), dtype=np.int64)
    for numbers, end in zip(groups, np.cumsum([len(c) for c in contexts]).tolist(), strict=True):
        lasts[numbers] = end - 1
    copies = [
        (first + numbers[0], first + number, len(context))
        for numbers, context in zip(groups, contexts, strict=True)
        for number in numbers[1:]
    ]
    return AdmissionPlan(contexts, [first + numbers[0] for numbers in groups], copies, lasts)
