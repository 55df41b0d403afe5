"""Tokens outlive the engine that made them: a stream that breaks, an engine that is lost, an actor that is killed."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from tests.actors.data_floor import GateEngine, data_floor
from tests.harness.dumps import whole_groups
from tests.harness.waiting import until
from tests.harness.waits import waits

from myxa.actors.buffer.buffer import Buffer
from myxa.actors.buffer.cursor import POISON
from myxa.actors.ledger.file import Row, decode_partial
from myxa.actors.workflows.episode import WorkflowContext
from myxa.core.errors import EngineError, MessageTooLarge
from myxa.core.messages import GroupFinished, PutResult
from myxa.core.protocols import Delta, GenerateRequest
from myxa.core.samples import Group, Prompt, Sample


def breaking(engine: Any, *, times: int) -> Any:
    """That engine; when the gate opens, so many streams break instead of going on."""
    whole, left = engine.generate, [times]

    async def generate(request: GenerateRequest) -> AsyncIterator[Delta]:
        async for delta in whole(request):
            if delta.finish is not None and left[0] > 0:
                left[0] -= 1
                raise EngineError("the stream broke after 1 tokens")
            yield delta

    engine.generate = generate
    return engine


def finished(folder: Path) -> list[tuple[Row, Group]]:
    """Of the ledger, by number."""
    return sorted(whole_groups(folder / "ledger.sqlite"), key=lambda found: found[0].group_id)


def saved(floor: Any, group_id: int) -> list[int]:
    """Tokens of each unfinished sample that the ledger has of a group."""
    data = floor.buffer_actor._groups.ledger.payload(group_id)
    return [] if data is None else [int(s.response_ids.size) for s in decode_partial(group_id, data)]


@pytest.mark.parametrize("is_too_large", [False, True])
async def test_groups_that_finish_while_a_message_is_under_way_go_together_each_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_too_large: bool
) -> None:
    """A message that is too large is sent again, a group at a time."""
    put, sizes, held = Buffer.put_groups, list[int](), asyncio.Event()

    async def slow(self: Buffer, finished: tuple[GroupFinished, ...], rollout: str) -> tuple[PutResult, ...]:
        sizes.append(len(finished))
        await held.wait()
        if is_too_large and len(finished) > 1:
            raise MessageTooLarge("too large")
        return await put(self, finished, rollout)

    monkeypatch.setattr(Buffer, "put_groups", slow)
    async with data_floor(tmp_path) as floor:
        engine = await floor.add(max_groups=4)
        await until(lambda: engine.open == 8, "four groups")
        engine.gate.set()
        await until(lambda: bool(sizes), "the first message")
        assert not finished(tmp_path), "none is whole yet"
        await asyncio.sleep(0.2)
        held.set()
        await floor.until_states(lambda states: states.get("READY", 0) >= 4, "they are ready")
        assert not floor.node.failed.done()
    assert max(sizes) > 1 and (is_too_large or sum(sizes[:2]) >= 4), sizes
    assert not is_too_large or sizes.count(1) >= 4, sizes
    assert [row.group_id for row, _ in finished(tmp_path)[:4]] == [0, 1, 2, 3]


@pytest.mark.parametrize("method", ["put_groups", "return_group"])
async def test_a_group_beyond_a_message_costs_that_group_or_its_tokens_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    done = getattr(Buffer, method)

    async def limited(self: Buffer, message: Any, *more: str) -> Any:
        is_large = bool(message.partial) if method == "return_group" else any(m.group.group_id == 1 for m in message)
        if is_large:
            raise MessageTooLarge("too large")
        return await done(self, message, *more)

    monkeypatch.setattr(Buffer, method, limited)
    async with data_floor(tmp_path) as floor:
        engine = await floor.add(engine=breaking(GateEngine(), times=method == "return_group"), max_groups=2)
        await until(lambda: engine.open == 4, "two groups")
        engine.gate.set()
        await floor.until_states(lambda states: states.get("READY", 0) >= 3, "others are ready")
        dropped = (await floor.buffer.stats()).dropped
        assert not floor.node.failed.done()
    ready = {row.group_id: row.attempt for row, _ in finished(tmp_path)}
    if method == "put_groups":
        assert dropped == {"workflow-error": 1} and ready.keys() >= {0, 2, 3}
    else:
        assert not dropped and sorted((ready[0], ready[1])) == [1, 2]


async def test_a_group_whose_stream_broke_goes_on_with_all_its_members_tokens(tmp_path: Path) -> None:
    """One stream of two breaks: the group is handed back whole, drawn again and finished; the engine is kept."""
    async with data_floor(tmp_path) as floor:
        engine = await floor.add(engine=breaking(GateEngine(), times=1), max_groups=1)
        await until(lambda: engine.open == 2, "the first group")
        engine.gate.set()
        await floor.until_states(lambda states: states.get("READY", 0) >= 1, "it is ready")
        (row, first), *_ = finished(tmp_path)
        assert row.attempt == 2 and [s.response_ids.size for s in first.samples] == [6, 6]
        again = [request for request in engine.requests if ".a2.0." in request.request_id]
        assert again and all(int(request.input_ids[-1]) == 7 for request in again), "it began with what it had"
        assert floor.rollouts["rollout/0"].counts["num_breaks"] == 1
        assert not (await floor.buffer.stats()).dropped


def sick(engine: Any, *, for_group: str) -> Any:
    """That engine; streams of such a group (a pattern) break before their first token."""
    whole = engine.generate

    async def generate(request: GenerateRequest) -> AsyncIterator[Delta]:
        if re.search(rf"\.a\d+\.{for_group}\.", request.request_id):
            raise EngineError("the stream broke after 0 tokens")
        async for delta in whole(request):
            yield delta

    engine.generate = generate
    engine.gate.set()
    return engine


def mute(engine: Any, *, for_group: str) -> Any:
    """That engine; such a group waits for its first token, as one in a queue does."""
    whole, engine.num_mute = engine.generate, 0

    async def generate(request: GenerateRequest) -> AsyncIterator[Delta]:
        if re.search(rf"\.a\d+\.{for_group}\.", request.request_id):
            engine.num_mute += 1
            await asyncio.Event().wait()
        async for delta in whole(request):
            yield delta

    engine.generate = generate
    return engine


async def test_a_group_that_breaks_all_streams_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the engine goes on, and finishes others in between."""
    monkeypatch.setattr("myxa.actors.rollout.rollout.TIMEOUTS", waits(rollout={"loss_s": 0.05}))
    async with data_floor(tmp_path) as floor:
        await floor.add(engine=sick(GateEngine(), for_group="0"), max_groups=2)
        async with asyncio.timeout(30):
            while (await floor.buffer.stats()).dropped.get(POISON, 0) < 1:
                await asyncio.sleep(0.01)
        row = floor.buffer_actor._groups.ledger.find(0)
        assert row is not None and row.reason == POISON and (await floor.buffer.stats()).dropped == {POISON: 1}


async def test_an_engine_that_breaks_all_streams_ends_its_actor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("myxa.actors.rollout.rollout.TIMEOUTS", waits(rollout={"loss_s": 0.02}))
    async with data_floor(tmp_path) as floor:
        await floor.add(engine=sick(GateEngine(), for_group=r"\d+"), max_groups=2)
        async with asyncio.timeout(30):
            error = await floor.node.failed
        assert "20 of the last 20 groups were lost" in str(error)
        assert not (await floor.buffer.stats()).dropped


async def test_tokens_so_far_are_in_the_ledger_for_whoever_goes_on_after_a_kill(tmp_path: Path) -> None:
    """What a SIGKILL leaves: the buffer hears that the actor is gone, and nothing from itself."""
    async with data_floor(tmp_path) as floor:
        doomed = GateEngine()
        doomed.token, doomed.logprob = 9, -0.25
        await floor.add("rollout/0", engine=doomed, max_groups=2, save_partials_s=0.05)
        await until(lambda: doomed.open == 4 and saved(floor, 0) == saved(floor, 1) == [1, 1], "all four tokens saved")
        assert (await floor.states()) == {"DISPATCHED": 2}, "and the groups go on"
        epoch = floor.rollouts["rollout/0"].ctx.epoch
        floor.rollouts["rollout/0"].is_draining = True
        assert await floor.buffer.rollout_gone("rollout/0", epoch) == 2
        heir = await floor.add("rollout/1", max_groups=2)
        await until(lambda: heir.open == 4, "the same groups")
        assert {int(request.input_ids[-1]) for request in heir.requests} == {9}
        assert {request.sampling.max_new_tokens for request in heir.requests} == {5}
        doomed.gate.set()  # the dead come back: their word has no effect
        heir.gate.set()
        await floor.until_states(lambda states: states.get("READY", 0) >= 2, "both are ready")
        theirs = finished(tmp_path)[:2]
        assert [row.rollout for row, _ in theirs] == ["rollout/1", "rollout/1"]
        for sample in (sample for _, group in theirs for sample in group.samples):
            assert sample.response_ids.tolist() == [9, 7, 7, 7, 7, 7], "what was saved, and on from there"
            assert sample.logprobs.tolist() == [-0.25, -0.5, -0.5, -0.5, -0.5, -0.5], "as they were sampled"
            assert sample.versions.tolist() == [0] * 6 and sample.loss_mask.tolist() == [1] * 6


class FirstTurns(GateEngine):
    """Ends every first turn with the end token, and keeps second ones open as its parent does."""

    def __init__(self, end: int) -> None:
        super().__init__()
        self.token, self.turn = 9, [9, 9, end]

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        ids = request.input_ids.tolist()
        if self.turn in [ids[at : at + 3] for at in range(len(ids))]:
            async for delta in super().generate(request):
                yield delta
        else:
            yield replace(self._delta(3, "stop"), output_ids=np.asarray(self.turn, np.int32))


async def two_turns(ctx: WorkflowContext, prompt: Prompt) -> Sample:
    await ctx.episode.generate()
    assert ctx.episode.reply("user", "and then?")
    await ctx.episode.generate()
    return ctx.episode.sample()


async def test_a_turn_that_ended_is_not_drawn_again_after_a_kill(tmp_path: Path) -> None:
    """Of a rollout of several turns, as agents have them: what was saved is replayed, with the reply between."""
    async with data_floor(tmp_path) as floor:
        doomed = FirstTurns(min(floor.tokenizer.eos_token_ids))
        await floor.add("rollout/0", engine=doomed, workflow=two_turns, save_partials_s=0.05)
        await until(lambda: doomed.open == 2, "two second turns")
        num_before = len(doomed.requests[0].input_ids)
        await until(lambda: len(saved(floor, 0)) == 2 and min(saved(floor, 0)) > 4, "both are saved")
        floor.rollouts["rollout/0"].is_draining = True
        assert await floor.buffer.rollout_gone("rollout/0", floor.rollouts["rollout/0"].ctx.epoch) == 1
        heir = await floor.add("rollout/1", workflow=two_turns)
        await until(lambda: heir.open == 2, "the same group")
        assert [len(request.input_ids) for request in heir.requests] == [num_before + 1] * 2, (
            "one token of the second turn"
        )
        heir.gate.set()
        await floor.until_states(lambda states: states.get("READY", 0) >= 1, "ready")
        ((row, group), *_) = finished(tmp_path)
        assert row.rollout == "rollout/1"
        for sample in group.samples:
            drawn = sample.response_ids[sample.loss_mask == 1].tolist()
            assert drawn == [*doomed.turn, 9, 7, 7, 7, 7, 7] and sample.response_ids[:3].tolist() == doomed.turn


class Trickle(GateEngine):
    """A token every few milliseconds, without end."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        while True:
            yield self._delta(1, None)
            await asyncio.sleep(0.005)


async def test_saving_takes_a_bounded_share_of_the_buffer_however_many_actors_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_actors, each_s, saves = 16, 0.01, list[float]()
    async with data_floor(tmp_path, batch_size=num_actors, max_new_tokens=4096) as floor:
        take_back = floor.buffer_actor._groups.take_back

        def slow(*args: Any) -> bool:
            saves.append(time.monotonic())
            time.sleep(each_s)
            return take_back(*args)

        monkeypatch.setattr(floor.buffer_actor._groups, "take_back", slow)
        for index in range(num_actors):
            await floor.add(f"rollout/{index}", engine=Trickle(), save_partials_s=0.01)
        await until(lambda: len(saves) >= num_actors, "each has saved")
        began_s, began = time.monotonic(), len(saves)
        await asyncio.sleep(2.0)
        share = (len(saves) - began) * each_s / (time.monotonic() - began_s)
        assert 0.0 < share < 0.2, share


async def test_a_draw_says_whose_weights_the_engine_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when nobody heard that it adopted them: the number alone is not enough after the trainer went back."""
    async with data_floor(tmp_path) as floor:
        asked: list[Any] = []
        note = floor.buffer_actor._groups.note_report
        monkeypatch.setattr(
            floor.buffer_actor._groups, "note_report", lambda request: asked.append(request) or note(request)
        )
        await floor.add("rollout/0", max_groups=1, lineage=4)
        await until(lambda: bool(asked), "it draws")
        assert {(request.version, request.lineage) for request in asked} == {(0, 4)}


async def test_a_fence_for_another_incarnation_is_refused(tmp_path: Path) -> None:
    async with data_floor(tmp_path) as floor:
        engine = await floor.add("rollout/0", max_groups=1)
        await until(lambda: engine.open == 2, "a group")
        assert not await floor.ref().fence(floor.rollouts["rollout/0"].ctx.epoch - 1, "it stood still")
        engine.gate.set()
        await floor.until_states(lambda states: states.get("READY", 0) >= 1, "it goes on")


async def test_a_fenced_actor_hands_its_groups_back_before_it_fails(tmp_path: Path) -> None:
    async with data_floor(tmp_path) as floor:
        engine = await floor.add("rollout/0", max_groups=2, save_partials_s=0.0)
        await until(lambda: engine.open == 4, "two groups")
        await floor.ref().fence(floor.rollouts["rollout/0"].ctx.epoch, "it stood still in a weight update")
        await floor.until_states(lambda states: states.get("REQUEUED") == 2, "handed back")
        assert saved(floor, 0) == saved(floor, 1) == [1, 1]
        poison = floor.buffer_actor._groups.poison
        assert 0 not in poison and 1 not in poison, "that was no doing of theirs"


async def test_groups_in_hand_when_an_engine_is_lost_are_counted(tmp_path: Path) -> None:
    async with data_floor(tmp_path) as floor:
        engine: Any = GateEngine()
        is_lost = asyncio.Event()

        async def until_lost() -> None:
            await is_lost.wait()
            raise EngineError("the server is gone")

        engine.until_lost = until_lost
        await floor.add("rollout/0", engine=mute(engine, for_group="1"), max_groups=2, save_partials_s=0.0)
        await until(lambda: engine.open == 2 and engine.num_mute == 2, "two groups")
        is_lost.set()
        await floor.until_states(lambda states: states.get("REQUEUED") == 2, "handed back")
        poison = floor.buffer_actor._groups.poison
        assert 0 not in poison and 1 in poison, "unless they brought tokens"


@pytest.mark.parametrize("how", ["raises", "hangs"])
async def test_the_engine_is_closed_whatever_becomes_of_the_rewards_workers(tmp_path: Path, how: str) -> None:
    async with data_floor(tmp_path) as floor:
        engine, closed = GateEngine(), asyncio.Event()

        async def close_engine() -> None:
            closed.set()

        async def close_scorer() -> None:
            if how == "raises":
                raise RuntimeError("its workers are in a bad way")
            await closed.wait()

        engine.close = close_engine
        await floor.add("rollout/0", engine=engine)
        floor.rollouts["rollout/0"].scorer.close = close_scorer
        await until(lambda: engine.open == 2, "a group")
        await floor.node.stop("rollout/0")
        assert closed.is_set()
