"""Causal self-attention of sequences that lie behind one another without padding, whatever their lengths.

On CUDA in half precision it runs the flash attention built into torch (`torch.nn.attention.varlen`), elsewhere one
`scaled_dot_product_attention` (SDPA) per sequence: exact, and nothing is spent on padding.

cuDNN's attention, which SDPA prefers on Hopper, is about 1.7 x faster, but it builds a plan for every new shape: 0.06 s
forward and 0.08 s backward (H200, torch 2.13). Batches of reinforcement learning bring new shapes in every step. So
`avoid_plans` switches it off, and `shapes_come_again` is for calls of which few shapes exist.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from .torch_backend.tensors import pieces

LARGEST_HEAD = 256
"""Channels of a head that flash attention takes; they must be a multiple of 8."""
_ALL = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Where sequences lie in a packed tensor."""

    lengths: tuple[int, ...]
    bounds: Tensor
    """int32 [sequences + 1]: 0 and the end of each, on the tensor's device."""

    @staticmethod
    def of(lengths: Sequence[int], device: torch.device | str) -> PackedRows:
        ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return PackedRows(tuple(lengths), ends.to(device))


class _FlashKernel:
    """Torch's flash attention over packed rows, whatever its version. Raises ImportError where torch has none (before
    2.10). Made once a GPU is there: seconds of Dynamo and sympy are imported."""

    def __init__(self, device: torch.device) -> None:
        self._call: Callable[..., Tensor] = import_module("torch.nn.attention.varlen").varlen_attn
        known = inspect.signature(self._call).parameters
        self._takes_scale = "scale" in known
        self._options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
        if "enable_gqa" in known:
            self._options["enable_gqa"] = True
        self._shares_key_heads = "enable_gqa" in known or self._tries_to_share(device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, queries: PackedRows, keys: PackedRows, scale: float) -> Tensor:
        """See `attend`."""
        repeats = q.shape[1] // k.shape[1]
        if repeats > 1 and not self._shares_key_heads:
            k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        options = self._options
        if self._takes_scale:
            options = {**options, "scale": scale}
        else:
            q = q * (scale * q.shape[-1] ** 0.5)
        width = v.shape[-1]
        v = pad(v, (0, q.shape[-1] - width)) if width < q.shape[-1] else v  # one width for all; by 0 it copies
        whole = (x.contiguous() for x in (q, k, v))
        longest = max(queries.lengths), max(keys.lengths)
        return self._call(*whole, queries.bounds, keys.bounds, *longest, **options)[..., :width]

    def _tries_to_share(self, device: torch.device) -> bool:
        """Whether several query heads may share a key head, as in flash attention itself; else keys are repeated, which
        costs their memory once more per layer. Older torch does not say."""
        with torch.enable_grad():
            waves = torch.arange(16 * 2 * 64, device=device).sin().reshape(16, 2, 64).to(torch.bfloat16)
            try:
                results = [self._probe(waves, repeats) for repeats in (1, 2)]
            except (RuntimeError, ValueError):
                return False
        return all(torch.allclose(a.float(), b.float(), atol=2e-2) for a, b in zip(*results, strict=True))

    def _probe(self, waves: Tensor, repeats: int) -> tuple[Tensor, Tensor]:
        """Output and key gradient of two query heads on one key head, shared or repeated."""
        query, key = waves.flip(0), waves[:, :1].clone().requires_grad_()
        both, bounds = key.repeat_interleave(repeats, dim=1), PackedRows.of([5, 11], waves.device).bounds
        out = self._call(query, both, both, bounds, bounds, 11, 11, **self._options)
        (grad,) = torch.autograd.grad(out.float().square().sum(), key)
        return out, grad


@cache
def _flash_of(device: torch.device) -> _FlashKernel | None:
    try:
        return _FlashKernel(device)
    except (ImportError, AttributeError):
        return None


def flash_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> _FlashKernel | None:
    """What runs packed rows without padding here, if anything does."""
    is_half, fits = dtype in (torch.float16, torch.bfloat16), head_dim <= LARGEST_HEAD and head_dim % 8 == 0
    return _flash_of(device) if device.type == "cuda" and is_half and fits else None


def attend(q: Tensor, k: Tensor, v: Tensor, queries: PackedRows, keys: PackedRows, scale: float) -> Tensor:
    """Queries [T, heads, d], keys [S, groups, d], values [S, groups, e] -> [T, heads, e].

    Row i of the queries sees row i of the keys, causally, both ending at the same token. Products of queries and keys
    are multiplied by `scale`.
    """
    if (flash := flash_kernel(q.device, q.dtype, q.shape[-1])) is not None:
        return flash(q, k, v, queries, keys, scale)
    outs: list[Tensor] = []
    cuts = (list(queries.lengths), list(keys.lengths), list(keys.lengths))
    for row in zip(*(pieces(x, cut) for x, cut in zip((q, k, v), cuts, strict=True)), strict=True):
        one_q, one_k, one_v = (x.transpose(0, 1).unsqueeze(0) for x in row)  # [1, heads, tokens, d]
        num_q, num_k = one_q.shape[2], one_k.shape[2]
        mask: Tensor | None = None
        if num_q != num_k:
            mask = torch.ones(num_q, num_k, dtype=torch.bool, device=q.device).tril(num_k - num_q)
        out = scaled_dot_product_attention(
            one_q, one_k, one_v, attn_mask=mask, is_causal=mask is None, scale=scale,
            enable_gqa=one_k.shape[1] != one_q.shape[1],
        )  # fmt: skip
        outs.append(out.squeeze(0).transpose(0, 1))
    return torch.cat(outs)


def avoid_plans() -> None:
    """From now on SDPA of this process builds no plans for shapes."""
    torch.backends.cuda.enable_cudnn_sdp(False)


def shapes_come_again() -> AbstractContextManager[None]:
    """Inside it, SDPA may build plans for shapes: few of them must come."""
    return cast("AbstractContextManager[None]", sdpa_kernel(_ALL))
