"""Log-probability and entropy of chosen tokens from hidden states, in float32; no [M, V] is kept unless there is room,
and every rank may hold only a slice of the vocabulary.

With temperature tau, one for all rows or one for each (engines sample from softmax(z / tau), so the trainer divides
too), over all slices together:

    z = h @ W.T / tau,   lp = z[y] - log Z,   log Z = logsumexp(z),   H = log Z - sum_v p_v z_v,   p = softmax(z)

Rows go through in chunks: a chunk's logits are made, used and dropped. Of each slice only four numbers a row are
kept (maximum, sum of exponentials, their first moment, the target's logit), and the slices are put together with one
collective for all rows. The backward pass makes the logits again, from the same products, so they are the same, or
finds them where they were kept:

    d lp / d z_v = [v = y] - p_v          d H / d z_v = -p_v (z_v - log Z + H)

`fused` compiles small pure functions of tensors into one GPU kernel, so that a large tensor is read once; on the CPU,
and without a C compiler or Triton, they run as they are.

Libraries considered: megatron.core's `vocab_parallel_cross_entropy` keeps float32 logits of all tokens and has no
entropy. Liger's fused cross entropy fixes the loss, where policies need the log-probs themselves. `torch.compile`
around the whole model: Megatron's modules and hooks break its graphs, and a step's shapes change with each micro-batch.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from .torch_backend.tensors import recomputed

P = ParamSpec("P")
R = TypeVar("R")

_log = logging.getLogger("myxa.backends")


def fused(fn: Callable[P, R]) -> Callable[P, R]:
    """`fn` compiled for tensors on a GPU. It is pure, its first argument is a tensor of rows, whose number may change
    call by call. What cannot be compiled, now or for a later kind of arguments, runs as it is from then on; a true
    error comes from that too."""
    compiled: list[Callable[P, R]] = []

    @functools.wraps(fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        rows = cast(Tensor, args[0])
        if not rows.is_cuda or rows.shape[0] < 2:  # Dynamo compiles once more for no row, and for one
            return fn(*args, **kwargs)
        dynamo: Any = import_module("torch._dynamo")
        for tensor in args:
            if isinstance(tensor, Tensor) and tensor.dim() > 1:
                dynamo.mark_static(tensor, list(range(1, tensor.dim())))  # loops over columns have a known length
        if not compiled:
            dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, MAX_KINDS)
            compiled.append(cast("Callable[P, R]", cast(Any, torch).compile(fn, dynamic=True, fullgraph=True)))
        try:
            return compiled[0](*args, **kwargs)
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:  # the base of all that Dynamo and Inductor raise
            if compiled[0] is fn:
                raise
            reason = str(error.__cause__ or error).strip().partition("\n")[0]
            _log.warning("%s runs uncompiled, which costs memory and time: %s", fn.__qualname__, reason)
            compiled[0] = fn
        return fn(*args, **kwargs)

    return run


MAX_KINDS = 32
"""Of arguments that a function is compiled for: with and without gradients, of frozen and of trained weights, ..."""
LEAST = -1e4
"""Log-probabilities below this are this: their exponential is 0 either way, and 0 times it is 0."""
CHUNK_LOGITS = {"cuda": 1 << 28, "cpu": 1 << 25}
"""Most logits of this rank alive at a time, by the kind of device: 512 MiB of bfloat16, 128 MiB of float32."""

KEPT_LOGITS = 5 << 29
"""Most logits of this rank that `keeps_logits` keeps from the forward to the backward pass: 5 GiB of bfloat16."""


Temperature = float | Tensor
"""One for all rows, or float32 [M]: one for each. The one number costs no tensor."""


class TokenScores(NamedTuple):
    """What the policy says of M chosen tokens. A tuple, so that gradient hooks of DDP and FSDP see its tensors."""

    logprobs_M: Tensor
    """float32 [M], nats"""
    entropy_M: Tensor
    """float32 [M], nats: entropy of the whole distribution the token was drawn from; detached unless asked for."""
    mtp_loss: Tensor | None = None
    """float32, 0-dim: sum of the cross entropies of the layer that predicts the token after the next."""


class VocabSlice(NamedTuple):
    """Which rows of the head this rank holds."""

    start: int
    num_rows: int
    """Rows that are real tokens; rows behind them only pad the table."""
    group: dist.ProcessGroup | None
    """Ranks that hold the other slices; None: this one is all."""


def score_rows(
    hidden_Mh: Tensor,
    head_Vh: Tensor,
    targets_M: Tensor,
    vocab: VocabSlice,
    temperature: Temperature,
    *,
    needs_entropy_grad: bool = False,
    keeps_logits: bool = False,
) -> Tensor:
    """Log-prob and entropy of `targets_M` (int64 [M]) under softmax(hidden_Mh @ head_Vh.T / temperature). float32 [M,
    2], in nats, equal on all ranks of the group. The gradient of `hidden_Mh` is this slice's part: add it up over the
    group. Entropy passes no gradient on unless asked to. `keeps_logits`: up to KEPT_LOGITS stay until the backward
    pass, which is a quarter faster then."""
    keeps = keeps_logits and torch.is_grad_enabled() and hidden_Mh.shape[0] * vocab.num_rows <= KEPT_LOGITS
    options = (vocab, temperature, needs_entropy_grad, keeps)
    scores = cast(Tensor, cast(Any, _ScoreRows).apply(hidden_Mh, head_Vh, targets_M, *options))
    if needs_entropy_grad:
        return scores
    return torch.stack([scores[:, 0], scores[:, 1].detach()], dim=1)


def score_tokens(
    hidden_Mh: Tensor,
    head_Vh: Tensor,
    targets_M: Tensor,
    temperature: Temperature,
    *,
    kept_MK: Tensor | None = None,
    needs_entropy_grad: bool = False,
    keeps_logits: bool = False,
) -> TokenScores:
    """The same with the whole vocabulary on this rank. `kept_MK` (int64, filled up with -1): log-probs are those of a
    softmax over these tokens, over all in a row of -1; entropies are of all tokens."""
    vocab = VocabSlice(0, head_Vh.shape[0], None)
    scores_M2 = score_rows(
        hidden_Mh,
        head_Vh,
        targets_M,
        vocab,
        temperature,
        needs_entropy_grad=needs_entropy_grad,
        keeps_logits=keeps_logits,
    )
    logprobs_M, entropy_M = scores_M2.unbind(dim=1)
    if kept_MK is None:
        return TokenScores(logprobs_M, entropy_M)
    parts = [
        recomputed(_kept_chunk, hidden_Mh[rows], head_Vh, targets_M[rows], kept_MK[rows], _in_rows(temperature, rows))
        for rows in _chunks(hidden_Mh.shape[0], head_Vh.shape[0], head_Vh.device)
    ]
    return TokenScores(torch.cat(parts) if parts else logprobs_M, entropy_M)


def _kept_chunk(
    hidden_Ch: Tensor, head_Vh: Tensor, targets_C: Tensor, kept_CK: Tensor, divisor: Temperature | None
) -> Tensor:
    return kept_logprobs(_divided((hidden_Ch @ head_Vh.t()).float(), divisor), targets_C, kept_CK)


def kept_logprobs(z_CV: Tensor, targets_C: Tensor, kept_CK: Tensor) -> Tensor:
    """Log-probs of a softmax of the logits over the tokens kept in each row."""
    z_CK = z_CV.gather(1, kept_CK.clamp(min=0)).masked_fill(kept_CK < 0, -torch.inf)
    is_cut_C = (kept_CK >= 0).any(dim=1)
    z_CK = torch.where(is_cut_C[:, None], z_CK, 0.0)  # no NaN in what is not chosen
    log_z_C = torch.where(is_cut_C, z_CK.logsumexp(dim=1), z_CV.logsumexp(dim=1))
    return z_CV.gather(1, targets_C[:, None]).squeeze(1) - log_z_C


class _ScoreRows(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_Mh: Tensor,
        head_Vh: Tensor,
        targets_M: Tensor,
        vocab: VocabSlice,
        temperature: Temperature,
        needs_entropy_grad: bool,
        keeps: bool,
    ) -> Tensor:
        head = head_Vh[: vocab.num_rows]
        own_M = targets_M - vocab.start
        kept_MV = hidden_Mh.new_empty(hidden_Mh.shape[0], head.shape[0]) if keeps else None
        parts: list[Tensor] = []
        for rows in _chunks(hidden_Mh.shape[0], head.shape[0], head.device):  # as without keeping: to the same bits
            logits_CV = torch.mm(hidden_Mh[rows], head.t(), out=None if kept_MV is None else kept_MV[rows])
            parts.append(_row_facts(logits_CV, own_M[rows], _in_rows(temperature, rows)))
        facts_M4 = torch.cat(parts) if parts else hidden_Mh.new_zeros(0, 4, dtype=torch.float32)
        log_z_M, scores_M2 = _join(_gathered(facts_M4, vocab.group))
        ctx.save_for_backward(hidden_Mh, head_Vh, own_M, log_z_M, scores_M2)
        ctx.rest = (vocab.num_rows, temperature, needs_entropy_grad)
        ctx.kept = kept_MV
        return scores_M2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None, None, None, None]:
        hidden_Mh, head_Vh, own_M, log_z_M, scores_M2 = ctx.saved_tensors
        num_rows, temperature, needs_entropy_grad = ctx.rest
        (grad_M2,) = grads
        kept_MV, ctx.kept = ctx.kept, None  # it becomes its gradient: a second pass makes the logits again
        head = head_Vh[:num_rows]
        grad_hidden_Mh = torch.empty_like(hidden_Mh)
        chunks = list(_chunks(hidden_Mh.shape[0], num_rows, head.device))
        products = chunks if kept_MV is None else [slice(0, len(hidden_Mh))]
        # sums of several chunks are kept in float32, whatever the type of the weights
        sum_type = torch.float32 if len(products) > 1 else head_Vh.dtype
        grad_head_Vh = torch.zeros_like(head_Vh, dtype=sum_type) if ctx.needs_input_grad[1] else None

        def turn(logits_CV: Tensor, rows: slice) -> None:
            entropy_C = scores_M2[rows, 1] if needs_entropy_grad else None
            divisor = _in_rows(temperature, rows)
            _turn_to_gradient(logits_CV, own_M[rows], log_z_M[rows], entropy_C, grad_M2[rows], divisor)

        if kept_MV is not None:
            for rows in chunks:
                turn(kept_MV[rows], rows)
        for rows in products:
            grad_logits = kept_MV
            if grad_logits is None:
                grad_logits = hidden_Mh[rows] @ head.t()
                turn(grad_logits, rows)
            torch.mm(grad_logits, head, out=grad_hidden_Mh[rows])
            if grad_head_Vh is not None:
                grad_head_Vh[:num_rows].add_(grad_logits.t() @ hidden_Mh[rows])
        grad_head = None if grad_head_Vh is None else grad_head_Vh.to(head_Vh.dtype)
        return grad_hidden_Mh, grad_head, None, None, None, None, None


def _chunks(num_rows: int, vocab_size: int, device: torch.device) -> Iterator[slice]:
    chunk_rows = max(1, CHUNK_LOGITS[device.type] // max(1, vocab_size))
    for start in range(0, num_rows, chunk_rows):
        yield slice(start, min(num_rows, start + chunk_rows))


def _in_rows(temperature: Temperature, rows: slice) -> Temperature | None:
    """What the logits of these rows are divided by: the one number, or float32 [C, 1]; None: nothing, for a division
    by 1 would take as long as all else."""
    if isinstance(temperature, Tensor):
        return temperature[rows].unsqueeze(1)
    return None if temperature == 1.0 else temperature


def _divided(z_CV: Tensor, divisor: Temperature | None) -> Tensor:
    return z_CV if divisor is None else z_CV / divisor


def _row_facts(logits_CV: Tensor, own_C: Tensor, divisor: Temperature | None) -> Tensor:
    """float32 [C, 4] of this slice: maximum m, sum of exp(z - m), sum of (z - m) exp(z - m), target's logit (or 0). A
    slice without rows has m = -inf and sums of 0."""
    if logits_CV.shape[1]:
        return _measured(logits_CV, own_C, divisor)
    empty = logits_CV.new_zeros(logits_CV.shape[0], 4, dtype=torch.float32)
    empty[:, 0] = float("-inf")
    return empty


@fused
def _measured(logits_CV: Tensor, own_C: Tensor, divisor: Temperature | None) -> Tensor:
    z_CV = _divided(logits_CV.float(), divisor)
    size = logits_CV.shape[1]
    target_C = z_CV.gather(1, own_C.clamp(0, size - 1).unsqueeze(1)).squeeze(1)
    target_C = torch.where((own_C >= 0) & (own_C < size), target_C, 0.0)
    top_C = z_CV.amax(dim=1)
    below_CV = (z_CV - top_C.unsqueeze(1)).clamp(min=LEAST)  # p log p of a logit of -inf is 0, not NaN
    weights_CV = below_CV.exp()
    return torch.stack([top_C, weights_CV.sum(dim=1), (weights_CV * below_CV).sum(dim=1), target_C], dim=1)


def _gathered(facts_M4: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """[slices, M, 4]"""
    if group is None or group.size() == 1:
        return facts_M4.unsqueeze(0)
    parts = [torch.empty_like(facts_M4) for _ in range(group.size())]
    dist.all_gather(parts, facts_M4, group=group)  # pyright: ignore[reportUnknownMemberType]  # torch says nothing
    return torch.stack(parts)


def _join(facts_sM4: Tensor) -> tuple[Tensor, Tensor]:
    """(log Z [M], scores [M, 2]) from the slices' facts."""
    top_sM, sum_sM, moment_sM, target_sM = facts_sM4.unbind(dim=2)
    top_M = top_sM.amax(dim=0)
    shift_sM = torch.where(torch.isneginf(top_sM), 0.0, top_sM - top_M)
    scale_sM = torch.where(torch.isneginf(top_sM), 0.0, shift_sM.exp())
    sum_M = (scale_sM * sum_sM).sum(dim=0)
    moment_M = (scale_sM * (moment_sM + shift_sM * sum_sM)).sum(dim=0)
    log_sum_M = sum_M.log()
    log_z_M = top_M + log_sum_M
    return log_z_M, torch.stack([target_sM.sum(dim=0) - log_z_M, log_sum_M - moment_M / sum_M], dim=1)


@fused
def _turn_to_gradient(
    logits_CV: Tensor,
    own_C: Tensor,
    log_z_C: Tensor,
    entropy_C: Tensor | None,
    grad_C2: Tensor,
    divisor: Temperature | None,
) -> None:
    """In place of the logits: the gradient of what `grad_C2` weighs, log-probs (column 0) and entropies (column 1)."""
    log_p_CV = (_divided(logits_CV.float(), divisor) - log_z_C.unsqueeze(1)).clamp(min=LEAST)
    factor_CV = grad_C2[:, :1]
    if entropy_C is not None:
        factor_CV = factor_CV + grad_C2[:, 1:] * (log_p_CV + entropy_C.unsqueeze(1))
    columns_V = torch.arange(logits_CV.shape[1], device=logits_CV.device)
    own_CV = torch.where(columns_V == own_C.unsqueeze(1), grad_C2[:, :1], 0.0)
    logits_CV.copy_(_divided(own_CV - log_p_CV.exp() * factor_CV, divisor))
