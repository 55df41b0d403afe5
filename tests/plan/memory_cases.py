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
    "8B": qwen3(4096, 36, 32, 12288, tied=False),
}


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
