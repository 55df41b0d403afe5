"""What a rollout does when: it waits for the engine, generates, or waits for an environment, a tool, an agent, a judge.

Turns of the model are noted where they come from the engine (`Timeline.watched`), in the rollout actor. What a workflow
waits for is noted by itself, with `Episode.waits_for`; from a worker process the notes come through its pipe.

A sample of a rollout does one thing at a time: what it began last. So does the rollout: it generates or waits for the
engine if any of its samples does, else it waits for what began last.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

import msgspec

from ...core.errors import UserCodeError
from ...core.messages import ActivityKind
from ...core.protocols import Delta, GenerateRequest
from ...core.suggestion import suggest

WaitKind = Literal["environment", "tool", "agent", "judge"]
"""What a workflow may say that it waits for."""
Doing = Literal["engine", "generate", "environment", "tool", "agent", "judge", "workflow", "reward"]
"""engine: it waits for the first token of a turn. workflow: its code, which does not say what it waits for. reward: the
reward function of the run."""
DOINGS: tuple[Doing, ...] = get_args(Doing)
OUTSIDE: frozenset[Doing] = frozenset({"environment", "tool", "agent", "judge", "workflow"})
"""What a rollout does that is neither the engine's nor the reward function's."""
ACTIVITIES: dict[Doing, ActivityKind] = {
    "engine": "wait-capacity", "generate": "compute", "reward": "wait-data", **dict.fromkeys(OUTSIDE, "wait-env"),
}  # fmt: skip
"""For the trace."""
MAX_STRETCHES = 512
"""Of one rollout that are kept; all are counted."""
MAX_OPEN = 64
"""Waits of one rollout at a time."""
MAX_NAME = 80
_RANKS: dict[Doing, int] = {"generate": 2, "engine": 1}
"""What a rollout does, if its samples do several things."""


class WaitNote(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """A wait of a workflow begins or ends."""

    call: int = 0
    """Of the worker process."""
    number: int
    """Of the wait, the same at its end."""
    kind: WaitKind | None = None
    """None: it ends."""
    name: str = ""
    branch: int = 0
    """Number of the sample in its rollout."""
    at_s: float | None = None
    """When, on this host's monotonic clock; None: now."""


_numbers = itertools.count(1)


@contextmanager
def waiting(tell: Callable[[WaitNote], None], kind: WaitKind, name: str, branch: int) -> Generator[None]:
    """Tell the begin and the end of a wait. Raises UserCodeError for a kind that does not exist."""
    if kind not in get_args(WaitKind):
        raise UserCodeError(
            f"workflow: waits_for({kind!r}): there is no such kind of wait",
            remedy=suggest(str(kind), get_args(WaitKind)),
        )
    number = next(_numbers)
    tell(WaitNote(number=number, kind=kind, name=str(name)[:MAX_NAME], branch=branch))
    try:
        yield
    finally:
        tell(WaitNote(number=number))


async def closed(stream: AsyncIterator[Delta]) -> None:
    """Close a stream that can be closed: an engine aborts its request, unless that has ended."""
    close = getattr(stream, "aclose", None)
    if close is not None:
        await close()


@dataclass(slots=True, eq=False)
class RolloutSpan:
    """One thing that a sample did for some time."""

    kind: Doing
    name: str
    branch: int
    turn: int
    """The turn that came, or the last one before it; 0: none yet."""
    began_s: float
    """On the monotonic clock: when it began, or continued after something else."""
    ended_s: float = 0.0

    @property
    def label(self) -> str:
        return f"{self.kind} {self.name}".strip()

    @property
    def is_at_engine(self) -> bool:
        return self.kind in _RANKS


class Timeline:
    """Of one rollout. Used by one loop."""

    def __init__(
        self, now: Callable[[], float], on_change: Callable[[RolloutSpan | None, RolloutSpan | None], None]
    ) -> None:
        """`now`: the monotonic clock. `on_change`: what the rollout did and does; None: nothing."""
        self._now = now
        self._on_change = on_change
        self._open: dict[int, RolloutSpan] = {}
        """By number, the newest last: of each sample the last one is what it does."""
        self._turns: dict[int, int] = {}
        self._numbers = itertools.count(-1, -1)
        self._doing: RolloutSpan | None = None
        self._settled_s = self.began_s = now()
        self._seconds = defaultdict[Doing, float](float)
        self.stretches: list[RolloutSpan] = []
        """Those that are over, in the order of their ends."""

    @property
    def doing(self) -> RolloutSpan | None:
        """What it does now."""
        return self._doing

    @property
    def turn(self) -> int:
        """The newest of any of its samples."""
        return max(self._turns.values(), default=0)

    def seconds(self) -> dict[Doing, float]:
        """By what it did, up to now; nothing of what it never did."""
        now_s = self._now()
        if self._doing is not None:
            self._seconds[self._doing.kind] += now_s - self._settled_s
        self._settled_s = now_s
        return self._seconds

    def note(self, note: WaitNote) -> None:
        """A workflow says that it waits."""
        now_s = self._now()
        at_s = now_s if note.at_s is None else min(note.at_s, now_s)
        if note.kind is None:
            self._end(note.number, at_s)
        elif len(self._open) < MAX_OPEN:
            self._begin(note.number, note.kind, note.name[:MAX_NAME], note.branch, at_s)

    def forget_waits(self) -> None:
        """The workflow is over, whatever it has not said."""
        for number in [number for number in self._open if number > 0]:
            self._end(number, self._now())

    def begin(self, kind: Doing, name: str = "") -> int:
        """Its first sample does that, until `end` of the number that is returned."""
        number = next(self._numbers)
        self._begin(number, kind, name, 0, self._now())
        return number

    def end(self, number: int) -> None:
        self._end(number, self._now())

    @contextmanager
    def during(self, kind: Doing, name: str = "") -> Generator[None]:
        number = self.begin(kind, name)
        try:
            yield
        finally:
            self.end(number)

    async def watched(
        self, generate: Callable[[GenerateRequest], AsyncIterator[Delta]], request: GenerateRequest
    ) -> AsyncIterator[Delta]:
        """The engine's stream, its wait and its generation noted."""
        deltas, branch = generate(request), request.branch
        self._turns[branch] = request.turn
        if (number := self._awaited(branch)) is None:
            number = next(self._numbers)
            self._begin(number, "engine", "", branch, self._now())
        has_begun = False
        try:
            async for delta in deltas:
                if not has_begun:
                    has_begun = True
                    self._begin(number, "generate", "", branch, self._now())
                yield delta
        finally:
            await closed(deltas)
            self._end(number, self._now())

    def _awaited(self, branch: int) -> int | None:
        """The wait for the engine with which that sample began, which is its turn's; None: the turn has its own."""
        for number, span in self._open.items() if len(self._open) == 1 else ():
            if span.kind == "engine" and span.branch == branch:
                span.turn = self._turns[branch]
                return number
        return None

    def _begin(self, number: int, kind: Doing, name: str, branch: int, at_s: float) -> None:
        """In place of what had that number."""
        if (before := self._newest(branch)) is not None:
            at_s = max(at_s, before.began_s)
            self._cut(before, at_s)
        if kind == "engine":
            self._hold_agents(at_s, is_end=False)
        self._open.pop(number, None)
        self._open[number] = RolloutSpan(kind, name, branch, self._turns.get(branch, 0), at_s)
        self._changed()

    def _end(self, number: int, at_s: float) -> None:
        if (span := self._open.get(number)) is None:
            return
        is_newest = self._newest(span.branch) is span
        del self._open[number]
        if is_newest:
            at_s = max(at_s, span.began_s)
            self._cut(span, at_s)
            if (after := self._newest(span.branch)) is not None:  # which continues
                after.began_s, after.turn = at_s, self._turns.get(span.branch, 0)
        if span.is_at_engine:
            self._hold_agents(at_s, is_end=True)
        self._changed()

    def _newest(self, branch: int) -> RolloutSpan | None:
        for span in reversed(self._open.values()):
            if span.branch == branch:
                return span
        return None

    def _hold_agents(self, at_s: float, *, is_end: bool) -> None:
        """What an agent does ends with a turn of any of its samples, and begins behind it."""
        for span in self._open.values():
            if span.kind == "agent":
                if not is_end:
                    self._cut(span, at_s)
                span.began_s, span.turn = max(at_s, span.began_s), self.turn

    def _cut(self, span: RolloutSpan, now_s: float) -> None:
        """What it was doing up to now is one stretch."""
        began_s, span.began_s = span.began_s, max(now_s, span.began_s)
        if now_s > began_s and (len(self.stretches) < MAX_STRETCHES or span.kind == "reward"):
            self.stretches.append(RolloutSpan(span.kind, span.name, span.branch, span.turn, began_s, now_s))

    def _changed(self) -> None:
        before, doing = self._doing, None
        for span in {span.branch: span for span in self._open.values()}.values():
            if doing is None or (_RANKS.get(span.kind, 0), span.began_s) >= (_RANKS.get(doing.kind, 0), doing.began_s):
                doing = span
        if doing is before:
            return
        if before is None or doing is None or (before.kind, before.name) != (doing.kind, doing.name):
            self.seconds()
            self._on_change(before, doing)
        self._doing = doing


def rows(stretches: Sequence[RolloutSpan]) -> list[list[RolloutSpan]]:
    """Of each sample what it did, in order."""
    by_branch: dict[int, list[RolloutSpan]] = {}
    for span in stretches:
        by_branch.setdefault(span.branch, []).append(span)
    return [sorted(by_branch[branch], key=lambda span: span.began_s) for branch in sorted(by_branch)]
