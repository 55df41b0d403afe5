"""New requests come after a head start of those that were running; and what an update's answer says is believed."""

from __future__ import annotations

import asyncio
import time

import pytest

from myxa.actors.engines.sglang.engine import HeadStart
from myxa.actors.engines.sglang.weight_route import announces


@pytest.mark.asyncio
async def test_nobody_waits_without_a_pause_before():
    start = HeadStart(30.0)
    async with asyncio.timeout(5):
        await start.over()


@pytest.mark.asyncio
async def test_whoever_comes_after_a_pause_waits_for_the_rest_of_the_head_start_only():
    start = HeadStart(0.05)
    start.begin()
    begun = time.monotonic()
    await asyncio.gather(start.over(), start.over())
    assert time.monotonic() - begun >= 0.045
    async with asyncio.timeout(5):
        start.begin()
        await asyncio.sleep(0.06)
        begun_again = asyncio.get_running_loop().time()
        await start.over()
        assert asyncio.get_running_loop().time() - begun_again < 5


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"success": True, "message": "Success Weight version updated to 12."}, True),
        ({"success": True, "message": "Weight version updated to 12", "new_version": "12"}, True),
        ({"success": True, "message": "Success Weight version updated to 120."}, False),
        ({"success": True, "message": "Success Weight version updated to 1."}, False),
        ({"success": True, "message": "Succeeded to update parameter online."}, False),
        ({"success": True, "message": None}, False),
        ({}, False),
    ],
)
def test_only_an_answer_that_names_the_version_saves_the_question(answer: dict[str, object], said: bool):
    assert announces(answer, 12) is said
