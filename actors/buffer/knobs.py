"""The live knobs of the buffer: how prompts are drawn, admitted and judged from a moment on.

All are used at once ("request": the next draw; "now": the next finished group). Values that only make sense together
(bound, policy and window; group size and filter) are judged together and come into force together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from ...algos.staleness import Admission, make_policy
from ...core.activity import TelemetryBuffer
from ...core.errors import ConfigError
from ...core.knobs import KnobSheet, KnobValue, KnobVerdict, Tunable
from ...core.messages import Record, SamplingParams
from ..knobs.owner import PAUSE_AT, Knob, KnobOwner, knob_maker
from ..ledger.file import Terms
from ..ledger.ledger import Ledger
from .cursor import NO_WINDOW, Window, mix_text, parse_mix

NO_IDS = "none"
MAX_ID = (1 << 31) - 1
MAX_DIGITS = len(str(MAX_ID))
_OF_ADMISSION = ("max_staleness", "on_stale")


_OF_SAMPLING = ("temperature", "top_p", "top_k", "max_new_tokens")


class BufferValues(Record, frozen=True):
    """Every knob of the buffer, by the knob's name."""

    max_staleness: int
    on_stale: str
    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    num_samples: int
    group_filter: str
    stop_token_ids: str = NO_IDS
    mix: str = ""
    """As `parse_mix` reads it; empty: there is one source."""
    difficulty_low: float = 0.0
    difficulty_high: float = 0.0

    @property
    def difficulty(self) -> Window:
        return Window(self.difficulty_low, self.difficulty_high)

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(part.partition(":")[0] for part in self.mix.split(",")) if self.mix else ()

    @classmethod
    def first(
        cls,
        admission: Admission,
        sampling: SamplingParams,
        num_samples: int,
        group_filter: str,
        weights: Mapping[str, float],
        window: Window,
    ) -> BufferValues:
        """What the run file says. `weights`: of the sources, where there are several."""
        return cls(
            max_staleness=admission.max_staleness,
            on_stale=admission.policy,
            **{name: getattr(sampling, name) for name in _OF_SAMPLING},
            num_samples=num_samples,
            group_filter=group_filter,
            stop_token_ids=",".join(map(str, sampling.stop_token_ids)) or NO_IDS,
            mix=mix_text(weights),
            difficulty_low=window.low,
            difficulty_high=window.high,
        )


def stop_ids(text: str) -> tuple[int, ...]:
    """Of "13,198", or "13," where 13 is a number; none of "none". Raises ValueError for what is no such list."""
    if text == NO_IDS:
        return ()
    numbers = [number.strip() for number in text.removesuffix(",").split(",")]
    if not all(number.isascii() and number.isdecimal() for number in numbers):
        raise ValueError(f"{text!r} is no list of token ids")
    ids = tuple(int(number) for number in numbers if len(number) <= MAX_DIGITS)
    if len(ids) != len(numbers) or max(ids) > MAX_ID:
        raise ValueError(f"token ids are at most {MAX_ID}")
    return ids


OWNER = "buffer"
MAX_TOKENS = 1 << 20
MAX_GROUP_SIZE = 1024
MAX_STOPS = 64
COLDEST = 1e-3
"""Below it engines draw greedily, whatever the temperature says."""


@dataclass(frozen=True, slots=True)
class BufferLimits:
    """What the run allows, beyond what is possible at all."""

    max_new_tokens: int = MAX_TOKENS
    quarantine_after: int = 3
    """Failures of one prompt, after which it is not drawn again; 0: never."""
    max_deaths: int = 3
    """Of rollout actors or engines, that one group may bring about."""
    difficulty: Window = NO_WINDOW
    has_rewards: bool = True
    """Whether prompts can be judged by them, so that a window means something."""
    pass_reward: float = 1.0
    """From which on an answer is right."""
    samples_per_step: int = 8
    """Groups that people can read later."""
    vocab_size: int = MAX_ID + 1
    """Engines refuse requests with token ids from here on."""


def _put_together(value: KnobValue) -> None:
    """The values are put into force all at once, by `BufferKnobs.use`."""


class BufferKnobs(KnobOwner):
    """The knobs of a buffer. A restarted buffer asks the coordinator for them."""

    def __init__(
        self,
        name: str,
        ledger: Ledger,
        admission: Admission,
        first: BufferValues,
        sampling: SamplingParams,
        *,
        filters: Sequence[str],
        limits: BufferLimits,
        telemetry: TelemetryBuffer | None = None,
    ) -> None:
        """`first`: what the run file says; `sampling`: what of it no knob changes; `filters`: names of the group
        filters."""
        self.ledger = ledger
        self.admission = admission
        self.values = first
        self.terms_epoch = 0
        """Of the newest change of `values`; 0: none yet."""
        self.use: Callable[[Mapping[str, KnobValue], int], object] = self.change
        """Puts other values into force; the buffer's own does more than `change`."""
        self.pause_at = -1
        """From that step on no work is handed out and no batch formed; -1: there is none."""
        self.on_pause: Callable[[], object] = lambda: None
        """Called when `pause_at` has another value."""
        self._sampling = sampling
        self._vocab_size = limits.vocab_size
        self._sources = first.sources
        knobs = (
            Knob(tunable, read=lambda name=tunable.name: getattr(self.values, name), use=_put_together)
            for tunable in buffer_tunables(filters, limits, self._sources)
        )
        super().__init__(name, knobs, telemetry)
        self.add((Knob(PAUSE_AT, read=lambda: self.pause_at, use=self._pause),))
        self._past_epoch = ledger.newest_epoch

    @property
    def terms(self) -> Terms:
        """What a group is dispatched under now."""
        values = {name: getattr(self.values, name) for name in _OF_SAMPLING}
        stops = stop_ids(self.values.stop_token_ids)
        sampling = msgspec.structs.replace(self._sampling, stop_token_ids=stops, **values)
        return Terms(knobs=self.terms_epoch, sampling=sampling)

    def change(self, values: Mapping[str, KnobValue], epoch: int) -> tuple[int, ...]:
        """Other values from now on; returns what is too old for a new bound. Raises ConfigError, and changes nothing,
        for an unknown policy."""
        new = msgspec.structs.replace(self.values, **values)
        overdue: tuple[int, ...] = ()
        if any(getattr(new, name) != getattr(self.values, name) for name in _OF_ADMISSION):
            overdue = self.admission.retune(max_staleness=new.max_staleness, policy=new.on_stale)
        self.values = new
        self.terms_epoch = max(self.terms_epoch, epoch)
        return overdue

    def _pause(self, value: KnobValue) -> None:
        self.pause_at = int(value)
        self.on_pause()

    def serves(self, step: int) -> bool:
        """Whether that step may begin, and work for it be handed out."""
        return self.pause_at < 0 or step < self.pause_at

    def sheet(self) -> KnobSheet:
        return msgspec.structs.replace(super().sheet(), past_epoch=self._past_epoch)

    def judge(self, values: Mapping[str, KnobValue], at: int) -> KnobVerdict:
        new = msgspec.structs.replace(self.values, **self._mine(values))
        refusal = super().judge(values, at).refusal or self._contradiction(new)
        return KnobVerdict(refusal=refusal, remark=self._consequence(new) if not refusal else "")

    def _put(self, values: Mapping[str, KnobValue], epochs: Mapping[str, int]) -> None:
        super()._put(values, epochs)
        if mine := self._mine(values):
            self.use(mine, max(epochs[name] for name in mine))

    def _mine(self, values: Mapping[str, KnobValue]) -> dict[str, KnobValue]:
        return {name: value for name, value in values.items() if name in BufferValues.__struct_fields__}

    def _contradiction(self, new: BufferValues) -> str:
        try:
            make_policy(new.on_stale, new.max_staleness, self.admission.batch_size)
            if self._sources:
                parse_mix(new.mix, self._sources)
        except ConfigError as error:
            return f"{error.message} -- {error.remedy}"
        except ValueError as error:
            return f"mix: {error}"
        return self._of_stops(new)

    def _of_stops(self, new: BufferValues) -> str:
        try:
            ids = stop_ids(new.stop_token_ids)
        except ValueError as error:
            return f"stop_token_ids: {error}: write 13,198 or {NO_IDS}"
        if len(ids) > MAX_STOPS:
            return f"stop_token_ids: {len(ids)} of them, but at most {MAX_STOPS} are allowed"
        if ids and max(ids) >= self._vocab_size:
            return f"stop_token_ids: {max(ids)} is no token of the model, which has {self._vocab_size}"
        return ""

    def _consequence(self, new: BufferValues) -> str:
        num_old = self.admission.num_beyond(new.max_staleness)
        if not num_old or new.max_staleness >= self.values.max_staleness:
            return ""
        return (
            f"{num_old} groups under way or ready are older than max_staleness = {new.max_staleness} allows: they are "
            "dropped and their prompts drawn again"
        )


_FROM_NOW_ON = "Groups dispatched from now on; those under way keep theirs, also when another engine continues them."
_knob = knob_maker(OWNER, "request")


# fmt: off
def buffer_tunables(filters: Sequence[str], limits: BufferLimits, sources: Sequence[str] = ()) -> tuple[Tunable, ...]:
    """What the buffer declares. `filters`: names of the group filters; `sources`: theirs, where there are several."""
    return (
        *_ADMISSION,
        _knob("rollout.temperature", f"The trainer scores each sample at its own. {_FROM_NOW_ON}",
              low=COLDEST),
        *_SAMPLING,
        _knob("rollout.max_new_tokens",
              'Evaluation keeps the run file\'s value, and so does the divisor of algo.reduction = "constant". '
              f"{_FROM_NOW_ON}", high=limits.max_new_tokens, guard_factor=8, unit="tokens"),
        _knob("rollout.num_samples",
              f"A step still takes algo.batch_size groups, for some time of both sizes. {_FROM_NOW_ON}",
              high=MAX_GROUP_SIZE, guard_factor=8, unit="samples"),
        _knob("algo.group_filter",
              "Judges groups that are finished from now on, whenever they were dispatched; groups that were kept stay.",
              kind="choice", boundary="now", choices=tuple(filters)),
        *((_MIX,) if sources else ()),
        *(_WINDOW if limits.has_rewards else ()),
    )


_ADMISSION = (
    _knob("async.max_staleness", "Lowered, what is too old already is dropped and its prompt drawn again.",
          unit="steps", is_judged=True),
    _knob("async.policy", name="on_stale", is_judged=True),
)
_SAMPLING = (
    _knob("rollout.top_p", _FROM_NOW_ON),
    _knob("rollout.top_k", _FROM_NOW_ON, low=-1, high=1 << 20, unit="tokens"),
    _knob("stop_token_ids",  # without a key: there it is a list
          "Token ids that end a turn besides the model's own: 13,198 (13, for one alone) or none; in the run file "
          f"rollout.stop_token_ids. {_FROM_NOW_ON}", kind="text", is_judged=True),
)
_MIX = _knob("mix",  # without a key: there each source has its own
    "Shares of the sources among the prompts that are drawn from now on: math:0.7,code:0.3, every source named, 0 = "
    "none for now; in the run file data.sources.NAME.weight.", kind="text", is_judged=True)
_WINDOW = (
    _knob("data.difficulty_low", "Set both where one does not fit the other."), _knob("data.difficulty_high"),
)
# fmt: on
