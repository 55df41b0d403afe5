"""Poison prompts: groups that may be what ends the actors that run them. They are counted, served alone, set aside.

    an attempt ended with its actor or engine, and had brought no token   one death more
    it brought tokens                                                     no death: the prompt can be served
    SUSPECT_AFTER deaths        the group is served alone: no other group dies with it, or is taken for it
    as many as the run bears    it was alone at the last of them: it is given up, its prompt quarantined

A group that only waited in the engine's queue brought no token either, and the buffer cannot tell the two apart: one
death makes suspects of MAX_NEW_SUSPECTS groups at most, the oldest first, for engines begin with them; the others stay
one death short of it, and are next. All that an engine fails until it has finished one group is one death. An engine
that fails one group after another is itself the suspect (its actor ends it for that): groups that go to it meanwhile
are not counted. A crash with several groups in flight is not attributed to any of them, and a group whose actor is
killed from outside again and again stays in the run as long as it gets a little further each time. The counts outlive
the buffer, but not the run; an attempt that this buffer did not see begin counts for nothing. Knows where counts are
kept; must not know admission, messages or actors.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from ..ledger.ledger import Ledger
from ..ledger.states import State

POISON = "poison"
"""Reason of groups that are given up for it."""
SUSPECT_AFTER = 2
"""Deaths in a row without a token in between."""
MAX_NEW_SUSPECTS = 16
"""Groups that one death brings under suspicion at most: each costs an actor that has nothing else to do meanwhile."""
DOUBT_S = 30.0
"""An engine that failed a group is in doubt for so long, or until it has finished one: what it fails meanwhile is not
held against the group, and it gets no suspects."""
CLEARING_S = 30.0
"""For so long without a word the actor that is to have a suspect next is waited for; then it is another."""
_KEY = "deaths"

ActorKey = tuple[str, int]
"""Name and epoch of a rollout actor."""


class PoisonTracker:
    """Counts deaths against groups. One per buffer."""

    def __init__(self, ledger: Ledger, max_deaths: int) -> None:
        """`max_deaths`: at the last of so many a group is given up; the ones before it are borne."""
        self._ledger = ledger
        self._max_deaths = max(max_deaths, SUSPECT_AFTER + 1)
        self._deaths = msgspec.json.decode(ledger.recall(_KEY) or "{}", type=dict[int, int])
        self._suspects = {group_id for group_id, deaths in self._deaths.items() if deaths >= SUSPECT_AFTER}
        self._barren: dict[int, int] = {}
        """Tokens at dispatch of groups whose present attempt brought none so far, in hand longest first."""
        self._excused: set[int] = set()
        """Those of them that went to an engine in doubt."""
        self._clearing: ActorKey | None = None
        """Actor that gets nothing new, to be alone with a suspect once it has nothing in hand."""
        self._clearing_until_s = 0.0
        self._in_doubt_until_s: dict[ActorKey, float] = {}
        self._num_new: dict[ActorKey, int] = {}
        """PoisonTracker that an engine in doubt has made."""
        self._news: list[str] = []

    def __contains__(self, group_id: int) -> bool:
        """Whether any death is counted against it."""
        return group_id in self._deaths

    def __bool__(self) -> bool:
        """Whether any group is to be served alone."""
        return bool(self._suspects)

    def must_be_alone(self, group_id: int) -> bool:
        """Whether it has been in hand at too many of them to have neighbours."""
        return group_id in self._suspects

    def has_tokens(self, group_id: int, num_tokens: int) -> None:
        """So many its present attempt has saved; more than it began with clear it."""
        if num_tokens > self._barren.get(group_id, num_tokens):
            self.forget(group_id)

    def forget(self, group_id: int) -> None:
        """Nothing is held against it (any more)."""
        self._barren.pop(group_id, None)
        self._excused.discard(group_id)
        self._suspects.discard(group_id)
        if self._deaths.pop(group_id, 0):
            self._save()

    def died(self, in_hand: Mapping[int, ActorKey]) -> list[int]:
        """These groups' actors, or their engines, ended with them in hand; returns those that are to be given up."""
        barren = [group_id for group_id in self._barren if group_id in in_hand]
        convicted: list[int] = []
        for group_id in barren:
            del self._barren[group_id]
            if group_id in self._excused:
                continue
            deaths = self._deaths.get(group_id, 0) + 1
            if deaths == SUSPECT_AFTER and not self._suspect(in_hand[group_id], group_id):
                continue
            self._deaths[group_id] = deaths
            if deaths >= self._max_deaths:
                convicted.append(group_id)
        if barren:
            self._keep()
        return convicted

    def _suspect(self, actor: ActorKey, group_id: int) -> bool:
        """From now on it is served alone; False if this death has made enough of them."""
        num_new = self._num_new.get(actor, 0)
        if num_new >= MAX_NEW_SUSPECTS:
            return False
        self._num_new[actor] = num_new + 1
        self._suspects.add(group_id)
        self._news.append(
            f"group {group_id} was in hand at {SUSPECT_AFTER} deaths of its actor in a row and brought no token: "
            "it is served alone from now on"
        )
        return True

    def broke(self, actor: ActorKey, now_s: float) -> None:
        """The engine of an actor failed a group: it may be the one that is sick."""
        self._in_doubt_until_s = {known: s for known, s in self._in_doubt_until_s.items() if s > now_s}
        self._num_new = {known: num for known, num in self._num_new.items() if known in self._in_doubt_until_s}
        self._in_doubt_until_s[actor] = now_s + DOUBT_S

    def finished(self, actor: ActorKey, group_id: int) -> None:
        """It finished that one."""
        self._in_doubt_until_s.pop(actor, None)
        self._num_new.pop(actor, None)
        self.forget(group_id)

    def dispatched(self, actor: ActorKey, num_tokens: Mapping[int, int], now_s: float) -> None:
        """These groups go there now, with so many tokens each."""
        for group_id, num in num_tokens.items():
            self._barren.pop(group_id, None)  # last in line again
            self._barren[group_id] = num
        change = self._excused.update if self._is_in_doubt(actor, now_s) else self._excused.difference_update
        change(num_tokens)

    def _is_in_doubt(self, actor: ActorKey, now_s: float) -> bool:
        return now_s < self._in_doubt_until_s.get(actor, now_s)

    def why(self) -> str:
        """What a group is given up for."""
        return f"{self._max_deaths} actors or engines in a row ended with it in hand, the last of them with it alone"

    def take_news(self) -> list[str]:
        """Who came under suspicion since the last look, in words."""
        news, self._news = self._news, []
        return news

    def turn(
        self, actor: ActorKey, holding: Collection[int], waiting: Sequence[int], max_groups: int, now_s: float
    ) -> tuple[Sequence[int], int]:
        """What an actor that has `holding` in hand may get now: which of those that wait, and how many groups in all.
        A suspect goes to one that has nothing in hand; is there none, one after the other is left to run dry."""
        if any(self.must_be_alone(group_id) for group_id in holding):
            return (), 0
        suspects = [group_id for group_id in waiting if self.must_be_alone(group_id)]
        if not suspects:
            return waiting, max_groups
        if not self._is_in_doubt(actor, now_s):
            if not holding:
                return suspects[:1], min(max_groups, 1)
            if actor == self._clearing or now_s >= self._clearing_until_s:
                self._clearing, self._clearing_until_s = actor, now_s + CLEARING_S
                return (), 0
        return [group_id for group_id in waiting if not self.must_be_alone(group_id)], max_groups

    def _keep(self) -> None:
        """Of groups that still have somewhere to go."""
        under_way = {row.group_id for row in self._ledger.rows(State.DISPATCHED, State.REQUEUED)}
        self._deaths = {group_id: deaths for group_id, deaths in self._deaths.items() if group_id in under_way}
        self._suspects &= under_way
        self._save()

    def _save(self) -> None:
        self._ledger.remember(_KEY, msgspec.json.encode(self._deaths).decode())
