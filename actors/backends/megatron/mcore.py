"""The one import of megatron-core for the model side: its modules by name, its process groups as one typed record.

megatron-core ships no usable types, so everything that comes through here is `Any` on purpose; callers give it types
again. The places where versions 0.16 to 0.19 differ or fail without Transformer Engine are handled here too.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from ....core.errors import TrainError

Group = dist.ProcessGroup


def module(name: str) -> Any:
    """The module `megatron.core.<name>`. Raises TrainError if megatron-core is not installed."""
    try:
        return import_module(f"megatron.core.{name}")
    except ModuleNotFoundError as err:
        if err.name is None or not err.name.startswith("megatron"):
            raise
        raise TrainError(
            f"the Megatron trainer needs megatron-core ({err})",
            remedy="pip install 'myxa[megatron]', or set roles.trainer.kind = \"torch\"",
        ) from err


REFUSALS = (ValueError, AssertionError, TypeError, ImportError)
"""megatron-core checks its settings by these, some only while it builds."""
REFUSED = "megatron-core refuses the configuration"

parallel_state = module("parallel_state")
moe_utils = module("transformer.moe.moe_utils")
if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None  # 0.16 defines it only beside Transformer Engine, and every router reads it

latent_attention = module("transformer.multi_latent_attention")
# 0.16 takes its own empty classes for Transformer Engine's.
latent_attention.HAVE_TE = module("extensions.transformer_engine").HAVE_TE


def submodules_of(spec: Any) -> Any:
    """The submodules of a layer part: a ModuleSpec until 0.17, a functools.partial since 0.18."""
    return spec.submodules if hasattr(spec, "submodules") else spec.keywords["submodules"]


def default_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """This rank's place in the dense grid (tp, cp, dp, pp) and in the experts' one (etp, ep, pp), with its groups."""

    tp: Group
    pp: Group
    cp: Group
    dp: Group
    ep: Group
    etp: Group

    @property
    def is_scoring(self) -> bool:
        return self.pp.rank() == self.pp.size() - 1

    @property
    def is_teller(self) -> bool:
        return self.is_scoring and self.tp.rank() == self.cp.rank() == 0

    @property
    def is_sender(self) -> bool:
        """Whether this rank speaks for its pipeline stage: first of its tensor, context and data groups."""
        return self.tp.rank() == self.cp.rank() == self.dp.rank() == 0


def read_grid() -> Grid:
    """The grid of megatron-core's parallel state. Raises TrainError before it is initialised."""
    if not parallel_state.model_parallel_is_initialized():
        raise TrainError("megatron-core's parallel state is not initialised", remedy="a bug: join the world first")
    return Grid(
        tp=parallel_state.get_tensor_model_parallel_group(),
        pp=parallel_state.get_pipeline_model_parallel_group(),
        cp=parallel_state.get_context_parallel_group(),
        dp=parallel_state.get_data_parallel_group(),
        ep=parallel_state.get_expert_model_parallel_group(),
        etp=parallel_state.get_expert_tensor_parallel_group(),
    )
