"""One rank that goes through many parallel layouts in one process; a program for the tests.

    python megatron_rank.py SPEC.json RANK

For every case: build, load the case's folder, compare every exported tensor with the folder bit by bit, then one
training step's loss and gradients with those that HuggingFace gave (files beside the folder).
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import traceback
from pathlib import Path
from typing import Any, cast

import megatron_on_cpu

megatron_on_cpu.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch.distributed.distributed_c10d import PrefixStore  # noqa: E402

from myxa.actors.backends.megatron import hf_weights  # noqa: E402
from myxa.actors.backends.megatron.batch import zigzag  # noqa: E402
from myxa.actors.backends.megatron.hf_weights import iter_hf_tensors, unwrapped  # noqa: E402
from myxa.actors.backends.megatron.layout import ParallelLayout  # noqa: E402
from myxa.actors.backends.megatron.provider import build_model_chunks  # noqa: E402
from myxa.actors.models.hf_folder import read_config  # noqa: E402
from myxa.core.errors import MyxaError  # noqa: E402

MINUS_MUCH = -1e9
HAS_GPUS = torch.cuda.is_available()
"""On a machine with GPUs (bench/gpu/layouts.py) every rank takes one, and NCCL takes gloo's place."""


class Gang:
    """Joins a new process group per layout through one rendezvous store."""

    def __init__(self, rank: int, world_size: int, port: int) -> None:
        self.rank, self.world_size = rank, world_size
        if HAS_GPUS:
            torch.cuda.set_device(rank)
        self._store = cast(Any, dist).TCPStore("127.0.0.1", port, world_size, is_master=rank == 0)
        self._number = 0

    def join(self, layout: ParallelLayout) -> None:
        if dist.is_initialized():
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
        self._number += 1
        store = PrefixStore(str(self._number), self._store)
        backend = "nccl" if HAS_GPUS else "gloo"
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world_size)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.etp,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(1234)


# -- weights -------------------------------------------------------------------------------------------------------


def check_weights(case: dict[str, Any], chunks: list[Any], config: Any, layout: ParallelLayout) -> list[str]:
    """Names that this rank sent; AssertionError for a tensor that is not the folder's."""
    folder = load_file(Path(case.get("equals", case["folder"])) / "model.safetensors")
    names: list[str] = []
    for name, tensor in iter_hf_tensors(chunks, config):
        same(name, tensor, folder[name])
        names.append(name)
    everything = {}
    for name, tensor in iter_hf_tensors(chunks, config, to_all=True):
        same(name, tensor, folder[name])
        everything[name] = 1
    assert everything.keys() == folder.keys(), everything.keys() ^ folder.keys()
    return names


def same(name: str, tensor: torch.Tensor, expected: torch.Tensor) -> None:
    assert tensor.dtype == expected.dtype, f"{name}: {tensor.dtype}, in the folder {expected.dtype}"
    assert tensor.shape == expected.shape, f"{name}: {tensor.shape}, in the folder {expected.shape}"
    assert torch.equal(tensor.cpu(), expected), f"{name} is not what the folder holds"


def load_counting(chunks: list[Any], folder: str, config: Any) -> int:
    """Load the folder; bytes that were copied out of it."""
    read, counted = hf_weights.read_piece, 0

    def counting(*args: Any) -> torch.Tensor:
        nonlocal counted
        tensor = read(*args)
        counted += tensor.nbytes
        return tensor

    hf_weights.read_piece = counting
    try:
        hf_weights.load_hf_folder(chunks, folder, config)
    finally:
        hf_weights.read_piece = read
    return counted


# -- loss and gradients --------------------------------------------------------------------------------------------


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cuda() if HAS_GPUS else tensor


def pack(sequences: list[tuple[torch.Tensor, torch.Tensor]], layout: ParallelLayout) -> dict[str, Any]:
    """One micro-batch of (tokens, weights) on this context rank."""
    num_chunks = 2 * layout.cp if layout.cp > 1 else 1
    multiple = num_chunks * (layout.tp if layout.sequence_parallel else 1)
    lengths = [-(-len(ids) // multiple) * multiple for ids, _ in sequences]
    own = torch.from_numpy(zigzag(lengths, num_chunks, parallel_state.get_context_parallel_rank()))

    def line(parts: list[torch.Tensor]) -> torch.Tensor:
        padded = [torch.cat([x, x.new_zeros(n - len(x))]) for x, n in zip(parts, lengths, strict=True)]
        return on_device(torch.cat(padded)[own][None])

    bounds = on_device(torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32))
    return {
        "ids": line([ids for ids, _ in sequences]),
        "labels": line([torch.cat([ids[1:], ids[:1]]) for ids, _ in sequences]),
        "weights": line([weights for _, weights in sequences]),
        "packed": PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
        ),
    }  # fmt: skip


def forward_step(vocab_size: int) -> Any:
    def step(batches: Any, model: Any) -> tuple[torch.Tensor, Any]:
        batch = next(batches)
        out = model(batch["ids"], None, None, packed_seq_params=batch["packed"])

        def loss_of(logits: torch.Tensor) -> Any:
            start = parallel_state.get_tensor_model_parallel_rank() * logits.shape[-1]
            padding = torch.arange(start, start + logits.shape[-1], device=logits.device) >= vocab_size
            masked = logits.float().masked_fill(padding, MINUS_MUCH)
            entropy = tensor_parallel.vocab_parallel_cross_entropy(masked.contiguous(), batch["labels"])
            loss = (entropy * batch["weights"]).sum()
            count = (batch["weights"] > 0).sum().to(torch.int)
            return loss, count, {"loss": loss.detach().clone(), "count": count}

        return out, loss_of

    return step


def check_numbers(case: dict[str, Any], chunks: list[Any], config: Any, layout: ParallelLayout) -> dict[str, float]:
    """Relative error of the loss, largest relative error of a gradient, this rank's view."""
    settings: Any = unwrapped(chunks[0]).config
    options = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False)
    wrapped: list[Any] = [
        DistributedDataParallel(settings, options, c, disable_bucketing=i > 0) for i, c in enumerate(chunks)
    ]
    settings.finalize_model_grads_func = finalize_model_grads
    settings.no_sync_func = [c.no_sync for c in wrapped] if len(wrapped) > 1 else wrapped[0].no_sync
    expected = load_file(Path(case["folder"]) / "expected.safetensors")
    world = parallel_state.get_data_parallel_world_size()
    sequences = [(expected.pop(f"ids.{i}"), expected.pop(f"weights.{i}")) for i in range(case["num_sequences"])]
    mine = sequences[parallel_state.get_data_parallel_rank() :: world]
    half = -(-len(mine) // 2)
    batches = [pack(part, layout) for part in (mine[:half], mine[half:])]
    for chunk in wrapped:
        chunk.zero_grad_buffer()
    reports = get_forward_backward_func()(
        forward_step_func=forward_step(config.vocab_size),
        data_iterator=[iter(batches) for _ in wrapped] if len(wrapped) > 1 else iter(batches),
        model=wrapped,
        num_microbatches=len(batches),
        seq_length=64,
        micro_batch_size=1,
        forward_only=False,
    )
    sums = [sum(float(r[key]) for r in reports) for key in ("loss", "count")]
    total = on_device(torch.tensor(sums, dtype=torch.float64))
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    loss = float(expected.pop("loss"))
    result = {"gradient": 0.0, "loss": abs(float(total[0] / total[1]) - loss) / loss if reports else 0.0}
    for name, gradient in iter_hf_tensors(wrapped, config, to_all=True, pick=main_grad):
        wanted = expected.pop(name, None)
        if wanted is None:
            assert name.endswith("e_score_correction_bias"), f"transformers trains no {name}"
            continue
        gradient = gradient.cpu()
        result["gradient"] = max(
            result["gradient"], float((gradient - wanted).abs().max() / wanted.abs().max().clamp(min=1e-6))
        )
    assert not expected, f"no gradients for {list(expected)}"
    return result


def main_grad(parameter: Any) -> torch.Tensor:
    """A router's correction has none: no gradient reaches it."""
    return getattr(parameter, "main_grad", parameter)


def run_case(case: dict[str, Any], gang: Gang) -> dict[str, Any]:
    layout = ParallelLayout(**case["layout"])
    gang.join(layout)
    config = read_config(case["folder"])
    precision = getattr(torch, case.get("precision", "float32"))
    try:
        chunks = build_model_chunks(config, layout, precision, case.get("overrides", {}))
        num_read = load_counting(chunks, case["folder"], config)
    except MyxaError as error:
        return {"refusal": str(error)}
    held = sum(p.nbytes for chunk in chunks for p in chunk.parameters())
    result: dict[str, Any] = {"names": check_weights(case, chunks, config, layout), "read": num_read, "held": held}
    if case.get("precision", "float32") == "float32":
        result |= check_numbers(case, chunks, config, layout)
    return result


def main(place: str, rank: int) -> None:
    torch.set_num_threads(1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 16384)), hard))  # gloo keeps many sockets
    spec = json.loads(Path(place).read_text())
    gang = Gang(rank, spec["num_ranks"], spec["port"])
    for number, case in enumerate(spec["cases"]):
        start = time.monotonic()
        try:
            result = run_case(case, gang)
        except Exception:
            traceback.print_exc()
            print(f"case {case['name']}", flush=True)
            os._exit(1)
        result["took_s"] = time.monotonic() - start
        (Path(spec["out"]) / f"case{number}.rank{rank}.json").write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
