"""Megatron's data parallelism and optimizers behind one small interface: forget, measure, update.

    DistributedDataParallel   gradients in contiguous float32 buffers, reduced as the backward pass goes if asked to
    distributed optimizer     float32 masters and moments split over data-parallel ranks
    HybridDeviceOptimizer     a share of them is held and updated on the CPU

The schedule is ours (`learning_rate` of finished updates), so resuming needs the count alone; decay multipliers (0 for
vectors) are Megatron's, applied here because its own scheduler, which is not used, would apply them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from ....core.config import OptimizerConfig
from ....core.config.learning import MegatronSettings
from ....core.errors import ConfigError, raised_as
from . import mcore


def _one_norm(_: int, __: Any, lists: Sequence[Sequence[Tensor]], ___: bool) -> tuple[Tensor, None]:
    """float32 [1]: the 2-norm of all numbers of the tensors."""
    norms = cast("tuple[Tensor, ...]", cast(Any, torch)._foreach_norm(list(lists[0])))
    return cast(Tensor, cast(Any, torch).linalg.vector_norm(torch.stack(norms))).reshape(1), None


def _scale_all(_: int, __: Any, lists: Sequence[Sequence[Tensor]], factor: float) -> None:
    """Into the second tensors: the first ones, which are the same ones here, times the factor."""
    for target, source in zip(lists[1], lists[0], strict=True):
        assert target.data_ptr() == source.data_ptr()
    cast(Any, torch)._foreach_mul_(list(lists[1]), factor)


def _one_kernel_for_all() -> None:
    """Without Transformer Engine and apex megatron-core reads the norm of every gradient back on its own, twice a step:
    a GPU waits for the host hundreds of times. Theirs stay where they are installed."""
    clipping, utils = mcore.module("optimizer.clip_grads"), mcore.module("utils")
    for name, plain, replacement in (
        ("l2_norm_impl", "local_multi_tensor_l2_norm", _one_norm),
        ("multi_tensor_scale_impl", "local_multi_tensor_scale", _scale_all),
    ):
        if getattr(clipping, name, None) is getattr(utils, plain, replacement):
            setattr(clipping, name, replacement)


def wrap_chunks(chunks: Sequence[nn.Module], settings: MegatronSettings) -> list[nn.Module]:
    """Data parallelism around every chunk; sets in the pipeline's configuration how gradients are synchronised."""
    config = mcore.module("utils").get_model_config(chunks[0])
    fields = {
        "grad_reduce_in_fp32": True,
        "check_for_nan_in_grad": False,  # all ranks agree on that before an update, and name the groups
        **settings.ddp,
        "use_distributed_optimizer": settings.distributed_optimizer,
    }
    ddp_config = mcore.module("distributed").DistributedDataParallelConfig(**fields)
    wrapped = [
        mcore.module("distributed").DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]

    def of_chunks(name: str) -> Any:
        functions = [getattr(chunk, name) for chunk in wrapped]
        return functions if len(functions) > 1 else functions[0]

    config.no_sync_func = of_chunks("no_sync")
    if ddp_config.overlap_grad_reduce:
        config.grad_sync_func = of_chunks("start_grad_sync")
    if ddp_config.overlap_param_gather:
        config.param_sync_func = of_chunks("start_param_sync")
    return wrapped


MUON = "install megatron-core 0.19 and emerging-optimizers 0.3 in the trainer's environment (Python 3.12)"


class MegatronOptimizer:
    """AdamW (the torch backend's formula and rules of decay), or Muon, on this rank's part of every parameter."""

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        config: OptimizerConfig,
        settings: MegatronSettings,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`dtype`: of the parameters."""
        _one_kernel_for_all()
        self.chunks = list(chunks)
        self.before_update: Callable[[], None] = _nothing
        self.after_update: Callable[[], None] = _nothing
        self.num_updates = 0
        self._overlaps_gather = bool(cast(Any, self.chunks[0]).ddp_config.overlap_param_gather)
        is_muon = config.name == "muon"
        fields = {
            "optimizer": "muon" if is_muon else "adam",
            "lr": config.lr,
            "weight_decay": config.weight_decay,
            "adam_beta1": config.betas[0],
            "adam_beta2": config.betas[1],
            "adam_eps": config.eps,
            "clip_grad": config.max_grad_norm,
            "use_distributed_optimizer": settings.distributed_optimizer,
            "overlap_param_gather": self._overlaps_gather,
            "bf16": dtype is torch.bfloat16,
            "params_dtype": dtype,
            **(_offload(settings, device) if settings.offload_optimizer else {}),
            **settings.optimizer,
        }
        what, causes, remedy = mcore.REFUSED, mcore.REFUSALS, "mend [megatron.optimizer]"
        if is_muon:  # where there is none, 0.16 raises Exception itself
            what, causes, remedy = 'optimizer.name = "muon"', (Exception,), MUON
        with raised_as(ConfigError, what, *causes, remedy=remedy):
            options = mcore.module("optimizer").OptimizerConfig(**fields)
            self.megatron = mcore.module("optimizer").get_megatron_optimizer(
                config=options, model_chunks=self.chunks, use_gloo_process_groups=False
            )
        self._device = device

    def make_moments(self) -> None:
        for inner in self.torch_optimizers():
            _prepare(inner, self._device)

    def torch_optimizers(self) -> Iterator[torch.optim.AdamW]:
        """The optimizers at the bottom that are torch's own AdamW (others keep their state as they like)."""
        for part in getattr(self.megatron, "chained_optimizers", [self.megatron]):
            if isinstance(part.optimizer, torch.optim.AdamW):
                yield part.optimizer

    def forget_gradients(self) -> None:
        for chunk in self.chunks:
            cast(Any, chunk).zero_grad_buffer()
        self.megatron.zero_grad()

    @torch.no_grad()
    def gradient_norm(self) -> float:
        """Global 2-norm of all gradients, equal on all ranks; NaN or infinite if any gradient is. Collective."""
        self.megatron.prepare_grads()
        return float(self.megatron.get_grad_norm())

    def update(self, lr: float, weight_decay: float, max_norm: float) -> None:
        """Scale gradients down to `max_norm` and update. Collective: parameters are gathered from their owners."""
        self.before_update()
        for part in getattr(self.megatron, "chained_optimizers", [self.megatron]):
            part.config.clip_grad = max_norm
        for group in self.megatron.param_groups:
            group["lr"] = lr
            group["weight_decay"] = weight_decay * group.get("wd_mult", 1.0)
        try:
            self.megatron.step()
        finally:
            self.after_update()  # also of a part of it
        self.num_updates += 1

    @torch.no_grad()
    def rebuild_parameters(self) -> None:
        """Fill the parameters from the float32 masters, as an update does at its end. Collective."""
        for part in getattr(self.megatron, "chained_optimizers", [self.megatron]):
            part._copy_main_params_to_model_params()
        for chunk in self.chunks:
            cast(Any, chunk).start_param_sync(force_sync=True)

    def settle(self) -> None:
        """Have all parameters in place, where they are otherwise gathered during the next forward pass. Collective."""
        if self._overlaps_gather:
            for chunk in self.chunks:
                cast(Any, chunk).start_param_sync(force_sync=True)


def _nothing() -> None: ...


def _offload(settings: MegatronSettings, device: torch.device) -> dict[str, Any]:
    is_cuda = device.type == "cuda"
    return {
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": settings.offload_optimizer,
        "overlap_cpu_optimizer_d2h_h2d": is_cuda,
        "pin_cpu_grads": is_cuda,
        "pin_cpu_params": is_cuda,
    }


def _prepare(inner: torch.optim.AdamW, device: torch.device) -> None:
    """One kernel per update on GPUs, and moments that exist from the start. torch's default on CUDA ("foreach") makes
    temporary copies as large as all parameters; and Megatron's checkpoints read the moments of an optimizer that has
    not stepped yet."""
    for group in inner.param_groups:
        if device.type == "cuda":
            group["fused"], group["foreach"] = True, False
        for parameter in cast("list[Tensor]", group["params"]):
            state = inner.state[parameter]
            if not state:
                state["step"] = torch.zeros((), device=parameter.device if group["fused"] else "cpu")
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
