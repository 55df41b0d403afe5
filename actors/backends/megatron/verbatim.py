"""Names in the verbatim tables `[megatron.model]`, `[megatron.ddp]` and `[megatron.optimizer]`: which there are, and
which are myxa's own to decide.

No torch and no megatron-core: the fields of the installed version are read from its source text, so that the launcher
reports a mistake within milliseconds. A trainer rank checks once more, against the classes themselves.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from ....core.errors import ConfigError
from ....core.suggestion import suggest

_OF_FOLDER = "leave it: config.json of model.path says it"
OWNED_MODEL: Mapping[str, str] = {
    **dict.fromkeys(
        (
            *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
            *("ffn_hidden_size", "normalization", "layernorm_epsilon", "gated_linear_unit", "activation_func"),
            *("add_bias_linear", "add_qkv_bias", "qk_layernorm", "rotary_interleaved", "num_moe_experts"),
            *("moe_router_topk", "moe_ffn_hidden_size", "moe_layer_freq", "moe_router_pre_softmax"),
            "moe_router_score_function",
        ),
        _OF_FOLDER,
    ),
    **dict.fromkeys(("params_dtype", "pipeline_dtype", "autocast_dtype", "bf16", "fp16"), "set trainer.dtype"),
    "tensor_model_parallel_size": "set megatron.tp",
    "pipeline_model_parallel_size": "set megatron.pp",
    "virtual_pipeline_model_parallel_size": "set megatron.vpp",
    "context_parallel_size": "set megatron.cp",
    "expert_model_parallel_size": "set megatron.ep",
    "expert_tensor_parallel_size": "set megatron.etp",
    "sequence_parallel": "set megatron.sequence_parallel",
    "transformer_impl": "set megatron.transformer_engine",
    "calculate_per_token_loss": "leave it: losses are shares of one global mean",
    "variable_seq_lengths": "leave it: micro-batches are packed, so their lengths vary",
    "use_cpu_initialization": "leave it: it follows the device",
    "perform_initialization": "leave it: without it gradient norms count some shards twice",
    "attention_dropout": "leave it: log-probs of a policy must not be random",
    "hidden_dropout": "leave it: log-probs of a policy must not be random",
}
OWNED_DDP: Mapping[str, str] = {
    "use_distributed_optimizer": "set megatron.distributed_optimizer",
    "average_in_collective": "leave it: losses are shares of one global mean, so gradients are summed",
    "use_megatron_fsdp": "leave it: fully sharded weights are not supported here",
    "use_custom_fsdp": "leave it: fully sharded weights are not supported here",
    "num_distributed_optimizer_instances": "leave it: one instance over all data-parallel ranks",
}
OWNED_OPTIMIZER: Mapping[str, str] = {
    "optimizer": "leave it: AdamW",
    "lr": "set optimizer.lr",
    "min_lr": "set optimizer.min_lr_ratio",
    "weight_decay": "set optimizer.weight_decay",
    "adam_beta1": "set optimizer.betas",
    "adam_beta2": "set optimizer.betas",
    "adam_eps": "set optimizer.eps",
    "clip_grad": "set optimizer.max_grad_norm",
    "decoupled_weight_decay": "leave it: AdamW decays apart from the gradient",
    "use_distributed_optimizer": "set megatron.distributed_optimizer",
    "overlap_param_gather": "set megatron.ddp.overlap_param_gather",
    "overlap_param_gather_with_optimizer_step": "leave it: it needs Megatron's own training loop",
    "optimizer_cpu_offload": "set megatron.offload_optimizer",
    "optimizer_offload_fraction": "set megatron.offload_optimizer",
    "bf16": "set trainer.dtype",
    "fp16": 'set trainer.dtype; half precision is "bfloat16" here',
    "params_dtype": "set trainer.dtype",
    "loss_scale": 'leave it: "bfloat16" needs none',
}
SOURCES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "model": (
        ("model_parallel_config.py", "ModelParallelConfig"),
        ("transformer/transformer_config.py", "TransformerConfig"),
    ),
    "ddp": (("distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig"),),
    "optimizer": (("optimizer/optimizer_config.py", "OptimizerConfig"),),
}
"""Table -> (file in megatron/core, dataclass in it), base classes first."""


def check_table(name: str, table: Mapping[str, Any], known: Collection[str], owned: Mapping[str, str]) -> None:
    """Raise ConfigError naming the first key of `[megatron.<name>]` that is myxa's own, or that is none of `known`."""
    for key in table:
        place = f"megatron.{name}.{key}"
        if key in owned:
            raise ConfigError(f"{place}: myxa decides this itself", remedy=owned[key])
        if key not in known:
            raise ConfigError(
                f"{place}: the installed megatron-core has no such field", remedy=suggest(key, set(known) - set(owned))
            )


def check_tables(tables: Mapping[str, Mapping[str, Any]], core: Path) -> None:
    """Check the three tables against the sources in `core`, the folder of megatron.core. A version whose sources are
    laid out in another way is left to the trainer's own check."""
    owned = {"model": OWNED_MODEL, "ddp": OWNED_DDP, "optimizer": OWNED_OPTIMIZER}
    for name, table in tables.items():
        known = field_names(core, name) if table else frozenset[str]()
        if known:
            check_table(name, table, known, owned[name])


def field_names(core: Path, table: str) -> frozenset[str]:
    """Fields of a table's dataclass by its source; empty if it is not where it is expected."""
    names: set[str] = set()
    for file, record in SOURCES[table]:
        try:
            tree = ast.parse((core / file).read_text(encoding="utf-8"))
        except (OSError, SyntaxError, ValueError):
            return frozenset()
        found = set(_fields(tree, record))
        if not found:
            return frozenset()
        names |= found
    return frozenset(names)


def _fields(tree: ast.Module, record: str) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == record:
            for part in node.body:
                if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                    yield part.target.id
