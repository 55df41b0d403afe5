"""Knobs of rollout actors: when they act, what they do to groups that are under way, and that nothing is lost by them."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import pytest
from tests.actors.data_floor import PER_TURN, GateEngine, data_floor
from tests.harness.waiting import WAIT_S, until

from myxa.core.samples import Prompt, Sample


def values_of(sheet: Any) -> dict[str, Any]:
    return {state.tunable.name: state.value for state in sheet.knobs}


async def test_an_actor_without_a_running_engine_answers_and_uses_what_it_was_told(tmp_path: Path) -> None:
    async with data_floor(tmp_path) as floor:
        engine = GateEngine()
        engine.may_start.clear()
        await floor.add(engine=engine, max_groups=1, serves=None)
        values = values_of(await floor.ref().knobs())
        assert values.items() >= {"concurrency": 1, "workflow_timeout_s": 600.0, "max_error_rate": 0.1}.items()
        assert values.items() >= {"pause_mode": "in_place"}.items()
        await floor.change("rollout/0", 1, concurrency=3, workflow_timeout_s=7.0, pause_mode="abort")
        engine.may_start.set()
        await floor.serve("rollout/0", 0)
        await until(lambda: engine.open == 3 * 2, "three groups of two")
        assert floor.rollouts["rollout/0"].options.rollout.timeout_s == 7.0
        assert engine.pause_mode == "abort"
        assert (await floor.ref().knobs()).epoch == 1


async def test_more_room_is_used_at_once_and_less_lets_groups_end(tmp_path: Path) -> None:
    async with data_floor(tmp_path, batch_size=8) as floor:
        engine = await floor.add(max_groups=1)
        await until(lambda: engine.open == 2, "the first group")
        before = time.monotonic()
        await floor.change("rollout/0", 1, concurrency=5)
        await until(lambda: engine.open == 10, "five groups")
        assert time.monotonic() - before < WAIT_S / 2, "not by the next long poll"
        await floor.change("rollout/0", 2, concurrency=2)
        await asyncio.sleep(0.1)
        assert engine.open == 10, "running groups are left alone"
        engine.most_open = 0
        engine.gate.set()
        await floor.until_states(lambda s: s.get("READY", 0) >= 20, "work goes on")
        await until(lambda: engine.most_open > 0, "requests")
        # The five that ran end one by one; from then on there are two.
        engine.most_open = 0
        await floor.until_states(lambda s: s.get("READY", 0) >= 28, "work goes on")
        assert engine.most_open <= 4
        assert (await floor.buffer.stats()).dropped == {}


async def test_work_that_was_on_its_way_when_the_room_went_is_handed_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with data_floor(tmp_path, batch_size=8) as floor:
        await floor.pause()
        asked, waits = list[int](), floor.buffer_actor._groups.waits
        monkeypatch.setattr(
            floor.buffer_actor._groups,
            "waits",
            lambda request, why: asked.append(request.max_groups) or waits(request, why),
        )
        engine = await floor.add(max_groups=6)
        await until(lambda: 6 in asked, "it waits in a draw for six groups")
        await floor.change("rollout/0", 2, concurrency=2)
        await floor.pause(-1)
        await until(lambda: engine.open == 4, "two groups")
        await floor.until_states(lambda s: s == {"DISPATCHED": 2, "REQUEUED": 4}, "four came back")
        engine.gate.set()
        await floor.until_states(lambda s: s.get("READY", 0) >= 6, "they are continued")
        assert engine.most_open == 4
        claim = await floor.buffer.claim(0, WAIT_S)
        assert list(claim.groups) == list(range(8))


async def test_a_sample_that_takes_too_long_is_judged_by_the_value_in_force_when_it_began(tmp_path: Path) -> None:
    async def slow(ctx: Any, prompt: Prompt) -> Sample:
        await asyncio.sleep(0 if prompt.row else 3600)
        await ctx.episode.generate()
        return ctx.episode.sample()

    async with data_floor(tmp_path) as floor:
        engine = await floor.add(max_groups=1, workflow=slow, timeout_s=0.2, max_error_rate=1.0)
        engine.gate.set()
        await floor.until_states(lambda s: s.get("DROPPED", 0) == 1, "row 0 is given up")
        assert (await floor.buffer.stats()).dropped == {"workflow-error": 1}
        assert (await floor.change("rollout/0", 1, workflow_timeout_s=0.0)).accepted is False
        assert (await floor.change("rollout/0", 2, max_error_rate=1.5)).accepted is False
        assert (await floor.change("rollout/0", 3, max_error_rate=0.5, workflow_timeout_s=9.0)).accepted
        rollout = floor.rollouts["rollout/0"]
        assert (rollout._budget.lost.max_rate, rollout.options.rollout.timeout_s) == (0.5, 9.0)


async def test_samples_keep_their_temperature_in_another_engine(tmp_path: Path) -> None:
    """Drawn at 1.0 with one token each, drained after the knob moved to 0.25, continued by another actor."""
    async with data_floor(tmp_path, batch_size=2) as floor:
        first = await floor.add("rollout/0", max_groups=1)
        await until(lambda: first.open == 2, "a group")
        await floor.change("buffer", 4, temperature=0.25)
        assert await floor.ref("rollout/0").drain() == 1
        await floor.until_states(lambda s: s == {"REQUEUED": 1}, "handed back")
        assert (await floor.ref("rollout/0").status()).draining
        second = await floor.add("rollout/1", max_groups=2)
        second.gate.set()
        claim = await floor.buffer.claim(0, WAIT_S)
        old, new = await floor.buffer.fetch(tuple(claim.groups))
        assert [(g.group_id, g.knobs, {s.temperature for s in g.samples}) for g in (old, new)] == [
            (0, 0, {1.0}), (1, 4, {0.25}),
        ]  # fmt: skip
        assert len(first.requests) == 2, "nothing was begun after the drain"
        asked = {r.request_id.split(".")[-3]: r.sampling for r in second.requests}
        assert (asked["0"].temperature, asked["0"].max_new_tokens) == (1.0, PER_TURN - 1), "one token was there"
        assert (asked["1"].temperature, asked["1"].max_new_tokens) == (0.25, PER_TURN)
        assert {len(s.response_ids) for g in (old, new) for s in g.samples} == {PER_TURN}


async def test_time_is_booked_by_what_is_waited_for(tmp_path: Path) -> None:
    async with data_floor(tmp_path, batch_size=2, max_staleness=0) as floor:
        engine = await floor.add(max_groups=8)
        meter = floor.rollouts["rollout/0"]._meter
        state = lambda: (meter.kind, meter._state.name)  # noqa: E731
        await until(lambda: state() == ("compute", "generate"), "generation")
        await floor.change("rollout/0", 1, concurrency=2)
        await until(lambda: state() == ("compute", "generate at limit"), "no more room")
        await floor.change("rollout/0", 2, concurrency=8)
        await until(lambda: state() == ("compute", "generate"), "room")
        engine.gate.set()
        await until(lambda: state() == ("wait-capacity", "draw"), "held back by staleness")
        await floor.pause()
        await until(lambda: state() == ("paused", "paused"), "the pause")
        await floor.pause(-1)
        await until(lambda: state() == ("wait-capacity", "draw"), "the end of the pause")
        engine.gate.clear()
        assert (await floor.buffer.claim(0, WAIT_S)).groups
        await floor.buffer.trained(0)
        await until(lambda: state() == ("wait-weights", "adopt"), "a version that it lacks")
        await floor.serve("rollout/0", 1)
        await until(lambda: state() == ("compute", "generate"), "work again")
        assert await floor.ref().drain() == 2
        await until(lambda: state() == ("paused", "drained"), "the drain")
        await floor.pause()
        buffer = floor.buffer_actor._meter
        assert (buffer.kind, buffer._state.name) == ("paused", "paused")
        totals = meter.named_totals()
        assert totals.keys() >= {"other/start", "wait-weights/first weights", "compute/generate", "paused/paused"}
        unnamed = sum(meter.totals().values()) - sum(totals.values())
        assert unnamed < 0.05 * sum(meter.totals().values())


async def test_random_changes_of_room_lose_and_double_nothing(tmp_path: Path) -> None:
    """Two actors, their room and the sampling changed all the time, one drained and replaced in the middle."""
    seed = 5
    print(f"seed {seed}")
    rng = random.Random(seed)
    async with data_floor(tmp_path, batch_size=4, max_staleness=2) as floor:
        for name in ("rollout/0", "rollout/1"):
            (await floor.add(name, max_groups=3)).gate.set()
        trained: list[int] = []
        epoch, rooms = 0, dict.fromkeys(floor.engines, 3)
        for step in range(12):
            for _ in range(rng.randrange(6)):
                epoch += 1
                name = rng.choice([*floor.engines, "buffer"])
                if name == "buffer":
                    await floor.change(
                        name, epoch, temperature=rng.choice([0.5, 1.0, 2.0]), num_samples=rng.randrange(1, 4)
                    )
                else:
                    rooms[name] = rng.randrange(1, 9)
                    await floor.change(name, epoch, concurrency=rooms[name])
                await asyncio.sleep(rng.choice([0, 0, 0.002]))
            if step == 6:
                await floor.ref("rollout/0").drain()
                (await floor.add("rollout/2", max_groups=2, serves=step)).gate.set()
            claim = await floor.buffer.claim(step, WAIT_S)
            assert len(claim.groups) == 4, claim
            ids = tuple(claim.groups)
            for group in await floor.buffer.fetch(ids):
                assert 0 <= group.knobs <= epoch
                assert len({sample.temperature for sample in group.samples}) == 1
            trained += ids
            await floor.buffer.trained(step)
            for name in floor.engines:
                await floor.serve(name, step + 1)
        stats = await floor.buffer.stats()
        assert len(set(trained)) == len(trained) == 48
        assert stats.dropped == {}
        assert sum(stats.states.values()) == stats.drawn, "every draw is in one state"
        in_hand = set(range(stats.drawn)) - set(trained)
        assert len(in_hand) == sum(n for state, n in stats.states.items() if state != "TRAINED")
