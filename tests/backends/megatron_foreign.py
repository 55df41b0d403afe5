"""One rank of two that write a checkpoint as other programs do; a program for the tests.

    python megatron_foreign.py SPEC.json RANK

megatron-core's own model, with none of our layers, gets the weights of a HuggingFace folder and is saved in torch_dist
under `iter_0000100`, half of the experts by each rank.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any, cast

import megatron_on_cpu

megatron_on_cpu.install()

import torch  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec  # noqa: E402
from megatron.core.transformer.torch_norm import WrappedTorchNorm  # noqa: E402
from megatron_rank import Gang  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from myxa.actors.backends.megatron.checkpoint import begin_shards  # noqa: E402
from myxa.actors.backends.megatron.hf_weights import load_hf_folder  # noqa: E402
from myxa.actors.backends.megatron.layout import ParallelLayout  # noqa: E402
from myxa.actors.backends.megatron.mcore import submodules_of  # noqa: E402
from myxa.actors.backends.megatron.provider import build_model_chunks, transformer_config  # noqa: E402
from myxa.actors.models.hf_folder import read_config  # noqa: E402

SINGLE = {
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "self_attention.linear_proj": "self_attn.o_proj",
    "self_attention.linear_q_proj": "self_attn.q_proj",
    "self_attention.linear_q_down_proj": "self_attn.q_a_proj",
    "self_attention.linear_q_up_proj": "self_attn.q_b_proj",
    "self_attention.linear_kv_down_proj": "self_attn.kv_a_proj_with_mqa",
    "self_attention.linear_kv_up_proj": "self_attn.kv_b_proj",
    "self_attention.kv_layernorm": "self_attn.kv_a_layernorm",
    "self_attention.k_layernorm": "self_attn.k_norm",
    "mlp.router": "mlp.gate",
}
BY_TRANSFORMER_ENGINE = {
    "q_layernorm.weight": "linear_q_up_proj.layer_norm_weight",
    "kv_layernorm.weight": "linear_kv_up_proj.layer_norm_weight",
}


def value(name: str, folder: dict[str, torch.Tensor], config: Any, rank: int) -> torch.Tensor:
    """What the parameter holds of the folder's weights."""
    whole = {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "output_layer.weight": "lm_head.weight",
        "decoder.final_layernorm.weight": "model.norm.weight",
    }
    if name in whole:
        return folder[whole[name]]
    layer, part = name.removeprefix("decoder.layers.").split(".", 1)
    prefix = f"model.layers.{layer}."
    if part.endswith("router.expert_bias"):
        return folder[f"{prefix}mlp.gate.e_score_correction_bias"]
    stem = part.removesuffix(".weight")
    if stem == "self_attention.q_layernorm":
        return folder[f"{prefix}self_attn.{'q_a_layernorm' if config.kv_lora_rank else 'q_norm'}.weight"]
    if stem in SINGLE:
        return folder[f"{prefix}{SINGLE[stem]}.weight"]
    if stem == "self_attention.linear_qkv":
        parts = [folder[f"{prefix}self_attn.{x}_proj.weight"].split(config.head_dim) for x in "qkv"]
        each = config.num_heads // config.num_kv_heads
        rows = [(*parts[0][g * each : (g + 1) * each], parts[1][g], parts[2][g]) for g in range(config.num_kv_heads)]
        return torch.cat([piece for group in rows for piece in group])
    path = stem.split(".")
    mlp = {"experts": "experts", "shared_experts": "shared_experts"}.get(path[1], "")
    if mlp == "experts":
        mlp += f".{rank * config.num_experts // 2 + int(path[3])}"
    place = f"{prefix}mlp.{mlp}." if mlp else f"{prefix}mlp."
    if path[-1] == "linear_fc2":
        return folder[f"{place}down_proj.weight"]
    return torch.cat([folder[f"{place}{x}_proj.weight"] for x in ("gate", "up")])


class CoreAttention(torch.nn.Module):
    """megatron-core's own takes no MLA without Transformer Engine; it has no weights."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()


def write(folder: Path, out: Path, rank: int) -> None:
    config, weights = read_config(folder), load_file(folder / "model.safetensors")
    settings = transformer_config(config, ParallelLayout(ep=2), torch.float32, {})
    settings.qk_layernorm = settings.qk_layernorm or bool(config.q_lora_rank)
    spec: Any = get_gpt_decoder_block_spec(settings, use_transformer_engine=False, normalization="RMSNorm")
    for layer in spec.layer_specs:
        submodules_of(layer.submodules.self_attention).core_attention = CoreAttention
    model: Any = GPTModel(
        config=settings,
        transformer_layer_spec=spec,
        vocab_size=-(-config.vocab_size // 128) * 128,
        max_sequence_length=64,
        share_embeddings_and_output_weights=False,
        position_embedding_type="none",
    )
    if config.kv_lora_rank and not config.q_lora_rank:  # 0.19 has no spec for that without Transformer Engine
        for layer in model.decoder.layers:
            layer.self_attention.kv_layernorm = WrappedTorchNorm(settings, config.kv_lora_rank, config.rms_norm_eps)
    with torch.no_grad():
        named = [*model.named_parameters(), *(pair for pair in model.named_buffers() if "expert_bias" in pair[0])]
        for name, parameter in named:
            found = value(name, weights, config, rank)
            parameter.zero_()
            parameter[: len(found)].copy_(found)
    shards = model.sharded_state_dict()
    for shard in shards.values():
        for ours, theirs in BY_TRANSFORMER_ENGINE.items() if config.kv_lora_rank else ():
            shard.key = shard.key.replace(f".{ours}", f".{theirs}")
    save(shards, out, rank)


def write_ours(folder: Path, out: Path, rank: int, layout: ParallelLayout) -> None:
    """Our own layers, cut over the ranks."""
    config = read_config(folder)
    chunks = build_model_chunks(config, layout, torch.float32, {})
    load_hf_folder(chunks, folder, config)
    save(cast(Any, chunks[0]).sharded_state_dict(), out, rank)


def save(shards: dict[str, Any], out: Path, rank: int) -> None:
    if rank == 0:
        (out / "iter_0000100").mkdir(parents=True)
        (out / "latest_checkpointed_iteration.txt").write_text("100")
    torch.distributed.barrier()
    common = {"args": argparse.Namespace(num_layers=4), "iteration": 100}
    pending = begin_shards({"model": shards, **common}, str(out / "iter_0000100"))  # megatron's, without its processes
    pending.write()
    pending.finish()


def main(place: str, rank: int) -> None:
    torch.set_num_threads(1)
    spec = json.loads(Path(place).read_text())
    try:
        gang, out, folders = (
            Gang(rank, 2, spec["port"]),
            Path(spec["out"]),
            [Path(folder) for folder in spec["folders"]],
        )
        gang.join(ParallelLayout(ep=2))
        for folder in folders:
            write(folder, out / folder.name, rank)
        gang.join(layout := ParallelLayout(tp=2, sequence_parallel=True))
        for folder in folders:
            write_ours(folder, out / f"{folder.name}-ours", rank, layout)
    except Exception:
        traceback.print_exc()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
