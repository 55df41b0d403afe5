"""What people take out of the buffer: the newest groups, and files of groups that are read back as they were."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.buffer.conftest import make_group, make_sample
from tests.harness.dumps import read_groups

from myxa.actors.buffer import dumps, finished_groups
from myxa.actors.buffer.dumps import read_header
from myxa.actors.data.recorded import RecordedGroups
from myxa.actors.data.row_file import RowError
from myxa.core.errors import BadRequest, DataError
from myxa.core.messages import DumpReport, GroupReturned
from myxa.core.samples import Sample, ScoredSample

MIB = 1 << 20
ARRAYS = ("prompt_ids", "response_ids", "logprobs", "loss_mask", "versions")


def same(a: Sample, b: Sample) -> bool:
    for name in ARRAYS:
        x, y = getattr(a, name), getattr(b, name)
        assert (x.dtype, x.tolist()) == (y.dtype, y.tolist()), name
    rest = [name for name in Sample.__struct_fields__ if name not in ARRAYS]
    assert {n: getattr(a, n) for n in rest} == {n: getattr(b, n) for n in rest}
    return True


async def written(desk: Any) -> DumpReport:
    """The newest dump, once nothing more goes into it."""
    async with asyncio.timeout(20):
        while not (found := await desk.ref.dumps()) or found[-1].reason.startswith("waits"):
            await asyncio.sleep(0.01)
    return found[-1]


async def test_a_dump_holds_all_that_is_not_trained_and_is_read_back(shop: Any) -> None:
    async with shop.open(max_staleness=4, batch_size=1) as desk:
        await desk.change(2, temperature=0.3)
        drawn = (await desk.draw(max_groups=5)).assignments
        odd = np.array([-0.1, -1.0000001], dtype=np.float32)
        groups = [make_group(a) for a in drawn]
        samples = tuple(msgspec.structs.replace(s, logprobs=odd, temperature=0.3) for s in groups[2].samples)
        groups[2] = msgspec.structs.replace(groups[2], samples=samples, knobs=2)
        for assignment, group in zip(drawn[:3], groups, strict=False):
            await desk.put_group(group, assignment.attempt, "rollout/0")
        partial = (make_sample(3, 1, [0, 0], "abort"),)
        await desk.ref.return_group(GroupReturned(group_id=3, attempt=1, rollout="rollout/0", partial=partial))
        await desk.train(0)
        await desk.ref.claim(1, 0.0)
        report = await desk.ref.dump(MIB)
        assert (report.num_groups, report.is_whole, report.reason) == (4, True, "")
        path = Path(report.path)
        assert path.parent == shop.path.parent / "dumps"
        assert path.stat().st_size == report.num_bytes
        assert path.stat().st_mode & 0o077 == 0
        header = read_header(path)
        assert (header.what, header.run, header.version) == ("buffer", "run-1", 1)
        found = read_groups(path)
        assert [(d.group_id, d.state) for d in found] == [
            (1, "CLAIMED"), (2, "READY"), (3, "REQUEUED"), (4, "DISPATCHED"),
        ]  # fmt: skip
        assert found[0].step == 1
        assert all(d.terms is not None and (d.terms.knobs, d.terms.sampling.temperature) == (2, 0.3) for d in found)
        back = found[1].group
        assert back is not None
        assert all(same(a, b) for a, b in zip(back.samples, groups[2].samples, strict=True))
        assert (back.prompt, back.knobs, back.rewards.tolist()) == (groups[2].prompt, 2, groups[2].rewards.tolist())
        assert back.rewards.dtype == np.float32
        assert found[2].group is None
        assert same(found[2].partial[0], partial[0])
        assert (found[3].group, found[3].partial) == (None, ())
        recorded = RecordedGroups(str(path))
        assert same(recorded.group(1).samples[0], groups[2].samples[0]), "and it is data for another run"
        for row in (2, 3):
            with pytest.raises(RowError, match="was not finished when it was dumped"):
                recorded.read(row)
        assert (await desk.ref.dump(MIB)).path != report.path, "an earlier dump is never written over"


async def test_a_dump_ends_at_its_limit_and_before_the_disk_is_full(shop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with shop.open(max_staleness=9) as desk:
        await desk.fill(max_groups=10)
        whole = await desk.ref.dump(MIB)
        assert whole.num_groups == 10
        half = await desk.ref.dump(whole.num_bytes // 2)
        assert 0 < half.num_groups < 6
        assert half.num_bytes <= whole.num_bytes // 2
        assert (half.is_whole, "limit" in half.reason) == (False, True)
        assert len(read_groups(Path(half.path))) == half.num_groups
        monkeypatch.setattr(dumps, "SPARE_BYTES", 1 << 62)
        none = await desk.ref.dump(MIB)
        assert (none.num_groups, "the ledger needs" in none.reason) == (0, True)
        (shop.path.parent / "dumps").rename(shop.path.parent / "away")
        (shop.path.parent / "dumps").write_text("a file stands where the folder would be")
        with pytest.raises(DataError, match="cannot be written"):
            await desk.ref.dump(MIB)
        assert (await desk.ref.stats()).states == {"READY": 10}, "nothing of that hurts the run"


async def test_the_next_groups_are_dumped_as_they_are_claimed(shop: Any) -> None:
    async with shop.open(max_staleness=9, batch_size=2) as desk:
        await desk.fill(max_groups=10)
        await desk.train(0)
        begun = await desk.ref.dump_next(3, MIB)
        assert (begun.num_groups, begun.is_whole) == (0, False)
        with pytest.raises(BadRequest, match="waits for 3 more groups"):
            await desk.ref.dump_next(1, MIB)
        await desk.ref.claim(1, 0.0)
        await desk.ref.claim(1, 0.0)  # asked again: the same groups
        await desk.ref.trained(1)
        assert (await desk.ref.dumps())[-1].reason == "waits for 1 more groups"
        await desk.train(2)
        report = await written(desk)
        assert (report.path, report.num_groups, report.is_whole) == (begun.path, 3, True)
        found = read_groups(Path(report.path))
        assert [(d.group_id, d.step) for d in found] == [(2, 1), (3, 1), (4, 2)]
        assert all(d.group is not None for d in found)
        await desk.ref.dump_next(100, MIB)
        await desk.train(3)
        ended = await desk.ref.dump_next(0, MIB)
        assert (ended.num_groups, ended.is_whole, ended.reason) == (2, False, "ended by request")
        with pytest.raises(BadRequest, match="0 groups"):
            await desk.ref.dump_next(0, MIB)
        await desk.ref.dump_next(5, MIB)  # and the buffer is closed with one that goes on


async def test_the_newest_groups_are_shown_with_what_became_of_them(shop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with shop.open(max_staleness=9, batch_size=1, group_filter="zero_variance") as desk:
        drawn = (await desk.draw(max_groups=4)).assignments
        for assignment, rewards in zip(drawn, ([0.0, 1.0], [1.0, 1.0], [0.0, 1.0], [2.0, 1.0]), strict=True):
            await desk.put_group(make_group(assignment, rewards=rewards), 1, "rollout/0")
        await desk.put(drawn[0])  # a duplicate is nothing new
        await desk.train(0)
        found = await desk.ref.recent(10)
        assert [(f.group.group_id, f.outcome, f.reason, f.state, f.step) for f in found] == [
            (3, "kept", "", "READY", -1),
            (2, "kept", "", "READY", -1),
            (1, "left out", "zero_variance", "DROPPED", -1),
            (0, "kept", "", "TRAINED", 0),
        ]
        assert found[0].wall_s >= found[3].wall_s > 0
        assert [f.group.group_id for f in await desk.ref.recent(2)] == [3, 2]
        assert await desk.ref.recent(0) == ()
        monkeypatch.setattr(finished_groups, "ANSWER_TOKENS", 21)  # two groups of two samples of five tokens
        assert len(await desk.ref.recent(10)) == 2
        monkeypatch.setattr(finished_groups, "MAX_TOKENS", 30)
        await desk.fill(max_groups=1)
        monkeypatch.setattr(finished_groups, "ANSWER_TOKENS", 10**9)
        assert [f.group.group_id for f in await desk.ref.recent(10)] == [4, 3, 2]


def score(group_id: int, index: int, length: int = 5, logprob: float = -0.25) -> ScoredSample:
    return ScoredSample(group_id=group_id, index=index, logprobs=np.full(length, logprob, dtype=np.float32))


async def test_trained_groups_come_back_with_the_trainer_s_log_probs(
    shop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finished_groups, "MAX_GROUPS", 3)
    async with shop.open(max_staleness=9, batch_size=4) as desk:
        await desk.fill(max_groups=4)
        length = len((await desk.ref.recent(1))[0].group.samples[0].response_ids)
        assert [f.group.group_id for f in await desk.ref.recent(9)] == [3, 2, 1]
        await desk.ref.claim(0, 0.0)
        told = (score(0, 1, length), score(2, 0, length), score(2, 1, length + 1), score(99, 0, length))
        await desk.ref.trained(0, told)
        found = await desk.ref.recent(6)
        assert [(f.group.group_id, f.state, f.step) for f in found] == [
            (3, "TRAINED", 0),
            (1, "TRAINED", 0),
            (2, "TRAINED", 0),
            (0, "TRAINED", 0),
        ]
        assert [[len(part) for part in f.train_logprobs] for f in found] == [[], [], [length, 0], [0, length]]
        assert found[3].train_logprobs[1].tolist() == [-0.25] * length
        assert (found[3].wall_s, found[3].outcome) == (0.0, "kept"), "it had left the shelf"
        assert [f.group.group_id for f in await desk.ref.recent(2)] == [3, 2]
        await desk.ref.trained(0, told)  # the leader asks again
        assert [f.group.group_id for f in await desk.ref.recent(6)] == [3, 1, 2, 0]


async def test_a7_the_trainers_view_is_of_the_newest_steps(shop: Any) -> None:
    """A7: once the shelf was full, those of the first steps stayed for ever."""
    async with shop.open(max_staleness=200) as desk:
        for step in range(12):
            for given in (await desk.draw(max_groups=2)).assignments:
                await desk.put(given)
            ids = list((await desk.ref.claim(step, 0.0)).groups)
            await desk.ref.trained(step, tuple(score(group_id, 0, 2) for group_id in ids))
        told = [found for found in await desk.ref.recent(64) if found.train_logprobs]
        assert [found.step for found in told] == [step for step in range(11, 3, -1) for _ in range(2)]
