"""Names in the verbatim tables `[megatron.model]`, `[megatron.ddp]` and `[megatron.optimizer]`: which there are, and
which are myxa's own to decide.

No torch and no megatron-core: the fields of the installed version are read from its source text, so that the launcher
reports a mistake within milliseconds. A trainer rank checks once more, against the classes themselves.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ....core.errors import ConfigError
from ....core.suggestion import suggest

OWNED: Mapping[str, tuple[str, ...]] = {
    "model": (
        "num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size",
        "normalization", "layernorm_epsilon", "gated_linear_unit", "activation_func", "add_bias_linear",
        "add_qkv_bias", "qk_layernorm", "rotary_interleaved", "num_moe_experts", "moe_router_topk",
        "moe_ffn_hidden_size", "moe_layer_freq", "moe_router_pre_softmax", "moe_router_score_function",
        "moe_router_enable_expert_bias", "moe_router_num_groups", "moe_router_group_topk",
        "moe_router_topk_scaling_factor", "moe_shared_expert_intermediate_size", "moe_shared_expert_gate",
        "params_dtype", "pipeline_dtype", "autocast_dtype", "bf16", "fp16", "tensor_model_parallel_size",
        "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size", "context_parallel_size",
        "expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel", "transformer_impl",
        "calculate_per_token_loss", "variable_seq_lengths", "use_cpu_initialization", "perform_initialization",
        "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "multi_latent_attention",
        "mscale_all_dim", "attention_dropout", "hidden_dropout", "moe_aux_loss_coeff", "moe_z_loss_coeff",
        "mtp_num_layers", "mtp_loss_scaling_factor", "softmax_scale", "softmax_type", "window_size",
        "window_attn_skip_freq", "no_rope_freq", "rope_type", "rotary_base", "rotary_percent", "rotary_scaling_factor",
        "mscale", "beta_fast", "beta_slow", "original_max_position_embeddings", "cache_mla_latents", "mrope_section",
        "qk_l2_norm", "qk_clip", "layernorm_zero_centered_gamma", "apply_residual_connection_post_layernorm",
        "attention_output_gate", "experimental_attention_variant", "linear_attention_freq",
        "activation_func_clamp_value", "glu_linear_offset", "heterogeneous_block_specs", "fp8", "fp4",
        "fp32_residual_connection", "hybrid_context_parallel", "moe_input_jitter_eps",
        "moe_router_force_load_balancing", "moe_router_load_balancing_type", "moe_expert_capacity_factor",
        "timers", "finalize_model_grads_func", "grad_scale_func", "no_sync_func", "grad_sync_func", "param_sync_func",
        "init_method", "output_layer_init_method", "embedding_init_method", "_cpu_offloading_context", "quant_recipe",
    ),
    "ddp": (
        "use_distributed_optimizer", "average_in_collective", "use_megatron_fsdp", "use_custom_fsdp",
        "num_distributed_optimizer_instances",
    ),
    "optimizer": (
        "optimizer", "lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad",
        "decoupled_weight_decay", "use_distributed_optimizer", "overlap_param_gather",
        "overlap_param_gather_with_optimizer_step", "optimizer_cpu_offload", "optimizer_offload_fraction", "bf16",
        "fp16", "params_dtype", "loss_scale", "decoupled_lr", "decoupled_min_lr", "timers",
    ),
}  # fmt: skip
"""Fields that follow from the model folder or from other keys of the run file, that our layers and schedule do not
read, or that would train something else: losses that Megatron adds by itself are not normalised like the policy's,
dropout and noise make log-probs random, tokens dropped by experts make them depend on other sequences. The last of each
table hold code, which no file can say."""
NEEDED: Mapping[str, tuple[str, ...]] = {
    "transformer_engine": (
        "moe_permute_fusion", "moe_router_fusion", "fine_grained_activation_offloading",
        "use_precision_aware_optimizer", "layernorm",
    ),
    "fused_weight_gradient_mlp_cuda": ("gradient_accumulation_fusion",),
}  # fmt: skip
"""Package -> fields that work with it alone, and entries of `recompute_modules`."""
SOURCES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "model": (
        ("model_parallel_config.py", "ModelParallelConfig"),
        ("transformer/transformer_config.py", "TransformerConfig"),
    ),
    "ddp": (("distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig"),),
    "optimizer": (("optimizer/optimizer_config.py", "OptimizerConfig"),),
}
"""Table -> (file in megatron/core, dataclass in it), base classes first."""


def check_table(name: str, table: Mapping[str, Any], allowed: Collection[str]) -> None:
    """Raise ConfigError naming the first key of `[megatron.<name>]` that is myxa's own, or that is none of `known`."""
    for key in table:
        place = f"megatron.{name}.{key}"
        if key in OWNED[name]:
            raise ConfigError(
                f"{place}: myxa decides this itself",
                remedy="leave it out: the model folder, [megatron], [trainer] or [optimizer] says it",
            )
        if key not in allowed:
            remedy = suggest(key, set(allowed).difference(OWNED[name]))
            raise ConfigError(f"{place}: the installed megatron-core has no such field", remedy=remedy)


def check_packages(tables: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ConfigError for a field of these tables that needs a package which is not installed: megatron-core finds
    out in the middle of set-up, or of the first step."""
    for name, table in tables.items():
        used = {field for field, value in table.items() if value}.union(table.get("recompute_modules") or ())
        for package, dependent in NEEDED.items():
            if (needy := used.intersection(dependent)) and find_spec(package) is None:
                raise ConfigError(
                    f"megatron.{name}: {min(needy)} needs {package}, which is not installed here",
                    remedy="install it in the trainer's environment, or leave this out",
                )


def check_tables(tables: Mapping[str, Mapping[str, Any]], core: Path) -> None:
    """Check the three tables against the sources in `core`, the folder of megatron.core. A version whose sources are
    laid out in another way is left to the trainer's own check."""
    for name, table in tables.items():
        names = field_names(core, name) if table else frozenset[str]()
        if names:
            check_table(name, table, names)


def field_names(core: Path, table: str) -> frozenset[str]:
    """Fields of a table's dataclass by its source; empty if it is not where it is expected."""
    with suppress(OSError, SyntaxError, ValueError):
        names = [class_fields(core / file, record) for file, record in SOURCES[table]]
        return frozenset[str]().union(*names) if all(names) else frozenset()
    return frozenset()


def class_fields(file: Path, name: str = "") -> set[str]:
    """Fields of a dataclass (without a name: of all classes) by a file's source. Raises OSError, SyntaxError,
    ValueError."""
    classes = [node for node in ast.parse(file.read_bytes()).body if isinstance(node, ast.ClassDef)]
    bodies = (node.body for node in classes if name in ("", node.name))
    fields = (part for body in bodies for part in body if isinstance(part, ast.AnnAssign))
    return {part.target.id for part in fields if isinstance(part.target, ast.Name)}
