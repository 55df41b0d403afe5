"""What a rollout did when, from notes and turns: one thing at a time, and every second is somebody's."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from tests.harness.manual_clock import ManualClock
from tests.monitor.trace_rules import check_events

from myxa.actors.sinks.chrome_trace import ChromeTraceSink
from myxa.actors.workflows.timeline import MAX_OPEN, MAX_STRETCHES, RolloutSpan, Timeline, WaitNote, rows
from myxa.core.clock import SystemClock
from myxa.core.messages import SamplingParams, Span, Telemetry
from myxa.core.protocols import Delta, GenerateRequest
from myxa.core.sink import SinkContext


class Rollout:
    """A timeline on a clock that is moved by hand."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.moves: list[tuple[str, str]] = []
        self.timeline = Timeline(self.clock.monotonic, self._moved)

    def _moved(self, before: RolloutSpan | None, after: RolloutSpan | None) -> None:
        self.moves.append((before.label if before else "", after.label if after else ""))

    def note(
        self, number: int, kind: str | None = None, name: str = "", branch: int = 0, at_s: float | None = None
    ) -> None:
        self.timeline.note(WaitNote(number=number, kind=kind, name=name, branch=branch, at_s=at_s))  # pyright: ignore[reportArgumentType]

    async def turn(self, turn: int, branch: int = 0, waits_s: float = 1.0, lasts_s: float = 2.0) -> None:
        async def generate(request: GenerateRequest) -> AsyncIterator[Delta]:
            ids, nothing = np.zeros(1, np.int32), np.zeros(1, np.float32)
            self.clock.advance(waits_s)
            yield Delta(output_ids=ids, logprobs=nothing, versions=ids)
            self.clock.advance(lasts_s)

        request = GenerateRequest(
            request_id="r", input_ids=np.zeros(1, np.int32), sampling=SamplingParams(), branch=branch, turn=turn
        )
        async for _ in self.timeline.watched(generate, request):
            pass

    def told(self) -> list[tuple[str, int, float]]:
        return [(one.label, one.turn, one.ended_s - one.began_s) for one in self.timeline.stretches]


async def test_an_agents_time_is_what_lies_between_its_turns() -> None:
    rollout = Rollout()
    with rollout.timeline.during("engine"):
        rollout.note(1, "agent")
        rollout.clock.advance(5.0)
        await rollout.turn(1)
        rollout.clock.advance(3.0)
        await rollout.turn(1, branch=1, waits_s=0.5)  # a sub-agent's
        rollout.clock.advance(1.0)
        assert rollout.timeline.doing is not None
        assert rollout.timeline.doing.began_s == rollout.clock.monotonic() - 1.0, "it is waited for since the last turn"
        rollout.note(1)
    assert rollout.told() == [
        ("agent", 0, 5.0), ("engine", 1, 1.0), ("generate", 1, 2.0), ("agent", 1, 3.0), ("engine", 1, 0.5),
        ("generate", 1, 2.0), ("agent", 1, 1.0),
    ]  # fmt: skip
    assert [[one.label for one in row] for row in rows(rollout.timeline.stretches)] == [
        ["agent", "engine", "generate", "agent", "agent"], ["engine", "generate"],
    ]  # fmt: skip
    spent = rollout.timeline.seconds()
    assert (spent["agent"], spent["engine"], spent["generate"]) == (9.0, 1.5, 4.0)
    assert rollout.moves[-1] == ("engine", "") and rollout.timeline.doing is None


async def test_a_built_in_workflow_waits_for_the_engine_once_a_turn() -> None:
    rollout = Rollout()
    with rollout.timeline.during("engine"):
        rollout.clock.advance(5.0)
        for turn in (1, 2):
            await rollout.turn(turn)
        rollout.clock.advance(0.25)  # what the workflow does with the answer
    assert rollout.told() == [("engine", 1, 6.0), ("generate", 1, 2.0), ("engine", 2, 1.0), ("generate", 2, 2.0)]
    assert rollout.timeline.doing is None


def test_notes_that_come_late_have_the_times_of_their_senders() -> None:
    rollout = Rollout()
    with rollout.timeline.during("workflow"):
        began_s = rollout.clock.monotonic()
        rollout.clock.advance(10.0)  # the actor's loop was held: both notes come at once
        rollout.note(1, "tool", "search", at_s=began_s + 2.0)
        rollout.note(1, at_s=began_s + 6.0)
        rollout.note(2, "tool", "early", at_s=began_s - 50.0)
        rollout.note(2, at_s=began_s + 1e9)
    assert rollout.told()[:2] == [("workflow", 0, 2.0), ("tool search", 0, 4.0)]
    assert sum(took for _, _, took in rollout.told()) == 10.0


def test_what_a_workflow_forgets_or_does_too_often_is_bounded() -> None:
    rollout = Rollout()
    with rollout.timeline.during("workflow"):
        for number in range(1, 10 * MAX_OPEN):
            rollout.note(number, "environment", "x" * 1000)
        rollout.clock.advance(1.0)
        rollout.timeline.forget_waits()
        assert rollout.timeline.doing is not None and rollout.timeline.doing.kind == "workflow"
        for number in range(1, 2 * MAX_STRETCHES):
            rollout.note(number, "tool")
            rollout.clock.advance(1.0)
            rollout.note(number)
    assert len(rollout.timeline.stretches) == MAX_STRETCHES
    assert rollout.timeline.seconds()["tool"] == 2 * MAX_STRETCHES - 1
    assert max(len(one.name) for one in rollout.timeline.stretches) < 100


@pytest.mark.parametrize("seed", range(3))
async def test_every_second_is_counted_once_and_rows_do_not_overlap(seed: int, tmp_path: Path) -> None:
    print("seed", seed)
    rng, rollout, open_numbers = random.Random(seed), Rollout(), list[int]()
    began_s = rollout.clock.monotonic()
    with rollout.timeline.during("workflow"):
        for number in range(1, 300):
            rollout.clock.advance(rng.random())
            at_s = rng.choice([None, rollout.clock.monotonic() - rng.random()])
            if open_numbers and rng.random() < 0.4:
                rollout.note(open_numbers.pop(rng.randrange(len(open_numbers))), at_s=at_s)
            elif rng.random() < 0.3:
                await rollout.turn(number, branch=rng.randrange(3), waits_s=rng.random(), lasts_s=rng.random())
            else:
                open_numbers.append(number)
                rollout.note(number, rng.choice(["tool", "environment", "judge", "agent"]), "x", rng.randrange(3), at_s)
        rollout.timeline.forget_waits()
    assert sum(rollout.timeline.seconds().values()) == pytest.approx(rollout.clock.monotonic() - began_s)
    spans = [
        Span(
            source="rollout/0", name="7.0", activity="other", start_wall_s=row[0].began_s, track="rollout",
            duration_s=row[-1].ended_s - row[0].began_s,
            args={"group": 7, "parts": [
                (one.label, "compute", one.began_s - row[0].began_s, one.ended_s - one.began_s, one.turn) for one in row
            ]},
        ) for row in rows(rollout.timeline.stretches)
    ]  # fmt: skip
    assert len(spans) == 3
    sink = ChromeTraceSink()
    sink.open(SinkContext(run_dir=tmp_path, run_name="x", clock=SystemClock(), emit=lambda kind, text: None))
    sink.write(Telemetry(spans=tuple(spans)))
    sink.close()

    events = json.loads((tmp_path / "trace.json").read_text())
    check_events(events)
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == len(rollout.timeline.stretches)
    assert len({event["tid"] for event in slices}) == 3, "a row for each sample"
