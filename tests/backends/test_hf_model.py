"""Families that transformers computes (`trainer.impl = "hf"`): scores, steps, folders; what own code refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.backends.gang_rank import Backends, close, make_shards, same, save, scored, weights_of
from tests.backends.test_model import judged

from myxa.actors.backends.convert import convert
from myxa.actors.backends.torch_backend.backend import TorchBackend
from myxa.actors.engines.embedded.engine import EmbeddedEngine
from myxa.actors.models.hf_folder import read_config
from myxa.actors.models.tiny import tiny_config, write_tokenizer
from myxa.core.errors import ConfigError, ModelError, TrainError
from myxa.core.samples import TrainSample

HF = {"impl": "hf"}
SIZES: dict[str, Any] = {
    "vocab_size": 262, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 257,
}  # fmt: skip
FAMILIES: dict[str, Callable[[], Any]] = {
    "gemma": lambda: transformers.GemmaConfig(**SIZES, head_dim=8),
    "gemma2": lambda: transformers.Gemma2Config(**SIZES, head_dim=8, sliding_window=4, final_logit_softcapping=3.0),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=4, attention_dropout=0.5),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16
    ),
    "glm4_moe": lambda: transformers.Glm4MoeConfig(
        **SIZES, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **SIZES | {"num_key_value_heads": 4},
        n_routed_experts=8,
        num_experts_per_tok=4,
        moe_intermediate_size=16,
        q_lora_rank=24,
        kv_lora_rank=20,
        qk_nope_head_dim=6,
        qk_rope_head_dim=4,
        v_head_dim=5,
        n_group=4,
        topk_group=2,
        n_shared_experts=1,
        first_k_dense_replace=1,
        rms_norm_eps=1e-2,
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=262, n_positions=256, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=257
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A small random model of a family, written by transformers itself, with a tokenizer."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            folder = made[family] = tmp_path_factory.mktemp(family)
            torch.manual_seed(6)
            model: Any = transformers.AutoModelForCausalLM.from_config(FAMILIES[family]())
            with torch.no_grad():
                for parameter in (*model.parameters(), *corrections(model)):
                    parameter.add_(torch.randn_like(parameter) * 0.1)
            model.save_pretrained(folder)
            write_tokenizer(folder, tiny_config("0p5m", 262, 256))
        return made[family]

    return make


def corrections(model: Any) -> Iterator[torch.Tensor]:
    """Of its routers."""
    return (buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias"))


def check_scores(judge: Any, backend: TorchBackend, samples: Sequence[TrainSample]) -> None:
    """They are those of transformers for one sequence without padding."""
    for sample, scores in zip(samples, scored(backend, samples), strict=True):
        with torch.no_grad():
            logprobs, _ = judged(judge, sample, 1.0)
        np.testing.assert_allclose(scores[sample.loss_mask == 1], logprobs.numpy(), rtol=0, atol=2e-5)


ALIKE = [family for family in FAMILIES if family != "deepseek_v3"]


@pytest.mark.parametrize(("family", "recomputes"), [*((family, False) for family in ALIKE), ("mistral", True)])
def test_a_family_is_scored_trained_and_written_as_transformers_does_it(
    backends: Backends,
    folders: Callable[[str], Path],
    tmp_path: Path,
    family: str,
    recomputes: bool,
) -> None:
    (shard,) = make_shards(31)
    trainer = {**HF, "activation_checkpointing": recomputes}
    backend = backends(folder=folders(family), trainer=trainer, optimizer={"lr": 1e-2})
    judge = transformers.AutoModelForCausalLM.from_pretrained(folders(family), dtype=torch.float32).eval()
    check_scores(judge, backend, shard.samples)
    before = weights_of(backend)
    metrics = backend.train(shard, {}).metrics
    assert metrics["train/grad_norm"] > 0
    after = weights_of(backend)
    assert not same(before, after)
    assert before.keys() == after.keys() == read_config(folders(family)).tensor_shapes().keys()
    backend.export_hf(str(tmp_path / "out"))
    again = backends(folder=tmp_path / "out", trainer=trainer)
    for one, other in zip(scored(backend, shard.samples), scored(again, shard.samples), strict=True):
        np.testing.assert_array_equal(one, other)
    judge = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    check_scores(judge, backend, shard.samples)


def test_norms_of_latents_have_the_epsilon_that_engines_give_them(
    backends: Backends, folders: Callable[[str], Path]
) -> None:
    """SGLang reads it from the folder; transformers always takes 1e-6."""
    (shard,) = make_shards(31)
    backend = backends(folder=folders("deepseek_v3"), trainer=HF)
    judge = transformers.AutoModelForCausalLM.from_pretrained(folders("deepseek_v3"), dtype=torch.float32).eval()
    with pytest.raises(AssertionError):
        check_scores(judge, backend, shard.samples)
    for layer in judge.model.layers:
        for norm in (layer.self_attn.q_a_layernorm, layer.self_attn.kv_a_layernorm):
            norm.variance_epsilon = 1e-2
    check_scores(judge, backend, shard.samples)


def test_the_correction_of_a_router_leaves_as_float32(
    backends: Backends, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """It can be large beside its differences, by which experts are chosen."""
    from safetensors.torch import load_file

    backend = backends(folder=folders("glm4_moe"), trainer={**HF, "export_dtype": "bfloat16"})
    backend.export_hf(str(tmp_path / "out"))
    read, written = (load_file(folder / "model.safetensors") for folder in (folders("glm4_moe"), tmp_path / "out"))
    kept = [name for name, tensor in written.items() if tensor.dtype == torch.float32]
    assert kept == ["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert torch.equal(written[kept[0]], read[kept[0]])


@pytest.mark.parametrize("export_dtype", ["model", "bfloat16"])
def test_what_a_folder_holds_in_float32_beside_others_leaves_so(
    backends: Backends, folders: Callable[[str], Path], tmp_path: Path, export_dtype: str
) -> None:
    """Decay rates of states, corrections under other names: engines hold them in float32 too."""
    from safetensors.torch import load_file, save_file

    name, folder = "model.layers.1.input_layernorm.weight", tmp_path / "mixed"
    shutil.copytree(folders("gemma"), folder)
    read = {key: tensor.bfloat16() for key, tensor in load_file(folder / "model.safetensors").items()}
    read[name] = torch.full((32,), 1.0 + 2.0**-20)
    save_file(read, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    backend = backends(folder=folder, trainer={**HF, "dtype": "bfloat16", "export_dtype": export_dtype})
    backend.export_hf(str(tmp_path / "out"))
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == read.keys() and all(torch.equal(written[key], tensor) for key, tensor in read.items())
    assert dict(backend.export_device())[name].dtype == torch.float32
    save(backend, str(tmp_path / "checkpoint"), {"version": 1})
    convert(tmp_path / "checkpoint", folder, tmp_path / "converted", dtype="bfloat16")
    assert load_file(tmp_path / "converted" / "model.safetensors")[name].dtype == torch.float32
    assert json.loads((tmp_path / "converted" / "config.json").read_text())["dtype"] == "bfloat16"


def test_both_implementations_of_a_family_take_the_same_step(backends: Backends, tmp_path: Path) -> None:
    shards = [make_shards(seed, temperatures=(1.0, 0.7))[0] for seed in (41, 42)]
    algo = {"kl_coef": 0.1, "entropy_coef": 0.01, "minibatches": 2, "batch_size": 6}
    optimizer = {"lr": 1e-3, "eps": 1e-4}
    own, other = (backends(algo=algo, trainer={"impl": impl}, optimizer=optimizer) for impl in ("own", "hf"))
    for shard in shards:
        metrics = [backend.train(shard, {}).metrics for backend in (own, other)]
        for name in ("train/loss", "train/entropy", "train/kl", "train/grad_norm", "train/logprob_diff_abs"):
            assert metrics[1][name] == pytest.approx(metrics[0][name], rel=1e-3, abs=1e-5), name
    ours, theirs = weights_of(own), weights_of(other)
    assert list(ours) == list(theirs)
    close(ours, theirs, 2e-5)
    save(other, str(tmp_path / "kept"), {"version": 2})
    other.train(shards[0], {})
    other.load(str(tmp_path / "kept"))
    back = weights_of(other)
    assert same(back, theirs)


async def test_own_code_says_what_it_does_not_compute(
    backends: Backends, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    for family, cause in (("gemma", "model_type 'gemma'"), ("gpt2", "model_type 'gpt2'")):
        with pytest.raises(ModelError, match=cause) as caught:
            backends(folder=folders(family))
        assert 'trainer.impl = "hf"' in caught.value.remedy
        with pytest.raises(ModelError, match=f"embedded engine.*{cause}"):
            await EmbeddedEngine(folders(family)).start()
    for family in ("glm4_moe", "qwen2_moe"):  # the Megatron trainer has code of its own for these
        with pytest.raises(ModelError, match=f"the torch trainer does not run models of type {family}") as caught:
            backends(folder=folders(family))
        assert all(word in caught.value.remedy for word in ("Megatron", 'trainer.impl = "hf"', "SGLang"))
        with pytest.raises(ModelError, match=f"embedded engine.* does not run models of type {family}"):
            await EmbeddedEngine(folders(family)).start()
    shutil.copytree(folders("gemma"), tmp_path / "own_code")
    path = tmp_path / "own_code" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": {"AutoModelForCausalLM": "own.Own"}}))
    with pytest.raises(ModelError, match="auto_map names code of the folder's own"):
        backends(folder=tmp_path / "own_code", trainer=HF)


@pytest.mark.parametrize(
    ("spoil", "cause"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "1 weights are missing, model.norm.weight among them"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.ones(7)}), "1 weights are mismatched"),
    ],
)
def test_a_folder_whose_weights_do_not_fit_is_refused(
    backends: Backends, folders: Callable[[str], Path], tmp_path: Path, spoil: Callable[[Any], Any], cause: str
) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(folders("mistral"), tmp_path / "spoilt")
    path = tmp_path / "spoilt" / "model.safetensors"
    tensors = load_file(path)
    spoil(tensors)
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises((ModelError, TrainError), match=cause):
        backends(folder=tmp_path / "spoilt", trainer=HF)


def test_a_critic_needs_our_own_code() -> None:
    from myxa.core.config import RunConfig

    tables = {"model": {"path": "m"}, "data": {"train": "t"}, "trainer": HF}
    with pytest.raises((ConfigError, ValueError), match="does not go with critic.enabled"):
        RunConfig.model_validate({**tables, "algo": {"kind": "ppo"}, "critic": {"enabled": True}})
