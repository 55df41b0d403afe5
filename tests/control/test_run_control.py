"""Pause and resume are whole or not at all: audit log and buffer agree, whoever goes or fails meanwhile."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from tests.harness.waits import waits

from myxa.actors.coordinator import run_control as module
from myxa.actors.coordinator.audit import read_audit
from myxa.actors.coordinator.run_control import RunControl
from myxa.actors.coordinator.run_state import RunContext, RunState
from myxa.core.activity import ActivityMeter
from myxa.core.clock import SystemClock
from myxa.core.errors import CallError, DeadlineExceeded, LedgerError, MyxaError
from myxa.core.knobs import Operator
from myxa.core.messages import BufferStats, EvalResult, PauseState

WHO = Operator(user="ada", via="test")
STANDS_AT = 7


class Buffer:
    """Rests where it stands; `may_answer` holds its answers, `errors` are what it says first, after it has obeyed."""

    def __init__(self) -> None:
        self.holds = False
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.errors: list[MyxaError] = []
        self.num_asked = 0
        self.reason, self.until_step = "", 0

    async def set_paused(self, is_paused: bool, until_step: int = 0, reason: str = "") -> int:
        self.num_asked += 1
        self.holds, self.until_step = is_paused, until_step
        self.reason = reason
        await self.may_answer.wait()
        if self.errors:
            raise self.errors.pop(0)
        return max(STANDS_AT, until_step)

    async def stats(self) -> BufferStats:
        pause = PauseState(is_paused=self.holds, until_step=self.until_step, reason=self.reason)
        return BufferStats(
            states={},
            drawn=0,
            trained=0,
            dropped={},
            slots_total=0,
            slots_used=0,
            max_staleness=0,
            policy="",
            pause=pause,
        )


class Place:
    """A conduct with an audit log on disk; and as much of an actor's context as it needs."""

    log = logging.getLogger("conduct")

    def __init__(self, folder: Path) -> None:
        self.clock = SystemClock()
        self.buffer, self.audit_path = Buffer(), folder / "audit.jsonl"
        self.tasks: set[asyncio.Task[Any]] = set()
        self.told: list[str] = []
        anything: Any = self
        telemetry: Any = self
        self.state = RunState(version=STANDS_AT)
        meter = ActivityMeter("c", self.clock)
        context = RunContext(anything, meter, telemetry, anything, anything)
        self.control = RunControl(context, self._evaluate)

    def ref(self, contract: type, name: str) -> Any:
        return self.buffer

    def spawn(self, work: Coroutine[Any, Any, Any], *, name: str) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        return task

    def peers(self, prefix: str) -> tuple[str, ...]:
        return ("buffer",)

    def event(self, kind: str, text: str, **data: object) -> None:
        self.told.append(kind)

    async def _evaluate(self, name: str) -> EvalResult:
        return EvalResult(mean_reward=0.5, num_samples=1, oldest_version=0, newest_version=0)

    async def settled(self) -> None:
        await asyncio.gather(*self.tasks)

    @property
    def audit(self) -> list[tuple[str, str]]:
        path = self.audit_path
        return [(record.verb, record.result) for record in read_audit(path)] if path.exists() else []

    async def do(self, verb: str) -> object:
        match verb:
            case "pause":
                return await self.control.pause(WHO, "look")
            case "resume":
                return await self.control.resume(WHO, "")
            case _:
                return await self.control.step(WHO, "look", 3)

    def agree(self) -> bool:
        """Both say the same of whether the run is held back."""
        return self.buffer.holds == bool(self.control.paused)


async def test_who_asked_may_go_and_it_is_done_and_recorded(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.buffer.may_answer.clear()
    asked = asyncio.create_task(place.control.pause(WHO, "look"))
    while not place.buffer.num_asked:
        await asyncio.sleep(0.001)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    place.buffer.may_answer.set()
    await place.settled()
    assert place.agree() and place.control.paused == "look"
    assert place.audit == [("pause", "done")]
    assert "run-paused" in place.told


@pytest.mark.parametrize("verb", ["pause", "resume", "step"])
async def test_nothing_happens_that_the_audit_log_does_not_take(tmp_path: Path, verb: str) -> None:
    place = Place(tmp_path)
    if verb == "resume":
        await place.control.pause(WHO, "look")
    before = place.buffer.holds
    (tmp_path / "audit.jsonl").write_text("no record\n")
    with pytest.raises(LedgerError):
        await place.do(verb)
    await place.settled()
    assert place.agree() and place.buffer.holds == before


@pytest.mark.parametrize("verb", ["pause", "step"])
async def test_what_is_recorded_is_told_until_the_buffer_obeys(
    tmp_path: Path, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One record, and it holds: whether the buffer heard it the first time is not known."""
    monkeypatch.setattr(module, "TIMEOUTS", waits(coordinator={"pause_s": 0.0, "tell_again_s": 0.001}))
    place = Place(tmp_path)
    place.buffer.errors = [DeadlineExceeded("no answer") for _ in range(3)]
    with pytest.raises(CallError, match=f"{verb} is decided and recorded, but the buffer has not obeyed yet"):
        await place.do(verb)
    place.buffer.holds = False  # it was restarted, and has not heard it
    await place.control.look()
    await place.settled()
    assert place.buffer.holds and place.control._now.is_paused
    assert place.audit == [(verb, "done")]
    assert place.told[-1] == "pause-told"


async def test_what_is_decided_later_replaces_what_the_buffer_has_not_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TIMEOUTS", waits(coordinator={"pause_s": 0.0, "tell_again_s": 0.01}))
    place = Place(tmp_path)
    place.buffer.errors = [DeadlineExceeded("no answer")]
    with pytest.raises(CallError):
        await place.do("pause")
    await place.do("resume")
    await place.settled()
    assert place.agree() and not place.buffer.holds
    assert place.audit == [("pause", "done"), ("resume", "done")]


async def test_a_coordinator_that_restarts_hears_what_is_held_back(tmp_path: Path) -> None:
    place = Place(tmp_path)
    await place.control.pause(WHO, "look")
    again = Place(tmp_path)
    again.buffer = place.buffer
    again.control._buffer = again.ref(type(place), "buffer")
    await again.control.look()
    assert again.agree() and again.control.paused == "look"


async def test_what_was_done_and_cannot_be_recorded_is_said_to_be_done(tmp_path: Path) -> None:
    place = Place(tmp_path)
    (tmp_path / "audit.jsonl").write_text("no record\n")
    with pytest.raises(LedgerError, match=r"eval was done \(held-out reward 0\.5\), but could not be recorded"):
        await place.control.evaluate(WHO, "", "")


async def test_steps_are_counted_from_where_the_run_is(tmp_path: Path) -> None:
    place = Place(tmp_path)
    await place.control.pause(WHO, "look")
    assert await place.control.step(WHO, "look", 3) == STANDS_AT + 3
    assert (place.buffer.holds, place.buffer.until_step, place.control.paused) == (True, STANDS_AT + 3, "")
    for version in range(STANDS_AT + 1, STANDS_AT + 4):
        place.state.version = version
        place.control.version_made(version)
    assert place.control.paused == "look" and place.told[-2:] == ["run-stepping", "run-paused"]
    assert place.audit == [("pause", "done"), ("step", "done")]
    await place.control.resume(WHO, "")
    assert place.agree() and not place.control.paused
