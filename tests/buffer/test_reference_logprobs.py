"""Reference log-probs are kept with their tokens: through the ledger and the next buffer, and groups that are
handed back; those that cannot be are not."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from tests.buffer.conftest import make_group
from tests.harness.dumps import whole_groups

from myxa.algos.filters import truncated
from myxa.core.messages import GroupReturned
from myxa.core.samples import F32, Group, Sample

TOLD = np.array([-0.25, -1.0000001], dtype=np.float32)


def with_reference(group: Group, logprobs: F32 = TOLD) -> Group:
    """The last member was cut off."""
    samples = tuple(msgspec.structs.replace(s, reference_logprobs=logprobs) for s in group.samples)
    last = msgspec.structs.replace(samples[-1], finish="length")
    return msgspec.structs.replace(group, samples=(*samples[:-1], last))


def same(found: Sample, wanted: F32) -> bool:
    told = found.reference_logprobs
    return told is not None and told.dtype == np.float32 and np.array_equal(told, wanted)


async def test_they_outlive_the_buffer_and_are_in_the_ledger(shop: Any) -> None:
    async with shop.open(batch_size=1, of_samples=truncated) as desk:
        first, second = (await desk.draw(max_groups=2)).assignments
        assert (await desk.put_group(with_reference(make_group(first)), 1, "rollout/0")).outcome == "ready"
        partial = with_reference(make_group(second)).samples[:1]
        await desk.ref.return_group(GroupReturned(group_id=1, attempt=1, rollout="rollout/0", partial=partial))
    async with shop.open(batch_size=1, of_samples=truncated) as desk:
        (group,) = await desk.ref.fetch((0,))
        assert same(group.samples[0], TOLD)
        assert same(group.samples[1], np.zeros(2, np.float32)), "as its log-probs, where nothing is learnt from it"
        ((_, kept),) = whole_groups(shop.path)
        assert same(kept.samples[0], TOLD)
        (again,) = (await desk.draw(max_groups=1, rollout="rollout/1")).assignments
        assert same(again.partial[0], TOLD)
        plain = make_group(again)
        assert (await desk.put_group(plain, again.attempt, "rollout/1")).outcome == "ready"
        assert (await desk.ref.fetch((1,)))[0].samples[0].reference_logprobs is None
