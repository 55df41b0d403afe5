"""Model families of the Megatron trainer: `model_type` of a config.json -> which HuggingFace tensors make which
parameter, and how each is cut.

Rules are tables: one row per Megatron parameter. `MODEL`, `LAYER` and `EXPERTS` say what most families have in common;
a new family is its name in `FAMILIES`, with the rows of layers in which it differs.

A cut names, for rank r of n, the rectangles of HuggingFace tensors that make the rank's part when they are put under
one another. The same list serves both directions: loading reads exactly these rectangles, exporting writes them back.
So what is loaded and exported is equal to the bit, and a new kind of cut is one function. No torch here: names and
numbers only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ....core.errors import ConfigError, ModelError, TrainError
from ...models.model_config import EMBEDDING, HEAD, ROUTER_BIAS, ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle of a HuggingFace tensor: rows `[start, stop)`, and columns unless all of them (or none) are meant."""

    name: str
    rows: tuple[int, int]
    columns: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class CutRequest:
    """What a cut is asked: for these tensors, the part of rank `rank` of `size`."""

    names: Sequence[str]
    shapes: Mapping[str, Shape]
    config: ModelConfig
    rank: int
    size: int


Cut = Callable[[CutRequest], Iterator[Piece]]


def whole(request: CutRequest) -> Iterator[Piece]:
    (name,) = request.names
    yield Piece(name, (0, request.shapes[name][0]))


def vocabulary(request: CutRequest) -> Iterator[Piece]:
    """Equal runs of rows, of a table padded so that they are equal; padding is in no piece."""
    (name,) = request.names
    height = request.shapes[name][0]
    share = -(-height // request.size)
    start = min(request.rank * share, height)
    yield Piece(name, (start, min(start + share, height)))


def rows(request: CutRequest) -> Iterator[Piece]:
    """Equal runs of rows: what a matrix is cut into whose results lie side by side."""
    (name,) = request.names
    share = request.shapes[name][0] // request.size
    yield Piece(name, (request.rank * share, (request.rank + 1) * share))


def columns(request: CutRequest) -> Iterator[Piece]:
    """Equal runs of columns: what a matrix is cut into whose results are added up."""
    (name,) = request.names
    height, width = request.shapes[name]
    share = width // request.size
    yield Piece(name, (0, height), (request.rank * share, (request.rank + 1) * share))


def gate_and_up(request: CutRequest) -> Iterator[Piece]:
    """The rank's rows of the gate projection, then those of the up projection; from two tensors, or one of both."""
    inner = sum(request.shapes[name][0] for name in request.names) // 2
    share = inner // request.size
    start = request.rank * share
    offset_of_up = inner if len(request.names) == 1 else 0
    yield Piece(request.names[0], (start, start + share))
    yield Piece(request.names[-1], (offset_of_up + start, offset_of_up + start + share))


def heads(request: CutRequest) -> Iterator[Piece]:
    """The rank's groups: of each its query heads, its key head, its value head. Names: q, k, v; weights or biases."""
    config = request.config
    query_rows = config.num_heads // config.num_kv_heads * config.head_dim
    share = config.num_kv_heads // request.size
    for group in range(request.rank * share, (request.rank + 1) * share):
        for name, height in zip(request.names, (query_rows, config.head_dim, config.head_dim), strict=True):
            yield Piece(name, (group * height, (group + 1) * height))


def put_together(
    names: Sequence[str], shapes: Mapping[str, Shape], cuts: Iterable[Iterable[Piece]], shards: Iterable[Tensor]
) -> dict[str, Tensor]:
    """The HuggingFace tensors `names`, whole, from the shards of all ranks and the pieces that each is made of."""
    weights: dict[str, Tensor] = {}
    for pieces, shard in zip(cuts, shards, strict=True):
        weights = weights or {name: shard.new_empty(shapes[name]) for name in names}
        row = 0
        for piece in pieces:
            target = weights[piece.name][slice(*piece.rows)]
            if piece.columns is not None:
                target = target[:, slice(*piece.columns)]
            target.copy_(shard[row : row + target.shape[0]])
            row += target.shape[0]
    return weights


@dataclass(frozen=True, slots=True)
class Rule:
    """A Megatron parameter and the HuggingFace tensors that it is made of, both named from their layer on."""

    parameter: str
    names: tuple[str, ...]
    cut: Cut = whole


MODEL = (
    Rule("embedding.word_embeddings.weight", (EMBEDDING,), vocabulary),
    Rule("decoder.final_layernorm.weight", ("model.norm.weight",)),
    Rule("output_layer.weight", (HEAD,), vocabulary),
)
MTP = (
    Rule("eh_proj.weight", ("eh_proj.weight",)),
    Rule("enorm.weight", ("enorm.weight",)),
    Rule("hnorm.weight", ("hnorm.weight",)),
    Rule("final_layernorm.weight", ("shared_head.norm.weight",)),
)
"""Of a layer for the token after the next, beside those of any layer."""


def shared(name: str) -> tuple[Rule, ...]:
    """Of the experts that every token goes through, one MLP whatever their number."""
    return (
        Rule(
            "mlp.shared_experts.linear_fc1.weight",
            (f"mlp.{name}.gate_proj.weight", f"mlp.{name}.up_proj.weight"),
            gate_and_up,
        ),
        Rule("mlp.shared_experts.linear_fc2.weight", (f"mlp.{name}.down_proj.weight",), columns),
    )


LAYER = (
    Rule("input_layernorm.weight", ("input_layernorm.weight",)),
    Rule("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",)),
    # Checkpoints name a norm after the linear that follows it.
    Rule("self_attention.linear_qkv.layer_norm_weight", ("input_layernorm.weight",)),
    Rule("mlp.linear_fc1.layer_norm_weight", ("post_attention_layernorm.weight",)),
    Rule("self_attention.linear_qkv.weight", tuple(f"self_attn.{x}_proj.weight" for x in "qkv"), heads),
    Rule("self_attention.linear_qkv.bias", tuple(f"self_attn.{x}_proj.bias" for x in "qkv"), heads),
    Rule("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), columns),
    Rule("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",)),
    Rule("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",)),
    Rule("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), gate_and_up),
    Rule("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), columns),
    Rule("mlp.router.weight", ("mlp.gate.weight",)),
    Rule("mlp.router.expert_bias", (f"mlp.gate.{ROUTER_BIAS}",)),
    *shared("shared_experts"),
)
EXPERTS = (
    Rule("mlp.experts.w1", ("gate_proj.weight", "up_proj.weight"), gate_and_up),
    Rule("mlp.experts.w2", ("down_proj.weight",), columns),
    # megatron-core's own experts, in its checkpoints.
    Rule("mlp.experts.experts.linear_fc1.weight", ("gate_proj.weight", "up_proj.weight"), gate_and_up),
    Rule("mlp.experts.experts.linear_fc2.weight", ("down_proj.weight",), columns),
)
"""Parameters of a layer that hold all its experts, one behind the other; names are those of one expert."""
QWEN2_MOE = (
    *shared("shared_expert"),
    Rule("mlp.shared_experts.gate_weight", ("mlp.shared_expert_gate.weight",)),
)
GLM4 = (
    Rule("self_attention.linear_proj.post_norm.weight", ("post_self_attn_layernorm.weight",)),
    Rule("mlp.linear_fc1.weight", ("mlp.gate_up_proj.weight",), gate_and_up),
    Rule("mlp.linear_fc2.post_norm.weight", ("post_mlp_layernorm.weight",)),
)
DEEPSEEK_V3 = (
    Rule("self_attention.linear_q_proj.weight", ("self_attn.q_proj.weight",), rows),
    Rule("self_attention.linear_q_down_proj.weight", ("self_attn.q_a_proj.weight",), rows),
    Rule("self_attention.linear_q_up_proj.weight", ("self_attn.q_b_proj.weight",), rows),
    Rule("self_attention.linear_kv_down_proj.weight", ("self_attn.kv_a_proj_with_mqa.weight",), rows),
    Rule("self_attention.linear_kv_up_proj.weight", ("self_attn.kv_b_proj.weight",), rows),
    Rule("self_attention.q_layernorm.weight", ("self_attn.q_a_layernorm.weight",)),
    Rule("self_attention.kv_layernorm.weight", ("self_attn.kv_a_layernorm.weight",)),
    # Transformer Engine's names.
    Rule("self_attention.linear_q_up_proj.layer_norm_weight", ("self_attn.q_a_layernorm.weight",)),
    Rule("self_attention.linear_kv_up_proj.layer_norm_weight", ("self_attn.kv_a_layernorm.weight",)),
)
FAMILIES: Mapping[str, tuple[Rule, ...]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "glm4_moe"), ()),
    "qwen2_moe": QWEN2_MOE,
    "glm4": GLM4,
    "deepseek_v3": DEEPSEEK_V3,
}


def layer_rules(model_type: str) -> tuple[Rule, ...]:
    """Of a family's layers, its own before those in common. Raises ModelError for one that has none."""
    if model_type not in FAMILIES:
        raise ModelError(
            f"the Megatron trainer has no weight table for models of type {model_type}",
            remedy=f"use one of {', '.join(FAMILIES)}, or add a table under backends/megatron/families",
        )
    return (*FAMILIES[model_type], *LAYER, *MTP)


def find_rule(rules: Iterable[Rule], parameter: str) -> Rule:
    """Raises TrainError naming the parameter that has none."""
    for rule in rules:
        if rule.parameter == parameter:
            return rule
    raise TrainError(
        f"no rule says which HuggingFace weights parameter {parameter} is made of",
        remedy="a bug in backends/megatron/families, or a megatron-core that names its parameters otherwise",
    )


def check_adapted(matrices: Iterable[str], config: ModelConfig) -> None:
    """Raise ConfigError for a matrix of a layer that gets no low-rank adapter here: `megatron/adapters.py` knows the
    cuts of attention, by heads or of latents, and of a dense MLP."""
    rules = {name: rule for rule in layer_rules(config.model_type) for name in rule.names}
    for matrix in matrices:
        rule = rules.get(f"{matrix.split('.', 3)[-1]}.weight")
        if rule is None or rule.cut not in (heads, rows, gate_and_up, columns):
            raise ConfigError(
                f"lora.target_modules: {matrix} gets no adapter in the Megatron trainer",
                remedy="name other matrices, or train by the torch trainer",
            )
