"""Low-rank adapters: what is trained and what stays, the same on any number of ranks; folders, checkpoints,
refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from tests.backends.gang_rank import (
    Backends,
    close,
    make_backend,
    make_shards,
    own_scores,
    same,
    save,
    scored,
    weights_of,
    with_scores,
)
from tests.backends.test_model import judged
from tests.backends.test_ranks import TIMES

from myxa.actors.backends.convert import convert
from myxa.actors.models.tiny import make_tiny_model
from myxa.actors.weights.channels.host import DiskWeightWriter, check_adapter
from myxa.core.config import load_config
from myxa.core.config.learning import LoraConfig
from myxa.core.errors import ConfigError, ModelError, MyxaError, TrainError
from myxa.launch.cli import main

Gang = tuple[Path, list[dict[str, Any]]]
LORA = {"rank": 4, "alpha": 8}
ALGO = {"kind": "grpo", "batch_size": 6, "minibatches": 2, "kl_coef": 0.1}
FAST = {"lr": 1e-2}
NUM_MATRICES, NUM_WEIGHTS = 14, 24
"""Of the tests' model: two layers of seven."""


def trained(backends: Backends, steps: int = 2, **options: Any) -> Any:
    backend = backends(**{"lora": LORA, "algo": ALGO, "optimizer": FAST, **options})
    for _ in range(steps):
        backend.train(make_shards(51, minibatches=2)[0], {})
    return backend


@pytest.mark.parametrize("impl", ["own", "hf"])
def test_only_adapters_are_trained_and_the_model_without_them_is_the_reference(
    backends: Backends, model: Path, impl: str
) -> None:
    backend = trained(backends, 0, trainer={"impl": impl})
    start, (shard,) = weights_of(backend), make_shards(51, minibatches=2)
    assert same(start, load_file(model / "model.safetensors")), "adapters begin as nothing"
    first, second = (backend.train(shard, {}).metrics for _ in range(2))
    assert first["train/kl"] < second["train/kl"], "the reference stays where the policy began"
    after = weights_of(backend)
    moved = {name for name in start if not np.array_equal(start[name], after[name])}
    assert len(moved) == NUM_MATRICES
    assert all(name.endswith("_proj.weight") for name in moved)
    policy = backend._parts.stepper.policy
    assert {name.rpartition(".")[2] for name in policy.optimizer.moments} == {"lora_A", "lora_B"}
    alone = backends(algo=ALGO, trainer={"impl": impl})
    right = scored(alone, shard.samples)
    reference = backend._parts.stepper.reference.model
    layouts = policy.layouts(shard.samples, [[i] for i in range(len(shard.samples))])
    for sample, scores, found in zip(shard.samples, right, reference.score(layouts), strict=True):
        np.testing.assert_allclose(found.logprobs_M.numpy(), scores[sample.loss_mask != 0], rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft's use of transformers
@pytest.mark.parametrize("impl", ["own", "hf"])
def test_peft_reads_what_is_exported_and_computes_the_same(
    backends: Backends, model: Path, tmp_path: Path, impl: str
) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    backend = trained(backends, trainer={"impl": impl})
    backend.export_hf(str(tmp_path / "adapter"))
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    judge = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    (shard,) = make_shards(52)
    for sample, scores in zip(shard.samples, scored(backend, shard.samples), strict=True):
        with torch.no_grad():
            logprobs, _ = judged(judge, sample, 1.0)
        np.testing.assert_allclose(scores[sample.loss_mask == 1], logprobs.numpy(), rtol=0, atol=1e-5)
    merged = judge.merge_and_unload().state_dict()
    close(weights_of(backend), {name: merged[name].numpy() for name in weights_of(backend)}, 1e-6)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft's use of transformers
def test_engines_can_get_the_adapters_alone_in_folders_that_peft_reads(
    backends: Backends, model: Path, tmp_path: Path
) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    backend = trained(backends, lora={**LORA, "rollout": "adapter"})
    arrays = backend.export_weights()
    assert len(arrays) == 2 * NUM_MATRICES
    manifest = DiskWeightWriter(tmp_path, model, "here", lora={"rank": 4, "alpha": 8.0}).publish(3, arrays)
    check_adapter(manifest)
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    found = peft.PeftModel.from_pretrained(base, manifest.location).merge_and_unload().state_dict()
    right = weights_of(trained(backends))
    close(right, {name: found[name].numpy() for name in right}, 1e-6)


def test_a_folder_of_pefts_is_where_training_can_start(backends: Backends, tmp_path: Path) -> None:
    backend = trained(backends)
    backend.export_hf(str(tmp_path / "a"))
    again = trained(backends, 0, lora={**LORA, "path": str(tmp_path / "a")})
    assert same(weights_of(again), weights_of(backend))
    assert again.train(make_shards(51, minibatches=2)[0], {}).metrics["train/kl"] > 1e-3, "its reference has none"


@pytest.fixture(scope="module")
def exported(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, backend = tmp_path_factory.mktemp("exported"), make_backend(model, lora=LORA)
    backend.setup()
    backend.export_hf(str(folder))
    backend.close()
    return folder


def broken(folder: Path, change: str) -> None:
    path = folder / "adapter_config.json"
    said, weights = json.loads(path.read_text()), load_file(folder / "adapter_model.safetensors")
    name = min(weights)
    if change == "missing":
        del weights[name]
    elif change == "shape":
        weights[name] = weights[name][:, :-1].copy()
    elif change == "nan":
        weights[name][0, 0] = np.nan
    elif change == "json":
        path.write_text("[")
        return
    else:
        key, value = change.split("=")
        said[key] = json.loads(value)
    path.write_text(json.dumps(said))
    save_file(weights, folder / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("r=8", "lora.rank: .* has r = 8, not 4"),
        ("lora_alpha=16", "lora.alpha: .* has lora_alpha = 16, not 8"),
        ("peft_type=\"IA3\"", "lora.path: .* has peft_type = 'IA3'"),
        ("use_dora=true", "lora.path: .* has use_dora = True, which is not computed here"),
        ("init_lora_weights=\"pissa_niter_4\"", "init_lora_weights = 'pissa_niter_4', which is not computed here"),
        ("rank_pattern={\"q_proj\": 2}", "rank_pattern = .*, which is not computed here"),
        ("layer_replication=[[1, 2], [0, 1]]", "layer_replication = .*, which is not computed here"),
        ("some_later_kind=true", "some_later_kind = True, which is not computed here"),
        ("modules_to_save=[\"lm_head\"]", "modules_to_save = .*, which is not computed here"),
        ("missing", "lora.target_modules: base_model.model.model.layers.0.mlp.down_proj.lora_A.* is absent"),
        ("shape", "is of shape .*, for this model it must be of shape "),
        ("nan", "holds NaN or infinity"),
        ("json", "cannot read .*adapter_config.json"),
    ],
)  # fmt: skip
def test_folders_that_would_compute_something_else_are_refused(
    backends: Backends, exported: Path, tmp_path: Path, change: str, said: str
) -> None:
    shutil.copytree(exported, tmp_path / "a")
    broken(tmp_path / "a", change)
    with pytest.raises((ConfigError, ModelError), match=said):
        backends(lora={**LORA, "path": str(tmp_path / "a")})


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ({"target_modules": ["q_prj"]}, 'lora.target_modules: "q_prj" is no matrix .* did you mean "q_proj"'),
        ({"target_modules": ["embed_tokens"]}, '"embed_tokens" is no matrix of the model'),
        ({"target_modules": ["input_layernorm"]}, '"input_layernorm" is no matrix of the model'),
        ({"rank": 100_000}, r"lora\.rank = 100000: model\.layers\.0\..* has (\d+) rows .* -- set it to at most \1$"),
    ],
)
def test_targets_that_are_no_matrices_are_refused(backends: Backends, lora: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        backends(lora={**LORA, **lora})


def test_some_matrices_alone_are_chosen_by_the_ends_of_their_names(backends: Backends) -> None:
    backend = trained(backends, 1, lora={**LORA, "target_modules": ["q_proj", "v_proj"]})
    assert {name.split(".")[-2] for name in backend._parts.stepper.policy.optimizer.moments} == {"q_proj", "v_proj"}


def test_checkpoints_hold_adapters_alone_and_convert_to_both_kinds_of_folders(
    backends: Backends, model: Path, tmp_path: Path
) -> None:
    backend = trained(backends)
    place = tmp_path / "version_00000002"
    save(backend, str(place), {"version": 2})
    held = {name.partition("/")[2].rpartition(".")[2] for name in load_file(place / "rank-00000.safetensors")}
    assert held == {"lora_A", "lora_B", "cpu"}
    saved = weights_of(backend)
    backend.train(make_shards(52, minibatches=2)[0], {})
    on = weights_of(backend)
    assert backend.load(str(place)) == {"version": 2}
    assert same(weights_of(backend), saved)
    backend.train(make_shards(52, minibatches=2)[0], {})
    assert same(weights_of(backend), on), "moments came back too"
    backend.load(str(place))
    backend.export_hf(str(tmp_path / "export"))
    assert convert(place, model, tmp_path / "merged")["num_tensors"] == NUM_WEIGHTS
    assert same(load_file(tmp_path / "merged" / "model.safetensors"), saved)
    assert convert(place, model, tmp_path / "adapter", adapter=True)["num_tensors"] == 2 * NUM_MATRICES
    one, other = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("export", "adapter"))
    assert same(one, other)


def test_a_checkpoint_is_nothing_without_the_weights_and_the_kind_of_adapter_that_it_was_made_for(
    backends: Backends, model: Path, tmp_path: Path
) -> None:
    place = str(tmp_path / "version_00000001")
    save(trained(backends, 1), place, {"version": 1})
    other = tmp_path / "other"
    make_tiny_model(other, "0p5m", seed=4, vocab_size=262)
    for options, said in (
        ({"lora": {**LORA, "rank": 8}}, "has adapters of rank 4, this run has adapters of rank 8"),
        ({"lora": {**LORA, "target_modules": ["q_proj"]}}, "has adapters of targets"),
        ({"lora": {}}, "has adapters of rank 4, this run has no adapters"),
        ({"lora": LORA, "folder": other}, "has adapters of base .*, this run has adapters of base "),
    ):
        with pytest.raises(TrainError, match=said):
            backends(**options).load(place)
    with pytest.raises(TrainError, match="has adapters of base .*, this run has adapters of base "):
        convert(place, other, tmp_path / "out")
    full = str(tmp_path / "version_00000002")
    save(backends(), full, {"version": 2})
    with pytest.raises(TrainError, match="has no adapters, this run has adapters of rank 4"):
        backends(lora=LORA).load(full)
    wrong = tmp_path / "wrong"
    shutil.copytree(place, wrong)
    told = json.loads((wrong / "manifest.json").read_text())
    (wrong / "manifest.json").write_text(json.dumps({**told, "lora": {**told["lora"], "rank": 0}}))
    with pytest.raises(TrainError, match="names no adapters that can be"):
        convert(wrong, model, tmp_path / "out")
    assert main(["convert", str(model), str(tmp_path / "out"), "--dtype", "fp8", "--adapter"]) == 2
    with pytest.raises(TrainError, match="has no adapters: it holds all weights"):
        convert(full, model, tmp_path / "out", adapter=True)


def test_a_merged_export_is_a_model(backends: Backends, tmp_path: Path) -> None:
    backend = trained(backends, lora={**LORA, "export": "merged"})
    backend.export_hf(str(tmp_path / "hf"))
    assert same(load_file(tmp_path / "hf" / "model.safetensors"), weights_of(backend))
    assert same(weights_of(backends(folder=tmp_path / "hf")), weights_of(backend))


@pytest.mark.parametrize("trainer", [{"impl": "own"}, {"impl": "hf"}, {"impl": "hf", "dtype": "bfloat16"}])
def test_scores_are_those_of_the_training_pass_to_the_bit(backends: Backends, trainer: dict[str, Any]) -> None:
    backend = trained(backends, trainer=trainer)
    (shard,) = make_shards(53, minibatches=2)
    mine = with_scores(shard, own_scores(backend, shard))
    assert backend.train(mine, {}).metrics["train/logprob_diff_abs_max"] == 0.0


def test_in_half_precision_what_stays_has_no_masters(backends: Backends) -> None:
    backend = trained(backends, trainer={"dtype": "bfloat16"})
    kinds = {(p.requires_grad, p.dtype) for p in backend._parts.stepper.policy.module.parameters()}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}


def test_a_knob_cannot_make_the_policy_the_reference(backends: Backends) -> None:
    backend = trained(backends, 0)
    assert "keeps no reference model of its own" in backend.judge_knobs({"ref_update_every": 3})
    with pytest.raises(MyxaError, match="keeps no reference model of its own"):
        backend.train(make_shards(51, minibatches=2)[0], {"ref_update_every": 3})


def test_a_frozen_critic_is_not_meant_a_critic_is_trained_whole(backends: Backends) -> None:
    backend = backends(lora=LORA, algo={**ALGO, "kind": "ppo"}, critic={"enabled": True}, optimizer=FAST)
    state: Any = backend._parts and backend._parts.state
    critic = state.critic.model
    before = {name: p.detach().clone() for name, p in critic.parameters()}
    backend.train(make_shards(51, kind="ppo", minibatches=2)[0], {})
    assert all(not torch.equal(before[name], p) for name, p in critic.parameters() if "embed" not in name)


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def gangs(request: pytest.FixtureRequest, run_gang: Callable[..., Gang]) -> tuple[Gang, Gang]:
    return (run_gang(1, request.param, ALGO, None, LORA), run_gang(2, request.param, ALGO, None, LORA))


def test_ranks_train_what_one_process_trains_and_go_on_to_the_bit(gangs: tuple[Gang, Gang]) -> None:
    (place, (alone,)), (there, ranks) = gangs
    for step, expected in enumerate(alone["metrics"]):
        for result in ranks:
            for name, value in expected.items():
                if name not in TIMES:
                    assert result["metrics"][step][name] == pytest.approx(value, rel=1e-4, abs=1e-5), (step, name)

    def load(folder: Path, name: str) -> dict[str, np.ndarray]:
        with np.load(folder / f"{name}.npz") as file:
            return dict(file)

    one, many = load(place, "weights"), load(there, "weights")
    close(many, one, 1e-5)
    assert max(np.abs(one[name] - load(place, "weights_on")[name]).max() for name in one) > 1e-4
    assert same(load(there, "weights_back"), many)
    assert same(load(there, "weights_again"), load(there, "weights_on"))
    assert (
        load_file(there / "hf" / "adapter_model.safetensors").keys()
        == load_file(place / "hf" / "adapter_model.safetensors").keys()
    )
    expected = {name: float(value.astype(np.float64).sum()) for name, value in many.items()}
    assert ranks[1]["sent_to_all"] == pytest.approx(expected, abs=1e-6)


def test_a_checkpoint_of_two_ranks_restores_on_one(gangs: tuple[Gang, Gang], backends: Backends) -> None:
    backend = backends(lora=LORA)
    backend.load(str(gangs[1][0] / "checkpoints" / "two"))
    with np.load(gangs[1][0] / "weights.npz") as file:
        assert same(weights_of(backend), dict(file))


@pytest.mark.parametrize("said", ['"all-linear"', '["all-linear"]'])
def test_all_linear_may_be_said_as_peft_says_it(said: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f'[model]\npath = "m"\n[data]\ntrain = "d"\n[lora]\nrank = 4\ntarget_modules = {said}\n')
    assert load_config(file).lora == LoraConfig(rank=4)
