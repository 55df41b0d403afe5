"""Whole systems of actors in one thread and in virtual time, from a seed; `docs/simulation.md` shows how."""

from .clock import SimClock
from .event_log import EventLog
from .loop import SimLoop
from .nemesis import VERBS, Nemesis, Strike, carry_out
from .network import Net
from .process import Process
from .runner import run, seeds, sweep
from .sim import ProcessCrashed, Sim, SimNode

__all__ = [
    "VERBS", "EventLog", "Nemesis", "Net", "Process", "ProcessCrashed", "Sim", "SimClock", "SimLoop", "SimNode",
    "Strike", "carry_out", "run", "seeds", "sweep",
]  # fmt: skip
