"""Knobs that every actor process has, whatever its role: how much it and its parts log, how often it reports.

Each owner adds them to its own by `KnobOwner.add`. Actors that share a process (embedded ones) share its logger: a
level set at one of them holds for all.
"""

from __future__ import annotations

import logging

from ...core.knobs import KnobValue, Tunable, knob_maker
from ...core.suggestion import nearest
from ..telemetry import ReportPace
from .owner import Knob

OWNER = "process"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
LOGGER = "myxa"
"""Parent of every logger of the house; other packages' are left alone."""
MODULES = (
    "actors", "backends", "control", "embed", "embedded", "launcher", "sglang", "transport", "worker",
)  # fmt: skip
"""Loggers below it that have a name of their own. A closed list, so that a mistyped one is refused."""
NO_PARTS = "none"

_knob = knob_maker(OWNER, "now")

# fmt: off
TUNABLES: tuple[Tunable, ...] = (
    _knob("log_level", "choice", "",
          "The least important messages that this actor's process writes into its log.", choices=LEVELS),
    _knob("log_modules", "text", "",
          "Parts of this process that log from another level on than log_level, such as transport:DEBUG,sglang:ERROR, "
          f"or none. There are {', '.join(MODULES)}.", is_judged=True),
    _knob("report_s", "float", "",
          "Seconds between two reports of this actor to the monitor: metrics, events, time accounting.",
          low=0.05, high=60.0, unit="s"),
)
# fmt: on


def process_knobs(pace: ReportPace) -> tuple[Knob, ...]:
    """The knobs of this process; `pace` is what the actor's `report_forever` goes by."""

    def change_pace(value: KnobValue) -> None:
        pace.change(float(value))

    level, modules, report = TUNABLES
    return (
        Knob(level, _level, _set_level),
        Knob(modules, _modules, _set_modules, _judge_modules),
        Knob(report, lambda: pace.every_s, change_pace),
    )


def _level() -> str:
    """The level in force; one that has no name here counts as the next name below it."""
    level = logging.getLogger(LOGGER).getEffectiveLevel()
    fitting = [name for name in LEVELS if getattr(logging, name) <= level]
    return fitting[-1] if fitting else LEVELS[0]


def _set_level(value: KnobValue) -> None:
    logging.getLogger(LOGGER).setLevel(str(value))


def _modules() -> str:
    """As it would be typed; the loggers themselves are asked, so that it holds for every actor of the process."""
    levels = {name: logging.getLogger(f"{LOGGER}.{name}").level for name in MODULES}
    return ",".join(f"{name}:{logging.getLevelName(level)}" for name, level in levels.items() if level) or NO_PARTS


def _set_modules(value: KnobValue) -> None:
    wanted = dict(_pairs(str(value)))
    for name in MODULES:
        logging.getLogger(f"{LOGGER}.{name}").setLevel(wanted.get(name, logging.NOTSET))


def _judge_modules(value: KnobValue) -> str:
    for name, level in _pairs(str(value)):
        if name not in MODULES:
            near = nearest(name, MODULES)
            return (
                f'no part is called "{name}"{f", did you mean {near}?" if near else ""}; there are {", ".join(MODULES)}'
            )
        if level not in LEVELS:
            return f'{name} has no level "{level}"; write {name}:DEBUG, or one of {", ".join(LEVELS)}'
    return ""


def _pairs(text: str) -> list[tuple[str, str]]:
    """(part, level) of each; the level is empty where there is no colon."""
    parts = (part.partition(":") for part in ("" if text == NO_PARTS else text).split(",") if part.strip())
    return [(name.strip(), level.strip()) for name, _, level in parts]
