"""Megatron-core trains over groups whose communicators come and go; a program for the tests (see `comm_rank.py`).

Three training steps of the same model from the same seed: over plain gloo, over proxies, and over proxies that are
reloaded after every step.
"""

from __future__ import annotations

import importlib
import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "backends"))

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.memory import comm_rank

importlib.import_module("megatron_on_cpu").install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from torch.distributed.distributed_c10d import PrefixStore  # noqa: E402

from myxa.actors.backends.megatron.hf_weights import unwrapped  # noqa: E402
from myxa.actors.backends.megatron.layout import ParallelLayout  # noqa: E402
from myxa.actors.backends.megatron.provider import build_model_chunks  # noqa: E402
from myxa.actors.models.hf_folder import read_config  # noqa: E402

megatron_rank: Any = importlib.import_module("megatron_rank")
NUM_STEPS = 3
LEARNING_RATE = 0.5
LAYOUTS = {
    "dense": ParallelLayout(tp=2, pp=2, sequence_parallel=True),
    "experts": ParallelLayout(pp=2, ep=2),
}
MODEL: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 131, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "initializer_range": 0.15, "tie_word_embeddings": True,
    "hidden_act": "silu", "attention_bias": False, "rope_theta": 10000.0,
}  # fmt: skip
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip


def join(me: comm_rank.Rank, backend: str, name: str, layout: ParallelLayout) -> None:
    store, wait = PrefixStore(f"{backend} {name}", me.store), timedelta(seconds=comm_rank.TIMEOUT_S)
    dist.init_process_group(backend, store=store, rank=me.rank, world_size=me.world_size, timeout=wait)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        create_gloo_process_groups=True,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1234)


def build(me: comm_rank.Rank, name: str, layout: ParallelLayout) -> list[Any]:
    folder = me.folder / name
    folder.mkdir(exist_ok=True)
    (folder / f"{me.rank}").mkdir(exist_ok=True)
    path = folder / f"{me.rank}"
    (path / "config.json").write_text(json.dumps(MODEL if name == "dense" else MODEL | EXPERTS))
    torch.manual_seed(7 + parallel_state.get_pipeline_model_parallel_rank())
    chunks = build_model_chunks(read_config(path), layout, torch.float32, {})
    settings: Any = unwrapped(chunks[0]).config
    options = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False)
    wrapped: list[Any] = [DistributedDataParallel(settings, options, chunk) for chunk in chunks]
    settings.finalize_model_grads_func = finalize_model_grads
    return wrapped


def step(wrapped: list[Any], layout: ParallelLayout, number: int) -> list[float]:
    """Loss as this rank saw it; nothing except on the last stage."""
    random = torch.Generator().manual_seed(100 * number + parallel_state.get_data_parallel_rank())
    sequences = [(torch.randint(0, 131, (length,), generator=random), torch.ones(length)) for length in (9, 12, 7, 16)]
    batches = [megatron_rank.pack(part, layout) for part in (sequences[:2], sequences[2:])]
    for chunk in wrapped:
        chunk.zero_grad_buffer()
    reports = get_forward_backward_func()(
        forward_step_func=megatron_rank.forward_step(131),
        data_iterator=iter(batches),
        model=wrapped,
        num_microbatches=len(batches),
        seq_length=64,
        micro_batch_size=1,
        forward_only=False,
    )
    with torch.no_grad():
        for chunk in wrapped:
            for parameter in chunk.parameters():
                parameter.sub_(parameter.main_grad, alpha=LEARNING_RATE)
    return [float(report["loss"]) for report in reports]


def train(me: comm_rank.Rank, backend: str, name: str, *, reloads: bool) -> list[list[float]]:
    layout = LAYOUTS[name]
    join(me, backend, f"{name} {reloads}", layout)
    wrapped = build(me, name, layout)
    groups = [parallel_state.get_tensor_model_parallel_group(), parallel_state.get_data_parallel_group()]
    losses: list[list[float]] = []
    for number in range(NUM_STEPS):
        losses.append(step(wrapped, layout, number))
        if reloads:
            epoch = me.comms.stats().epoch
            num_live = me.comms.stats().num_live
            assert num_live > 2, "Megatron's groups are behind proxies"
            assert me.comms.release(epoch + 1, comm_rank.TIMEOUT_S).num_live == 0
            assert me.comms.restore(epoch + 2, comm_rank.TIMEOUT_S).num_live >= num_live
            me.facts[f"{name} groups"] = me.comms.stats().num_groups
    assert groups == [parallel_state.get_tensor_model_parallel_group(), parallel_state.get_data_parallel_group()]
    me.reach(f"trained {backend} {name} {reloads}")
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return losses


def compare(me: comm_rank.Rank, name: str) -> None:
    plain = train(me, "gloo", name, reloads=False)
    still = train(me, "myxa_gloo", name, reloads=False)
    moved = train(me, "myxa_gloo", name, reloads=True)
    assert plain == still == moved, (plain, still, moved)
    me.facts["losses"] = plain


comm_rank.SCENARIOS["dense"] = (lambda me: compare(me, "dense"), {})
comm_rank.SCENARIOS["experts"] = (lambda me: compare(me, "experts"), {})


if __name__ == "__main__":
    comm_rank.main()
