"""Memory of a training step beside weights, gradients and optimizer: activations and the scoring of tokens. Pure.

What a layer keeps for its backward pass, for each token, in numbers of the compute type (h: hidden size, f: inner
width of the MLP, q, k, v: widths of the projections; attention is flash attention and keeps no scores):

    torch     4h   input and output of both norms          megatron   4h
              2q + 2k + v   before and after rotation                 3(q + k + v)   projection, normed, rotated
              q    what attention gave                                q
              4f   gate, up, silu(gate), their product                3f   gate and up (fused SwiGLU), their product

The scheme is that of Korthikanti et al. (arXiv 2205.05198, section 4), without dropout, biases and attention scores.
Which copies are kept follows `torch_backend/model.py` and `megatron/provider.py`; the 3 of Megatron's attention is
chosen so that four measurements of docs/benchmarks.md (`train`) come out, see tests/plan/test_memory_estimate.py.

Scoring (`backends/vocab_scores.py`) makes logits in chunks: CHUNK numbers at 2 bytes, once more in float32 and their
gradient, together 8 bytes each in bfloat16 and 12 in float32; and the gradient of the head in float32.

Left out: fragments of the allocator, workspaces of libraries, samples without a shared prompt being padded.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...actors.backends.megatron.layout import ParallelLayout
from ...actors.models.model_config import ModelConfig
from ...core.config import RunConfig
from ..memory_part import Part, count_text
from .model_cut import PipelineStage

CHUNK_LOGITS = {"cuda": 1 << 28, "cpu": 1 << 25}
"""As in `backends/vocab_scores.py`, which imports torch; a test compares them."""
LOGIT_BYTES = {2: 8, 4: 12}
"""Bytes a logit of the chunk, by the bytes of the compute type."""
UNCUT = 4
"""Of h: what tensor parallelism leaves whole without sequence parallelism."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """One forward and backward pass of a rank."""

    num_tokens: int
    """Of a micro-batch, all its samples."""
    num_micro_batches: int
    """Of a step, on one data-parallel replica."""
    item_bytes: int
    """Of the compute type."""
    on_gpu: bool
    recomputes_layers: bool


def microbatch_tokens(config: RunConfig, model: ModelConfig) -> int:
    """Tokens of the largest micro-batch: the limit, or one sample that is longer than it (its prompt not counted)."""
    limit = config.trainer.max_tokens_per_microbatch
    if config.algo.kind == "sft":
        return limit
    context = config.engine.context_length or model.context_length
    return max(limit, min(context, config.rollout.max_new_tokens * config.rollout.max_turns))


def layer_numbers(model: ModelConfig, kind: str, layout: ParallelLayout) -> float:
    """Numbers that one layer keeps of one token on one rank; see the head of this file."""
    q, kv = model.num_heads * model.head_dim, 2 * model.num_kv_heads * model.head_dim
    k = kv // 2
    inner = model.intermediate_size
    if model.num_experts:
        # Every token goes through its chosen experts, wherever they are: on average so many tokens arrive on a rank.
        inner = model.experts_per_token * model.moe_intermediate_size
    if kind == "megatron":
        cut = 3 * (q + kv) + q + 3 * inner
    else:
        cut = 2 * q + 2 * k + k + q + 4 * inner
    stream = UNCUT * model.hidden_size
    return cut / layout.tp + (stream / layout.tp if layout.sequence_parallel else stream)


def activation_parts(
    model: ModelConfig, kind: str, layout: ParallelLayout, stage: PipelineStage, shape: StepShape
) -> list[Part]:
    """Activations of a rank of that stage, and what scoring takes on the last one."""
    tokens = -(-shape.num_tokens // layout.cp)
    each = layer_numbers(model, kind, layout) * shape.item_bytes
    in_flight = max(1, min(layout.pp - stage.number, shape.num_micro_batches))
    if shape.recomputes_layers:
        kept = stage.num_layers * model.hidden_size * shape.item_bytes * in_flight
        size, how = (kept + each) * tokens, f"{stage.num_layers} layers' inputs and one whole layer"
    else:
        size = stage.num_layers * each * tokens * in_flight
        how = f"{stage.num_layers} layers x {each / 1000:.1f} kB a token"
    how += f" x {count_text(tokens)} tokens" + (f" x {in_flight} micro-batches in flight" if in_flight > 1 else "")
    parts = [Part("activations", int(size), how)]
    if stage.is_last:
        parts.append(_scoring(model, layout, shape, tokens))
    return parts


def _scoring(model: ModelConfig, layout: ParallelLayout, shape: StepShape, tokens: int) -> Part:
    width = model.vocab_size // layout.tp
    chunk = min(CHUNK_LOGITS["cuda" if shape.on_gpu else "cpu"], tokens * width)
    head = 4 * width * model.hidden_size
    each = LOGIT_BYTES[shape.item_bytes]
    how = f"{count_text(chunk)} logits at a time x {each} B + gradient of the head 4 B x {count_text(head / 4)}"
    return Part("logits", each * chunk + head, how)
