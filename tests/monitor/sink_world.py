"""What tests of sinks share: surroundings that collect what a sink tells, and telemetry to give it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.harness.manual_clock import ManualClock

from myxa.core.clock import Clock
from myxa.core.messages import Event, MetricPoint, Span, Telemetry
from myxa.core.sink import SinkContext

WALL_S = 1_700_000_000.0


class Told:
    """Collects what a sink emits."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    def __call__(self, kind: str, text: str) -> None:
        self.events.append((kind, text))

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events]


def context(run_dir: Path, told: Told | None = None, clock: Clock | None = None) -> SinkContext:
    return SinkContext(run_dir=run_dir, run_name="sort", clock=clock or ManualClock(), emit=told or Told())


def point(step: int, source: str = "trainer/0", **values: float) -> MetricPoint:
    """`train__loss=1.0` is train/loss."""
    named = {name.replace("__", "/"): value for name, value in values.items()}
    return MetricPoint(source=source, step=step, wall_s=WALL_S + step, values=named)


def span(source: str, name: str, start_wall_s: float, duration_s: float = 0.5, track: str = "", **args: object) -> Span:
    return Span(
        source=source, name=name, activity="compute", start_wall_s=start_wall_s, duration_s=duration_s, track=track,
        args=args,
    )  # fmt: skip


def weights(source: str, version: int, start_s: float, *, is_made: bool) -> Span:
    """A version is made, or adopted."""
    told = {"makes_version" if is_made else "adopts_version": version}
    return span(source, "weights", start_s, 0.5 if is_made else 0.1, track="weights", **told)


def hop(source: str, name: str, groups: list[int], start_s: float, duration_s: float = 0.5) -> Span:
    """One station of a group's life."""
    return span(source, name, start_s, duration_s, track=name, hop=name, flows=groups)


def bundle(step: int) -> Telemetry:
    at_s, text = WALL_S + step, 'a "quoted" \n text'
    return Telemetry(
        metrics=(point(step, train__loss=1.0 / (step + 1)),),
        events=(Event(source="buffer", wall_s=WALL_S, kind="group-dropped", text=text, data={"id": step}),),
        spans=(span("trainer/0", "train", at_s), span("rollout/0", "generate", at_s, 1, track="group 3")),
    )


def trace_of(path: Path) -> list[dict[str, Any]]:
    """The events of a trace that may not have its end yet."""
    whole, _, _ = path.read_text().removesuffix("]\n").rpartition("\n")
    return json.loads(whole.removesuffix(",") + "]")
