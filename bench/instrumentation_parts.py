"""The composition root of `instrumentation.py`: a run whose instrumentation is on and off by turns, in all its
processes at once, and whose trainer writes down when it made each step."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from myxa.core.activity import ActivityMeter, TelemetryBuffer
from myxa.core.actor import Actor
from myxa.core.config import RunConfig
from myxa.launch.actor_spec import ActorSpec
from myxa.launch.program import build_actor

STEPS_FILE = "steps.txt"
SLICE_VARIABLE = "MYXA_BENCH_SLICE_S"


def is_on() -> bool:
    """By the monotonic clock, which all processes of a machine share: nobody has to be told."""
    return int(time.monotonic() / _SLICE_S) % 2 == 0


def build(spec: ActorSpec, config: RunConfig, run_dir: Path) -> Actor:
    """The real actors, with a switch in front of everything that measures or tells."""
    _put_switches()
    actor: Any = build_actor(spec, config, run_dir)
    if spec.role == "trainer" and spec.index == 0:
        _note_steps(actor, run_dir)
    return actor


def _put_switches() -> None:
    ActivityMeter.switch = _unless_off(ActivityMeter.switch)
    for name in ("metric", "event", "span", "hop", "_take_from_meter"):
        setattr(TelemetryBuffer, name, _unless_off(getattr(TelemetryBuffer, name)))
    for name in ("during", "working"):
        setattr(ActivityMeter, name, _block_unless_off(getattr(ActivityMeter, name)))


def _unless_off(method: Callable[..., None]) -> Callable[..., None]:
    def switched(*args: Any, **kwargs: Any) -> None:
        if is_on():
            method(*args, **kwargs)

    return switched


def _block_unless_off(method: Callable[..., Any]) -> Callable[..., Any]:
    def switched(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs) if is_on() else contextlib.nullcontext()

    return switched


def _note_steps(trainer: Any, run_dir: Path) -> None:
    backend = trainer.backend
    train = backend.train
    file = (run_dir / STEPS_FILE).open("a", buffering=1)

    def noted(*args: Any, **kwargs: Any) -> Any:
        result = train(*args, **kwargs)
        file.write(f"{time.monotonic()!r}\n")
        return result

    backend.train = noted


_SLICE_S = float(os.environ.get(SLICE_VARIABLE, "5"))
