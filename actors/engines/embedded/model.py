"""The forward pass of a dense decoder over a flat list of tokens; its attention is an argument.

One layer loop serves decoding (one token of every running row) and prefill (whole prompts, packed without padding).
The trainer has its own implementation of the same mathematics; a test keeps the two, and transformers, within 1e-5.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from ...models.model_config import ModelConfig
from ...models.rotary import rotary_angles, rotary_gain
from .attention import Attention
from .weights import DecoderWeights, LayerWeights


class Decoder:
    """The mathematics; weights come with every call, so a new version is just another argument."""

    def __init__(self, config: ModelConfig, context_length: int) -> None:
        self._config = config
        angles = rotary_angles(config, torch.arange(context_length))
        self._turns = torch.polar(torch.full_like(angles, rotary_gain(config)), angles)[:, None]
        """Rotations as complex numbers, [context, 1, D / 2] (arXiv 2104.09864, equation 12)."""

    def forward(
        self,
        weights: DecoderWeights,
        ids: Tensor,
        positions: Tensor,
        attention: Attention,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """Logits float32 [N, vocabulary] of tokens `ids` int64 [N], or of the rows `wanted` int64 [M] only."""
        return self.logits(weights, self.hidden(weights, ids, positions, attention, wanted))

    def hidden(
        self,
        weights: DecoderWeights,
        ids: Tensor,
        positions: Tensor,
        attention: Attention,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """What the last layer says of them, [N, hidden] or [M, hidden]."""
        x = weights.embedding[ids]
        turns = self._turns[positions]
        for number, layer in enumerate(weights.layers):
            attended = self._attended(number, layer, x, turns, attention)
            if wanted is not None and number == len(weights.layers) - 1:
                x, attended = x[wanted], attended[wanted]  # the other rows are not used from here on
            x = torch.addmm(x, attended, layer.out.t())
            gate, up = linear(self._normed(x, layer.post_norm), layer.gate_up).chunk(2, dim=-1)
            x = torch.addmm(x, silu(gate).mul_(up), layer.down.t())
        return x

    def logits(self, weights: DecoderWeights, hidden: Tensor) -> Tensor:
        """Of the next token, float32 [N, vocabulary], for rows of `hidden`."""
        return linear(self._normed(hidden, weights.norm), weights.head).float()

    def _attended(self, number: int, layer: LayerWeights, x: Tensor, turns: Tensor, attention: Attention) -> Tensor:
        config = self._config
        qkv = linear(self._normed(x, layer.input_norm), layer.qkv, layer.qkv_bias)
        heads = qkv.view(x.shape[0], -1, config.head_dim)
        num_turned = config.num_heads + config.num_kv_heads
        turned = heads[:, :num_turned]
        if layer.qk_norm is not None:
            turned = self._normed(turned, layer.qk_norm)
        turned = _rotate(turned, turns)
        return attention.attend(
            number, turned[:, : config.num_heads], turned[:, config.num_heads :], heads[:, num_turned:]
        )

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm over the last dimension (arXiv 1910.07467, equation 4).

        Written out: torch's own `rms_norm` takes ten times as long on a CPU once there are thousands of rows.
        """
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self._config.rms_norm_eps)
        return (wide * scale).to(x.dtype).mul_(weight)


def _rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Turn the pairs (2i, 2i + 1) of the last dimension by complex multiplication; bfloat16 goes through float32."""
    pairs = torch.view_as_complex(x.float().view(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)
