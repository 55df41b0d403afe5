"""Several real processes over gloo train exactly what one process trains."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext as nothing
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.backends.gang_rank import Backends, close, critic_of, same, weights_of

from myxa.actors.checkpoints.folder import list_checkpoints
from myxa.core.errors import TrainError

ALGO = {
    "kind": "grpo", "batch_size": 6, "minibatches": 2, "ref_update_every": 13, "entropy_coef": 0.01, "kl_coef": 0.05, "correction": "mis",
    "mis_mode": "clip", "mis_normalise": True, "reject_low": 0.3, "reject_high": 2.0, "veto": 0.15, "opsm_delta": 1e-4,
    "loss_fn": f"{Path(__file__).with_name('own_losses.py')}:clipped",
}  # fmt: skip
WHITENED = {"kind": "reinforce_pp", "batch_size": 6, "minibatches": 2, "kl_coef": 0.1, "kl_in": "reward",
            "epochs": 2, "ref_update_every": 12}  # fmt: skip
CRITIC = {"enabled": True, "lr": 2e-3, "value_clip": 0.003, "warmup_steps": 1}
TIMES = ("train/step_s", "train/tokens_per_s", "train/num_computed_tokens")

Gang = tuple[Path, list[dict[str, Any]]]


RUNS: dict[str, tuple[str, int, dict[str, Any], dict[str, Any] | None]] = {
    "ddp-2": ("ddp", 2, WHITENED, None),
    "fsdp-3-critic": ("fsdp", 3, {**ALGO, "kind": "ppo", "gamma": 0.95, "lam": 0.9}, CRITIC),
}


@pytest.fixture(scope="module")
def made(run_gang: Callable[..., Gang]) -> Callable[[str], tuple[Gang, Gang]]:
    """One process and a gang that trained the same, when they are first asked for."""

    @cache
    def run(name: str) -> tuple[Gang, Gang]:
        strategy, num_ranks, algo, critic = RUNS[name]
        return run_gang(1, strategy, algo, critic), run_gang(num_ranks, strategy, algo, critic)

    return run


@pytest.fixture(scope="module", params=RUNS)
def gangs(request: pytest.FixtureRequest, made: Callable[[str], tuple[Gang, Gang]]) -> tuple[Gang, Gang]:
    return made(request.param)


@pytest.fixture(scope="module", params=[name for name in RUNS if RUNS[name][3]])
def with_critics(request: pytest.FixtureRequest, made: Callable[[str], tuple[Gang, Gang]]) -> tuple[Gang, Gang]:
    return made(request.param)


def has_critic(gang: Gang) -> bool:
    return bool(gang[1][0]["critic_mark"])


def load(place: Gang, name: str) -> dict[str, np.ndarray]:
    with np.load(place[0] / f"{name}.npz") as file:
        return dict(file)


def test_a_reward_model_is_trained_and_exported_as_by_one_process(run_gang: Callable[..., Gang]) -> None:
    algo = {"kind": "reward", "batch_size": 6, "minibatches": 2}
    gangs = run_gang(1, "fsdp", algo, None), run_gang(2, "fsdp", algo, None)
    test_metrics_agree_with_one_process_and_between_ranks(gangs)
    close(load(gangs[1], "weights"), load(gangs[0], "weights"), 1e-5)
    test_going_on_from_a_checkpoint_gives_the_same_bits(gangs)
    one, many = (load_file(gang[0] / "hf" / "model.safetensors") for gang in gangs)
    assert np.abs(one["score.weight"]).max() > 1e-4, "it began at zero"
    close(many, one, 1e-5)


def test_metrics_agree_with_one_process_and_between_ranks(gangs: tuple[Gang, Gang]) -> None:
    (_, (alone,)), (_, ranks) = gangs
    for step, expected in enumerate(alone["metrics"]):
        for result in ranks:
            metrics = result["metrics"][step]
            assert metrics.keys() == expected.keys()
            for name, value in expected.items():
                if name not in TIMES:
                    assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-5), (step, name)
                if not name.endswith("_s"):
                    assert metrics[name] == ranks[0]["metrics"][step][name], (step, name)


def test_weights_agree_with_one_process(gangs: tuple[Gang, Gang]) -> None:
    one, many = load(gangs[0], "weights"), load(gangs[1], "weights")
    assert one.keys() == many.keys()
    start = max(np.abs(one[n] - load(gangs[0], "weights_on")[n]).max() for n in one)
    assert start > 1e-4, "a step must change something, or this test proves nothing"
    close(many, one, 1e-5)


def test_critics_agree_with_one_process_and_between_ranks(with_critics: tuple[Gang, Gang]) -> None:
    gangs = with_critics
    one, many = load(gangs[0], "critic"), load(gangs[1], "critic")
    assert one.keys() == many.keys()
    assert "value_head.weight" in one
    assert np.abs(one["value_head.weight"]).max() > 1e-4, "it began at zero"
    close(many, one, 1e-5)
    assert all(result["critic_mark"] == gangs[1][1][0]["critic_mark"] for result in gangs[1][1])
    told = [metrics["train/value_clip_fraction"] for metrics in gangs[0][1][0]["metrics"]]
    assert max(told) > 0, "or the bound is not tested"


def test_what_is_frozen_stays_to_the_bit_and_the_rest_moves(gangs: tuple[Gang, Gang], model: Path) -> None:
    before = load_file(model / "model.safetensors")
    for gang in gangs:
        patterns = gang[1][0]["frozen"]
        after = load(gang, "weights_on")
        same = {name for name, value in after.items() if np.array_equal(value, before[name])}
        assert same == {name for name in before if any(re.search(pattern, name) for pattern in patterns)}


def test_on_the_device_the_first_rank_sends_all_or_every_rank_has_all(gangs: tuple[Gang, Gang]) -> None:
    expected = {name: float(value.astype(np.float64).sum()) for name, value in load(gangs[1], "weights").items()}
    for rank, result in enumerate(gangs[1][1]):
        assert result["sent_to_all"] == pytest.approx(expected, abs=1e-6)
        assert result["sent"] == (result["sent_to_all"] if rank == 0 else {})


def test_knobs_of_a_step_are_those_of_all_ranks(gangs: tuple[Gang, Gang]) -> None:
    (_, (alone,)), (_, ranks) = gangs
    first, second, third = (metrics["train/lr"] for metrics in alone["metrics"])
    assert second < 0.6 * first < third, "the second step alone has another learning rate"
    for result in ranks:
        assert result["metrics"][1]["train/lr"] == pytest.approx(second, rel=1e-6)
    if ranks[0]["facts"]["strategy"] == "ddp":
        assert ranks[0]["mark"] == ranks[1]["mark"], "ranks that held other weights after it"


def test_going_on_from_a_checkpoint_gives_the_same_bits(gangs: tuple[Gang, Gang]) -> None:
    for gang in gangs:
        saved, on, back, again = (load(gang, n) for n in ("weights", "weights_on", "weights_back", "weights_again"))
        assert same(back, saved)
        assert same(again, on)
        assert gang[1][0]["extra"] == {"version": 2}
        (info,) = list_checkpoints(gang[0] / "checkpoints")
        assert info.is_complete
        assert info.extra == {"version": 2}


def test_a_critic_goes_on_with_its_policy(with_critics: tuple[Gang, Gang]) -> None:
    for gang in with_critics:
        saved, on, back, again, kept = (load(gang, f"critic{n}") for n in ("", "_on", "_back", "_again", "_after_nan"))
        assert "value_head.weight" in saved
        assert same(back, saved)
        assert same(again, on)
        if " mini-batch 0:" in gang[1][0]["error"]:
            assert same(kept, again), "nobody updates what another refuses"


def test_a_checkpoint_of_many_ranks_restores_on_one(gangs: tuple[Gang, Gang], backends: Backends) -> None:
    frozen = {"freeze": gangs[1][1][0]["frozen"]}
    critic = CRITIC if has_critic(gangs[1]) else None
    with (
        pytest.raises(TrainError, match="was frozen -- set trainer.freeze as it was") if frozen["freeze"] else nothing()
    ):
        backends(critic=critic).load(str(gangs[1][0] / "checkpoints" / "two"))
    backend = backends(trainer=frozen, critic=critic)
    assert backend.load(str(gangs[1][0] / "checkpoints" / "two")) == {"version": 2}
    saved = load(gangs[1], "weights")
    assert same(weights_of(backend), saved)
    if critic is None:
        return
    saved = load(gangs[1], "critic")
    state: Any = backend._parts and backend._parts.state
    assert state.critic.model.num_updates == 2 * ALGO["minibatches"]
    assert same(critic_of(backend), saved)


def test_a_nan_on_one_rank_stops_all_of_them_before_the_update(gangs: tuple[Gang, Gang]) -> None:
    for gang in gangs:
        errors = {result["error"] for result in gang[1]}
        assert len(errors) == 1, "every rank must say the same"
        (error,) = errors
        assert error.startswith("TrainError: step 11, mini-batch ")
        assert f"of rank {len(gang[1]) - 1} (groups " in error
        before, after = load(gang, "weights_again"), load(gang, "weights_after_nan")
        if " mini-batch 0:" in error:
            assert same(before, after)


def test_while_the_policy_waits_for_the_critic_it_stays_to_the_bit_and_is_saved(
    with_critics: tuple[Gang, Gang], backends: Backends
) -> None:
    for gang in with_critics:
        before, held = load(gang, "weights_after_nan"), load(gang, "weights_held")
        assert same(before, held)
        critic = load(gang, "critic_held")
        assert not np.array_equal(critic["value_head.weight"], load(gang, "critic_after_nan")["value_head.weight"])
        assert {result["held"]["train/lr"] for result in gang[1]} == {0.0}
        backend = backends(trainer={"freeze": gang[1][0]["frozen"]}, critic=CRITIC)
        backend.load(str(gang[0] / "held"))
        assert all(np.array_equal(value, held[name]) for name, value in weights_of(backend).items())
        assert same(critic_of(backend), critic)


def test_a_loss_of_the_users_that_fails_on_one_rank_is_told_by_all_and_nobody_updates(gangs: tuple[Gang, Gang]) -> None:
    for gang in gangs:
        if "failure" not in gang[1][0]:
            continue
        (failure,) = {result["failure"] for result in gang[1]}
        last = len(gang[1]) - 1
        assert failure.startswith(f"UserCodeError: step 11, mini-batch 0, rank {last}: algo.loss_fn = ")
        assert "raised ValueError: a log-prob below -50 at " in failure
        last_kept = "weights_held" if has_critic(gang) else "weights_after_nan"
        before, after = load(gang, last_kept), load(gang, "weights_after_failure")
        assert same(before, after)
        assert {result["metrics_again"]["train/user/ratio"] for result in gang[1]}, "the gang is whole"


def test_scores_do_not_depend_on_the_number_of_ranks(gangs: tuple[Gang, Gang]) -> None:
    (_, (alone,)), (_, ranks) = gangs
    together = {name: scores for result in ranks for name, scores in result["scores"].items()}
    assert together.keys() == alone["scores"].keys()
    for name, scores in alone["scores"].items():
        np.testing.assert_allclose(together[name], scores, atol=1e-5, err_msg=name)
