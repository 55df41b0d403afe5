"""Qwen3 folders from nothing: small ones that learn, and ones of the published shapes with random bf16 weights.

    python make_model.py SHAPE FOLDER [--seed 0] [--device cpu] [--fp8 FOLDER]

Shapes for speed have the true vocabulary of 151936 ids; their tokenizer is the small ones' (bytes and a few special
tokens) with plain words for all further ids, so that whatever is sampled can be decoded. `--fp8`: also a folder of the
same weights with projections in FP8, for servers; `30b-a3b` needs 57 GiB of disk, and 29 GiB for that one.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import tokenizers

from myxa.actors.models.hf_folder import write_folder
from myxa.actors.models.model_config import ModelConfig, parse_model_config
from myxa.actors.models.tiny import (
    MIN_VOCAB_SIZE,
    PRESETS,
    Preset,
    build_tokenizer,
    make_tiny_model,
    tiny_config,
    write_tokenizer,
)
from myxa.core.messages import TensorSpec
from myxa.core.protocols import NamedArray

SHAPES = {
    "50m": Preset(768, 6, 12, 4, 2304),
    "100m": Preset(768, 14, 12, 4, 2304),
    "0.6b": Preset(1024, 28, 16, 8, 3072, head_dim=128),
    "1.7b": Preset(2048, 28, 16, 8, 6144, head_dim=128),
    "4b": Preset(2560, 36, 32, 8, 9728, head_dim=128),
    "dry": Preset(128, 2, 4, 2, 256, head_dim=32),
}
"""The last three as published by Qwen (config.json of Qwen3-0.6B, -1.7B, -4B); `dry` stands for them on a CPU."""

MOE_30B = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
    "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-6, "rope_scaling": None,
    "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
"""config.json of Qwen3-30B-A3B."""

SMALL_VOCAB, TRUE_VOCAB, DRY_VOCAB = 320, 151_936, 1024
TRUE_CONTEXT = 40_960
ROPE_THETA = 1_000_000.0


def qwen3_config(
    sizes: Preset, vocab_size: int, context_length: int, *, place: str, rope_theta: float = 1e4, dtype: str = "float32"
) -> ModelConfig:
    """Like tiny's, of other sizes."""
    own = {
        "hidden_size": sizes.hidden_size, "intermediate_size": sizes.intermediate_size,
        "num_hidden_layers": sizes.num_layers, "max_window_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads, "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim, "rope_theta": rope_theta, "dtype": dtype, "torch_dtype": dtype,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
    }  # fmt: skip
    return parse_model_config({**tiny_config("1m", vocab_size, context_length).source, **own}, place)


def shape_config(shape: str) -> ModelConfig:
    """The config of a shape for speed."""
    if shape == "30b-a3b":
        return parse_model_config(MOE_30B, "Qwen3-30B-A3B")
    vocab_size = DRY_VOCAB if shape == "dry" else TRUE_VOCAB
    return qwen3_config(
        SHAPES[shape], vocab_size, TRUE_CONTEXT, place=f"shape {shape}", rope_theta=ROPE_THETA, dtype="bfloat16"
    )


def make_learner(folder: Path, shape: str, seed: int = 0, context_length: int = 512) -> ModelConfig:
    """A small model that learns, float32, 320 ids; `shape` is one of tiny's presets or of ours below 0.6b."""
    if shape in PRESETS:
        return make_tiny_model(folder, shape, seed=seed, vocab_size=SMALL_VOCAB, context_length=context_length)
    config = qwen3_config(SHAPES[shape], SMALL_VOCAB, context_length, place=f"shape {shape}")
    write_folder(folder, config.source, random_weights(config, seed, "cpu", "float32"))
    write_tokenizer(folder, config)
    return config


def make_shaped(folder: Path, shape: str, seed: int = 0, device: str = "cpu") -> ModelConfig:
    """A model of a published shape with random bf16 weights; returns at once if the folder has it already."""
    config = shape_config(shape)
    if not (folder / "model.safetensors").exists() and not (folder / "model.safetensors.index.json").exists():
        write_folder(folder, config.source, random_weights(config, seed, device, "bfloat16"))
        write_wide_tokenizer(folder, config)
    return config


def make_apart(folder: Path, shape: str, device: str, served: Path | None = None) -> ModelConfig:
    """The same, on a GPU in a process of its own: what measures afterwards shall find the GPU empty. `served`: also a
    folder in FP8."""
    if device == "cpu":
        return make_shaped(folder, shape)
    more = () if served is None else ("--fp8", str(served))
    command = [sys.executable, __file__, shape, str(folder), "--device", device, *more]
    subprocess.run(command, check=True, timeout=120 if shape in SHAPES else 400)
    return shape_config(shape)


def random_weights(config: ModelConfig, seed: int, device: str, dtype: str) -> list[NamedArray]:
    """Normal with deviation 1/sqrt(fan in), norms 1; made by torch, which fills gigabytes in a second on a GPU."""
    import torch

    generator = torch.Generator(device).manual_seed(seed)
    into_residual = 1.0 / math.sqrt(2 * config.num_layers)
    weights: list[NamedArray] = []
    for name, shape in config.tensor_shapes().items():
        if name.endswith("norm.weight"):
            values = torch.ones(shape, device=device)
        else:
            scale = into_residual if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            values = torch.randn(shape, device=device, generator=generator).mul_(scale / math.sqrt(shape[-1]))
        data = values.to(getattr(torch, dtype)).cpu().contiguous().view(torch.uint8).reshape(-1).numpy()
        spec = TensorSpec(name=name, dtype=dtype, shape=shape, offset=0, num_bytes=data.nbytes)
        weights.append(NamedArray(spec=spec, data=data.data))
    return weights


def write_wide_tokenizer(folder: Path, config: ModelConfig) -> None:
    """The small tokenizer with words of the ordinary vocabulary for all ids beyond it: 150,000 special tokens would
    take seconds to load."""
    write_tokenizer(folder, qwen3_config(PRESETS["1m"], MIN_VOCAB_SIZE, config.context_length, place="tokenizer"))
    whole: dict[str, Any] = json.loads(build_tokenizer(MIN_VOCAB_SIZE).to_str())
    words = {f"w{number}": number for number in range(MIN_VOCAB_SIZE, config.vocab_size)}
    specials = {token["content"]: token["id"] for token in whole["added_tokens"]}
    whole["model"]["vocab"] |= specials | words
    text = json.dumps(whole)
    tokenizers.Tokenizer.from_str(text)  # raises if it is none
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=[*PRESETS, *SHAPES, "30b-a3b"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--fp8", type=Path, help="a second folder, with projections in FP8")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    if args.shape in PRESETS or args.shape in ("50m", "100m"):
        config = make_learner(args.folder, args.shape, args.seed)
    else:
        config = make_shaped(args.folder, args.shape, args.seed, args.device)
    if args.fp8 is not None and not args.fp8.exists():
        from myxa.actors.backends.convert import quantise_folder  # imports torch

        quantise_folder(args.folder, args.fp8)
    print(f"{args.folder}: {config.num_parameters:,} parameters, {config.vocab_size} ids")


if __name__ == "__main__":
    main()
