"""The states of a hosted actor.

NEW -> STARTING -> RUNNING -> DRAINING -> STOPPED       (also STARTING | RUNNING | DRAINING -> STOPPED by failure)
"""

from __future__ import annotations

from enum import Enum


class CellState(Enum):
    """Where an actor stands."""

    NEW = "new"
    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"
    STOPPED = "stopped"


NEXT: dict[CellState, tuple[CellState, ...]] = {
    CellState.NEW: (CellState.STARTING,),
    CellState.STARTING: (CellState.RUNNING, CellState.STOPPED),
    CellState.RUNNING: (CellState.DRAINING, CellState.STOPPED),
    CellState.DRAINING: (CellState.STOPPED,),
    CellState.STOPPED: (),
}
