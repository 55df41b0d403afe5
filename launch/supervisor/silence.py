"""Who has been silent, or has been ending, for too long: processes that do not register, processes that do not vanish,
nodes that give no sign of life. Pure: time is passed in; the run supervisor acts.
"""

from __future__ import annotations

from ...core.supervision import ChildState, Supervisor
from .crew import Crew
from .patience import Patience


class Silence:
    """Of one run."""

    def __init__(self, crew: Crew, rules: Supervisor, patience: Patience) -> None:
        self._crew = crew
        self._rules = rules
        self._patience = patience
        self._heard_at: dict[int, float] = {}
        self._killed: dict[str, tuple[int, float]] = {}
        """Actor that did not register -> its attempt, when it was told of."""
        self._ending: dict[str, tuple[int, float]] = {}
        """Actor that is to end -> its attempt, since when."""

    # -- nodes

    def heard(self, node: int, now: float) -> None:
        """A sign of life of another node's launcher."""
        self._heard_at[node] = now

    def forget(self, node: int) -> None:
        """It takes no part any more."""
        self._heard_at.pop(node, None)

    def lost_nodes(self, now: float) -> list[int]:
        """Those that were silent for too long."""
        return [node for node, at in self._heard_at.items() if now - at > self._patience.lost_s]

    # -- processes

    def unregistered(self, now: float) -> list[str]:
        """Actors whose process should have registered by now; each attempt is told once."""
        late: list[str] = []
        for name in self._in_state("starting"):
            member, attempt = self._crew[name], self._rules.attempt(name)
            is_told = self._killed.get(name, (-1, 0.0))[0] == attempt
            if member.pid and not is_told and now - member.started_s > self._patience.start_s:
                self._killed[name] = attempt, now
                late.append(name)
        return late

    def undead(self, now: float) -> list[str]:
        """Actors whose process should be gone: it was to end, or was killed, and has not gone."""
        starting = set(self._in_state("starting"))
        self._killed = {name: held for name, held in self._killed.items() if name in starting}
        since = {name: at for name, (attempt, at) in self._killed.items() if attempt == self._rules.attempt(name)}
        ending = {name: self._rules.attempt(name) for name in self._in_state("ending")}
        before = self._ending
        self._ending = {
            name: before[name] if name in before and before[name][0] == attempt else (attempt, now)
            for name, attempt in ending.items()
        }
        for name, (_, at) in self._ending.items():
            # Whose start was not answered yet has no process to be told to end; that call has a deadline of its own.
            since[name] = max(at, self._crew[name].started_s) + self._patience.end_s
        return [name for name, at in since.items() if self._crew[name].pid and now - at > self._patience.gone_s]

    def _in_state(self, state: ChildState) -> list[str]:
        return [name for name in self._rules.alive if name in self._crew and self._rules.state(name) == state]
