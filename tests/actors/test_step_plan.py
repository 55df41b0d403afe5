"""The leader's plan: every sample once, advantages per group, the same number of micro-batches on every rank."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from myxa.actors.trainer.step_plan import (
    MAX_PARTS,
    ClaimedBatch,
    PartMetrics,
    StepPlanOptions,
    batch_metrics,
    plan_step,
    repetition,
)
from myxa.core.config import AlgoConfig
from myxa.core.errors import DataError
from myxa.core.samples import NO_VERSION, Group, Message, Prompt, Sample


def group(group_id: int, rewards: list[float], *, length: int = 5, version: int = 3, masked: bool = False) -> Group:
    prompt = Prompt(group_id=group_id, row=group_id, pass_index=0, messages=(Message(role="user", content="q"),))
    samples = tuple(
        Sample(
            group_id=group_id, index=i, prompt_ids=np.arange(4, dtype=np.int32),
            response_ids=np.arange(length + i, dtype=np.int32), logprobs=np.full(length + i, -1.0, np.float32),
            loss_mask=np.full(length + i, 0 if masked else 1, np.uint8),
            versions=np.full(length + i, version, np.int32), finish="stop",
        )
        for i in range(len(rewards))
    )  # fmt: skip
    return Group(prompt=prompt, samples=samples, rewards=np.asarray(rewards, np.float32))


def options(**changes: int) -> StepPlanOptions:
    first = StepPlanOptions(AlgoConfig(), num_ranks=2, max_tokens=40, minibatches=1)
    return replace(first, **changes)


def test_every_sample_lands_on_exactly_one_rank_and_micro_batch() -> None:
    groups = [group(i, [0.0, 1.0, 1.0, 0.0], length=3 + i) for i in range(6)]
    shards = plan_step(7, groups, options(minibatches=2))
    seen = [(s.group_id, s.index) for shard in shards for s in shard.samples]
    assert sorted(seen) == sorted((g.group_id, i) for g in groups for i in range(4))
    for shard in shards:
        placed = sorted(i for minibatch in shard.minibatches for micro in minibatch for i in micro)
        assert placed == list(range(len(shard.samples)))
        assert shard.step == 7
    for parts in zip(*(shard.minibatches for shard in shards), strict=True):
        assert len({len(part) for part in parts}) == 1, "ranks must meet in the same number of collectives"


def test_normalisers_are_global_and_count_only_trained_tokens() -> None:
    groups = [group(0, [0.0, 1.0]), group(1, [1.0, 0.0], masked=True)]
    shards = plan_step(3, groups, options())
    assert {shard.minibatch_tokens for shard in shards} == {(11.0,)}
    assert {shard.minibatch_rollouts for shard in shards} == {(2.0,)}


def drawn_at(known: Group, temperature: float, knobs: int = 0) -> Group:
    samples = tuple(msgspec.structs.replace(s, temperature=temperature) for s in known.samples)
    return msgspec.structs.replace(known, samples=samples, knobs=knobs)


def test_samples_keep_the_temperature_they_were_drawn_at_and_the_step_tells_of_it() -> None:
    temperatures = {0: 0.7, 1: 1.3, 2: 0.0}
    groups = [drawn_at(group(i, [0.0, 1.0]), t, knobs=10 + i) for i, t in temperatures.items()]
    samples = [s for shard in plan_step(3, groups, options()) for s in shard.samples]
    assert {s.group_id: s.temperature for s in samples} == temperatures
    told, _ = batch_metrics(3, ClaimedBatch(groups))
    assert (told["batch/temperature_min"], told["batch/temperature_max"]) == (0.0, 1.3)
    assert (told["batch/knobs_min"], told["batch/knobs_max"]) == (10, 12)


def test_uneven_groups_are_normalised_by_their_own_members() -> None:
    groups = [group(0, [0.0, 1.0]), group(1, [0.0, 0.0, 0.0, 1.0])]
    samples = [s for shard in plan_step(3, groups, options()) for s in shard.samples]
    for group_id in (0, 1):
        advantages = [s.advantage for s in samples if s.group_id == group_id]
        assert sum(advantages) == pytest.approx(0.0, abs=1e-5)
    assert max(s.advantage for s in samples if s.group_id == 1) > max(s.advantage for s in samples if s.group_id == 0)


def test_reference_log_probs_of_samples_are_taken_where_the_run_wants_them_and_missed_by_name() -> None:
    told = group(0, [0.0, 1.0])
    samples = [msgspec.structs.replace(s, reference_logprobs=s.logprobs - np.float32(1)) for s in told.samples]
    told = msgspec.structs.replace(told, samples=tuple(samples))
    takes = replace(options(), algo=AlgoConfig().model_copy(update={"ref_urls": ("http://teacher:1",)}))
    found = [s for shard in plan_step(3, [told, group(1, [0.0, 1.0], masked=True)], takes) for s in shard.samples]
    means = {s.group_id: s.reference_logprobs for s in found}
    assert means[0] is not None and set(means[0].tolist()) == {-2.0}
    assert means[1] is None, "nothing is learnt from it"
    ignores = [s for shard in plan_step(3, [told], options()) for s in shard.samples]
    assert all(s.reference_logprobs is None for s in ignores), "the trainer has a model of its own"
    with pytest.raises(DataError, match=r"step 3: sample 7/0 has no reference log-probs"):
        plan_step(3, [told, group(7, [0.0, 1.0])], takes)


def test_lag_counts_from_the_oldest_token_of_the_group() -> None:
    old = group(0, [0.0, 1.0], version=1)
    metrics, lags = batch_metrics(3, ClaimedBatch([old, group(1, [1.0, 1.0], version=3)]))
    assert lags == (2, 0)
    assert (metrics["lag/max"], metrics["lag_hist/2"], metrics["lag_hist/0"]) == (2.0, 1.0, 1.0)
    assert "reward/zero_std_groups" not in metrics, "the buffer tells of all finished groups, the filtered ones too"


def test_each_source_has_its_share_and_its_reward() -> None:
    def of(source: str, found: Group) -> Group:
        prompt = msgspec.structs.replace(found.prompt, source_name=source)
        return msgspec.structs.replace(found, prompt=prompt)

    groups = [of("math", group(0, [0.0, 1.0])), of("math", group(1, [1.0, 1.0])), of("code", group(2, [0.0, 0.0]))]
    told, _ = batch_metrics(3, ClaimedBatch(groups), ("code", "math", "web"))
    shares = {name: value for name, value in told.items() if "/source/" in name}
    assert shares == {
        "batch/source/code": pytest.approx(1 / 3), "batch/source/math": pytest.approx(2 / 3), "batch/source/web": 0.0,
        "reward/source/code": 0.0, "reward/source/math": 0.75,
    }  # fmt: skip
    assert not [name for name in batch_metrics(3, ClaimedBatch(groups))[0] if "/source/" in name]


def test_samples_without_an_engine_have_no_lag() -> None:
    metrics, lags = batch_metrics(9, ClaimedBatch([group(0, [1.0], version=NO_VERSION)]))
    assert lags == (-1,)
    told = [name for name in metrics if name.startswith(("lag", "reward/"))]
    assert not told, "demonstrations have neither lag nor reward"


def test_a_stamp_of_weights_that_were_undone_counts_as_the_buffer_says():
    metrics, lags = batch_metrics(
        5, ClaimedBatch([group(0, [1.0], version=9), group(1, [0.0], version=4)], {0: 4, 1: 4})
    )
    assert lags == (1, 1)
    assert (metrics["lag/max"], metrics["lag/min"]) == (1.0, 1.0)


def with_parts(known: Group, *parts: dict[str, float]) -> Group:
    return msgspec.structs.replace(known, reward_parts=parts)


def test_parts_of_rewards_become_metrics_over_the_samples_that_have_them() -> None:
    groups = [
        with_parts(group(0, [0.0, 1.0]), {"is_right": 1.0, "brief": 0.5}, {"is_right": 0.0}),
        with_parts(group(1, [0.0, 1.0]), {"is_right": 1.0}, {"is_right": 0.0}),
        group(2, [0.0, 1.0]),
    ]
    assert PartMetrics().of(groups) == {
        "reward/part/is_right/mean": 0.5, "reward/part/is_right/std": 0.5,
        "reward/part/brief/mean": 0.5, "reward/part/brief/std": 0.0, "reward/parts_left_out": 0.0,
    }  # fmt: skip
    assert PartMetrics().of(groups[2:]) == {}


def test_only_so_many_names_become_metrics_however_long_the_run() -> None:
    made, seen, told = PartMetrics(), set[str](), dict[str, float]()
    for step in range(20):
        told = made.of(
            [with_parts(group(step, [0.0]), {f"length {step} {i}": 1.0 for i in range(10)} | {"x" * 65: 1.0})]
        )
        seen |= told.keys()
    assert len(seen) == 2 * MAX_PARTS + 1
    assert told == {"reward/parts_left_out": 11.0}
    again = made.of([with_parts(group(0, [0.0]), {"length 0 0": 3.0})])
    assert again["reward/part/length 0 0/mean"] == 3.0, "a name that has a metric keeps it"


def test_lengths_and_repetition_of_answers_are_told() -> None:
    told, _ = batch_metrics(3, ClaimedBatch([group(0, [0.0] * 100, length=1)]))  # of 1 to 100 tokens
    names = ("p10", "p50", "p90", "p99", "max", "mean")
    assert [told[f"batch/response_tokens_{name}"] for name in names] == [10, 50, 90, 99, 100, 50.5]
    assert (told["batch/repetition_mean"], told["batch/repetition_max"]) == (0, 0)


def test_repetition_is_the_share_of_ngrams_that_were_there_before() -> None:
    rng = np.random.default_rng(5)
    once = rng.permutation(50_000)[:600].astype(np.int32)
    assert repetition(once) == 0
    assert repetition(np.concatenate([once[:203], once[:203]])) == pytest.approx(200 / 403)
    assert repetition(np.tile(once[:3], 2000)) == pytest.approx(1 - 3 / 1021), "its end is looked at"
    for short in (0, 1, 4):
        assert repetition(np.zeros(short, np.int32)) == 0
    for _ in range(20):
        ids = rng.integers(0, 3, 300).astype(np.int32)
        seen = {tuple(ids[k : k + 4]) for k in range(297)}
        assert repetition(ids) == pytest.approx(1 - len(seen) / 297)
