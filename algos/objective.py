"""The objective of a training step: one micro-batch in, its additive share of the global loss out.

It takes log-probs, advantages and the options of the algorithm, and uses no model, rank or collective. The
denominators are global and come from outside (`Normaliser`), so gradients of any cut of the batch into micro-batches
and ranks simply add up to the gradient of the whole.

    loss = red(w L) + kl_coef red(k) - entropy_coef red(H)

L: `losses.py`; w and k: `ratios.py`; red: sum over tokens divided by
    token      tokens of the mini-batch                      DAPO, arXiv 2503.14476, eq. 8
    rollout    the sample's own tokens, then samples         GRPO, arXiv 2402.03300, eq. 3
    constant   a constant, e.g. samples x longest answer              Dr.GRPO, arXiv 2503.20783, section 3.2

Which ratio the loss clips and which weight w multiplies it, by `correction`:

    none        live / sg(live)      1                            pretends to be on-policy; collapses when it is not
    behaviour   live / behaviour     1                            PPO's clip around the sampling policy
    decoupled   live / proximal      min(prox/behaviour, cap)     Hilton et al. 2110.00641; AReaL 2505.24298
    tis         live / proximal      clamp(prox/behaviour)        the same formula, plus an optional lower bound
    icepop      live / proximal      prox/behaviour or 0
    mis         live / proximal      see `ratios.py`

With one optimizer step a batch the proximal policy *is* the live one, no extra pass is needed and the ratio of the
last four is 1, so their clip never acts. Hence "auto": behaviour with one mini-batch, decoupled with several.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..core.config.learning import TOKEN_REWARD_KINDS, AlgoConfig, resolve_correction
from ..core.errors import TrainError
from ..core.samples import PAIR
from . import losses, ratios
from .ratios import MAX_EXPONENT, Segments, TokenWeights, kl_terms


def needs_proximal(config: AlgoConfig) -> bool:
    """Whether the batch must be scored once under the step's first weights, before its first mini-batch. With one
    mini-batch the live log-probs of the training pass are the same numbers, unless weights must be known before it
    (`mis_normalise`)."""
    if config.correction in ("none", "behaviour"):
        return False
    return config.updates_per_step > 1 or (config.correction == "mis" and config.mis_normalise)


def needs_whitening(config: AlgoConfig) -> bool:
    """Whether token advantages are whitened over the whole batch."""
    return config.whiten and config.kind in TOKEN_REWARD_KINDS


def objective_config(algo: AlgoConfig, minibatches: int | None = None) -> AlgoConfig:
    """The options of a step with so many mini-batches, what "auto" means in its place."""
    count = minibatches or algo.minibatches
    correction = resolve_correction(algo.correction, count * algo.epochs, algo.policy_loss)
    if algo.is_given:  # a demonstration has no behaviour policy, so there is nothing to correct for
        correction = "none"
    meant = {"loss": algo.policy_loss, "correction": correction, "kl_kind": algo.kl_estimator, "minibatches": count}
    return algo.model_copy(update=meant)


def supervised(config: AlgoConfig) -> AlgoConfig:
    """That of demonstrations beside other samples: cross entropy, with the same reduction."""
    sft = AlgoConfig(kind="sft", reduction=config.reduction)
    return sft.model_copy(update={"loss": "sft", "correction": "none"})


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """One micro-batch: loss tokens of all its samples in a row. T may be 0 (it pads the count)."""

    logprobs_T: Tensor
    """float [T]: live log-probs, with gradient; of kind reward one score for each sample."""
    behaviour_T: Tensor
    """float [T]: the engine's, at the moment of sampling."""
    advantages_T: Tensor
    segments: Segments
    """Whose each token is."""
    proximal_T: Tensor | None = None
    """float [T]: log-probs under the weights at the start of the step; see `needs_proximal`."""
    reference_T: Tensor | None = None
    """float [T]: log-probs under the reference model; see `AlgoConfig.uses_reference`."""
    entropy_T: Tensor | None = None
    """float [T]: entropy of the live distribution, with gradient if `entropy_coef` is not 0."""
    pair_S: Tensor | None = None
    """int64 [S]: of which pair each sample is, from 0; the better one has an advantage above 0. None: no pairs."""
    weights_T: Tensor | None = None
    """float [T]: factor of each token in all parts of the loss, not in a denominator; None: 1."""


@dataclass(frozen=True, slots=True)
class Normaliser:
    """Denominators, global over the mini-batch and all ranks."""

    tokens: float
    samples: float
    constant: float = 0.0
    """Divisor of reduction "constant", e.g. samples x max_new_tokens."""
    mean_weight: float = 1.0
    """Mean importance weight (see `weight_sums`), when `mis_normalise` is on."""


@dataclass(frozen=True, slots=True)
class Objective:
    """Result for one micro-batch. All of it is additive over micro-batches and ranks."""

    loss: Tensor
    """0-dim, differentiable: this micro-batch's share of the global loss."""
    parts: dict[str, Tensor]
    """0-dim, detached shares of the loss: policy_loss, kl_loss, entropy_loss; they add up to it. Of pairs: shares of
    means over them."""
    sums: dict[str, Tensor]
    """0-dim, detached sums of metrics over tokens; divide by the global number of tokens."""


@dataclass(frozen=True, slots=True)
class LossTokens:
    """As formulas want it: wide floats, nothing missing. What a user's own loss is computed from."""

    segments: Segments
    """Owner (`segments.sample_T`) of every token; sums and means per sample."""
    live_T: Tensor
    """float [T]: log-probs under the weights that are being trained, with gradient."""
    behaviour_T: Tensor
    """float [T]: the engine's, at the moment of sampling."""
    train_T: Tensor
    """float [T]: under the weights at the step's start; with one mini-batch the live ones without gradient."""
    old_T: Tensor
    """float [T]: what `algo.correction` says that the live ones are compared with."""
    advantages_T: Tensor
    reference_T: Tensor | None
    """float [T]: under the reference model; None without one."""
    entropy_T: Tensor | None
    """float [T]: entropy of the live distribution, with gradient if `entropy_coef` is not 0."""
    config: AlgoConfig
    """Bounds and coefficients of `[algo]` as they are in this step."""


@dataclass(frozen=True, slots=True)
class TokenFunctions:
    """Functions in place of those that the options name; None: those."""

    loss: Callable[[LossTokens], losses.TokenLoss] | None = None
    """L, in place of the one of `loss`."""
    weight: Callable[[LossTokens], TokenWeights] | None = None
    """w, in place of the one of `correction`."""


OPTIONS_OWN = TokenFunctions()


def pair_objective(batch: TokenBatch, config: AlgoConfig, normaliser: Normaliser) -> Objective:
    """The same for pairs of samples, which must be whole here: the mean over pairs. Raises TrainError for half ones."""
    segments, pair_S = batch.segments, batch.pair_S
    live_T = _wide(batch.logprobs_T)
    if pair_S is None or (config.uses_reference and batch.reference_T is None):
        raise TrainError("the micro-batch has no pairs, or no reference log-probs", remedy="a bug: score it before")
    one_S = segments.sum_S(torch.ones_like(live_T))
    better_S = segments.sum_S(_wide(batch.advantages_T)) > 0
    order_S = torch.argsort(2 * pair_S + (~better_S).long())
    sorted_S, is_better_S = pair_S[order_S], better_S[order_S]
    is_whole = len(pair_S) % 2 == 0 and torch.equal(sorted_S[::2], sorted_S[1::2])
    if not is_whole or not bool(is_better_S[::2].all()) or bool(is_better_S[1::2].any()):
        raise TrainError("a micro-batch holds half a pair", remedy="a bug in the planner, which keeps pairs together")

    def paired(x_T: Tensor) -> Tensor:
        return segments.sum_S(x_T)[order_S].reshape(-1, 2)

    margin: float | Tensor = config.simpo_margin if config.loss == "simpo" else 0.0
    if config.kind == "reward":  # advantages are half of 1 + margin, with either sign
        margin = paired(_wide(batch.advantages_T)).diff().squeeze(1).neg() - 1
    live_P2 = paired(live_T)
    reference_P2 = paired(_wide(batch.reference_T).detach()) if batch.reference_T is not None else None
    terms = losses.pair_loss(
        config.loss,
        live_P2,
        reference_P2,
        one_S[order_S].reshape(-1, 2),
        beta=config.beta,
        label_smoothing=config.label_smoothing,
        margin=margin,
        center=config.center_coef,
    )
    share = 1 / max(normaliser.samples / 2, 1.0)
    margin_P = terms.rewards_P2[:, 0] - terms.rewards_P2[:, 1]
    means = {"accuracy": (margin_P > 0).to(live_T.dtype), "margin": margin_P}
    for k, name in enumerate(PAIR):
        means |= {f"rewards/{name}": terms.rewards_P2[:, k]}
        means |= {f"logps/{name}": live_P2[:, k].detach()} if config.kind != "reward" else {}
    loss = terms.loss_P.sum() * share
    return Objective(
        loss=loss,
        parts={name: mean_P.sum() * share for name, mean_P in means.items()},
        sums={"logprob": live_T.detach().sum()} if config.kind != "reward" else {},
    )


def policy_objective(
    batch: TokenBatch, config: AlgoConfig, normaliser: Normaliser, functions: TokenFunctions = OPTIONS_OWN
) -> Objective:
    """This micro-batch's share of the loss and its metrics. Gradient flows through `logprobs_T` and `entropy_T`. Raises
    TrainError when log-probs that the options need are missing or a denominator is, and what `functions` raise."""
    if config.learns_pairs:
        return pair_objective(batch, config, normaliser)
    view = _view(batch, config)
    mean_weight = normaliser.mean_weight
    weights = _weights(view, config, mean_weight) if functions.weight is None else functions.weight(view)
    if config.loss == "gspo":
        ratio_T = ratios.sequence_ratio(view.live_T, view.old_T, view.segments)
    else:
        ratio_T = ratios.ratio(view.live_T, view.old_T)
    token_loss = _token_loss(view, ratio_T, config) if functions.loss is None else functions.loss(view)
    keep_T, policy_T = weights.keep_T, token_loss.loss_T
    removed_by = dict(weights.removed_by)
    if config.opsm_delta:
        opsm_T = losses.opsm_keep(view.live_T, view.behaviour_T, view.advantages_T, view.segments, config.opsm_delta)
        policy_T = torch.where(opsm_T, policy_T, 0.0)
        removed_by["opsm"] = ~opsm_T

    def reduced(x_T: Tensor) -> Tensor:
        scaled_T = x_T if batch.weights_T is None else _wide(batch.weights_T) * x_T
        return _reduce(scaled_T, keep_T, view.segments, config, normaliser)

    policy = reduced(weights.weight_T * policy_T)
    parts = {"policy_loss": policy}
    if view.reference_T is not None and config.kl_coef and config.kl_in == "loss":
        # the tokens were drawn by the behaviour policy, whatever the correction is (arXiv 2512.02556)
        weight_T = ratios.ratio(view.live_T, view.behaviour_T) if config.kl_unbiased else None
        kl_T = kl_terms(config.kl_estimator, view.live_T, view.reference_T, weight_T)
        parts["kl_loss"] = config.kl_coef * reduced(kl_T)
    if config.entropy_coef and view.entropy_T is not None:
        parts["entropy_loss"] = -config.entropy_coef * reduced(view.entropy_T)
    loss = torch.stack(list(parts.values())).sum()
    sums = _metrics(view, ratio_T, token_loss, replace(weights, removed_by=removed_by), config)
    return Objective(
        loss=loss,
        parts={name: part.detach() for name, part in parts.items()},
        sums={name: total.detach() for name, total in sums.items()},
    )


def weight_sums(batch: TokenBatch, config: AlgoConfig) -> Tensor:
    """float64 [2]: (sum, count) of this micro-batch's importance weights before normalisation. Add them over
    micro-batches and ranks before the first backward pass; the quotient is `Normaliser.mean_weight`."""
    view = _view(batch, config)
    return ratios.weight_sums(_weights(view, config, 1.0).weight_T, view.segments, config.mis_level)


def _view(batch: TokenBatch, config: AlgoConfig) -> LossTokens:
    live_T = _wide(batch.logprobs_T)
    needed = (
        ("proximal log-probs", batch.proximal_T, config.updates_per_step > 1 and needs_proximal(config)),
        ("reference log-probs", batch.reference_T, config.uses_reference and config.kl_in == "loss"),
        ("entropy", batch.entropy_T, config.entropy_coef != 0),
    )
    for name, tensor, is_needed in needed:  # without it the term would be left out, or the clip be dead
        if is_needed and tensor is None:
            raise TrainError(f"the micro-batch has no {name}", remedy="score it before its loss")
    behaviour_T = _wide(batch.behaviour_T).detach()
    train_T = live_T.detach() if batch.proximal_T is None else _wide(batch.proximal_T).detach()
    old_T = {"none": live_T.detach(), "behaviour": behaviour_T}.get(config.correction, train_T)
    return LossTokens(
        segments=batch.segments,
        live_T=live_T,
        behaviour_T=behaviour_T,
        train_T=train_T,
        old_T=old_T,
        advantages_T=_wide(batch.advantages_T).detach(),
        reference_T=None if batch.reference_T is None else _wide(batch.reference_T).detach(),
        entropy_T=None if batch.entropy_T is None else _wide(batch.entropy_T),
        config=config,
    )


def _wide(x_T: Tensor) -> Tensor:
    """At least float32; contiguous, so that a sum does not depend on what it was cut from."""
    return (x_T if x_T.dtype == torch.float64 else x_T.float()).contiguous()


def _token_loss(view: LossTokens, ratio_T: Tensor, config: AlgoConfig) -> losses.TokenLoss:
    if config.loss == "sft":
        return losses.sft_loss(view.live_T)
    if config.loss == "reinforce":
        return losses.reinforce_loss(view.live_T, ratio_T, view.advantages_T)
    if config.loss == "sapo":
        return losses.sapo_loss(ratio_T, view.advantages_T, config.sapo_tau_pos, config.sapo_tau_neg)
    if config.loss in ("dppo_tv", "dppo_kl"):
        divergence = "tv" if config.loss == "dppo_tv" else "kl"
        tokens = (ratio_T, view.live_T, view.behaviour_T, view.advantages_T)
        return losses.dppo_loss(*tokens, divergence, config.clip_low, config.clip_high)
    if config.loss == "cispo":
        return losses.cispo_loss(view.live_T, ratio_T, view.advantages_T, config.clip_low, config.clip_high)
    return losses.ppo_clip_loss(ratio_T, view.advantages_T, config.clip_low, config.clip_high, config.dual_clip)


def _weights(view: LossTokens, config: AlgoConfig, mean_weight: float) -> TokenWeights:
    """The weight of the correction, level by level; see the module's table."""
    correction = config.correction
    if correction in ("none", "behaviour"):
        return ratios.unit_weights(view.behaviour_T)
    if correction in ("decoupled", "tis"):
        log_q_T = ratios.log_weight(view.train_T, view.behaviour_T, view.segments, "token")
        return ratios.tis_weights(log_q_T, config.tis_cap, config.tis_floor if correction == "tis" else 0.0)
    log_q_T = ratios.log_weight(view.train_T, view.behaviour_T, view.segments, config.mis_level)
    if correction == "icepop":
        return ratios.icepop_weights(log_q_T, config.mis_low, config.tis_cap)
    return _mis(view, log_q_T, config, mean_weight)


def _mis(view: LossTokens, log_q_T: Tensor, config: AlgoConfig, mean_weight: float) -> TokenWeights:
    weights = ratios.mis_weights(log_q_T, config.mis_mode, config.mis_low, config.mis_high)
    keep_T = weights.keep_T
    removed_by: dict[str, Tensor] = {}
    if config.reject_high:
        judged_T = ratios.log_weight(view.train_T, view.behaviour_T, view.segments, config.reject_level)
        removed_by["rejected"] = ratios.outside(torch.exp(judged_T), config.reject_low, config.reject_high)
    if config.veto:
        removed_by["vetoed"] = ~ratios.veto(view.train_T, view.behaviour_T, view.segments, config.veto)
    for removed_T in removed_by.values():
        keep_T = keep_T & ~removed_T
    weights = TokenWeights(weights.weight_T, keep_T, weights.cut_T | ~keep_T, removed_by)
    return ratios.normalise(weights, mean_weight) if config.mis_normalise else weights


def _reduce(x_T: Tensor, keep_T: Tensor, segments: Segments, config: AlgoConfig, normaliser: Normaliser) -> Tensor:
    """0-dim share of the global mean. Removed tokens count in every denominator: removal is not a reweighting."""
    kept_T = torch.where(keep_T, x_T, 0.0)
    if config.reduction == "rollout":
        return segments.mean_S(kept_T).sum() / max(normaliser.samples, 1.0)
    total = kept_T.sum()
    if config.reduction == "token":
        return total / max(normaliser.tokens, 1.0)
    return total / normaliser.constant


def _metrics(
    view: LossTokens, ratio_T: Tensor, token_loss: losses.TokenLoss, weights: TokenWeights, config: AlgoConfig
) -> dict[str, Tensor]:
    """Sums over tokens. Supervised runs have no behaviour policy, so they leave out all that compares."""
    rows: dict[str, Tensor] = {"logprob": view.live_T}
    if view.entropy_T is not None:
        rows["entropy"] = view.entropy_T
    if view.reference_T is not None:  # k3 has the right value and little spread, whatever the loss differentiates
        rows["kl"] = kl_terms("k3", view.live_T.detach(), view.reference_T)
    rows |= {f"user/{name}": row_T for name, row_T in token_loss.metrics.items()}
    if config.loss != "sft":
        drift_T = view.old_T - view.live_T.detach()
        rows |= {
            "advantage": view.advantages_T,
            "ratio": ratio_T,
            "approx_kl": drift_T,
            "approx_kl_k3": ratios.ratio(view.live_T.detach(), view.old_T) - 1 + drift_T,
            "clip_fraction": token_loss.clipped_T,
            "dual_clip_fraction": token_loss.dual_clipped_T,
            "weight": weights.weight_T,
            "weight_cut_fraction": weights.cut_T,
            "removed_fraction": ~weights.keep_T,
        }
        rows |= {f"{rule}_fraction": removed_T for rule, removed_T in weights.removed_by.items()}
    sums = {name: row_T.detach().to(view.live_T.dtype).sum() for name, row_T in rows.items()}
    if config.loss != "sft":
        sums |= mismatch_sums(view.train_T, view.behaviour_T)
        sums["logprob_diff_abs"] = sums["mismatch_diff_abs"]
    return sums


def mismatch_sums(train_T: Tensor, behaviour_T: Tensor) -> dict[str, Tensor]:
    """Token sums (0-dim, detached), additive, of how far the engine's log-probs lie from the trainer's: with equal
    weights 0 up to rounding. k1 and k3 estimate KL(behaviour || train), chi2 the variance of the importance weights."""
    x_T = (train_T - behaviour_T).detach()
    q_T = torch.exp(x_T.clamp(-MAX_EXPONENT, MAX_EXPONENT))
    return {
        "mismatch_diff_abs": x_T.abs().sum(),
        "mismatch_k1": (-x_T).sum(),
        "mismatch_k3": (q_T - 1 - x_T).sum(),
        "mismatch_chi2": (q_T.square() - 1).sum(),
    }
