"""Prompts that are not drawn again: their reward or workflow failed too often, or they ended workers or rollout actors.

The ledger counts the failures. A resumed run tries every prompt again.

`PoisonTracker` finds groups that may end the actors that run them:

    an attempt ended with its actor or engine, without a token    one death more
    the attempt brought tokens                                    no death: the prompt can be served
    SUSPECT_AFTER deaths        the group is served alone, so no other group dies with it or is blamed for it
    max deaths of the run       the group was alone at the last death: it is dropped and its prompt quarantined

A group that waited in the engine's queue brought no token either, and the buffer cannot tell the difference. So one
death makes at most MAX_NEW_SUSPECTS groups suspects, the oldest first, since engines start with them. All failures of
an engine before its next finished group are one death. An engine that fails one group after another is itself the
suspect: groups sent to it meanwhile are not counted. A crash with several groups in flight is not attributed to any of
them. Attempts that began under an earlier buffer process are not counted. The counts last as long as the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import msgspec

from ...core.files import Tell
from ...core.samples import Prompt
from ...core.timeouts import TIMEOUTS
from ..ledger.ledger import Ledger
from ..ledger.states import State
from .sources import Sources

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

    def died(self, dispatched: Mapping[int, ActorKey]) -> list[int]:
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

    def broke(self, actor: ActorKey, now_s: float) -> None:
        """The engine of an actor failed a group: it may be the one that is sick."""
        self._in_doubt_until_s = {known: s for known, s in self._in_doubt_until_s.items() if s > now_s}
        self._num_new = {known: num for known, num in self._num_new.items() if known in self._in_doubt_until_s}
        self._in_doubt_until_s[actor] = now_s + TIMEOUTS.buffer.doubt_s

    def finished(self, actor: ActorKey, group_id: int) -> None:
        self._in_doubt_until_s.pop(actor, None)
        self._num_new.pop(actor, None)
        self.forget(group_id)

    def dispatched(self, actor: ActorKey, num_tokens: Mapping[int, int], now_s: float) -> None:
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
        """`after`: failures of one prompt."""
        self._tell = tell
        self._after = after
        self._counts: Counter[tuple[str, int]] = Counter()
        self._held: set[tuple[str, int]] = set()
        if not after:
            return
        if not (since := ledger.recall(_SINCE)):
            since = str(ledger.draws.next_id)
            ledger.remember(_SINCE, since)
        for row in ledger.given_up(COUNTED):
            if row.group_id >= int(since) and sources.has(row.source, row.draw_of_source):
                self._count(sources.prompt(row), row.reason)

    def __len__(self) -> int:
        return len(self._held)

    def failed(self, prompt: Prompt, reason: str, detail: str) -> None:
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
