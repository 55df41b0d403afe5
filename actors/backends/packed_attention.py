"""Causal self-attention of sequences that lie behind one another without padding, whatever their lengths.

On CUDA in half precision it runs the flash attention built into torch (`torch.nn.attention.varlen`), elsewhere one
`scaled_dot_product_attention` (SDPA) per sequence: exact, and nothing is spent on padding.

cuDNN's attention, which SDPA prefers on Hopper, is about 1.7 x faster, but it builds a plan for every new shape: 0.06 s
forward and 0.08 s backward (H200, torch 2.11). Batches of reinforcement learning bring new shapes in every step. So
`avoid_plans` switches it off, and `with_plans` is for rectangles that `may_have_plan`.
"""

from __future__ import annotations

import inspect
import logging
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
OLDEST_GPU = 8
"""Compute capability (Ampere) from which on flash attention runs."""
MAX_PLANS = 16
"""Shapes that get a plan in the life of a process: 2.3 s of building at most."""
_ALL = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

_planned: set[tuple[int, int]] = set()
_log = logging.getLogger("myxa.backends")


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
    """Torch's flash attention over packed rows, whatever its version. Several query heads may share a key head in all
    of them, whether there is an option for it or not."""

    def __init__(self) -> None:
        """Imports seconds of Dynamo and sympy. Raises ImportError where torch has none (before 2.10)."""
        self._call: Callable[..., Tensor] = import_module("torch.nn.attention.varlen").varlen_attn
        parameters = inspect.signature(self._call).parameters
        self._takes_scale = "scale" in parameters
        is_windowed = "window_size" in parameters
        self._options: dict[str, Any] = {"window_size": (-1, 0)} if is_windowed else {"is_causal": True}
        if "enable_gqa" in parameters:
            self._options["enable_gqa"] = True

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, queries: PackedRows, keys: PackedRows, scale: float) -> Tensor:
        """See `attend`."""
        options = self._options
        if self._takes_scale:
            options = {**options, "scale": scale}
        else:
            q = q * (scale * q.shape[-1] ** 0.5)
        width = v.shape[-1]
        v = pad(v, (0, q.shape[-1] - width)) if width < q.shape[-1] else v  # one width for all; by 0 it copies
        inputs = (x.contiguous() for x in (q, k, v))
        longest = max(queries.lengths), max(keys.lengths)
        return self._call(*inputs, queries.bounds, keys.bounds, *longest, **options)[..., :width]


@cache
def _flash_of(device: torch.device) -> _FlashKernel | None:
    major, minor = torch.cuda.get_device_capability(device)
    if major < OLDEST_GPU:
        reason = f"a GPU of compute capability {major}.{minor} runs no flash attention, which needs {OLDEST_GPU}.0"
    else:
        try:
            return _FlashKernel()
        except (ImportError, AttributeError):
            reason = f"torch {torch.__version__} has no flash attention for packed rows, which came with 2.10"
    _log.warning("rows of unequal lengths are padded, or attended to one by one, which costs time: %s", reason)
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


def may_have_plan(num_rows: int, row_len: int) -> bool:
    """Whether a rectangle of this shape has a plan, or gets one now. The first MAX_PLANS shapes do."""
    shape = (num_rows, row_len)
    if len(_planned) < MAX_PLANS:
        _planned.add(shape)
    return shape in _planned


def with_plans() -> AbstractContextManager[None]:
    """Inside it, SDPA may build plans for shapes."""
    return cast("AbstractContextManager[None]", sdpa_kernel(_ALL))
