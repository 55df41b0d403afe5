"""Which prompt comes next: those whose tokens grew too old, then the sources by their shares, in the order of draws.

All of it is derived from the ledger. A prompt that is passed over (quarantined, outside the difficulty window) is drawn
and given up in the same moment, so that every draw is in the ledger. The window judges a prompt by the mean reward of
its newest finished group; one that is not known, or was passed over in `SKIPS` passes, is drawn.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from ...core.config.data import MAX_WEIGHT, MIN_WEIGHT
from ...core.errors import DataError, LedgerError
from ...core.files import Tell
from ...core.protocols import PromptData
from ...core.samples import Prompt
from ...core.suggestion import suggest
from ...core.timeouts import TIMEOUTS
from ..ledger.file import OUT_OF_WINDOW, QUARANTINED, Row, State
from ..ledger.ledger import Ledger, Stretch


class Sources:
    """Prompts by the rows of the ledger. Raises what the sources raise (DataError)."""

    def __init__(self, source: PromptData) -> None:
        self._by_name = source.by_name
        self.weights: Mapping[str, float] = source.weights if len(source.by_name) > 1 else {}
        """The run file's; empty: there is nothing to choose."""

    @property
    def names(self) -> tuple[str, ...]:
        """In the order of names; "" alone: there is one source, without a name."""
        return tuple(self._by_name)

    def has(self, name: str, draw: int) -> bool:
        return name in self._by_name and self._by_name[name].row_of(draw) is not None

    def place(self, name: str, draw: int) -> tuple[int, int]:
        """(pass, row of the pass) of a draw that the source has."""
        source = self._by_name[name]
        row = source.row_of(draw)
        assert row is not None, f"draw {draw} of {name or 'the data'}"
        return draw // len(source), row

    def prompt(self, row: Row) -> Prompt:
        """What a group that was drawn answers. Raises LedgerError if its source does not have it any more."""
        source = self._by_name.get(row.source)
        prompt = None if source is None else source.prompt(row.draw_of_source)
        if prompt is None:
            raise LedgerError(
                f"group {row.group_id} was draw {row.draw_of_source}{f' of {row.source}' if row.source else ''}, "
                "which the data no longer has",
                remedy="was data.max_passes lowered for a run that continues?",
            )
        return msgspec.structs.replace(prompt, group_id=row.group_id, draw=row.draw)


Shares = Mapping[str, int]
"""Source -> its share as a whole number, lowest terms; none is 0."""


def parse_mix(text: str, names: Sequence[str]) -> dict[str, Fraction]:
    """Weights of "math:0.7,code:0.3". Raises ValueError unless it names every source once, not all weights 0."""
    weights: dict[str, Fraction] = {}
    example = ",".join(f"{name}:{1 / len(names):.2g}" for name in names)
    for part in text.split(","):
        name, colon, number = map(str.strip, part.partition(":"))
        if not colon:
            raise ValueError(f"{part.strip()!r} is no NAME:WEIGHT: write {example}")
        if name not in names:
            raise ValueError(f"there is no source {name!r}; {suggest(name, names)}")
        if name in weights:
            raise ValueError(f"{name} has two weights")
        weights[name] = _weight(name, number)
    if missing := [name for name in names if name not in weights]:
        raise ValueError(f"it says nothing of {', '.join(missing)}: write {missing[0]}:0 to switch it off")
    if not any(weights.values()):
        raise ValueError("no source has a weight: give one of them more than 0")
    return weights


def _weight(name: str, number: str) -> Fraction:
    try:
        value = float(number)
    except ValueError:
        raise ValueError(f"the weight of {name} is {number!r}, which is no number") from None
    if value < 0 or not (value == 0 or MIN_WEIGHT <= value <= MAX_WEIGHT):
        raise ValueError(f"the weight of {name} is {number}: must be 0, or from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}")
    return Fraction(repr(value))


def mix_text(weights: Mapping[str, float]) -> str:
    return ",".join(f"{name}:{repr(weight).removesuffix('.0')}" for name, weight in sorted(weights.items()))


def shares_of(weights: Mapping[str, Fraction]) -> dict[str, int]:
    """In whole numbers without a common divisor, sources without a weight left out."""
    weights = {name: weight for name, weight in sorted(weights.items()) if weight}
    scale = math.lcm(*(weight.denominator for weight in weights.values()))
    shares = {name: int(weight * scale) for name, weight in weights.items()}
    divisor = math.gcd(*shares.values())
    return {name: share // divisor for name, share in shares.items()}


def next_source(shares: Shares, counts: Mapping[str, int]) -> str:
    """From which source the next draw is, `counts` having been drawn by these shares before."""
    if len(shares) == 1:
        return next(iter(shares))
    total, slack = sum(shares.values()), 2 * len(shares) - 2
    after = sum(counts.get(name, 0) for name in shares) + 1

    def is_due(name: str) -> bool:
        return slack * (shares[name] * after - counts.get(name, 0) * total) >= total

    def late_at(name: str) -> Fraction:
        return Fraction(slack * (counts.get(name, 0) + 1) - 1, shares[name])

    return min((name for name in shares if is_due(name)), key=lambda name: (late_at(name), name))


POISON = "poison"
"""Reason of groups that are given up for it."""
SUSPECT_AFTER = 2
"""Deaths in a row without a token in between."""
MAX_NEW_SUSPECTS = 16
"""Groups that one death brings under suspicion at most: each costs an actor that has nothing else to do meanwhile."""
_KEY = "deaths"

ActorKey = tuple[str, int]
"""Name and epoch of a rollout actor."""


class PoisonTracker:
    """Counts deaths against groups. One per buffer."""

    def __init__(self, ledger: Ledger, max_deaths: int, tell: Tell) -> None:
        """`max_deaths`: at the last of so many a group is given up; the ones before it are borne."""
        self._tell = tell
        self._ledger = ledger
        self._max_deaths = max(max_deaths, SUSPECT_AFTER + 1)
        self._deaths = msgspec.json.decode(ledger.recall(_KEY) or "{}", type=dict[int, int])
        self._barren: dict[int, int] = {}
        """Tokens at dispatch of groups whose present attempt brought none so far, the oldest attempt first."""
        self._excused: set[int] = set()
        """Those of them that went to an engine in doubt."""
        self._clearing: ActorKey | None = None
        """Actor that gets nothing new, to be alone with a suspect once its groups have ended."""
        self._clearing_until_s = 0.0
        self._in_doubt_until_s: dict[ActorKey, float] = {}
        self._num_new: dict[ActorKey, int] = {}
        """PoisonTracker that an engine in doubt has made."""

    def __contains__(self, group_id: int) -> bool:
        return group_id in self._deaths

    def __bool__(self) -> bool:
        """Whether any group is to be served alone."""
        return any(map(self.must_be_alone, self._deaths))

    def must_be_alone(self, group_id: int) -> bool:
        """Whether it was there at too many deaths to share an engine."""
        return self._deaths.get(group_id, 0) >= SUSPECT_AFTER

    def has_tokens(self, group_id: int, num_tokens: int) -> None:
        """So many its present attempt has saved; more than it began with clear it."""
        if num_tokens > self._barren.get(group_id, num_tokens):
            self.forget(group_id)

    def forget(self, group_id: int) -> None:
        self._barren.pop(group_id, None)
        self._excused.discard(group_id)
        if self._deaths.pop(group_id, 0):
            self._save()

    def note_deaths(self, dispatched: Mapping[int, ActorKey]) -> list[int]:
        """The actors of these groups, or their engines, ended; returns the groups to drop."""
        barren = [group_id for group_id in self._barren if group_id in dispatched]
        convicted: list[int] = []
        for group_id in barren:
            del self._barren[group_id]
            if group_id in self._excused:
                continue
            deaths = self._deaths.get(group_id, 0) + 1
            if deaths == SUSPECT_AFTER and not self._suspect(dispatched[group_id], group_id):
                continue
            self._deaths[group_id] = deaths
            if deaths >= self._max_deaths:
                convicted.append(group_id)
        if barren:
            under_way = {row.group_id for row in self._ledger.rows(State.DISPATCHED, State.REQUEUED)}
            self._deaths = {group_id: deaths for group_id, deaths in self._deaths.items() if group_id in under_way}
            self._save()
        return convicted

    def _suspect(self, actor: ActorKey, group_id: int) -> bool:
        """From now on it is served alone; False if this death has made enough of them."""
        num_new = self._num_new.get(actor, 0)
        if num_new >= MAX_NEW_SUSPECTS:
            return False
        self._num_new[actor] = num_new + 1
        self._tell(
            "group-suspected",
            f"group {group_id} was running at {SUSPECT_AFTER} deaths of its actor in a row and brought no token: "
            "it is served alone from now on",
        )
        return True

    def note_broken_engine(self, actor: ActorKey, now_s: float) -> None:
        """The engine of an actor failed a group: it may be the one that is sick."""
        self._in_doubt_until_s = {key: s for key, s in self._in_doubt_until_s.items() if s > now_s}
        self._num_new = {key: num for key, num in self._num_new.items() if key in self._in_doubt_until_s}
        self._in_doubt_until_s[actor] = now_s + TIMEOUTS.buffer.doubt_s

    def note_finished(self, actor: ActorKey, group_id: int) -> None:
        self._in_doubt_until_s.pop(actor, None)
        self._num_new.pop(actor, None)
        self.forget(group_id)

    def note_dispatched(self, actor: ActorKey, num_tokens: Mapping[int, int], now_s: float) -> None:
        for group_id, num in num_tokens.items():
            self._barren.pop(group_id, None)  # last in line again
            self._barren[group_id] = num
        change = self._excused.update if self._is_in_doubt(actor, now_s) else self._excused.difference_update
        change(num_tokens)

    def _is_in_doubt(self, actor: ActorKey, now_s: float) -> bool:
        return now_s < self._in_doubt_until_s.get(actor, now_s)

    def why(self) -> str:
        return f"{self._max_deaths} actors or engines in a row ended while they ran it, the last one ran it alone"

    def turn(
        self, actor: ActorKey, holding: Collection[int], waiting: Sequence[int], max_groups: int, now_s: float
    ) -> tuple[Sequence[int], int]:
        """What an actor that holds `holding` may get now: which of the waiting groups, and how many groups in all. A
        suspect goes to an actor without groups; if there is none, one after the other gets no new ones."""
        if any(self.must_be_alone(group_id) for group_id in holding):
            return (), 0
        suspects = [group_id for group_id in waiting if self.must_be_alone(group_id)]
        if not suspects:
            return waiting, max_groups
        if not self._is_in_doubt(actor, now_s):
            if not holding:
                return suspects[:1], min(max_groups, 1)
            if actor == self._clearing or now_s >= self._clearing_until_s:
                self._clearing, self._clearing_until_s = actor, now_s + TIMEOUTS.buffer.clearing_s
                return (), 0
        return [group_id for group_id in waiting if not self.must_be_alone(group_id)], max_groups

    def _save(self) -> None:
        self._ledger.remember(_KEY, msgspec.json.encode(self._deaths).decode())


AT_ONCE = ("reward-crash", POISON)
"""Of these, one time is enough: it ended a process, and more than once."""
COUNTED = ("reward-error", "reference-error", "workflow-error", "data-error", *AT_ONCE)
"""Reasons for which a group was dropped that are held against its prompt."""
MAX_DETAIL = 500
_SINCE = "quarantine"
"""Remembered: the first group whose failure counts. A resumed run has its own, so it tries every prompt again."""


class Quarantine:
    """The prompts that are not drawn again, counted from the ledger. One per buffer; `after` = 0 heeds none."""

    def __init__(self, sources: Sources, ledger: Ledger, after: int, tell: Tell) -> None:
        self._tell = tell
        self._after = after
        self._counts: Counter[tuple[str, int]] = Counter()
        self._held: set[tuple[str, int]] = set()
        if not after:
            return
        if not (since := ledger.recall(_SINCE)):
            since = str(ledger.draws.next_id)
            ledger.remember(_SINCE, since)
        for row in ledger.dropped_for(COUNTED):
            if row.group_id >= int(since) and sources.has(row.source, row.draw_of_source):
                self._count(sources.prompt(row), row.reason)

    def __len__(self) -> int:
        return len(self._held)

    def note_failure(self, prompt: Prompt, reason: str, detail: str) -> None:
        """A group of that prompt was dropped; the prompt is held if that was once too often."""
        if self._after and reason in COUNTED and self._count(prompt, reason):
            count = self._counts[prompt.source, prompt.row]
            times = "once" if count == 1 else f"{count} times"
            self._tell(
                "prompt-quarantined",
                f"row {prompt.row} of {prompt.source} is not drawn again in this run: {reason} {times}; the last one: "
                f"{detail[:MAX_DETAIL]} -- mend it; a resumed run tries it again",
            )

    def holds(self, prompt: Prompt) -> bool:
        return (prompt.source, prompt.row) in self._held

    def _count(self, prompt: Prompt, reason: str) -> bool:
        """Whether that was once too often."""
        key = (prompt.source, prompt.row)
        self._counts[key] += 1
        is_new = key not in self._held and (self._counts[key] >= self._after or reason in AT_ONCE)
        if is_new:
            self._held.add(key)
        return is_new


MAX_PASSED_OVER = 1000
"""Quarantined prompts in a row; then there is nothing to train on."""
MAX_LOOKS = 1000
"""Draws that are passed over at one go, after which others may have their turn."""
SKIPS = 3
"""Passes in a row that a prompt outside the window is passed over."""


class Window(NamedTuple):
    """Mean rewards of prompts that are worth drawing; both ends are inside. Equal ends: there is no window."""

    low: float = 0.0
    high: float = 0.0

    def holds(self, reward: float) -> bool:
        return self.low >= self.high or self.low <= reward <= self.high


NO_WINDOW = Window()


class _Judged(NamedTuple):
    group_id: int
    pass_index: int
    reward: float


class PromptCursor:
    """Prompts as the groups they become. Raises what the sources raise (DataError)."""

    def __init__(self, sources: Sources, ledger: Ledger, quarantine: Quarantine, tell: Tell) -> None:
        self.sources = sources
        self.ledger = ledger
        self.quarantine = quarantine
        self.num_quarantined = 0
        """In a row."""
        self.is_searching = False
        """The last look ended for the number of prompts that it passed over: the next one may start at once."""
        self._weights = parse_mix(mix_text(self.sources.weights), self.sources.names) if self.sources.weights else {}
        self._off: set[str] = {name for name in self.sources.names if not self._has(name)}
        """Sources that had nothing more at the last look."""
        self._tell = tell
        self._window = NO_WINDOW
        self._seen: dict[tuple[str, int], _Judged] | None = None
        """Source and row of the pass -> what is known of the prompt; None: not asked for yet."""

    def use(self, mix: str, window: Window) -> None:
        """Draw by these from now on. `mix` was judged before, and is empty where there is nothing to choose."""
        self._window = window
        self._weights = parse_mix(mix, self.sources.names) if mix else {}

    def draw(self, num_samples: int, **fields: Any) -> tuple[Row, Prompt] | None:
        """The next group, of so many samples, which the ledger has now, with those `fields` of its row,
        and its prompt. None when there is none, for now (`is_searching`: look again at once) or at all. Raises
        DataError when there never will be any that may be given out."""
        self.is_searching = False
        for _ in range(MAX_LOOKS):
            row, stretch = self._next_row(num_samples)
            if row is None:
                return None
            if row.redraw_of < 0 and self._is_outside(row):  # one that is repeated keeps its prompt
                self.ledger.dispatch([replace(row, reason=OUT_OF_WINDOW)], stretch)
                continue
            prompt = self.sources.prompt(row)
            if self._is_quarantined(prompt):
                self.ledger.dispatch([replace(row, reason=QUARANTINED)], stretch)
                continue
            (started,) = self.ledger.dispatch([replace(row, **fields)], stretch)
            return started, prompt
        self.is_searching = True
        return None

    def note_reward(self, row: Row, reward: float) -> None:
        """A group of the prompt was finished, with that mean reward."""
        if self._seen is not None:
            self._note(row.group_id, row.source, row.draw_of_source, reward)

    def _is_outside(self, row: Row) -> bool:
        """Whether the window passes that prompt over."""
        if self._window.low >= self._window.high:
            return False
        if self._seen is None:
            self._seen = {}
            for group_id, source, draw, reward in self.ledger.mean_rewards():
                if self.sources.has(source, draw):  # else the passes of a resumed run were lowered
                    self._note(group_id, source, draw, reward)
        pass_index, index = self.sources.place(row.source, row.draw_of_source)
        newest = self._seen.get((row.source, index))
        return newest is not None and not self._window.holds(newest.reward) and pass_index <= newest.pass_index + SKIPS

    def _note(self, group_id: int, source: str, draw: int, reward: float) -> None:
        assert self._seen is not None
        pass_index, index = self.sources.place(source, draw)
        if (newest := self._seen.get((source, index))) is None or newest.group_id < group_id:
            self._seen[source, index] = _Judged(group_id, pass_index, reward)

    @property
    def has_next(self) -> bool:
        return self.ledger.redraw() is not None or any(map(self._has, self._weighted_names))

    @property
    def chooses(self) -> bool:
        return bool(self._weights)

    @property
    def _weighted_names(self) -> list[str]:
        return [name for name in self.sources.names if not self._weights or self._weights[name]]

    def _has(self, name: str) -> bool:
        return self.sources.has(name, self.ledger.draws.taken[name])

    def _next_row(self, num_samples: int) -> tuple[Row | None, Stretch]:
        draws, stretch = self.ledger.draws, self.ledger.draws.stretch
        if (again := self.ledger.redraw()) is not None:
            dropped, draw = again
            before = self.ledger.find(dropped)
            source, number = ("", -1) if before is None else (before.source, before.source_draw)
            row = Row(draws.next_id, draw, dropped, num_samples, source=source, source_draw=number)
            return row, stretch
        names = self._names()
        if not names:
            return None, stretch
        name = names[0]
        if self.chooses:  # by the shares of the sources that there are, counted from the draw that first went by them
            shares = shares_of({name: self._weights[name] for name in names})
            mix = ",".join(f"{name}:{share}" for name, share in shares.items())
            is_same = mix == stretch.mix
            stretch = stretch if is_same else Stretch(mix, draws.next_draw)
            name = next_source(shares, draws.in_stretch if is_same else {})
        number = draws.taken[name] if name else -1
        return Row(draws.next_id, draws.next_draw, -1, num_samples, source=name, source_draw=number), stretch

    def _names(self) -> list[str]:
        names = [name for name in self._weighted_names if self._has(name)]
        off = {*self._weighted_names} - {*names}
        for name in sorted(off - self._off) if self._weights else ():
            outlook = "; others continue" if names else ""
            self._tell(
                "source-ended", f"{name} has no more prompts after {self.ledger.draws.taken[name]} draws{outlook}"
            )
        self._off = off
        return names

    def _is_quarantined(self, prompt: Prompt) -> bool:
        """Whether a prompt is on that list. Raises DataError if nothing else came for long."""
        is_held = self.quarantine.holds(prompt)
        self.num_quarantined = self.num_quarantined + 1 if is_held else 0
        if self.num_quarantined >= MAX_PASSED_OVER:
            raise DataError(
                f"nothing is left to train on: the last {MAX_PASSED_OVER} draws brought only the "
                f"{len(self.quarantine)} prompts that are quarantined, for each of which reward or workflow failed",
                remedy="mend the function and resume the run, or set reward.quarantine_after = 0",
            )
        return is_held
