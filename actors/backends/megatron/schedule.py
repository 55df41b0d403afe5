"""Micro-batches through the pipeline: Megatron's own schedules (none, 1F1B, interleaved), with a head that returns
scores.

A caller gives a function from (micro-batch, scores) to a loss share; it runs on scoring ranks only. Loss shares are
parts of one global mean already, so Megatron divides by nothing: gradients are summed over micro-batches, replicas and
context ranks. A context rank holds the scores of its own tokens; they are put together before the loss, which sees
whole samples everywhere, and each rank passes back the gradient of its own part.

The decoder's last stage ends in a `ColumnParallelLinear`, called through the model so that Megatron's hooks (parameters
gathered during the pass) see it. `ScoringHead` is asked beforehand which rows to score; it takes these rows alone and
returns [M, 1, 2], so the vocabulary's width never meets the width of the batch.

`RoutingReplay`: in the training passes of a step, experts are chosen as they were in its scoring pass. Between the
mini-batches of a step the weights change, and with them which experts a token goes to; its log-probs then jump for a
reason that no ratio corrects ("Group Sequence Policy Optimization", arXiv 2507.18071, section 5.3). Only the choice is
replayed; the current router weighs the chosen experts, so it still learns. With one mini-batch there is no scoring
pass and nothing to replay: all tokens are trained under the weights that chose.

With `routing_replay = "rollout"` the choice is that of the engine which generated the sample (`Pack.experts`), in its
scoring and training passes alike: trainer and engine then differ by rounding, not by experts. The reference model
chooses for itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function

from ....core.errors import TrainError
from ....core.samples import Sample, TrainShard
from ..torch_backend.accounting import LossOf, TrainedModel
from ..torch_backend.layout import MicroBatch
from ..vocab_scores import Temperature, TokenScores, VocabSlice, score_rows
from . import mcore
from .batch import Pack, PackCutting, pack_samples
from .hf_weights import numbers_of, unwrapped
from .optimizer import MegatronOptimizer
from .world import MegatronWorld

Mode = Literal["off", "record", "replay"]


class GivenExperts:
    """In the place of megatron-core's `RouterReplay` in one pass of one router: experts are those given, and the
    router's own where none are."""

    def __init__(self, ids_tk: Tensor) -> None:
        """`ids_tk`: int [tokens of the router, top_k]; -1: its own."""
        self._ids_tk = ids_tk

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose: Callable[..., Any]
    ) -> tuple[Tensor, Tensor]:
        """Scores [tokens, experts] -> (scores, ids) of those chosen, [tokens, topk]."""
        ids_tk = self._ids_tk.to(scores.device, torch.int64)
        if ids_tk.shape != (len(scores), topk):
            raise TrainError(
                f"experts {list(ids_tk.shape)} are to be replayed where a router chooses {[len(scores), topk]}",
                remedy="a bug in the cutting of micro-batches",
            )
        own_tk = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)[1]
        ids_tk = torch.where(ids_tk < 0, own_tk, ids_tk)
        return scores.gather(1, ids_tk), ids_tk


class RoutingReplay:
    """The routers of a pipeline's chunks on this rank."""

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self._modules = {
            id(chunk): [m for m in chunk.modules() if getattr(m, "router_replay", None) is not None] for chunk in chunks
        }
        self._routers: dict[int, list[Any]] = {
            number: [module.router_replay for module in modules] for number, modules in self._modules.items()
        }
        self._actions = mcore.module("transformer.moe.router_replay").RouterReplayAction
        self._mode: Mode = "off"
        self._choices: dict[tuple[int, int], list[Tensor]] = {}

    @contextmanager
    def during(self, mode: Mode) -> Generator[None]:
        """Record or replay in the passes inside. What an earlier step recorded is forgotten when recording begins."""
        if mode == "record":
            self._choices.clear()
        self._mode = mode
        try:
            yield
        finally:
            self._mode = "off"

    @contextmanager
    def given(self, chunk: nn.Module, experts: Mapping[int, Tensor]) -> Generator[None]:
        """Choose these by layer, from 0, in the pass inside."""
        modules = cast("list[Any]", self._modules[id(chunk)])
        replays = self._routers[id(chunk)]
        try:
            for module in modules:
                module.router_replay = GivenExperts(experts[module.layer_number - 1])
            yield
        finally:
            for module, replay in zip(modules, replays, strict=True):
                module.router_replay = replay

    @contextmanager
    def of(self, chunk: nn.Module, pack: Pack) -> Generator[None]:
        """In a pass of this pack: record or replay by the mode; what engines chose, where the pack has it."""
        if pack.experts:
            with self.given(chunk, pack.experts):
                yield
            return
        routers = self._routers[id(chunk)]
        key = (id(chunk), id(pack))
        choices = self._choices.get(key)
        is_recorded = self._mode == "record"
        is_replayed = self._mode == "replay" and choices is not None
        for number, router in enumerate(routers):
            if is_recorded:
                router.set_router_replay_action(self._actions.RECORD)
            elif is_replayed and choices is not None:
                router.target_topk_idx = choices[number]
                router.set_router_replay_action(self._actions.REPLAY_FORWARD)
        try:
            yield
        finally:
            if is_recorded:
                self._choices[key] = [router.get_recorded_indices() for router in routers]
            for router in routers:
                router.clear_router_replay_action()
                router.clear_indices()


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
    keeps_hidden: bool = False
    """Whether `ScoringHead.hidden` is wanted afterwards."""


class ScoringHead(tensor_parallel.ColumnParallelLinear):
    """See the module's head. Made of the model's own head by `install_head`; never constructed."""

    request: HeadRequest | None
    hidden: Tensor | None
    """What it was given in a pass that keeps it."""
    vocab_size: int
    """Tokens of the model; rows behind them pad the table."""

    def forward(self, input_: Tensor, weight: Tensor | None = None, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """[T, 1, h] -> ([N, 1, 2], None): log-probs and entropies of the rows asked for."""
        request, self.request = self.request, None
        if request is None:
            raise TrainError("the head was called without being asked what to score", remedy="a bug in the schedule")
        self.hidden = input_ if request.keeps_hidden else None
        table_Vh = cast(Tensor, self.weight) if weight is None else weight
        group = parallel_state.get_tensor_model_parallel_group()
        hidden = _gather_rows(input_, is_split=bool(self.sequence_parallel))
        rows_Nh = hidden.reshape(-1, hidden.shape[-1]).index_select(0, request.rows_N)
        num_rows = table_Vh.shape[0]
        start = group.rank() * num_rows
        scores_N2 = score_rows(
            rows_Nh,
            table_Vh,
            request.targets_N,
            VocabSlice(start, max(0, min(num_rows, self.vocab_size - start)), group if group.size() > 1 else None),
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
            scoring.request = scoring.hidden = None
            scoring.vocab_size = vocab_size
            return scoring
    return None


def _gather_rows(hidden: Tensor, *, is_split: bool) -> Tensor:
    """All rows on every tensor-parallel rank; gradients are added up over these ranks."""
    if is_split:
        return tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
    return tensor_parallel.copy_to_tensor_model_parallel_region(hidden) if torch.is_grad_enabled() else hidden


class Pipeline:
    """This rank's chunks of one model, ready for passes."""

    routing: RoutingReplay | None = None
    mtp_reaches_trunk = False
    """Whether the loss of the MTP layer has gradients in the rest of the model."""

    def __init__(self, chunks: Sequence[nn.Module], vocab_size: int) -> None:
        self.chunks = list(chunks)
        config = mcore.module("utils").get_model_config(self.chunks[0])
        self._heads = {id(chunk): install_head(chunk, vocab_size) for chunk in self.chunks}
        config.finalize_model_grads_func = _finalize
        config.calculate_per_token_loss = True

    def parts(self) -> dict[str, Tensor]:
        return numbers_of(self.chunks)

    @torch.no_grad()
    def score(self, layouts: Sequence[Pack]) -> list[TokenScores]:
        """Scores of each pack's M loss tokens by the same operations on the same shapes, hence the same bits; empty on
        ranks that do not score. Collective."""
        copies: list[TokenScores] = []

        def keep(_: int, scores: TokenScores) -> Tensor:
            copies.append(TokenScores(scores.logprobs_M.clone(), scores.entropy_M.clone()))
            return scores.logprobs_M.new_zeros(())

        self._run(layouts, keep, needs_entropy_grad=False, forward_only=True)
        return copies

    def _run(self, packs: Sequence[Pack], loss_of: LossOf, *, needs_entropy_grad: bool, forward_only: bool) -> None:
        """Forward, and backward, of all micro-batches; gradients end summed over all ranks that share them. Collective.
        Every rank gives as many packs; `loss_of` is called in their order, on scoring ranks only."""
        if not packs:
            return
        step = partial(self._forward, loss_of=loss_of, needs_entropy_grad=needs_entropy_grad, trains=not forward_only)
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
        trains: bool,
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]]:
        number, pack = next(feed)
        head, has_mtp = self._heads[id(chunk)], trains and pack.after_next is not None
        if head is not None:
            head.request = HeadRequest(pack.rows_N, pack.targets_N, pack.temperature, needs_entropy_grad, has_mtp)
        with self.routing.of(chunk, pack) if self.routing is not None else nullcontext():
            output = chunk(pack.token_ids_1t, None, None, packed_seq_params=pack.sequences)
        mtp_loss = self._mtp_loss(unwrapped(chunk), head, pack) if head is not None and has_mtp else None

        def loss(scores_1N2: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            scores_M2 = _gather_context(scores_1N2[0].float(), pack)
            share = loss_of(number, TokenScores(scores_M2[:, 0], scores_M2[:, 1], mtp_loss))
            return share, torch.zeros((), dtype=torch.int32, device=share.device), {}

        return output, loss

    def _mtp_loss(self, model: Any, head: ScoringHead, pack: Pack) -> Tensor:
        """Sum over the pack's loss tokens of -log p(token) by the MTP layer, at temperature 1; 0-dim, equal on all
        context ranks, whose gradients are those of their own tokens."""
        targets, hidden = pack.after_next, head.hidden
        assert targets is not None
        assert hidden is not None
        head.hidden, tied = None, model.share_embeddings_and_output_weights
        table = model.shared_embedding_or_output_weight() if tied else head.weight
        with torch.set_grad_enabled(self.mtp_reaches_trunk):
            embedded = model.embedding(targets.next_ids_1t, None)
        if not self.mtp_reaches_trunk:
            hidden, table = hidden.detach(), table.detach()
        head.request = HeadRequest(targets.rows_A, targets.targets_A, 1.0)
        scores_A12, _ = head(model.after_next(hidden, embedded, pack.sequences), table)
        own_loss = -scores_A12[..., 0].float().sum()
        group, total = parallel_state.get_context_parallel_group(), own_loss.detach().clone()
        if group.size() > 1:
            dist.all_reduce(total, group=group)  # pyright: ignore[reportUnknownMemberType]  # torch says nothing
        return total + (own_loss - own_loss.detach())


class MegatronPolicy(Pipeline, TrainedModel):
    """A pipeline with its optimizer."""

    optimizer: MegatronOptimizer

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        optimizer: MegatronOptimizer,
        cutting: PackCutting,
        world: MegatronWorld,
        vocab_size: int,
        routing: RoutingReplay | None,
    ) -> None:
        super().__init__(chunks, vocab_size)
        self.world, self.replicas, self.vocab_size = world, world.replicas, vocab_size
        self.is_scoring, self.is_teller = world.grid.is_scoring, world.grid.is_teller
        self.routing = routing
        self.optimizer = optimizer
        self._cutting = cutting

    def layouts(self, samples: Sequence[Sample], micros: Sequence[Sequence[int]]) -> list[Pack]:
        missing = -len(micros) % self._cutting.multiple_of_micros
        return [pack_samples(samples, members, self._cutting) for members in (*micros, *[()] * missing)]

    def cut(self, shard: TrainShard, *, skips_neutral: bool) -> list[list[MicroBatch[Any]]]:
        choices = self._cutting.choices
        for sample in shard.samples:
            if wrong := choices.wrong_sample(sample) if choices is not None else "":
                raise TrainError(
                    f"sample {sample.name}: {wrong}",
                    remedy='set megatron.routing_replay = true: "rollout" needs samples of servers that tell experts',
                )
        return super().cut(shard, skips_neutral=skips_neutral)

    def parts(self) -> dict[str, Tensor]:
        self.optimizer.settle()
        return super().parts()

    def score_start(self, layouts: Sequence[Pack]) -> list[TokenScores]:
        with self._routed("record"):
            return self.score(layouts)

    def train(self, layouts: Sequence[Pack], loss_of: LossOf, *, needs_entropy_grad: bool, replays: bool) -> None:
        with self._routed("replay" if replays else "off"):
            self._run(layouts, loss_of, needs_entropy_grad=needs_entropy_grad, forward_only=False)

    def _routed(self, mode: Mode) -> AbstractContextManager[None]:
        """Record or replay the choice of experts in the passes inside, where that is asked for."""
        return self.routing.during(mode) if self.routing is not None else nullcontext()

    def gradient_norm(self) -> Tensor:
        return torch.tensor(self.optimizer.gradient_norm(), dtype=torch.float64)

    def has_finite_gradient(self) -> bool:
        return math.isfinite(self.optimizer.gradient_norm())

    def update(self, norm: Tensor, rate: float, weight_decay: float, max_norm: float) -> None:
        self.optimizer.update(rate, weight_decay, max_norm)


def _finalize(chunks: list[nn.Module], num_tokens: Tensor | None, **options: Any) -> None:
    """Megatron's end of a backward pass, without its division by tokens."""
    del num_tokens
    mcore.module("distributed").finalize_model_grads(chunks, None, **options)


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
