"""Knobs of the buffer on a real node: what a change does to groups, what is refused, what a restart remembers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
from tests.buffer.conftest import make_group, make_sample
from tests.harness.decider import news

from myxa.actors.buffer.knobs import BufferLimits
from myxa.actors.contracts import MonitorContract
from myxa.core.messages import GroupReturned, SamplingParams

WAIT_S = 20.0


async def test_the_sheet_tells_every_knob_as_the_run_file_has_it(shop: Any) -> None:
    async with shop.open(max_staleness=3, sampling=SamplingParams(temperature=0.5, max_new_tokens=9)) as desk:
        sheet = await desk.ref.knobs()
        values = {state.tunable.name: state.value for state in sheet.knobs}
        assert (sheet.owner, sheet.epoch) == ("buffer", 0)
        assert values.items() >= {
            "max_staleness": 3, "on_stale": "pace", "temperature": 0.5, "top_p": 1.0, "top_k": -1,
            "max_new_tokens": 9, "num_samples": 2, "group_filter": "own", "stop_token_ids": "none",
        }.items()  # fmt: skip
        for state in sheet.knobs:
            assert state.value == state.first
            assert state.tunable.help.endswith(".")


async def test_groups_are_drawn_under_the_values_in_force_and_keep_them(shop: Any) -> None:
    """One group before the change, one after; both are handed back, continued elsewhere, and the buffer restarts."""
    async with shop.open(max_staleness=3) as desk:
        (before,) = (await desk.draw(max_groups=1)).assignments
        assert (before.knobs, before.sampling.temperature, before.num_samples) == (0, 1.0, 2)
        vote = await desk.change(
            7, temperature=0.7, top_p=0.9, top_k=5, max_new_tokens=8, num_samples=3, stop_token_ids="13, 198"
        )
        assert vote.accepted, vote
        (after,) = (await desk.draw(max_groups=1)).assignments
        drawn = after.sampling
        assert (after.knobs, drawn.temperature, drawn.top_p, drawn.top_k) == (7, 0.7, 0.9, 5)
        assert (drawn.max_new_tokens, after.num_samples, drawn.stop_token_ids) == (8, 3, (13, 198))
        partial = (msgspec.structs.replace(make_sample(0, 1, [0, 0], "abort"), temperature=1.0),)
        for assignment, tokens in ((before, partial), (after, ())):
            group_id = assignment.prompt.group_id
            await desk.ref.return_group(
                GroupReturned(group_id=group_id, attempt=1, rollout="rollout/0", partial=tokens)
            )
        (again,) = (await desk.draw(max_groups=1, rollout="rollout/1")).assignments
        assert (again.prompt.group_id, again.attempt, again.knobs) == (0, 2, 0)
        assert (again.sampling, again.num_samples) == (before.sampling, 2)
        assert await desk.ref.rollout_gone("rollout/1", 1) == 1
    async with shop.open(max_staleness=3) as desk:
        first, second, third = (await desk.draw(max_groups=3, rollout="rollout/2")).assignments
        assert (first.prompt.group_id, first.attempt, first.sampling) == (0, 3, before.sampling)
        assert [sample.text for sample in first.partial] == ["0/1"]
        assert (second.prompt.group_id, second.knobs, second.sampling) == (1, 7, drawn)
        assert (third.prompt.group_id, third.knobs, third.sampling, third.num_samples) == (2, 7, drawn, 3)
        assert (await desk.put(first, rollout="rollout/2")).outcome == "ready"
        group = msgspec.structs.replace(make_group(second), knobs=second.knobs)
        assert (await desk.put_group(group, second.attempt, "rollout/2")).outcome == "ready"
        claim = await desk.ref.claim(0, 0.0)
        fetched = await desk.ref.fetch(tuple(claim.groups))
        assert [(len(g.samples), g.knobs) for g in fetched] == [(2, 0), (3, 7)], "both sizes in one batch"


async def test_values_and_their_epochs_outlive_the_buffer(shop: Any, tmp_path: Path) -> None:
    async with shop.open(max_staleness=4) as desk:
        await desk.change(3, temperature=0.5, max_staleness=1)
        await desk.change(5, num_samples=4, group_filter="zero_variance")
    async with shop.open(max_staleness=4) as desk:
        knobs, sheet = await desk.knobs(), await desk.ref.knobs()
        assert {n: (knobs[n].value, knobs[n].first) for n in ("temperature", "max_staleness", "num_samples")} == {
            "temperature": (0.5, 1.0), "max_staleness": (1, 4), "num_samples": (4, 2),
        }  # fmt: skip
        assert (knobs["group_filter"].value, sheet.epoch) == ("zero_variance", 5)
        desk.buffer.knob_owner.take(news(2, temperature=9.0))  # an older change that comes late
        assert (await desk.knobs())["temperature"].value == 0.5
        await desk.change(6, temperature=0.6)
        assert (await desk.draw(max_groups=1)).assignments[0].knobs == 6
    later = type(shop)(tmp_path / "later.sqlite", run="run-2")
    async with later.open(max_staleness=4, resume_from=shop.path) as desk:
        sheet = await desk.ref.knobs()
        assert (sheet.epoch, [s for s in sheet.knobs if s.value != s.first]) == (0, []), "a resumed run is told anew"
        assert sheet.past_epoch == 6, "groups of the run before carry it"


REFUSED: list[dict[str, Any]] = [
    *({"temperature": value} for value in (0.0, float("nan"))),
    {"top_p": 1.5},
    {"max_new_tokens": 65},
    *({"max_staleness": value} for value in (-1, True)),
    {"on_stale": "hope"},
    {"group_filter": "os:system"},
    {"top_p": 0.0, "temperature": 0.5},
    {"temprature": 0.5},
    *({"stop_token_ids": text} for text in ("", "13,,", ",", "13,-1", "13," + "9" * 5000, "1" + ",1" * 64, 0.5, "320")),
    {"temperature": 1e-6},
    {"num_samples": 17},
]


async def test_what_is_refused_changes_nothing(shop: Any) -> None:
    limits = BufferLimits(max_new_tokens=64, vocab_size=320)
    async with shop.open(max_staleness=2, limits=limits) as desk:
        before = await desk.ref.knobs()
        for epoch, values in enumerate(REFUSED, 1):
            outcome = await desk.change(epoch, **values)
            assert not outcome.accepted, values
            assert any(name in outcome.reason for name in values), (values, outcome.reason)
            assert await desk.ref.knobs() == before


async def test_the_filter_judges_what_is_finished_from_now_on(shop: Any) -> None:
    async with shop.open(max_staleness=3) as desk:
        drawn = (await desk.draw(max_groups=3)).assignments
        flat = [make_group(a, rewards=[1.0, 1.0]) for a in drawn]
        assert (await desk.put_group(flat[0], 1, "rollout/0")).outcome == "ready"
        await desk.change(1, group_filter="zero_variance")
        assert (await desk.put_group(flat[1], 1, "rollout/0")).outcome == "filtered"
        await desk.change(2, group_filter="own")
        assert (await desk.put_group(flat[2], 1, "rollout/0")).outcome == "ready"
        assert (await desk.ref.stats()).dropped == {"zero_variance": 1}


async def test_it_tells_when_a_value_is_in_force(shop: Any, tmp_path: Path) -> None:
    async with shop.open() as desk:
        await desk.change(4, temperature=0.5)
        (told,) = [event for event in desk.buffer._telemetry.drain().events if event.kind == "knob-in-force"]
        assert (
            told.data.items() >= {"name": "temperature", "owner": "buffer", "old": 1.0, "new": 0.5, "epoch": 4}.items()
        )
        monitor = desk.node.ref(MonitorContract, "monitor")
        async with asyncio.timeout(WAIT_S):
            while "buffer/drawn" not in (await monitor.snapshot()).get("buffer", {}):
                await asyncio.sleep(0.01)


# ---- pausing


async def test_a_new_reason_for_waiting_is_told_at_once(shop: Any) -> None:
    async with shop.open(max_staleness=0, batch_size=2) as desk:
        request = {"wait_s": WAIT_S, "rollout": "rollout/0"}
        first = (await desk.draw()).assignments
        waiting = asyncio.ensure_future(desk.draw(**request, blocked_by="staleness"))
        claiming = asyncio.ensure_future(desk.ref.claim(0, WAIT_S, "wait-data"))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        assert not claiming.done()
        assert (await desk.draw(**request, blocked_by="")).blocked_by == "staleness", "answered at once"
        await desk.pause()
        async with asyncio.timeout(WAIT_S / 2):
            assert (await waiting).blocked_by == "paused"
            assert (await claiming).blocked_by == "paused"
        await desk.pause(-1)
        for assignment in first:
            await desk.put(assignment)
        await desk.train(0)
        assert (await desk.draw(version=0, wait_s=WAIT_S, blocked_by="staleness")).blocked_by == "weights"
        assert len((await desk.draw(version=1)).assignments) == 2
