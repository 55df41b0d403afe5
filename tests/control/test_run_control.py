"""Pause, resume and step are whole or not at all: audit log and buffer agree, whoever goes or fails meanwhile."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from myxa.actors.coordinator import run_control as module
from myxa.actors.coordinator.audit import AuditWriter, read_audit
from myxa.actors.coordinator.journal import RunContext
from myxa.actors.coordinator.run_control import RunControl
from myxa.actors.coordinator.run_state import RunState
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
        self.holds: tuple[bool, int | None] = (False, None)
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.errors: list[MyxaError] = []
        self.num_asked = 0
        self.reason = ""

    async def set_paused(self, is_paused: bool, until_step: int | None = None, reason: str = "") -> int:
        self.num_asked += 1
        self.holds = (is_paused, until_step)
        self.reason = reason
        await self.may_answer.wait()
        if self.errors:
            raise self.errors.pop(0)
        return max(STANDS_AT, until_step or 0)

    async def stats(self) -> BufferStats:
        is_paused, until_step = self.holds
        pause = PauseState(is_paused=is_paused, until_step=until_step, reason=self.reason)
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
        self.buffer, self.folder = Buffer(), folder
        self.tasks: set[asyncio.Task[Any]] = set()
        self.told: list[str] = []
        anything: Any = self
        telemetry: Any = self
        meter, state = ActivityMeter("c", self.clock), RunState(version=STANDS_AT)
        context = RunContext(anything, anything, self.clock, meter, telemetry, anything, state)
        audit = AuditWriter(folder / "audit.jsonl", context.version, self.clock)
        self.control = RunControl(context, audit, self._evaluate)

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
        path = self.folder / "audit.jsonl"
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
        return self.buffer.holds == (self.control._now.is_paused, self.control._now.until_step)


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
    assert "run-stepping" not in place.told


@pytest.mark.parametrize("verb", ["pause", "step"])
async def test_a_buffer_that_may_have_heard_is_told_that_it_is_as_before(
    tmp_path: Path, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TELL_S", 0.0)
    place = Place(tmp_path)
    place.buffer.errors = [DeadlineExceeded("no answer")]  # obeyed, but not heard of
    with pytest.raises(CallError):
        await place.do(verb)
    await place.settled()
    assert place.agree() and place.buffer.holds == (False, None)
    assert place.audit[-1] == (verb, "failed")


async def test_a_step_that_fails_half_way_does_not_leave_a_running_run_paused(tmp_path: Path) -> None:
    place = Place(tmp_path)

    async def set_paused(is_paused: bool, until_step: int | None = None, reason: str = "") -> int:
        if until_step is not None:
            raise LedgerError("the disk is full")
        place.buffer.holds = (is_paused, until_step)
        return STANDS_AT

    place.buffer.set_paused = set_paused
    with pytest.raises(LedgerError, match="the disk is full"):
        await place.control.step(WHO, "", 3)
    await place.settled()
    assert place.agree() and not place.control.paused


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


async def test_steps_are_counted_from_where_the_run_stands(tmp_path: Path) -> None:
    place = Place(tmp_path)
    assert await place.control.step(WHO, "", 3) == STANDS_AT + 3
    assert place.buffer.holds == (True, STANDS_AT + 3)
    assert place.audit == [("step", "done")]
    await place.control.resume(WHO, "")
    assert place.agree() and not place.control.paused
