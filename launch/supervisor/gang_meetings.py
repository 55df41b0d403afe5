"""Where the ranks of a gang meet: an address and a port of the node of its first rank, new for every common attempt.

torch's store and gloo ask nobody for a key: ranks that are all on one node meet at loopback.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from ..actor_spec import ActorSpec, GangMeeting

LOOPBACK = "127.0.0.1"


class GangMeetings:
    """Asks the node of rank 0 once per rendezvous; all ranks of an attempt get the same answer."""

    def __init__(self, actors: Sequence[ActorSpec], ask: Callable[[int], Awaitable[GangMeeting]]) -> None:
        self._ask = ask
        self._hosts = {a.rank.gang: a.node for a in reversed(actors) if a.rank is not None}
        nodes: dict[str, set[int]] = {}
        for each in actors:
            if each.rank is not None:
                nodes.setdefault(each.rank.gang, set()).add(each.node)
        self._is_on_one_node = {gang: len(there) == 1 for gang, there in nodes.items()}
        self._held: dict[str, tuple[int, GangMeeting]] = {}
        self._lock = asyncio.Lock()

    async def of(self, actor: ActorSpec, attempt: int) -> GangMeeting | None:
        """The meeting place of that attempt; None for an actor that is no rank. Raises what asking raises."""
        if actor.rank is None:
            return None
        gang = actor.rank.gang
        async with self._lock:
            held = self._held.get(gang)
            if held is None or held[0] != attempt:
                place = await self._ask(self._hosts[gang])
                if self._is_on_one_node[gang]:
                    place = msgspec.structs.replace(place, address=LOOPBACK)
                held = self._held[gang] = attempt, place
            return held[1]

    def host(self, rank: ActorSpec) -> int:
        """The node that is asked for the meeting place of that rank's gang."""
        return self._hosts[rank.rank.gang] if rank.rank is not None else rank.node
