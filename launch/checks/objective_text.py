"""What a run optimises: the formula of `[algo]` with its numbers. Pure; no torch.

The formulas are those of `algos/objective.py`, which says where each is from.
"""

from __future__ import annotations

from ...core.config import RunConfig
from ...core.config.learning import DEFAULTS_OF_KIND, AlgoConfig, resolve_correction

ADVANTAGES = {
    "grpo": "(R - mean) / std of its group",
    "dapo": "(R - mean) / std of its group",
    "gspo": "(R - mean) / std of its group",
    "cispo": "(R - mean) / std of its group",
    "dr_grpo": "R - mean of its group",
    "rloo": "R - mean of the other members",
    "reinforce_pp": "R discounted to tokens by gamma = {gamma:g}, whitened over the batch",
    "reinforce_pp_baseline": "R - mean of its group, whitened over the batch",
    "ppo": "GAE of R with gamma = {gamma:g}, lambda = {lam:g}, whitened over the batch",
    "sft": "1: every learnt token counts the same",
}
LOSSES = {
    "ppo": "-min(r A, clip(r, {low:g}, {high:g}) A)",
    "gspo": "-min(r A, clip(r, {low:g}, {high:g}) A)",
    "cispo": "-sg(clip(r, {low:g}, {high:g})) A log pi",
    "reinforce": "-sg(r) A log pi",
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


def objective_lines(config: RunConfig) -> tuple[str, ...]:
    """One line per part of the objective, `name: text`."""
    algo = config.algo
    rows = [("algorithm", f"{algo.kind} ({DEFAULTS_OF_KIND[algo.kind].source})"), ("minimised", _whole(algo))]
    if algo.policy_loss != "sft":
        rows += [("advantage A", _advantage(algo)), ("ratio r", _ratio(algo))]
    weight = algo.weight_fn or _weight(algo)
    if weight:
        rows.append(("weight w", weight))
    rows.append(("mean", MEANS[algo.reduction]))
    if algo.kl_coef:
        rows.append(("KL", _kl(algo)))
    if algo.opsm_delta:
        rows.append(("masking", f"samples of A < 0 with mean(behaviour - pi) above {algo.opsm_delta:g} nats lose L"))
    rows.append(("left out", _filters(algo)))
    return tuple(f"{name:<12} {text}" for name, text in rows)


def _whole(algo: AlgoConfig) -> str:
    loss = LOSSES[algo.policy_loss].format(low=max(0.0, 1 - algo.clip_low), high=1 + algo.clip_high)
    if algo.loss_fn:
        loss = algo.loss_fn
    elif algo.dual_clip:
        loss += f", at most {algo.dual_clip:g} |A| where A < 0"
    text = f"mean({'w ' if _weight(algo) or algo.weight_fn else ''}L)"
    if algo.kl_coef and algo.kl_in == "loss":
        text += f" + {algo.kl_coef:g} mean(k)"
    if algo.entropy_coef:
        text += f" - {algo.entropy_coef:g} mean(entropy)"
    return f"{text}, L = {loss}"


def _advantage(algo: AlgoConfig) -> str:
    text = algo.advantage_fn or ADVANTAGES[algo.kind].format(gamma=algo.gamma, lam=algo.lam)
    if not algo.advantage_fn and not algo.normalise_std:
        text = text.replace("(R - mean) / std", "R - mean")
    if algo.kl_coef and algo.kl_in == "advantage":
        text += f", less {algo.kl_coef:g} k per token"
    if algo.kl_coef and algo.kl_in == "reward":
        text += f"; {algo.kl_coef:g} k is taken from the reward of each token"
    return f"{text} (R after {algo.reward_post_process})" if algo.reward_post_process else text


def _correction(algo: AlgoConfig) -> str:
    return "none" if algo.policy_loss == "sft" else resolve_correction(algo.correction, algo.minibatches)


def _ratio(algo: AlgoConfig) -> str:
    correction = _correction(algo)
    at_start = "pi / proximal, the weights at the step's start"
    text = RATIOS.get(correction, at_start if algo.minibatches > 1 else f"{at_start}: 1 with one update a step")
    return f"{text}; geometric mean over the sample" if algo.policy_loss == "gspo" else text


def _weight(algo: AlgoConfig) -> str:
    text = WEIGHTS.get(_correction(algo), "").format(
        cap=algo.tis_cap,
        floor=algo.tis_floor,
        mis_low=algo.mis_low,
        mis_high=algo.mis_high,
        level=algo.mis_level,
        mode=algo.mis_mode,
    )
    if algo.reject_high:
        text += f"; {algo.reject_level}s outside [{algo.reject_low:g}, {algo.reject_high:g}] are rejected"
    return f"{text}; samples with a token below {algo.veto:g} are rejected" if algo.veto else text


def _kl(algo: AlgoConfig) -> str:
    x = "x = log pi - log reference"
    formula = {"k1": "x", "k2": "x^2 / 2", "k3": "exp(-x) - 1 + x"}
    text = f"k = {formula[algo.kl_estimator]} ({algo.kl_estimator}), {x}"
    if algo.kl_unbiased:
        text += ", weighted by pi / behaviour"
    reference = ", ".join(algo.ref_urls) or algo.ref_path or "the initial model"
    return f"{text}; reference: {reference}"


def _filters(algo: AlgoConfig) -> str:
    groups = {"none": "no group", "zero_variance": "groups of equal rewards"}.get(
        algo.group_filter, f"groups by {algo.group_filter}"
    )
    return groups if algo.sample_filter == "none" else f"{groups}; samples by {algo.sample_filter}"
