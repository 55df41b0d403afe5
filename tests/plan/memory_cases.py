"""Shapes and runs whose memory was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from myxa.actors.models.model_config import ModelConfig, parse_model_config
from myxa.core.config import RunConfig

BENCHMARKS = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text()
NOT_BY_TORCH = ("context", "communicators")
"""Memory that torch's own count of its allocations does not have."""


def qwen3(hidden: int, layers: int, heads: int, inner: int, *, tied: bool = True, **more: Any) -> ModelConfig:
    """A published shape: head size 128, 8 key-value heads, 151936 ids."""
    source = {
        "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 40_960, "tie_word_embeddings": tied, **more,
    }  # fmt: skip
    return parse_model_config(source, "config.json")


SHAPES = {
    "0.6B": qwen3(1024, 28, 16, 3072),
    "1.7B": qwen3(2048, 28, 16, 6144),
    "4B": qwen3(2560, 36, 32, 9728),
    "8B": qwen3(4096, 36, 32, 12288, tied=False),
}
QWEN3_30B = qwen3(
    2048, 48, 32, 6144, tied=False, model_type="qwen3_moe", num_key_value_heads=4, num_experts=128,
    num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
)  # fmt: skip
"""Qwen3-30B-A3B."""
LLAMA31_8B: dict[str, Any] = {
    "model_type": "llama", "attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 14336, "max_position_embeddings": 131072, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192},
    "torch_dtype": "bfloat16", "vocab_size": 128256, "eos_token_id": [128001, 128008, 128009],
}  # fmt: skip
GLM45_AIR: dict[str, Any] = {
    "model_type": "glm4_moe", "attention_bias": True, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
    "partial_rotary_factor": 0.5, "intermediate_size": 10944, "max_position_embeddings": 131072,
    "moe_intermediate_size": 1408, "norm_topk_prob": True, "num_attention_heads": 96, "n_group": 1, "topk_group": 1,
    "n_routed_experts": 128, "n_shared_experts": 1, "routed_scaling_factor": 1.0, "num_experts_per_tok": 8,
    "first_k_dense_replace": 1, "num_hidden_layers": 46, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
    "rope_scaling": None, "rope_theta": 1000000, "num_nextn_predict_layers": 1, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "use_qk_norm": False, "vocab_size": 151552, "eos_token_id": [151329, 151336, 151338],
}  # fmt: skip
"""As published (106B, 12B of them for each token), without the layer for multi-token prediction."""


def run(kind: str, ranks: int, **sections: Any) -> RunConfig:
    devices = ",".join(map(str, range(ranks)))
    raw: dict[str, Any] = {
        "model": {"path": "m"}, "data": {"train": "t"},
        "rollout": {"max_new_tokens": 1024}, "engine": {"context_length": 2048, "dtype": "bfloat16"},
        "trainer": {"dtype": "bfloat16", "max_tokens_per_microbatch": 16 * 1024},
        "roles": {"trainer": {"kind": kind, "count": ranks, "devices": devices}},
    }  # fmt: skip
    for name, section in sections.items():
        raw[name] = {**raw.get(name, {}), **section}
    return RunConfig.model_validate(raw)


def measured(row: str) -> float:
    """The peak of a row of the table `train`, in GiB."""
    (line,) = [line for line in BENCHMARKS.splitlines() if line.startswith(f"| {row}")]
    return float(line.split("|")[5])


CASES = (
    ("megatron 0.6B ", "megatron", "0.6B", 1),
    ("torch 0.6B ", "torch", "0.6B", 1),
    ("megatron 1.7B |", "megatron", "1.7B", 1),
    ("megatron 1.7B, DP4", "megatron", "1.7B", 4),
)
"""Rows of the benchmark's table, with backend, shape and ranks."""
