"""Per-row state of the running sequences, in arrays: Python touches a row only when it begins, reports tokens, or ends.

Row r of every array belongs to slot r of the key-value cache; rows 0..n-1 are running. A row's newest token is known
but not in the cache yet: it is the input of the next step.

`take_waiting` and `plan_admission` choose the waiting requests that join a step and pack their contexts. Requests with
the same context (the members of a group) are prefilled once, into the row of the first of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ....core.protocols import Delta
from ....core.samples import I32, FinishReason, joined_kept
from .attention import SlotCache
from .request import Running
from .sampler import SAMPLING_FIELDS, DrawnTokens, is_penalised
from .tensors import Flags, Index, Records

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
            record["is_penalised"], record["has_stops"] = is_penalised(sampling), bool(request.stops)
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
        return joined_kept([(None if one is None else one[None], 1) for one in rows])

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
    copies = [
        (first + numbers[0], first + other, len(context))
        for numbers, context in zip(groups, contexts, strict=True)
        for other in numbers[1:]
    ]
    return AdmissionPlan(contexts, [first + numbers[0] for numbers in groups], copies, lasts)
