"""Continuous batching, one step at a time: a forward pass decodes the running rows and prefills those that join.

Synchronous and single-threaded: the owner calls `step` and takes the events. There are no threads, no asyncio and no
clock here.

    submit -> waiting -> row -> ... -> end delta
                ^- retract -|
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from types import MappingProxyType

import numpy as np
import torch

from ....core.errors import EngineError, ModelError, RequestRefused
from ....core.messages import SamplingParams
from ....core.protocols import Delta, GenerateRequest, PauseMode
from ....core.samples import I32, FinishReason
from ....core.sampling import Decode
from ...models.model_config import ModelConfig
from .attention import Attention, DecodeAttention, MixedAttention, PrefillAttention, SlotCache, TileAttention
from .model import Decoder, score
from .request import Running, Scoring, check_request, check_scoring, make_running
from .sampler import TILE, draw, draw_tiles, penalise, stream_state
from .slots import AdmissionPlan, SlotTable, plan_admission, take_waiting
from .tensors import Allocate, Index, as_tensor
from .weights import DecoderWeights

PREFILL_TOKENS = 4096
"""Prompt tokens per step at most (one prompt at least), so that a flood of prompts does not starve running rows."""


@dataclass(frozen=True, slots=True)
class RequestEvent:
    """A message for the owner of a request: new tokens, or the error that ended it."""

    owner: object
    news: Delta | EngineError


@dataclass(frozen=True, slots=True)
class CoreOptions:
    """Sizes and habits."""

    num_slots: int
    context_length: int
    eos_token_ids: frozenset[int]
    seed: int = 0
    version: int = 0
    stream_interval: int = 16
    """Steps between two deltas of a request; its last delta comes at once. 0: one delta, at the end."""
    is_invariant: bool = False
    """Logits of a sequence are the same to the bit whatever shares its batch, and whether a token was prefilled or
    decoded."""
    name: str = "embedded engine"
    decode: Decode | None = None
    """Text of token ids, special tokens kept; None: stop strings are refused."""


_log = logging.getLogger("myxa.embedded")


def _everything(request: Running | Scoring) -> bool:
    return True


def _raise_if_meant_for_all(err: BaseException) -> None:
    """A library's panic is no Exception, and ends one request like any other failure."""
    if isinstance(err, KeyboardInterrupt | SystemExit):
        raise err


def _no_text(ids: Sequence[int]) -> str:
    return ""


_EMPTY_I32: I32 = np.zeros(0, dtype=np.int32)
_NOTHING = Delta(output_ids=_EMPTY_I32, logprobs=np.zeros(0, dtype=np.float32), versions=_EMPTY_I32, finish="abort")
"""The end of a request that had no untold token."""


class EngineCore:
    """The engine without its thread."""

    def __init__(
        self, config: ModelConfig, weights: DecoderWeights, options: CoreOptions, allocate: Allocate | None = None
    ) -> None:
        """`allocate`: of the cache."""
        self._config = config
        self._weights = weights
        self._options = options
        self._decoder = Decoder(config, options.context_length)
        self._cache = SlotCache(config, options.num_slots, options.context_length, weights.dtype, allocate)
        self._slots = SlotTable(self._cache, options.num_slots, options.context_length, config.vocab_size)
        self._waiting: deque[Running] = deque()
        self._scoring: deque[Scoring] = deque()
        self._ids: set[str] = set()
        self._events: list[RequestEvent] = []
        self._random = Random(options.seed)
        self._steps_untold = 0
        self.version = options.version
        self.is_paused = False
        if options.is_invariant:
            self._check_invariance()

    # -- state

    @property
    def num_running(self) -> int:
        """Rows that decode or are paused."""
        return len(self._slots)

    @property
    def num_waiting(self) -> int:
        """Requests without a row."""
        return len(self._waiting) + len(self._scoring)

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return not self.is_paused and bool(self._slots.rows or self._waiting or self._scoring)

    def take_events(self) -> list[RequestEvent]:
        """What happened since the last call, in order."""
        events, self._events = self._events, []
        return events

    # -- requests

    def submit(self, request: GenerateRequest, owner: object) -> None:
        """Queue a request; its events carry `owner`. One that cannot be served gets RequestRefused as only event."""
        try:
            self._check(request)
            seed = request.sampling.seed
            state = stream_state(self._random.getrandbits(64) if seed is None else seed)
            decode = self._options.decode or _no_text
            running = make_running(request, owner, self._options.eos_token_ids, state, decode)
        except Exception as err:  # noqa: BLE001 -- whatever is wrong with it, its owner waits for an answer
            self._events.append(RequestEvent(owner, self._refusal(request.request_id, err)))
            return
        self._ids.add(request.request_id)
        self._waiting.append(running)

    def _refusal(self, request_id: str, err: Exception) -> EngineError:
        if isinstance(err, EngineError):
            return err
        refused = RequestRefused(
            f"{self._options.name}: request {str(request_id)[:80]!r} cannot be read: {type(err).__name__}: {err}",
            remedy="send the types that the protocol names",
        )
        refused.__cause__ = err
        return refused

    def _check(self, request: GenerateRequest) -> None:
        check_request(
            request,
            vocab_size=self._config.vocab_size,
            context_length=self._options.context_length,
            place=self._options.name,
        )
        if request.sampling.stop and self._options.decode is None:
            raise RequestRefused(
                f"{self._options.name}: request {request.request_id!r} has stop strings, and there is no tokenizer",
                remedy="use stop_token_ids",
            )
        self._check_is_new(request.request_id)

    def submit_scoring(self, scoring: Scoring) -> None:
        """Queue tokens to be scored: one delta brings them with their log-probs, as if they had been drawn now."""
        try:
            check_scoring(
                scoring,
                vocab_size=self._config.vocab_size,
                context_length=self._options.context_length,
                place=self._options.name,
            )
            self._check_is_new(scoring.request_id)
        except Exception as err:  # noqa: BLE001 -- as above
            self._events.append(RequestEvent(scoring.owner, self._refusal(scoring.request_id, err)))
            return
        self._ids.add(scoring.request_id)
        self._scoring.append(scoring)

    def _check_is_new(self, request_id: str) -> None:
        if request_id in self._ids:
            raise RequestRefused(
                f"{self._options.name}: request {request_id!r} is running already",
                remedy="give every request its own id, or abort the first",
            )

    def abort(self, is_meant: Callable[[Running | Scoring], bool] = _everything) -> None:
        """End the requests that are meant (all); their last delta says "abort" and holds what was not sent yet."""
        for row in reversed(range(len(self._slots))):
            if is_meant(self._slots.rows[row]):
                self._end(row, "abort")
        waiting, self._waiting = self._waiting, deque()
        for request in waiting:
            if is_meant(request):
                self._forget(request, _NOTHING)
            else:
                self._waiting.append(request)
        scoring, self._scoring = self._scoring, deque()
        for one in scoring:
            if is_meant(one):
                self._forget(one, _NOTHING)
            else:
                self._scoring.append(one)

    def pause(self, mode: PauseMode) -> None:
        """Generate nothing until `resume`; what becomes of running requests is in the table below."""
        self.is_paused = True
        _WHEN_PAUSED[mode](self)

    def resume(self) -> None:
        """Continue after a pause."""
        self.is_paused = False

    def retract(self) -> None:
        self._waiting.extendleft(self._retracted())

    def _retracted(self) -> list[Running]:
        """All running requests, the last first; they have no row any more."""
        self.tell()
        return [self._slots.retract(row) for row in reversed(range(len(self._slots)))]

    def relabel(self, version: int) -> None:
        """Stamp the next tokens with another version, weights unchanged."""
        self.version = version

    @property
    def weights(self) -> DecoderWeights:
        """Those that serve now."""
        return self._weights

    def swap(self, weights: DecoderWeights, version: int, mode: PauseMode) -> DecoderWeights:
        """Serve other weights from the next token on; returns the old ones. `mode` is as in `pause`."""
        was_paused = self.is_paused
        self.pause(mode)
        self.is_paused = was_paused
        self.tell()
        old, self._weights = self._weights, weights
        self.version = version
        return old

    # -- steps

    @torch.inference_mode()
    def step(self) -> int:
        """One token for every row, rows of requests that join in this step included, and one sequence scored. Returns
        how many tokens were drawn. Where it fails, the requests that make it fail end with EngineError; raises what
        nothing can be computed with any more."""
        if self.is_paused:
            return 0
        if self._scoring:
            self._score(self._scoring.popleft())
        new = take_waiting(self._waiting, self._slots.num_free, PREFILL_TOKENS)
        if not (new or self._slots.rows):
            return 0
        marks = self._slots.marks()
        try:
            return self._advance(new)
        except BaseException as err:  # noqa: BLE001 -- found out below whose it is
            _raise_if_meant_for_all(err)
            self._slots.go_back(marks)
            self._part(new, err)
            return 0

    def _advance(self, new: Sequence[Running]) -> int:
        admission = plan_admission(new, len(self._slots))
        logits = self._forward(admission)
        for source, target, length in admission.copies:
            self._cache.copy_row(source, target, length)
        self._slots.add(new)
        num_drawn = len(self._slots)
        self._draw(logits)
        self._steps_untold += 1
        if self._steps_untold == self._options.stream_interval:
            self.tell()
        return num_drawn

    def _part(self, new: Sequence[Running], err: BaseException) -> None:
        """After a step that failed: each request takes a step alone, and those that fail again end. Raises `err` if the
        model cannot compute a token that the engine made up either."""
        asked = self._retracted()[::-1]
        asked += [one for one in new if all(one is not other for other in asked)]
        sound: list[Running] = []
        for one in asked:
            try:
                self._advance([one])
            except BaseException as again:  # noqa: BLE001 -- this request's
                _raise_if_meant_for_all(again)
                self._slots.clear()
                self._forget(one, self._step_failed(one, again))
            else:
                sound += self._retracted()
        self._waiting.extendleft(reversed(sound))
        if len(sound) < len(asked) and not self._can_step():
            raise err

    def _can_step(self) -> bool:
        """Whether a request of the engine's own, beside which there is none, gets a token."""
        num_events = len(self._events)
        request = GenerateRequest(request_id="\0", input_ids=np.zeros(1, np.int32), sampling=SamplingParams())
        try:
            self._advance([make_running(request, None, frozenset(), 0, _no_text)])
        except Exception:  # noqa: BLE001 -- the caller reports the error that led here
            return False
        finally:
            self._slots.clear()
            del self._events[num_events:]
        return True

    def _step_failed(self, request: Running | Scoring, err: BaseException) -> EngineError:
        _log.error("%s: request %r failed", self._options.name, request.request_id, exc_info=err)
        error = EngineError(
            f"{self._options.name}: request {request.request_id!r} failed in a step: {type(err).__name__}: {err}",
            remedy="other requests are served; the engine's log has the place",
        )
        error.__cause__ = err
        return error

    def _forward(self, admission: AdmissionPlan) -> torch.Tensor:
        """Logits of the next token, float32: of the running rows, then of the requests that join."""
        if self._options.is_invariant:
            return self._forward_tiles(admission)
        ids, positions = self._slots.inputs()
        count = len(ids)
        attentions: list[Attention] = []
        wanted = None
        if count:
            attentions.append(DecodeAttention(self._cache, positions, self._weights.dtype, self._config.num_kv_heads))
        if admission.requests:
            prefill = PrefillAttention(self._cache, admission.rows, admission.lengths)
            attentions.append(prefill)
            ids = np.concatenate([ids, *admission.contexts]).astype(np.int64)
            positions = np.concatenate([positions, prefill.positions])
            wanted = as_tensor(np.concatenate([np.arange(count), count + admission.lasts]))
        attention = attentions[0] if len(attentions) == 1 else MixedAttention(*attentions, num_first=count)
        return self._decoder.forward(self._weights, as_tensor(ids), as_tensor(positions), attention, wanted)

    def _forward_tiles(self, admission: AdmissionPlan) -> torch.Tensor:
        """The same, tile by tile: a running row shares its tile with its neighbours, or with slots that are free."""
        ids, positions = self._slots.inputs()
        count = len(ids)
        found: list[torch.Tensor] = []
        for start in range(0, count, TILE):
            slots = np.minimum(np.arange(start, start + TILE), self._slots.num_slots - 1)
            taken = slots < count
            slots_ids, slots_at = np.zeros(TILE, dtype=np.int64), np.zeros(TILE, dtype=np.int64)
            slots_ids[taken], slots_at[taken] = ids[slots[taken]], positions[slots[taken]]
            hidden = self._hidden_tile(slots_ids, slots, slots_at)
            found.append(self._decoder.logits(self._weights, hidden)[: count - start])
        if admission.requests:
            hidden = self._prefill_tiles(admission)[as_tensor(admission.lasts)]
            for start in range(0, len(hidden), TILE):
                part = hidden[start : start + TILE]
                tile = torch.zeros(TILE, hidden.shape[1], dtype=hidden.dtype)
                tile[: len(part)] = part
                found.append(self._decoder.logits(self._weights, tile)[: len(part)])
        return torch.cat(found)

    def _prefill_tiles(self, admission: AdmissionPlan) -> torch.Tensor:
        """Hidden states of all tokens of the contexts, one behind the other; the last tile is filled with its last."""
        ids = np.concatenate(admission.contexts).astype(np.int64)
        rows = np.repeat(np.asarray(admission.rows), admission.lengths)
        positions = np.concatenate([np.arange(length) for length in admission.lengths])
        fill = (0, -len(ids) % TILE)
        ids, rows, positions = (np.pad(each, fill, mode="edge") for each in (ids, rows, positions))
        tiles = (slice(start, start + TILE) for start in range(0, len(ids), TILE))
        return torch.cat([self._hidden_tile(ids[tile], rows[tile], positions[tile]) for tile in tiles])

    def _hidden_tile(self, ids: Index, rows: Index, positions: Index) -> torch.Tensor:
        attention = TileAttention(self._cache, rows, positions, self._weights.dtype, self._config.num_kv_heads)
        return self._decoder.hidden(self._weights, as_tensor(ids), as_tensor(positions), attention)

    @torch.inference_mode()
    def _check_invariance(self) -> None:
        """Raise EngineError where a row's place in a tile changes its result, as a library of matrix products might."""
        ids, rows = np.zeros(TILE, dtype=np.int64), np.zeros(TILE, dtype=np.int64)
        hidden = self._hidden_tile(ids, rows, rows)
        logits = self._decoder.logits(self._weights, hidden)
        if not (torch.equal(logits, logits[:1].expand_as(logits)) or logits.isnan().any()):
            raise EngineError(
                f"{self._options.name}: this machine's matrix products depend on a row's place in its batch, so no run "
                "here repeats to the bit",
                remedy="set rollout.deterministic = false, or use another machine",
            )

    @torch.inference_mode()
    def check_logits(self) -> None:
        """Raise ModelError where finite weights overflow in the forward pass: no prompt could be answered."""
        if not np.isfinite(score(self._decoder, self._weights, np.zeros(2, dtype=np.int32), 1)).all():
            raise ModelError(
                f"{self._options.name}: the logits of the model folder's weights are not finite for token 0",
                remedy="the weights overflow in this dtype: use another engine.dtype, or an earlier checkpoint",
            )

    def _score(self, scoring: Scoring) -> None:
        try:
            logprobs = score(self._decoder, self._weights, scoring.ids, scoring.first)
        except Exception as err:  # noqa: BLE001 -- it is this sequence's
            self._forget(scoring, self._step_failed(scoring, err))
            return
        news: Delta | EngineError = Delta(
            output_ids=scoring.ids[scoring.first :],
            logprobs=logprobs,
            versions=np.full(len(logprobs), self.version, dtype=np.int32),
            finish="length",
        )
        if not np.isfinite(logprobs).all():
            news = self._not_finite(scoring.request_id, len(scoring.ids))
        self._forget(scoring, news)

    def _draw(self, logits: torch.Tensor) -> None:
        """Draw and record a token for every row; end the rows that are done."""
        penalise(logits, self._slots.penalised())
        drawn = (draw_tiles if self._options.is_invariant else draw)(logits, self._slots.sampling())
        stopped, ended = self._slots.append(drawn.ids, drawn.logprobs, self.version)
        ended |= ~drawn.is_finite
        if not ended.any():
            return
        for row in reversed(np.flatnonzero(ended).tolist()):
            if drawn.is_finite[row]:
                self._end(row, "stop" if stopped[row] else "length")
            else:
                self._fail(row)

    # -- endings and news

    def _end(self, row: int, finish: FinishReason) -> None:
        news = self._slots.news(row, finish)
        self._forget(self._slots.remove(row), news)

    def _fail(self, row: int) -> None:
        """End a row whose logits are NaN or infinite, and wipe what it left in the cache."""
        request = self._slots.rows[row]
        error = self._not_finite(request.request_id, int(self._slots.lengths[row]) - 1)
        self._cache.clear_row(row)
        self._forget(self._slots.remove(row), error)

    def _not_finite(self, request_id: str, num_tokens: int) -> EngineError:
        return EngineError(
            f"{self._options.name}: request {request_id!r}: the logits of weight version {self.version} are not finite "
            f"after {num_tokens} tokens",
            remedy="the weights hold NaN or overflow: look at the trainer's gradient norm, lower the learning rate",
        )

    def _forget(self, request: Running | Scoring, news: Delta | EngineError) -> None:
        self._ids.discard(request.request_id)
        self._events.append(RequestEvent(request.owner, news))

    def tell(self) -> None:
        """Hand out all tokens that were not."""
        self._steps_untold = 0
        for row, request in enumerate(self._slots.rows):
            if self._slots.has_news(row):
                self._events.append(RequestEvent(request.owner, self._slots.news(row)))


_WHEN_PAUSED: Mapping[PauseMode, Callable[[EngineCore], None]] = MappingProxyType(
    {
        "abort": EngineCore.abort,
        "retract": EngineCore.retract,
        "in_place": EngineCore.tell,
    }
)
"""abort: all requests end; retract: rows wait again and are prefilled again; in_place: rows keep their cache."""
