"""The `[megatron]` table: how Megatron-core cuts and runs the model, and its own options by their own names.

Knows names and ranges. Must not import megatron-core: the names in the three verbatim tables are checked against the
installed version where it is needed, before anything is built.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from .conflict import Conflict
from .section import PositiveInt, Section, UnitFloat
from .tables import Table


class MegatronSettings(Section, frozen=True):
    """Megatron-core, for `roles.trainer.kind = "megatron"`."""

    tp: PositiveInt = 1
    """Tensor parallelism: ranks that share every matrix."""
    pp: PositiveInt = 1
    """Pipeline parallelism: stages of consecutive layers."""
    vpp: PositiveInt = 1
    """Virtual stages on each pipeline rank (interleaved schedule); 1 = off."""
    cp: PositiveInt = 1
    """Context parallelism: ranks that share every sequence."""
    ep: PositiveInt = 1
    """Expert parallelism: ranks that share the experts of every layer."""
    etp: PositiveInt = 1
    """Tensor parallelism inside each expert."""
    sequence_parallel: bool = False
    """Whether activations between the matrices are split over the tensor-parallel ranks."""
    distributed_optimizer: bool = True
    """Whether optimizer state is split over data-parallel ranks."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What is computed again in the backward pass instead of kept: nothing, Megatron's selection, or whole layers."""
    offload_optimizer: UnitFloat = 0.0
    """Share of the optimizer that lives and runs on the CPU; needs trainer.dtype = "bfloat16", and does
    not go with checkpoints yet."""
    routing_replay: bool = False
    """Whether experts are chosen as they were in the scoring pass of the same step (mixtures of experts)."""
    transformer_engine: Literal["auto", "on", "off"] = "auto"
    """Whether layers are built with Transformer Engine; auto = if it is installed and helps."""
    model: Table = {}
    """Further fields of megatron-core's TransformerConfig by their own names."""
    ddp: Table = {}
    """Fields of megatron-core's DistributedDataParallelConfig by their own names."""
    optimizer: Table = {}
    """Fields of megatron-core's OptimizerConfig by their own names."""

    def conflicts(self) -> Iterator[Conflict]:
        """Options that only make sense beside others."""
        if self.sequence_parallel and self.tp == 1:
            yield Conflict(("sequence_parallel", "tp"), "needs tp > 1: it splits over tensor-parallel ranks")
        if self.vpp > 1 and self.pp == 1:
            yield Conflict(("vpp", "pp"), "needs pp > 1: virtual stages are stages of a pipeline")
