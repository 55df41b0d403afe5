"""A HuggingFace config made into megatron-core's GPT model: its TransformerConfig, and this rank's part of the model.

Knows which values TransformerConfig needs for a model folder and a layout, and without Transformer Engine and apex.
Must not know weights, optimizers or the schedule.

What a softmax over the head's rows must leave out: rows from `vocab_size` on only pad the table, so that it divides
over the tensor-parallel ranks. They are zero and stay zero.

Library considered: Megatron-Bridge has providers of many families. It needs Transformer Engine and NeMo's stack.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ....core.errors import ConfigError
from ...models.model_config import ModelConfig
from . import mcore
from .layer_spec import chosen_engine, decoder_spec
from .layout import ParallelLayout
from .verbatim import OWNED_MODEL, check_table


def transformer_config(
    config: ModelConfig,
    layout: ParallelLayout,
    precision: torch.dtype,
    overrides: Mapping[str, Any],
    *,
    uses_engine: bool = False,
) -> Any:
    """megatron-core's TransformerConfig of the model. `overrides`: the run file's `[megatron.model]`, field by field.

    Raises ConfigError naming the key for a field that is unknown, not the user's to set, or refused by megatron-core,
    and for a layout that does not fit the model.
    """
    settings_type = mcore.module("transformer").TransformerConfig
    check_table("model", overrides, {field.name for field in fields(settings_type)}, OWNED_MODEL)
    layout.check_model(config, overrides)
    chosen = _shape(config) | _cut(layout) | _numerics(precision, layout, uses_engine=uses_engine)
    if config.num_experts:
        chosen |= _expert_fields(config)
    chosen |= overrides
    with _refusals_named():
        return settings_type(**chosen)


def build_model_chunks(
    config: ModelConfig,
    layout: ParallelLayout,
    precision: torch.dtype,
    overrides: Mapping[str, Any],
    *,
    transformer_engine: str = "auto",
) -> list[nn.Module]:
    """This rank's part of the model with random weights, one module per virtual stage, on this rank's device.

    megatron-core's parallel state must be initialised with the same layout. In half precision each module is wrapped in
    megatron-core's Float16Module. Raises ConfigError as `transformer_config` does.
    """
    uses_engine = chosen_engine(transformer_engine, config, precision)
    settings = transformer_config(config, layout, precision, overrides, uses_engine=uses_engine)
    chunks: list[nn.Module] = []
    for number in range(layout.vpp):
        stage = number if layout.vpp > 1 else None
        with _refusals_named():
            chunk = _chunk(config, layout, settings, stage, uses_engine=uses_engine).to(mcore.default_device())
        if precision != torch.float32:
            chunk = mcore.module("transformer.module").Float16Module(settings, chunk)
        chunks.append(chunk)
    return chunks


def padded_vocab_size(config: ModelConfig, layout: ParallelLayout) -> int:
    """Rows of the embedding and of the head, over all tensor-parallel ranks."""
    return -(-config.vocab_size // layout.tp) * layout.tp


def _chunk(
    config: ModelConfig, layout: ParallelLayout, settings: Any, stage: int | None, *, uses_engine: bool
) -> nn.Module:
    spec = decoder_spec(config, settings, virtual_stage=stage, uses_engine=uses_engine)
    state = mcore.parallel_state
    virtual: dict[str, Any] = {"ignore_virtual": stage is None, "vp_stage": stage}
    model: nn.Module = mcore.module("models.gpt").GPTModel(
        config=settings,
        transformer_layer_spec=spec,
        vocab_size=padded_vocab_size(config, layout),
        max_sequence_length=config.context_length,
        pre_process=state.is_pipeline_first_stage(**virtual),
        post_process=state.is_pipeline_last_stage(**virtual),
        share_embeddings_and_output_weights=config.tie_word_embeddings,
        position_embedding_type="none",  # attention rotates by itself, see rotary.py
        vp_stage=stage,
    )
    return model


@contextmanager
def _refusals_named() -> Generator[None, None, None]:
    """megatron-core checks its settings by assertions and ValueErrors, some only while it builds."""
    try:
        yield
    except (ValueError, AssertionError, TypeError) as err:
        raise ConfigError(
            f"megatron-core refuses the configuration: {err}", remedy="mend [megatron] or [megatron.model]"
        ) from err


def _shape(config: ModelConfig) -> dict[str, Any]:
    return {
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_heads,
        "num_query_groups": config.num_kv_heads,
        "kv_channels": config.head_dim,
        "ffn_hidden_size": config.intermediate_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": config.attention_bias,
        "qk_layernorm": config.has_qk_norm,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def _cut(layout: ParallelLayout) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "sequence_parallel": layout.sequence_parallel,
        "variable_seq_lengths": layout.pp > 1,
        # The interleaved schedule with two stages sends both ways at once, which batched sends cannot.
        "overlap_p2p_comm": layout.vpp > 1,
        "batch_p2p_comm": layout.vpp == 1,
        # Dense models too: with variable lengths the default dispatcher is refused whether it is used or not.
        "moe_token_dispatcher_type": "alltoall",
    }


def _numerics(precision: torch.dtype, layout: ParallelLayout, *, uses_engine: bool) -> dict[str, Any]:
    on_gpu = torch.cuda.is_available()
    fuses = on_gpu and precision != torch.float32
    return {
        "params_dtype": precision,
        "pipeline_dtype": precision,
        "bf16": precision == torch.bfloat16,
        "fp16": precision == torch.float16,
        "calculate_per_token_loss": True,
        "attention_softmax_in_fp32": True,
        "use_cpu_initialization": not on_gpu,
        "perform_initialization": True,  # False would also skip the marks by which gradient norms count shards once
        "deallocate_pipeline_outputs": layout.pp > 1,
        "transformer_impl": "transformer_engine" if uses_engine else "local",
        "bias_activation_fusion": fuses,  # torch.compile
        "bias_dropout_fusion": fuses,
        # These need apex or Transformer Engine.
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "apply_rope_fusion": False,
        "cross_entropy_loss_fusion": False,
    }


def _expert_fields(config: ModelConfig) -> dict[str, Any]:
    return {
        "num_moe_experts": config.num_experts,
        "moe_router_topk": config.experts_per_token,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_layer_freq": [int(config.is_moe_layer(layer)) for layer in range(config.num_layers)],
        "moe_router_score_function": "softmax",
        # Softmax of the chosen experts' logits alone = softmax of all, made to sum to one over the chosen.
        "moe_router_pre_softmax": not config.normalises_top_experts,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": False,  # our experts group their products themselves
        "moe_permute_fusion": False,
    }
