"""When the canary is asked and what its answer means."""

from __future__ import annotations

import math
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from myxa.actors.trainer.canary import BOUNDS, ORDER, CanaryGuard, CanaryOptions, judge, precision_of
from myxa.core.activity import ActivityMeter, TelemetryBuffer
from myxa.core.clock import SystemClock
from myxa.core.messages import CanaryAnswers
from myxa.core.samples import Sample


def sample(logprobs, versions, mask=None, index=0) -> Sample:
    size = len(logprobs)
    return Sample(
        group_id=-1_000_000, index=index, prompt_ids=np.asarray([5, 6], np.int32),
        response_ids=np.arange(size, dtype=np.int32), logprobs=np.asarray(logprobs, np.float32),
        loss_mask=np.ones(size, np.uint8) if mask is None else np.asarray(mask, np.uint8),
        versions=np.asarray(versions, np.int32), finish="stop",
    )  # fmt: skip


def test_it_is_due_at_the_start_and_at_every_multiple():
    assert checked(CanaryOptions(every=20, bound=0.1), range(7, 65)) == [7, 20, 40, 60]
    assert checked(CanaryOptions(every=0, bound=0.1), range(50)) == []


def test_where_engines_are_not_given_every_version_the_next_one_that_they_are_given_is_checked():
    assert checked(CanaryOptions(every=20, bound=0.1), range(0, 100, 3)) == [0, 21, 42, 60, 81]


def checked(options: CanaryOptions, versions: Iterable[int]) -> list[int]:
    found: list[int] = []
    for version in versions:
        if options.is_due(version, found[-1] if found else None):
            found.append(version)
    return found


def test_the_bound_is_that_of_the_coarsest_precision_that_takes_part():
    assert list(BOUNDS) == list(ORDER)
    assert sorted(BOUNDS.values()) == list(BOUNDS.values())
    assert precision_of("float32", "float32", {}) == "float32"
    assert precision_of("float32", "bfloat16", {}) == "bfloat16"
    assert precision_of("bfloat16", "float16", {}) == "bfloat16"
    assert precision_of("bfloat16", "bfloat16", {"quantization": "fp8"}) == "fp8"
    assert precision_of("bfloat16", "bfloat16", {"kv_cache_dtype": "fp8_e4m3"}) == "fp8"
    assert precision_of("bfloat16", "bfloat16", {"kv_cache_dtype": "auto"}) == "bfloat16"


def test_only_tokens_of_that_version_that_the_model_wrote_are_compared():
    samples = [sample([-1.0, -2.0, -3.0], [4, 4, 3]), sample([-1.0, 0.0], [4, -1], mask=[1, 0], index=1)]
    scores = np.asarray([-1.1, -2.3, 9.0, -1.2, 7.0], np.float32)
    verdict = judge(4, "rollout/1", samples, scores, bound=0.3)
    assert verdict.num_tokens == 3
    assert verdict.mean_diff == pytest.approx(0.2, abs=1e-6)
    assert verdict.max_diff == pytest.approx(0.3, abs=1e-6)
    assert verdict.complaint == ""


def test_a_difference_above_the_bound_is_told_with_who_and_how_much():
    verdict = judge(4, "rollout/1", [sample([-1.0, -1.0], [4, 4])], np.asarray([-1.5, -1.1], np.float32), bound=0.1)
    for word in ("rollout/1", "version 4", "0.3 nats", "at most 0.5", "guard.bound is 0.1"):
        assert word in verdict.complaint
    at_bound = judge(4, "r", [sample([-1.0], [4])], np.asarray([-1.25], np.float32), bound=0.25)
    assert at_bound.complaint == ""


def test_no_number_is_above_every_bound_and_no_token_is_no_verdict():
    broken = judge(4, "r", [sample([-1.0], [4])], np.asarray([math.nan], np.float32), bound=1e9)
    assert broken.complaint
    empty = judge(5, "r", [sample([-1.0], [4])], np.asarray([-9.0], np.float32), bound=0.0)
    assert (empty.num_tokens, empty.complaint) == (0, "")
    assert judge(4, "r", [], np.zeros(0, np.float32), bound=0.1).num_tokens == 0
    with pytest.raises(ValueError, match="2 scores for 1 tokens"):
        judge(4, "r", [sample([-1.0], [4])], np.zeros(2, np.float32), bound=0.1)


async def test_an_engine_that_answers_with_nothing_is_told_and_fails_nobody():
    async def canary(version: int) -> CanaryAnswers:
        return CanaryAnswers(rollout="rollout/0", samples=())

    ctx: Any = SimpleNamespace(ref=lambda contract, name: SimpleNamespace(canary=canary))
    ranks: Any = None  # are not asked
    clock = SystemClock()
    telemetry = TelemetryBuffer("trainer/0", clock)
    guard = CanaryGuard(ctx, CanaryOptions(every=1, bound=0.1), ranks, ActivityMeter("trainer/0", clock), telemetry)
    await guard.check(4)
    assert [event.kind for event in telemetry.drain().events] == ["guard-skipped"]
