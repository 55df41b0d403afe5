"""The Megatron trainer trains exactly what the torch trainer trains, however it is cut: loss, metrics, gradient norm,
weights after AdamW, scores, refusals; and its checkpoints go from one layout to another to the bit."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tests.harness.ports import held_port

from myxa.actors.backends.convert import convert
from myxa.actors.backends.megatron.layout import ParallelLayout, check_routing
from myxa.actors.backends.megatron.verbatim import check_packages, check_tables
from myxa.actors.backends.rank_backend import named_array
from myxa.actors.checkpoints.folder import find_checkpoint, read_manifest
from myxa.actors.models.adapters import adapted_matrices, adapter_shapes, file_name, write_adapter
from myxa.actors.models.hf_folder import TOKENIZER_FILES, open_weights, read_config
from myxa.actors.models.tiny import make_tiny_model
from myxa.core.config import LoraConfig
from myxa.core.config.learning import MegatronSettings
from myxa.core.errors import ConfigError, TrainError

PROGRAM = Path(__file__).with_name("megatron_steps.py")
SPEC = importlib.util.spec_from_file_location("megatron_steps", PROGRAM)
assert SPEC is not None
assert SPEC.loader is not None
steps = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(steps)

GRPO = {
    "kind": "grpo", "batch_size": 6, "minibatches": 2, "entropy_coef": 0.01, "kl_coef": 0.05, "ref_update_every": 12,
}  # fmt: skip
"""The first shard's step makes version 12."""
WHITENED = {"kind": "reinforce_pp", "batch_size": 6, "minibatches": 1, "kl_coef": 0.1, "kl_in": "reward"}
PLAIN = {"kind": "gspo", "batch_size": 6, "minibatches": 1, "reduction": "rollout"}
MASKED = {
    "kind": "grpo", "batch_size": 6, "minibatches": 2, "correction": "mis", "mis_mode": "clip", "mis_normalise": True,
    "reject_low": 0.3, "reject_high": 2.0, "veto": 0.15, "opsm_delta": 1e-4,
}  # fmt: skip
DISTILLED = {**GRPO, "kl_in": "advantage", "kl_kind": "k1"}
SERVED = {**DISTILLED, "ref_urls": ["http://teacher:30000"], "ref_update_every": 0}
OWN = {**GRPO, "loss_fn": f"{Path(__file__).with_name('own_losses.py')}:clipped"}
ADAPTED = {"kind": "grpo", "batch_size": 6, "minibatches": 2, "entropy_coef": 0.01, "kl_coef": 0.05}
LORA = {"rank": 4, "alpha": 8}
QV = {**LORA, "target_modules": ["q_proj", "v_proj", "o_proj"]}
LATENT = {**LORA, "target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]}
PAIRS = {"kind": "dpo", "batch_size": 6, "minibatches": 2, "epochs": 2}
MANY = {"kind": "grpo", "batch_size": 6, "minibatches": 3}
OPTIMIZER = {"lr": 1e-3, "eps": 1e-4, "weight_decay": 0.1, "schedule": "cosine", "warmup_steps": 2}
SEEDS = (11, 12)
TEMPERATURES = {"grpo": (1.0, 0.6, 1.4)}
"""Of the groups of a batch, in turn; those of other algorithms are all drawn at 1."""
COOL = (1.0,)
VOCAB = 263
"""Odd: the table must be padded for two tensor-parallel ranks."""
TIMES = ("train/step_s", "train/tokens_per_s", "train/num_computed_tokens")
TIMEOUT_S = 150
"""Megatron-core takes 6 s of CPU to import, in every process."""
pytestmark = pytest.mark.timeout(TIMEOUT_S + 60)

ROUTED = {"is_moe": True, "watches_routing": True, "algo": MANY, "optimizer": {"lr": 0.05}}

MUON = {
    "algo": PLAIN,
    "optimizer": {"name": "muon", "lr": 0.002, "eps": 1e-4},
    "megatron": {
        "distributed_optimizer": False,
        "optimizer": {"muon_tp_mode": "duplicated", "muon_fp32_matmul_prec": "highest"},
    },
}
"""Its result does not depend on the layout if every rank makes whole matrices orthogonal."""
HAS_MUON = bool(find_spec("emerging_optimizers")) and int(version("megatron-core").split(".")[1]) >= 19

CASES: dict[int, list[dict[str, Any]]] = {
    1: [
        {"name": "alone", "loses_a_folder": True, "counts_reads": True},
        {"name": "experts", "is_moe": True, "algo": PLAIN, "save": True},
        {
            "name": "no-moments",
            "is_moe": True,
            "algo": PLAIN,
            "optimizer": {"lr": 0.01, "betas": [0.0, 0.0], "eps": 1e-12},
            "load": "experts",
        },
        {"name": "lora-experts", "is_moe": True, "algo": PLAIN, "lora": QV},
        {"name": "lora-latent", "is_latent": True, "algo": PLAIN, "lora": LATENT},
        {"name": "routed-anew", **ROUTED},
        {"name": "routing-replayed", **ROUTED, "megatron": {"routing_replay": True}},
        {"name": "muon", **MUON, "is_refused": not HAS_MUON},
        {"name": "odd-moments", "megatron": {"optimizer": {"exp_avg_dtype": "bf16"}}, "is_refused": True},
    ],
    2: [
        {"name": "dp2-whole-optimizer", "megatron": {"distributed_optimizer": False}, "algo": MASKED},
        {
            "name": "dp2-overlap",
            "megatron": {"ddp": {"overlap_grad_reduce": True, "overlap_param_gather": True}},
            "algo": DISTILLED,
            "has_reference": True,
        },
        {
            "name": "tp2-sp",
            "megatron": {"tp": 2, "sequence_parallel": True, "recompute": "full"},
            "algo": WHITENED,
            "sends": True,
        },
        {"name": "pp2", "megatron": {"pp": 2}, "algo": SERVED, "reloads": True, "sends": True},
        {"name": "pp2-vpp2", "megatron": {"pp": 2, "vpp": 2}, "is_deep": True},
        {"name": "ep2", "megatron": {"ep": 2}, "is_moe": True, "algo": PLAIN, "save": True, "sends": True},
        {"name": "lora-dp2", "algo": ADAPTED, "lora": QV, "export_hf": True},
        {
            "name": "lora-latent-tp2-sp",
            "is_latent": True,
            "megatron": {"tp": 2, "sequence_parallel": True},
            "algo": PLAIN,
            "lora": LATENT,
        },
        {"name": "lora-ep2", "megatron": {"ep": 2}, "is_moe": True, "algo": PLAIN, "lora": QV},
        {"name": "bf16", "trainer": {"dtype": "bfloat16"}, "save": True, "temperatures": COOL},
        {
            "name": "bf16-pp2",
            "trainer": {"dtype": "bfloat16"},
            "megatron": {"pp": 2},
            "load": "bf16",
            "temperatures": COOL,
        },
    ],
    4: [
        {"name": "tp2-pp2", "megatron": {"tp": 2, "pp": 2}, "save": True, "export_hf": True, "poison": True},
        {"name": "dp2-tp2", "megatron": {"tp": 2}, "load": "tp2-pp2"},
        {
            "name": "lora-tp2-pp2",
            "megatron": {"tp": 2, "pp": 2, "sequence_parallel": True, "recompute": "full"},
            "algo": ADAPTED,
            "lora": LORA,
            "save": True,
            "export_hf": True,
            "sends": True,
        },
        {"name": "lora-dp2-cp2", "megatron": {"cp": 2}, "algo": ADAPTED, "lora": LORA, "load": "lora-tp2-pp2"},
        {"name": "cp2-pp2", "megatron": {"cp": 2, "pp": 2}, "algo": OWN, "sends": True},
        {"name": "pairs-dp2-pp2", "megatron": {"pp": 2}, "algo": PAIRS, "has_reference": True},
    ],
}
if HAS_MUON:
    CASES[4] += [
        {"name": "muon-dp2-tp2", **MUON, "megatron": {**MUON["megatron"], "tp": 2}, "save": True},
        {"name": "muon-pp2", **MUON, "megatron": {**MUON["megatron"], "pp": 2}, "load": "muon-dp2-tp2"},
    ]
UNCOMPARED = {"load", "trainer", "watches_routing", "optimizer", "is_refused"}
COMPARED = [(n, c["name"]) for n, cases in CASES.items() for c in cases if not UNCOMPARED & c.keys()]

Gangs = Callable[[int], Path]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense")
    make_tiny_model(folder, "0p5m", seed=3, vocab_size=VOCAB)
    return folder


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers for two virtual stages on each of two ranks."""
    folder = tmp_path_factory.mktemp("deep")
    make_tiny_model(folder, "1m", seed=3, vocab_size=VOCAB)
    return folder


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory, dense: Path) -> Path:
    """A mixture of experts with all that GLM-4.5 has, made by HuggingFace."""
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "n_routed_experts": 4, "first_k_dense_replace": 1, "num_experts_per_tok": 2, "norm_topk_prob": True,
        "routed_scaling_factor": 1.5, "use_qk_norm": True, "attention_bias": True, "initializer_range": 0.15,
        "tie_word_embeddings": False,
    }  # fmt: skip
    torch.manual_seed(5)
    folder = tmp_path_factory.mktemp("experts")
    model: Any = transformers.Glm4MoeForCausalLM(transformers.Glm4MoeConfig(**sizes))
    torch.nn.init.normal_(model.model.layers[1].mlp.gate.e_score_correction_bias)
    model.save_pretrained(folder)
    for name in TOKENIZER_FILES:
        if (dense / name).exists():
            (folder / name).write_bytes((dense / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DeepSeek-V3 in small: latent attention, then a dense layer and one of experts."""
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 24,
        "kv_lora_rank": 20, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5, "n_routed_experts": 4,
        "first_k_dense_replace": 1, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 2, "n_shared_experts": 1,
        "initializer_range": 0.15, "tie_word_embeddings": False,
    }  # fmt: skip
    torch.manual_seed(6)
    folder = tmp_path_factory.mktemp("latent")
    transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**sizes)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of its own to keep close to."""
    folder = tmp_path_factory.mktemp("reference")
    make_tiny_model(folder, "0p5m", seed=4, vocab_size=VOCAB)
    return folder


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory, dense: Path) -> Callable[[dict[str, Any], Path], str]:
    """A folder of adapters that change something, so that both halves of each have a gradient from the start."""
    known: dict[str, str] = {}

    def make(lora: dict[str, Any], model: Path) -> str:
        place = f"{lora} of {model}"
        if place not in known:
            rng, folder = np.random.default_rng(7), tmp_path_factory.mktemp("adapter")
            matrices = adapted_matrices(LoraConfig.model_validate(lora), read_config(model).tensor_shapes())
            named = [
                named_array(file_name(name), torch.tensor(rng.normal(size=shape) * 0.1, dtype=torch.float32))
                for name, shape in adapter_shapes(lora["rank"], matrices).items()
            ]
            write_adapter(folder, str(model), lora, named)
            known[place] = str(folder)
        return known[place]

    return make


@pytest.fixture(scope="module")
def gangs(
    dense: Path,
    deep: Path,
    experts: Path,
    latent: Path,
    reference: Path,
    adapter: Callable[[dict[str, Any], Path], str],
    tmp_path_factory: pytest.TempPathFactory,
    ranks: Callable[..., list[tuple[int, str]]],
) -> Gangs:
    """The output folder of a gang of that size, which is run when it is first asked for."""
    done: dict[int, Path] = {}

    def run(num_ranks: int) -> Path:
        if num_ranks not in done:
            out = tmp_path_factory.mktemp(f"gang{num_ranks}")
            folders = {"is_moe": experts, "is_latent": latent, "is_deep": deep}
            cases: list[dict[str, Any]] = []
            for case in CASES[num_ranks]:
                model = next((folder for name, folder in folders.items() if name in case), dense)
                cases.append({**case, "port": held_port(), "seeds": SEEDS, "model": str(model)})
            for case in cases:
                if "lora" in case:
                    case["lora"] = {**case["lora"], "path": adapter(case["lora"], Path(case["model"]))}
                if case.pop("has_reference", False):
                    case["algo"] = {**case.get("algo", GRPO), "ref_path": str(reference)}
            spec = {
                "out": str(out), "num_ranks": num_ranks, "algo": GRPO, "optimizer": OPTIMIZER, "cases": cases,
                "temperatures": TEMPERATURES,
            }  # fmt: skip
            place = out / "spec.json"
            place.write_text(json.dumps(spec))
            for rank, (status, output) in enumerate(ranks(num_ranks, PROGRAM, str(place), timeout_s=TIMEOUT_S)):
                assert status == 0, f"rank {rank} ended with {status}:\n{output}"
            done[num_ranks] = out
        return done[num_ranks]

    return run


@pytest.fixture(scope="module")
def judge(dense: Path) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """What one process of the torch trainer makes of the same samples; once per algorithm."""
    gang_rank = steps.sibling("gang_rank")
    known: dict[str, dict[str, Any]] = {}

    def judged(
        algo: dict[str, Any],
        temperatures: tuple[float, ...] = (),
        lora: dict[str, Any] | None = None,
        folder: str = str(dense),
        impl: str = "own",
    ) -> dict[str, Any]:
        kind = algo["kind"]
        temperatures = temperatures or TEMPERATURES.get(kind, COOL)
        place = f"{algo} at {temperatures} by {lora} of {folder}"
        if place not in known:
            backend = gang_rank.make_backend(
                folder, algo=algo, optimizer=OPTIMIZER, lora=lora, num_steps=9, trainer={"impl": impl}
            )
            backend.setup()
            drawn: dict[str, Any] = {
                "kind": kind, "minibatches": algo["minibatches"], "temperatures": temperatures,
                "is_served": "ref_urls" in algo,
            }  # fmt: skip
            shards = [gang_rank.make_shards(s, 1, **drawn)[0] for s in SEEDS]
            scores = steps.named(shards[0], gang_rank.scored(backend, shards[0].samples))
            first = backend.train(shards[0], {}).metrics
            known[place] = {
                "scores": scores,
                "held_out": backend.train(gang_rank.held_out(shards[1]), {}).metrics if kind == "dpo" else {},
                "metrics": [first, backend.train(shards[1], gang_rank.LIVE).metrics],
                "weights": gang_rank.weights_of(backend),
            }
            backend.close()
        return known[place]

    return judged


def case_of(num_ranks: int, name: str) -> dict[str, Any]:
    return next(case for case in CASES[num_ranks] if case["name"] == name)


def results(out: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((out / name).glob("rank*.json"))]


def arrays(out: Path, name: str, what: str) -> dict[str, np.ndarray]:
    with np.load(out / name / f"{what}.npz") as file:
        return dict(file)


def expected(num_ranks: int, name: str, gangs: Gangs, judge: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """The torch trainer's numbers, by transformers' model where its own does not know the attention; for experts those
    of one Megatron rank."""
    spec = json.loads((gangs(num_ranks) / "spec.json").read_text())
    case = next(case for case in spec["cases"] if case["name"] == name)
    if case.get("is_latent"):
        return judge(case["algo"], lora=case["lora"], folder=case["model"], impl="hf")
    if not case.get("is_moe"):
        return judge(case.get("algo", spec["algo"]), lora=case.get("lora"), folder=case["model"])
    other = "lora-experts" if "lora" in case else "experts"
    (alone,) = results(gangs(1), other)
    return {**alone, "weights": arrays(gangs(1), other, "weights")}


def check_metrics(found: dict[str, float], right: dict[str, float], what: object, rel: float = 1e-4) -> None:
    assert found.keys() == right.keys()
    for name, value in right.items():
        if name not in TIMES:
            assert found[name] == pytest.approx(value, rel=rel, abs=1e-5), (what, name)


@pytest.mark.parametrize(("num_ranks", "name"), COMPARED)
def test_training_is_that_of_the_torch_trainer(
    num_ranks: int, name: str, gangs: Gangs, judge: Callable[..., dict[str, Any]]
) -> None:
    out = gangs(num_ranks)
    right = expected(num_ranks, name, gangs, judge)
    ranks = results(out, name)
    assert len(ranks) == num_ranks
    for result in ranks:
        if right.get("held_out"):
            check_metrics(result["held_out"], right["held_out"], "held out")
        for step, metrics in enumerate(right["metrics"]):
            check_metrics(result["metrics"][step], metrics, step)
            for key, value in result["metrics"][step].items():
                if not key.endswith("_s"):
                    assert value == ranks[0]["metrics"][step][key], (step, key)
    weights = arrays(out, name, "weights")
    assert weights.keys() == right["weights"].keys()
    for key, value in right["weights"].items():
        np.testing.assert_allclose(weights[key], value, rtol=0, atol=1e-5, err_msg=key)
    assert ranks[0]["metrics"][0]["train/grad_norm"] > 0.1, "a step must change something, or this proves nothing"
    together = {key: scores for result in ranks if result["is_teller"] for key, scores in result["scores"].items()}
    assert together.keys() == right["scores"].keys()
    for key, scores in right["scores"].items():
        np.testing.assert_allclose(together[key], scores, atol=2e-5, err_msg=key)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_samples_of_our_own_scores_do_not_diverge(num_ranks: int, gangs: Gangs) -> None:
    """A separate forward pass in the same layout gives the bits of the training pass. Pairs have no behaviour."""
    cases = (case for case in CASES[num_ranks] if not {"watches_routing", "is_refused"} & case.keys())
    for case in (case for case in cases if case.get("algo") is not PAIRS):
        ranks = results(gangs(num_ranks), case["name"])
        own = [result["metrics_of_own_scores"] for result in ranks]
        assert {m[f"train/logprob_diff_abs_{what}"] for m in own for what in ("max", "mean")} == {0.0}, case["name"]


def test_the_host_does_not_wait_for_numbers_of_the_device(gangs: Gangs) -> None:
    """Each wait would leave a GPU idle: one at most for the norm of all gradients, none for each micro-batch."""
    (alone,) = results(gangs(1), "alone")
    in_pass, in_norm = alone["reads"]
    assert in_pass == 0
    assert in_norm <= 2


def test_a_loss_of_the_users_that_fails_is_told_by_all_ranks_and_nobody_updates(gangs: Gangs) -> None:
    out = gangs(4)
    ranks = results(out, "cp2-pp2")
    (failure,) = {result["failure"] for result in ranks}
    assert failure.startswith("UserCodeError: step 11, mini-batch 0, rank 2: algo.loss_fn = "), "of the last stage"
    assert "raised ValueError: a log-prob below -50 at " in failure
    before, after = (arrays(out, "cp2-pp2", name) for name in ("before_failure", "after_failure"))
    assert all(np.array_equal(before[key], after[key]) for key in before)
    assert len({result["metrics_again"]["train/user/ratio"] for result in ranks}) == 1, "the gang is whole"


@pytest.mark.skipif(not HAS_MUON, reason="needs megatron-core 0.19 and emerging-optimizers 0.3 (Python 3.12)")
def test_muon_moves_a_matrix_alike_in_all_directions_in_every_layout(gangs: Gangs, dense: Path) -> None:
    """A step of Muon moves ten directions by equal lengths; AdamW takes embedding and vectors."""
    before, after = load_file(dense / "model.safetensors"), arrays(gangs(1), "muon", "weights_first")
    name = "model.layers.0.mlp.down_proj.weight"
    values = np.linalg.svd(after[name] - before[name].astype(np.float32), compute_uv=False)
    assert values[9] > 0.9 * values[0] > 0.0
    whole = arrays(gangs(1), "muon", "weights")
    for key, value in arrays(gangs(4), "muon-dp2-tp2", "weights").items():
        moved = np.linalg.norm(whole[key] - before[key].astype(np.float32))
        assert np.linalg.norm(value - whole[key]) < 0.05 * moved, key


def test_what_megatron_refuses_names_the_table_that_says_it(gangs: Gangs) -> None:
    (result,) = results(gangs(1), "odd-moments")
    assert result["refused"].startswith(
        "ConfigError: megatron-core refuses the configuration: exp_avg_dtype can only be"
    )
    assert result["refused"].endswith("mend [megatron.optimizer]")


@pytest.mark.skipif(HAS_MUON, reason="Muon is there")
def test_muon_is_refused_by_name_where_megatron_has_none(gangs: Gangs) -> None:
    (result,) = results(gangs(1), "muon")
    assert result["refused"].startswith('ConfigError: optimizer.name = "muon": ')
    assert "emerging-optimizers" in result["refused"]


SAVED = [
    ("tp2-pp2", "dp2-tp2"),
    ("lora-tp2-pp2", "lora-dp2-cp2"),
    *([("muon-dp2-tp2", "muon-pp2")] if HAS_MUON else []),
]


@pytest.mark.parametrize(("source", "target"), SAVED)
def test_checkpoints_go_from_layout_to_layout(source: str, target: str, gangs: Gangs) -> None:
    """The moments too: a step of the same samples ends in the weights of the run that went on."""
    out = gangs(4)
    saved, loaded = arrays(out, source, "weights"), arrays(out, target, "loaded")
    assert saved.keys() == loaded.keys()
    for key, value in saved.items():
        assert np.array_equal(loaded[key], value), key
    before, after = results(out, source)[0], results(out, target)[0]
    assert after["extra"] == {"version": 3}
    check_metrics(after["metrics"][0], before["metrics_after"], "first step after loading")
    went_on, resumed = arrays(out, source, "weights_after"), arrays(out, target, "weights_first")
    assert max(np.abs(went_on[key] - saved[key]).max() for key in saved) > 1e-4
    for key, value in went_on.items():
        np.testing.assert_allclose(resumed[key], value, rtol=0, atol=1e-5, err_msg=key)


def test_a_resumed_run_takes_decay_rates_from_its_own_file(gangs: Gangs) -> None:
    """Without moments AdamW moves every number that has a gradient by the learning rate, whatever the gradient."""
    before, after = (arrays(gangs(1), "no-moments", name) for name in ("loaded", "weights_first"))
    moved = np.concatenate([np.abs(after[key] - before[key]).ravel() for key in before])
    assert np.isclose(moved[moved > 0], 0.01, rtol=0.01).mean() > 0.99


def test_a_checkpoint_folder_tells_what_it_is_and_when_it_is_torn(gangs: Gangs, tmp_path: Path) -> None:
    folder = gangs(4) / "tp2-pp2" / "checkpoint"
    assert find_checkpoint(folder) == folder
    manifest = read_manifest(folder)
    assert manifest.backend == "megatron"
    assert manifest.layout["tp"] == 2
    assert manifest.extra == {"version": 3}
    assert {entry.name for entry in manifest.files} | {"manifest.json"} == {p.name for p in folder.iterdir()}
    written = {entry.name for entry in manifest.files}
    assert {f"rank-{rank:05d}.safetensors" for rank in range(4)} | {".metadata", "__3_0.distcp"} <= written
    torn = tmp_path / "torn"
    torn.mkdir()
    for path in folder.iterdir():
        (torn / path.name).write_bytes(path.read_bytes())
    shard = next(entry.name for entry in manifest.files if entry.name.endswith(".distcp"))
    (torn / shard).write_bytes((torn / shard).read_bytes()[:-1])
    with pytest.raises(TrainError, match=rf"is torn: {shard} has \d+ bytes instead of"):
        read_manifest(torn)


@pytest.mark.parametrize(("num_ranks", "name"), [(4, "tp2-pp2"), (4, "lora-tp2-pp2"), (2, "ep2")])
def test_checkpoints_of_any_layout_convert_to_a_huggingface_folder(
    num_ranks: int, name: str, gangs: Gangs, dense: Path, experts: Path, tmp_path: Path
) -> None:
    out, model = gangs(num_ranks), experts if case_of(num_ranks, name).get("is_moe") else dense
    done = convert(out / name / "checkpoint", model, tmp_path / "hf")
    assert (done["backend"], done["dtype"]) == ("megatron", "float32")
    saved, found = arrays(out, name, "weights"), load_file(tmp_path / "hf" / "model.safetensors")
    assert found.keys() == saved.keys()
    for key, value in saved.items():  # what is merged here is multiplied as a whole there, in parts on ranks
        np.testing.assert_allclose(found[key], value, rtol=0, atol=1e-6 if "lora" in name else 0, err_msg=key)
    with open_weights(tmp_path / "hf", read_config(tmp_path / "hf")):
        """Whole, and of the shapes that its config says."""


def test_a_checkpoint_that_cannot_be_written_says_so_at_the_rank_that_writes(gangs: Gangs) -> None:
    (result,) = results(gangs(1), "alone")
    assert "cannot write" in result["lost"]
    assert "check disk and rights" in result["lost"]


def test_the_torch_trainer_refuses_a_checkpoint_of_megatron(gangs: Gangs, dense: Path) -> None:
    gang_rank = steps.sibling("gang_rank")
    backend = gang_rank.make_backend(dense)
    backend.setup()
    with pytest.raises(TrainError, match="was written by the megatron trainer.*roles.trainer.kind"):
        backend.load(str(gangs(4) / "tp2-pp2" / "checkpoint"))
    backend.close()


def test_a_nan_or_an_overflow_on_one_replica_stops_all_ranks_before_the_update(gangs: Gangs) -> None:
    out = gangs(4)
    ranks = results(out, "tp2-pp2")
    (error,), (overflow,) = ({result[what] for result in ranks} for what in ("error", "overflow"))
    assert error.startswith("TrainError: step 11, mini-batch ")
    assert "the loss is not a finite number in micro-batch" in error
    assert "(groups " in error
    if " mini-batch 0:" in error:
        before, after = arrays(out, "tp2-pp2", "before_nan"), arrays(out, "tp2-pp2", "after_nan")
        assert all(np.array_equal(before[key], after[key]) for key in before)
    assert "the gradient is not a finite number in micro-batch" in overflow
    assert "of rank 2 (groups " in overflow, "the rank that holds the loss and speaks for its replica"
    assert all(np.isfinite(result["metrics_again"]["train/grad_norm"]) for result in ranks), "nothing is broken"


def test_an_exported_folder_holds_the_weights_that_were_trained(gangs: Gangs, dense: Path) -> None:
    out = gangs(4)
    written = load_file(out / "tp2-pp2" / "hf" / "model.safetensors")
    original = load_file(dense / "model.safetensors")
    assert written.keys() == original.keys()
    trained = arrays(out, "tp2-pp2", "weights_after")
    for key, value in trained.items():
        assert np.array_equal(written[key], value), key


@pytest.mark.parametrize(("num_ranks", "name", "lora"), [(2, "lora-dp2", QV), (4, "lora-tp2-pp2", LORA)])
def test_adapters_that_are_exported_are_a_folder_that_the_torch_trainer_starts_from(
    num_ranks: int, name: str, lora: dict[str, Any], gangs: Gangs, dense: Path, tmp_path: Path
) -> None:
    folder, gang_rank = gangs(num_ranks) / name, steps.sibling("gang_rank")
    told = json.loads((folder / "hf" / "adapter_config.json").read_text())
    assert (told["peft_type"], told["r"], told["lora_alpha"]) == ("LORA", 4, 8)
    backend = gang_rank.make_backend(dense, lora={**lora, "path": str(folder / "hf")})
    backend.setup()
    trained = arrays(gangs(num_ranks), name, "weights_after" if case_of(num_ranks, name).get("save") else "weights")
    gang_rank.close(gang_rank.weights_of(backend), trained, 1e-6)
    backend.close()
    if case_of(num_ranks, name).get("save"):
        done = convert(folder / "checkpoint", dense, tmp_path / "adapter", adapter=True)
        assert done["num_tensors"] == len(load_file(folder / "hf" / "adapter_model.safetensors"))
        backend = gang_rank.make_backend(dense, lora={**lora, "path": str(tmp_path / "adapter")})
        backend.setup()
        gang_rank.close(gang_rank.weights_of(backend), arrays(gangs(num_ranks), name, "weights"), 1e-6)
        backend.close()
        held = sum(path.stat().st_size for path in (folder / "checkpoint").glob("*.distcp"))
        whole = sum(path.stat().st_size for path in (gangs(num_ranks) / "tp2-pp2" / "checkpoint").glob("*.distcp"))
        assert held < whole / 4, "adapters and their moments alone"


@pytest.mark.parametrize(
    ("num_ranks", "name"), [(2, "pp2"), (2, "tp2-sp"), (4, "cp2-pp2"), (4, "lora-tp2-pp2"), (2, "ep2")]
)
def test_on_the_device_every_stage_sends_its_own_tensors_once_or_every_rank_has_all(
    num_ranks: int, name: str, gangs: Gangs
) -> None:
    out = gangs(num_ranks)
    sent = [result["on_device"] for result in results(out, name)]
    names = [key for tensors in sent for key in tensors]
    weights = arrays(out, name, "weights")
    assert sorted(names) == sorted(weights)
    whole = [result["on_all"] for result in results(out, name)]
    assert all(list(tensors) == list(whole[0]) and sorted(tensors) == sorted(weights) for tensors in whole)
    for tensors in (*sent, *whole):
        for key, total in tensors.items():
            assert total == pytest.approx(float(weights[key].astype(np.float64).sum()), rel=1e-6, abs=1e-4), key


def test_half_precision_stays_near_and_keeps_its_masters(gangs: Gangs, judge: Callable[..., dict[str, Any]]) -> None:
    out = gangs(2)
    right = judge(GRPO, COOL)
    before, after = results(out, "bf16")[0], results(out, "bf16-pp2")[0]
    for step, metrics in enumerate(right["metrics"]):
        found = before["metrics"][step]
        assert found["train/loss"] == pytest.approx(metrics["train/loss"], abs=0.02)
        assert found["train/grad_norm"] == pytest.approx(metrics["train/grad_norm"], rel=0.05)
    for key, value in arrays(out, "bf16", "weights").items():
        np.testing.assert_allclose(value, right["weights"][key], atol=0.02, err_msg=key)
        assert np.array_equal(value, arrays(out, "bf16-pp2", "loaded")[key]), key
    assert after["metrics"][0]["train/loss"] == pytest.approx(before["metrics_after"]["train/loss"], abs=0.02)


def test_replayed_routing_is_that_of_the_scoring_pass_though_the_weights_have_moved(gangs: Gangs) -> None:
    (anew,) = results(gangs(1), "routed-anew")
    (replayed,) = results(gangs(1), "routing-replayed")
    assert anew["share_routed_alike"] < 1.0, "or this proves nothing"
    assert replayed["share_routed_alike"] == 1.0


@pytest.mark.parametrize(
    ("num_experts", "table", "said"),
    [
        (0, {}, "no experts"),
        (8, {"recompute": "full"}, "megatron.recompute = "),
        (8, {"model": {"recompute_granularity": "selective"}}, "megatron.model.recompute_granularity = "),
    ],
)
def test_routing_cannot_be_replayed_everywhere(num_experts: int, table: dict[str, Any], said: str) -> None:
    check_routing(8, MegatronSettings())
    with pytest.raises(ConfigError, match=said):
        check_routing(num_experts, MegatronSettings.model_validate(table))


@pytest.mark.parametrize(
    ("table", "key", "said"),
    [
        ("ddp", "use_distributed_optimizer", "myxa decides this itself"),
        ("ddp", "bucket_siz", 'did you mean "bucket_size"'),
        ("optimizer", "clip_grad", "myxa decides this itself"),
        ("model", "moe_aux_loss_coeff", "myxa decides this itself"),
        ("model", "grad_scale_func", "myxa decides this itself"),
        ("optimizer", "timers", "myxa decides this itself"),
        ("model", "fp8", "myxa decides this itself"),
        ("model", "softmax_scale", "myxa decides this itself"),
        ("optimizer", "decoupled_lr", "myxa decides this itself"),
        ("optimizer", "log_num_zeros_in_gra", 'did you mean "log_num_zeros_in_grad"'),
        ("model", "moe_router_bias_update_rat", 'did you mean "moe_router_bias_update_rate"'),
    ],
)
def test_verbatim_names_are_checked_against_the_installed_sources(table: str, key: str, said: str) -> None:
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None
    core = next(iter(spec.submodule_search_locations or ()))
    with pytest.raises(ConfigError, match=said) as caught:
        check_tables({table: {key: 1}}, Path(core))
    assert f"megatron.{table}.{key}" in str(caught.value)
    check_tables({"ddp": {"bucket_size": 1}, "optimizer": {}, "model": {"attention_backend": "auto"}}, Path(core))


@pytest.mark.parametrize(
    ("table", "fields", "said"),
    [
        ("model", {"moe_router_fusion": True}, "megatron.model: moe_router_fusion needs transformer_engine"),
        (
            "model",
            {"recompute_modules": ["mlp", "layernorm"]},
            "megatron.model: layernorm needs transformer_engine",
        ),
        ("model", {"gradient_accumulation_fusion": True}, "needs fused_weight_gradient_mlp_cuda"),
        ("optimizer", {"use_precision_aware_optimizer": True}, "needs transformer_engine"),
        ("model", {"moe_router_fusion": False, "recompute_modules": ["mlp"]}, ""),
    ],
)
@pytest.mark.skipif(bool(find_spec("transformer_engine")), reason="Transformer Engine is there")
def test_fields_that_need_a_package_name_it(table: str, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) if said else nullcontext():
        check_packages({table: fields})


def test_replicas_of_ranks_are_numbered_as_megatron_does() -> None:
    layout = ParallelLayout(tp=2, pp=2, cp=2)
    assert [layout.dp_rank_of(rank, 16) for rank in range(16)] == [0, 0, 0, 0, 1, 1, 1, 1] * 2
    assert [ParallelLayout(ep=2).dp_rank_of(rank, 4) for rank in range(4)] == [0, 1, 2, 3]
