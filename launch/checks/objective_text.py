"""What a run optimises: the formula of `[algo]` with its numbers, from `algos/objective.py`. Pure; no torch."""

from __future__ import annotations

from ...core.config import RunConfig
from ...core.config.learning import DEFAULTS_OF_KIND, AlgoConfig, resolve_correction

BY_GROUP = {
    "group": "(R - mean) / std of its group",
    "batch": "(R - mean of its group) / std of all rewards of the step",
    "none": "R - mean of its group",
}
ADVANTAGES = {
    "dr_grpo": "R - mean of its group",
    "rloo": "R - mean of the other members",
    "reinforce_pp": "R discounted to tokens by gamma = {gamma:g}, whitened over the batch",
    "reinforce_pp_baseline": "R - mean of its group, whitened over the batch",
    "ppo": "GAE of R with gamma = {gamma:g}, lambda = {lam:g}, whitened over the batch",
}
LOSSES = {
    "cispo": "-sg(clip(r, {low:g}, {high:g})) A log pi",
    "reinforce": "-sg(r) A log pi",
    "dppo_tv": "-r A, 0 where A > 0 and pi - behaviour > {clip_high:g} or A < 0 and behaviour - pi > {clip_low:g}",
    "dppo_kl": "-r A, 0 where pi has left behaviour on the side of A by a binary KL above {clip_high:g} (A > 0), "
    "{clip_low:g} (A < 0)",
    "sapo": "-(4 / tau) sigmoid(tau (r - 1)) A, tau = {tau_pos:g} (A > 0), {tau_neg:g} (else)",
    "sft": "-log pi",
}
RATIOS = {
    "none": "pi / sg(pi) = 1: as if every token were on-policy",
    "behaviour": "pi / behaviour, the policy that sampled the token",
}
WEIGHTS = {
    "decoupled": "w = min(proximal / behaviour, {cap:g})",
    "tis": "w = proximal / behaviour within [{floor:g}, {cap:g}]",
    "icepop": "w = proximal / behaviour inside [{mis_low:g}, {cap:g}], else 0",
    "mis": "w = proximal / behaviour per {level}, {mode} outside [{mis_low:g}, {mis_high:g}]",
}
MEANS = {
    "token": "over all tokens of an update",
    "rollout": "over the tokens of each sample, then over samples",
    "constant": "sum over tokens / (samples x rollout.max_new_tokens)",
}
KL = {"k1": "x", "k2": "x^2 / 2", "k3": "exp(-x) - 1 + x"}


def objective_lines(config: RunConfig) -> tuple[str, ...]:
    """One line per part of the objective, `name: text`."""
    algo, coef = config.algo, config.algo.kl_coef
    weight, is_sft = algo.weight_fn or _weight(algo), algo.policy_loss == "sft"
    loss = LOSSES.get(algo.policy_loss, "-min(r A, clip(r, {low:g}, {high:g}) A)")
    bounds = {"low": max(0.0, 1 - algo.clip_low), "high": 1 + algo.clip_high}
    bounds |= {"clip_low": algo.clip_low, "clip_high": algo.clip_high}
    loss = algo.loss_fn or loss.format(**bounds, tau_pos=algo.sapo_tau_pos, tau_neg=algo.sapo_tau_neg)
    loss += f", at most {algo.dual_clip:g} |A| where A < 0" if algo.dual_clip and not algo.loss_fn else ""
    whole = f"mean({'w ' if weight else ''}L)"
    whole += f" + {coef:g} mean(k)" if coef and algo.kl_in == "loss" else ""
    whole += f" - {algo.entropy_coef:g} mean(entropy)" if algo.entropy_coef else ""
    reference = ", ".join(algo.ref_urls) or algo.ref_path or "the initial model"
    weighted = ", weighted by pi / behaviour" if algo.kl_unbiased else ""
    kl = f"k = {KL[algo.kl_estimator]} ({algo.kl_estimator}), x = log pi - log reference{weighted}"
    groups = {"none": "no group", "zero_variance": "groups of equal rewards"}
    left_out = groups.get(algo.group_filter, f"groups by {algo.group_filter}")
    left_out += "" if algo.sample_filter == "none" else f"; samples by {algo.sample_filter}"
    masked = f"samples of A < 0 with mean(behaviour - pi) above {algo.opsm_delta:g} nats lose L"
    rows = [
        ("algorithm", f"{algo.kind} ({DEFAULTS_OF_KIND[algo.kind].source})"),
        ("minimised", f"{whole}, L = {loss}"),
        ("advantage A", "" if is_sft else _advantage(algo)),
        ("ratio r", "" if is_sft else _ratio(algo)),
        ("weight w", weight),
        ("mean", MEANS[algo.reduction]),
        ("KL", f"{kl}; reference: {reference}" if coef else ""),
        ("masking", masked if algo.opsm_delta else ""),
        ("left out", left_out),
    ]
    return tuple(f"{name:<12} {text}" for name, text in rows if text)


def _advantage(algo: AlgoConfig) -> str:
    text = algo.advantage_fn or ADVANTAGES.get(algo.kind, BY_GROUP[algo.normalise])
    text = text if algo.whiten else text.replace(", whitened over the batch", "")
    text = text if algo.advantage_fn else text.format(gamma=algo.gamma, lam=algo.lam)
    text += f"; the critic learns returns of lambda = {algo.critic_lam:g}" if algo.critic_lam != algo.lam else ""
    if algo.kl_coef and algo.kl_in == "advantage":
        text += f", less {algo.kl_coef:g} k per token"
    if algo.kl_coef and algo.kl_in == "reward":
        text += f"; {algo.kl_coef:g} k is taken from the reward of each token"
    return f"{text} (R after {algo.reward_post_process})" if algo.reward_post_process else text


def _ratio(algo: AlgoConfig) -> str:
    at_start = "pi / proximal, the weights at the step's start"
    at_start += "" if algo.updates_per_step > 1 else ": 1 with one update a step"
    text = RATIOS.get(resolve_correction(algo.correction, algo.updates_per_step, algo.policy_loss), at_start)
    return f"{text}; geometric mean over the sample" if algo.policy_loss == "gspo" else text


def _weight(algo: AlgoConfig) -> str:
    if algo.policy_loss == "sft":
        return ""
    numbers = {"mis_low": algo.mis_low, "mis_high": algo.mis_high, "level": algo.mis_level, "mode": algo.mis_mode}
    text = WEIGHTS.get(resolve_correction(algo.correction, algo.updates_per_step, algo.policy_loss), "")
    text = text.format(cap=algo.tis_cap, floor=algo.tis_floor, **numbers)
    if algo.reject_high:
        text += f"; {algo.reject_level}s outside [{algo.reject_low:g}, {algo.reject_high:g}] are rejected"
    return f"{text}; samples with a token below {algo.veto:g} are rejected" if algo.veto else text
