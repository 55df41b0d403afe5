"""Groups that may be what ends the actors that run them: counted, served alone, set aside.

    an attempt ended with its actor or engine, and had brought no token   one death more
    it brought tokens                                                     none: the prompt can be served
    SUSPECT_AFTER deaths        the group is served alone: no neighbour dies with it, or is taken for it
    as many as the run bears    it was alone at the last of them: it is given up, its prompt quarantined

An engine that fails one group after another is itself the suspect (its actor ends it for that): what goes to it
meanwhile is not counted. A death in company convicts nobody, and a group that is killed by somebody else again and
again goes on as long as it gets a little further each time. What is counted outlives the buffer, but not the run. Knows
where counts are kept; must not know admission, messages or actors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import msgspec

from ..ledger.ledger import Ledger
from ..ledger.states import State

POISON = "poison"
"""Reason of groups that are given up for it."""
SUSPECT_AFTER = 2
"""Deaths in a row without a token in between."""
DOUBT_S = 30.0
"""An engine that failed a group is in doubt for so long, or until it has finished one: what it fails meanwhile is not
held against the group, and it gets no suspects."""
CLEARING_S = 30.0
"""For so long without a word the actor that is to have a suspect next is waited for; then it is another."""
_KEY = "deaths"

ActorKey = tuple[str, int]
"""Name and epoch of a rollout actor."""


class Suspects:
    """See the module's head. One per buffer."""

    def __init__(self, ledger: Ledger, max_deaths: int) -> None:
        """`max_deaths`: at the last of so many a group is given up; the ones before it are borne."""
        self._ledger = ledger
        self._max_deaths = max(max_deaths, SUSPECT_AFTER + 1)
        self._deaths = msgspec.json.decode(ledger.recall(_KEY) or "{}", type=dict[int, int])
        self._clearing: ActorKey | None = None
        """Actor that gets nothing new, to be alone with a suspect once it has nothing in hand."""
        self._clearing_until_s = 0.0
        self._in_doubt_until_s: dict[ActorKey, float] = {}
        self._excused: set[int] = set()
        """Groups that went to an engine in doubt."""
        self._news: list[str] = []

    def __contains__(self, group_id: int) -> bool:
        """Whether any death is counted against it."""
        return group_id in self._deaths

    def must_be_alone(self, group_id: int) -> bool:
        """Whether it has been in hand at too many of them to have neighbours."""
        return self._deaths.get(group_id, 0) >= SUSPECT_AFTER

    def brought_tokens(self, group_id: int) -> None:
        """There are more of its tokens than before."""
        if self._deaths.pop(group_id, 0):
            self._keep()

    def died(self, group_ids: Iterable[int]) -> list[int]:
        """Their actor or engine ended with them in hand; returns those that are to be given up."""
        convicted: list[int] = []
        for group_id in group_ids:
            if group_id in self._excused:
                continue
            deaths = self._deaths[group_id] = self._deaths.get(group_id, 0) + 1
            if deaths >= self._max_deaths:
                convicted.append(group_id)
            elif deaths == SUSPECT_AFTER:
                self._news.append(
                    f"group {group_id} was in hand at {deaths} deaths of its actor in a row and brought no token: "
                    "it is served alone from now on"
                )
        self._keep()
        return convicted

    def broke(self, actor: ActorKey, now_s: float) -> None:
        """The engine of an actor failed a group: it may be the one that is sick."""
        self._in_doubt_until_s = {known: s for known, s in self._in_doubt_until_s.items() if s > now_s}
        self._in_doubt_until_s[actor] = now_s + DOUBT_S

    def finished(self, actor: ActorKey) -> None:
        """It finished one."""
        self._in_doubt_until_s.pop(actor, None)

    def dispatched(self, actor: ActorKey, group_ids: Iterable[int], now_s: float) -> None:
        """These go there now."""
        change = self._excused.update if self._is_in_doubt(actor, now_s) else self._excused.difference_update
        change(group_ids)

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
        self._excused &= under_way
        self._ledger.remember(_KEY, msgspec.json.encode(self._deaths).decode())
