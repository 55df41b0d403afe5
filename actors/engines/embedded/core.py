"""Continuous batching, one step at a time: a forward pass decodes the running rows and prefills those that join.

Synchronous and single-threaded: the owner calls `step` and takes the events. There are no threads, no asyncio and no
clock here.

    submit -> waiting -> admit (a row) -> forward -> draw -> ... -> end
                ^------------- retract ---------------|
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch

from ....core.errors import EngineError, ModelError, RequestRefused
from ....core.protocols import Delta, GenerateRequest, PauseMode
from ....core.samples import I32, FinishReason
from ....core.sampling import Decode
from ...models.model_config import ModelConfig
from .model import (
    Attention,
    DecodeAttention,
    Decoder,
    DecoderWeights,
    MixedAttention,
    PrefillAttention,
    SlotCache,
    TileAttention,
)
from .slots import (
    TILE,
    AdmissionPlan,
    Running,
    SlotTable,
    check_request,
    draw,
    draw_tiles,
    make_running,
    penalise,
    plan_admission,
    stream_state,
    take_waiting,
    uniforms,
)
from .tensors import Allocate, Index, as_tensor

PREFILL_TOKENS = 4096
"""Prompt tokens per step at most (one prompt at least), so that a flood of prompts does not starve running rows."""
_log = logging.getLogger("myxa.embedded")


class RequestEvent(NamedTuple):
    """For the owner of a request: new tokens, or the error that ended it."""

    owner: Any
    news: Delta | EngineError


MEMORY_SHARE = 0.6
"""The rest is for activations, other processes, surprises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedOptions:
    """Settings of an embedded engine."""

    max_running: int = 256
    """Sequences decoded together; fewer if memory demands it."""
    context_length: int = 0
    """Longest prompt plus answer in tokens; 0: the model's own."""
    dtype: str = "float32"
    """float32 agrees with the trainer to 1e-5 per log-prob; bfloat16 halves the memory and does not."""
    seed: int = 0
    """Of the requests that bring none."""
    version: int = 0
    """Weight version that the folder holds."""
    pause_mode: PauseMode = "in_place"
    """What a commit does to running requests: in_place keeps their cache, retract rebuilds it under the new weights,
    abort ends them."""
    stream_interval: int = 16
    """Steps between two deltas of a request; its last delta comes at once. 0: one delta, at the end."""
    num_threads: int = 1
    """Of torch. More than one pays on idle cores only: its barriers spin."""
    memory_share: float = MEMORY_SHARE
    """Part of the host's available memory to plan with, divided by the number of engines on the host."""
    is_invariant: bool = False
    """Tokens and log-probs of a request depend on its tokens, its seed and the weights alone, to the bit: whatever
    shares its batch, and wherever it was continued. Slower: docs/benchmarks.md."""
    tells_kept: bool = False
    """Whether tokens come with those that they were drawn from, where `top_p`, `top_k` or `min_p` cut some."""
    name: str = "embedded engine"


_EMPTY_I32: I32 = np.zeros(0, dtype=np.int32)
_NOTHING = Delta(output_ids=_EMPTY_I32, logprobs=np.zeros(0, dtype=np.float32), versions=_EMPTY_I32, finish="abort")
"""The end of a request that had no untold token."""


@dataclass(eq=False)
class EngineCore:
    """The engine without its thread."""

    config: ModelConfig
    weights: DecoderWeights
    options: EmbeddedOptions
    _: KW_ONLY
    num_slots: int
    context_length: int
    eos_token_ids: frozenset[int]
    decode: Decode
    """Text of token ids, special tokens kept."""
    allocate: Allocate | None = None
    """Of the cache."""

    def __post_init__(self) -> None:
        self.decoder = Decoder(self.config, self.context_length)
        self._cache = SlotCache(self.config, self.num_slots, self.context_length, self.weights.dtype, self.allocate)
        self._slots = SlotTable(self._cache, self.num_slots, self.context_length)
        self._waiting: deque[Running] = deque()
        self._ids: set[str] = set()
        self._events: list[RequestEvent] = []
        self._random = Random(self.options.seed)
        self._steps_untold = 0
        self.version = self.options.version
        self.is_paused = False
        if self.options.is_invariant:
            self._check_invariance()

    # -- state

    @property
    def num_running(self) -> int:
        """Rows that decode or are paused."""
        return len(self._slots)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return not self.is_paused and bool(self._slots.rows or self._waiting)

    def take_events(self) -> list[RequestEvent]:
        """What happened since the last call, in order."""
        events, self._events = self._events, []
        return events

    # -- requests

    def submit(self, request: GenerateRequest, owner: object) -> None:
        """Queue a request; its events carry `owner`. One that cannot be served gets RequestRefused as only event."""
        name = self.options.name
        try:
            self._check(request)
            seed = request.sampling.seed
            state = stream_state(self._random.getrandbits(64) if seed is None else seed)
            running = make_running(request, owner, self.eos_token_ids, state, self.decode)
        except EngineError as err:
            self._events.append(RequestEvent(owner, err))
        except Exception as err:  # noqa: BLE001 -- whatever is wrong with it, its owner waits for an answer
            refused = RequestRefused(
                f"{name}: request {str(request.request_id)[:80]!r} cannot be read: {type(err).__name__}: {err}",
                remedy="send the types that the protocol names",
            )
            refused.__cause__ = err
            self._events.append(RequestEvent(owner, refused))
        else:
            self._ids.add(request.request_id)
            self._waiting.append(running)

    def _check(self, request: GenerateRequest) -> None:
        name = self.options.name
        check_request(request, vocab_size=self.config.vocab_size, context_length=self.context_length, place=name)
        if request.request_id in self._ids:
            raise RequestRefused(
                f"{name}: request {request.request_id!r} is running already",
                remedy="give every request its own id, or abort the first",
            )

    def abort(self, is_meant: Callable[[Running], bool] = lambda _: True) -> None:
        """End the requests that are meant (all); their last delta says "abort" and holds what was not sent yet."""
        for row in reversed(range(len(self._slots))):
            if is_meant(self._slots.rows[row]):
                self._end(row, "abort")
        for request in [request for request in self._waiting if is_meant(request)]:
            self._waiting.remove(request)
            self._forget(request, _NOTHING)

    def pause(self, mode: PauseMode) -> None:
        """Generate nothing until `resume`. abort: all requests end; retract: rows wait again and are prefilled again;
        in_place: rows keep their cache."""
        self.is_paused = True
        {"abort": self.abort, "retract": self.retract, "in_place": self.tell}[mode]()

    def resume(self) -> None:
        self.is_paused = False

    def retract(self) -> None:
        """Running requests wait again, before the others, with the tokens that they have."""
        self.tell()
        self._waiting.extendleft([self._slots.retract(row) for row in reversed(range(len(self._slots)))])

    def swap(self, weights: DecoderWeights, version: int, mode: PauseMode) -> DecoderWeights:
        """Serve other weights from the next token on; returns the old ones. `mode` is as in `pause`."""
        was_paused = self.is_paused
        self.pause(mode)
        self.is_paused = was_paused
        self.tell()
        old, self.weights = self.weights, weights
        self.version = version
        return old

    # -- steps

    @torch.inference_mode()
    def step(self) -> int:
        """One token for every row, rows of requests that join in this step included; returns how many were drawn. After
        a step that fails, each of its requests takes one alone: those that fail again end with EngineError. Raises
        where none succeeds, nor anything else."""
        if self.is_paused:
            return 0
        new = take_waiting(self._waiting, self._slots.num_free, PREFILL_TOKENS)
        if not (new or self._slots.rows):
            return 0
        num_others = len(self._waiting)
        try:
            return self._advance(new)
        except Exception as err:  # noqa: BLE001 -- found out below whose it is
            self._waiting.extendleft(request for request in reversed(new) if request not in self._slots.rows)
            self.retract()
            self._part([self._waiting.popleft() for _ in range(len(self._waiting) - num_others)], err)
            return 0

    def _part(self, requests: Sequence[Running], err: Exception) -> None:
        sound: list[Running] = []
        failed: list[tuple[Running, Exception]] = []
        for request in requests:
            try:
                self._advance([request])
            except Exception as again:  # noqa: BLE001 -- this request's
                while self._slots.rows:
                    self._slots.remove(0)
                failed.append((request, again))
            else:
                self.retract()
                sound += [self._waiting.popleft()] if request in self._waiting else []
        if len(failed) == len(requests):
            try:
                self.check_logits()
            except Exception:  # noqa: BLE001 -- it serves no one
                raise err from None
        for request, again in failed:
            self._forget(request, self._request_failed(request, again))
        self._waiting.extendleft(reversed(sound))

    def _request_failed(self, request: Running, err: BaseException) -> EngineError:
        _log.error("%s: request %r failed", self.options.name, request.request_id, exc_info=err)
        error = EngineError(
            f"{self.options.name}: request {request.request_id!r} failed in a step: {type(err).__name__}: {err}",
            remedy="other requests are served; the engine's log has the place",
        )
        error.__cause__ = err
        return error

    def _advance(self, new: Sequence[Running]) -> int:
        admission = plan_admission(new, len(self._slots))
        logits = self._forward(admission)
        for source, target, length in admission.copies:
            self._cache.copy_row(source, target, length)
        self._slots.add(new)
        num_drawn = len(self._slots)
        self._draw(logits)
        self._steps_untold += 1
        if self._steps_untold == self.options.stream_interval:
            self.tell()
        return num_drawn

    def _forward(self, admission: AdmissionPlan) -> torch.Tensor:
        """Logits of the next token, float32: of the running rows, then of the requests that join."""
        if self.options.is_invariant:
            return self._forward_tiles(admission)
        ids, positions = self._slots.inputs()
        count = len(ids)
        attentions: list[Attention] = []
        last_places = None
        if count:
            attentions.append(DecodeAttention(self._cache, positions, self.weights.dtype, self.config.num_kv_heads))
        if admission.rows:
            prefill = PrefillAttention(self._cache, admission.rows, admission.lengths)
            attentions.append(prefill)
            ids = np.concatenate([ids, *admission.contexts]).astype(np.int64)
            positions = np.concatenate([positions, prefill.positions])
            last_places = as_tensor(np.concatenate([np.arange(count), count + admission.lasts]))
        attention = attentions[0] if len(attentions) == 1 else MixedAttention(*attentions, num_first=count)
        hidden = self.decoder.hidden(self.weights, as_tensor(ids), as_tensor(positions), attention, last_places)
        return self.decoder.logits(self.weights, hidden)

    def _forward_tiles(self, admission: AdmissionPlan) -> torch.Tensor:
        """The same, tile by tile: a running row shares its tile with its neighbours, or with slots that are free."""
        ids, positions = self._slots.inputs()
        count = len(ids)
        logits: list[torch.Tensor] = []
        for start in range(0, count, TILE):
            slots = np.minimum(np.arange(start, start + TILE), self._slots.num_slots - 1)
            is_taken = slots < count
            slots_ids, slots_at = np.zeros(TILE, dtype=np.int64), np.zeros(TILE, dtype=np.int64)
            slots_ids[is_taken], slots_at[is_taken] = ids[slots[is_taken]], positions[slots[is_taken]]
            hidden = self._hidden_tile(slots_ids, slots, slots_at)
            logits.append(self.decoder.logits(self.weights, hidden)[: count - start])
        if admission.rows:
            hidden = self._prefill_tiles(admission)[as_tensor(admission.lasts)]
            for start in range(0, len(hidden), TILE):
                part = hidden[start : start + TILE]
                tile = torch.zeros(TILE, hidden.shape[1], dtype=hidden.dtype)
                tile[: len(part)] = part
                logits.append(self.decoder.logits(self.weights, tile)[: len(part)])
        return torch.cat(logits)

    def _prefill_tiles(self, admission: AdmissionPlan) -> torch.Tensor:
        """Hidden states of all tokens of the contexts, one behind the other; the last tile is filled with its last."""
        ids = np.concatenate(admission.contexts).astype(np.int64)
        rows = np.repeat(np.asarray(admission.rows), admission.lengths)
        positions = np.concatenate([np.arange(length) for length in admission.lengths])
        fill = (0, -len(ids) % TILE)
        ids, rows, positions = (np.pad(column, fill, mode="edge") for column in (ids, rows, positions))
        tiles = (slice(start, start + TILE) for start in range(0, len(ids), TILE))
        return torch.cat([self._hidden_tile(ids[tile], rows[tile], positions[tile]) for tile in tiles])

    def _hidden_tile(self, ids: Index, rows: Index, positions: Index) -> torch.Tensor:
        attention = TileAttention(self._cache, rows, positions, self.weights.dtype, self.config.num_kv_heads)
        return self.decoder.hidden(self.weights, as_tensor(ids), as_tensor(positions), attention)

    @torch.inference_mode()
    def _check_invariance(self) -> None:
        """Raise EngineError where a row's place in a tile changes its result, as a library of matrix products might."""
        ids, rows = np.zeros(TILE, dtype=np.int64), np.zeros(TILE, dtype=np.int64)
        hidden = self._hidden_tile(ids, rows, rows)
        logits = self.decoder.logits(self.weights, hidden)
        if not (torch.equal(logits, logits[:1].expand_as(logits)) or logits.isnan().any()):
            raise EngineError(
                f"{self.options.name}: this machine's matrix products depend on a row's place in its batch, so no run "
                "here repeats to the bit",
                remedy="set rollout.deterministic = false, or use another machine",
            )

    @torch.inference_mode()
    def check_logits(self) -> None:
        """Raise ModelError where finite weights overflow in the forward pass: no prompt could be answered."""
        first = torch.zeros(1, dtype=torch.int64)
        attention = PrefillAttention(self._cache, [0], [1])
        hidden = self.decoder.hidden(self.weights, first, first, attention)
        if not self.decoder.logits(self.weights, hidden).isfinite().all():
            raise ModelError(
                f"{self.options.name}: the logits of the model folder's weights are not finite for token 0",
                remedy="the weights overflow in this dtype: use another engine.dtype, or an earlier checkpoint",
            )

    def _draw(self, logits: torch.Tensor) -> None:
        """Draw and record a token for every row; end the rows that are done."""
        slots = self._slots
        for row in np.flatnonzero(slots.records["is_penalised"]).tolist():
            penalise(logits[row], slots.rows[row].sampling, slots.answer(row), slots.rows[row].end_ids)
        records = slots.records
        numbers = uniforms(records["state"], records["length"])
        drawing = draw_tiles if self.options.is_invariant else draw
        drawn = drawing(logits, records, numbers, tells_kept=self.options.tells_kept)
        stopped, ended = slots.append(drawn, self.version)
        failed: dict[int, EngineError] = {}
        for row in np.flatnonzero(slots.records["has_stops"]).tolist():
            try:
                stopped[row] |= slots.matched_text(row) != ""
            except BaseException as err:  # a library's panic too
                if isinstance(err, KeyboardInterrupt | SystemExit):
                    raise
                failed[row] = self._request_failed(slots.rows[row], err)
        for row in np.flatnonzero(~drawn.is_finite).tolist():
            failed[row] = self._not_finite(slots.rows[row].request_id, int(records["length"][row]) - 1)
        ended |= stopped
        ended[list(failed)] = True
        for row in reversed(np.flatnonzero(ended).tolist()):
            if row in failed:
                self._cache.clear_row(row)  # NaN would linger
                self._forget(slots.remove(row), failed[row])
            else:
                self._end(row, "stop" if stopped[row] else "length")

    # -- endings and news

    def _end(self, row: int, finish: FinishReason) -> None:
        news = self._slots.news(row, finish) or _NOTHING
        self._forget(self._slots.remove(row), news)

    def _not_finite(self, request_id: str, num_tokens: int) -> EngineError:
        return EngineError(
            f"{self.options.name}: request {request_id!r}: the logits of weight version {self.version} are not finite "
            f"after {num_tokens} tokens",
            remedy="the weights hold NaN or overflow: look at the trainer's gradient norm, lower the learning rate",
        )

    def _forget(self, request: Running, news: Delta | EngineError) -> None:
        self._ids.discard(request.request_id)
        self._events.append(RequestEvent(request.owner, news))

    def tell(self) -> None:
        """Hand out all tokens that were not."""
        self._steps_untold = 0
        for row, request in enumerate(self._slots.rows):
            if (news := self._slots.news(row)) is not None:
                self._events.append(RequestEvent(request.owner, news))
