"""What must hold in every simulated run, whatever happens to it; read from the nodes' own books.

While it runs: credit is never exceeded on either side, so memory is bounded. At the end: nothing is under way (calls,
streams, puts that wait for a callee) and, once closed, no task and no timer of a process is left. What only a workload
can know (executed twice, lost, out of order) is its own to check.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from ...core.errors import SimulationError
from ..registry.registry import REGISTRY
from ..session import credit
from ..wire import Lane
from .loop import SimLoop
from .process import Process, owner_of

if TYPE_CHECKING:
    from ..node import Node
    from ..session.links import Link
    from ..session.pending import PendingCall
    from .network import SimNetwork
    from .sim import SimNode

MAX_TOLD = 20


class Audited(Protocol):
    """The simulation."""

    @property
    def nodes(self) -> Mapping[str, SimNode]: ...

    @property
    def network(self) -> SimNetwork: ...


class Audit:
    """Collects what is wrong; `verdict` raises."""

    def __init__(self, sim: Audited) -> None:
        self._sim = sim
        self.findings: list[str] = []

    def look(self) -> None:
        """What must hold at any time."""
        for node in self._sim.nodes.values():
            if node.current is None:
                continue
            for link in _links_of(node.current):
                for lane in Lane:
                    out, held = link.windows[lane].outstanding, link.grants[lane].held
                    if out > credit.WINDOW_UNITS:
                        self.find(f"{node.name} has {out} units under way to {link.key} on {lane.name}")
                    if not 0 <= held <= credit.WINDOW_UNITS + self._sim.network.num_doubled:
                        self.find(f"{node.name} holds {held} units of {link.key} on {lane.name}")

    def before_closing(self) -> None:
        """What must hold once everything that was asked for has ended."""
        self.look()
        self.findings += self.under_way()

    def under_way(self) -> list[str]:
        """Calls, puts and streams that have not ended, on either side; without the registry's own."""
        found: list[str] = []
        for node in self._sim.nodes.values():
            if node.current is None:
                continue
            found += [
                f"{node.name}: {call} is still {call.state.value}"
                for call in _calls_of(node.current)
                if call.order.target != REGISTRY
            ]
            for link in _links_of(node.current):
                callees = [getattr(arrival.handle, "callee", "?") for arrival in link.served.values()]
                found += [
                    f"{node.name}: a call of {link.key} to {callee} is still open"
                    for callee in callees
                    if callee != REGISTRY
                ]
        return found

    def after_closing(self, process: Process, loop: SimLoop) -> None:
        """A process that was closed in good order has nothing left."""
        tasks = sorted(task.get_name() for task in process.tasks if not task.done())
        if tasks:
            self.find(f"{process} left tasks: {', '.join(tasks)}")
        timers = [h for h in loop.timers(process) if owner_of(h) is not self._sim.network]
        if timers:
            self.find(f"{process} left timers: {', '.join(map(repr, timers))}")

    def find(self, text: str) -> None:
        """Something is wrong; a workload may say so too."""
        self.findings.append(text)

    def verdict(self) -> None:
        """Raises SimulationError with the findings, if there are any."""
        if self.findings:
            told = "\n  ".join(self.findings[:MAX_TOLD])
            raise SimulationError(f"{len(self.findings)} invariants are broken:\n  {told}")


def _links_of(node: Node) -> list[Link]:
    return node._session._links.all()  # pyright: ignore[reportPrivateUsage]  # nobody else has a use for it


def _calls_of(node: Node) -> list[PendingCall]:
    return list(node._session.calls._pending.values())  # pyright: ignore[reportPrivateUsage]  # as above
