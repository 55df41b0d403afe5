"""The experts of one layer: two tensors instead of two per expert, multiplied by torch's grouped product where it runs.

`w1` [experts here, 2 * inner, hidden] holds each expert's gate rows, then its up rows; `w2` [experts here, hidden,
inner]. With expert-tensor parallelism `inner` is this rank's part; the dispatcher gathers tokens before and adds up
results after, so nothing is communicated here.

Libraries considered: megatron-core's SequentialMLP runs one small product per expert (on an H200 a fifth slower for
Qwen3-30B-A3B); its GroupedMLP needs the grouped_gemm package, its TEGroupedMLP Transformer Engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..fusing import fused
from ..torch_backend.tensors import integers, pieces
from . import mcore

_grouped_mm: Callable[..., Tensor] | None = getattr(functional, "grouped_mm", None) or getattr(
    torch, "_grouped_mm", None
)
"""torch 2.10 and later; the private name before."""


class GroupedExperts(nn.Module):
    """Drop-in for `experts` of megatron-core's MoE layer; SwiGLU, no bias."""

    def __init__(
        self, num_local_experts: int, config: Any, submodules: Any = None, pg_collection: Any = None, **_: Any
    ) -> None:
        super().__init__()
        self.config = config
        self._groups = pg_collection
        hidden, inner = int(config.hidden_size), int(config.moe_ffn_hidden_size) // int(pg_collection.expt_tp.size())
        device = torch.device("cpu") if config.use_cpu_initialization else mcore.default_device()
        options: dict[str, Any] = {"dtype": config.params_dtype, "device": device}
        self.w1 = nn.Parameter(torch.empty(num_local_experts, 2 * inner, hidden, **options))
        self.w2 = nn.Parameter(torch.empty(num_local_experts, hidden, inner, **options))
        set_attributes = mcore.module("tensor_parallel.layers").set_tensor_model_parallel_attributes
        for weight, dim in ((self.w1, 1), (self.w2, 2)):
            nn.init.normal_(weight, std=float(config.init_method_std))
            set_attributes(weight, True, dim, 1)
            cast(Any, weight).allreduce = False  # megatron-core's mark of an expert: reduced over fewer replicas

    def forward(self, tokens_Th: Tensor, tokens_per_expert: Tensor, probs_T: Tensor) -> tuple[Tensor, None]:
        """Tokens [T, hidden] sorted by expert, and their routing weights [T] -> what the experts make of them."""
        runs_grouped = tokens_Th.is_cuda and tokens_Th.dtype == torch.bfloat16 and tokens_Th.shape[0] > 0
        if _grouped_mm is None or not runs_grouped:
            return self._one_by_one(tokens_Th, tokens_per_expert, probs_T), None
        ends = tokens_per_expert.to(tokens_Th.device, torch.int32).cumsum(0, dtype=torch.int32)
        into = _grouped_mm(tokens_Th, self.w1.transpose(1, 2), offs=ends)
        return _grouped_mm(_gated_at_once(into, probs_T), self.w2.transpose(1, 2), offs=ends), None

    def _one_by_one(self, tokens_Th: Tensor, tokens_per_expert: Tensor, probs_T: Tensor) -> Tensor:
        sizes = integers(tokens_per_expert)
        tokens_of, probs_of = pieces(tokens_Th, sizes), pieces(probs_T, sizes)
        outs = [
            functional.linear(_gated(functional.linear(tokens, self.w1[i]), probs), self.w2[i])
            for i, (tokens, probs) in enumerate(zip(tokens_of, probs_of, strict=True))
        ]
        return torch.cat(outs)

    def backward_dw(self) -> None:
        """Part of the interface; weight gradients are never delayed here."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Both tensors for megatron-core's checkpoints: `w1` as [experts, 2, inner, hidden], so that gate and up rows
        come apart right under any other expert-tensor degree."""
        mapping = mcore.module("dist_checkpointing.mapping")
        groups = self._groups
        replica = (0, 0, int(groups.expt_dp.rank()))
        lead = len(sharded_offsets)
        experts = (lead, int(groups.ep.rank()), int(groups.ep.size()))
        parts = (lead + 2, int(groups.expt_tp.rank()), int(groups.expt_tp.size()))

        def shard(key: str, tensor: Tensor, replica_id: Any) -> Any:
            return mapping.ShardedTensor.from_rank_offsets(
                key, tensor, *sharded_offsets, experts, parts, replica_id=replica_id, prepend_axis_num=lead
            )

        def split(key: str, tensor: Tensor, replica_id: Any, flattened_range: Any = None) -> Any:
            return shard(key, tensor.view(tensor.shape[0], 2, tensor.shape[1] // 2, tensor.shape[2]), replica_id)

        def join(tensor: Tensor) -> Tensor:
            return tensor.reshape(tensor.shape[0], tensor.shape[1] * tensor.shape[2], tensor.shape[3])

        first, second = f"{prefix}w1", f"{prefix}w2"
        return {
            first: mapping.ShardedTensorFactory(first, self.w1, split, join, replica),
            second: shard(second, self.w2, replica),
        }


def _gated(into_T2i: Tensor, probs_T: Tensor) -> Tensor:
    """silu(gate) * up * routing weight, in the type of the input."""
    gate, up = into_T2i.chunk(2, dim=-1)
    return (functional.silu(gate) * up * probs_T.unsqueeze(-1)).to(into_T2i.dtype)


_gated_at_once = fused(_gated)
"""For all experts' tokens together; expert by expert there are too many sizes to compile for."""
