"""A buffer over several sources, on a real node: what an operator may say of their shares and of the window, and what a
run hears of it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from tests.buffer.conftest import make_group
from tests.buffer.mixed_rows import mixed

from myxa.actors.buffer.cursor import Window
from myxa.actors.buffer.knobs import BufferLimits
from myxa.core.config import RunConfig
from myxa.core.messages import GroupFinished
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
    ({"difficulty_high": float("inf")}, "difficulty_high"),
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
        window = {"difficulty_low", "difficulty_high"}
        assert window & set(await knobs_of(desk)) == (set() if kind == "sft" else window)
        vote = await desk.change(1, difficulty_low=0.2, difficulty_high=0.8)
        assert vote.accepted is (kind != "sft")
        assert vote.accepted or "no knob 'difficulty_" in vote.reason


async def test_a_window_is_looked_through_within_one_draw(shop: Any) -> None:
    """One good prompt of 1010: more than one round of the search, in which others have their turn."""
    window = Window(0.2, 0.8)
    rows = mixed(only=1010).by_name["only"]
    limits = BufferLimits(difficulty=window)
    async with shop.open(rows=rows, max_staleness=2000, limits=limits, group_filter="zero_variance") as desk:
        groups = [
            make_group(assignment, rewards=[0.0, 1.0] if assignment.prompt.row == 1009 else [1.0, 1.0])
            for assignment in (await desk.draw(max_groups=1010)).assignments
        ]
        await desk.ref.put_groups(tuple(GroupFinished(group=group, attempt=1) for group in groups), "rollout/0")
        (found,) = (await desk.draw(max_groups=1, wait_s=WAIT_S)).assignments
        assert (found.prompt.row, found.prompt.pass_index) == (1009, 1)
        stats = await desk.ref.stats()
        assert stats.dropped == {"zero_variance": 1009, "out-of-window": 1009}
        assert desk.buffer._groups.gauges()["buffer/dropped/out-of-window"] == 1009
