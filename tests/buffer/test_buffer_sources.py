"""A buffer over several sources, on a real node: what an operator may say of their shares and of the window, and what a
run hears of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.buffer.conftest import make_group
from tests.buffer.mixed_rows import mixed

from myxa.actors.buffer.difficulty import Window
from myxa.actors.buffer.knobs import BufferLimits
from myxa.core.config import RunConfig
from myxa.core.errors import DataError
from myxa.launch.program import buffer_limits

WAIT_S = 20.0


def names(reply: Any) -> list[str]:
    return [assignment.prompt.source_name for assignment in reply.assignments]


async def knobs_of(desk: Any) -> dict[str, Any]:
    return {state.tunable.name: state.value for state in (await desk.ref.knobs()).knobs}


async def test_the_mix_is_used_from_the_next_draw_on_and_outlives_the_process(shop: Any) -> None:
    rows = mixed(code=50, math=50)
    async with shop.open(rows=rows, max_staleness=30) as desk:
        assert (await knobs_of(desk))["mix"] == "code:1,math:1"
        assert names(await desk.draw(max_groups=4)) == ["code", "math"] * 2
        assert (await desk.change(1, mix="math:3, code:1")).accepted
        drawn = Counter(names(await desk.draw(max_groups=8)))
        assert drawn == {"math": 6, "code": 2}
        assert (await desk.change(2, mix="math:1,code:0")).accepted
        assert set(names(await desk.draw(max_groups=3))) == {"math"}
        gauges = desk.buffer._groups.gauges()
        assert (gauges["buffer/source/math/share"], gauges["buffer/source/code/share"]) == (1.0, 0.0)
        assert (gauges["buffer/source/math/drawn"], gauges["buffer/source/code/drawn"]) == (11.0, 4.0)
        assert "buffer/source/math/reward" not in gauges
        canaries = await desk.data.canary_prompts(3)
        assert [(p.source_name, p.row) for p in canaries] == [("code", 0), ("math", 0), ("code", 1)]
        assert len({p.group_id for p in canaries}) == 3
    async with shop.open(rows=rows, max_staleness=30) as desk:
        assert (await knobs_of(desk))["mix"] == "math:1,code:0"
        reply = await desk.draw(max_groups=25)
        assert set(names(reply)[15:]) == {"math"}, "after those that were under way"


async def test_a_run_with_one_source_has_no_mix(shop: Any) -> None:
    async with shop.open() as desk:
        assert "mix" not in await knobs_of(desk)
        vote = await desk.change(1, mix="math:1")
        assert not vote.accepted and "no knob 'mix'" in vote.reason


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"mix": "math:1,cod:1"}, "'cod'"),
    ({"mix": "math:1,code:-1"}, "code"),
    ({"mix": "math:0,code:0"}, "mix"),
    ({"mix": "math:1"}, "code"),
    ({"mix": 0.5}, "mix"),
    ({"difficulty_low": 0.5}, "difficulty_high"),
    ({"difficulty_high": float("inf")}, "difficulty_high"),
    ({"difficulty_skips": -1}, "difficulty_skips"),
    ({"difficulty_skips": 101}, "difficulty_skips"),
]


async def test_what_is_no_mix_and_no_window_is_refused(shop: Any) -> None:
    async with shop.open(rows=mixed(code=5, math=5)) as desk:
        before = await desk.ref.knobs()
        for epoch, (values, named) in enumerate(REFUSED, 1):
            vote = await desk.change(epoch, **values)
            assert not vote.accepted and named in vote.reason, (values, vote.reason)
            assert await desk.ref.knobs() == before


@pytest.mark.parametrize("kind", ["sft", "grpo"])
async def test_a_window_can_be_set_where_there_are_rewards(shop: Any, kind: str) -> None:
    """As the run file says: learning from demonstrations has none."""
    rest = {"data": {"train": "d.jsonl", "preset": "chat"}, "algo": {"kind": kind}}
    if kind == "sft":
        rest["rollout"] = {"workflow": "demonstration"}
    limits = buffer_limits(RunConfig.model_validate({"model": {"path": "m"}, **rest}))
    async with shop.open(limits=limits) as desk:
        window = {"difficulty_low", "difficulty_high", "difficulty_skips"}
        assert window & set(await knobs_of(desk)) == (set() if kind == "sft" else window)
        vote = await desk.change(1, difficulty_low=0.2, difficulty_high=0.8)
        assert vote.accepted is (kind != "sft")
        assert vote.accepted or "no knob 'difficulty_" in vote.reason


async def test_a_window_is_looked_through_within_one_draw(shop: Any) -> None:
    """One good prompt of 1010: more than one round of the search, in which others have their turn."""
    window = Window(low=0.2, high=0.8, skips=0)
    rows = mixed(only=1010).by_name["only"]
    limits = BufferLimits(difficulty=window)
    async with shop.open(rows=rows, max_staleness=2000, limits=limits, group_filter="zero_variance") as desk:
        for assignment in (await desk.draw(max_groups=1010)).assignments:
            rewards = [0.0, 1.0] if assignment.prompt.row == 1009 else [1.0, 1.0]
            await desk.put_group(make_group(assignment, rewards=rewards), 1, "rollout/0")
        (found,) = (await desk.draw(max_groups=1, wait_s=WAIT_S)).assignments
        assert (found.prompt.row, found.prompt.pass_index) == (1009, 1)
        stats = await desk.ref.stats()
        assert stats.dropped == {"zero_variance": 1009, "out-of-window": 1009}
        assert desk.buffer._groups.gauges()["buffer/dropped/out-of-window"] == 1009


async def test_a_pause_ends_a_search(shop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draw that is held looks again when something changes, not for ever."""
    limits = BufferLimits(difficulty=Window(low=0.2, high=0.8, skips=1 << 20))
    async with shop.open(rows=mixed(only=4).by_name["only"], max_staleness=9, limits=limits) as desk:
        for assignment in (await desk.draw(max_groups=4)).assignments:
            await desk.put_group(make_group(assignment, rewards=[1.0, 1.0]), 1, "rollout/0")
        store, looks = desk.buffer._groups, 0
        look = store.draw

        def counted(*args: Any, **options: Any) -> Any:
            nonlocal looks
            looks += 1
            return look(*args, **options)

        monkeypatch.setattr(store, "draw", counted)
        held = asyncio.create_task(desk.draw(max_groups=1, wait_s=WAIT_S))
        async with asyncio.timeout(WAIT_S):
            while not store.cursor.is_searching:
                await asyncio.sleep(0.001)
            await desk.ref.set_paused(True)
        looks, num_draws = 0, store.ledger.draws.next_draw
        await asyncio.sleep(0.3)
        assert looks <= 1 and store.ledger.draws.next_draw == num_draws and not held.done()
        await desk.ref.set_paused(False)
        await asyncio.sleep(0.1)
        assert store.ledger.draws.next_draw > num_draws, "it goes on where it was"
        held.cancel()


@pytest.mark.parametrize("edited", [Window(low=0.1, high=0.1), Window(skips=4)])
async def test_a_window_that_was_made_by_knobs_and_ended_the_run_is_taken_back_in_the_run_file(
    shop: Any, edited: Window, tmp_path: Path
) -> None:
    """As the error says; then the run is resumed."""
    rows = mixed(only=4).by_name["only"]
    async with shop.open(rows=rows, max_staleness=90) as desk:
        for assignment in (await desk.draw(max_groups=4)).assignments:
            await desk.put_group(make_group(assignment, rewards=[1.0, 1.0]), 1, "rollout/0")
        assert (await desk.change(1, difficulty_low=0.2, difficulty_high=0.8, difficulty_skips=0)).accepted
        with pytest.raises(Exception, match="`myxa set`"):
            await desk.draw(max_groups=1)
        assert isinstance(await desk.failure(), DataError)
    async with shop.open(rows=rows, max_staleness=90) as desk:
        with pytest.raises(Exception, match="outside the difficulty window"):
            await desk.draw(max_groups=1)
    resumed = type(shop)(tmp_path / "resumed.sqlite", run="run-2")
    limits = BufferLimits(difficulty=edited)
    async with resumed.open(rows=rows, max_staleness=90, limits=limits, resume_from=shop.path) as desk:
        assert len((await desk.draw(max_groups=1, wait_s=WAIT_S)).assignments) == 1
