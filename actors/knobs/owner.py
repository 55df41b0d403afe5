"""The owner's half of live knobs: what was decided comes into force at boundaries.

An owner hears that there is something new (`knobs_decided`) and asks for all that it does not have (`pull`). Boundaries
"now" and "request" are at once; before a numbered one an owner asks with that number, and gets every value meant for
it. Answers may come late, twice or out of turn: epochs order them. For the loop of one actor, not thread-safe.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from ...core.activity import TelemetryBuffer
from ...core.actor import ActorContext
from ...core.config import RunConfig
from ...core.config.section import walk
from ...core.errors import ConfigError
from ...core.knobs import (
    NUMBERED,
    PROCESS,
    Boundary,
    KnobKind,
    KnobSheet,
    KnobState,
    KnobValue,
    KnobVerdict,
    LiveKnob,
    LiveKnobs,
    Tunable,
)
from ...core.retry import until_answered
from ...core.timeouts import TIMEOUTS
from ..contracts import CoordinatorContract, KnobsContract


@dataclass(frozen=True, slots=True)
class Knob:
    """A knob and the two ways into the actor that uses it."""

    tunable: Tunable
    read: Callable[[], KnobValue]
    """The value in force. Called once when the knob is added: that is what the run file said."""
    use: Callable[[KnobValue], None]
    """Put a value into force, on the actor's loop. It was judged before: an owner that cannot use it has failed."""


_FIELDS = {".".join(path): info for path, info in walk(RunConfig)}
_KINDS: Mapping[Any, KnobKind] = {float: "float", int: "int", bool: "bool", str: "text"}


def knob_maker(owner: str, boundary: Boundary) -> Callable[..., Tunable]:
    """A function that makes the declarations of one owner: of a key of the run file, whose type, bounds and words hold
    for the knob too, or of the name of a knob that has none; a further sentence; and what differs."""

    def make(key: str, note: str = "", **more: Any) -> Tunable:
        fields: dict[str, Any] = _fields_of(key) if key in _FIELDS else {"name": key}
        text = " ".join(filter(None, (fields.pop("help", ""), note)))
        fields = {"owner": owner, "boundary": boundary, "help": text} | fields | more
        return Tunable(**fields)

    return make


def section_knobs(tunables: Iterable[Tunable], options: Any, on_change: Callable[[], None]) -> Iterator[Knob]:
    """Knobs of keys of the run file. `options`: what is used now, with sections of the file as attributes of their
    names. `on_change`: called when a value is another one."""

    def knob(tunable: Tunable) -> Knob:
        section, _, key = tunable.key.partition(".")

        def use(value: KnobValue) -> None:
            setattr(options, section, getattr(options, section).model_copy(update={key: value}))
            on_change()

        return Knob(tunable, lambda: getattr(getattr(options, section), key), use)

    return map(knob, tunables)


def _fields_of(key: str) -> dict[str, Any]:
    info = _FIELDS[key]
    choices = get_args(info.annotation) if get_origin(info.annotation) is Literal else ()
    bounds = {name: getattr(mark, name) for mark in info.metadata for name in ("gt", "ge", "le") if hasattr(mark, name)}
    return {
        "key": key, "name": key.rpartition(".")[2], "kind": "choice" if choices else _KINDS[info.annotation],
        "low": bounds.get("gt", bounds.get("ge")), "is_low_open": "gt" in bounds, "high": bounds.get("le"),
        "choices": choices, "help": " ".join((info.description or "").replace("`", "").split()),
    }  # fmt: skip


LOGGER = "myxa"
"""Parent of every logger of the house; other packages' are left alone."""
_knob = knob_maker(PROCESS, "now")
LOG_LEVEL = Knob(
    _knob("log_level", "The least important messages that the processes of these actors log.", kind="choice",
          choices=("DEBUG", "INFO", "WARNING", "ERROR")),
    read=lambda: logging.getLevelName(logging.getLogger(LOGGER).getEffectiveLevel()),
    use=lambda value: logging.getLogger(LOGGER).setLevel(str(value)),
)  # fmt: skip
"""Of every owner; actors that share a process share it."""
_knob = knob_maker("buffer", "now")
# fmt: off
PAUSE_AT = _knob("pause_at", "Steps from this one on are not begun, and no work for them is handed out: 0 "
                 "pauses now, -1 never. `pause`, `step` and `resume` set it. It ends with the run.",
                 kind="int", unit="steps", low=-1)
# fmt: on
"""What pauses a run; its first value is -1."""


class KnobOwner:
    """The knobs of one actor and what is in force of them. Sans-IO."""

    def __init__(self, owner: str, knobs: Iterable[Knob], telemetry: TelemetryBuffer | None = None) -> None:
        """`telemetry`: gets an event "knob-in-force" for every value that is put into force."""
        self.owner = owner
        self.epoch = 0
        """Newest change that is in force here with all its values; to be stamped into samples, metrics, checkpoints."""
        self.heard = 0
        """Newest change that this owner knows of."""
        self._telemetry = telemetry
        self._knobs: dict[str, Knob] = {}
        self._first: dict[str, KnobValue] = {}
        self._used: dict[str, int] = {}
        """Knob -> epoch of its value in force."""
        self._waiting: dict[str, list[LiveKnob]] = {}
        """Knob -> values whose number is still to come, by number."""
        self._passed: dict[Boundary, int] = {}
        self.add(knobs)

    def add(self, knobs: Iterable[Knob]) -> None:
        """More knobs of the same actor. Raises ConfigError for a name that is taken."""
        for knob in knobs:
            name = knob.tunable.name
            if name in self._knobs:
                raise ConfigError(f"{self.owner} declares the knob {name!r} twice", remedy="give one another name")
            self._knobs[name] = knob
            self._first[name] = knob.read()

    def sheet(self) -> KnobSheet:
        states = tuple(
            KnobState(tunable=knob.tunable, value=knob.read(), first=self._first[name], pending=self._pending(name))
            for name, knob in self._knobs.items()
        )
        return KnobSheet(owner=self.owner, knobs=states, epoch=self.epoch, passed=dict(self._passed))

    def judge(self, values: Mapping[str, KnobValue], at: int) -> KnobVerdict:
        """Within ranges and the run file: what only this owner knows. `at`: number of a numbered boundary."""
        return KnobVerdict()

    def take(self, news: LiveKnobs) -> None:
        """Use what was decided, now or once its number comes. What is older than known here changes nothing."""
        if news.epoch < self.heard:
            return
        by_name: dict[str, list[LiveKnob]] = {}
        for value in sorted(news.knobs, key=lambda value: value.at):
            if value.name in self._knobs:
                by_name.setdefault(value.name, []).append(value)
        numbered = {name for name in by_name if self._knobs[name].tunable.boundary in NUMBERED}
        self._use([values[-1] for name, values in by_name.items() if name not in numbered])
        self._waiting |= {name: by_name[name] for name in numbered}
        self._stamp(value.epoch for name in by_name.keys() - numbered for value in by_name[name])
        self.heard = news.epoch

    def reach(self, boundary: Boundary, number: int) -> None:
        """The actor is about to pass that number: what is decided from now on is for a later one."""
        self._passed[boundary] = max(number, self._passed.get(boundary, number))

    def use_due(self, boundary: Boundary, number: int) -> dict[str, KnobValue]:
        """Put into force what waits for that number; returns what changed by it."""
        due: list[LiveKnob] = []
        for name, values in list(self._waiting.items()):
            if self._knobs[name].tunable.boundary == boundary and values[0].at <= number:
                due.append([value for value in values if value.at <= number][-1])
                self._waiting[name] = [value for value in values if value.at > number]
        self._waiting = {name: values for name, values in self._waiting.items() if values}
        used = self._use(due)
        self._stamp(value.epoch for value in due)
        return used

    def _pending(self, name: str) -> KnobValue | None:
        waiting = self._waiting.get(name)
        return self._value(waiting[-1]) if waiting else None

    def _value(self, knob: LiveKnob) -> KnobValue:
        return self._first[knob.name] if knob.value is None else knob.value

    def _use(self, due: Sequence[LiveKnob]) -> dict[str, KnobValue]:
        fresh = {knob.name: knob for knob in due if self._is_new(knob)}
        if not fresh:
            return {}
        old = {name: self._knobs[name].read() for name in fresh}
        values = {name: self._value(knob) for name, knob in fresh.items()}
        self._put(values, {name: knob.epoch for name, knob in fresh.items()})
        for name, knob in fresh.items():
            self._used[name] = knob.epoch
            if self._telemetry is not None:
                self._telemetry.event(
                    "knob-in-force",
                    f"{self.owner}: {name} = {values[name]} (was {old[name]}), change {knob.epoch}",
                    name=name, owner=self.owner, old=old[name], new=values[name], epoch=knob.epoch, at=knob.at,
                )  # fmt: skip
        return values

    def _is_new(self, knob: LiveKnob) -> bool:
        epoch = self._used.get(knob.name, 0)
        return knob.epoch > epoch or (knob.epoch == epoch and self._value(knob) != self._knobs[knob.name].read())

    def _put(self, values: Mapping[str, KnobValue], epochs: Mapping[str, int]) -> None:
        for name, value in values.items():
            self._knobs[name].use(value)

    def _stamp(self, epochs: Iterable[int]) -> None:
        waiting = {value.epoch for values in self._waiting.values() for value in values}
        self.epoch = max(self.epoch, *(epoch for epoch in epochs if epoch not in waiting), 0)


class OwnsKnobs(KnobsContract):
    """The handlers of roles with a `KnobOwner`. A base before the role's contract; set `knob_owner` at start."""

    knob_owner: KnobOwner

    async def knobs(self) -> KnobSheet:
        return self.knob_owner.sheet()

    async def judge_knobs(self, values: dict[str, KnobValue], at: int) -> KnobVerdict:
        await pull(self.ctx, self.knob_owner)  # values are judged together with those that wait for their boundary
        return self.knob_owner.judge(values, at)

    async def knobs_decided(self, epoch: int) -> None:
        if epoch > self.knob_owner.heard:
            await pull(self.ctx, self.knob_owner)


async def pull(
    ctx: ActorContext,
    owner: KnobOwner,
    boundary: Boundary = "now",
    number: int = -1,
    *,
    give_up_s: float = TIMEOUTS.wire.give_up_s,
) -> dict[str, KnobValue]:
    """Ask the coordinator for what was decided, and use it. `number`: of the boundary that is about to be passed; waits
    while a change is undecided. Returns what came into force there. Raises CallError without an answer for long."""
    if number >= 0:
        owner.reach(boundary, number)
    coordinator = ctx.ref(CoordinatorContract, "coordinator")
    news = await until_answered(
        lambda: coordinator.knobs_in_force(owner.heard, number),
        who="coordinator",
        clock=ctx.clock,
        log=ctx.log,
        give_up_s=give_up_s,
    )
    owner.take(news)
    return owner.use_due(boundary, number)


JOIN_GIVE_UP_S = 60.0


async def catch_up(ctx: ActorContext, owner: KnobOwner, *, waits: bool = False) -> None:
    """Bring `owner` to what was decided so far, before the first message. Without a coordinator nothing was decided
    yet: one that comes up tells all owners to ask. `waits`: for it, where the run has begun. Raises CallError."""
    if waits or "coordinator" in ctx.peers("coordinator"):
        await pull(ctx, owner, give_up_s=JOIN_GIVE_UP_S)
