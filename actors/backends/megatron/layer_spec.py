"""The layers of a model for megatron-core's spec system: its own parts where they work without Transformer Engine, ours
where they refuse sequence parallelism, packed sequences or context parallelism.

Knows which class plays which part; must not know weights. With Transformer Engine the linears and norms are its own;
attention stays ours, so that what a packed sequence means never depends on what is installed.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from ....core.errors import ConfigError, TrainError
from ...models.model_config import ModelConfig
from . import mcore
from .experts import GroupedExperts
from .rotary import Rotary
from .varlen_attention import VarlenAttention

RowParallelLinear: Any = mcore.module("tensor_parallel").RowParallelLinear


class RMSNorm(nn.RMSNorm):
    """torch's norm with what megatron-core's wrapper of it refuses: sequence parallelism, and weights in the
    model's number type."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        if config.normalization != "RMSNorm":
            raise TrainError(f"there is no {config.normalization} here", remedy="a bug: all known families use RMSNorm")
        device = None if config.use_cpu_initialization else mcore.default_device()
        cast(Any, super()).__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        cast(Any, self.weight).sequence_parallel = config.sequence_parallel


class NormedRowParallelLinear(RowParallelLinear):
    """A projection back to the stream whose result is normalised before it is added (GLM-4)."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **options: Any) -> None:
        base: Any = super()
        base.__init__(input_size, output_size, config=config, **options)
        self.post_norm = RMSNorm(config, output_size, eps=config.layernorm_epsilon)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        base: Any = super()
        output, bias = cast("tuple[Tensor, Tensor | None]", base.forward(input_))
        return self.post_norm(output), bias


def decoder_spec(config: ModelConfig, settings: Any, *, virtual_stage: int | None, uses_engine: bool) -> Any:
    """Specs of the layers of this rank's (virtual) stage. `settings`: the TransformerConfig."""
    specs = mcore.module("models.gpt.gpt_layer_specs")
    block = specs.get_gpt_decoder_block_spec(
        settings, use_transformer_engine=uses_engine, normalization="RMSNorm", vp_stage=virtual_stage
    )
    for layer in block.layer_specs:
        _equip(config, settings, layer.submodules, uses_engine=uses_engine)
    if not uses_engine:
        block.layer_norm = RMSNorm
    return block


def _equip(config: ModelConfig, settings: Any, parts: Any, *, uses_engine: bool) -> None:
    attention = mcore.submodules_of(parts.self_attention)
    attention.core_attention = partial(VarlenAttention, rotary=Rotary(config))
    mlp = mcore.submodules_of(parts.mlp)
    if hasattr(mlp, "experts"):
        mlp.experts = _experts_spec()
    if uses_engine:
        return
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    if settings.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if config.has_post_norms:
        attention.linear_proj = mlp.linear_fc2 = NormedRowParallelLinear


def _experts_spec() -> Any:
    """megatron-core wants a ModuleSpec until 0.17 and a builder since."""
    layer = mcore.module("transformer.moe.moe_layer")
    takes_builder = "Builder" in str(layer.MoESubmodules.__annotations__.get("experts"))
    return GroupedExperts if takes_builder else mcore.module("transformer.spec_utils").ModuleSpec(GroupedExperts)


def chosen_engine(choice: str, config: ModelConfig, precision: torch.dtype) -> bool:
    """Whether to build with Transformer Engine. `choice`: "off", "on", or "auto": if it is installed and helps, that is
    for dense layers in half precision on a GPU (experts are ours either way; torch's grouped product is faster).

    Raises ConfigError for "on" where it cannot be, and for another word.
    """
    if choice == "off":
        return False
    if choice not in ("auto", "on"):
        raise ConfigError(f'megatron.transformer_engine = "{choice}"', remedy='use "auto", "on" or "off"')
    obstacle = ""
    if config.has_post_norms:
        obstacle = f"its linears cannot normalise what a {config.model_type} layer gives"
    elif not torch.cuda.is_available():
        obstacle = "it needs a CUDA device"
    elif precision not in (torch.bfloat16, torch.float16):
        obstacle = f"nothing is gained in {str(precision).removeprefix('torch.')}"
    elif not mcore.has_transformer_engine():
        obstacle = "it is not installed"
    if obstacle and choice == "on":
        raise ConfigError(f'megatron.transformer_engine = "on": {obstacle}', remedy='use "auto" or "off"')
    return not obstacle
