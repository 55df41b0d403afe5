"""Small pure functions of tensors as one GPU kernel: compiled there, run as they are on the CPU.

What reads a large tensor several times costs its memory traffic several times; compiled, it is read once. Compiling
takes seconds and happens in the first step. Without a C compiler or Triton the function runs as it is and says so.

Library considered: `torch.compile` around the whole model. Megatron's modules and hooks break its graphs, and a step's
shapes change from micro-batch to micro-batch. Hand-written Triton kernels would be no faster here and longer.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

_log = logging.getLogger("myxa.backends")


def fused(fn: Callable[P, R]) -> Callable[P, R]:
    """`fn` compiled for tensors on a GPU. It is pure, its first argument is a tensor; sizes may change call by call.

    What cannot be compiled, now or for a later kind of arguments, runs as it is from then on; a true error comes from
    that too.
    """
    chosen: list[Callable[P, R]] = []

    @functools.wraps(fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not cast(Tensor, args[0]).is_cuda:
            return fn(*args, **kwargs)
        if not chosen:
            chosen.append(cast("Callable[P, R]", cast(Any, torch).compile(fn, dynamic=True, fullgraph=True)))
        try:
            return chosen[0](*args, **kwargs)
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:  # the base of all that Dynamo and Inductor raise
            if chosen[0] is fn:
                raise
            reason = str(error).strip().partition("\n")[0]
            _log.warning("%s runs uncompiled, which costs memory and time: %s", fn.__qualname__, reason)
            chosen[0] = fn
        return fn(*args, **kwargs)

    return run
