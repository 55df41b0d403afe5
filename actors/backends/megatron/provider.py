"""A HuggingFace config made into megatron-core's GPT model: its TransformerConfig, its layers, and this rank's part of
it.

Knows which values TransformerConfig needs for a model folder and a layout, without Transformer Engine and apex. A
softmax over the head's rows must leave out rows from `vocab_size` on: they only pad the table, so that it divides over
the tensor-parallel ranks. They are zero and stay zero.

The layers are megatron-core's own parts where they work without Transformer Engine, and ours where they refuse sequence
parallelism, packed sequences or context parallelism: what is trained never depends on what is installed.

The experts of a layer are two tensors, multiplied by torch's grouped product where it runs: `w1` [experts here, 2 *
inner, hidden] holds each expert's gate rows, then its up rows; `w2` [experts here, hidden, inner]. With expert-tensor
parallelism `inner` is this rank's part; the dispatcher gathers tokens before and adds up results after.

Libraries considered: Megatron-Bridge has providers of many families; it needs Transformer Engine and NeMo's stack.
megatron-core's SequentialMLP runs one small product per expert (on an H200 a fifth slower for Qwen3-30B-A3B); its
GroupedMLP needs the grouped_gemm package, its TEGroupedMLP Transformer Engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ....core.config.learning import MegatronSettings
from ....core.errors import ConfigError, raised_as
from ...models.model_config import ModelConfig
from ..torch_backend.tensors import integers, pieces
from ..vocab_scores import fused
from . import mcore
from .attention import HeadNorm, LatentAttention, MegatronRMSNorm, PackedSelfAttention, VarlenAttention
from .layout import ParallelLayout
from .verbatim import check_table

REMEDY = "mend [megatron] or [megatron.model]"


def model_fields(settings: MegatronSettings) -> dict[str, Any]:
    """Fields of TransformerConfig that the run file asks for."""
    options: dict[str, Any] = {} if settings.recompute == "none" else {"recompute_granularity": settings.recompute}
    if settings.recompute == "full":
        options |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    if settings.routing_replay:
        options["moe_enable_routing_replay"] = True
    return {**options, **settings.model}


def transformer_config(
    config: ModelConfig,
    layout: ParallelLayout,
    precision: torch.dtype,
    overrides: Mapping[str, Any],
) -> Any:
    """megatron-core's TransformerConfig of the model. `overrides`: the run file's `[megatron.model]`, field by field.
    Raises ConfigError naming the key for a field that is unknown, not the user's to set, or refused by megatron-core,
    and for a layout that does not fit the model."""
    kind = "MLATransformerConfig" if config.kv_lora_rank else "TransformerConfig"
    settings_type = getattr(mcore.module("transformer"), kind)
    check_table("model", overrides, {field.name for field in fields(settings_type)})
    layout.check_model(config, overrides)
    options = _shape(config) | _cut(layout) | _numerics(precision, layout)
    if config.kv_lora_rank:
        options |= _latent_fields(config)
    if config.num_experts:
        options |= _expert_fields(config)
    options |= overrides
    with raised_as(ConfigError, mcore.REFUSED, *mcore.REFUSALS, remedy=REMEDY):
        return settings_type(**options)


def build_model_chunks(
    config: ModelConfig,
    layout: ParallelLayout,
    precision: torch.dtype,
    overrides: Mapping[str, Any],
) -> list[nn.Module]:
    """This rank's part of the model with random weights, one module per virtual stage, on this rank's device.
    megatron-core's parallel state must be initialised with the same layout. In half precision each module is wrapped in
    megatron-core's Float16Module. Raises ConfigError as `transformer_config` does."""
    settings = transformer_config(config, layout, precision, overrides)
    chunks: list[nn.Module] = []
    for number in range(layout.vpp):
        stage = number if layout.vpp > 1 else None
        with raised_as(ConfigError, mcore.REFUSED, *mcore.REFUSALS, remedy=REMEDY):
            chunk = _chunk(config, layout, settings, stage).to(mcore.default_device())
        if precision != torch.float32:
            chunk = mcore.module("transformer.module").Float16Module(settings, chunk)
            for part in chunk.modules():
                if isinstance(bias := getattr(part, "expert_bias", None), Tensor):
                    bias.data = bias.data.float()  # routers do it in their first pass, too late for loading
        chunks.append(chunk)
    return chunks


def _chunk(config: ModelConfig, layout: ParallelLayout, settings: Any, stage: int | None) -> nn.Module:
    spec = decoder_spec(config, settings, virtual_stage=stage)
    state = mcore.parallel_state
    virtual: dict[str, Any] = {"ignore_virtual": stage is None, "vp_stage": stage}
    model: nn.Module = mcore.module("models.gpt").GPTModel(
        config=settings,
        transformer_layer_spec=spec,
        vocab_size=-(-config.vocab_size // layout.tp) * layout.tp,
        max_sequence_length=config.context_length,
        pre_process=state.is_pipeline_first_stage(**virtual),
        post_process=state.is_pipeline_last_stage(**virtual),
        share_embeddings_and_output_weights=config.tie_word_embeddings,
        position_embedding_type="none",  # attention rotates by itself
        vp_stage=stage,
    )
    if config.has_mtp:
        cast(Any, model).after_next = MtpLayer(settings, spec.layer_specs[-1], config.num_layers + 1)
    return model


def _shape(config: ModelConfig) -> dict[str, Any]:
    return {
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_heads,
        "num_query_groups": config.num_kv_heads,
        "kv_channels": config.head_dim,
        "ffn_hidden_size": config.intermediate_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": config.attention_bias,
        "qk_layernorm": config.has_qk_norm,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def _latent_fields(config: ModelConfig) -> dict[str, Any]:
    stretched = config.rope_scaling or {}
    return {
        "q_lora_rank": config.q_lora_rank or None,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_head_dim": config.head_dim - config.rotary_dim,
        "qk_pos_emb_head_dim": config.rotary_dim,
        "v_head_dim": config.v_head_dim,
        "rope_type": "rope",  # attention rotates by itself; the rest makes the softmax's scale
        "rotary_scaling_factor": float(stretched.get("factor") or 1.0),
        "mscale_all_dim": float(stretched.get("mscale_all_dim") or 0.0),
    }


def _cut(layout: ParallelLayout) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "sequence_parallel": layout.sequence_parallel,
        "variable_seq_lengths": layout.pp > 1,
        # The interleaved schedule with two stages sends both ways at once, which batched sends cannot.
        "overlap_p2p_comm": layout.vpp > 1,
        "batch_p2p_comm": layout.vpp == 1,
        # Dense models too: with variable lengths the default dispatcher is refused whether it is used or not.
        "moe_token_dispatcher_type": "alltoall",
    }


def _numerics(precision: torch.dtype, layout: ParallelLayout) -> dict[str, Any]:
    on_gpu = torch.cuda.is_available()
    return {
        "params_dtype": precision,
        "pipeline_dtype": precision,
        "bf16": precision == torch.bfloat16,
        "fp16": precision == torch.float16,
        "calculate_per_token_loss": True,
        "attention_softmax_in_fp32": True,
        "use_cpu_initialization": not on_gpu,
        "perform_initialization": True,  # False would also skip the marks by which gradient norms count shards once
        "deallocate_pipeline_outputs": layout.pp > 1,
        "transformer_impl": "local",
        "bias_activation_fusion": on_gpu and precision != torch.float32,  # torch.compile
        "bias_dropout_fusion": False,  # of an addition alone: there are neither biases nor dropout
        # These need apex or Transformer Engine.
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "apply_rope_fusion": False,
        "cross_entropy_loss_fusion": False,
    }


def _expert_fields(config: ModelConfig) -> dict[str, Any]:
    has_groups = config.expert_groups_per_token < config.num_expert_groups
    return {
        "num_moe_experts": config.num_experts,
        "moe_router_topk": config.experts_per_token,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_layer_freq": [int(config.is_moe_layer(layer)) for layer in range(config.num_layers)],
        "moe_router_score_function": "sigmoid" if config.has_sigmoid_router else "softmax",
        # Softmax of the chosen experts' logits alone = softmax of all, made to sum to one over the chosen.
        "moe_router_pre_softmax": not (config.normalises_top_experts or config.has_sigmoid_router),
        "moe_router_enable_expert_bias": config.has_sigmoid_router,
        "moe_router_bias_update_rate": 0.0,  # a policy's correction stays as it was trained
        "moe_router_num_groups": config.num_expert_groups if has_groups else None,
        "moe_router_group_topk": config.expert_groups_per_token if has_groups else None,
        "moe_router_topk_scaling_factor": config.routed_scaling if config.routed_scaling != 1.0 else None,
        "moe_shared_expert_intermediate_size": config.shared_intermediate_size or None,
        "moe_shared_expert_gate": config.has_shared_gate,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": False,  # our experts group their products themselves
        "moe_permute_fusion": False,
    }


MegatronModule: Any = mcore.module("transformer.module").MegatronModule


class MtpLayer(MegatronModule):
    """The layer that predicts the token after the next from the model's last hidden state and the embedded next token
    (DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 2.2); the model's own head scores what it gives.
    megatron-core's computes its loss inside of GPTModel, from logits of the whole vocabulary and labels."""

    def __init__(self, settings: Any, spec: Any, number: int) -> None:
        super().__init__(config=settings)  # pyright: ignore[reportUnknownMemberType]
        size, device = int(settings.hidden_size), None if settings.use_cpu_initialization else mcore.default_device()
        norms = (MegatronRMSNorm(settings, size, eps=settings.layernorm_epsilon) for _ in range(3))
        self.enorm, self.hnorm, self.final_layernorm = norms
        self.eh_proj = nn.Linear(2 * size, size, bias=False, dtype=settings.params_dtype, device=device)
        cast(Any, self.eh_proj.weight).sequence_parallel = settings.sequence_parallel
        build: Any = mcore.module("transformer.spec_utils").build_module
        self.transformer_layer = build(spec, config=settings, layer_number=number)
        for part in self.transformer_layer.modules():
            if hasattr(part, "router_replay"):
                part.router_replay = None  # engines and scoring passes do not run it

    def forward(self, hidden_t1h: Tensor, embedded_t1h: Tensor, sequences: Any) -> Tensor:
        """Of each token the model's output and the embedding of the next, [t, 1, hidden] -> the same shape."""
        both = torch.cat([self.enorm(embedded_t1h), self.hnorm(hidden_t1h)], dim=-1)
        out, _ = self.transformer_layer(
            hidden_states=self.eh_proj(both), attention_mask=None, packed_seq_params=sequences
        )
        return self.final_layernorm(out)


RowParallelLinear: Any = mcore.module("tensor_parallel").RowParallelLinear


class NormedRowParallelLinear(RowParallelLinear):
    """A projection back to the stream whose result is normalised before it is added (GLM-4)."""

    adapter: Callable[[Tensor, Tensor], Tensor] | None = None
    """What it makes of input and output before."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **options: Any) -> None:
        base: Any = super()
        base.__init__(input_size, output_size, config=config, **options)
        self.post_norm = MegatronRMSNorm(config, output_size, eps=config.layernorm_epsilon)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        base: Any = super()
        output, bias = cast("tuple[Tensor, Tensor | None]", base.forward(input_))
        return self.post_norm(output if self.adapter is None else self.adapter(input_, output)), bias


def decoder_spec(config: ModelConfig, settings: Any, *, virtual_stage: int | None) -> Any:
    """Specs of the layers of this rank's (virtual) stage. `settings`: the TransformerConfig."""
    specs = mcore.module("models.gpt.gpt_layer_specs")
    block = specs.get_gpt_decoder_block_spec(
        settings, use_transformer_engine=False, normalization="RMSNorm", vp_stage=virtual_stage
    )
    for layer in block.layer_specs:
        _equip(config, settings, layer.submodules)
    block.layer_norm = MegatronRMSNorm
    return block


def _equip(config: ModelConfig, settings: Any, parts: Any) -> None:
    attention = mcore.submodules_of(parts.self_attention)
    attention.core_attention = VarlenAttention.of(config)
    kind = LatentAttention if config.kv_lora_rank else PackedSelfAttention
    parts.self_attention = mcore.module("transformer.spec_utils").ModuleSpec(kind, submodules=attention)
    mlp = mcore.submodules_of(parts.mlp)
    if hasattr(mlp, "experts"):
        mlp.experts = _experts_spec()
    parts.input_layernorm = parts.pre_mlp_layernorm = MegatronRMSNorm
    if settings.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = HeadNorm
    if config.has_post_norms:
        attention.linear_proj = mlp.linear_fc2 = NormedRowParallelLinear


def _experts_spec() -> Any:
    """megatron-core wants a ModuleSpec until 0.17 and a builder since."""
    layer = mcore.module("transformer.moe.moe_layer")
    takes_builder = "Builder" in str(layer.MoESubmodules.__annotations__.get("experts"))
    return GroupedExperts if takes_builder else mcore.module("transformer.spec_utils").ModuleSpec(GroupedExperts)


_grouped_mm: Callable[..., Tensor] | None = getattr(functional, "grouped_mm", None) or getattr(
    torch, "_grouped_mm", None
)
"""torch 2.10 and later; the private name before."""


class GroupedExperts(nn.Module):
    """Drop-in for `experts` of megatron-core's MoE layer; SwiGLU, no bias."""

    def __init__(
        self, num_local_experts: int, config: Any, submodules: Any = None, pg_collection: Any = None, **_: Any
    ) -> None:
        super().__init__()
        self.config = config
        self._groups = pg_collection
        hidden, inner = int(config.hidden_size), int(config.moe_ffn_hidden_size) // int(pg_collection.expt_tp.size())
        device = torch.device("cpu") if config.use_cpu_initialization else mcore.default_device()
        options: dict[str, Any] = {"dtype": config.params_dtype, "device": device}
        self.w1 = nn.Parameter(torch.empty(num_local_experts, 2 * inner, hidden, **options))
        self.w2 = nn.Parameter(torch.empty(num_local_experts, hidden, inner, **options))
        set_attributes = mcore.module("tensor_parallel.layers").set_tensor_model_parallel_attributes
        for weight, dim in ((self.w1, 1), (self.w2, 2)):
            nn.init.normal_(weight, std=float(config.init_method_std))
            set_attributes(weight, True, dim, 1)
            cast(Any, weight).allreduce = False  # megatron-core's mark of an expert: reduced over fewer replicas

    def forward(self, tokens_Th: Tensor, tokens_per_expert: Tensor, probs_T: Tensor) -> tuple[Tensor, None]:
        """Tokens [T, hidden] sorted by expert, and their routing weights [T] -> what the experts make of them."""
        runs_grouped = tokens_Th.is_cuda and tokens_Th.dtype == torch.bfloat16 and tokens_Th.shape[0] > 0
        if _grouped_mm is None or not runs_grouped:
            return self._one_by_one(tokens_Th, tokens_per_expert, probs_T), None
        ends = tokens_per_expert.to(tokens_Th.device, torch.int32).cumsum(0, dtype=torch.int32)
        into = _grouped_mm(tokens_Th, self.w1.transpose(1, 2), offs=ends)
        return _grouped_mm(_gated_at_once(into, probs_T), self.w2.transpose(1, 2), offs=ends), None

    def _one_by_one(self, tokens_Th: Tensor, tokens_per_expert: Tensor, probs_T: Tensor) -> Tensor:
        sizes = integers(tokens_per_expert)
        tokens_of, probs_of = pieces(tokens_Th, sizes), pieces(probs_T, sizes)
        outs = [
            functional.linear(_gated(functional.linear(tokens, self.w1[i]), probs), self.w2[i])
            for i, (tokens, probs) in enumerate(zip(tokens_of, probs_of, strict=True))
        ]
        return torch.cat(outs)

    def backward_dw(self) -> None:
        """Part of the interface; weight gradients are never delayed here."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Both tensors for megatron-core's checkpoints: `w1` as [experts, 2, inner, hidden], so that gate and up rows
        come apart right under any other expert-tensor degree."""
        mapping = mcore.module("dist_checkpointing.mapping")
        groups = self._groups
        replica = (0, 0, int(groups.expt_dp.rank()))
        lead = len(sharded_offsets)
        experts = (lead, int(groups.ep.rank()), int(groups.ep.size()))
        parts = (lead + 2, int(groups.expt_tp.rank()), int(groups.expt_tp.size()))

        def shard(key: str, tensor: Tensor, replica_id: Any) -> Any:
            return mapping.ShardedTensor.from_rank_offsets(
                key, tensor, *sharded_offsets, experts, parts, replica_id=replica_id, prepend_axis_num=lead
            )

        def split(key: str, tensor: Tensor, replica_id: Any, flattened_range: Any = None) -> Any:
            return shard(key, tensor.view(tensor.shape[0], 2, tensor.shape[1] // 2, tensor.shape[2]), replica_id)

        def join(tensor: Tensor) -> Tensor:
            return tensor.reshape(tensor.shape[0], tensor.shape[1] * tensor.shape[2], tensor.shape[3])

        first, second = f"{prefix}w1", f"{prefix}w2"
        return {
            first: mapping.ShardedTensorFactory(first, self.w1, split, join, replica),
            second: shard(second, self.w2, replica),
        }


def _gated(into_T2i: Tensor, probs_T: Tensor) -> Tensor:
    """silu(gate) * up * routing weight, in the type of the input."""
    gate, up = into_T2i.chunk(2, dim=-1)
    return (functional.silu(gate) * up * probs_T.unsqueeze(-1)).to(into_T2i.dtype)


_gated_at_once = fused(_gated)
"""For all experts' tokens together; expert by expert there are too many sizes to compile for."""
