"""RunView: one look at a running run, made from the answers of its control socket. Pure.

The answers come from the verbs `status`, `ps`, `get`, `history` and `why`, as JSON types. An answer that is missing or
malformed becomes an entry of `troubles`; it never raises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import msgspec

from ...core.knobs import AuditRecord, KnobTable
from ...core.messages import BufferStats, RunStatus
from .advice import Facts, what_to_try
from .bottleneck import Filtered, engines_look_full, judge
from .live_state import LiveState, name_order

T = TypeVar("T")

ASKED: tuple[str, ...] = ("status", "ps", "get", "history", "why")
"""Verbs that a view is made of."""


@dataclass(frozen=True, slots=True)
class VerbAnswer:
    """What a verb said: a result, or why there is none."""

    result: Any = None
    error: str = ""
    """Message and remedy."""


@dataclass(frozen=True, slots=True)
class ActorFacts:
    """One actor of the run."""

    name: str
    role: str
    node: int = 0
    host: str = ""
    pid: int = 0
    state: str = ""
    """As the launcher sees its process: up, starting, hung, backing-off, ..."""
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class RunView:
    """One look at the run."""

    live: LiveState
    run_dir: str = ""
    actors: tuple[ActorFacts, ...] = ()
    """By node, then role, then number."""
    knobs: KnobTable | None = None
    history: tuple[AuditRecord, ...] = ()
    why: str = ""
    """What holds the run back, in one sentence."""
    remedy: str = ""
    troubles: tuple[str, ...] = ()
    """What could not be learnt, and why."""
    has_ended: bool = False
    """The run is over, or its launcher does not answer any more."""
    reader_only: bool = False
    """Only the read-only socket is within reach."""
    silent_s: float = 0.0
    """Seconds since the last answer."""


def run_view_of(answers: Mapping[str, VerbAnswer], now_wall_s: float) -> RunView:
    """Put the answers together; verbs that were not asked are missing."""
    troubles = [f"{verb}: {answer.error}" for verb, answer in answers.items() if answer.error]
    read = _Reader({verb: answer.result for verb, answer in answers.items() if not answer.error}, troubles)
    status = read.mapping("status")
    live = LiveState(
        now_wall_s=_number(status.get("now_wall_s"), now_wall_s),
        started_wall_s=_number(status.get("started_wall_s"), now_wall_s),
        status=read.part(status, "status", RunStatus),
        buffer=read.part(status, "buffer", BufferStats),
        snapshot=read.part(status, "snapshot", dict[str, dict[str, float]]) or {},
    )
    sentence, remedy = _verdict(read.mapping("why"), live)
    return RunView(
        live=live,
        run_dir=str(status.get("run_dir", "")),
        actors=_actors(read, live),
        knobs=read.whole("get", KnobTable),
        history=tuple(_records(read.results.get("history"))),
        why=sentence,
        remedy=remedy,
        troubles=tuple(troubles),
        has_ended=live.phase in ("finished", "failed"),
    )


class _Reader:
    """Reads answers into records; a malformed one becomes a trouble."""

    def __init__(self, results: dict[str, Any], troubles: list[str]) -> None:
        self.results = results
        self._troubles = troubles

    def mapping(self, verb: str) -> dict[str, Any]:
        found = self.results.get(verb)
        return cast("dict[str, Any]", found) if isinstance(found, dict) else {}

    def part(self, answer: Mapping[str, Any], key: str, kind: type[T]) -> T | None:
        return self._converted(f"status.{key}", answer.get(key), kind)

    def whole(self, verb: str, kind: type[T]) -> T | None:
        return self._converted(verb, self.results.get(verb), kind)

    def _converted(self, place: str, raw: object, kind: type[T]) -> T | None:
        if raw is None:
            return None
        try:
            return msgspec.convert(raw, kind)
        except msgspec.ValidationError as error:
            self._troubles.append(f"{place}: an answer of another version: {error}")
            return None


def _number(value: object, otherwise: float) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else otherwise


def _verdict(answer: Mapping[str, Any], live: LiveState) -> tuple[str, str]:
    """The run's own sentence; from the time shares when it has none."""
    sentence = answer.get("sentence")
    if isinstance(sentence, str) and sentence:
        return sentence, str(answer.get("to_try") or answer.get("remedy") or "")
    full, filtered = engines_look_full(live.snapshot), Filtered.of(live.snapshot)
    own = judge(live.shares(), engines_are_full=full, filtered=filtered)
    num_rollouts = sum(name.startswith("rollout/") for name in live.shares())
    # The largest possible number is not known: the present one is assumed.
    return own.sentence, what_to_try(own, Facts(num_rollouts=num_rollouts, most_rollouts=num_rollouts))


def _records(raw: object) -> list[AuditRecord]:
    rows: Any = cast("dict[str, Any]", raw).get("records", []) if isinstance(raw, dict) else raw
    found: list[AuditRecord] = []
    for row in _list(rows):
        try:
            found.append(msgspec.convert(row, AuditRecord))
        except msgspec.ValidationError:
            continue
    return found


def _actors(read: _Reader, live: LiveState) -> tuple[ActorFacts, ...]:
    """What `ps` lists; without it, the actors that the monitor knows."""
    raw: Any = read.results.get("ps")
    rows: Any = cast("dict[str, Any]", raw).get("actors") if isinstance(raw, dict) else raw
    listed = [_actor(cast("dict[str, Any]", row)) for row in _list(rows) if isinstance(row, dict)]
    if not listed:
        listed = [ActorFacts(name, name.partition("/")[0]) for name in live.snapshot.get("age_s", {})]
    return tuple(sorted((actor for actor in listed if actor.name), key=lambda a: (a.node, name_order(a.name))))


def _actor(row: Mapping[str, Any]) -> ActorFacts:
    name = str(row.get("name", ""))
    return ActorFacts(
        name=name,
        role=str(row.get("role") or name.partition("/")[0]),
        node=_whole(row.get("node")),
        host=str(row.get("host") or ""),
        pid=_whole(row.get("pid")),
        state=str(row.get("state") or ""),
        attempt=_whole(row.get("attempt")),
    )


def _list(raw: object) -> Sequence[object]:
    return cast("Sequence[object]", raw) if isinstance(raw, list | tuple) else ()


def _whole(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
