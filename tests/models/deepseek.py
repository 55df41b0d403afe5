"""config.json of models of DeepSeek-V3's family at their true sizes, as their folders have it."""

from __future__ import annotations

from typing import Any

CODE = {
    "AutoConfig": "configuration_deepseek.DeepseekV3Config",
    "AutoModel": "modeling_deepseek.DeepseekV3Model",
    "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
}
YARN = {"type": "yarn", "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}
FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "auto_map": CODE, "model_type": "deepseek_v3", "attention_bias": False,
    "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "max_position_embeddings": 163840,
    "rope_scaling": YARN | {"factor": 40, "beta_fast": 32, "beta_slow": 1}, "rope_theta": 10000, "rms_norm_eps": 1e-6,
    "vocab_size": 129280, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "first_k_dense_replace": 3,
    "moe_layer_freq": 1, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 1, "eos_token_id": 1,
    "quantization_config": FP8,
}  # fmt: skip
KIMI_K2: dict[str, Any] = DEEPSEEK_V3 | {
    "model_type": "kimi_k2", "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.827, "vocab_size": 163840,
    "max_position_embeddings": 131072, "rope_scaling": YARN | {"factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0},
    "rope_theta": 50000.0, "num_nextn_predict_layers": 0, "eos_token_id": 163586,
}  # fmt: skip
MOONLIGHT: dict[str, Any] = {
    key: value for key, value in DEEPSEEK_V3.items() if key not in ("quantization_config", "rope_scaling")
} | {
    "hidden_size": 2048, "intermediate_size": 11264, "num_hidden_layers": 27, "num_attention_heads": 16,
    "num_key_value_heads": 16, "q_lora_rank": None, "max_position_embeddings": 8192, "rope_theta": 50000.0,
    "rms_norm_eps": 1e-5, "vocab_size": 163840, "first_k_dense_replace": 1, "moe_intermediate_size": 1408,
    "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1,
    "routed_scaling_factor": 2.446, "num_nextn_predict_layers": 0, "eos_token_id": 163585,
}  # fmt: skip
