"""How the model learns: sections `[algo]`, `[async]`, `[optimizer]`, `[trainer]`, `[lora]`, `[critic]`, `[megatron]`.

megatron-core is not imported: the names in the three verbatim tables of `[megatron]` are checked against the installed
version by the trainer, before anything is built.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_args

from pydantic import AfterValidator, BeforeValidator, Field, Strict, model_validator

from .hub import ModelPath
from .section import (
    CodeName,
    Conflict,
    CountInt,
    NonNegativeFloat,
    PathText,
    Pattern,
    PositiveFloat,
    PositiveInt,
    Section,
    SentTable,
    Table,
    TextTuple,
    UnitFloat,
    as_table,
    check_once,
    check_urls,
    clashes,
    code_names,
)

if TYPE_CHECKING:
    from ..samples import LossPart  # imports numpy

FILTER_BUILTINS = ("zero_variance", "none")


SAMPLE_FILTER_BUILTINS = ("none", "truncated")

PolicyLoss = Literal["ppo", "gspo", "cispo", "reinforce", "dppo_tv", "dppo_kl", "sapo", "sft"]
PairLoss = Literal["dpo", "ipo", "hinge", "simpo", "orpo", "bradley_terry"]
LossName = Literal["auto"] | PolicyLoss | PairLoss
Correction = Literal["auto", "none", "behaviour", "decoupled", "tis", "icepop", "mis"]
Reduction = Literal["token", "rollout", "constant"]
Normalise = Literal["group", "batch", "none"]
KlPlace = Literal["loss", "reward", "advantage"]
KlKind = Literal["k1", "k2", "k3"]
AlgoKind = Literal[
    "grpo", "dapo", "dr_grpo", "gspo", "cispo", "ppo", "reinforce_pp", "reinforce_pp_baseline", "rloo", "sft",
    "dpo", "reward",
]  # fmt: skip
TOKEN_REWARD_KINDS: tuple[AlgoKind, ...] = ("ppo", "reinforce_pp", "reinforce_pp_baseline")
"""Algorithms with a reward for each token: it has a place for a KL term, and their advantages, which have no other
baseline, are whitened over the batch."""
COMPARING_KINDS: tuple[AlgoKind, ...] = ("grpo", "dapo", "dr_grpo", "gspo", "cispo", "rloo", "reinforce_pp_baseline")
"""Algorithms that compare the samples of a group: it needs two at least."""
PAIR_KINDS: tuple[AlgoKind, ...] = ("dpo", "reward")
"""Algorithms that learn which of two answers is better."""
PAIRS, PAIR_LOSSES = ",".join(PAIR_KINDS), ",".join(get_args(PairLoss))
GIVEN_KINDS: tuple[AlgoKind, ...] = ("sft", *PAIR_KINDS)
"""Algorithms whose answers are in the rows: no engine takes part."""
REFERENCE_LOSSES: tuple[LossName, ...] = ("dpo", "ipo", "hinge")
"""Losses that compare with a reference model's log-probs."""
NORMALISED_KINDS: tuple[AlgoKind, ...] = ("grpo", "dapo", "gspo", "cispo")
"""Algorithms that divide by a standard deviation of rewards."""
LOSS_OF_KIND: Mapping[AlgoKind, LossName] = {
    "gspo": "gspo", "cispo": "cispo", "sft": "sft", "dpo": "dpo", "reward": "bradley_terry",
}  # fmt: skip
"""The loss that loss = "auto" means; ppo for all others."""


TRUST_REGION_LOSSES: Mapping[LossName, float] = {"dppo_tv": 0.15, "dppo_kl": 0.05}
"""Losses that bound a divergence from the sampling policy instead of the ratio, and the bound of their paper's runs
(arXiv 2602.04879): what `clip_low` and `clip_high` are where they are left out."""


@dataclass(frozen=True, slots=True)
class KindDefaults:
    """Values of `[algo]` that follow `kind` where the run file leaves them out."""

    clip_low: float
    clip_high: float
    reduction: Reduction
    group_filter: str
    source: str
    """Paper that the values are from."""


DEFAULTS_OF_KIND: Mapping[AlgoKind, KindDefaults] = {
    "grpo": KindDefaults(0.2, 0.2, "rollout", "zero_variance", "arXiv 2402.03300, eq. 3"),
    "dapo": KindDefaults(0.2, 0.28, "token", "zero_variance", "arXiv 2503.14476, eq. 8"),
    "dr_grpo": KindDefaults(0.2, 0.2, "constant", "zero_variance", "arXiv 2503.20783, section 3.2"),
    "gspo": KindDefaults(3e-4, 4e-4, "rollout", "zero_variance", "arXiv 2507.18071, eq. 5 and section 5.1"),
    "cispo": KindDefaults(1.0, 4.0, "token", "zero_variance", "arXiv 2506.13585, eq. 4; upper bound: usual"),
    "ppo": KindDefaults(0.2, 0.2, "token", "none", "arXiv 1707.06347, eq. 7"),
    "reinforce_pp": KindDefaults(0.2, 0.2, "token", "none", "arXiv 2501.03262"),
    "reinforce_pp_baseline": KindDefaults(0.2, 0.2, "token", "zero_variance", "arXiv 2501.03262"),
    "rloo": KindDefaults(0.2, 0.2, "constant", "zero_variance", "arXiv 2402.14740, eq. 8"),
    "sft": KindDefaults(0.2, 0.2, "token", "none", "cross entropy"),
    "dpo": KindDefaults(0.2, 0.2, "rollout", "none", "a mean over pairs; arXiv 2305.18290, eq. 7"),
    "reward": KindDefaults(0.2, 0.2, "rollout", "none", "a mean over pairs; arXiv 2203.02155, eq. 1"),
}
"""The zero-variance filter serves algorithms that live from differences inside a group; for the others a group of equal
rewards is a lesson like any other."""


def _above_one(value: float) -> float:
    if 0 < value <= 1:
        raise ValueError("must be 0 (off) or greater than 1")
    return value


DualClip = Annotated[NonNegativeFloat, AfterValidator(_above_one)]
Betas = Annotated[tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]], Strict(False)]


def resolve_correction(correction: Correction, updates: int, loss: LossName) -> Correction:
    """The meaning of "auto": behaviour with one optimizer update a step, decoupled with several. A loss with a trust
    region around the sampling policy takes behaviour with any number.

    With one update the proximal policy is the live one: decoupled would be an importance weight without any trust
    region, while the clip around the behaviour policy stops tokens that have moved far enough. Other names pass.
    """
    if correction != "auto":
        return correction
    return "behaviour" if updates == 1 or loss in TRUST_REGION_LOSSES else "decoupled"


def _defaults_by_kind(table: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of `[algo]` that follow others of it, as they are where the file leaves them out."""
    kind, loss = table.get("kind", "grpo"), table.get("loss", "auto")
    defaults = DEFAULTS_OF_KIND.get(cast(AlgoKind, kind)) if isinstance(kind, str) else None
    if defaults is None:  # a mistake that the field's own check names
        return {}
    is_other_loss = loss in ("ppo", "gspo", "cispo") and loss != LOSS_OF_KIND.get(cast(AlgoKind, kind), "ppo")
    clips = DEFAULTS_OF_KIND[cast(AlgoKind, loss)] if is_other_loss else defaults
    bound = TRUST_REGION_LOSSES.get(cast(LossName, loss)) if isinstance(loss, str) else None
    kl_in, kl_kind = table.get("kl_in", "loss"), table.get("kl_kind")
    return {
        "clip_low": bound or clips.clip_low,
        "clip_high": bound or clips.clip_high,
        "reduction": defaults.reduction,
        "critic_lam": table.get("lam", 1.0),
        "group_filter": "none" if kl_in == "advantage" and table.get("kl_coef") else defaults.group_filter,
        "kl_unbiased": kl_in == "loss" and kl_kind != "k2" and kind not in GIVEN_KINDS,
    }


class AlgoConfig(Section, frozen=True):
    """Which loss on which batch."""

    kind: AlgoKind = "grpo"
    """Algorithm: how rewards become advantages and which ratio the loss uses."""
    batch_size: PositiveInt = 32
    """Groups trained on in one step (so `batch_size * rollout.num_samples` samples)."""
    minibatches: PositiveInt = 1
    """Optimizer updates in one pass over the batch; divides `batch_size`."""
    epochs: PositiveInt = 1
    """Passes over the batch in one step, so `epochs * minibatches` optimizer updates."""
    loss: LossName = "auto"
    """Policy loss; auto = the one that belongs to `kind`."""
    clip_low: PositiveFloat = 0.2
    """Ratio is clipped below at `1 - clip_low`; dppo: bound of the divergence where A < 0. Follows `kind` and `loss`
    where it is left out."""
    clip_high: PositiveFloat = 0.2
    """Ratio is clipped above at `1 + clip_high`; dppo: bound of the divergence where A > 0. Follows `kind` and `loss`
    where it is left out."""
    sapo_tau_pos: PositiveFloat = 1.0
    """Temperature of the sapo loss where the advantage is positive: a larger one fades the gradient earlier."""
    sapo_tau_neg: PositiveFloat = 1.05
    """Temperature of the sapo loss where the advantage is not positive."""
    beta: PositiveFloat = 0.1
    """dpo: factor of the log-probs that pairs are compared by; orpo: weight of its comparison; ipo: 1 / (2 beta) is the
    margin it draws to."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of the pairs that is thought to be the wrong way round, for the dpo (then cDPO) and simpo losses."""
    simpo_margin: NonNegativeFloat = 0.5
    """Margin of rewards that the simpo loss draws to (its gamma)."""
    center_coef: NonNegativeFloat = 0.0
    """reward: weight of the squared sum of a pair's two scores, which holds them around 0; 0 = off."""
    dual_clip: DualClip = 0.0
    """Bound (> 1) on the loss of negative advantages, for the ppo and gspo losses; 0 = off."""
    correction: Correction = "auto"
    """What is done about tokens sampled from older weights or by another engine; auto = behaviour with one optimizer
    update a step, decoupled with several."""
    tis_cap: PositiveFloat = 2.0
    """Upper bound of the importance weight of `tis`, `icepop` and `decoupled`."""
    tis_floor: NonNegativeFloat = 0.0
    """Lower bound of the importance weight of `tis`; 0 = none."""
    mis_level: Literal["token", "sequence", "geometric"] = "token"
    """Level on which `mis` and `icepop` judge the importance weight."""
    mis_mode: Literal["truncate", "clip", "mask"] = "mask"
    """What `mis` does outside its bounds."""
    mis_low: PositiveFloat = 0.5
    """Lower bound of the importance weight of `mis` and `icepop`."""
    mis_high: PositiveFloat = 2.0
    """Upper bound of the importance weight of `mis`."""
    mis_normalise: bool = False
    """Whether `mis` divides its weights by their mean over the mini-batch (one more forward pass a step)."""
    reject_level: Literal["token", "sequence", "geometric"] = "geometric"
    """Level on which `mis` judges whom to reject."""
    reject_low: NonNegativeFloat = 0.0
    """`mis`: tokens (samples) whose importance weight at `reject_level` is below this are removed; needs
    `reject_high`."""
    reject_high: NonNegativeFloat = 0.0
    """`mis`: tokens (samples) whose importance weight at `reject_level` is above this are removed; 0 = none is."""
    veto: UnitFloat = 0.0
    """`mis`: a sample with any token whose importance weight is below this is removed; 0 = off."""
    opsm_delta: NonNegativeFloat = 0.0
    """Off-policy sequence masking: a sample of negative advantage loses its policy loss when the mean of (behaviour -
    live) log-probs over its tokens exceeds this; 0 = off."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the KL term towards the reference model; 0 = none, and no such model, but of kind dpo."""
    ref_path: ModelPath = ""
    """The reference model, named as `model.path` is, of the same shape as the trained one; empty = the initial model,
    `model.path`."""
    ref_update_every: CountInt = 0
    """Steps after which the policy of that moment becomes the reference model, again and again; 0 = never."""
    ref_urls: Annotated[TextTuple, AfterValidator(check_urls)] = ()
    """Addresses of SGLang servers that serve the reference model instead, over the same vocabulary: they are asked by
    the rollout actors once a sample is finished, and the trainer keeps no such model. Needs
    `rollout.temperature = 1`."""
    ref_key_env: str = ""
    """Environment variable of the rollout actors that holds the key of these servers (their `--api-key`); empty = they
    ask for none."""
    ref_timeout_s: PositiveFloat = 60.0
    """Seconds one of these servers may take for one sample; then another one is asked, or the same again, see
    docs/algorithms.md."""
    kl_in: KlPlace = "loss"
    """Where the KL term goes; reward is defined for ppo, reinforce_pp and reinforce_pp_baseline only. advantage takes
    it from each token's advantage: distillation on the policy's own samples, if the reference is a teacher."""
    kl_kind: Literal["auto", KlKind] = "auto"
    """Estimator of the KL divergence. auto = k1 in rewards and advantages; in the loss k3 with `kl_unbiased`, else k2.
    One that has another gradient than the KL divergence in its place is refused."""
    kl_unbiased: bool = False
    """Whether the KL term in the loss is weighted by live / behaviour, so that value and gradient are unbiased under
    every `correction`, on tokens of older weights too. Left out: true in the loss, but with k2 and sft."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus; 0 = off."""
    reduction: Reduction = "rollout"
    """Mean of the loss: over all tokens, per rollout first, or divided by a constant (`rollout.max_new_tokens` times
    samples). Follows `kind` where it is left out."""
    normalise: Normalise = "group"
    """What divides R - mean of the group, for grpo, dapo, gspo and cispo: the standard deviation of the group's
    rewards, of all rewards of the step, or nothing."""
    whiten: bool = True
    """Whether ppo, reinforce_pp and reinforce_pp_baseline whiten their advantages over the batch."""
    group_filter: Annotated[CodeName, code_names(*FILTER_BUILTINS), Field(min_length=1)] = "zero_variance"
    """Which groups are left out: zero_variance (all rewards equal), none, or your own `module:function`. Follows `kind`
    where it is left out; none with `kl_in = "advantage"`."""
    group_filter_args: SentTable = {}
    """Named arguments of the group filter, for example `eps = 0.01` for zero_variance."""
    sample_filter: Annotated[CodeName, code_names(*SAMPLE_FILTER_BUILTINS), Field(min_length=1)] = "none"
    """From which members of a group that stays nothing is learnt (they still count where rewards are compared): none,
    truncated (cut off by a token limit), or your own `module:function`."""
    sample_filter_args: SentTable = {}
    """Named arguments of the sample filter."""
    reward_post_process: Annotated[CodeName, code_names()] = ""
    """Your own function from the rewards of a whole batch to those that advantages are made of, `module:function` or
    `file.py:function`; empty = rewards as they are."""
    advantage_fn: Annotated[CodeName, code_names()] = ""
    """Your own advantages, per sample or per token, in place of the algorithm's; not for ppo, reinforce_pp,
    reinforce_pp_baseline and sft, which make their own per token."""
    weight_fn: Annotated[CodeName, code_names()] = ""
    """Your own importance weight per token in place of the correction's; not with tis, icepop and mis, which are
    weights."""
    loss_fn: Annotated[CodeName, code_names()] = ""
    """Your own policy loss per token in place of `loss`; correction, masks, KL, entropy and reduction stay."""
    gamma: UnitFloat = 1.0
    """Discount per token."""
    turn_discount: UnitFloat = 1.0
    """Discount per turn of the rewards that a workflow gives to turns, and of the rollout's reward, for algorithms that
    compare rollouts."""
    lam: UnitFloat = 1.0
    """Lambda of generalised advantage estimation (ppo)."""
    critic_lam: UnitFloat = 1.0
    """Lambda of the returns that a critic learns. Follows `lam` where it is left out."""

    @model_validator(mode="before")
    @classmethod
    def _fill_by_kind(cls, raw: object) -> object:
        """Values that are left out are those of the algorithm's paper, not those of another algorithm."""
        table = as_table(raw)
        return raw if table is None else {**_defaults_by_kind(table), **table}

    def default_of(self, name: str) -> object:
        """Values that are left out follow others."""
        others = {other: value for other, value in vars(self).items() if other != name}
        return _defaults_by_kind(others).get(name, super().default_of(name))

    @property
    def updates_per_step(self) -> int:
        return self.epochs * self.minibatches

    @property
    def keeps_reference(self) -> bool:
        """Whether the trainer holds a reference model."""
        return self.uses_reference and not self.ref_urls

    @property
    def uses_reference(self) -> bool:
        """Whether a reference model must score samples, here or served: for a KL term, wherever it goes, or to compare
        pairs."""
        return self.kl_coef > 0 or self.policy_loss in REFERENCE_LOSSES

    @property
    def learns_pairs(self) -> bool:
        """Whether a group is a pair of answers: the better one, and the worse one."""
        return self.kind in PAIR_KINDS

    @property
    def is_given(self) -> bool:
        """Whether the rows hold the answers."""
        return self.kind in GIVEN_KINDS

    @property
    def policy_loss(self) -> LossName:
        """The loss that `loss` means."""
        return LOSS_OF_KIND.get(self.kind, "ppo") if self.loss == "auto" else self.loss

    @property
    def kl_estimator(self) -> KlKind:
        """The estimator that `kl_kind` means."""
        if self.kl_kind != "auto":
            return self.kl_kind
        return "k1" if self.kl_in != "loss" else "k3" if self.kl_unbiased else "k2"

    @property
    def loss_parts(self) -> tuple[LossPart, ...]:
        """What a workflow may say is learnt from a sample."""
        sft: tuple[LossPart, ...] = () if self.kind == "ppo" else ("sft",)  # a critic has no values of demonstrations
        return ("algo", *sft, "distill") if self.kl_in == "advantage" and self.kl_coef else ("algo", *sft)

    @property
    def needs_groups(self) -> bool:
        """Whether advantages are those of samples that are compared, and nothing else."""
        return self.kind in COMPARING_KINDS and not self.advantage_fn and self.kl_in != "advantage"

    relations = (
        f"kl_in=reward needs kind={','.join(TOKEN_REWARD_KINDS)}: the others have no reward for a token",
        'kl_in=advantage needs kind!=sft: it has no advantages; use "loss"',
        'loss=sft needs kind=sft: use "auto"',
        'loss!=auto,sft needs kind!=sft: use "auto"',
        f"loss={PAIR_LOSSES} needs kind={PAIRS}: it compares pairs",
        f"loss=auto,{PAIR_LOSSES} for kind={PAIRS}",
        "loss=bradley_terry needs kind=reward: it compares scores",
        "loss=auto,bradley_terry for kind=reward",
        "beta ref_path ref_urls ref_update_every needs kind!=reward: scores are compared with nothing else",
        "center_coef needs kind=reward",
        f"beta needs kind={PAIRS}: the weight of a KL term is kl_coef",
        "simpo_margin needs loss=simpo",
        "ref_path ref_urls ref_update_every needs loss!=simpo,orpo: they compare with no reference model",
        f"kl_coef entropy_coef needs kind!={PAIRS}: a pair's loss has no such term",
        f"loss_fn weight_fn opsm_delta needs kind!={PAIRS}: they are for losses per token",
        f"correction needs kind!={PAIRS}: no engine sampled the answers",
        f"reward_post_process advantage_fn needs kind!={PAIRS}: pairs have no rewards",
        f"sample_filter needs kind!={PAIRS}: half a pair teaches nothing",
        "loss=auto for loss_fn",
        "loss=dppo_tv,dppo_kl needs correction=auto,behaviour: its trust region is around the sampling policy",
        f"normalise needs kind={','.join(NORMALISED_KINDS)}",
        f"whiten needs kind={','.join(TOKEN_REWARD_KINDS)}: the others whiten nothing",
        f"turn_discount needs kind={','.join(COMPARING_KINDS)}: use gamma",
        "critic_lam needs kind=ppo",
        f"advantage_fn needs kind!={','.join(TOKEN_REWARD_KINDS)},sft: it makes advantages per token",
        "opsm_delta needs kind!=sft: use 0",
        "reward_post_process needs kind!=sft: it has no rewards",
        "mis_normalise reject_high veto needs correction=mis",
        "tis_floor needs correction=tis",
        "mis_normalise needs mis_level!=geometric: geometric weights have no mean",
        'weight_fn needs correction!=tis,icepop,mis: it is a weight itself; use "decoupled" or "behaviour"',
        "ref_update_every needs !ref_urls: servers keep their model",
        "ref_urls needs !ref_path: name a folder or servers",
        "ref_key_env needs ref_urls: they ask for the key",
    )

    def conflicts(self) -> Iterator[Conflict]:
        """Batch arithmetic, bounds that cross, and options that the loss does not define."""
        kind, loss = self.kind, self.policy_loss
        yield from clashes(
            (self.batch_size % self.minibatches, "minibatches",
             f"does not divide batch_size = {self.batch_size} (groups in one step)"),
            (self.clip_low > 1 and loss not in ("cispo", "dppo_kl"), "clip_low",
             f'must be at most 1 for kind = "{kind}": ratios are not negative'),
            (self.dual_clip and loss not in ("ppo", "gspo"), "dual_clip",
             f'is not defined for the loss "{loss}"; use 0'),
            (self.label_smoothing and loss not in ("dpo", "simpo"), "label_smoothing",
             f'is not defined for the loss "{loss}"; use 0'),
            (self.correction == "icepop" and self.mis_low >= self.tis_cap, "mis_low",
             f"must be below tis_cap = {self.tis_cap:g}"),
        )  # fmt: skip
        for low, high in (("tis_floor", "tis_cap"), ("mis_low", "mis_high"), ("reject_low", "reject_high")):
            bottom, top = getattr(self, low), getattr(self, high)
            crossed = f"must be below {high} = {top:g}" if top else f"needs {high}"
            yield from clashes((bottom and bottom >= top, low, crossed))
        yield from self._kl_conflicts() if self.kl_coef else ()

    def _kl_conflicts(self) -> Iterator[Conflict]:
        """Estimators whose gradient is not that of KL(policy || reference) where they are put.

        In rewards and advantages the estimate is a constant factor of grad log pi: only k1 gives grad KL there. In the
        loss it is differentiated: k2 is right on the policy's own tokens, k1 and k3 when weighted by live / behaviour.
        """
        kind, place, is_unbiased = self.kl_estimator, self.kl_in, self.kl_unbiased
        in_loss, is_sft = place == "loss", self.kind == "sft"
        plain = {
            "k1": "has a gradient of mean 0 in the loss: it holds nothing back",
            "k3": "has the gradient of KL(reference || policy) in the loss, not of KL(policy || reference)",
        }
        return clashes(
            (not in_loss and kind != "k1", "kl_kind",
             f'has no KL gradient with kl_in = "{place}" (none near the reference, away from it further on); use "k1"'),
            (not in_loss and is_unbiased, "kl_unbiased", f'is for kl_in = "loss", not "{place}"'),
            (in_loss and is_unbiased and is_sft, "kl_unbiased",
             'does not go with kind = "sft": demonstrations have no sampling policy'),
            (in_loss and is_unbiased and not is_sft and kind == "k2", "kl_kind",
             'has no KL gradient when it is weighted (kl_unbiased); use "k3" or "k1"'),
            (in_loss and not is_unbiased and kind != "k2", "kl_kind",
             f'{plain.get(kind)}; add kl_unbiased = true, or use "k2"'),
        )  # fmt: skip


class AsyncSettings(Section, frozen=True):
    """How far generation may run ahead of training."""

    max_staleness: Annotated[int, Field(ge=0, le=1000)] = 2
    """eta: training steps that the weights behind any token may be old when it is trained on; 0 = on-policy."""
    policy: Literal["pace", "wait", "drop"] = "pace"
    """How the bound is kept: pace (work is handed out so that nothing grows too old), wait (the trainer waits for the
    oldest), drop (too old groups are thrown away; favours short answers)."""


class OptimizerConfig(Section, frozen=True):
    """The optimizer and its schedule."""

    name: Literal["adamw", "muon"] = "adamw"
    """adamw, or muon for matrices (not embedding and head) and AdamW for the rest; muon is the Megatron trainer's."""
    lr: PositiveFloat = 1e-4
    """Learning rate at the top of the schedule."""
    betas: Betas = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment, each in [0, 1)."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay (matrices only)."""
    eps: PositiveFloat = 1e-8
    """AdamW's epsilon."""
    max_grad_norm: PositiveFloat = 1.0
    """Global gradient norm above which gradients are scaled down."""
    schedule: Literal["constant", "cosine", "linear", "wsd"] = "constant"
    """Course of the learning rate after the warm-up; wsd stays at the top until its last `wsd_decay_steps` updates."""
    warmup_steps: CountInt = 0
    """Optimizer updates over which the rate rises from 0."""
    min_lr_ratio: UnitFloat = 0.0
    """Share of `lr` at which the schedule ends; constant has no end."""
    decay_steps: CountInt = 0
    """Optimizer updates at which the schedule ends; 0 = at the end of the run."""
    wsd_decay_steps: CountInt = 0
    """Optimizer updates over which wsd goes down at its end."""
    wsd_decay: Literal["linear", "cosine", "minus_sqrt"] = "linear"
    """Course on which wsd goes down; minus_sqrt = 1 - sqrt(progress)."""

    relations = ("wsd_decay_steps for schedule=wsd: it goes down at its end", "wsd_decay_steps needs schedule=wsd")

    def rate_is_zero_from(self, num_updates: int) -> int:
        """The update from which on the rate is 0, where the whole run makes so many; 0: it never is."""
        return 0 if self.schedule == "constant" or self.min_lr_ratio else self.decay_steps or num_updates

    def conflicts(self) -> Iterator[Conflict]:
        """A schedule that ends before it begins."""
        warmup, decay, wsd = self.warmup_steps, self.decay_steps, self.wsd_decay_steps
        return clashes(
            (0 < decay <= warmup, "decay_steps", f"must be above warmup_steps = {warmup}"),
            (wsd and self.schedule == "wsd" and 0 < decay < warmup + wsd, "wsd_decay_steps",
             f"and warmup_steps = {warmup} are longer than decay_steps = {decay}"),
        )  # fmt: skip


class TrainerConfig(Section, frozen=True):
    """The training processes."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number type of forward and backward; master weights are float32."""
    impl: Literal["own", "hf"] = "own"
    """Who computes the model in the torch trainer: own (packed tokens, shared prompts; dense Qwen3, Qwen2 and Llama) or
    hf (transformers, padded rows; any causal language model that it reads)."""
    strategy: Literal["ddp", "fsdp"] = "ddp"
    """How ranks share the model: ddp (each has all of it) or fsdp (sharded)."""
    freeze: Annotated[tuple[Pattern, ...], Strict(False)] = ()
    """Regular expressions (Python syntax, found anywhere in a parameter's HuggingFace name) of what is not trained; the
    torch trainer's."""
    max_tokens_per_microbatch: PositiveInt = 4096
    """Tokens (prompt and answer, all samples) in one forward pass; a longer sample gets its own pass."""
    checkpoint_every: CountInt = 0
    """Steps between checkpoints; 0 = none during the run."""
    step_timeout_s: PositiveFloat = 1800.0
    """Seconds that a step may take, compiling included, or one publication, score or checkpoint: a rank that has not
    answered by then hangs, and the gang is restarted. Also the limit of every collective."""
    async_save: bool = False
    """Whether checkpoints are written while training continues: it waits for a copy in the host's memory only."""
    checkpoint_at_stop: bool = True
    """Whether a run that is stopped (SIGTERM, Ctrl-C, `myxa down`, `max_wall_s`, `stop_reward`) writes a
    checkpoint of its newest version, also with `checkpoint_every = 0`."""
    keep_last: PositiveInt = 2
    """Checkpoints kept, with the samples that going back to any of them would need; older ones are deleted."""
    keep_every: CountInt = 0
    """m: besides, each m-th checkpoint by schedule stays for ever (versions divisible by `keep_every *
    checkpoint_every`); 0 = none."""
    resume: PathText = ""
    """Checkpoint folder, or run directory (its newest checkpoint), to continue from; empty = none."""
    export_at_end: bool = True
    """Whether the trained model is written as a HuggingFace folder when the run ends."""
    export_dtype: Literal["model", "float32", "bfloat16"] = "model"
    """Number type of its weights; model = that of the model folder (`dtype` or `torch_dtype` of its config.json), or
    `trainer.dtype` for a folder of another type than these."""
    activation_checkpointing: bool = False
    """Whether activations are recomputed in the backward pass to save memory."""


ALL_LINEAR = ("all-linear",)


def _all_linear(value: object) -> object:
    """PEFT takes this one as a text too; of any other it makes a pattern."""
    return ALL_LINEAR if value == ALL_LINEAR[0] else value


class LoraConfig(Section, frozen=True):
    """Low-rank adapters (arXiv 2106.09685) in place of training all weights; names and meanings are PEFT's."""

    rank: CountInt = 0
    """r: rank of every adapter; 0 = none, all weights are trained. Else the model's own weights stay as they are."""
    alpha: PositiveFloat = 32.0
    """lora_alpha: what an adapter gives is multiplied by `alpha / rank`."""
    target_modules: Annotated[
        TextTuple, Field(min_length=1), AfterValidator(check_once), BeforeValidator(_all_linear)
    ] = ALL_LINEAR
    """Ends of the names of matrices that get one, such as "q_proj"; all-linear = every matrix of the layers."""
    dropout: UnitFloat = 0.0
    """lora_dropout: only 0 is possible."""
    path: ModelPath = ""
    """Adapter folder in PEFT's format, or its name on the hub, to start from, of the same rank, alpha and matrices;
    empty = adapters that change nothing yet."""
    export: Literal["adapter", "merged"] = "adapter"
    """What an export is: an adapter folder for PEFT, or a whole model with the adapters merged into its weights."""
    rollout: Literal["merged", "adapter"] = "merged"
    """What engines get: whole weights with the adapters merged in, or the adapters alone (SGLang, by folders). Requests
    then end with the adapter that they began with, and no update pauses them."""

    def conflicts(self) -> Iterator[Conflict]:
        """What adapters cannot do."""
        cause = "must be 0: a token's log-probs would differ from one pass to the next"
        return clashes((self.dropout, "dropout", cause))


class CriticConfig(Section, frozen=True):
    """A critic for `algo.kind = "ppo"`: a value model that the torch trainer trains beside the policy."""

    enabled: bool = False
    """Whether advantages are taken against the values of a critic (docs/algorithms.md)."""
    path: ModelPath = ""
    """Model that its layers begin as, named as `model.path` is, of the same shape as that; a value head in it
    (`value_head.weight` or `score.weight`) is taken over, else the head begins at zero. Empty = `model.path`."""
    lr: NonNegativeFloat = 0.0
    """Its learning rate, constant after `optimizer.warmup_steps` of its updates; 0 = `optimizer.lr`."""
    value_clip: NonNegativeFloat = 0.2
    """How far a value may move from that of the step's start before its loss stops pulling; 0 = off."""
    warmup_steps: CountInt = 0
    """Steps at the start of the run in which the critic alone is trained; versions count up all the same."""


class MegatronSettings(Section, frozen=True):
    """Megatron-core, for `roles.trainer.kind = "megatron"`."""

    tp: PositiveInt = 1
    """Tensor parallelism: ranks that share every matrix."""
    pp: PositiveInt = 1
    """Pipeline parallelism: stages of consecutive layers."""
    vpp: PositiveInt = 1
    """Virtual stages on each pipeline rank (interleaved schedule); 1 = off."""
    cp: PositiveInt = 1
    """Context parallelism: ranks that share every sequence."""
    ep: PositiveInt = 1
    """Expert parallelism: ranks that share the experts of every layer."""
    etp: PositiveInt = 1
    """Tensor parallelism inside each expert."""
    sequence_parallel: bool = False
    """Whether activations between the matrices are split over the tensor-parallel ranks."""
    distributed_optimizer: bool = True
    """Whether optimizer state is split over data-parallel ranks."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What is computed again in the backward pass instead of kept: nothing, Megatron's selection, or whole layers."""
    offload_optimizer: UnitFloat = 0.0
    """Share of the optimizer that is held and updated on the CPU; needs trainer.dtype = "bfloat16", and does
    not go with checkpoints yet."""
    routing_replay: Literal["rollout"] | bool = False
    """Whether experts are chosen as they were in the scoring pass of the same step (mixtures of experts), or, with
    "rollout", in every pass as the engine chose them; needs `sglang.enable_return_routed_experts`."""
    mtp: NonNegativeFloat = 0.0
    """Factor of the loss of the layer that predicts the token after the next (MTP: GLM-4.5, DeepSeek-V3), by which
    SGLang guesses tokens (NEXTN), e.g. 0.2; it is then trained, exported and sent. 0: left out."""
    mtp_reaches_trunk: bool = False
    """Whether that loss also trains the rest of the model; otherwise the MTP layer alone. `optimizer.max_grad_norm` is
    of the gradients of both together, as megatron-core has it."""
    model: Table = {}
    """Further fields of megatron-core's TransformerConfig by their own names."""
    ddp: Table = {}
    """Fields of megatron-core's DistributedDataParallelConfig by their own names."""
    optimizer: Table = {}
    """Fields of megatron-core's OptimizerConfig by their own names."""

    relations = (
        "sequence_parallel needs tp!=1: it splits over tensor-parallel ranks",
        "mtp needs pp=1: its layer is behind the last stage and needs the embedding of the first",
        "mtp_reaches_trunk needs mtp",
        "vpp needs pp!=1: virtual stages are stages of a pipeline",
    )
