"""The objective against an independent derivation: plain Python loops, and gradients by central differences of them."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from tests.algos.conftest import options

from myxa.algos.objective import Normaliser, policy_objective, weight_sums

CONSTANT = 37.0


class ByHand:
    """The whole objective token by token. What the formulas hold fixed (sg) is taken from `frozen`."""

    def __init__(self, draw, config, mean_weight=1.0):
        self.draw, self.config, self.mean_weight = draw, config, mean_weight
        self.frozen = list(draw.live)

    def own(self, t):
        return [s for s, o in enumerate(self.draw.owner) if o == self.draw.owner[t]]

    def train(self, t, has_proximal):
        return self.draw.proximal[t] if has_proximal else self.frozen[t]

    def old(self, t, has_proximal):
        if self.config.correction == "none":
            return self.frozen[t]
        return self.draw.behaviour[t] if self.config.correction == "behaviour" else self.train(t, has_proximal)

    def q(self, t, level, has_proximal):
        logs = [self.train(s, has_proximal) - self.draw.behaviour[s] for s in self.own(t)]
        if level == "token":
            return math.exp(self.train(t, has_proximal) - self.draw.behaviour[t])
        return math.exp(sum(logs) if level == "sequence" else sum(logs) / len(logs))

    def weight(self, t, has_proximal):
        """(factor on the policy loss, whether the token stays)."""
        c = self.config
        if c.correction in ("none", "behaviour"):
            return 1.0, True
        if c.correction in ("decoupled", "tis"):
            floor = c.tis_floor if c.correction == "tis" else 0.0
            return min(max(self.q(t, "token", has_proximal), floor), c.tis_cap), True
        q = self.q(t, c.mis_level, has_proximal)
        if c.correction == "icepop":
            return (q if c.mis_low <= q <= c.tis_cap else 0.0), True
        keep = True
        if c.mis_mode == "mask":
            keep = c.mis_low <= q <= c.mis_high
        elif c.mis_mode == "clip":
            q = min(max(q, c.mis_low), c.mis_high)
        else:
            q = min(q, c.mis_high)
        if c.reject_high:
            keep = keep and c.reject_low <= self.q(t, c.reject_level, has_proximal) <= c.reject_high
        if c.veto:
            keep = keep and all(self.q(s, "token", has_proximal) >= c.veto for s in self.own(t))
        return q / self.mean_weight, keep

    def policy(self, t, live, has_proximal):
        c, a = self.config, self.draw.advantages[t]
        if c.loss == "sft":
            return -live[t]
        gaps = [live[s] - self.old(s, has_proximal) for s in self.own(t)]
        r = math.exp(sum(gaps) / len(gaps)) if c.loss == "gspo" else math.exp(live[t] - self.old(t, has_proximal))
        if c.opsm_delta:
            drift = [self.draw.behaviour[s] - self.frozen[s] for s in self.own(t)]
            if a < 0 and sum(drift) / len(drift) > c.opsm_delta:
                return 0.0
        fixed = math.exp(self.frozen[t] - self.old(t, has_proximal))
        if c.loss == "reinforce":
            return -fixed * a * live[t]
        if c.loss == "cispo":
            return -min(max(fixed, 1 - c.clip_low), 1 + c.clip_high) * a * live[t]
        if c.loss == "sapo":
            tau = c.sapo_tau_pos if a > 0 else c.sapo_tau_neg
            return -a * 4 / tau / (1 + math.exp(-tau * (r - 1)))
        if c.loss.startswith("dppo"):
            return 0.0 if self.is_beyond(t) else -r * a
        if a >= 0:
            return -min(r, 1 + c.clip_high) * a
        reached = max(r, 1 - c.clip_low)
        return -a * (min(reached, c.dual_clip) if c.dual_clip else reached)

    def is_beyond(self, t):
        """Whether the token has left the trust region on the side that its advantage pushes to."""
        c, a = self.config, self.draw.advantages[t]
        p, q = math.exp(self.frozen[t]), math.exp(self.draw.behaviour[t])
        kl = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
        distance = kl if c.loss == "dppo_kl" else abs(p - q)
        return distance > c.clip_high and p > q if a > 0 else distance > c.clip_low and p < q

    def kl(self, t, live, has_proximal):
        x = live[t] - self.draw.reference[t]
        k = {"k1": x, "k2": x * x / 2}.get(self.config.kl_kind, math.exp(-x) - 1 + x)
        if self.config.kl_unbiased:
            k *= math.exp(live[t] - self.draw.behaviour[t])
        return k

    def loss(self, live, normaliser, has_proximal):
        c, total = self.config, 0.0
        for t in range(len(live)):
            weight, keep = self.weight(t, has_proximal)
            if not keep:
                continue
            value = weight * self.policy(t, live, has_proximal) - c.entropy_coef * self.draw.entropy[t]
            if c.kl_coef and c.kl_in == "loss":
                value += c.kl_coef * self.kl(t, live, has_proximal)
            if c.reduction == "rollout":
                total += value / len(self.own(t)) / normaliser.samples
            else:
                total += value / (normaliser.tokens if c.reduction == "token" else normaliser.constant)
        return total

    def gradient(self, normaliser, has_proximal, step=1e-6):
        out = []
        for t in range(len(self.draw.live)):
            ends = []
            for sign in (1, -1):
                live = list(self.draw.live)
                live[t] += sign * step
                ends.append(self.loss(live, normaliser, has_proximal))
            out.append((ends[0] - ends[1]) / (2 * step))
        return out


def check(draw, config, *, mean_weight=1.0, leave_out=()):
    normaliser = Normaliser(draw.num_tokens, draw.num_present, CONSTANT, mean_weight)
    result = policy_objective(draw.batch(leave_out=leave_out), config, normaliser)
    by_hand = ByHand(draw, config, mean_weight)
    has_proximal = "proximal_T" not in leave_out
    assert result.loss.item() == pytest.approx(by_hand.loss(draw.live, normaliser, has_proximal), abs=1e-10)
    assert result.loss.item() == pytest.approx(sum(float(p) for p in result.parts.values()), abs=1e-12)
    result.loss.backward()
    got = draw.leaves["live"].grad
    assert got is not None
    assert got.tolist() == pytest.approx(by_hand.gradient(normaliser, has_proximal), abs=1e-7)
    return result


LOSSES = ("ppo", "gspo", "cispo", "reinforce", "sapo")
CORRECTIONS = ("none", "behaviour", "decoupled", "tis", "icepop", "mis")


@pytest.mark.parametrize(
    ("loss", "correction", "reduction"),
    [*((*pair, "token") for pair in itertools.product(LOSSES, CORRECTIONS)),
     *((loss, "decoupled", reduction) for loss in LOSSES for reduction in ("rollout", "constant"))],
)  # fmt: skip
def test_every_loss_with_every_correction(draw, loss, correction, reduction):
    config = options(loss=loss, correction=correction, reduction=reduction, minibatches=2, tis_cap=1.2)
    check(draw(11), config)
    check(draw(12, spread=1.0), config)


@pytest.mark.parametrize(
    ("loss", "correction"),
    [*((loss, "decoupled") for loss in LOSSES), ("ppo", "tis"), ("ppo", "icepop"), ("ppo", "mis")],
)
def test_one_minibatch_uses_the_live_policy_as_proximal(draw, correction, loss):
    config = options(loss=loss, correction=correction, minibatches=1, tis_cap=1.1)
    some = draw(21)
    result = check(some, config, leave_out=("proximal_T",))
    assert float(result.sums["ratio"]) == float(len(some.live))
    assert float(result.sums["clip_fraction"]) == 0


@pytest.mark.parametrize("loss", ["dppo_tv", "dppo_kl"])
@pytest.mark.parametrize("minibatches", [1, 4])
def test_a_trust_region_masks_what_leaves_it_and_keeps_what_comes_back(draw, loss, minibatches):
    config = options(loss=loss, clip_low=0.02, clip_high=0.04, minibatches=minibatches)
    assert config.correction == "behaviour"
    some = draw(22, spread=1.0)
    some = replace(some, **{name: [min(x, -0.05) for x in getattr(some, name)] for name in ("live", "behaviour")})
    by_hand = ByHand(some, config)
    masked = [by_hand.is_beyond(t) for t in range(len(some.live))]
    result = check(some, config)
    assert float(result.sums["clip_fraction"]) == sum(masked) > 0
    comes_back = replace(some, advantages=[-a for a in some.advantages])
    assert not any(was and ByHand(comes_back, config).is_beyond(t) for t, was in enumerate(masked))
    check(comes_back, config)


@pytest.mark.parametrize("mode", ["truncate", "clip", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_mis_levels_and_modes(draw, mode, level):
    plain = options(
        correction="mis", mis_mode=mode, mis_level=level, mis_low=0.8, mis_high=1.2, minibatches=2, kl_coef=0.1
    )
    check(draw(31), plain)
    strict = options(
        correction="mis", mis_mode=mode, mis_level=level, mis_low=0.3, mis_high=3.0, reject_level="geometric",
        reject_low=0.9, reject_high=1.1, veto=0.6, minibatches=2, entropy_coef=0.01, kl_coef=0.1,
    )  # fmt: skip
    some = draw(32)
    result, by_hand = check(some, strict), ByHand(some, strict)
    sums = {name.removesuffix("_fraction"): float(total) for name, total in result.sums.items()}
    assert 0 < sums["removed"] <= sums["weight_cut"]
    trained = range(len(some.live))
    assert 0 < sums["rejected"] == sum(not 0.9 <= by_hand.q(t, "geometric", True) <= 1.1 for t in trained)
    assert 0 < sums["vetoed"] == sum(any(by_hand.q(s, "token", True) < 0.6 for s in by_hand.own(t)) for t in trained)


def test_mis_batch_normalisation_uses_the_global_mean(draw):
    config = options(
        correction="mis", mis_mode="truncate", mis_normalise=True, minibatches=2, mis_high=1.5, mis_low=0.1
    )
    whole = draw(33)
    total, count = weight_sums(whole.batch(), config).tolist()
    assert count == whole.num_tokens
    pieces = [weight_sums(whole.part(p).batch(), config) for p in ([0], [1, 2], [3, 4])]
    assert torch.stack(pieces).sum(0).tolist() == pytest.approx([total, count], rel=1e-12)
    result = check(whole, config, mean_weight=total / count)
    assert float(result.sums["weight"]) / count == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_icepop_at_each_level(draw, level):
    config = options(correction="icepop", mis_level=level, mis_low=0.8, tis_cap=1.3, minibatches=2)
    check(draw(34), config)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("loss", ["ppo", "gspo"])
def test_kl_in_the_loss(draw, kind, unbiased, loss):
    config = options(
        loss=loss, correction="behaviour", kl_coef=0.3, kl_kind=kind, kl_unbiased=unbiased, reduction="rollout"
    )
    result = check(draw(41), config)
    assert float(result.parts["kl_loss"]) != 0


def test_kl_in_the_reward_leaves_the_loss_alone(draw):
    with_reward = options(kind="reinforce_pp", correction="behaviour", kl_coef=0.3, kl_in="reward")
    result = check(draw(42), with_reward)
    assert "kl_loss" not in result.parts
    assert float(result.sums["kl"]) > 0


def test_entropy_bonus_pushes_entropy_up(draw):
    some = draw(43)
    config = options(correction="behaviour", entropy_coef=0.2)
    check(some, config)
    grad = some.leaves["entropy"].grad
    assert grad is not None
    assert grad.tolist() == pytest.approx([-0.2 / some.num_tokens] * some.num_tokens)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_b_f4_off_policy_masking_looks_at_the_sampling_policy(draw, correction):
    check(draw(44, spread=0.8), options(correction=correction, minibatches=2, opsm_delta=0.05))


@pytest.mark.parametrize(
    ("correction", "minibatches"),
    [(c, 2) for c in ("behaviour", "decoupled", "tis", "icepop", "mis")] + [("behaviour", 1), ("tis", 1)],
)
def test_b_f4_samples_that_the_engine_drew_far_from_the_policy_lose_their_tokens(draw, correction, minibatches):
    """Also where the trainer's own weights did not move since, so that only the engine differs."""
    some = draw(44)
    config = options(correction=correction, minibatches=minibatches, opsm_delta=0.1, mis_low=1e-9)
    count = len(some.live)
    alike = replace(some, proximal=some.live, advantages=[-1.0] * count)
    normaliser = Normaliser(alike.num_tokens, alike.num_present, CONSTANT, 1.0)

    def removed(gap):
        apart = replace(alike, behaviour=[live + gap for live in some.live], leaves={})
        batch = apart.batch(leave_out=("proximal_T",) if minibatches == 1 else ())
        return float(policy_objective(batch, config, normaliser).sums["opsm_fraction"])

    assert (removed(1.0), removed(0.05)) == (count, 0.0)


@pytest.mark.parametrize("loss", ["ppo", "gspo"])
@pytest.mark.parametrize("correction", ["behaviour", "decoupled"])
def test_dual_clip_is_forwarded_to_the_loss(draw, loss, correction):
    """slime's trap: an option that is accepted and does nothing."""
    wild = draw(45, spread=2.5)
    config = options(loss=loss, correction=correction, minibatches=2, dual_clip=1.3, tis_cap=50.0)
    result = check(wild, config)
    assert float(result.sums["dual_clip_fraction"]) > 0
    off = options(loss=loss, correction=correction, minibatches=2, tis_cap=50.0)
    assert check(wild, off).loss.item() > result.loss.item()


def test_sft_is_the_mean_negative_log_likelihood(draw):
    some = draw(46)
    result = check(some, options(kind="sft", correction="decoupled", minibatches=4), leave_out=("proximal_T",))
    assert result.loss.item() == pytest.approx(-sum(some.live) / len(some.live))
    assert set(result.sums) == {"logprob", "entropy", "kl"}  # nothing that compares with a behaviour policy


def test_clip_bounds_are_forwarded(draw):
    some = draw(47)
    narrow = check(some, options(correction="behaviour", clip_low=0.01, clip_high=0.02))
    wide = check(some, options(correction="behaviour", clip_low=0.9, clip_high=9.0))
    assert float(narrow.sums["clip_fraction"]) > 0 == float(wide.sums["clip_fraction"])
