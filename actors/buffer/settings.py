"""Settings of a buffer that change during the run: its knobs, paused, stopping.

The ledger keeps whether it is paused or stopping. A restarted buffer asks the coordinator for the knobs.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ...algos.staleness import Admission, Overdue
from ...core.errors import LedgerError
from ...core.knobs import KnobValue
from ...core.messages import Record, SamplingParams
from ..ledger.ledger import Ledger
from .difficulty import Window
from .sources import mix_text

_PAUSED, _STOPPING = "paused", "stopping"
NO_IDS = "none"
MAX_ID = (1 << 31) - 1
MAX_DIGITS = len(str(MAX_ID))
_ADMISSION = ("max_staleness", "on_stale", "window")


class BufferValues(Record, frozen=True):
    """Every knob of the buffer, by the knob's name."""

    max_staleness: int
    on_stale: str
    window: int
    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    num_samples: int
    group_filter: str
    stop_token_ids: str = NO_IDS
    """As `stop_ids` reads it."""
    mix: str = ""
    """As `parse_mix` reads it; empty: there is one source."""
    difficulty_low: float = 0.0
    difficulty_high: float = 0.0
    difficulty_skips: int = 3

    @property
    def difficulty(self) -> Window:
        return Window(low=self.difficulty_low, high=self.difficulty_high, skips=self.difficulty_skips)

    @classmethod
    def first(cls, admission: Admission, sampling: SamplingParams, num_samples: int, group_filter: str) -> BufferValues:
        return cls(
            max_staleness=admission.max_staleness,
            on_stale=admission.policy,
            window=admission.window,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_new_tokens=sampling.max_new_tokens,
            num_samples=num_samples,
            group_filter=group_filter,
            stop_token_ids=",".join(map(str, sampling.stop_token_ids)) or NO_IDS,
        )

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(part.partition(":")[0] for part in self.mix.split(",")) if self.mix else ()

    def with_draws(self, weights: Mapping[str, float], window: Window) -> BufferValues:
        """The same, drawing by these. `weights`: of the sources, where there are several."""
        return msgspec.structs.replace(
            self,
            mix=mix_text(weights),
            difficulty_low=window.low,
            difficulty_high=window.high,
            difficulty_skips=window.skips,
        )


def stop_ids(text: str) -> tuple[int, ...]:
    """Token ids of "13,198", or "13," on a command line, where 13 is a number; none of "none". Raises ValueError for
    what is no list of numbers from 0 on."""
    if text == NO_IDS:
        return ()
    words = [word.strip() for word in text.removesuffix(",").split(",")]
    if not all(word.isascii() and word.isdecimal() for word in words):
        raise ValueError(f"{text!r} is no list of token ids")
    ids = tuple(int(word) for word in words if len(word) <= MAX_DIGITS)
    if len(ids) != len(words) or max(ids) > MAX_ID:
        raise ValueError(f"token ids are at most {MAX_ID}")
    return ids


class Terms(Record, frozen=True):
    """What a group is dispatched under first: a sample that continues on another engine keeps its temperature."""

    knobs: int
    """Epoch of the live knobs."""
    sampling: SamplingParams


class LiveSettings:
    """The switches of one buffer."""

    def __init__(self, ledger: Ledger, admission: Admission, first: BufferValues, sampling: SamplingParams) -> None:
        """`first`: what the run file says; `sampling`: what of it no knob changes."""
        self._ledger = ledger
        self._admission = admission
        self._sampling = sampling
        self.values = first
        self.epoch = 0
        """Of the newest change of a knob; 0: none yet."""
        self.is_stopping = bool(ledger.recall(_STOPPING))
        paused = ledger.recall(_PAUSED)
        self.is_paused = bool(paused)
        """No work is handed out and no batch formed, but for steps below `until_step`."""
        self.until_step = int(paused) if paused.isdecimal() else None

    def change(self, values: Mapping[str, KnobValue], epoch: int) -> tuple[Overdue, ...]:
        """Other values from now on; returns what is too old for a new bound. Raises ConfigError, and changes nothing,
        for a bound, policy and window that do not go together."""
        new = msgspec.structs.replace(self.values, **values)
        overdue: tuple[Overdue, ...] = ()
        if any(getattr(new, name) != getattr(self.values, name) for name in _ADMISSION):
            overdue = self._admission.retune(max_staleness=new.max_staleness, policy=new.on_stale, window=new.window)
        self.values = new
        self.epoch = max(self.epoch, epoch)
        return overdue

    def newest_epoch_kept(self) -> int:
        """Of the groups in the ledger, of earlier runs too. Raises LedgerError when it cannot be read."""
        try:
            kept = [msgspec.json.decode(text, type=Terms).knobs for text in self._ledger.all_terms()]
        except msgspec.MsgspecError as error:
            raise LedgerError(f"the terms of groups in the ledger are damaged: {error}") from error
        return max(self.epoch, *kept, 0)

    @property
    def terms(self) -> Terms:
        values = self.values
        sampling = msgspec.structs.replace(
            self._sampling,
            temperature=values.temperature,
            top_p=values.top_p,
            top_k=values.top_k,
            max_new_tokens=values.max_new_tokens,
            stop_token_ids=stop_ids(values.stop_token_ids),
        )
        return Terms(knobs=self.epoch, sampling=sampling)

    def pause(self, is_paused: bool, until_step: int | None = None) -> None:
        """Stop or resume handing out work; steps below `until_step` are served all the same."""
        until_step = until_step if is_paused else None
        text = "yes" if until_step is None else str(until_step)
        self._ledger.remember(_PAUSED, text if is_paused else "")
        self.is_paused, self.until_step = is_paused, until_step

    def serves(self, step: int) -> bool:
        return not self.is_paused or (self.until_step is not None and step < self.until_step)

    def stop(self, is_stopping: bool = True) -> None:
        """No new prompts; False after a rewind."""
        if is_stopping != self.is_stopping:
            self._ledger.remember(_STOPPING, "yes" if is_stopping else "")
        self.is_stopping = is_stopping
