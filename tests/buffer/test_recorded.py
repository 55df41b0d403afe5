"""A dump is a copy of the ledger, and its groups answer another buffer's draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.buffer.conftest import make_group, make_sample
from tests.harness.dumps import whole_groups

from myxa.actors.data.recorded import RecordedGroups
from myxa.actors.ledger.file import dump_groups
from myxa.core.errors import DataError, LedgerError
from myxa.core.messages import GroupReturned
from myxa.core.samples import Sample

ARRAYS = ("prompt_ids", "response_ids", "logprobs", "loss_mask", "versions")


def same(a: Sample, b: Sample) -> bool:
    for name in ARRAYS:
        x, y = getattr(a, name), getattr(b, name)
        assert (x.dtype, x.tolist()) == (y.dtype, y.tolist()), name
    rest = [name for name in Sample.__struct_fields__ if name not in ARRAYS]
    assert {n: getattr(a, n) for n in rest} == {n: getattr(b, n) for n in rest}
    return True


async def test_a_dump_holds_all_that_is_finished_and_is_read_back(shop: Any, tmp_path: Path) -> None:
    path = tmp_path / "groups.sqlite"
    async with shop.open(max_staleness=4, batch_size=1) as desk:
        await desk.change(2, temperature=0.3)
        drawn = (await desk.draw(max_groups=5)).assignments
        odd = np.array([-0.1, -1.0000001], dtype=np.float32)
        groups = [make_group(a) for a in drawn]
        samples = tuple(msgspec.structs.replace(s, logprobs=odd, temperature=0.3) for s in groups[2].samples)
        groups[2] = msgspec.structs.replace(groups[2], samples=samples, knobs=2)
        for at in (2, 0, 1):
            await desk.put_group(groups[at], drawn[at].attempt, "rollout/0")
        partial = (make_sample(3, 1, [0, 0], "abort"),)
        await desk.ref.return_group(GroupReturned(group_id=3, attempt=1, rollout="rollout/0", partial=partial))
        for step in range(2):
            await desk.ref.claim(step, 0.0)
            if not step:
                await desk.ref.trained(step)
        with pytest.raises(DataError, match=r"is in use: its run is live -- take a copy of it: `myxa dump`"):
            RecordedGroups(str(shop.path))
        assert dump_groups(shop.path, path) == 3, "of the live run; what is not finished is left out"
        assert path.stat().st_mode & 0o077 == 0
        found = list(whole_groups(path))
        assert [(row.step, row.state) for row, _ in found] == [(0, "TRAINED"), (1, "CLAIMED"), (-1, "READY")]
        at = [row.group_id for row, _ in found].index(2)
        back = RecordedGroups(str(path)).group(at)
        assert all(same(a, b) for a, b in zip(back.samples, groups[2].samples, strict=True))
        assert (back.prompt, back.knobs, back.rewards.tolist()) == (groups[2].prompt, 2, groups[2].rewards.tolist())
        with pytest.raises(LedgerError, match="cannot be written: File exists"):
            dump_groups(shop.path, path)
    again = tmp_path / "again.sqlite"
    assert dump_groups(shop.path, again) == 3, "and of the ended one"
    torn = tmp_path / "torn.sqlite"
    torn.write_bytes(b"no ledger" * 1000)
    for path, fault in ((tmp_path / "none.sqlite", "there is no ledger at"), (torn, "cannot be copied")):
        with pytest.raises(LedgerError, match=fault):
            dump_groups(path, tmp_path / "none.copy")
        assert not (tmp_path / "none.copy").exists()


@pytest.mark.parametrize("max_staleness", [0, 3])
async def test_a_buffer_that_has_recorded_groups_answers_its_draws_itself_in_order(
    shop: Any, max_staleness: int
) -> None:
    """Also those that were under way when it died."""
    async with shop.open(max_staleness=max_staleness, batch_size=2) as desk:
        await desk.draw(max_groups=1, rollout="recorded", epoch=0)
    async with shop.open(max_staleness=max_staleness, batch_size=2) as desk:
        desk.buffer.recorded = lambda work: make_group(work, (-1, -1))
        for step in range(20):
            claim = await desk.ref.claim(step, 5.0)
            assert list(claim.groups) == [2 * step, 2 * step + 1], claim
            await desk.ref.trained(step)


async def test_recorded_groups_that_the_filter_leaves_out_are_passed_over_and_the_data_ends(
    shop: Any, rows: Any
) -> None:
    async with shop.open(rows=rows(60, 1), group_filter="zero_variance") as desk:
        desk.buffer.recorded = lambda work: make_group(work, (-1, -1), [float(work.prompt.row >= 50), 1.0])
        steps = [await desk.ref.claim(step, 5.0) for step in range(1)]
        for step in range(1, 26):
            await desk.ref.trained(step - 1)
            steps.append(await desk.ref.claim(step, 5.0))
        assert [list(one.groups) for one in steps[:25]] == [[2 * step, 2 * step + 1] for step in range(25)]
        assert steps[-1].finished and "zero_variance 10" in steps[-1].reason
