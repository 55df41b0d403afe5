"""The critic's model: the policy's decoder with one number read off each state, in float32.

Knows weights and index tensors, as `model.py` does; not returns or losses. Parameters are called as in the policy's
folder, the head `value_head`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...models.hf_folder import ModelConfig, open_weights
from ...models.value_head import value_head_in
from .layout import Layout
from .model import Linear, PackedModel
from .tensors import from_bytes


class ValueModel(PackedModel):
    """`forward` gives the value of the state before each of a layout's loss tokens."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype = torch.float32, recomputes: bool = False) -> None:
        super().__init__(config, dtype=dtype, recomputes=recomputes)
        self.value_head = Linear(config.hidden_size, 1, has_bias=True)

    def exact_parts(self) -> tuple[nn.Module, ...]:
        return (self.value_head,)

    def forward(self, layout: Layout) -> Tensor:
        """float32 [M]. No temperature: values are expectations, not draws."""
        return self.value_head(self.hidden_Mh(layout).float()).squeeze(-1).clone()  # FSDP hooks no views


def load_value_model(module: ValueModel, folder: str, layers: ModelConfig) -> None:
    """Copy a folder's weights into the float32 masters; what its head does not hold begins at zero. Raises ModelError
    if they do not fit."""
    parameters = dict(module.named_parameters())
    with torch.no_grad(), open_weights(folder, layers) as tensors:
        for name in layers.tensor_shapes():
            parameters[name].copy_(from_bytes(tensors[name]))
        head = value_head_in(tensors, layers, folder)
        for name, parameter in module.value_head.named_parameters():
            parameter.copy_(from_bytes(head[name])) if name in head else parameter.zero_()
