"""Tiny Qwen3 models from nothing, offline: byte-level tokenizer, chat template, random weights, all in one folder.

transformers, SGLang, vLLM and the embedded engine load it. One special token per role; every id of the padded
vocabulary decodes, because engines sample from the whole head; head_dim 64 and two key-value heads, as kernels and TP 2
want.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from ...core.errors import ModelError, raised_as
from ...core.messages import TensorSpec
from ...core.protocols import NamedArray
from ...core.samples import F32
from .hf_folder import write_folder
from .model_config import ModelConfig, parse_model_config

NUM_BYTES = 256
SPECIAL_TOKENS = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
PAD_ID = NUM_BYTES
END_ID = NUM_BYTES + 1
MIN_VOCAB_SIZE = NUM_BYTES + len(SPECIAL_TOKENS)

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)


@dataclass(frozen=True, slots=True)
class Preset:
    """Sizes of a model; the name in `PRESETS` is its number of parameters, roughly."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    head_dim: int = 64


PRESETS: Mapping[str, Preset] = {
    "0p5m": Preset(128, 2, 2, 2, 384),
    "1m": Preset(128, 4, 2, 2, 384),
    "2m": Preset(192, 4, 4, 2, 512),
    "5m": Preset(256, 6, 4, 2, 768),
    "20m": Preset(512, 6, 8, 4, 1536),
}


def make_tiny_model(
    folder: str | Path, preset: str = "1m", seed: int = 0, vocab_size: int = 320, context_length: int = 2048
) -> ModelConfig:
    """Random weights, the same for the same arguments. Raises ModelError: preset, vocabulary < 262, disk."""
    config = tiny_config(preset, vocab_size, context_length)
    write_folder(folder, config.source, init_weights(config, seed))
    write_tokenizer(folder, config)
    return config


def tiny_config(preset: str, vocab_size: int = 320, context_length: int = 2048) -> ModelConfig:
    """A Qwen3 with tied embeddings and our special ids. Raises ModelError: preset, too small a vocabulary."""
    sizes = PRESETS.get(preset)
    if sizes is None:
        raise ModelError(f"there is no tiny model {preset!r}", remedy=f"choose one of {', '.join(PRESETS)}")
    if vocab_size < MIN_VOCAB_SIZE:
        raise ModelError(
            f"vocab_size {vocab_size} is too small: {NUM_BYTES} bytes and {len(SPECIAL_TOKENS)} special tokens",
            remedy=f"use at least {MIN_VOCAB_SIZE}; a multiple of 64 suits every trainer",
        )
    source: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": vocab_size,
        "hidden_size": sizes.hidden_size, "intermediate_size": sizes.intermediate_size,
        "num_hidden_layers": sizes.num_layers, "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads, "head_dim": sizes.head_dim,
        "max_position_embeddings": context_length, "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,  # twice: transformers 5 reads one place, all others the other
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}, "tie_word_embeddings": True,
        "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0, "initializer_range": 0.02,
        "use_cache": True, "use_sliding_window": False, "sliding_window": None, "max_window_layers": sizes.num_layers,
        "bos_token_id": None, "eos_token_id": END_ID, "pad_token_id": PAD_ID, "dtype": "float32",
        "torch_dtype": "float32",
    }  # fmt: skip
    return parse_model_config(source, f"tiny model {preset}")


def init_weights(config: ModelConfig, seed: int) -> list[NamedArray]:
    """Random weights, float32: normal with deviation 1/sqrt(fan in), norms 1, biases 0. Matrices that write into the
    residual stream are scaled by 1/sqrt(2 layers), so that its variance does not grow with depth (Radford et al. 2019,
    "Language Models are Unsupervised Multitask Learners", section 2.3)."""
    generator = np.random.default_rng(seed)
    into_residual = 1.0 / math.sqrt(2 * config.num_layers)
    weights: list[NamedArray] = []
    for name, shape in config.tensor_shapes().items():
        if name.endswith("norm.weight"):
            values: F32 = np.ones(shape, dtype=np.float32)
        elif name.endswith(".bias"):
            values = np.zeros(shape, dtype=np.float32)
        else:
            scale = into_residual if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            values = generator.standard_normal(shape, dtype=np.float32) * np.float32(scale / math.sqrt(shape[-1]))
        weights.append(named_array(name, values))
    return weights


def named_array(name: str, values: F32) -> NamedArray:
    data = np.ascontiguousarray(values)
    spec = TensorSpec(name=name, dtype="float32", shape=values.shape, offset=0, num_bytes=data.nbytes)
    return NamedArray(spec=spec, data=data.reshape(-1).view(np.uint8).data)


def build_tokenizer(vocab_size: int) -> tokenizers.Tokenizer:
    """Every byte is a token and nothing is merged; special tokens follow; reserved tokens fill up to `vocab_size`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    reserved = [f"<|reserved_{i}|>" for i in range(vocab_size - MIN_VOCAB_SIZE)]
    tokenizer.add_special_tokens(  # pyright: ignore[reportUnknownMemberType] -- the stub says a bare list
        [tokenizers.AddedToken(text, normalized=False, special=True) for text in (*SPECIAL_TOKENS, *reserved)]
    )
    return tokenizer


def write_tokenizer(folder: str | Path, config: ModelConfig) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja` and `generation_config.json`."""
    root = Path(folder)
    special = {"eos_token": SPECIAL_TOKENS[END_ID - NUM_BYTES], "pad_token": SPECIAL_TOKENS[PAD_ID - NUM_BYTES]}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.context_length,
        "chat_template": CHAT_TEMPLATE,
    }
    generation = {"eos_token_id": END_ID, "pad_token_id": PAD_ID, "do_sample": True, "temperature": 1.0, "top_k": 0}
    with raised_as(ModelError, f"cannot write the tokenizer to {root}", OSError, remedy="choose another folder"):
        build_tokenizer(config.vocab_size).save(str(root / "tokenizer.json"))
        for name, value in (("tokenizer_config.json", settings), ("generation_config.json", generation)):
            (root / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        (root / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    """`python -m myxa.actors.models.tiny FOLDER`: a random model to try things with."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        sys.stderr.write("usage: python -m myxa.actors.models.tiny FOLDER\n")
        return ModelError.exit_code
    try:
        make_tiny_model(arguments[0])
    except ModelError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
