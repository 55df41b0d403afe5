"""Micro-batches through the pipeline: Megatron's own schedules (none, 1F1B, interleaved), with our head at the end.

Knows model chunks, packs and Megatron's schedules. Must not know losses: whoever runs a pass gives a function from
(micro-batch, scores) to a loss share, which is called on scoring ranks only. Loss shares are parts of one global mean
already, so Megatron divides by nothing: gradients are summed over micro-batches, replicas and context ranks.

A context rank holds the scores of its own tokens; they are put together before the loss, which thus sees whole samples
everywhere, and each rank passes back the gradient of its own part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function

from ....core.chaos import reached
from ..vocab_scores import TokenScores
from . import mcore
from .batch import Pack
from .routing import Mode, RoutingReplay
from .scoring_head import HeadRequest, ScoringHead, install_head

LossOf = Callable[[int, TokenScores], Tensor]
"""(number of the micro-batch, scores of its M loss tokens) -> 0-dim share of the loss."""


class Pipeline:
    """This rank's chunks of one model, ready for passes."""

    def __init__(
        self, chunks: Sequence[nn.Module], config: Any, vocab_size: int, routing: RoutingReplay | None = None
    ) -> None:
        self.chunks = list(chunks)
        self.routing = routing
        self.config = config
        self._heads = {id(chunk): install_head(chunk, vocab_size) for chunk in self.chunks}
        config.finalize_model_grads_func = _finalize
        config.calculate_per_token_loss = True

    def train(self, packs: Sequence[Pack], loss_of: LossOf, *, needs_entropy_grad: bool = False) -> None:
        """Forward and backward of all micro-batches; gradients end summed over all ranks that share them. Collective.

        Every rank gives as many packs; `loss_of` is called in their order, on scoring ranks only.
        """
        reached("trainer.forward")
        self._run(packs, loss_of, needs_entropy_grad=needs_entropy_grad, forward_only=False)

    @torch.no_grad()
    def score(self, packs: Sequence[Pack]) -> list[TokenScores]:
        """Scores of each pack's M loss tokens by the same operations on the same shapes, hence the same bits; empty on
        ranks that do not score. Collective."""
        found: list[TokenScores] = []

        def keep(_: int, scores: TokenScores) -> Tensor:
            found.append(TokenScores(scores.logprobs_M.clone(), scores.entropy_M.clone()))
            return scores.logprobs_M.new_zeros(())

        self._run(packs, keep, needs_entropy_grad=False, forward_only=True)
        return found

    def routed(self, mode: Mode) -> AbstractContextManager[None]:
        """Record or replay the choice of experts in the passes inside, where that is asked for."""
        return self.routing.during(mode) if self.routing is not None else nullcontext()

    def _run(
        self,
        packs: Sequence[Pack],
        loss_of: LossOf,
        *,
        needs_entropy_grad: bool,
        forward_only: bool,
    ) -> None:
        if not packs:
            return
        step = partial(self._forward, loss_of=loss_of, needs_entropy_grad=needs_entropy_grad)
        feeds = [iter(list(enumerate(packs))) for _ in self.chunks]
        mcore.module("pipeline_parallel").get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=feeds if len(feeds) > 1 else feeds[0],
            model=self.chunks,
            num_microbatches=len(packs),
            seq_length=packs[0].num_tokens,  # sizes travel with the tensors (variable_seq_lengths)
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _forward(
        self,
        feed: Iterator[tuple[int, Pack]],
        chunk: nn.Module,
        *,
        loss_of: LossOf,
        needs_entropy_grad: bool,
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]]:
        number, pack = next(feed)
        head = self._head_of(chunk)
        if head is not None:
            head.request = HeadRequest(pack.rows_N, pack.targets_N, pack.temperature, needs_entropy_grad)
        with self.routing.of(chunk, pack) if self.routing is not None else nullcontext():
            output = chunk(pack.token_ids_1t, None, None, packed_seq_params=pack.sequences)

        def loss(scores_1N2: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            scores_M2 = _gather_context(scores_1N2[0].float(), pack)
            share = loss_of(number, TokenScores(scores_M2[:, 0], scores_M2[:, 1]))
            return share, torch.zeros((), dtype=torch.int32, device=share.device), {}

        return output, loss

    def _head_of(self, chunk: nn.Module) -> ScoringHead | None:
        return self._heads[id(chunk)]


def _finalize(chunks: list[nn.Module], num_tokens: Tensor | None, **rest: Any) -> None:
    """Megatron's end of a backward pass, without its division by tokens."""
    del num_tokens
    reached("trainer.all_reduce")
    mcore.module("distributed").finalize_model_grads(chunks, None, **rest)


class _GatherContext(Function):
    """Scores of this context rank's tokens [N, 2] -> of all [M, 2], equal on all context ranks; backward: its own."""

    @staticmethod
    def forward(ctx: Any, scores_N2: Tensor, places_N: Tensor, size: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(places_N)
        whole_M2 = scores_N2.new_zeros(size, 2)
        whole_M2[places_N] = scores_N2
        dist.all_reduce(whole_M2, group=group)  # pyright: ignore[reportUnknownMemberType]  # torch says nothing
        return whole_M2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (places_N,) = ctx.saved_tensors
        return grads[0][places_N], None, None, None


def _gather_context(scores_N2: Tensor, pack: Pack) -> Tensor:
    group = mcore.parallel_state.get_context_parallel_group()
    if group.size() == 1:
        return scores_N2
    return cast(Tensor, cast(Any, _GatherContext).apply(scores_N2, pack.places_N, pack.num_loss_tokens, group))
