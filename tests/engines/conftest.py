"""Tiny models, cores of the embedded engine, and a judge (transformers' full forward)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.engines.contract import VOCAB, Result
from tests.engines.contract_subjects import Scores

from myxa.actors.engines.embedded.core import EmbeddedOptions, EngineCore
from myxa.actors.engines.embedded.model import DecoderWeights
from myxa.actors.models.hf_folder import open_weights, read_config, read_eos_token_ids, write_folder
from myxa.actors.models.model_config import parse_model_config
from myxa.actors.models.tiny import init_weights, make_tiny_model, named_array, tiny_config, write_tokenizer
from myxa.core.errors import EngineError
from myxa.core.protocols import Delta, GenerateRequest

CONTEXT = 128
ARCHITECTURES = {
    "qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
}  # fmt: skip
ROPE: dict[str, dict[str, Any]] = {
    "": {"rope_type": "default"},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "linear": {"rope_type": "linear", "factor": 2.0},
}  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def quiet_torch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One thread, and a place for the folder that torch's compiler makes when transformers imports it."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three weight versions of one model: 0.46M parameters, 2 layers, a context of 128 tokens."""
    made = [tmp_path_factory.mktemp(f"version{seed}") for seed in range(3)]
    for seed, folder in enumerate(made):
        make_tiny_model(folder, "0p5m", seed=seed, vocab_size=VOCAB, context_length=CONTEXT)
    return made


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders of the other dense families, with grouped queries and random biases; "qwen2+yarn": with that RoPE."""

    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        kind, _, rope = name.partition("+")
        source = dict(tiny_config("0p5m", VOCAB, CONTEXT).source) | {
            "model_type": kind, "architectures": [ARCHITECTURES[kind]], "num_attention_heads": 4, "hidden_size": 256,
            "tie_word_embeddings": kind != "llama", "rope_theta": 5000.0,
            "rope_parameters": {"rope_theta": 5000.0} | ROPE[rope],
        }  # fmt: skip
        config = parse_model_config(source, kind)
        rng = np.random.default_rng(1)
        tensors = [
            named_array(t.spec.name, rng.normal(size=t.spec.shape).astype(np.float32) * 0.5)
            if t.spec.name.endswith(("bias", "q_norm.weight", "k_norm.weight"))
            else t
            for t in init_weights(config, 4)
        ]
        write_folder(folder, source, tensors)
        write_tokenizer(folder, config)
        return folder

    return make


@pytest.fixture(scope="session")
def load() -> Callable[..., DecoderWeights]:
    def weights(folder: Path, dtype: str = "float32") -> DecoderWeights:
        config = read_config(folder)
        made = DecoderWeights(config, getattr(torch, dtype))
        with open_weights(folder, config) as tensors:
            made.load(tensors, str(folder))
        return made

    return weights


@pytest.fixture(scope="session")
def make_core(load: Callable[..., DecoderWeights]) -> Callable[..., EngineCore]:
    def core(folder: Path, num_slots: int = 16, dtype: str = "float32", **options: Any) -> EngineCore:
        facts = {
            name: options.pop(name, value)
            for name, value in (("eos_token_ids", frozenset(read_eos_token_ids(folder))), ("decode", lambda ids: ""))
        }
        return EngineCore(
            read_config(folder), load(folder, dtype), EmbeddedOptions(**options), num_slots=num_slots,
            context_length=CONTEXT, **facts,
        )  # fmt: skip

    return core


@pytest.fixture(scope="session")
def run_core() -> Callable[..., dict[str, Result]]:
    """Submit all, step until nothing is left (calling `before_step(number)`), return the results by id."""

    def run(
        core: EngineCore, requests: list[GenerateRequest], before_step: Callable[[int], None] | None = None
    ) -> dict[str, Result]:
        deltas: dict[object, list[Delta]] = {r.request_id: [] for r in requests}
        for request in requests:
            core.submit(request, request.request_id)
        for number in range(5000):
            if before_step is not None:
                before_step(number)
            core.step()
            for event in core.take_events():
                if isinstance(event.news, EngineError):
                    raise event.news
                deltas.setdefault(event.owner, []).append(event.news)
            if not core.has_work and not core.is_paused:
                return {str(name): Result(found) for name, found in deltas.items()}
        raise AssertionError("the core does not come to an end")

    return run


@pytest.fixture(scope="session")
def judge(folders: list[Path]) -> Scores:
    """Of a folder: what transformers' full forward says. It is imported here, before deadlines of tests begin."""
    made = Scores()
    made(folders[0])
    return made
