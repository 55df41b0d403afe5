"""What a checkpoint says of the knobs comes into force again: the real coordinator, in one process with owners."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.harness.manifests import manifest_of
from tests.harness.waiting import until
from tests.harness.waits import waits
from tests.knobs.coordinator_room import WHO, Room, open_room
from tests.knobs.knob_maker import FIRST, Desk, make_desk

from myxa.actors.buffer.knobs import BufferKnobs, BufferLimits, BufferValues
from myxa.actors.contracts import CoordinatorContract, RolloutContract
from myxa.actors.coordinator import knob_conductor
from myxa.actors.coordinator.audit import read_audit
from myxa.actors.knobs.owner import OwnsKnobs
from myxa.actors.ledger.file import Terms
from myxa.actors.ledger.ledger import Ledger
from myxa.algos.staleness import Admission
from myxa.core.clock import SystemClock
from myxa.core.errors import LedgerError
from myxa.core.knobs import KnobValue, LiveKnob, LiveKnobs
from myxa.core.messages import EngineStatus, SamplingParams, WeightAck, WeightManifest
from myxa.core.retry import until_answered

pytestmark = [pytest.mark.timeout(120)]

BUFFER_FIRST = BufferValues(
    max_staleness=1, on_stale="pace", temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=16, num_samples=2,
    group_filter="none",
)  # fmt: skip


class Buffer(OwnsKnobs):
    """The real knobs of a buffer over a real ledger, and nothing else of it."""

    def __init__(self, path: Path) -> None:
        self.ledger = Ledger(path, run="r", fingerprint="f", wall=time.time)

    async def on_start(self) -> None:
        admission = Admission("pace", max_staleness=1, batch_size=4)
        self.live = self.knob_owner = BufferKnobs(
            self.ctx.name, self.ledger, admission, BUFFER_FIRST, SamplingParams(),
            filters=("none", "zero_variance"), limits=BufferLimits(has_rewards=True),
        )  # fmt: skip

    async def on_stop(self, why: str) -> None:
        self.ledger.close()


class Engine(OwnsKnobs, RolloutContract):
    """Reports in; notes what is in force when it gets its first weights, and could draw."""

    def __init__(self, buffer: Buffer | None = None) -> None:
        self._buffer = buffer
        self.at_first_weights: dict[str, KnobValue] = {}

    async def on_start(self) -> None:
        self.desk: Desk = make_desk(self.ctx.name, "room", "level")
        self.knob_owner = self.desk.owner
        self.ctx.spawn(self._report_in(), name="report-in")

    async def _report_in(self) -> None:
        await self.ctx.wait_for("coordinator", timeout_s=20)
        coordinator = self.ctx.ref(CoordinatorContract, "coordinator")
        status = EngineStatus(rollout=self.ctx.name, version=-1, running=0, waiting=0)
        await until_answered(
            lambda: coordinator.rollout_ready(status, self.ctx.epoch), who="coordinator", clock=SystemClock(),
            log=self.ctx.log,
        )  # fmt: skip

    async def prepare_weights(self, manifest: WeightManifest) -> WeightAck:
        return WeightAck(rollout=self.ctx.name, version=manifest.version, accepted=True)

    async def commit_weights(self, version: int) -> WeightAck:
        if not self.at_first_weights and self._buffer is not None:
            self.at_first_weights = {**self.desk.values, "temperature": self._buffer.live.values.temperature}
        return WeightAck(rollout=self.ctx.name, version=version, accepted=True)


def live_knob(name: str, value: KnobValue, epoch: int, **more: Any) -> LiveKnob:
    first = FIRST[name] if name in FIRST else getattr(BUFFER_FIRST, name, 0)
    return LiveKnob(**{"name": name, "value": value, "first": first, "epoch": epoch, "at": 0, **more})


def kept(*knobs: LiveKnob) -> LiveKnobs:
    return LiveKnobs(epoch=max(knob.epoch for knob in knobs), knobs=knobs)


def restored(room: Room) -> list[tuple[Mapping[str, Any], int]]:
    return [
        (r.arguments["values"], r.at)  # type: ignore[misc]
        for r in read_audit(room.audit)
        if r.verb == "restore"
    ]


async def test_values_of_actors_that_join_later_and_of_numbers_that_come_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(knob_conductor, "TIMEOUTS", waits(coordinator={"appear_s": 1.0}))  # one knob has no owner
    live = kept(
        live_knob("room", 2, 3), live_knob("level", "DEBUG", 3), LiveKnob(name="gone", value=1, first=0, epoch=2, at=0),
        live_knob("lr", 3e-3, 5, at=3), live_knob("lr", 4e-3, 7, at=9), live_knob("clip", 0.3, 8, at=9),
    )  # fmt: skip
    first, second = Engine(), Engine()
    beside = {"rollout/0": first, "buffer": Buffer(tmp_path / "ledger.sqlite")}
    async with open_room(tmp_path, live, 5, beside=beside) as room:
        assert first.desk.values == {"room": 2, "level": "DEBUG"}
        assert restored(room) == [({"room": 2, "level": "DEBUG", "lr": 3e-3}, 5), ({"lr": 4e-3, "clip": 0.3}, 9)]
        await until(lambda: max(room.trainer.steps, default=-1) > 9, "the number that was still to come")
        assert {n: (v["lr"], v["clip"]) for n, v in room.trainer.steps.items() if 5 <= n <= 9} == {
            **dict.fromkeys(range(5, 9), (3e-3, 0.2)),
            9: (4e-3, 0.3),
        }
        await room.node.start(second, "rollout/1")
        await until(lambda: second.desk.values == {"room": 2, "level": "DEBUG"}, "that of all")
        again = await room.ref.live_knobs()
        assert {k.name: k.value for k in again.knobs} == {"room": 2, "level": "DEBUG", "lr": 4e-3, "clip": 0.3}
        # A later change of it goes back to what was restored.
        await room.change(room=6)
        assert second.desk.values["room"] == 6
        await room.ref.undo(WHO, "", 0)
        assert (first.desk.values["room"], second.desk.values["room"]) == (2, 2)


async def test_values_of_several_changes_come_back_together(tmp_path: Path) -> None:
    """In one change: bounds may not fit one after the other."""
    bounds = {"difficulty_high": 0.8, "difficulty_low": 0.6, "top_p": 0.5}
    live = kept(*(live_knob(name, value, epoch) for epoch, (name, value) in enumerate(bounds.items(), 2)))
    buffer, engine = Buffer(tmp_path / "ledger.sqlite"), Engine()
    async with open_room(tmp_path, live, 5, beside={"buffer": buffer, "rollout/0": engine}) as room:
        values = buffer.live.values
        assert (values.difficulty_low, values.difficulty_high, values.top_p) == (0.6, 0.8, 0.5)
        assert [values for values, _ in restored(room)] == [bounds]


async def test_knobs_are_in_force_before_an_engine_could_draw(tmp_path: Path) -> None:
    live = kept(live_knob("temperature", 0.5, 1), live_knob("room", 2, 2), live_knob("level", "DEBUG", 2))
    buffer = Buffer(tmp_path / "ledger.sqlite")
    engine = Engine(buffer)
    beside = {"buffer": buffer, "rollout/0": engine}
    async with open_room(tmp_path, live, 5, beside=beside, manifest=manifest_of(5)):
        assert engine.at_first_weights == {"temperature": 0.5, "room": 2, "level": "DEBUG"}


@pytest.mark.parametrize("live", [LiveKnobs(), kept(live_knob("lr", 2e-3, 5))])
async def test_no_epoch_is_given_to_two_changes(tmp_path: Path, live: LiveKnobs) -> None:
    """Groups of change 7 are in the ledger; the checkpoint knows of 5 at most."""
    buffer, engine = Buffer(tmp_path / "ledger.sqlite"), Engine()
    for epoch in (7, 6):
        terms = Terms(knobs=epoch, sampling=SamplingParams(temperature=epoch / 10))
        buffer.ledger.number_terms(terms)
    async with open_room(tmp_path, live, 5, beside={"buffer": buffer, "rollout/0": engine}) as room:
        reply = await room.change(temperature=0.6)
        assert reply.epoch > 7
        assert {r.epoch for r in read_audit(room.audit)}.isdisjoint(range(1, 8))
        assert (await room.ref.live_knobs()).epoch == reply.epoch
        assert buffer.live.terms.knobs == reply.epoch


async def test_a_value_whose_time_is_over_goes_back_once_that_can_be_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full when it is due: the run goes on and tries again."""
    engine, late = Engine(), Engine()
    async with open_room(tmp_path, beside={"rollout/0": engine}) as room:
        coordinator = room.coordinator
        assert coordinator is not None
        await until(lambda: len(coordinator._adoption.present) == 1, "the engine")
        await room.change(room=2, for_s=0.5)
        desk = coordinator.conductor
        write, num_tried = desk._record, 0

        async def full(record: Any) -> Any:
            nonlocal num_tried
            num_tried += 1
            raise LedgerError("audit.jsonl: no space left on device")

        monkeypatch.setattr(desk, "_record", full)
        await until(lambda: num_tried > 1, "two attempts")
        assert "could not be recorded" in (await room.change(lr=2e-3)).refused
        assert set((await room.ref.knob_table()).reverts) == {"room"}
        monkeypatch.setattr(desk, "_record", write)
        await until(lambda: any(r.verb == "expire" and r.result == "done" for r in read_audit(room.audit)), "the third")
        await room.node.start(late, "rollout/1")
        await until(lambda: late.desk.values["room"] == engine.desk.values["room"] == 8, "the old value")


async def test_a_value_for_a_time_goes_back_after_a_resume_and_undo_leaves_what_was_restored(tmp_path: Path) -> None:
    live = kept(
        live_knob("room", 5, 1), live_knob("room", 2, 2, for_s=1.0), live_knob("lr", 2e-3, 3, at=5, for_steps=4),
        live_knob("level", "DEBUG", 4),
    )  # fmt: skip
    engine = Engine()
    beside = {"rollout/0": engine, "buffer": Buffer(tmp_path / "ledger.sqlite")}
    async with open_room(tmp_path, live, 5, beside=beside) as room:
        assert "no change to take back" in (await room.ref.undo(WHO, "", 0)).refused
        assert engine.desk.values["level"] == "DEBUG"
        await until(lambda: engine.desk.values["room"] == 5, "its time is over")
        await until(lambda: max(room.trainer.steps, default=-1) > 9, "the steps are over")
        assert [room.trainer.steps[n]["lr"] for n in range(5, 11)] == [2e-3] * 4 + [1e-3] * 2
