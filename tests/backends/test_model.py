"""The model against transformers, and against itself in every other arrangement of the same samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.backends.gang_rank import make_backend, make_shards, token_ids

from myxa.actors.backends.torch_backend.critic import ValueModel
from myxa.actors.backends.torch_backend.layout import plan_layout
from myxa.actors.backends.torch_backend.model import CausalLM, load_weights
from myxa.actors.backends.torch_backend.parallel import TorchModel
from myxa.actors.backends.torch_backend.world import World
from myxa.actors.models.hf_folder import read_config
from myxa.core.config import OptimizerConfig
from myxa.core.errors import ModelError
from myxa.core.samples import TrainSample

SHARING = 1e6
ALONE = 0.0

SIZES: dict[str, Any] = {
    "vocab_size": 262, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip


def save_foreign(kind: str, folder: Path) -> Path:
    """A small random model of another family, written by transformers itself."""
    torch.manual_seed(5)
    if kind == "qwen2":
        config: Any = transformers.Qwen2Config(**SIZES, tie_word_embeddings=False)
    elif kind == "llama":
        rope = {"rope_type": "default", "rope_theta": 5000.0}
        config = transformers.LlamaConfig(**SIZES, head_dim=16, tie_word_embeddings=True, rope_parameters=rope)
    elif kind == "mistral":
        config = transformers.MistralConfig(**SIZES, head_dim=16, sliding_window=None)
    else:
        config = transformers.Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=False)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)  # biases and norms start at 0 and 1, which tests nothing
    model.save_pretrained(folder)
    return folder


STRETCHES: dict[str, dict[str, Any]] = {
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 8.0},
    "linear": {"factor": 4.0},
}


@pytest.mark.parametrize("kind", list(STRETCHES))
def test_g_stretched_rotary_positions_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """Llama 3.1's, YaRN's and linear; without them these log-probs are off by more than 0.01."""
    torch.manual_seed(6)
    rope = {"rope_type": kind, "rope_theta": 5000.0} | STRETCHES[kind]
    written = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SIZES, rope_parameters=rope))
    with torch.no_grad():
        for parameter in written.parameters():
            parameter.mul_(4.0)  # attention that is not uniform
    written.save_pretrained(tmp_path)
    samples = make_shards(4)[0].samples
    layout = plan_layout(samples, range(len(samples)), linear_cost=ALONE)
    found = load(tmp_path)(layout, True).logprobs_M
    wanted = torch.cat([judged(written.eval(), samples[i], samples[i].temperature)[0] for i in layout.members])
    assert torch.allclose(found, wanted, atol=2e-5)


@pytest.mark.parametrize("kind", ["mistral", "qwen2"])
def test_a_window_changes_nothing_for_samples_within_it_and_longer_ones_are_not_trained(kind: str, tmp_path: Path):
    (shard,) = make_shards(4)
    longest = max(len(one.prompt_ids) + len(one.response_ids) for one in shard.samples)
    layout = plan_layout(shard.samples, range(len(shard.samples)), linear_cost=ALONE)
    for window in (longest, longest // 2):
        torch.manual_seed(6)
        more: Any = {"use_sliding_window": True, "max_window_layers": 1} if kind == "qwen2" else {"head_dim": 16}
        made: Any = {"mistral": transformers.MistralConfig, "qwen2": transformers.Qwen2Config}[kind]
        written = transformers.AutoModelForCausalLM.from_config(made(**SIZES, **more, sliding_window=window))
        with torch.no_grad():
            for parameter in written.parameters():
                parameter.mul_(4.0)
        written.save_pretrained(folder := tmp_path / str(window))
        found = load(folder)(layout, True).logprobs_M
        samples = [shard.samples[i] for i in layout.members]
        wanted = torch.cat([judged(written.eval(), one, one.temperature)[0] for one in samples])
        assert torch.allclose(found, wanted, atol=2e-5) is (window == longest)
    backend = make_backend(tmp_path / str(longest // 2))
    try:
        backend.setup()
        with pytest.raises(ModelError, match=f"sliding window.* {longest // 2} tokens, .* have {longest}"):
            backend.train(shard, {})
    finally:
        backend.close()


@pytest.fixture(scope="module", params=["tiny", "qwen3", "qwen2", "llama", "mistral"])
def folder(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model if request.param == "tiny" else save_foreign(request.param, tmp_path_factory.mktemp(request.param))


def load(folder: Path, **options: Any) -> CausalLM:
    config = read_config(folder)
    module = CausalLM(config, **options)
    load_weights(module, str(folder), config)
    return module


def judged(judge: Any, sample: TrainSample, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of a sample's loss tokens by transformers, one sequence, no packing."""
    ids = torch.from_numpy(token_ids(sample).astype(np.int64))[None]
    table = (judge(ids).logits[0].float() / temperature).log_softmax(-1)
    places = torch.from_numpy(len(sample.prompt_ids) + np.flatnonzero(sample.loss_mask))
    rows = table[places - 1]
    return rows.gather(-1, ids[0, places][:, None]).squeeze(-1), -(rows.exp() * rows).sum(-1)


@pytest.mark.parametrize(
    ("temperatures", "linear_cost", "packs_rows"),
    [((0.6,), SHARING, False), ((1.0, 0.6, 1.4), ALONE, False), ((1.0,), 30.0, True), ((1.0,), ALONE, True)],
)
def test_logprobs_entropies_and_gradients_equal_those_of_transformers(
    folder: Path,
    linear_cost: float,
    packs_rows: bool,
    temperatures: tuple[float, ...],
) -> None:
    samples = make_shards(21, temperatures=temperatures)[0].samples
    layout = plan_layout(samples, range(len(samples)), linear_cost=linear_cost, packs_rows=packs_rows)
    assert any(block.packed is not None for block in layout.blocks) == packs_rows
    assert isinstance(layout.temperature, float) == (len(temperatures) == 1), "one temperature costs no tensor"
    module = load(folder)
    scores = module(layout, True)
    judge = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    judge.train()
    expected = [judged(judge, samples[i], samples[i].temperature) for i in layout.members]
    logprobs, entropy = (torch.cat(parts) for parts in zip(*expected, strict=True))
    assert (scores.logprobs_M - logprobs).abs().max() < 1e-5
    assert (scores.entropy_M - entropy).abs().max() < 1e-5
    weight = torch.linspace(-1, 1, len(logprobs))
    (scores.logprobs_M @ weight + scores.entropy_M.sum()).backward()
    (logprobs @ weight + entropy.sum()).backward()
    theirs: dict[str, Any] = dict(judge.named_parameters())
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        assert theirs[name].grad is not None
        scale = theirs[name].grad.abs().max()
        assert (parameter.grad - theirs[name].grad).abs().max() <= 1e-5 * scale + 1e-6, name


@pytest.mark.parametrize("linear_cost", [SHARING, ALONE])
def test_activations_made_again_give_the_same_gradient(model: Path, linear_cost: float) -> None:
    samples = make_shards(24)[0].samples
    layout = plan_layout(samples, range(len(samples)), linear_cost=linear_cost)
    gradients = []
    for recomputes in (False, True):
        module = load(model, recomputes=recomputes)
        module(layout).logprobs_M.sum().backward()
        gradients.append({n: p.grad for n, p in module.named_parameters()})
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name


def test_bfloat16_stays_near_float32_and_keeps_float32_masters(model: Path) -> None:
    samples = make_shards(26)[0].samples
    layout = plan_layout(samples, range(len(samples)), linear_cost=SHARING)
    exact, coarse = load(model)(layout), load(model, dtype=torch.bfloat16)
    scores = coarse(layout)
    assert scores.logprobs_M.dtype == torch.float32
    assert 0 < (scores.logprobs_M - exact.logprobs_M).abs().max() < 0.3
    scores.logprobs_M.sum().backward()
    assert all(p.dtype == torch.float32 and p.grad is not None and p.grad.dtype == torch.float32
               for p in coarse.parameters())  # fmt: skip


@pytest.mark.parametrize("is_critic", [False, True], ids=["policy", "critic"])
def test_warming_up_covers_both_layouts_and_changes_nothing(model: Path, is_critic: bool) -> None:
    module = ValueModel(read_config(model)) if is_critic else load(model)
    for weight in module.parameters() if is_critic else ():
        torch.nn.init.constant_(weight, 0.01)
    trained = TorchModel(
        module, World(0, 1, torch.device("cpu"), None), "ddp", vocab_size=260, linear_cost=SHARING, packs_rows=True
    )
    trained.make_optimizer(OptimizerConfig(), None)
    before = {name: weight.clone() for name, weight in module.state_dict().items()}
    seen: list[tuple[bool, int]] = []
    module.register_forward_pre_hook(lambda _, args: seen.append((args[0].is_in_order, args[0].num_tokens)))
    trained.warm_up(num_tokens=1000)
    assert {is_in_order for is_in_order, _ in seen} == {True, False}
    assert all(700 < num_tokens <= 1000 for _, num_tokens in seen)
    assert all(torch.equal(weight, before[name]) for name, weight in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters())
    assert trained.optimizer.num_updates == 0
