"""The Megatron trainer's model is HuggingFace's: same weights to the bit, same loss and gradients, however it is
cut."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.harness.ports import held_port

from myxa.actors.backends.convert import quantise_folder
from myxa.actors.models.hf_folder import open_weights, read_config, write_folder

pytestmark = pytest.mark.timeout(300)

RANK = Path(__file__).with_name("megatron_rank.py")
SEED = 20261120
NUM_SEQUENCES = 8
MAX_LOSS_ERROR = 1e-6
MAX_GRADIENT_ERROR = 1e-4

SIZES: dict[str, Any] = {
    "vocab_size": 131,  # odd: the table must be padded
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "rms_norm_eps": 1e-6,
    "pad_token_id": None,
    "eos_token_id": [1],
}
EXPERTS: dict[str, Any] = {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True,
}  # fmt: skip
CORRECTED: dict[str, Any] = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5, "attention_bias": True, "use_qk_norm": True, "norm_topk_prob": True,
}  # fmt: skip
DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 8, "q_lora_rank": 24, "kv_lora_rank": 20, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
    "v_head_dim": 5, "first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4,
    "topk_group": 2, "n_shared_experts": 1, "moe_intermediate_size": 16, "routed_scaling_factor": 2.5,
}  # fmt: skip
MOONLIGHT: dict[str, Any] = DEEPSEEK | {
    "q_lora_rank": None, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 3, "n_shared_experts": 2,
    "rms_norm_eps": 1e-2,  # unlike the 1e-6 that transformers always takes for latents
}  # fmt: skip
YARN: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
        "mscale_all_dim": 0.7, "original_max_position_embeddings": 8,
    }
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {}),
    "qwen3-tied": ("Qwen3", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {"head_dim": 4}),  # its transformers class reads no head_dim
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama3": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
            }
        },
    ),
    "glm4": ("Glm4", {}),
    "deepseek": ("DeepseekV3", DEEPSEEK | YARN),
    "moonlight": ("DeepseekV3", MOONLIGHT),
    "moe": ("Qwen3Moe", EXPERTS),
    "moe-mixed": ("Qwen3Moe", EXPERTS | {"mlp_only_layers": [1], "norm_topk_prob": False}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2-moe": (
        "Qwen2Moe", EXPERTS | {"norm_topk_prob": False, "shared_expert_intermediate_size": 24, "head_dim": 4},
    ),
    "glm4-moe": ("Glm4Moe", CORRECTED),
    "glm4-moe-groups": (
        "Glm4Moe",
        CORRECTED | {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "n_shared_experts": 2, "use_qk_norm": False},
    ),
}  # fmt: skip
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
OVERRIDES: dict[str, dict[str, Any]] = {
    "qwen2 pp2 vpp2": RECOMPUTE,
    "glm4 tp2 sequence_parallel1": RECOMPUTE,
    "deepseek ep2": RECOMPUTE,
    "moonlight tp2 sequence_parallel1": {"recompute_granularity": "selective"},
    "llama-tied pp2": {"num_layers_in_first_pipeline_stage": 1},
    "glm4-moe-groups pp2 ep2": {"num_layers_in_first_pipeline_stage": 1},  # a stage without experts
}
"""Case -> its `[megatron.model]`."""
LAYOUTS: dict[int, list[tuple[str, dict[str, Any]]]] = {
    2: [
        ("qwen2", {"pp": 2, "vpp": 2}),
        ("llama-tied", {"pp": 2}),
        ("llama3", {"cp": 2}),
        ("glm4", {"tp": 2, "sequence_parallel": True}),
        ("deepseek", {"ep": 2}),
        ("moonlight", {"tp": 2, "sequence_parallel": True}),
        ("mistral", {"tp": 2}),
        ("glm4-moe", {"pp": 2, "vpp": 2}),
        ("glm4-moe", {"tp": 2, "sequence_parallel": True}),
    ],
    4: [
        ("qwen3", {"tp": 4, "sequence_parallel": True}),
        ("qwen3-tied", {"tp": 2, "pp": 2, "vpp": 2, "sequence_parallel": True}),
        ("qwen2", {"tp": 2, "cp": 2, "sequence_parallel": True}),
        ("moe", {"tp": 2, "ep": 4, "sequence_parallel": True}),
        ("moe-mixed", {"tp": 2, "ep": 2, "etp": 2, "sequence_parallel": True}),
        ("deepseek", {"tp": 2, "ep": 2, "etp": 2, "sequence_parallel": True}),
        ("deepseek", {"cp": 2, "ep": 2, "pp": 2}),
        ("qwen2-moe", {"tp": 2, "pp": 2, "ep": 2, "sequence_parallel": True}),
        ("glm4-moe-groups", {"pp": 2, "ep": 2}),
        ("glm4-moe-groups", {"tp": 2, "cp": 2, "ep": 2, "etp": 2, "sequence_parallel": True}),
    ],
}


REFUSALS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "megatron.etp = 2: but a qwen3 model has no experts": ("qwen3", {"etp": 2}, {}),
    "megatron.tp = 2: with experts needs sequence parallelism": ("moe", {"tp": 2}, {}),
    "megatron.model.hidden_size: myxa decides this itself": ("qwen3", {}, {"overrides": {"hidden_size": 8}}),
    'did you mean "init_method_std"?': ("qwen3", {}, {"overrides": {"init_method_stdd": 1.0}}),
    "megatron-core refuses the configuration": ("moe", {}, {"overrides": {"moe_token_dispatcher_type": "flex"}}),
    "recompute_modules names mla_up_proj": (
        "deepseek",
        {},
        {"overrides": {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}},
    ),
    "attention_dropout: myxa decides this itself": ("qwen3", {}, {"overrides": {"attention_dropout": 0.1}}),
    "weight model.layers.0.self_attn.q_norm.weight is missing": ("not-qwen3", {}, {}),
}
"""What is refused -> model, layout and settings, in a gang of two."""


def make_folder(place: Path, name: str) -> Path:
    """A folder of random weights, and beside them what one step of transformers says."""
    kind, extra = MODELS[name]
    torch.manual_seed(SEED)
    options = SIZES | extra
    if kind.startswith("Qwen2") or kind == "DeepseekV3":
        options.pop("head_dim")
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**options))
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.dim() == 1 or "gate.weight" in key:
                weight.add_(torch.randn_like(weight) * 0.3)  # norms and biases away from their start, experts apart
        for key, module in model.named_modules():
            if key.endswith("_a_layernorm"):
                module.variance_epsilon = options["rms_norm_eps"]  # as engines have it
        for key, correction in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                correction.add_(torch.randn_like(correction) * 0.2 + 14)  # large beside its differences
    folder = place / name
    model.save_pretrained(folder)
    save_file(expected_of(model), folder / "expected.safetensors")
    return folder


def expected_of(model: Any) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    tensors: dict[str, torch.Tensor] = {}
    total, count = torch.zeros(()), 0
    for number in range(NUM_SEQUENCES):
        length = int(torch.randint(3, 30, (), generator=generator))
        ids = torch.randint(2, SIZES["vocab_size"], (length,), generator=generator)
        weights = torch.rand(length, generator=generator) * (torch.rand(length, generator=generator) > 0.3)
        weights[-1] = 0  # nothing comes after the last token
        tensors |= {f"ids.{number}": ids, f"weights.{number}": weights}
        logprobs = torch.log_softmax(model(ids[None]).logits[0], -1)
        total = total - (logprobs[:-1].gather(-1, ids[1:, None])[:, 0] * weights[:-1]).sum()
        count += int((weights > 0).sum())
    loss = total / count
    loss.backward()
    tensors["loss"] = loss.detach().reshape(1)
    for name, weight in model.named_parameters():
        tensors |= {key: part.contiguous() for key, part in as_in_the_folder(name, weight.grad).items()}
    return tensors


def as_in_the_folder(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """transformers keeps the experts of a layer in two tensors, the folder in three per expert."""
    stem, _, last = name.rpartition(".")
    if not stem.endswith("mlp.experts"):
        return {name: tensor}
    if last == "down_proj":
        return {f"{stem}.{i}.down_proj.weight": one for i, one in enumerate(tensor)}
    halves = [(i, *one.chunk(2)) for i, one in enumerate(tensor)]
    return {f"{stem}.{i}.{key}.weight": part for i, g, u in halves for key, part in (("gate_proj", g), ("up_proj", u))}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    print(f"seed {SEED}")
    place = tmp_path_factory.mktemp("families")
    made = {name: make_folder(place, name) for name in MODELS}
    half = place / "glm4-moe-bfloat16"
    half.mkdir()
    config = json.loads((made["glm4-moe"] / "config.json").read_text()) | {"dtype": "bfloat16"}
    (half / "config.json").write_text(json.dumps(config))
    whole = load_file(made["glm4-moe"] / "model.safetensors")
    weights = {k: v if k.endswith("correction_bias") else v.to(torch.bfloat16) for k, v in whole.items()}
    save_file(weights, half / "model.safetensors", {"format": "pt"})
    false = place / "not-qwen3"
    false.mkdir()
    (false / "config.json").write_text((made["qwen3"] / "config.json").read_text())
    (false / "model.safetensors").symlink_to(made["llama-tied"] / "model.safetensors")
    (made["deepseek"] / "tokenizer.json").write_text("{}")
    fp8, read = place / "deepseek-fp8", place / "deepseek-read"
    quantise_folder(made["deepseek"], fp8)
    with open_weights(fp8, config_of_fp8 := read_config(fp8)) as tensors:
        write_folder(read, config_of_fp8.source, [tensors[name] for name in config_of_fp8.tensor_shapes()])
    return made | {one.name: one for one in (half, false, fp8, read)}


def name_of(model: str, layout: dict[str, Any]) -> str:
    return " ".join([model, *(f"{key}{int(value)}" for key, value in layout.items())])


@pytest.fixture(scope="module")
def outcomes(
    folders: dict[str, Path], ranks: Callable[..., list[tuple[int, str]]], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], dict[str, list[dict[str, Any]]]]:
    """Case name -> each rank's result, for a number of ranks; run once."""
    done: dict[int, dict[str, list[dict[str, Any]]]] = {}

    def run(num_ranks: int) -> dict[str, list[dict[str, Any]]]:
        if num_ranks in done:
            assert done[num_ranks], "the gang failed in an earlier test"
            return done[num_ranks]
        done[num_ranks] = {}
        cases: list[dict[str, Any]] = [
            {
                "name": name_of(model, layout), "folder": str(folders[model]), "layout": layout,
                "num_sequences": NUM_SEQUENCES, "overrides": OVERRIDES.get(name_of(model, layout), {}),
            }
            for model, layout in LAYOUTS[num_ranks]
        ]  # fmt: skip
        if num_ranks == 2:
            half = {"folder": str(folders["glm4-moe-bfloat16"]), "layout": {"pp": 2}, "precision": "bfloat16"}
            cases.append({"name": "bfloat16"} | half)
            fp8 = {"folder": str(folders["deepseek-fp8"]), "equals": str(folders["deepseek-read"])}
            cut = {"tp": 2, "ep": 2, "sequence_parallel": True}
            cases.append({"name": "fp8", "layout": cut, "precision": "bfloat16"} | fp8)
            cases.extend(
                {"name": text, "folder": str(folders[model]), "layout": layout} | settings
                for text, (model, layout, settings) in REFUSALS.items()
            )
        out = tmp_path_factory.mktemp(f"ranks{num_ranks}")
        place = out / "spec.json"
        spec = {"num_ranks": num_ranks, "port": held_port(), "cases": cases, "out": str(out)}
        place.write_text(json.dumps(spec))
        ended = ranks(num_ranks, RANK, str(place), timeout_s=280)
        for rank, (status, output) in enumerate(ended):
            assert status == 0, f"rank {rank} ended with {status}:\n{output[-6000:]}"
        done[num_ranks] = {
            case["name"]: [json.loads((out / f"case{i}.rank{r}.json").read_text()) for r in range(num_ranks)]
            for i, case in enumerate(cases)
        }
        return done[num_ranks]

    return run


ALL = [(num_ranks, name_of(*case)) for num_ranks, cases in LAYOUTS.items() for case in cases]


@pytest.mark.parametrize(("num_ranks", "name"), ALL, ids=[f"ranks{n}-{name}" for n, name in ALL])
def test_loss_and_gradients_are_those_of_transformers(outcomes: Any, num_ranks: int, name: str) -> None:
    for result in outcomes(num_ranks)[name]:
        assert result["loss"] < MAX_LOSS_ERROR
        assert 0 < result["gradient"] < MAX_GRADIENT_ERROR


@pytest.mark.parametrize("num_ranks", LAYOUTS)
def test_every_weight_is_sent_once_and_as_it_was_read(outcomes: Any, folders: dict[str, Path], num_ranks: int) -> None:
    """The ranks have compared the values; here, that the senders of the stages together send everything once."""
    for (model, layout), results in zip(LAYOUTS[num_ranks], outcomes(num_ranks).values(), strict=False):
        sent = [name for result in results for name in result["names"]]
        assert sorted(sent) == sorted(load_file(folders[model] / "model.safetensors")), (model, layout)
        assert sum(bool(result["names"]) for result in results) == layout.get("pp", 1)


def test_ranks_read_no_more_than_they_hold(outcomes: Any) -> None:
    """Nothing of another rank's part is read; only padding of the vocabulary is not read but made."""
    padding = 4 * SIZES["hidden_size"] * 2
    for results in (outcomes(4)["moe tp2 ep4 sequence_parallel1"], outcomes(4)["qwen3 tp4 sequence_parallel1"]):
        for result in results:
            assert 0 <= result["held"] - result["read"] <= padding
        assert results[-1]["read"] < results[-1]["held"], "131 rows do not divide"


@pytest.mark.parametrize("text", REFUSALS)
def test_what_cannot_be_built_is_refused_by_its_key(outcomes: Any, text: str) -> None:
    for result in outcomes(2)[text]:
        assert text in result["refusal"]
        assert " -- " in result["refusal"], "a remedy is missing"


@pytest.mark.parametrize("name", ["bfloat16", "fp8"])
def test_half_precision_is_equal_to_the_bit_too(outcomes: Any, name: str) -> None:
    assert any(result["names"] for result in outcomes(2)[name])
