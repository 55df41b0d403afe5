"""Labelled moments in the lives of actors at which a run under chaos makes one of its own processes fail.

    reached("buffer.put")     in the product, where it matters; costs one look at a global unless the process is armed
    arm(plan, ...)            only by the worker of a run with `run.chaos = true`

A plan is a list of strikes, one after the other: the next one waits until the one before was carried out, by whatever
process, and `rest_s` more. Each is carried out once per run directory: a mark that is made before the act says so to
processes that come later.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, get_args

from .clock import Clock, SystemClock
from .suggestion import nearest

Action = Literal["kill", "stop", "delay", "raise"]
ACTIONS: tuple[Action, ...] = get_args(Action)

MARKS = "chaos"
"""Folder in the run directory: one file per strike that was carried out."""

DELAY_S = 5.0
"""How long "delay" holds the thread, if the strike does not say."""

POINTS = {
    "buffer.dispatch": "groups were written down as given to an engine, the answer is not sent yet",
    "buffer.put": "a finished group has arrived, nothing of it is written down yet",
    "buffer.claim": "a batch was written down as formed, the answer is not sent yet",
    "buffer.trained": "a step was reported as trained, that is not written down yet",
    "buffer.durable": "a checkpoint was reported as whole, that is not written down yet",
    "rollout.partial": "the first tokens of an answer are there",
    "rollout.reward": "an answer is whole, its reward is not there yet",
    "rollout.put": "a group is whole, the buffer does not have it yet",
    "rollout.prepare": "new weights were announced, the engine does not have them yet",
    "rollout.commit": "new weights lie beside the old ones, which are served still",
    "trainer.claim": "the leader has a batch, no rank works on it yet",
    "trainer.forward": "a rank is about to pass a micro-batch through the model",
    "trainer.all_reduce": "a rank has its gradients, they are not summed over ranks yet",
    "trainer.optimizer": "gradients are summed, the optimizer has not moved the weights yet",
    "trainer.publish": "a version was made, its bytes are not written for the engines yet",
    "trainer.trained": "a version was made, the buffer does not know yet",
    "trainer.checkpoint_write": "a checkpoint is about to be written",
    "trainer.manifest_commit": "the files of a checkpoint are written, the manifest that makes it whole is not",
    "coordinator.version_made": "a version was reported, nothing follows from it yet",
    "coordinator.adopt": "an engine is about to be given a version",
    "coordinator.knobs_decided": "a change of knobs is written down as decided, no owner knows yet",
    "coordinator.ready": "the trainer or an engine reports in",
    "monitor.telemetry": "measurements have arrived",
}
"""Every point, and what is true there."""

_STRIKE = re.compile(
    r"(?P<point>[a-z_.]+)(@(?P<actor>[^\s:@]+))?:(?P<action>[a-z]+)(=(?P<seconds>[0-9.]+))?(:(?P<nth>[0-9]{1,9}))?"
)


@dataclass(frozen=True, slots=True)
class Strike:
    """One act: `point[@actor]:action[=seconds][:nth]`."""

    point: str
    action: Action
    nth: int = 1
    """Which visit of that point is meant, counted in one process from when it is this strike's turn."""
    actor: str = "*"
    """Shell pattern for the names of the actors that are meant."""
    seconds: float = DELAY_S
    """For "delay"."""

    def __str__(self) -> str:
        """As `parse_strike` reads it."""
        actor = "" if self.actor == "*" else f"@{self.actor}"
        seconds = f"={self.seconds:g}" if self.action == "delay" else ""
        return f"{self.point}{actor}:{self.action}{seconds}:{self.nth}"


@dataclass(frozen=True, slots=True)
class Plan:
    """Strikes, one after the other."""

    strikes: tuple[Strike, ...] = ()
    rest_s: float = 0.0
    """Between a strike and the next."""


def parse_strike(text: str) -> Strike:
    """Read `point[@actor]:action[=seconds][:nth]`. Raises ValueError saying what is wrong."""
    found = _STRIKE.fullmatch(text)
    if found is None:
        raise ValueError(f'"{text}" is not point[@actor]:action[=seconds][:nth], as in "buffer.put:kill:3"')
    point, action = found["point"], found["action"]
    if point not in POINTS:
        raise ValueError(f'"{point}" is not a point{_meant(point, tuple(POINTS))}')
    known: Action | None = next((one for one in ACTIONS if one == action), None)
    if known is None:
        raise ValueError(f'"{action}" is not one of {", ".join(ACTIONS)}{_meant(action, ACTIONS)}')
    if found["seconds"] and known != "delay":
        raise ValueError(f'"{text}": only "delay" takes seconds')
    nth = int(found["nth"] or 1)
    if nth < 1:
        raise ValueError(f'"{text}": visits are counted from 1')
    try:
        seconds = float(found["seconds"] or DELAY_S)
    except ValueError:
        raise ValueError(f'"{text}": "{found["seconds"]}" is not a number of seconds') from None
    return Strike(point, known, nth, found["actor"] or "*", seconds)


def _meant(word: str, known: Sequence[str]) -> str:
    near = nearest(word, known)
    return f'; did you mean "{near}"?' if near else ""


class Nemesis:
    """Carries out one process's part of a plan."""

    def __init__(self, plan: Plan, actor: str, marks: Path, clock: Clock | None = None) -> None:
        """`marks`: folder in which every process of the run notes what was done; made when it is needed."""
        self._plan = plan
        self._actor = actor
        self._marks = marks
        self._clock = clock or SystemClock()
        self._points = {strike.point for strike in plan.strikes if fnmatchcase(actor, strike.actor)}
        self._visits: dict[int, int] = {}

    def reached(self, point: str) -> None:
        """Strike, if it is the turn of a strike at this point by this actor. "raise" raises RuntimeError."""
        if point not in self._points:
            return
        number, last_s = self._done()
        if number >= len(self._plan.strikes) or self._clock.wall() < last_s + self._plan.rest_s:
            return
        strike = self._plan.strikes[number]
        if strike.point != point or not fnmatchcase(self._actor, strike.actor):
            return
        self._visits[number] = self._visits.get(number, 0) + 1
        if self._visits[number] >= strike.nth and self._mark(number, strike):
            _act(strike)

    def _done(self) -> tuple[int, float]:
        """How many strikes were carried out, and when the last one was."""
        if not self._marks.is_dir():
            return 0, 0.0
        marks = [path for path in self._marks.iterdir() if path.suffix == ".json"]
        return len(marks), max((path.stat().st_mtime for path in marks), default=0.0)

    def _mark(self, number: int, strike: Strike) -> bool:
        """Note it for later processes; False if another process did so at the same time."""
        self._marks.mkdir(parents=True, exist_ok=True)
        note = {"strike": str(strike), "actor": self._actor, "pid": os.getpid(), "wall_s": self._clock.wall()}
        beside = self._marks / f".{number:04d}.{os.getpid()}"
        beside.write_text(json.dumps(note) + "\n", encoding="utf-8")
        try:
            os.link(beside, self._marks / f"{number:04d}.json")
        except FileExistsError:
            return False
        finally:
            beside.unlink()
        return True


def _act(strike: Strike) -> None:
    if strike.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif strike.action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif strike.action == "delay":
        threading.Event().wait(strike.seconds)
    else:
        raise RuntimeError(f"chaos: {strike}")


_armed: Nemesis | None = None


def arm(nemesis: Nemesis | None) -> None:
    """From now on this process strikes where that says; None: never again."""
    global _armed
    _armed = nemesis


def reached(point: str) -> None:
    """This process has come to a point of `POINTS`. Does nothing unless a run under chaos wants it to fail here."""
    if _armed is not None:
        _armed.reached(point)
