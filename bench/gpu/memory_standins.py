"""A trainer and an engine that hold as much memory as real ones, and compute on all of it, without being either.

The shape is that of 8.2 thousand million parameters with the optimizer shared by four ranks, seen from one GPU: bf16
parameters (2 bytes a parameter), float32 gradients (4), and a quarter of master weights and two moments (12 / 4).
The forward and backward pass is three matrix products and a float32 accumulation per matrix of the parameters; the
update is torch's fused AdamW on the own quarter, followed by the rebuilding of the parameters from the masters. The
three quarters that other ranks would send are copied from the own one: on four GPUs the gather takes their place.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from memory_device import bytes_at, hashes

from myxa.core.device_memory import OPTIMIZER_PARTS

Allocate = Callable[[str, int], int]
"""(tag, bytes) -> address."""
WORKED_EXAMPLE = 8_200_000_000
RANKS = 4
PIECE_BYTES = 8 << 30
"""Of the cache: an engine has one a layer, not one in all."""


@dataclass(frozen=True)
class Shape:
    """Sizes of both sides. `matrix`: rows and columns of one parameter matrix."""

    num_matrices: int
    matrix: int
    tokens: int
    """Of a micro-batch."""

    @classmethod
    def scaled(cls, scale: float, matrix: int = 8192, tokens: int = 4096) -> Shape:
        """The worked example times `scale`, in whole matrices that four ranks can share."""
        num = max(round(scale * WORKED_EXAMPLE / matrix**2 / RANKS), 1) * RANKS
        return cls(num_matrices=num, matrix=matrix, tokens=tokens)

    @property
    def num_params(self) -> int:
        return self.num_matrices * self.matrix**2

    @property
    def shard(self) -> int:
        """Parameters of this rank."""
        return self.num_params // RANKS

    def bytes_of(self, tag: str) -> int:
        whole = {"params": 2, "weights": 2, "grads": 4}
        if tag == "workspace":
            return 2 * self.matrix * (3 * self.tokens + self.matrix)
        if tag in OPTIMIZER_PARTS:  # two moments of a part of the shard
            return 8 * self.shard // len(OPTIMIZER_PARTS)
        return 4 * self.shard if tag == "masters" else whole[tag] * self.num_params


@dataclass
class Step:
    """What a training step took, seconds; times are of the monotonic clock, which all processes of a host share."""

    first_kernel_at: float = 0.0
    end_at: float = 0.0
    rebuild_s: float = 0.0
    """Parameters from masters, before the first micro-batch."""
    compute_s: float = 0.0
    """Forward and backward."""
    waited_s: float = 0.0
    """For the optimizer's bytes, after the backward pass."""
    update_s: float = 0.0


def finish(device: str) -> None:
    """Until what this thread began is done; copies beside it on other streams may go on."""
    if device == "cuda":
        torch.cuda.current_stream().synchronize()


def tensor(address: int, num: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """1-dim; whole words of eight bytes."""
    return bytes_at(address, num * dtype.itemsize, device).view(dtype)


class TrainerStandIn:
    """Parameters, gradients and a quarter of an optimizer in memory of somebody's making."""

    def __init__(self, shape: Shape, device: str, allocate: Allocate) -> None:
        self.shape, self.device = shape, device
        side = shape.matrix
        place = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
        at = {
            "params": allocate("params", shape.bytes_of("params")),
            "grads": allocate("grads", shape.bytes_of("grads")),
            "masters": allocate("masters", shape.bytes_of("masters")),
            "workspace": allocate("workspace", shape.bytes_of("workspace")),
        }
        self._moments = [(allocate(part, shape.bytes_of(part)), shape.bytes_of(part)) for part in OPTIMIZER_PARTS]
        self.params = tensor(at["params"], shape.num_params, torch.bfloat16, device).view(-1, side, side)
        self.grads = tensor(at["grads"], shape.num_params, torch.float32, device).view(-1, side, side)
        self.masters = tensor(at["masters"], shape.shard, torch.float32, device)
        self._masters_at = at["masters"]
        self.masters.normal_(std=side**-0.5)
        space = tensor(at["workspace"], shape.bytes_of("workspace") // 2, torch.bfloat16, device)
        rows = space.view(-1, side).split([shape.tokens, shape.tokens, shape.tokens, side])
        self._x, self._y, self._dx, self._product = rows
        pieces = self.masters.chunk(len(OPTIMIZER_PARTS))
        self._weights = [torch.nn.Parameter(piece, requires_grad=False) for piece in pieces]
        self._optimizer = torch.optim.AdamW(self._weights, lr=1e-5, fused=True)
        for weight, (address, num_bytes) in zip(self._weights, self._moments, strict=True):
            moments = tensor(address, num_bytes // 4, torch.float32, device).zero_()
            state: dict[str, Any] = self._optimizer.state[weight]
            state["step"] = torch.zeros((), dtype=torch.float32, device=place)
            state["exp_avg"], state["exp_avg_sq"] = moments.chunk(2)
        self.num_steps = 0

    def rebuild(self) -> None:
        """Parameters from the masters: the own quarter by rounding, the others as if they had come from other ranks."""
        flat = self.params.view(RANKS, -1)
        flat[0].copy_(self.masters)
        for rank in range(1, RANKS):
            flat[rank].copy_(flat[0])

    def forward_backward(self, num: int) -> None:
        """Begin `num` micro-batches; gradients add up in float32."""
        x, y, dx, product = self._x, self._y, self._dx, self._product
        x.normal_()
        for _ in range(num):
            for weight in self.params:
                torch.mm(x, weight, out=y)
            for weight, grad in zip(self.params, self.grads, strict=True):
                torch.mm(y, weight.t(), out=dx)
                torch.mm(x.t(), y, out=product)
                grad.add_(product)

    def drain(self) -> None:
        """Nothing runs."""
        finish(self.device)

    def update(self) -> None:
        """AdamW on the own quarter, then the next parameters, then no gradients."""
        own = self.grads.view(RANKS, -1)[0]
        for weight, grad in zip(self._weights, own.chunk(len(self._weights)), strict=True):
            weight.grad = grad
        self._optimizer.step()
        for weight in self._weights:
            weight.grad = None
        self.num_steps += 1
        self.rebuild()

    def step(self, num: int, arrive: Callable[[], None]) -> Step:
        """One step. `arrive`: until all moments are there."""
        done = Step()
        marks = [time.monotonic()]
        self.rebuild()
        finish(self.device)
        marks.append(time.monotonic())
        done.first_kernel_at = marks[-1]
        self.forward_backward(num)
        finish(self.device)
        marks.append(time.monotonic())
        arrive()
        marks.append(time.monotonic())
        self.update()
        finish(self.device)
        marks.append(time.monotonic())
        done.rebuild_s, done.compute_s, done.waited_s, done.update_s = (
            after - first for first, after in pairwise(marks)
        )
        done.end_at = marks[-1]
        return done

    def digest(self) -> list[int]:
        """Hashes of the optimizer's quarter, which is all that must survive."""
        places = [(self._masters_at, self.shape.bytes_of("masters")), *self._moments]
        return [each for address, num_bytes in places for each in hashes(bytes_at(address, num_bytes, self.device))]


class EngineStandIn:
    """Weights and a cache of keys and values; generating is products with the weights, written into the cache."""

    def __init__(self, shape: Shape, device: str, kv_bytes: int, allocate: Allocate) -> None:
        self.shape, self.device = shape, device
        side, self.kv_bytes = shape.matrix, kv_bytes // 4096 * 4096
        place = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
        self._weights = tensor(allocate("weights", shape.bytes_of("weights")), shape.num_params, torch.bfloat16, device)
        self.weights = self._weights.view(-1, side, side)
        pieces = [min(PIECE_BYTES, self.kv_bytes - at) for at in range(0, self.kv_bytes, PIECE_BYTES)]
        self.cache = [bytes_at(allocate("kv_cache", num), num, device) for num in pieces]
        self._x, self._y = (torch.zeros(64, side, dtype=torch.bfloat16, device=place) for _ in range(2))

    def load(self, version: int) -> None:
        """As if new weights had been copied in on the GPU."""
        self._weights.fill_(0.001 * (version % 7))

    def generate(self, seconds: float) -> tuple[float, float, int]:
        """(when the first product was done, when all was, passes over the weights). Every byte of the cache is
        written once."""
        torch.mm(self._x, self.weights[0], out=self._y)
        finish(self.device)
        first_at = time.monotonic()
        for piece in self.cache:
            piece.fill_(1)
        passes = 0
        while not passes or time.monotonic() - first_at < seconds:
            for weight in self.weights:
                torch.mm(self._x, weight, out=self._y)
            finish(self.device)
            passes += 1
        return first_at, time.monotonic(), passes
