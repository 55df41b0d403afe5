"""Per-row state of the running sequences, in arrays: Python touches a row only when it begins, reports tokens, or ends.

Row r of every array belongs to slot r of the key-value cache; rows 0..n-1 are running. A row's newest token is known
but not in the cache yet: it is the input of the next step.

`take_waiting` and `plan_admission` choose the waiting requests that join a step and pack their contexts. Requests with
the same context (the members of a group) are prefilled once, into the row of the first of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ....core.protocols import Delta
from ....core.samples import F32, I32, FinishReason
from .attention import SlotCache
from .request import Running
from .sampler import PenalisedRow, SamplingRows, is_penalised, uniforms
from .tensors import Flags, Index

MAX_STOP_SETS = 64


class StopSets:
    """Distinct sets of stop ids as rows of one table, so that checking n rows is one lookup."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._numbers: dict[frozenset[int], int] = {}
        self._table: Flags = np.zeros((0, vocab_size), dtype=np.bool_)

    def number(self, stop_ids: frozenset[int]) -> int:
        """Row of the set; it is added if it is new."""
        found = self._numbers.get(stop_ids)
        if found is None:
            row = np.zeros((1, self._vocab_size), dtype=np.bool_)
            row[0, list(stop_ids)] = True
            found = self._numbers[stop_ids] = len(self._table)
            self._table = np.concatenate([self._table, row])
        return found

    @property
    def is_full(self) -> bool:
        """Time to forget sets that no row uses any more."""
        return len(self._numbers) >= MAX_STOP_SETS

    def forget(self) -> None:
        """Forget all numbers given out so far."""
        self._numbers.clear()
        self._table = self._table[:0]

    def matches(self, numbers: Index, ids: Index) -> Flags:
        """Whether each id is in its row's set."""
        return self._table[numbers, ids]


class SlotTable:
    """All running rows. `context_length` bounds prompt plus answer."""

    def __init__(self, cache: SlotCache, num_slots: int, context_length: int, vocab_size: int) -> None:
        self._cache = cache
        self.num_slots = num_slots
        self.rows: list[Running] = []
        self.lengths: Index = np.zeros(num_slots, dtype=np.int64)
        """Context plus tokens drawn, the newest included."""
        self._newest: Index = np.zeros(num_slots, dtype=np.int64)
        self._limits: Index = np.zeros(num_slots, dtype=np.int64)
        self._starts: Index = np.zeros(num_slots, dtype=np.int64)
        """Where the row's own tokens begin: length of its context."""
        self._sent: Index = np.zeros(num_slots, dtype=np.int64)
        """Tokens before this position were handed out."""
        self._temperatures: F32 = np.zeros(num_slots, dtype=np.float32)
        self._top_ps: F32 = np.zeros(num_slots, dtype=np.float32)
        self._top_ks: Index = np.zeros(num_slots, dtype=np.int64)
        self._min_ps: F32 = np.zeros(num_slots, dtype=np.float32)
        self._is_penalised: Flags = np.zeros(num_slots, dtype=np.bool_)
        self._has_stops: Flags = np.zeros(num_slots, dtype=np.bool_)
        self._states = np.zeros(num_slots, dtype=np.uint64)
        self._stop_sets: Index = np.zeros(num_slots, dtype=np.int64)
        self._ids: I32 = np.zeros((num_slots, context_length), dtype=np.int32)
        self._logprobs: F32 = np.zeros((num_slots, context_length), dtype=np.float32)
        self._versions: I32 = np.zeros((num_slots, context_length), dtype=np.int32)
        self._stops = StopSets(vocab_size)
        self._scalars = (
            self.lengths,
            self._newest,
            self._limits,
            self._starts,
            self._sent,
            self._temperatures,
            self._top_ps,
            self._top_ks,
            self._min_ps,
            self._is_penalised,
            self._has_stops,
            self._states,
            self._stop_sets,
        )

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def num_free(self) -> int:
        """Slots without a sequence."""
        return self.num_slots - len(self.rows)

    def add(self, requests: Sequence[Running]) -> None:
        """Append rows; their contexts must be in the cache already."""
        if self._stops.is_full:
            self._stops.forget()
            for row, running in enumerate(self.rows):
                self._stop_sets[row] = self._stops.number(running.stop_ids)
        for request in requests:
            row, sampling = len(self.rows), request.sampling
            self.rows.append(request)
            self.lengths[row] = self._starts[row] = self._sent[row] = len(request.context)
            self._limits[row] = request.limit
            self._temperatures[row] = sampling.temperature
            self._top_ps[row] = sampling.top_p
            self._top_ks[row] = sampling.top_k
            self._min_ps[row] = sampling.min_p
            self._is_penalised[row] = is_penalised(sampling)
            self._has_stops[row] = bool(request.stops)
            self._states[row] = request.state
            self._stop_sets[row] = self._stops.number(request.stop_ids)

    def inputs(self) -> tuple[Index, Index]:
        """Newest token and its position of every row."""
        count = len(self.rows)
        return self._newest[:count], self.lengths[:count] - 1

    def sampling(self) -> SamplingRows:
        """How the next token of each row is drawn."""
        rows = slice(len(self.rows))
        return SamplingRows(
            temperatures=self._temperatures[rows],
            top_ps=self._top_ps[rows],
            top_ks=self._top_ks[rows],
            min_ps=self._min_ps[rows],
            uniforms=uniforms(self._states[rows], self.lengths[rows]),
        )

    def append(self, ids: Index, logprobs: F32, version: int) -> tuple[Flags, Flags]:
        """Record one token for every row. Returns (stopped, ended by stop or length) per row."""
        rows = slice(len(self.rows))
        numbers, places = np.arange(len(self.rows)), self.lengths[rows]
        self._ids[numbers, places] = ids
        self._logprobs[numbers, places] = logprobs
        self._versions[numbers, places] = version
        self._newest[rows] = ids
        self.lengths[rows] += 1
        stopped = self._stops.matches(self._stop_sets[rows], ids)
        for row in np.flatnonzero(self._has_stops[rows]).tolist():
            stopped[row] |= self._matched_text(row) != ""
        return stopped, stopped | (self.lengths[rows] >= self._limits[rows])

    def _matched_text(self, row: int) -> str:
        """The stop string that the newest token completes, or nothing."""
        stops = self.rows[row].stops
        tail = self._answer(row, stops.window + 1)
        match = stops.match(tail.tolist(), len(tail) - 1)
        return "" if match is None else match.text

    def _answer(self, row: int, num_last: int | None = None) -> I32:
        """int32: tokens that the row's request was answered with so far, all or the last ones."""
        request = self.rows[row]
        own = self._ids[row, int(self._starts[row]) : int(self.lengths[row])]
        whole = (
            np.concatenate([request.context[request.num_prompt :], own])
            if len(request.context) > request.num_prompt
            else own
        )
        return whole if num_last is None else whole[-num_last:]

    def penalised(self) -> list[PenalisedRow]:
        """The rows whose logits are not drawn from as they are."""
        return [
            PenalisedRow(row, self.rows[row].sampling, self._answer(row), self.rows[row].end_ids)
            for row in np.flatnonzero(self._is_penalised[: len(self.rows)]).tolist()
        ]

    def has_news(self, row: int) -> bool:
        """Whether there are tokens that were not handed out."""
        return bool(self._sent[row] < self.lengths[row])

    def news(self, row: int, finish: FinishReason | None = None) -> Delta:
        """The row's tokens since the last call."""
        new = slice(int(self._sent[row]), int(self.lengths[row]))
        self._sent[row] = self.lengths[row]
        ids = self._ids[row, new].copy()
        is_token = finish == "stop" and int(ids[-1]) in self.rows[row].stop_ids
        return Delta(
            output_ids=ids,
            logprobs=self._logprobs[row, new].copy(),
            versions=self._versions[row, new].copy(),
            finish=finish,
            matched=int(ids[-1]) if is_token else None,
            matched_text=self._matched_text(row) if finish == "stop" and not is_token else "",
        )

    def remove(self, row: int) -> Running:
        """Take a row out; the last row moves into its place."""
        gone, last = self.rows[row], len(self.rows) - 1
        if row != last:
            length, start = int(self.lengths[last]), int(self._starts[last])
            self._cache.copy_row(last, row, length - 1)
            for array in self._scalars:
                array[row] = array[last]
            for array in (self._ids, self._logprobs, self._versions):
                array[row, start:length] = array[last, start:length]
            self.rows[row] = self.rows[last]
        self.rows.pop()
        return gone

    def marks(self) -> dict[int, tuple[int, int]]:
        """Of each running request, by `id`: its tokens, and those that were handed out."""
        return {id(one): (int(self.lengths[row]), int(self._sent[row])) for row, one in enumerate(self.rows)}

    def go_back(self, marks: Mapping[int, tuple[int, int]]) -> None:
        """Undo a step that failed half-way: rows are as they were at `marks`, those that came later are not there."""
        self.rows = [one for one in self.rows if id(one) in marks]
        for row, one in enumerate(self.rows):
            self.lengths[row], self._sent[row] = marks[id(one)]
            last = int(self.lengths[row]) - 1
            self._newest[row] = self._ids[row, last] if last >= self._starts[row] else one.context[-1]

    def clear(self) -> None:
        """Forget all rows."""
        self.rows = []

    def retract(self, row: int) -> Running:
        """Take a row out with its tokens in its context, so that it can be prefilled and continued later."""
        own = self._ids[row, int(self._starts[row]) : int(self.lengths[row])]
        request = self.rows[row]
        request.context = np.concatenate([request.context, own])
        return self.remove(row)


@dataclass(frozen=True, slots=True)
class AdmissionPlan:
    """Requests that get rows first, first + 1, ... in this order."""

    requests: list[Running]
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
        """Tokens of each context."""
        return [len(context) for context in self.contexts]


def take_waiting(waiting: deque[Running], num_free: int, max_tokens: int) -> list[Running]:
    """Take requests off the queue, in order, for the free rows.

    Their distinct contexts stay within `max_tokens`, except that one is always taken.
    """
    taken: list[Running] = []
    seen: set[bytes] = set()
    room = max_tokens
    while waiting and len(taken) < num_free:
        context = waiting[0].context
        key = context.tobytes()
        if key not in seen:
            if taken and len(context) > room:
                break
            seen.add(key)
            room -= len(context)
        taken.append(waiting.popleft())
    return taken


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
    return AdmissionPlan(
        requests=list(requests),
        contexts=contexts,
        rows=[first + numbers[0] for numbers in groups],
        copies=[
            (first + numbers[0], first + other, len(context))
            for numbers, context in zip(groups, contexts, strict=True)
            for other in numbers[1:]
        ],
        lasts=lasts,
    )
