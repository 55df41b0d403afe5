"""What `myxa plan` says of memory, against what was measured on H200s and against the code that it speaks of."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from tests.models.deepseek import DEEPSEEK_V3, FP8, MOONLIGHT
from tests.plan.memory_cases import BENCHMARKS, CASES, GLM45_AIR, NOT_BY_TORCH, QWEN3_30B, SHAPES, measured, qwen3, run

from myxa.actors.backends import vocab_scores
from myxa.actors.backends.megatron.layout import ParallelLayout, rank_parameters
from myxa.actors.backends.megatron.offload import planned as planned_by_megatron
from myxa.actors.backends.torch_backend.offload import planned as planned_by_torch
from myxa.actors.models.model_config import ModelConfig, parse_model_config
from myxa.core.config import RunConfig
from myxa.core.config.loading import Finding
from myxa.launch.checks.check import CheckedRun, model_of
from myxa.launch.checks.files import fit
from myxa.launch.checks.memory_estimate import (
    CHUNK_LOGITS,
    KEPT_LOGITS,
    DeviceLoad,
    layer_numbers,
    memory,
    server_memory,
    slow_transfer,
    token_bytes,
    trainer_memory,
)
from myxa.launch.memory_part import GIB, total
from myxa.launch.supervisor.placement import place

TOLERANCE = 0.05


@pytest.mark.parametrize(("row", "kind", "shape", "ranks"), CASES)
def test_a_step_takes_what_it_took_on_an_h200(row: str, kind: str, shape: str, ranks: int) -> None:
    """Packs of 16 sequences of 1024 tokens; torch's largest count of allocated bytes."""
    parts = trainer_memory(run(kind, ranks), SHAPES[shape], ranks)
    said = total(part for part in parts if part.name not in NOT_BY_TORCH) / GIB
    print(f"{row}: {said:.1f} GiB, measured {measured(row)}")
    assert said == pytest.approx(measured(row), rel=TOLERANCE)


def test_the_worked_example() -> None:
    """8.2 thousand million parameters, the optimizer shared by four: 16.4 + 32.8 + 24.6 GB."""
    parts = trainer_memory(run("megatron", 4), SHAPES["8B"], 4)
    sizes = {part.name: part.num_bytes / 1e9 for part in parts}
    assert [sizes[name] for name in ("weights", "gradients", "optimizer")] == pytest.approx(
        [16.4, 32.8, 24.6], rel=0.01
    )
    found = re.search(r"8\.2B parameters with the optimizer shared by four take \(([\d.]+) GiB[,)]", BENCHMARKS)
    # The benchmark counts 2 bytes of weights, 4 of gradients and a quarter of 12, all of 8.2e9, in whole matrices.
    assert found is not None
    lasting = sum(sizes[name] for name in ("weights", "gradients", "optimizer")) * 1e9 / GIB
    assert lasting == pytest.approx(float(found[1]), rel=TOLERANCE)


def test_experts_are_planned_for_as_they_are_cut() -> None:
    """30B with 128 experts a layer on eight ranks: a rank that held all of them would need 61 GB for parameters."""
    model = QWEN3_30B
    config = run("megatron", 8, megatron={"ep": 8}, trainer={"dtype": "bfloat16"})
    plan = planned_by_megatron(model, config.megatron, config.trainer, 8, has_reference=False)
    num_experts = 48 * 128 * 3 * 2048 * 768
    dense, experts = model.num_parameters - num_experts, num_experts // 8
    assert {tag: size for tag, (size, _) in plan.items()} == {
        "params": 2 * (dense + experts), "grads": 4 * (dense + experts),
        "masters": 4 * (dense // 8 + experts), "optimizer": 8 * (dense // 8 + experts),
    }  # fmt: skip


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("ranks", [1, 4])
def test_it_says_what_the_memory_manager_is_told(dtype: str, ranks: int) -> None:
    model = SHAPES["0.6B"]
    config = run("megatron", ranks, trainer={"dtype": dtype}, algo={"kl_coef": 0.1})
    told = planned_by_megatron(model, config.megatron, config.trainer, ranks, has_reference=True)
    said = {part.name: part.num_bytes for part in trainer_memory(config, model, ranks)}
    names = {"params": "weights", "grads": "gradients", "optimizer": "optimizer", "frozen": "reference model"}
    sizes = {tag: size for tag, (size, _) in told.items()}
    sizes["optimizer"] += sizes.pop("masters", 0)
    assert {tag: said[name] for tag, name in names.items()} == sizes
    config = run("torch", ranks, trainer={"dtype": dtype}, algo={"kl_coef": 0.1})
    said = {part.name: part.num_bytes for part in trainer_memory(config, model, ranks)}
    told = planned_by_torch(model.num_parameters, num_reference=model.num_parameters)
    assert {tag: said[name] for tag, name in names.items()} == {tag: size for tag, (size, _) in told.items()}


@pytest.mark.parametrize(("kind", "dtype"), [("torch", "bfloat16"), ("torch", "float32"), ("megatron", "bfloat16")])
def test_adapters_alone_have_gradients_and_moments_and_the_weights_are_the_reference(kind: str, dtype: str) -> None:
    model, item = SHAPES["0.6B"], 2 if dtype == "bfloat16" else 4
    num = sum(16 * sum(shape) for name, shape in model.tensor_shapes().items() if name.endswith("_proj.weight"))
    assert num == 10_092_544, "PEFT's count for Qwen3-0.6B, r = 16, all-linear"
    sections: dict[str, Any] = {"trainer": {"dtype": dtype}, "algo": {"kl_coef": 0.1}, "lora": {"rank": 16}}
    parts = {part.name: part for part in trainer_memory(run(kind, 1, **sections), model, 1)}
    sizes = {name: part.num_bytes for name, part in parts.items()}
    assert sizes["weights"] == item * model.num_parameters
    assert "the reference model too" in parts["weights"].how
    assert not {"reference model", "weights in bfloat16"} & sizes.keys()
    masters = 4 if kind == "torch" else item
    assert (sizes["adapters"], sizes["gradients"]) == (masters * num, 4 * num)
    assert sizes["optimizer"] == (8 if kind == "torch" or item == 4 else 12) * num
    other = trainer_memory(run(kind, 1, **sections | {"algo": {"kl_coef": 0.1, "ref_path": "other"}}), model, 1)
    assert "reference model" in {part.name for part in other}


@pytest.mark.parametrize(("shape", "dtype"), [("0.6B", "float32"), ("8B", "bfloat16")])
def test_a_critic_is_a_second_model_that_is_trained(shape: str, dtype: str) -> None:
    """What the plan says is what the memory manager is told. It has no vocabulary head, but that of its values."""
    model = SHAPES[shape]
    head = 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size
    critic = model.num_parameters - head + model.hidden_size + 1
    parts = {}
    for is_there in (False, True):
        config = run("torch", 1, algo={"kind": "ppo"}, critic={"enabled": is_there}, trainer={"dtype": dtype})
        parts[is_there] = {part.name: part.num_bytes for part in trainer_memory(config, model, 1)}
    assert parts[True] == {**parts[False], "critic": 16 * critic}
    told = planned_by_torch(model.num_parameters + critic, num_reference=0)
    lasting = ("weights", "gradients", "optimizer", "critic")
    assert sum(size for size, _ in told.values()) == sum(parts[True][name] for name in lasting)


@pytest.mark.parametrize("kind", ["torch", "megatron"])
def test_a_reference_model_that_is_served_elsewhere_takes_no_room(kind: str) -> None:
    plain, model = run(kind, 1), SHAPES["0.6B"]

    def names(**algo: Any) -> set[str]:
        config = plain.model_copy(update={"algo": plain.algo.model_copy(update={"kl_coef": 0.1, **algo})})
        return {part.name for part in trainer_memory(config, model, 1)}

    assert names() - names(ref_urls=("http://teacher:30000",)) == {"reference model"}


def test_the_chunk_of_logits_is_the_trainers() -> None:
    assert vocab_scores.CHUNK_LOGITS["cuda"] == CHUNK_LOGITS
    assert vocab_scores.KEPT_LOGITS == KEPT_LOGITS


@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"pp": 4}, {"tp": 2, "pp": 2}, {"pp": 3}])
def test_ranks_hold_the_whole_model(layout: dict[str, int]) -> None:
    """The first stage is the fullest, so all of them together hold at least the model, and not twice as much."""
    model = SHAPES["1.7B"]
    dense, expert = rank_parameters(model, cut := ParallelLayout(tp=layout.get("tp", 1), pp=layout.get("pp", 1)))
    assert expert == 0
    assert 1.0 <= dense * cut.tp * cut.pp / model.num_parameters < 1.6


def test_experts_are_cut_by_expert_parallelism() -> None:
    more = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 768, "model_type": "qwen3_moe"}
    model = qwen3(1024, 8, 16, 3072, **more)
    dense, expert = rank_parameters(model, ParallelLayout())
    assert (dense + expert, expert) == (model.num_parameters, 8 * 16 * 3 * 1024 * 768)
    assert rank_parameters(model, ParallelLayout(ep=4)) == (dense, expert // 4)


def test_stages_that_were_placed_by_hand_are_counted_as_they_are() -> None:
    model, plain = SHAPES["0.6B"], {"pp": 4, "recompute": "full"}
    layers = [math.prod(shape) for name, shape in model.tensor_shapes().items() if name.startswith("model.layers.0.")]

    def sizes(**placed: Any) -> dict[str, int]:
        config = run("megatron", 4, megatron={**plain, "model": placed})
        return {part.name: part.num_bytes for part in trainer_memory(config, model, 4)}

    even, light = sizes(), sizes(num_layers_in_first_pipeline_stage=4, num_layers_in_last_pipeline_stage=4)
    assert even["gradients"] - light["gradients"] == 4 * 3 * sum(layers), "the last stage has embedding and norm"
    text = "E" + "t" * 25 + "|t|t|tL"
    heavy = sizes(pipeline_model_parallel_layout=text)
    assert heavy["gradients"] - even["gradients"] == 4 * (18 * sum(layers) - model.hidden_size), "no final norm there"
    assert heavy["activations"] > 3 * even["activations"]


def test_glm_4_5_air_at_its_true_size() -> None:
    model = parse_model_config(GLM45_AIR, "GLM-4.5-Air")
    assert model.num_parameters == 106_852_251_264
    expert = 3 * 4096 * 1408
    idle = 45 * (128 - 8) * expert
    assert (model.num_parameters - idle) / 1e9 == pytest.approx(12, rel=0.2)
    assert rank_parameters(model, ParallelLayout())[1] == 45 * 128 * expert
    cut = {"tp": 4, "pp": 2, "ep": 8, "sequence_parallel": True}
    dense, experts = rank_parameters(model, ParallelLayout(**cut))
    assert experts == 23 * 128 * expert // 8, "of the second stage: the first layer of the first one has no experts"
    config = run("megatron", 32, megatron={**cut, "recompute": "full"})
    sizes = {part.name: part.num_bytes for part in trainer_memory(config, model, 32)}
    assert sizes["gradients"] == 4 * (dense + experts)
    assert sizes["optimizer"] == pytest.approx(12 * (dense / 4 + experts / 2), rel=1e-6)
    assert layer_numbers(model, "megatron", ParallelLayout()) > 3 * 9 * 1408


def test_deepseek_v3_at_its_true_size() -> None:
    """Worked by hand from the shapes: 64 nodes of 8 ranks, TP8 PP16 EP32, engines that hold FP8."""
    model = parse_model_config(DEEPSEEK_V3, "DeepSeek-V3")
    expert, routers = 3 * 7168 * 2048, 256 * 7168
    attention = 7168 * (1536 + 576) + 1536 * 128 * 192 + 512 * 128 * 256 + 7168 * 128 * 128
    norms = 2 * 7168 + 1536 + 512
    moe_layer = attention // 8 + expert // 8 + routers + 256 + norms  # the shared expert is as large as another
    cut = {"tp": 8, "pp": 16, "ep": 32, "sequence_parallel": True}
    assert rank_parameters(model, ParallelLayout(**cut)) == (4 * moe_layer, 4 * 256 * expert // 32)
    gang = {"kind": "megatron", "count": 8, "devices": "0-7", "nodes": list(range(64))}
    config = run("megatron", 8, megatron={**cut, "recompute": "full"}, roles={"trainer": gang})
    sizes = {part.name: part.num_bytes for part in trainer_memory(config, model, 512)}
    assert sizes["gradients"] == 4 * 4 * (moe_layer + 8 * expert)
    assert sizes["optimizer"] == pytest.approx(12 * 4 * (moe_layer / 4 + 8 * expert), rel=1e-6)
    kept = 2 * (1536 + 512) + 4 * 128 * 192 + 128 * 128 + 3 * 9 * 2048 + 8 * 7168
    assert layer_numbers(model, "megatron", ParallelLayout(**cut)) == (kept + 4 * 7168) / 8
    server = {part.name: part for part in server_memory(config, model, 8, 141 * 10**9)}
    assert server["weights"].num_bytes == model.num_parameters // 8 and server["weights"].how.startswith("fp8 1 B")
    assert token_bytes(model, "bfloat16", 8) == 61 * 576 * 2


def test_parallelism_and_recomputation_make_it_less() -> None:
    model = SHAPES["1.7B"]
    whole = total(trainer_memory(run("megatron", 4), model, 4))
    for settings in ({"tp": 4, "sequence_parallel": True}, {"tp": 2}, {"cp": 2}, {"recompute": "full"}):
        assert total(trainer_memory(run("megatron", 4, megatron=settings), model, 4)) < whole, settings
    config = run("torch", 4, trainer={"strategy": "fsdp"})
    assert total(trainer_memory(config, model, 4)) < total(trainer_memory(run("torch", 4), model, 4))
    split, uncut = ParallelLayout(tp=2, sequence_parallel=True), ParallelLayout()
    assert layer_numbers(model, "megatron", split) == layer_numbers(model, "megatron", uncut) / 2


def test_a_servers_cache() -> None:
    """0.6B: 28 layers x 8 heads x 128 x 2 (key, value) x 2 bytes = 114,688 bytes a token."""
    model = SHAPES["0.6B"]
    assert token_bytes(model, "bfloat16") == 114_688
    assert token_bytes(model, "bfloat16", num_gpus=4) == 114_688 // 4
    roles = {"trainer": {"devices": "0"}, "rollout": {"kind": "sglang", "devices": "1"}}
    config = run("torch", 1, roles=roles, sglang={"mem_fraction_static": 0.5})
    (cache,) = [part for part in server_memory(config, model, 1, 80 * GIB) if part.name == "kv cache"]
    assert cache.num_bytes == 40 * GIB - 2 * model.num_parameters


SHARED = {
    "roles": {
        "trainer": {"kind": "megatron", "devices": "0", "count": 1}, "rollout": {"kind": "sglang", "devices": "0"}
    },
    "sglang": {"mem_fraction_static": 0.85},
}  # fmt: skip
TURNS = {**SHARED, "memory": {"share": "switch", "workspace_mb": 40_000}}


def estimate(
    config: RunConfig, model: ModelConfig, gib: float = 0.0
) -> tuple[tuple[DeviceLoad, ...], tuple[Finding, ...]]:
    known: dict[Any, object] = {model_of: model}
    run = CheckedRun(config, place(config, 1), is_here=False, device_bytes=int(gib * GIB) or None, known=known)
    found, findings = memory(run)
    assert found is not None
    return found, findings


def loads(config: RunConfig, model: ModelConfig, gib: float) -> tuple[dict[str, bool], list[str]]:
    found, findings = estimate(config, model, gib)
    return {load.phase: load.fits for load in found}, [finding.key for finding in findings]


def test_both_at_once_do_not_fit_where_turns_do() -> None:
    at_once = run("megatron", 1, **SHARED)
    assert loads(at_once, SHAPES["0.6B"], 80) == ({"all the time": False}, ["sglang.mem_fraction_static"])
    in_turns = run("megatron", 1, **TURNS)
    fits, findings = loads(in_turns, SHAPES["0.6B"], 80)
    assert fits == {"trainer's turn": True, "hand-over": True, "engine's turn": True, "trainer is away": True}
    assert list(findings) == []


def test_host_memory_holds_what_left_the_gpus_of_all_ranks() -> None:
    """14 bytes a parameter, as memory.host_pool_gb says: parameters, masters, moments."""
    roles = {
        "trainer": {"kind": "megatron", "devices": "0,1", "count": 2},
        "rollout": {"kind": "sglang", "devices": "0,1"},
    }
    config = run("megatron", 2, **{**TURNS, "roles": roles}, megatron={"tp": 2})
    (host,) = [load for load in estimate(config, SHAPES["1.7B"], 139)[0] if "host memory" in load.devices]
    assert host.num_bytes == pytest.approx(14 * SHAPES["1.7B"].num_parameters, rel=0.12)


def test_what_does_not_fit_names_the_key_to_turn() -> None:
    fits, findings = loads(run("megatron", 1, **TURNS), SHAPES["1.7B"], 60)
    assert not fits["trainer's turn"]
    assert fits["hand-over"]
    assert "trainer.max_tokens_per_microbatch" in findings
    small = run("megatron", 1, trainer={"max_tokens_per_microbatch": 1024})
    assert loads(small, SHAPES["8B"], 80) == ({"all the time": False}, ["roles.trainer.devices"])


def test_without_a_size_nothing_is_said_to_fit_or_not() -> None:
    config = run("megatron", 1, **SHARED)
    found, findings = estimate(config, SHAPES["0.6B"])
    assert [load.capacity_bytes for load in found] == [None]
    assert list(findings) == []


def unfit(config: RunConfig, model: ModelConfig) -> list[Finding]:
    return list(fit(CheckedRun(config, place(config, 1), is_here=False, known={model_of: model})))


ADAPTER = {"lora": {"rank": 4, "target_modules": ["q_proj", "v_proj"], "rollout": "adapter"}}


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"weights": {"served_folder": "nowhere"}}, "weights.served_folder: "),
        ({"sglang": {"quantization": "fp8"}}, "sglang.quantization = fp8: SGLang quantises the folder once"),
        ({"sglang": {"quantization": "fp8", "load_format": "flash_rl"}}, ""),
        (
            {"engine": {"groups": {"a": {"sglang": {"quantization": "fp8"}}}}},
            "engine.groups.a.sglang.quantization = fp8",
        ),
        (ADAPTER, ""),
    ],
)
def test_servers_that_cannot_take_new_weights_as_they_were_started_are_refused(
    sections: dict[str, Any], says: str
) -> None:
    config = run("megatron", 1, **{key: value for key, value in SHARED.items() if key != "sglang"}, **sections)
    found = [str(one.error) for one in unfit(config, SHAPES["0.6B"])]
    assert [says in text for text in found] == ([True] if says else [])


def test_adapters_on_fp8_servers_and_a_served_folder_that_is_not_there_are_refused(tmp_path: Path) -> None:
    model = parse_model_config(MOONLIGHT | {"quantization_config": FP8}, "Moonlight")
    found = [str(one.error) for one in unfit(run("megatron", 1, **SHARED, **ADAPTER), model)]
    assert any("adapters on servers that hold FP8 (m) were not tried" in text for text in found)
    attached = {"roles": SHARED["roles"], "engine": {"attach": ["http://127.0.0.1:30000"]}}
    config = run("megatron", 1, **attached, weights={"served_folder": str(tmp_path / "none")})
    (said,) = [str(one.error) for one in unfit(config, SHAPES["0.6B"])]
    assert "holds no config.json" in said


def test_engines_that_hold_fp8_get_their_weights_between_devices_only(tmp_path: Path) -> None:
    model = parse_model_config(DEEPSEEK_V3, "DeepSeek-V3")

    def refused(**weights: str) -> list[str]:
        attached: dict[str, Any] = {"engine": {"attach": ["http://127.0.0.1:30000"]}, "roles": SHARED["roles"]}
        config = run("megatron", 1, **(attached if "served_folder" in weights else SHARED), weights=weights)
        return [str(one.error) for one in unfit(config, model) if one.key == "weights.channel"]

    (said,) = refused(channel="disk")
    assert 'weights.channel = "disk"' in said and '"cuda_ipc"' in said
    assert not refused(channel="cuda_ipc") and not refused(channel="disk", served_folder="bf16")
    blocks: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    for more, disk, between in (({}, 1, 0), ({"scale_fmt": "ue8m0"}, 1, 0), ({"scale_fmt": "ue4m3"}, 1, 1)):
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": blocks | more}))
        assert len(refused(channel="disk", served_folder=str(tmp_path))) == disk
        assert len(found := refused(channel="cuda_ipc", served_folder=str(tmp_path))) == between
        assert not found or "'ue4m3' - at `$.scale_fmt`" in found[0]


@pytest.mark.parametrize("channel", ["cuda_ipc", "disk"])
def test_servers_of_fp8_by_channel_are_refused_before_the_start(channel: str) -> None:
    """Such weights are read, but SGLang takes none later."""
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": "channel"}
    said = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"a": {"weights": weights}},
    }
    model = parse_model_config(MOONLIGHT | {"quantization_config": said}, "Moonlight")
    attached: dict[str, Any] = {"engine": {"attach": ["http://127.0.0.1:30000"]}, "roles": SHARED["roles"]}
    config = run("megatron", 1, **attached, weights={"channel": channel})
    (found,) = [str(one.error) for one in unfit(config, model) if one.key == "weights.channel"]
    assert "m: its FP8 weights have one scale for each channel" in found and "weights.served_folder" in found
    served = run("megatron", 1, **attached, weights={"channel": channel, "served_folder": "bf16"})
    assert not [one for one in unfit(served, model) if one.key == "weights.channel" and "scale" in str(one.error)]


def test_what_rebuilt_versions_take_is_told() -> None:
    def taken(**weights: Any) -> dict[str, tuple[str, int]]:
        config = run("megatron", 1, **SHARED, weights=weights)
        model = SHAPES["0.6B"]
        loads, _ = memory(CheckedRun(config, place(config, 1), is_here=False, known={model_of: model}))
        return {one.devices: (one.phase, one.num_bytes) for one in loads if "host" in one.devices}

    whole = 2 * SHAPES["0.6B"].num_parameters
    host = "host of each rollout actor"
    assert taken(channel="disk") == {} == taken(channel="cuda_ipc")
    assert taken(channel="tcp") == {host: ("disk of TMPDIR", 2 * whole)}
    for channel, num in (("disk", 1), ("tcp", 2)):
        expected = {"host of trainer/0": ("memory", whole), host: ("disk of TMPDIR", num * whole)}
        assert taken(channel=channel, full_every=4) == expected


APART = {"roles": {"trainer": {"devices": "0"}, "rollout": {"kind": "sglang", "devices": "1"}}}
ON_CPU = {"roles": {"rollout": {"kind": "embedded"}}}


@pytest.mark.parametrize(
    ("sections", "weights", "says"),
    [
        (APART, {"channel": "tcp"}, "= 30: a version of 61 GB takes about 61 s by tcp at 1 GB/s"),
        (APART, {"channel": "disk"}, "61 s by disk"),
        (APART, {"channel": "disk", "transfer_s": 62}, ""),
        (APART, {"channel": "nccl"}, ""),
        (APART, {"channel": "nccl", "transfer_s": 5}, "= 5: a version of 61 GB takes about 6 s by nccl at 10 GB/s"),
        (ON_CPU, {"channel": "tcp"}, "61 s by tcp"),
        (ON_CPU, {"channel": "disk"}, ""),
        (APART | {"lora": {"rank": 4, "rollout": "adapter"}}, {"channel": "disk"}, ""),
        (APART | {"algo": {"kind": "sft"}, "data": {"answer_key": "a"}}, {"channel": "disk"}, ""),
    ],
)
def test_a_version_that_cannot_arrive_in_time_is_told(
    sections: dict[str, Any], weights: dict[str, Any], says: str
) -> None:
    """The 30B of Qwen3-MoE in bfloat16: 61 GB."""
    config = run("torch", 1, **sections, weights=weights)
    checked = CheckedRun(config, place(config, 1), is_here=False, known={model_of: QWEN3_30B})
    found = [str(one.error) for one in slow_transfer(checked)]
    assert [says in text for text in found] == ([True] if says else [])
    assert all("-- set it to " in text for text in found)
