"""What myxa needs to know of a model's `config.json`, which tensors such a model has, and which of them are trained.

Covers the decoder families of `MODEL_TYPES`. What would change the mathematics and is not implemented is named by
`ModelConfig.foreign`: only transformers' own code computes such a model (`trainer.impl = "hf"`).
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, cast

from ...core.errors import ConfigError, ModelError, raised_as
from ...core.samples import ExpertChoices
from .fp8 import READ, Fp8Format, fp8_format

FAMILY_OF: Mapping[str, str] = {"qwen3": "Qwen3", "qwen2": "Qwen2", "llama": "Llama", "mistral": "Mistral"}
PLAIN_TYPES = tuple(FAMILY_OF)
"""What the embedded engine and the torch trainer run."""
LANGUAGE, SCORER = "ForCausalLM", "ForSequenceClassification"
"""How the names of transformers' classes end."""
SOFTMAX_MOE_TYPES = ("qwen2_moe", "qwen3_moe")
SIGMOID_MOE_TYPES = ("glm4_moe", "deepseek_v3")
"""Their routers score each expert by itself, and choose after adding a correction to the scores."""
MODEL_TYPES = (*PLAIN_TYPES, "glm4", *SOFTMAX_MOE_TYPES, *SIGMOID_MOE_TYPES)
GATED_DELTA = ("qwen3_next", "qwen3_5")
"""Types that begin so have gated delta nets."""
NO_GATED_DELTA = (
    ", whose gated delta nets megatron-core builds only with flash-linear-attention (module fla), for GPUs; its way "
    "without mixes the samples of a pack"
)
SAME_AS: Mapping[str, str] = {"kimi_k2": "deepseek_v3"}
"""Types that are another's by a name of their own."""
KNOWN_CODE = {
    "configuration_deepseek.DeepseekV3Config", "modeling_deepseek.DeepseekV3Model",
    "modeling_deepseek.DeepseekV3ForCausalLM",
}  # fmt: skip
"""Code in folders of DeepSeek-V3 and its likes from before transformers had the family: it computes the same."""
MAX_DIMENSION = 1 << 24
"""No honest size in a config is larger; guards against a file that would make us allocate the moon."""
MAX_LAYERS = 1 << 10
MAX_TOLD = 400
"""Characters of an error message, which quotes a value of the file."""
MAX_TENSORS = 1 << 18
"""Weights of a whole model; listing more would fill the memory."""
ROUTER_BIAS = "e_score_correction_bias"
"""Last part of the name of a router's correction."""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ITEM_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


MTP_FAMILIES = ("glm4_moe", "deepseek_v3")
"""Those whose folders have layers for the tokens after the next behind the last layer."""
ROPE_KINDS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (),
}
"""Kind of rotary positions -> numbers that it cannot do without."""
ROPE_NUMBERS = (*ROPE_KINDS["llama3"], "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder with grouped-query attention, RMSNorm, SwiGLU and rotary positions; perhaps with experts."""

    model_type: str
    vocab_size: int
    """Rows of the embedding; may be padded beyond the tokenizer's vocabulary."""
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    context_length: int
    """`max_position_embeddings`: longest sequence in tokens."""
    tie_word_embeddings: bool
    window: int = 0
    """Tokens that the narrowest attention sees, the token itself included (Mistral, Qwen2); 0: it sees all. Our own
    code computes whole attention, which is the same for samples that are no longer."""
    attention_bias: bool = False
    """Whether q, k and v have a bias (Qwen2, some GLM-4 and GLM-4.5); the output projection never has one."""
    has_qk_norm: bool = False
    """Whether each head's q and k are normalised (Qwen3, GLM-4.5)."""
    dtype: str
    """Number type the weights are stored in, by the file's word."""
    fp8: Fp8Format | None = None
    """How matrices are stored where they are FP8; they are read as bfloat16."""
    rotary_dim: int
    """Leading channels of a head that positions rotate; GLM-4 leaves half of them alone. With MLA the last ones."""
    rope_scaling: Mapping[str, Any] | None = field(default=None, hash=False)
    """How positions are stretched (Llama 3.1 and later, YaRN), by the file's words; None: not at all."""
    is_rope_interleaved: bool = False
    """Whether neighbouring channels are rotated together (GLM-4), not channel i with i + rotary_dim / 2."""
    has_post_norms: bool = False
    """Whether what attention and MLP give is normalised before it is added to the stream (GLM-4)."""
    has_fused_gate: bool = False
    """Whether the folder holds gate and up projection of an MLP as one tensor (GLM-4)."""
    kv_lora_rank: int = 0
    """MLA (DeepSeek-V3): width of the latent that all heads' keys and values are made of; 0: no MLA. `head_dim` is then
    the width of a query and a key."""
    q_lora_rank: int = 0
    """MLA: the same of queries; 0: they are projected at once."""
    v_head_dim: int = 0
    """MLA: width of a head's value."""
    num_experts: int = 0
    """Experts of a layer; 0 = none in the whole model."""
    experts_per_token: int = 0
    moe_intermediate_size: int = 0
    """Inner width of one expert."""
    normalises_top_experts: bool = False
    """Whether the weights of a token's chosen experts are made to sum to one."""
    dense_layers: tuple[int, ...] = ()
    """In a model with experts: layers that have an ordinary MLP all the same."""
    has_sigmoid_router: bool = False
    """Whether experts are scored by sigmoids and chosen by score + correction (DeepSeek-V3, GLM-4.5), not by one
    softmax. The correction is a weight that no gradient reaches."""
    num_expert_groups: int = 1
    expert_groups_per_token: int = 1
    """A token's experts come from so many of the groups into which experts are divided."""
    routed_scaling: float = 1.0
    """What the weights of a token's chosen experts are multiplied by at last."""
    shared_intermediate_size: int = 0
    """Inner width of the experts that every token goes through, all together; 0: there are none."""
    has_shared_gate: bool = False
    """Whether a sigmoid of the token weighs what the shared expert gives (Qwen2-MoE)."""
    has_mtp: bool = False
    """Whether the layer behind the last one, which predicts the token after the next, counts as part of the model."""
    is_scorer: bool = False
    """Whether one score of a text, read off its last token, takes the place of the vocabulary's head."""
    foreign: str = ""
    """What our own code does not compute of this model, whose sizes serve estimates; empty: it computes all."""
    folder_shapes: Mapping[str, tuple[int, ...]] = field(
        default_factory=dict[str, tuple[int, ...]], repr=False, hash=False
    )
    """Of a foreign model: HuggingFace name -> shape of every weight, from the headers of its files."""
    exact: frozenset[str] = frozenset()
    """Of a foreign model: weights that its files hold as float32, beside others of fewer digits. They leave so."""
    eos_token_ids: tuple[int, ...] = ()
    """End-of-sequence ids of `config.json` alone; see `hf_folder.read_eos_token_ids` for all of them."""
    source: Mapping[str, Any] = field(default_factory=dict[str, Any], compare=False, repr=False)
    """The file as it was read, for writing it back; without what is no longer so of weights that we write."""

    def with_mtp(self) -> ModelConfig:
        """The same with its MTP layer. Raises ConfigError for a model that has none, or several."""
        number = self.source.get("num_nextn_predict_layers") or 0
        if self.foreign or number != 1 or self.model_type not in MTP_FAMILIES:
            raise ConfigError(
                f"megatron.mtp: a model of type {self.model_type} with num_nextn_predict_layers = {number} has no MTP "
                "layer that is trained here",
                remedy=f"leave it out, or use a model of type {' or '.join(MTP_FAMILIES)} with one such layer",
            )
        return replace(self, has_mtp=True)

    def as_scorer(self) -> ModelConfig:
        """A reward model of the same layers: what transformers and SGLang load as a classifier with one label."""
        names = [*(self.source.get("architectures") or ()), FAMILY_OF.get(self.model_type, "") + LANGUAGE]
        changes = {
            "architectures": [str(names[0]).replace(LANGUAGE, SCORER)],
            "id2label": {"0": "LABEL_0"},
            "label2id": {"LABEL_0": 0},
        }
        return replace(self, is_scorer=True, source={**self.source, **changes})

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """HuggingFace name -> shape of every weight, in the order of the forward pass."""
        return dict(self.folder_shapes if self.foreign else self._own_shapes())

    @lru_cache(maxsize=2)  # noqa: B019 -- a few values, of 45,000 entries for DeepSeek-V3
    def _own_shapes(self) -> dict[str, tuple[int, ...]]:
        hidden = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (self.vocab_size, hidden)}
        for layer in range(self.num_layers + self.has_mtp):
            prefix = f"model.layers.{layer}."
            if layer == self.num_layers:
                shapes[prefix + "eh_proj.weight"] = (hidden, 2 * hidden)
                shapes |= {f"{prefix}{name}.weight": (hidden,) for name in ("enorm", "hnorm", "shared_head.norm")}
            shapes[prefix + "input_layernorm.weight"] = (hidden,)
            of_attention = self._latent_shapes() if self.kv_lora_rank else self._attention_shapes()
            shapes |= {f"{prefix}self_attn.{name}": shape for name, shape in of_attention.items()}
            if self.has_post_norms:
                shapes[prefix + "post_self_attn_layernorm.weight"] = (hidden,)
            shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
            if self.is_moe_layer(layer):
                shapes |= self._expert_shapes(prefix + "mlp.")
            else:
                shapes |= self._mlp_shapes(prefix + "mlp.", self.intermediate_size)
            if self.has_post_norms:
                shapes[prefix + "post_mlp_layernorm.weight"] = (hidden,)
        shapes["model.norm.weight"] = (hidden,)
        if self.is_scorer:
            shapes["score.weight"] = (1, hidden)
        elif not self.tie_word_embeddings:
            shapes[HEAD] = (self.vocab_size, hidden)
        return shapes

    def _attention_shapes(self) -> dict[str, tuple[int, ...]]:
        num_q, num_kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {}
        for name, rows in (("q_proj", num_q), ("k_proj", num_kv), ("v_proj", num_kv)):
            shapes[f"{name}.weight"] = (rows, self.hidden_size)
            if self.attention_bias:
                shapes[f"{name}.bias"] = (rows,)
        shapes["o_proj.weight"] = (self.hidden_size, num_q)
        norms = ("q_norm.weight", "k_norm.weight") if self.has_qk_norm else ()
        return shapes | dict.fromkeys(norms, (self.head_dim,))

    def _latent_shapes(self) -> dict[str, tuple[int, ...]]:
        hidden, num_q = self.hidden_size, self.num_heads * self.head_dim
        num_kv = self.num_heads * (self.head_dim - self.rotary_dim + self.v_head_dim)
        queries: dict[str, tuple[int, ...]] = {"q_proj": (num_q, hidden)}
        if rank := self.q_lora_rank:
            queries = {"q_a_proj": (rank, hidden), "q_a_layernorm": (rank,), "q_b_proj": (num_q, rank)}
        shapes: dict[str, tuple[int, ...]] = {
            "kv_a_proj_with_mqa": (self.kv_lora_rank + self.rotary_dim, hidden),
            "kv_a_layernorm": (self.kv_lora_rank,),
            "kv_b_proj": (num_kv, self.kv_lora_rank),
            "o_proj": (hidden, self.num_heads * self.v_head_dim),
        }
        return {f"{name}.weight": shape for name, shape in (queries | shapes).items()}

    def _expert_shapes(self, prefix: str) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {prefix + "gate.weight": (self.num_experts, self.hidden_size)}
        if self.has_sigmoid_router:
            shapes[f"{prefix}gate.{ROUTER_BIAS}"] = (self.num_experts,)
        for expert in range(self.num_experts):
            shapes |= self._mlp_shapes(f"{prefix}experts.{expert}.", self.moe_intermediate_size)
        if self.shared_intermediate_size:
            name = "shared_expert" if self.has_shared_gate else "shared_experts"
            shapes |= self._mlp_shapes(f"{prefix}{name}.", self.shared_intermediate_size)
        if self.has_shared_gate:
            shapes[prefix + "shared_expert_gate.weight"] = (1, self.hidden_size)
        return shapes

    def _mlp_shapes(self, prefix: str, inner: int) -> dict[str, tuple[int, ...]]:
        into = {"gate_up_proj": 2 * inner} if self.has_fused_gate else {"gate_proj": inner, "up_proj": inner}
        shapes: dict[str, tuple[int, ...]] = {
            f"{prefix}{name}.weight": (rows, self.hidden_size) for name, rows in into.items()
        }
        return shapes | {f"{prefix}down_proj.weight": (self.hidden_size, inner)}

    def is_moe_layer(self, layer: int) -> bool:
        return self.num_experts > 0 and layer not in self.dense_layers

    @property
    def expert_choices(self) -> ExpertChoices:
        """What its routers choose for a token."""
        layers = tuple(layer for layer in range(self.num_layers) if self.is_moe_layer(layer))
        return ExpertChoices(self.num_layers, layers, self.experts_per_token, self.num_experts)

    def require_own(self, who: str) -> None:
        """Raise ModelError if our own code, which `who` runs, does not compute this model."""
        if self.is_scorer:
            raise ModelError(
                f"{who} does not run this model: it scores texts and predicts no tokens",
                remedy='use a language model, or train this one with algo.kind = "reward"',
            )
        if self.foreign:
            raise ModelError(
                f"{who} does not run this model: {self.foreign}",
                remedy=f"use a model of type {', '.join(MODEL_TYPES)}; others are trained by the torch trainer with "
                'trainer.impl = "hf", and served by SGLang',
            )

    def require_window(self, who: str, context_length: int) -> None:
        """Raise ModelError if samples of `who`, one of our own, may be longer than the window. `context_length`: the
        longest; 0: the model's own."""
        if self.window and (context_length or self.context_length) > self.window:
            raise ModelError(
                f"{who} does not cut attention to a sliding window: this model's is {self.window} tokens, a sample may "
                f"have {context_length or self.context_length}",
                remedy=f"set engine.context_length to {self.window} or less; or train with the torch trainer with "
                'trainer.impl = "hf" and serve by SGLang, which cut it',
            )

    def require_plain(self, who: str) -> None:
        """Raise ModelError unless this is a dense decoder of Qwen3's kind, all that `who` runs."""
        self.require_own(who)
        if self.model_type not in PLAIN_TYPES:
            raise ModelError(
                f"{who} does not run models of type {self.model_type}",
                remedy=f"use one of type {', '.join(PLAIN_TYPES)}; others are trained by the Megatron trainer, or by "
                'the torch trainer with trainer.impl = "hf", and served by SGLang',
            )

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.tensor_shapes().values())


MAY_DIFFER = frozenset({"is_scorer", "dtype", "fp8", "context_length", "eos_token_ids", "exact", "source",
                        "foreign"})  # fmt: skip
"""Fields that say nothing about what models of the same layers compute."""


class _Fields:
    """Typed access to a JSON object; every complaint names the file and the key."""

    def __init__(self, source: Mapping[str, Any], place: str) -> None:
        self.source = source
        self._place = place

    def fail(self, why: str, remedy: str = "mend the file, or use another model") -> ModelError:
        text = why if len(why) <= MAX_TOLD else f"{why[:MAX_TOLD]}..."
        return ModelError(f"{self._place}: {text}", remedy=remedy)

    def get(self, key: str) -> Any:
        return self.source.get(key)

    def size(self, key: str, default: int | None = None, *, least: int = 1, most: int = MAX_DIMENSION) -> int:
        value = self.source.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.fail(f"{key} must be a whole number from {least} to {most}, it is {value!r}")
        return value

    def number(self, key: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            raise self.fail(f"{key} must be a positive number, it is {value!r}")
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        value = self.source.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(f"{key} must be true or false, it is {value!r}")
        return value

    def ids(self, key: str) -> tuple[int, ...]:
        return token_ids(self.source.get(key), f"{self._place}: {key}")


def token_ids(value: Any, place: str) -> tuple[int, ...]:
    """The ids of a JSON value that is absent, one id or a list of ids. Raises ModelError naming the place."""
    values: list[Any] = [] if value is None else cast("list[Any]", value) if isinstance(value, list) else [value]
    for token in values:
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise ModelError(
                f"{place} must be a token id or a list of them, it is {value!r:.{MAX_TOLD}}", remedy="mend the file"
            )
    return tuple(values)


def parse_model_config(source: Mapping[str, Any], place: str) -> ModelConfig:
    """Read a `config.json` that was loaded from `place`. Raises ModelError naming the key that is wrong."""
    fields = _Fields(source, place)
    model_type = fields.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise fields.fail(f"model_type must be a name, it is {model_type!r}")
    model_type = SAME_AS.get(model_type, model_type)
    _check_code(fields, model_type)
    why = next(_obstacles(fields, model_type), "")
    with raised_as(ModelError, f"{place}: the weights are quantised", ValueError, remedy=f"{READ}; use another"):
        fp8 = fp8_format(source)
    if fp8 and why:
        raise fields.fail(f"the weights are quantised, and {why} is not implemented", remedy=READ)
    if why:
        return _foreign(fields, f"{place}: {why}")
    read = {key: source[key] for key in source if key not in ("auto_map", "quantization_config")}
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    is_glm = model_type == "glm4"
    attention = _latent_attention(fields) if model_type == "deepseek_v3" else _attention(fields, model_type)
    layers = fields.size("num_hidden_layers", most=MAX_LAYERS)
    config = ModelConfig(
        model_type=str(model_type),
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.size("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=fields.size("num_key_value_heads", heads),
        **attention,
        rms_norm_eps=fields.number("rms_norm_eps", fields.get("rms_norm_eps")),
        rope_theta=_rope_theta(fields),
        context_length=fields.size("max_position_embeddings"),
        window=_window(fields, model_type),
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=False),
        attention_bias=_has_attention_bias(fields, model_type),
        has_qk_norm=model_type in ("qwen3", "qwen3_moe")
        or (model_type == "glm4_moe" and fields.flag("use_qk_norm", default=False)),
        rope_scaling=_rope_scaling(fields),
        has_post_norms=is_glm,
        has_fused_gate=is_glm,
        **_experts(fields, model_type, layers),
        dtype=str(fields.get("dtype") or fields.get("torch_dtype") or "float32"),
        fp8=fp8,
        eos_token_ids=fields.ids("eos_token_id"),
        is_scorer=SCORER in str(fields.get("architectures")),
        source=read | {"model_type": model_type},
    )
    if config.num_heads % config.num_kv_heads:
        raise fields.fail(f"{config.num_heads} attention heads cannot share {config.num_kv_heads} key-value heads")
    if config.head_dim % 2:
        raise fields.fail(f"head_dim must be even for rotary positions, it is {config.head_dim}")
    if config.rotary_dim % 2 or not 0 < config.rotary_dim <= config.head_dim:
        raise fields.fail(f"positions cannot rotate {config.rotary_dim} of {config.head_dim} channels")
    return config


HALF_ROTARY = ("glm4", "glm4_moe")
"""Families whose heads turn half of their channels where the file does not say."""


def _has_attention_bias(fields: _Fields, model_type: str) -> bool:
    if model_type in HALF_ROTARY:
        return fields.flag("attention_bias", default=model_type == "glm4")
    return model_type == "qwen2" or (model_type == "qwen2_moe" and fields.flag("qkv_bias", default=True))


def _check_code(fields: _Fields, model_type: str) -> None:
    code: Any = fields.get("auto_map")
    classes = set(map(str, cast("dict[str, Any]", code).values())) if isinstance(code, dict) else {str(code)}
    if code and not (model_type == "deepseek_v3" and classes <= KNOWN_CODE):
        raise fields.fail(
            "auto_map names code of the folder's own, which is not run",
            remedy=f"take auto_map out if the model computes what others of type {model_type} do; use another if not",
        )


def _attention(fields: _Fields, model_type: str) -> dict[str, Any]:
    """Widths of a head with its own projections."""
    head_dim = fields.size("head_dim", max(fields.size("hidden_size") // fields.size("num_attention_heads"), 1))
    share = _rotary_share(fields, default=0.5 if model_type in HALF_ROTARY else 1.0)
    return {"head_dim": head_dim, "rotary_dim": int(head_dim * share), "is_rope_interleaved": model_type == "glm4"}


def _latent_attention(fields: _Fields) -> dict[str, Any]:
    """What a config of DeepSeek's says of its MLA."""
    rotary_dim = fields.size("qk_rope_head_dim")
    return {
        "head_dim": fields.size("qk_nope_head_dim") + rotary_dim,
        "rotary_dim": rotary_dim,
        "is_rope_interleaved": fields.flag("rope_interleave", default=True),
        "kv_lora_rank": fields.size("kv_lora_rank"),
        "q_lora_rank": 0 if fields.get("q_lora_rank") is None else fields.size("q_lora_rank"),
        "v_head_dim": fields.size("v_head_dim"),
    }


def _experts(fields: _Fields, model_type: str, layers: int) -> dict[str, Any]:
    """What a config says of its experts; transformers 5 writes `num_local_experts` for `num_experts`."""
    if model_type not in (*SOFTMAX_MOE_TYPES, *SIGMOID_MOE_TYPES):
        return {}
    is_corrected = model_type in SIGMOID_MOE_TYPES
    names = ("n_routed_experts",) if is_corrected else ("num_experts", "num_local_experts")
    num_experts = fields.size(next((name for name in names if fields.get(name) is not None), names[0]))
    per_token = fields.size("num_experts_per_tok")
    if per_token > num_experts:
        raise fields.fail(f"num_experts_per_tok = {per_token} of {num_experts} experts")
    step, first = fields.size("decoder_sparse_step", 1), fields.size("first_k_dense_replace", 0, least=0)
    listed: Any = fields.get("mlp_only_layers") or []
    if not isinstance(listed, list) or len(cast("list[Any]", listed)) > layers:
        raise fields.fail(f"mlp_only_layers must be a list of at most {layers} layers, it is {listed!r}")
    if layers * 3 * num_experts > MAX_TENSORS:
        raise fields.fail(f"{layers} layers of {num_experts} experts are more than {MAX_TENSORS} weights")
    router = _sigmoid_router(fields) if is_corrected else {}
    if model_type == "qwen2_moe":
        width = fields.size("shared_expert_intermediate_size")
        router = {"shared_intermediate_size": width, "has_shared_gate": True}
    return {
        **router,
        "num_experts": num_experts,
        "experts_per_token": per_token,
        "moe_intermediate_size": fields.size("moe_intermediate_size"),
        "normalises_top_experts": fields.flag("norm_topk_prob", default=is_corrected),
        "dense_layers": tuple(
            n for n in range(layers) if n < first or n in cast("list[Any]", listed) or (n + 1) % step
        ),
    }


def _sigmoid_router(fields: _Fields) -> dict[str, Any]:
    """What a config of DeepSeek-V3's kind says of its router and shared experts. Families take other values where a
    key is missing, and what they write has all of them: none is guessed."""
    experts, groups = fields.size("n_routed_experts"), fields.size("n_group")
    top, shared = fields.size("topk_group"), fields.size("n_shared_experts", least=0)
    if experts % groups or top > groups or (top < groups and experts < 2 * groups):
        raise fields.fail(f"{experts} experts cannot be chosen from topk_group = {top} of n_group = {groups} groups")
    fields.size("first_k_dense_replace", least=0)
    return {
        "has_sigmoid_router": True,
        "num_expert_groups": groups,
        "expert_groups_per_token": top,
        "routed_scaling": fields.number("routed_scaling_factor", fields.get("routed_scaling_factor")),
        "shared_intermediate_size": shared * fields.size("moe_intermediate_size"),
    }


def _rope_parameters(fields: _Fields) -> Mapping[str, Any]:
    """Versions of transformers: 5 writes `rope_parameters`, earlier ones `rope_scaling` (which may be null). Where both
    say something, `rope_scaling` was put there by hand, and transformers takes it."""
    for key in ("rope_scaling", "rope_parameters"):
        value = fields.get(key)
        if value is not None and not isinstance(value, dict):
            raise fields.fail(f"{key} must be an object, it is {value!r}")
        if value:
            return cast("Mapping[str, Any]", value)
    return {}


def _rope_theta(fields: _Fields) -> float:
    inner, outer = _rope_parameters(fields).get("rope_theta"), fields.get("rope_theta")
    if inner is not None and outer is not None and inner != outer:
        raise fields.fail(f"rope_theta is {outer!r} but rope_parameters says {inner!r}")
    theta = next((value for value in (inner, outer) if value is not None), 10_000.0)
    hidden = cast("Mapping[str, Any]", fields.get("rope_parameters") or {}).get("rope_theta")
    if hidden is not None and hidden != theta:
        raise fields.fail(
            f"rope_parameters says rope_theta {hidden!r}, but rope_scaling, which takes its place, does not",
            "put rope_theta into rope_scaling",
        )
    return fields.number("rope_theta", theta)


def _rope_kind(fields: _Fields) -> Any:
    parameters = _rope_parameters(fields)
    return parameters.get("rope_type", parameters.get("type")) or "default"


def _rope_scaling(fields: _Fields) -> dict[str, Any] | None:
    parameters, kind = _rope_parameters(fields), _rope_kind(fields)
    for name in ROPE_NUMBERS:
        if name in ROPE_KINDS[kind] or parameters.get(name) is not None:
            fields.number(f"rope_scaling.{name}", parameters.get(name))
    return None if kind == "default" else dict(parameters)


def _rotary_share(fields: _Fields, *, default: float) -> float:
    inner = _rope_parameters(fields).get("partial_rotary_factor")
    value = inner if inner is not None else fields.get("partial_rotary_factor")
    return default if value is None else fields.number("partial_rotary_factor", value)


def _obstacles(fields: _Fields, model_type: str) -> Iterator[str]:
    """What our own code does not compute of it."""
    kinds: Any = fields.get("layer_types")
    has_delta = model_type.startswith(GATED_DELTA) or (isinstance(kinds, list) and "linear_attention" in kinds)
    if model_type not in MODEL_TYPES:
        yield f"model_type {model_type!r}{NO_GATED_DELTA if has_delta else ''}"
    if not isinstance(kind := _rope_kind(fields), str) or kind not in ROPE_KINDS:
        yield f"rotary positions of type {kind!r}"
    if (activation := fields.get("hidden_act")) not in (None, "silu"):
        yield f"hidden_act {activation!r}"
    yield from _window_obstacles(fields, model_type)
    if model_type in SIGMOID_MOE_TYPES:
        yield from _sigmoid_obstacles(fields)
    if model_type not in ("qwen2", *HALF_ROTARY) and fields.get("attention_bias"):
        yield "attention_bias is true (the output projection would have one too)"
    if fields.get("mlp_bias"):
        yield "mlp_bias is true"
    if model_type not in HALF_ROTARY and (share := _rotary_share(fields, default=1.0)) != 1.0:
        yield f"partial_rotary_factor {share}"


DEFAULT_WINDOW = 4096
"""What transformers takes where a file has no `sliding_window`; null says that there is none."""


def _has_window(fields: _Fields, model_type: str) -> bool:
    if model_type == "mistral":
        return fields.source.get("sliding_window", DEFAULT_WINDOW) is not None
    return model_type.startswith("qwen") and fields.get("use_sliding_window") is True


def _window(fields: _Fields, model_type: str) -> int:
    """0 where it is as long as the context."""
    window = fields.source.get("sliding_window", DEFAULT_WINDOW) if _has_window(fields, model_type) else 0
    return window if window < fields.size("max_position_embeddings") else 0


def _window_obstacles(fields: _Fields, model_type: str) -> Iterator[str]:
    """Attention that does not see the whole context, but a window by one of the families' rules."""
    has_window, window = _has_window(fields, model_type), fields.source.get("sliding_window", DEFAULT_WINDOW)
    if fields.get("use_sliding_window") and not has_window:
        yield "use_sliding_window is true"
    if has_window and (type(window) is not int or window < 2):
        yield f"sliding_window {window!r} (use_sliding_window)"
    kinds: Any = fields.get("layer_types")
    computed = {"full_attention", "sliding_attention"} if has_window else {"full_attention"}
    if kinds is not None and not isinstance(kinds, list):
        yield f"layer_types is {kinds!r}"
    elif foreign := sorted({str(kind) for kind in cast("list[Any]", kinds or [])} - computed):
        yield f"layer_types has {foreign[0]!r}"


def _sigmoid_obstacles(fields: _Fields) -> Iterator[str]:
    """Routers that megatron-core does not compute: it always makes the weights of several experts sum to one, never
    that of a single expert, and judges a group by its best (num_experts_per_tok // topk_group) experts, not by two."""
    heads = {"num_key_value_heads": fields.get("num_attention_heads")} if fields.get("kv_lora_rank") else {}
    for key, value in ({"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1} | heads).items():
        if fields.get(key) not in (None, value):
            yield f"{key} {fields.get(key)!r}"
    per_token, top, groups = (fields.size(key) for key in ("num_experts_per_tok", "topk_group", "n_group"))
    if not fields.flag("norm_topk_prob", default=True):
        yield "norm_topk_prob is false, with sigmoids as scores"
    if per_token == 1:
        yield "num_experts_per_tok 1, with sigmoids as scores"
    if top < groups and per_token // top != 2:
        yield f"num_experts_per_tok {per_token} from topk_group {top} of n_group {groups}"


_CONTEXT_NAMES = (
    "max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "context_length",
    "model_max_length",
)  # fmt: skip
_NO_CONTEXT = 2048
"""Where a file says none (Mamba, BLOOM, Falcon): so much SGLang takes then, and transformers for Falcon."""


def _foreign(fields: _Fields, why: str) -> ModelConfig:
    """Sizes by any of the names that families give them; what a family does not say is 0, or follows from the rest."""

    def size(*names: str, default: int | None = None, most: int = MAX_DIMENSION) -> int:
        name = next((name for name in names if fields.get(name) is not None), names[0])
        return fields.size(name, default, most=most)

    if isinstance(fields.get("text_config"), dict):
        raise fields.fail(
            f"model_type {fields.get('model_type')!r} has its language model in text_config, beside other parts",
            "use the folder of a language model alone",
        )
    hidden, heads = (
        size("hidden_size", "n_embd", "d_model"),
        size("num_attention_heads", "n_head", "n_heads", default=1),
    )
    layers = size("num_hidden_layers", "n_layer", "n_layers", "num_layers", most=MAX_LAYERS)
    head_dim = size("head_dim", default=max(hidden // heads, 1))
    return ModelConfig(
        model_type=str(fields.get("model_type")),
        vocab_size=size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=size("intermediate_size", "n_inner", "ffn_dim", default=4 * hidden),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=size("num_key_value_heads", default=heads),
        head_dim=head_dim,
        context_length=size(*_CONTEXT_NAMES, default=_NO_CONTEXT),
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=True),
        dtype=str(fields.get("dtype") or fields.get("torch_dtype") or "float32"),
        rotary_dim=head_dim,
        foreign=why if len(why) <= MAX_TOLD else f"{why[:MAX_TOLD]}...",
        eos_token_ids=fields.ids("eos_token_id"),
        source=dict(fields.source),
    )


SHOWN = 3


def frozen_names(patterns: Sequence[str], names: Iterable[str]) -> frozenset[str]:
    """Names in which any pattern is found. Raises ConfigError for a pattern found in none, or nothing left to train."""
    all_names = tuple(names)
    frozen: set[str] = set()
    for pattern in patterns:
        matching = {name for name in all_names if re.search(pattern, name)}
        if not matching:
            raise ConfigError(
                f'trainer.freeze: "{pattern}" is found in no parameter of the model',
                remedy=f"names look like {', '.join(all_names[:SHOWN])}",
            )
        frozen |= matching
    if patterns and len(frozen) == len(all_names):
        raise ConfigError("trainer.freeze: nothing is left to train", remedy="leave a part of the model out")
    return frozenset(frozen)
