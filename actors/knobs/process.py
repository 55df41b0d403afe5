"""Knobs that every actor process has, whatever its role: how much it logs, how often it reports.

Each owner adds them to its own by `KnobOwner.add`. Actors that share a process (embedded ones) share its logger: a
level set at one of them holds for all.
"""

from __future__ import annotations

import logging

from ...core.knobs import KnobValue, Tunable, knob_maker
from ..telemetry import ReportPace
from .owner import Knob

OWNER = "process"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
LOGGER = "myxa"
"""Parent of every logger of the house; other packages' are left alone."""

_knob = knob_maker(OWNER, "now")

# fmt: off
TUNABLES: tuple[Tunable, ...] = (
    _knob("log_level", "choice", "",
          "The least important messages that this actor's process writes into its log.", choices=LEVELS),
    _knob("report_s", "float", "",
          "Seconds between two reports of this actor to the monitor: metrics, events, time accounting.",
          low=0.05, high=60.0, unit="s"),
)
# fmt: on


def process_knobs(pace: ReportPace) -> tuple[Knob, ...]:
    """The knobs of this process; `pace` is what the actor's `report_forever` goes by."""

    def change_pace(value: KnobValue) -> None:
        pace.change(float(value))

    level, report = TUNABLES
    return (
        Knob(level, _level, _set_level),
        Knob(report, lambda: pace.every_s, change_pace),
    )


def _level() -> str:
    """The level in force; one that has no name here counts as the next name below it."""
    level = logging.getLogger(LOGGER).getEffectiveLevel()
    fitting = [name for name in LEVELS if getattr(logging, name) <= level]
    return fitting[-1] if fitting else LEVELS[0]


def _set_level(value: KnobValue) -> None:
    logging.getLogger(LOGGER).setLevel(str(value))
