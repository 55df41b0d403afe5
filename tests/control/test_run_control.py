"""Pause and resume are whole or not at all: audit log and buffer agree, whoever goes or fails meanwhile."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from tests.harness.waits import waits

from myxa.actors.coordinator import knob_conductor as module
from myxa.actors.coordinator.audit import read_audit
from myxa.actors.coordinator.coordinator import RunControl
from myxa.actors.coordinator.knob_conductor import KnobConductor
from myxa.actors.coordinator.run_state import RunContext, RunState
from myxa.actors.knobs.owner import PAUSE_AT
from myxa.core.activity import ActivityMeter
from myxa.core.clock import SystemClock
from myxa.core.config import RunConfig
from myxa.core.errors import CallError, DeadlineExceeded, LedgerError, MyxaError, NoSuchActor, TrainError
from myxa.core.knobs import ChangeRequest, KnobSheet, KnobState, Operator
from myxa.core.messages import BufferStats

WHO = Operator(user="ada", via="test")
STANDS_AT = 7


class Buffer:
    """Rests where it stands; `may_answer` holds its answers, `errors` are what it says first, before it obeys."""

    def __init__(self) -> None:
        self.pause_at = -1
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.errors: list[MyxaError] = []
        self.num_asked = 0
        self.conductor: KnobConductor | None = None

    @property
    def holds(self) -> bool:
        return 0 <= self.pause_at <= STANDS_AT

    async def knobs(self) -> KnobSheet:
        state = KnobState(tunable=PAUSE_AT, value=self.pause_at, first=-1)
        return KnobSheet(owner="buffer", knobs=(state,))

    async def knobs_decided(self, epoch: int) -> None:
        self.num_asked += 1
        await self.may_answer.wait()
        if self.errors:
            raise self.errors.pop(0)
        assert self.conductor is not None
        for knob in (await self.conductor.news(0, -1)).knobs:
            self.pause_at = -1 if knob.value is None else int(knob.value)

    async def checkpoint_at_boundary(self, export: bool) -> str:
        return "export" if export else "checkpoint"

    async def stats(self) -> BufferStats:
        return BufferStats(
            states={}, drawn=0, trained=0, dropped={}, slots_total=0, slots_used=0, max_staleness=0, policy="",
            next_step=STANDS_AT,
        )  # fmt: skip


class Place:
    """A coordinator's part with an audit log on disk; and as much of an actor's context as it needs."""

    log = logging.getLogger("conduct")
    name, launch = "coordinator", "test"

    def __init__(self, folder: Path, buffer: Buffer | None = None, file: RunConfig | None = None) -> None:
        self.clock, self.file = SystemClock(), file
        self.buffer, self.audit_path = buffer or Buffer(), folder / "audit.jsonl"
        self.tasks: set[asyncio.Task[Any]] = set()
        self.told: list[str] = []
        anything: Any = self
        telemetry: Any = self
        self.state = RunState(version=STANDS_AT)
        meter = ActivityMeter("c", self.clock)
        context = RunContext(anything, meter, telemetry, anything, anything)
        self.conductor = self.buffer.conductor = KnobConductor(
            context, own=anything, engines=(), on_broken=anything, on_decided=lambda: self.control.look()
        )
        self.conductor.decisions.replay(read_audit(self.audit_path))
        self.control = RunControl(context, self.conductor)
        self.control.look()
        self.conductor.begin()

    async def knobs(self) -> KnobSheet:
        return KnobSheet(owner=self.name, knobs=())

    def ref(self, contract: type, name: str) -> Any:
        return self.buffer

    def spawn(self, work: Coroutine[Any, Any, Any], *, name: str) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        if name != "knobs-expire":
            self.tasks.add(task)
        return task

    def peers(self, prefix: str) -> tuple[str, ...]:
        return ("buffer",) if "buffer".startswith(prefix) else ()

    def event(self, kind: str, text: str, **data: object) -> None:
        self.told.append(kind)

    async def settled(self) -> None:
        while left := {task for task in self.tasks if not task.done()}:
            await asyncio.wait(left)

    @property
    def audit(self) -> list[tuple[str, str]]:
        path = self.audit_path
        return [(record.verb, record.result) for record in read_audit(path)] if path.exists() else []

    async def do(self, verb: Any) -> object:
        return await self.control.set_pause(verb, WHO, "" if verb == "resume" else "look", 3)

    def agree(self) -> bool:
        """Both say the same of whether the run is held back."""
        return self.buffer.holds == bool(self.control.paused)


async def test_who_asked_may_go_and_it_is_done_and_recorded(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.buffer.may_answer.clear()
    asked = asyncio.create_task(place.control.set_pause("pause", WHO, "look"))
    while not place.buffer.num_asked:
        assert not asked.done()
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
        await place.control.set_pause("pause", WHO, "look")
    before = place.buffer.holds
    (tmp_path / "audit.jsonl").write_text("no record\n")
    with pytest.raises(LedgerError):
        await place.do(verb)
    await place.settled()
    assert place.agree() and place.buffer.holds == before


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TIMEOUTS", waits(coordinator={"confirm_s": 0.005, "retry_s": 0.01}))


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("verb", ["pause", "step"])
async def test_what_is_recorded_is_told_until_the_buffer_obeys(tmp_path: Path, verb: str) -> None:
    place = Place(tmp_path)
    place.buffer.errors = [DeadlineExceeded("no answer") for _ in range(3)]
    with pytest.raises(CallError, match=f"{verb} is decided and recorded, but the buffer has not obeyed yet"):
        await place.do(verb)
    await place.settled()
    assert place.buffer.pause_at == {"pause": 0, "step": STANDS_AT + 3}[verb]
    assert place.audit == [(verb, "done")]


@pytest.mark.usefixtures("quick")
async def test_what_is_decided_later_replaces_what_the_buffer_has_not_heard(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.buffer.errors = [DeadlineExceeded("no answer")]
    with pytest.raises(CallError):
        await place.do("pause")
    await place.do("resume")
    await place.settled()
    assert place.agree() and not place.buffer.holds
    assert place.audit == [("pause", "done"), ("resume", "done")]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("has_heard", [True, False])
async def test_a_pause_holds_whoever_dies_after_the_record(tmp_path: Path, has_heard: bool) -> None:
    """The coordinator dies, also before the buffer heard of it; the buffer, which is away, cannot be asked then."""
    place = Place(tmp_path)
    if not has_heard:
        place.buffer.errors = [NoSuchActor("gone")]
        with pytest.raises(CallError, match="who takes its place uses it"):
            await place.do("pause")
        assert not place.buffer.holds
    else:
        await place.do("pause")
    again = Place(tmp_path, place.buffer)
    await again.conductor.joined("buffer")  # as after each restart, of either side
    assert again.agree() and again.control.paused == "look"
    assert again.told == [], "no news"


async def test_every_order_is_recorded_and_the_newest_reason_is_told(tmp_path: Path) -> None:
    place = Place(tmp_path)
    for verb in ("resume", "pause", "pause"):
        await place.do(verb)
    await place.control.set_pause("pause", WHO, "lunch")
    assert place.agree() and place.control.paused == "lunch"
    assert place.audit == [("resume", "done")] + 3 * [("pause", "done")]


async def test_a_pause_ends_by_itself_and_can_be_taken_back(tmp_path: Path) -> None:
    place = Place(tmp_path)
    request = ChangeRequest(values={PAUSE_AT.name: 0}, who=WHO, for_s=0.2)
    assert not (await place.conductor.change(request)).refused
    assert place.agree() and place.control.paused == "by ada"
    async with asyncio.timeout(20):
        while place.control.paused:
            await asyncio.sleep(0.01)
    await place.settled()
    assert place.agree() and place.told.count("run-paused") == place.told.count("run-resumed") == 1
    assert place.conductor.decisions.live(STANDS_AT, place.clock.wall()).knobs == (), "not for a checkpoint"
    await place.do("pause")
    assert "there is no change to take back" in (await place.conductor.undo(WHO, "", 0)).refused, "of knobs"
    assert not (await place.conductor.undo(WHO, "", 3)).refused
    assert place.agree() and not place.control.paused


async def test_a_checkpoint_that_the_run_file_rules_out_is_refused_and_an_export_is_not(tmp_path: Path) -> None:
    place = Place(tmp_path)
    assert await place.control.checkpoint(export=False) == "checkpoint"
    plain: dict[str, Any] = {"model": {"path": "m"}, "data": {"train": "d"}}
    offloads = {"trainer": {"dtype": "bfloat16"}, "roles": {"trainer": {"kind": "megatron"}}}
    for more, refused in ((offloads, False), (offloads | {"megatron": {"offload_optimizer": 0.5}}, True)):
        place = Place(tmp_path, file=RunConfig.model_validate(plain | more))
        assert await place.control.checkpoint(export=True) == "export"
        if refused:
            with pytest.raises(TrainError, match="no checkpoint can be written: megatron.offload_optimizer: "):
                await place.control.checkpoint(export=False)
        else:
            assert await place.control.checkpoint(export=False) == "checkpoint"


async def test_steps_are_counted_from_where_the_run_is(tmp_path: Path) -> None:
    place = Place(tmp_path)
    await place.control.set_pause("pause", WHO, "look")
    assert await place.control.set_pause("step", WHO, "look", 3) == STANDS_AT + 3
    assert (place.buffer.pause_at, place.control.paused) == (STANDS_AT + 3, "")
    for version in range(STANDS_AT + 1, STANDS_AT + 4):
        place.state.version = version
        place.control.look()
    assert place.control.paused == "look" and place.told[-2:] == ["run-stepping", "run-paused"]
    assert place.audit == [("pause", "done"), ("step", "done")]
    await place.control.set_pause("resume", WHO, "")
    assert place.agree() and not place.control.paused
