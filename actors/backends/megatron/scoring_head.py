"""The language-model head that answers with scores instead of logits.

The decoder's last stage ends in a `ColumnParallelLinear`, called through the model so that Megatron's hooks (parameters
gathered while the pass goes on) see it. This one is asked beforehand which rows to score; it takes these rows alone
and returns [M, 1, 2]. So the vocabulary's width never meets the width of the batch.

Knows Megatron's tensor-parallel tensor_parallel. Must not know samples or losses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from ....core.errors import TrainError
from ..vocab_scores import Temperature, VocabSlice, score_rows
from . import mcore

parallel_state = mcore.parallel_state
tensor_parallel = mcore.module("tensor_parallel")


@dataclass(frozen=True, slots=True)
class HeadRequest:
    """What to score in the pass that comes next."""

    rows_N: Tensor
    """int64 [N]: positions in this rank's sequence (all of it, whatever sequence parallelism does) that predict."""
    targets_N: Tensor
    """int64 [N]: the tokens they are to predict."""
    temperature: Temperature
    needs_entropy_grad: bool = False


class ScoringHead(tensor_parallel.ColumnParallelLinear):
    """See the module's head. Made of the model's own head by `install_head`; never constructed."""

    request: HeadRequest | None
    vocab_size: int
    """Tokens of the model; rows behind them pad the table."""

    def forward(self, input_: Tensor, weight: Tensor | None = None, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """[T, 1, h] -> ([N, 1, 2], None): log-probs and entropies of the rows asked for."""
        request, self.request = self.request, None
        if request is None:
            raise TrainError("the head was called without being asked what to score", remedy="a bug in the schedule")
        table_Vh = cast(Tensor, self.weight) if weight is None else weight
        group = parallel_state.get_tensor_model_parallel_group()
        hidden = _whole_rows(input_, is_split=bool(self.sequence_parallel))
        rows_Nh = hidden.reshape(-1, hidden.shape[-1]).index_select(0, request.rows_N)
        each = table_Vh.shape[0]
        start = group.rank() * each
        scores_N2 = score_rows(
            rows_Nh,
            table_Vh,
            request.targets_N,
            VocabSlice(start, max(0, min(each, self.vocab_size - start)), group if group.size() > 1 else None),
            request.temperature,
            needs_entropy_grad=request.needs_entropy_grad,
        )
        return scores_N2.unsqueeze(1), None


def install_head(chunk: nn.Module, vocab_size: int) -> ScoringHead | None:
    """Turn the head of a model chunk, if it has one, into a scoring head; its weight, names and shards stay."""
    for module in chunk.modules():
        head = getattr(module, "output_layer", None)
        if head is not None and isinstance(head, tensor_parallel.ColumnParallelLinear):
            # GPTModel names the class of its head; changing it afterwards keeps parameters, attributes and state names.
            head.__class__ = ScoringHead
            scoring = cast(ScoringHead, head)
            scoring.request = None
            scoring.vocab_size = vocab_size
            return scoring
    return None


def _whole_rows(hidden: Tensor, *, is_split: bool) -> Tensor:
    """All rows on every tensor-parallel rank; gradients are added up over these ranks."""
    if is_split:
        return tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
    return tensor_parallel.copy_to_tensor_model_parallel_region(hidden) if torch.is_grad_enabled() else hidden
