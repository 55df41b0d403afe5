"""Live knobs: how a value that may be changed in a live run is declared, requested, changed and shown.

A knob is declared where it is used (`Tunable`); the actor that uses it is its owner. The coordinator decides a change
of one or several knobs, all or none, and writes it into the audit log. Owners ask for what was decided (`LiveKnobs`)
and use it at their boundary. Samples, metrics, trace and checkpoints carry the epoch of the change.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from .errors import ConfigError
from .record import Record, argument

KnobValue = bool | int | float | str
KnobKind = Literal["float", "int", "bool", "text", "choice"]
Boundary = Literal["now", "request", "step", "weights"]
"""When a decided value is used: at once; for the next work; for the step or weight version of the number chosen."""

PauseVerb = Literal["pause", "step", "resume"]
PROCESS = "process"
MAX_NUMBER = 2.0**63
"""Numbers are below it in size, which keeps out infinities and what no float or 64-bit integer holds."""
NUMBERED: tuple[Boundary, ...] = ("step", "weights")
"""Boundaries that have a number (the version that is trained from); the others are passed all the time."""


class Tunable(Record, frozen=True):
    """Declaration of one knob."""

    name: str
    """Unique in the run, short: "lr", "max_staleness"."""
    kind: KnobKind
    boundary: Boundary
    owner: str
    """Role of the actors that use it: "trainer", "buffer", "rollout", "coordinator", or `PROCESS`: each of these."""
    help: str
    """What it does, in one sentence."""
    key: str = ""
    """Key of the run file that gives its first value, e.g. "optimizer.lr"; empty: it has none."""
    unit: str = ""
    low: float | None = None
    high: float | None = None
    is_low_open: bool = False
    """Whether `low` itself is outside."""
    choices: tuple[str, ...] = ()
    """Kind "choice": the values there are."""
    guard_factor: float = 0.0
    """A value above so many times the run file's needs `force`; 0: no such guard."""
    is_judged: bool = False
    """Whether the owner is asked before a change, for it may refuse, or remark on, a value for what only it knows."""

    def check(self, value: KnobValue, *, first: KnobValue | None = None, force: bool = False) -> KnobValue:
        """`value` in the knob's own type. `first`: the run file's value. Raises ConfigError naming knob and limits."""
        if self.kind == "bool":
            if not isinstance(value, bool):
                raise self._refusal(value, "must be true or false")
            return value
        if self.kind in ("text", "choice"):
            if not isinstance(value, str):
                raise self._refusal(value, "must be text")
            if self.kind == "choice" and value not in self.choices:
                raise self._refusal(value, f"must be one of {', '.join(self.choices)}")
            return value
        return self._check_number(value, first, force=force)

    def range_text(self) -> str:
        """The limits for people: "> 0", "0 to 10", "pace | wait | drop"."""
        if self.choices:
            return " | ".join(self.choices)
        low = "" if self.low is None else f"{'above' if self.is_low_open else 'from'} {_limit_text(self.low)}"
        high = "" if self.high is None else f"{'up to' if low else 'at most'} {_limit_text(self.high)}"
        return " ".join(filter(None, (low, high))) or {"bool": "true | false"}.get(self.kind, "any")

    def _check_number(self, value: KnobValue, first: KnobValue | None, *, force: bool) -> KnobValue:
        if not isinstance(value, bool | str) and not abs(value) < MAX_NUMBER:  # NaN is not below, either
            raise self._refusal(value, "must be finite")
        if isinstance(value, bool | str) or (self.kind == "int" and value != int(value)):
            raise self._refusal(value, f"must be {'a whole number' if self.kind == 'int' else 'a number'}")
        is_below = self.low is not None and (value <= self.low if self.is_low_open else value < self.low)
        if is_below or (self.high is not None and value > self.high):
            raise self._refusal(value, f"must be {self.range_text()}")
        guard = self.guard_factor
        if guard and isinstance(first, int | float) and first > 0 and value > guard * first and not force:
            raise ConfigError(
                f"{self.name} = {value:g} is more than {guard:g} times the run file's {first:g}",
                remedy="say --force if that is meant",
            )
        return int(value) if self.kind == "int" else float(value)

    def _refusal(self, value: KnobValue, why: str) -> ConfigError:
        return ConfigError(f"{self.name} = {value!r}: {why}", remedy=f"{self.name} takes {self.range_text()}")


def _limit_text(limit: float) -> str:
    """Short, but never rounded."""
    short = f"{limit:g}"
    return short if float(short) == limit else str(int(limit) if limit == int(limit) else limit)


class KnobState(Record, frozen=True):
    """A knob and its values at one owner."""

    tunable: Tunable
    value: KnobValue
    """In force now."""
    first: KnobValue
    """What the run file said."""
    pending: KnobValue | None = None
    """Decided, but its boundary is still to come."""


class KnobSheet(Record, frozen=True):
    """All knobs of one owner."""

    owner: str
    knobs: tuple[KnobState, ...]
    epoch: int = 0
    """Of the newest change that is in force here; 0: none yet."""
    past_epoch: int = 0
    """Newest epoch that work kept by this owner carries, also from the run that this one continues."""
    passed: dict[Boundary, int] = {}
    """Number of the newest boundary that this owner passed, or asked to pass."""


class KnobVerdict(Record, frozen=True):
    """What an owner says of values that it is to get."""

    refusal: str = ""
    """Empty: it can use them."""
    remark: str = ""
    """What the operator should know although they are accepted."""


class Operator(Record, frozen=True):
    """Who asked for something, for the audit log."""

    user: str = ""
    uid: int = -1
    pid: int = 0
    host: str = ""
    via: str = ""
    """"http", "dashboard", "auto" (an expiry, a resumed run)."""


MAX_KNOB_VALUES = 64
"""Of one request."""
Reason = Annotated[str, argument("your own words, for the audit log", "WHY", short="-m", max_length=1000)]
KnobName = Annotated[str, Meta(min_length=1, max_length=128)]
KnobValues = Annotated[
    dict[
        KnobName,
        bool | Annotated[int, Meta(ge=1 - 2**63, le=2**63 - 1)] | float | Annotated[str, Meta(max_length=4096)],
    ],
    Meta(max_length=MAX_KNOB_VALUES),
]


class ChangeRequest(Record, frozen=True, kw_only=True):
    """Change knobs, all or none: the arguments of `set`, from which its flags are made."""

    values: Annotated[
        KnobValues, argument("such as lr=1e-4; values as in the run file", "NAME=VALUE", is_word=True, min_length=1)
    ]
    who: Operator = Operator()
    """Filled in by the control server."""
    reason: Reason = ""
    expect: Annotated[
        KnobValues, argument("only if that knob has that value now; may be repeated", "NAME=VALUE", flag="--if")
    ] = {}
    for_steps: Annotated[int, argument("go back by itself after so many steps", flag="", ge=0, le=10_000_000)] = 0
    for_s: Annotated[float, argument("go back by itself after so many seconds", flag="", ge=0, le=30 * 86400.0)] = 0.0
    not_before: Annotated[
        int, argument("not before boundary number N (training step, version)", "N", flag="--at", ge=0, le=10_000_000)
    ] = 0
    dry_run: Annotated[bool, argument("ask the owners, change nothing")] = False
    force: Annotated[bool, argument("also beyond a guard, such as ten times the file's lr")] = False


class KnobMove(Record, frozen=True):
    """One knob of a change, as it was and as it is."""

    name: str
    owner: str
    old: KnobValue
    new: KnobValue
    boundary: Boundary


class ChangeReply(Record, frozen=True):
    """What became of a request."""

    epoch: int
    """Of the change; 0: nothing was changed."""
    at: int
    """Number of the boundary at which it is in force."""
    moves: tuple[KnobMove, ...]
    refused: str = ""
    """Why nothing was changed: the owner and its reason."""
    warnings: tuple[str, ...] = ()


class KnobTable(Record, frozen=True):
    """Every knob of the run."""

    sheets: tuple[KnobSheet, ...]
    epoch: int
    """Of the newest change that was decided."""
    reverts: dict[str, str] = {}
    """Knob -> when it goes back by itself, in words."""
    silent: tuple[str, ...] = ()
    """Owners that did not answer."""
    origins: dict[str, str] = {}
    """Knob -> where its value comes from, in words; of knobs that were named."""


class LiveKnob(Record, frozen=True):
    """A value that was decided in the live run."""

    name: str
    value: KnobValue | None
    """None: the owner's first value again; never in a checkpoint."""
    first: KnobValue
    """What the run file said. When it says something else by the time the run is resumed, that is the newer word."""
    epoch: int
    at: int
    """Number at which it comes into force, for numbered boundaries. 0 for the others."""
    for_steps: int = 0
    for_s: float = 0.0
    """In a checkpoint: the time that is left of a change for a time."""


class LiveKnobs(Record, frozen=True):
    """What was decided: all of it for a checkpoint, or what concerns one owner since it last asked."""

    epoch: int = 0
    """Of the newest change that was decided; a resumed run counts on from it."""
    knobs: tuple[LiveKnob, ...] = ()


class Decision(Record, frozen=True):
    """The part of an audit record by which the coordinator knows, after a restart, what it decided."""

    launch: str
    """Names the launcher; decisions of another one are void."""
    values: dict[str, KnobValue | None] = {}
    """None: this change takes the value of change `undoes` back."""
    first: dict[str, KnobValue] = {}
    """What the run file says."""
    numbered: tuple[str, ...] = ()
    """Knobs whose boundary has numbers."""
    undoes: int = 0
    """Epoch."""
    for_steps: int = 0
    for_s: float = 0.0


class AuditRecord(Record, frozen=True):
    """One line of `audit.jsonl`: something that a person or a rule changed or tried to change."""

    number: int
    """From 1, without gaps."""
    wall_s: float
    verb: str
    """Such as set, undo, pause, scale, kill. With `who.via` "auto": expire, restore (values of a checkpoint), rewind
    (the trainer went back to an older version, where later values are in force at once)."""
    who: Operator
    arguments: dict[str, object]
    """What was asked for."""
    result: str
    """"done", "refused", "failed"."""
    detail: str = ""
    reason: str = ""
    """The operator's own words."""
    epoch: int = 0
    at: int = 0
    version: int = 0
    """Weight version of the run then."""
    moves: tuple[KnobMove, ...] = ()
    decision: Decision | None = None
    previous: str = ""
    """Digest of the line before; empty for the first."""
    digest: str = ""
    """BLAKE2b-256 over this record with `digest` empty, as hexadecimal."""
