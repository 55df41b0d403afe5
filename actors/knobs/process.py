"""Knobs that every actor process has, whatever its role: how much it logs, and how often it reports to the monitor.

Each owner adds them to its own by `KnobOwner.add`. Actors that share a process (embedded ones) share its logger: a
level set at one of them holds for all. Knows logging and the report pace only.
"""

from __future__ import annotations

import logging

from ...core.knobs import KnobValue, Tunable
from ..telemetry import ReportPace
from .owner import Knob

OWNER = "process"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
LOGGER = "myxa"
"""Parent of every logger of the house; other packages' are left alone."""

_LOG_LEVEL = Tunable(
    name="log_level",
    kind="choice",
    boundary="now",
    owner=OWNER,
    choices=LEVELS,
    help="The least important messages that this actor's process writes into its log.",
)
_REPORT_S = Tunable(
    name="report_s",
    kind="float",
    boundary="now",
    owner=OWNER,
    low=0.05,
    high=60.0,
    unit="s",
    help="Seconds between two reports of this actor to the monitor: metrics, events, time accounting.",
)

TUNABLES: tuple[Tunable, ...] = (_LOG_LEVEL, _REPORT_S)


def process_knobs(pace: ReportPace) -> tuple[Knob, ...]:
    """The knobs of this process; `pace` is what the actor's `report_forever` goes by."""

    def change_pace(value: KnobValue) -> None:
        pace.change(float(value))

    return (
        Knob(tunable=_LOG_LEVEL, read=_level, use=_set_level),
        Knob(tunable=_REPORT_S, read=lambda: pace.every_s, use=change_pace),
    )


def _level() -> str:
    """The level in force; one that has no name here counts as the next name below it."""
    level = logging.getLogger(LOGGER).getEffectiveLevel()
    fitting = [name for name in LEVELS if getattr(logging, name) <= level]
    return fitting[-1] if fitting else LEVELS[0]


def _set_level(value: KnobValue) -> None:
    logging.getLogger(LOGGER).setLevel(str(value))
