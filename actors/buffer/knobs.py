"""The live knobs of the buffer: how prompts are drawn, admitted and judged from a moment on.

All are used at once ("request": the next draw; "now": the next finished group). Values that only make sense together
(bound, policy and window; group size and filter) are judged together and come into force together. The ledger keeps
them before the first group is dispatched under them: a buffer that starts again never goes back to older values.

"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from ...algos.staleness import POLICIES, Admission, make_policy
from ...core.activity import TelemetryBuffer
from ...core.clock import Clock
from ...core.config.data import MAX_SKIPS
from ...core.errors import BadRequest, ConfigError
from ...core.knobs import KnobChange, KnobCommit, KnobSheet, KnobValue, KnobVote, Tunable
from ..knobs.owner import Knob, KnobOwner
from .difficulty import NO_WINDOW, Window
from .settings import MAX_ID, NO_IDS, BufferValues, LiveSettings, stop_ids
from .sources import parse_mix

OWNER = "buffer"
MAX_TOKENS = 1 << 20
MAX_STOPS = 64
COLDEST = 1e-3
"""Below it engines draw greedily, whatever the temperature says."""


@dataclass(frozen=True, slots=True)
class BufferLimits:
    """What the run allows, beyond what is possible at all."""

    min_samples: int = 1
    """2 where the algorithm compares the samples of a group."""
    max_samples: int = 1024
    max_new_tokens: int = MAX_TOKENS
    quarantine_after: int = 3
    """Failures of one prompt, after which it is not drawn again; 0: never."""
    max_deaths: int = 3
    """Of rollout actors or engines, that one group may bring about."""
    difficulty: Window = NO_WINDOW
    """Of prompts that are drawn, as the run file says."""
    has_rewards: bool = True
    """Whether prompts can be judged by them, so that a window means something."""
    pass_reward: float = 1.0
    """From which on an answer is right."""
    samples_per_step: int = 8
    """Groups that people can read later."""
    vocab_size: int = MAX_ID + 1
    """Engines refuse requests with token ids from here on."""
    only_temperature: float | None = None
    """Of which there are reference log-probs, where servers give them; None: of all."""


class BufferKnobs(KnobOwner):
    """The owner of the buffer's knobs. See the module's head."""

    def __init__(
        self,
        name: str,
        settings: LiveSettings,
        admission: Admission,
        *,
        filters: Sequence[str],
        limits: BufferLimits,
        retune: Callable[[dict[str, KnobValue], int], None],
        last_boundary: Callable[[], int],
        clock: Clock,
        telemetry: TelemetryBuffer | None = None,
    ) -> None:
        """`filters`: names of the group filters that were loaded. `retune(values, epoch)`: keep these values, and use
        them from now on."""
        self._settings = settings
        self._admission = admission
        self._retune = retune
        self._vocab_size = limits.vocab_size
        self._only_temperature = limits.only_temperature
        self._sources = settings.first.sources
        self._staged: dict[str, KnobValue] = {}
        knobs = [self._knob(tunable) for tunable in buffer_tunables(filters, limits, self._sources)]
        super().__init__(name, knobs, last_boundary=last_boundary, clock=clock, telemetry=telemetry)
        self.took_up(settings.epochs)
        self._past_epoch = settings.newest_epoch_kept()

    def _knob(self, tunable: Tunable) -> Knob:
        name = tunable.name

        def use(value: KnobValue) -> None:
            self._staged[name] = value

        return Knob(
            tunable=tunable,
            read=lambda: getattr(self._settings.values, name),
            use=use,
            judge=self._as_served if name == "temperature" else _JUDGES.get(name),
            first=getattr(self._settings.first, name),
        )

    def _as_served(self, value: KnobValue) -> str:
        only = self._only_temperature
        if only is not None and value != only:
            return f"temperature = {value:g}: the servers of algo.ref_urls give log-probs at temperature {only:g} only"
        return _warm_enough(value)

    def sheet(self) -> KnobSheet:
        """As any owner's, and what groups from before this process carry."""
        return msgspec.structs.replace(super().sheet(), past_epoch=self._past_epoch)

    def prepare(self, change: KnobChange) -> KnobVote:
        """As any owner does, and what only holds for all values together."""
        vote = super().prepare(change)
        if not vote.accepted:
            return vote
        new = self._together(change.values)
        if complaint := self._contradiction(new):
            self.abort(change.epoch)
            return KnobVote(owner=self.owner, accepted=False, reason=complaint)
        return msgspec.structs.replace(vote, reason=self._consequence(new))

    def commit(self, commit: KnobCommit) -> None:
        """All values at once. Raises BadRequest, and changes nothing, where they contradict each other."""
        values = {name: self._fitting(name, value) for name, value in commit.values.items()}
        fresh = {name: value for name, value in values.items() if commit.epoch > self._used.get(name, 0)}
        if complaint := self._contradiction(self._together(fresh)):  # others are overtaken, and judged no more
            raise BadRequest(f"{self.owner}: {complaint}", remedy="commit only what an owner has prepared")
        self._staged.clear()
        super().commit(commit)
        mine = {name: value for name, value in self._staged.items() if name in commit.values}
        if mine:
            self._retune(mine, commit.epoch)

    def _together(self, values: dict[str, KnobValue]) -> BufferValues:
        """How the buffer's values would be then; names and types were judged before, or will be."""
        mine = {name: value for name, value in values.items() if name in BufferValues.__struct_fields__}
        return msgspec.structs.replace(self._settings.values, **mine)

    def _contradiction(self, new: BufferValues) -> str:
        try:
            make_policy(new.on_stale, new.max_staleness, self._admission.batch_size, new.window)
        except ConfigError as error:
            return f"{error.message} -- {error.remedy}"
        if new.num_samples < 2 and new.group_filter == "zero_variance":
            return 'group_filter = "zero_variance" would leave out every group of one sample: set group_filter too'
        try:
            ids = stop_ids(new.stop_token_ids)
        except ValueError as error:
            return f"stop_token_ids: {error}: write 13,198 or {NO_IDS}"
        if len(ids) > MAX_STOPS:
            return f"stop_token_ids: {len(ids)} of them, but at most {MAX_STOPS} are allowed"
        if ids and max(ids) >= self._vocab_size:
            return f"stop_token_ids: {max(ids)} is no token of the model, which has {self._vocab_size}"
        return self._of_draws(new)

    def _of_draws(self, new: BufferValues) -> str:
        if new.difficulty_low > new.difficulty_high:
            low, high = f"{new.difficulty_low:g}", f"{new.difficulty_high:g}"
            return f"difficulty_low = {low} is above difficulty_high = {high}: set both, or make them equal (no window)"
        try:
            if self._sources:
                parse_mix(new.mix, self._sources)
        except ValueError as error:
            return f"mix: {error}"
        return ""

    def _consequence(self, new: BufferValues) -> str:
        """What the operator should know although it is allowed."""
        num_old = self._admission.num_beyond(new.max_staleness)
        if not num_old or new.max_staleness >= self._settings.values.max_staleness:
            return ""
        return (
            f"{num_old} groups under way or ready are older than max_staleness = {new.max_staleness} allows: they are "
            "dropped and their prompts drawn again"
        )


def _warm_enough(value: KnobValue) -> str:
    if float(value) < COLDEST:
        return f"temperature = {value:g}: engines draw greedily below {COLDEST:g}, and equal samples teach nothing"
    return ""


def _top_k_means_something(value: KnobValue) -> str:
    return "" if value else "top_k = 0: must be -1 (no limit) or at least 1"


_JUDGES: dict[str, Callable[[KnobValue], str]] = {"top_k": _top_k_means_something}

_FROM_NOW_ON = "Groups dispatched from now on; those under way keep theirs, also when another engine continues them."


def buffer_tunables(filters: Sequence[str], limits: BufferLimits, sources: Sequence[str] = ()) -> tuple[Tunable, ...]:
    """What the buffer declares. `filters`: names of the group filters that there are; `sources`: where there are
    several, theirs."""
    return (
        *_admission_tunables(),
        *_sampling_tunables(),
        *_size_tunables(limits),
        _filter_tunable(filters),
        *_draw_tunables(is_mixed=bool(sources), has_rewards=limits.has_rewards),
    )


def _admission_tunables() -> tuple[Tunable, ...]:
    return (
        Tunable(
            name="max_staleness",
            kind="int",
            boundary="request",
            owner=OWNER,
            key="async.max_staleness",
            low=0,
            high=1000,
            unit="steps",
            help="eta: steps that the weights behind any token may be old when it is trained on; 0 = on-policy. "
            "Lowered, what is too old already is dropped and its prompt drawn again.",
        ),
        Tunable(
            name="on_stale",
            kind="choice",
            boundary="request",
            owner=OWNER,
            key="async.policy",
            choices=POLICIES,
            help="How the staleness bound is kept: pace (work is handed out so that nothing grows too old), wait (the "
            "trainer waits for the oldest), drop (too old groups are thrown away; favours short answers).",
        ),
        Tunable(
            name="window",
            kind="int",
            boundary="request",
            owner=OWNER,
            key="async.window",
            low=0,
            high=1 << 20,
            unit="groups",
            help="Groups among which a step may choose under the policy pace; 0 = by the rule of docs/walk-prompt.md. "
            "Has to fit max_staleness: set both where it does not.",
        ),
    )


def _sampling_tunables() -> tuple[Tunable, ...]:
    return (
        Tunable(
            name="temperature",
            kind="float",
            boundary="request",
            owner=OWNER,
            key="rollout.temperature",
            low=0.0,
            is_low_open=True,
            high=100.0,
            help=f"Sampling temperature; the trainer scores each sample at its own. {_FROM_NOW_ON}",
        ),
        Tunable(
            name="top_p",
            kind="float",
            boundary="request",
            owner=OWNER,
            key="rollout.top_p",
            low=0.0,
            is_low_open=True,
            high=1.0,
            help=f"Only the likeliest tokens that together have this probability are drawn. {_FROM_NOW_ON}",
        ),
        Tunable(
            name="top_k",
            kind="int",
            boundary="request",
            owner=OWNER,
            key="rollout.top_k",
            low=-1,
            high=1 << 20,
            unit="tokens",
            help=f"Only so many of the likeliest tokens are drawn; -1 = no limit. {_FROM_NOW_ON}",
        ),
        Tunable(  # without a key: there it is a list
            name="stop_token_ids",
            kind="text",
            boundary="request",
            owner=OWNER,
            help="Token ids that end a turn besides the model's own: 13,198 (13, for one alone) or none; in the run "
            f"file rollout.stop_token_ids. {_FROM_NOW_ON}",
        ),
    )


def _size_tunables(limits: BufferLimits) -> tuple[Tunable, ...]:
    return (
        Tunable(
            name="max_new_tokens",
            kind="int",
            boundary="request",
            owner=OWNER,
            key="rollout.max_new_tokens",
            low=1,
            high=limits.max_new_tokens,
            guard_factor=8,
            unit="tokens",
            help="Longest model turn. Evaluation keeps the run file's value, and so does the divisor of "
            f'algo.reduction = "constant". {_FROM_NOW_ON}',
        ),
        Tunable(
            name="num_samples",
            kind="int",
            boundary="request",
            owner=OWNER,
            key="rollout.num_samples",
            low=limits.min_samples,
            high=limits.max_samples,
            guard_factor=8,
            unit="samples",
            help="Samples of a group. A step still takes algo.batch_size groups, for some time of both sizes. "
            f"{_FROM_NOW_ON}",
        ),
    )


def _filter_tunable(filters: Sequence[str]) -> Tunable:
    return Tunable(
        name="group_filter",
        kind="choice",
        boundary="now",
        owner=OWNER,
        key="algo.group_filter",
        choices=tuple(filters),
        help="Which finished groups are left out: a built-in, or the run file's own function. Judges groups that are "
        "finished from now on, whenever they were dispatched; groups that were kept stay.",
    )


def _draw_tunables(*, is_mixed: bool, has_rewards: bool) -> tuple[Tunable, ...]:
    """`is_mixed`: there are several sources. `has_rewards`: prompts can be judged by them."""
    return (*((_mix_tunable(),) if is_mixed else ()), *(_window_tunables() if has_rewards else ()))


def _mix_tunable() -> Tunable:
    return Tunable(  # without a key: there each source has its own
        name="mix",
        kind="text",
        boundary="request",
        owner=OWNER,
        help="Shares of the sources among the prompts that are drawn from now on: math:0.7,code:0.3, every source "
        "named, 0 = none for now; in the run file data.sources.NAME.weight.",
    )


def _window_tunables() -> tuple[Tunable, ...]:
    return (
        Tunable(
            name="difficulty_low",
            kind="float",
            boundary="request",
            owner=OWNER,
            key="data.difficulty_low",
            help="A prompt whose newest finished group has a mean reward below this is passed over when it comes up "
            "again; equal to difficulty_high = no window. Set both where one does not fit the other.",
        ),
        Tunable(
            name="difficulty_high",
            kind="float",
            boundary="request",
            owner=OWNER,
            key="data.difficulty_high",
            help="The same for mean rewards above this. Both ends are inside the window.",
        ),
        Tunable(
            name="difficulty_skips",
            kind="int",
            boundary="request",
            owner=OWNER,
            key="data.difficulty_skips",
            low=0,
            high=MAX_SKIPS,
            unit="passes",
            help="Passes in a row that a prompt outside the window is passed over at most, after which it is tried "
            "again; 0 = never again.",
        ),
    )
