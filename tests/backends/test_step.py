"""A training step on one rank: exactness of ratios, invariance of cuts, refusals, learning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.backends.gang_rank import (
    Backends,
    close,
    make_shards,
    own_scores,
    reads_of,
    same,
    save,
    scored,
    weights_of,
    with_scores,
)

from myxa.actors.backends.torch_backend.world import Gang
from myxa.actors.models.tiny import make_tiny_model
from myxa.core.errors import ConfigError, TrainError
from myxa.core.samples import TrainShard

PLAIN = {"eps": 1e-4, "lr": 1e-3}


def change(shard: TrainShard, position: int, **fields: Any) -> TrainShard:
    samples = list(shard.samples)
    samples[position] = msgspec.structs.replace(samples[position], **fields)
    return msgspec.structs.replace(shard, samples=tuple(samples))


def first_trained(shard: TrainShard) -> int:
    return next(i for i, s in enumerate(shard.samples) if s.loss_mask.any() and s.advantage)


@pytest.mark.parametrize("entropy_coef", [0.0, 0.01], ids=["neutral-skipped", "all-trained"])
@pytest.mark.parametrize("minibatches", [1, 3])
def test_the_first_ratio_is_one_to_the_last_bit(backends: Backends, minibatches: int, entropy_coef: float) -> None:
    backend = backends(algo={"minibatches": minibatches, "batch_size": 6, "entropy_coef": entropy_coef})
    (shard,) = make_shards(31, minibatches=minibatches)
    metrics = backend.train(with_scores(shard, own_scores(backend, shard)), {}).metrics
    assert metrics["train/logprob_diff_abs_mean"] == 0.0
    assert metrics["train/logprob_diff_abs_max"] == 0.0
    if minibatches == 1:
        assert metrics["train/ratio"] == 1.0
        assert metrics["train/ratio_max"] == 1.0
        assert metrics["train/approx_kl"] == 0.0
        assert metrics["train/clip_fraction"] == 0.0
    else:
        assert metrics["train/approx_kl"] != 0.0, "later mini-batches have moved on"


def test_the_host_does_not_wait_for_numbers_of_the_device(backends: Backends) -> None:
    """In a log-prob pass and in the norm of gradients: a GPU would be idle meanwhile."""
    backend, (shard,) = backends(algo={"minibatches": 3, "batch_size": 6}), make_shards(31, minibatches=3)
    backend.train(shard, {})
    parts = backend._parts
    assert parts is not None and reads_of(parts.stepper.policy, shard) == (0, 0)


def test_what_the_run_file_says_of_masking_is_done_and_told(backends: Backends) -> None:
    masking = {"correction": "mis", "mis_mode": "clip", "reject_low": 0.3, "reject_high": 2.0, "veto": 0.15}
    algo = {**masking, "mis_normalise": True, "opsm_delta": 1e-6, "minibatches": 3, "batch_size": 6}
    (shard,) = make_shards(31, minibatches=3)
    told = backends(algo=algo, optimizer={"lr": 0.01}).train(shard, {}).metrics
    assert told["train/weight"] == pytest.approx(1.0, rel=1e-5), "weights were divided by their mean"
    for rule in ("rejected", "vetoed", "opsm"):
        assert 0 < told[f"train/{rule}_fraction"] < 1, rule
    assert told["train/removed_fraction"] >= max(told["train/rejected_fraction"], told["train/vetoed_fraction"])
    backend = backends(algo={"correction": "mis", "mis_normalise": True, "minibatches": 3, "batch_size": 6})
    assert "reject_low" in backend.judge_knobs({"mis_low": 0.7, "reject_low": 2.0})
    live = backend.train(shard, {"veto": 0.15, "reject_high": 2.0, "reject_low": 0.3}).metrics
    assert 0 < live["train/vetoed_fraction"] < 1


def test_the_reference_may_be_another_model_of_the_same_shape(backends: Backends, tmp_path: Path) -> None:
    (shard,) = make_shards(32)
    make_tiny_model(tmp_path / "ref", "0p5m", seed=4, vocab_size=262)
    make_tiny_model(tmp_path / "foreign", "0p5m", seed=4, vocab_size=300)
    backend = backends(algo={"kl_coef": 0.1, "ref_path": str(tmp_path / "ref")})
    judge = backends(folder=tmp_path / "ref")
    mine = with_scores(shard, own_scores(backend, shard))
    reference = scored(judge, shard.samples)
    x = np.concatenate([(s.logprobs - r)[s.loss_mask == 1] for s, r in zip(mine.samples, reference, strict=True)])
    assert backend.train(shard, {}).metrics["train/kl"] == pytest.approx(np.mean(np.exp(-x) - 1 + x), rel=1e-4)
    assert backend.train(shard, {"kl_coef": 0.0}).metrics["train/num_updates"] == 2, "it may go on without"
    with pytest.raises(ConfigError, match=r"foreign: its vocab_size is 300, that of model.path is 262"):
        backends(algo={"kl_coef": 0.1, "ref_path": str(tmp_path / "foreign")})
    with pytest.raises(ConfigError, match=r"algo.ref_path: .*nowhere"):
        backends(algo={"kl_coef": 0.1, "ref_path": str(tmp_path / "nowhere")})


@pytest.mark.parametrize(
    "kl",
    [
        {"kl_in": "advantage", "kl_kind": "k1", "minibatches": 2},
        {"kl_in": "loss", "kl_unbiased": True},
        {"kl_in": "reward", "kind": "reinforce_pp"},
    ],
    ids=["advantage", "loss", "reward"],
)
def test_a_step_with_served_log_probs_is_that_with_the_reference_model(
    kl: dict[str, Any], backends: Backends, tmp_path: Path
) -> None:
    make_tiny_model(tmp_path / "teacher", "0p5m", seed=4, vocab_size=262)
    algo = {"kl_coef": 0.5, "batch_size": 6, **kl}
    (shard,) = make_shards(32, kind=algo.get("kind", "grpo"), minibatches=algo.get("minibatches", 1))
    keeps = backends(algo={**algo, "ref_path": str(tmp_path / "teacher")}, optimizer=PLAIN)
    asks = backends(algo={**algo, "ref_urls": ["http://teacher:30000"]}, optimizer=PLAIN)
    told = scored(backends(folder=tmp_path / "teacher"), shard.samples)
    served = tuple(msgspec.structs.replace(s, reference_logprobs=t) for s, t in zip(shard.samples, told, strict=True))
    right = keeps.train(shard, {}).metrics
    found = asks.train(msgspec.structs.replace(shard, samples=served), {}).metrics
    assert right["train/kl"] != 0.0
    assert found["train/kl"] == pytest.approx(right["train/kl"], rel=1e-4)
    assert found["train/grad_norm"] == pytest.approx(right["train/grad_norm"], rel=1e-4)
    kept = weights_of(keeps)
    close(weights_of(asks), kept, 2e-6)
    with pytest.raises(TrainError, match=r"sample \d+/\d+: there is a KL term, no reference model, and no reference"):
        asks.train(shard, {})
    assert asks.train(shard, {"kl_coef": 0.0}).metrics["train/num_updates"] == 2 * algo.get("minibatches", 1)
    with pytest.raises(TrainError, match=r"reference_logprobs has shape"):
        asks.train(change(shard, 0, reference_logprobs=np.zeros(0, np.float32)), {})


def test_distillation_is_training_on_the_gap_to_the_teacher_token_by_token(backends: Backends, tmp_path: Path) -> None:
    """The same step as with advantages per token that were computed by hand, from scores of both models."""
    make_tiny_model(tmp_path / "teacher", "0p5m", seed=4, vocab_size=262)
    (shard,) = make_shards(32)
    algo = {"kl_coef": 0.5, "kl_in": "advantage", "kl_kind": "k1", "ref_path": str(tmp_path / "teacher")}
    student = backends(algo=algo, optimizer=PLAIN)
    mine = with_scores(shard, own_scores(student, shard))
    teacher = scored(backends(folder=tmp_path / "teacher"), mine.samples)
    by_hand = tuple(
        msgspec.structs.replace(s, advantage=1.0, token_advantages=s.advantage - 0.5 * (s.logprobs - t))
        for s, t in zip(mine.samples, teacher, strict=True)
    )
    student.train(mine, {})
    judge = backends(optimizer=PLAIN)
    judge.train(msgspec.structs.replace(mine, samples=by_hand), {})
    right = weights_of(judge)
    close(weights_of(student), right, 1e-6)


def test_a_rank_whose_gpu_is_not_there_is_named(backends: Backends) -> None:
    with pytest.raises(ConfigError, match=r"trainer rank 0 wants GPU 99 of this host, but \d are visible"):
        backends(device="cuda", gang=Gang(local_rank=99))


@pytest.mark.parametrize(("pattern", "said"), [("layers.9", "is found in no parameter"), (".", "nothing is left")])
def test_a_freeze_that_fits_nothing_or_everything_is_refused(backends: Backends, pattern: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        backends(trainer={"freeze": (pattern,)})


def test_scores_of_loose_samples_are_those_of_the_shard(backends: Backends) -> None:
    backend = backends()
    (shard,) = make_shards(33)
    exact = own_scores(backend, shard)
    for got, expected, sample in zip(scored(backend, shard.samples), exact, shard.samples, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5)
        assert got.dtype == np.float32
        assert got.shape == sample.loss_mask.shape
        assert not got[sample.loss_mask == 0].any()
        assert (got[sample.loss_mask == 1] < 0).all()


@pytest.mark.parametrize("kind", ["grpo", "gspo", "dr_grpo", "ppo"])
def test_cutting_a_batch_into_micro_batches_changes_nothing(backends: Backends, kind: str) -> None:
    reduction = {"dr_grpo": "constant", "gspo": "rollout"}.get(kind, "token")
    results = []
    for max_tokens in (10_000, 60):
        backend = backends(algo={"kind": kind, "reduction": reduction}, optimizer=PLAIN, max_new_tokens=9)
        (shard,) = make_shards(34, kind=kind, max_tokens=max_tokens)
        results.append((backend.train(shard, {}).metrics, weights_of(backend), len(shard.minibatches[0])))
    (whole, weights, one), (cut, cut_weights, many) = results
    assert one == 1 < many
    for name in ("loss", "grad_norm", "entropy", "ratio", "approx_kl", "num_loss_tokens"):
        assert cut[f"train/{name}"] == pytest.approx(whole[f"train/{name}"], rel=1e-4, abs=1e-6), name
    close(cut_weights, weights, 1e-5)


def test_leaving_out_samples_of_no_advantage_changes_nothing(backends: Backends) -> None:
    (shard,) = make_shards(35)
    results = []
    for extra in ({}, {"entropy_coef": 1e-30}):  # an entropy term, however small, makes all samples count
        backend = backends(algo={"kind": "grpo", **extra}, optimizer=PLAIN)
        results.append((backend.train(shard, {}).metrics, weights_of(backend)))
    (skipping, weights), (everything, all_weights) = results
    assert skipping["train/num_trained_samples"] < everything["train/num_trained_samples"]
    for name in ("loss", "grad_norm"):
        assert skipping[f"train/{name}"] == pytest.approx(everything[f"train/{name}"], rel=1e-5)
    close(weights, all_weights, 1e-6)


def test_a_step_without_any_advantage_is_a_step(backends: Backends) -> None:
    backend = backends(optimizer=PLAIN)
    (shard,) = make_shards(36)
    backend.train(shard, {})
    before = weights_of(backend)
    idle = msgspec.structs.replace(
        shard, samples=tuple(msgspec.structs.replace(s, advantage=0.0) for s in shard.samples)
    )
    metrics = backend.train(idle, {}).metrics
    assert metrics["train/grad_norm"] == 0.0
    assert metrics["train/loss"] == 0.0
    assert metrics["train/num_updates"] == 2.0
    after = weights_of(backend)
    assert not same(before, after), "AdamW's momentum goes on"


def test_supervised_training_lowers_the_loss(backends: Backends) -> None:
    backend = backends(algo={"kind": "sft"}, optimizer={"lr": 3e-3})
    (shard,) = make_shards(38, kind="sft")
    losses = [backend.train(shard, {}).metrics["train/loss"] for _ in range(8)]
    assert losses[-1] < losses[0] - 1 > 3, losses
    assert losses[0] == pytest.approx(-np.mean(np.concatenate(
        [s[x.loss_mask == 1] for s, x in zip(own_scores(backends(algo={"kind": "sft"}), shard), shard.samples, strict=True)]
    )), rel=1e-5)  # fmt: skip


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_named_and_nothing_moves(backends: Backends, value: float) -> None:
    backend = backends(optimizer=PLAIN)
    (shard,) = make_shards(39, max_tokens=60)
    victim = first_trained(shard)
    sample = shard.samples[victim]
    before = weights_of(backend)
    with pytest.raises(TrainError) as caught:
        backend.train(change(shard, victim, advantage=value), {})
    micro = next(k for k, m in enumerate(shard.minibatches[0]) if victim in m)
    message = str(caught.value)
    assert (
        f"step 39, mini-batch 0: the loss is not a finite number in micro-batch {micro} of rank 0 (groups " in message
    )
    assert str(sample.group_id) in message.partition("groups ")[2].partition(")")[0].split(", ")
    after = weights_of(backend)
    assert same(before, after)
    assert backend.train(shard, {}).metrics["train/num_updates"] == 1.0, "the next good batch is trained"


def test_a_gradient_that_is_not_finite_is_traced_to_its_micro_batch(backends: Backends) -> None:
    backend = backends(algo={"correction": "none"})
    (shard,) = make_shards(40, max_tokens=60)
    victim = shard.minibatches[0][-1][-1]
    before = weights_of(backend)
    with pytest.raises(TrainError) as caught:  # the loss is about 1e28, the squares of its gradient overflow
        backend.train(change(shard, victim, advantage=-1e30), {})
    micro = len(shard.minibatches[0]) - 1
    assert f"the gradient is not a finite number in micro-batch {micro} of rank 0 (groups " in str(caught.value)
    after = weights_of(backend)
    assert same(before, after)


def test_max_grad_norm_bounds_what_is_applied(backends: Backends) -> None:
    """With an epsilon far above the gradient AdamW's update is proportional to the clipped gradient."""
    moved = []
    for bound in (1e-3, 2e-3):
        backend = backends(optimizer={"lr": 1.0, "eps": 1.0, "max_grad_norm": bound})
        before = weights_of(backend)
        metrics = backend.train(make_shards(43)[0], {}).metrics
        assert metrics["train/grad_norm"] > 2e-3, "the metric is the norm before clipping"
        after = weights_of(backend)
        moved.append(sum(float(((after[n] - before[n]).astype(np.float64) ** 2).sum()) for n in before) ** 0.5)
    assert moved[1] / moved[0] == pytest.approx(2.0, rel=0.05)


def test_a_sample_that_contradicts_itself_or_knobs_that_cannot_be_are_refused(backends: Backends) -> None:
    backend, (shard,) = backends(), make_shards(44)
    sample, inf = shard.samples[0], float("inf")
    whole = np.concatenate([sample.prompt_ids, sample.response_ids])
    rows = {n: (np.zeros if n == "logprobs" else np.ones)(sample.num_tokens, t)
            for n, t in (("loss_mask", np.uint8), ("logprobs", np.float32), ("versions", np.int32))}  # fmt: skip
    wrong = [
        ("outside", change(shard, 0, response_ids=np.full_like(sample.response_ids, 262))),
        ("response has", change(shard, 0, response_ids=sample.response_ids[1:])),
        ("NaN or infinite", change(shard, 0, logprobs=np.full_like(sample.logprobs, np.nan))),
        ("nothing in front", change(shard, 0, prompt_ids=whole[:0], response_ids=whole, **rows)),
        *((f"temperature = {t} gives no", change(shard, 2, temperature=t)) for t in (-1.0, float("nan"), inf)),
    ]
    for cause, given in wrong:
        with pytest.raises(TrainError, match=cause):
            backend.train(given, {})
    for name, value, cause in (("learning_rate", 1.0, "no such knob"), ("lr", -1.0, "knob lr"),
                               ("kl_coef", 0.1, "reference model"), ("clip_low", float("nan"), "knob clip_low")):  # fmt: skip
        with pytest.raises(ConfigError, match=cause):
            backend.train(shard, {name: value})
    assert backend.train(shard, {}).metrics["train/num_updates"] == 1.0


def test_empty_mini_batches_make_no_update(backends: Backends) -> None:
    backend = backends(algo={"minibatches": 3, "batch_size": 3})
    (shard,) = make_shards(46, minibatches=3, num_groups=2)
    assert () in shard.minibatches
    assert backend.train(shard, {}).metrics["train/num_updates"] == 2.0


def test_every_sample_is_scored_at_its_own_temperature(backends: Backends) -> None:
    backend = backends()
    (mixed,) = make_shards(48, temperatures=(1.0, 0.5, 1.5))
    together = scored(backend, mixed.samples)
    for sample, scores in zip(mixed.samples, together, strict=True):
        np.testing.assert_allclose(scores, scored(backend, [sample])[0], atol=1e-5)
    others, greedy = (
        scored(backend, [msgspec.structs.replace(s, temperature=t) for s in mixed.samples]) for t in (1.0, 0.0)
    )
    for one, other in zip(others, greedy, strict=True):
        assert np.array_equal(one, other), "what engines say of greedy tokens"
    for sample, scores, other in zip(mixed.samples, together, others, strict=True):
        if sample.loss_mask.any():
            assert np.allclose(scores, other, atol=1e-3) == (sample.temperature == 1.0)


def test_groups_of_many_temperatures_train_as_each_would_alone(backends: Backends) -> None:
    """Micro-batches of one temperature each, which take the path of one number, against one of all."""
    (shard,) = make_shards(49, max_tokens=10_000, temperatures=(1.0, 0.5, 1.5))
    cuts = [
        tuple(i for i, s in enumerate(shard.samples) if s.temperature == temperature) for temperature in (0.5, 1.0, 1.5)
    ]
    results = []
    for micros in (shard.minibatches[0], tuple(cuts)):
        backend = backends(algo={"kl_coef": 0.1, "entropy_coef": 0.01}, optimizer=PLAIN)
        metrics = backend.train(msgspec.structs.replace(shard, minibatches=(micros,)), {}).metrics
        results.append((metrics, weights_of(backend)))
    (whole, weights), (cut, cut_weights) = results
    for name in ("loss", "grad_norm", "entropy", "ratio", "approx_kl", "logprob_diff_abs_mean"):
        assert cut[f"train/{name}"] == pytest.approx(whole[f"train/{name}"], rel=1e-4, abs=1e-6), name
    close(cut_weights, weights, 1e-5)


def test_several_mini_batches_keep_the_proximal_policy_of_the_start(backends: Backends) -> None:
    """With exact behaviour log-probs all weights are 1, whatever the earlier mini-batches did to the live policy."""
    backend = backends(algo={"minibatches": 3, "batch_size": 6, "correction": "decoupled"}, optimizer={"lr": 3e-3})
    (shard,) = make_shards(45, minibatches=3)
    metrics = backend.train(with_scores(shard, own_scores(backend, shard)), {}).metrics
    assert metrics["train/weight"] == 1.0
    assert metrics["train/ratio_max"] > 1.0
    assert metrics["train/num_updates"] == 3.0


def test_epochs_are_passes_over_the_same_mini_batches(backends: Backends) -> None:
    """Two epochs are a step over a batch that holds every mini-batch twice, with what was scored at its start."""
    (shard,) = make_shards(33, minibatches=2)
    count = len(shard.samples)
    again = tuple(tuple(tuple(i + count for i in micro) for micro in micros) for micros in shard.minibatches)
    twice = msgspec.structs.replace(
        shard,
        samples=shard.samples * 2,
        minibatches=shard.minibatches + again,
        minibatch_tokens=shard.minibatch_tokens * 2,
        minibatch_rollouts=shard.minibatch_rollouts * 2,
    )
    algo = {"minibatches": 2, "batch_size": 6, "correction": "decoupled"}
    by_hand, by_key, by_knob = backends(algo=algo), backends(algo={**algo, "epochs": 2}), backends(algo=algo)
    right = by_hand.train(twice, {})
    for backend, knobs in ((by_key, {}), (by_knob, {"epochs": 2.0})):
        found = backend.train(shard, knobs)
        assert same(weights_of(backend), weights_of(by_hand))
        assert found.metrics["train/num_updates"] == 4
        for name in ("train/loss", "train/ratio", "train/clip_fraction", "train/grad_norm"):
            assert found.metrics[name] == pytest.approx(right.metrics[name]), name


def test_the_policy_becomes_the_reference_every_so_many_steps_and_checkpoints_keep_it(
    backends: Backends, tmp_path: Path
) -> None:
    algo = {"batch_size": 6, "kl_coef": 0.1, "ref_update_every": 2}
    shards = [msgspec.structs.replace(make_shards(34)[0], step=step) for step in range(5)]

    def kl(backend: Any, step: int) -> tuple[float, float]:
        metrics = backend.train(shards[step], {}).metrics
        return metrics["train/kl"], metrics["train/reference_version"]

    backend, given = backends(algo=algo), backends(algo={**algo, "ref_update_every": 0})
    told = [kl(backend, step) for step in range(4)]
    assert [version for _, version in told] == [0, 2, 2, 4]
    assert [value == 0 for value, _ in told] == [True, False, True, False]
    assert [kl(given, step)[1] for step in range(4)] == [0] * 4
    save(backend, str(tmp_path / "renewed"), {})
    on = kl(backend, 4)
    assert on == (0.0, 4)
    backend.train(shards[3], {"ref_update_every": 0.0})
    resumed = backends(algo=algo)
    resumed.load(str(tmp_path / "renewed"))
    assert kl(resumed, 4) == on
    save(given, str(tmp_path / "given"), {})
    resumed.load(str(tmp_path / "given"))
    assert kl(resumed, 4)[1] == 0
    assert "keeps no reference model" in backends().judge_knobs({"ref_update_every": 3.0})
