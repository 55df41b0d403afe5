"""What people take out of the buffer: files of groups that are read back as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.buffer.conftest import make_group, make_sample
from tests.harness.dumps import read_groups

from myxa.actors.buffer.dumps import read_header, write_dump
from myxa.actors.data.recorded import RecordedGroups
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
    path = tmp_path / "groups.jsonl"
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
        assert write_dump(shop.path, path, "run-1") == 3, "of the live run; what is not finished is left out"
        assert path.stat().st_mode & 0o077 == 0
        assert read_header(path).run == "run-1"
        found = read_groups(path)
        assert sorted((d.step, d.state) for d in found) == [(-1, "READY"), (0, "TRAINED"), (1, "CLAIMED")]
        assert [d.step for d in found] == [0, 1, -1], "in the order of training"
        by_id = {d.group_id: d.group for d in found}
        back = by_id[2]
        assert all(same(a, b) for a, b in zip(back.samples, groups[2].samples, strict=True))
        assert (back.prompt, back.knobs, back.rewards.tolist()) == (groups[2].prompt, 2, groups[2].rewards.tolist())
        assert back.rewards.dtype == np.float32
        at = [d.group_id for d in found].index(2)
        assert same(RecordedGroups(str(path)).group(at).samples[0], groups[2].samples[0]), "data for another run"
        with pytest.raises(DataError, match="groups.jsonl cannot be written: File exists"):
            write_dump(shop.path, path, "run-1")
    again = tmp_path / "again.jsonl"
    assert write_dump(shop.path, again, "run-1") == 3
    assert again.read_bytes() == path.read_bytes(), "and of the ended one"
    with pytest.raises(LedgerError, match="cannot be read"):
        write_dump(tmp_path / "none.sqlite", tmp_path / "none.jsonl", "run-1")
    assert not (tmp_path / "none.jsonl").exists()
