"""Which server of a pool gets a request: the least loaded one, unless the session's own is nearly as free. Pure.

    home(session) stays  while  load(home) <= SPREAD * least load + SLACK

so that a group's samples and a sample's turns find their beginning in the cache, and no server is buried under a
popular session. Consistent hashing was considered: it knows no load, and moves sessions when a server comes or goes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

SPREAD = 1.25
SLACK = 8
"""Requests in flight; as many as the samples of one group, so that a group is not torn apart on idle servers."""
MAX_SESSIONS = 65_536
"""Remembered at most; the one not asked for longest is forgotten first."""


class Choice:
    """Remembers where sessions live."""

    def __init__(self, *, spread: float = SPREAD, slack: int = SLACK) -> None:
        self._spread = spread
        self._slack = slack
        self._homes: OrderedDict[str, str] = OrderedDict()

    def pick(self, session: str, loads: Mapping[str, int]) -> str:
        """A server out of `loads` (server -> requests in flight). An empty session lives nowhere.

        Raises ValueError when there is no server.
        """
        if not loads:
            raise ValueError("no server to choose from")
        least = min(loads, key=lambda name: (loads[name], name))
        if not session:
            return least
        home = self._homes.get(session)
        if home is None or home not in loads or loads[home] > self._spread * loads[least] + self._slack:
            home = least
        self._homes[session] = home
        self._homes.move_to_end(session)
        while len(self._homes) > MAX_SESSIONS:
            self._homes.popitem(last=False)
        return home
