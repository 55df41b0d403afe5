"""Tiny models, cores and a judge (transformers' full forward) for the engine's tests."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from myxa.actors.engines.embedded.core import CoreOptions, EngineCore
from myxa.actors.engines.embedded.weights import DTYPES, DecoderWeights
from myxa.actors.models.hf_folder import open_weights, read_config, read_eos_token_ids, write_folder
from myxa.actors.models.model_config import parse_model_config
from myxa.actors.models.tiny import init_weights, make_tiny_model, named_array, tiny_config, write_tokenizer
from myxa.core.errors import EngineError
from myxa.core.messages import SamplingParams
from myxa.core.protocols import Delta, GenerateRequest

CONTEXT = 128
STRETCHES: dict[str, dict[str, Any]] = {
    "": {"rope_type": "default"},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "linear": {"rope_type": "linear", "factor": 2.0},
}
VOCAB = 320


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
    made: list[Path] = []
    for seed in range(3):
        folder = tmp_path_factory.mktemp(f"version{seed}")
        make_tiny_model(folder, "0p5m", seed=seed, vocab_size=VOCAB, context_length=CONTEXT)
        made.append(folder)
    return made


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders of the other dense families, with grouped queries and random biases."""

    def make(kind: str) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        kind, _, stretch = kind.partition("+")
        names = {"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}
        source = dict(tiny_config("0p5m", VOCAB, CONTEXT).source) | {
            "model_type": kind,
            "architectures": [names[kind]],
            "num_attention_heads": 4,
            "hidden_size": 256,
            "tie_word_embeddings": kind != "llama",
            "rope_theta": 5000.0,
            "rope_parameters": {"rope_theta": 5000.0} | STRETCHES[stretch],
        }
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
        made = DecoderWeights(config, DTYPES[dtype])
        with open_weights(folder, config) as tensors:
            made.load(tensors, str(folder))
        return made

    return weights


@pytest.fixture(scope="session")
def make_core(load: Callable[..., DecoderWeights]) -> Callable[..., EngineCore]:
    def core(folder: Path, num_slots: int = 16, dtype: str = "float32", **options: Any) -> EngineCore:
        return EngineCore(
            read_config(folder),
            load(folder, dtype),
            CoreOptions(
                num_slots=num_slots,
                context_length=options.pop("context_length", CONTEXT),
                eos_token_ids=frozenset(read_eos_token_ids(folder)),
                **options,
            ),
        )

    return core


@pytest.fixture(scope="session")
def ask() -> Callable[..., GenerateRequest]:
    """A request; `prompt` is its ids, or how many random ones."""

    def request(name: str, prompt: Any = 8, **sampling: Any) -> GenerateRequest:
        if isinstance(prompt, int):
            prompt = np.random.default_rng(zlib.crc32(name.encode())).integers(0, 256, prompt)
        return GenerateRequest(
            request_id=name, input_ids=np.asarray(prompt, dtype=np.int32), sampling=SamplingParams(**sampling)
        )

    return request


class Result:
    """All deltas of one request, joined."""

    def __init__(self, deltas: list[Delta]) -> None:
        self.deltas = deltas
        self.ids = np.concatenate([d.output_ids for d in deltas])
        self.logprobs = np.concatenate([d.logprobs for d in deltas])
        self.versions = np.concatenate([d.versions for d in deltas])
        self.finish = deltas[-1].finish
        self.matched = deltas[-1].matched
        self.matched_text = deltas[-1].matched_text
        assert [d.finish for d in deltas[:-1]] == [None] * (len(deltas) - 1)
        assert self.ids.dtype == self.versions.dtype == np.int32
        assert self.logprobs.dtype == np.float32
        assert len(self.ids) == len(self.logprobs) == len(self.versions)


@pytest.fixture(scope="session")
def result() -> type[Result]:
    return Result


@pytest.fixture(scope="session")
def run_core() -> Callable[..., dict[str, Result]]:
    """Submit all, step until nothing is left (calling `before_step(number)`), return the results by id."""

    def run(
        core: EngineCore, requests: list[GenerateRequest], before_step: Callable[[int], None] | None = None
    ) -> dict[str, Result]:
        deltas: dict[object, list[Delta]] = {r.request_id: [] for r in requests}
        for request in requests:
            core.submit(request, request.request_id)
        number = 0
        while True:
            if before_step is not None:
                before_step(number)
            core.step()
            for event in core.take_events():
                if isinstance(event.news, EngineError):
                    raise event.news
                deltas[event.owner].append(event.news)
            number += 1
            if not core.has_work and not core.is_paused:
                break
            assert number < 5000, "the core does not come to an end"
        return {str(name): Result(found) for name, found in deltas.items()}

    return run


class Judge:
    """transformers' full forward of one folder: no cache, no batching, no padding."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def logits(self, prompt: Any, output: Any) -> torch.Tensor:
        """[R, vocabulary]: what each output token was drawn from."""
        ids = torch.tensor(np.concatenate([prompt, output]).astype(np.int64))[None]
        return self.model(ids).logits[0, len(prompt) - 1 : -1]

    def logprobs(self, prompt: Any, output: Any, temperature: float) -> np.ndarray:
        scaled = self.logits(prompt, output) / (temperature or 1.0)
        index = torch.tensor(np.asarray(output).astype(np.int64))[:, None]
        return scaled.log_softmax(-1).gather(1, index)[:, 0].numpy()


@pytest.fixture(scope="session")
def judge() -> Callable[[Path], Judge]:
    judges: dict[Path, Judge] = {}

    def get(folder: Path) -> Judge:
        if folder not in judges:
            judges[folder] = Judge(folder)
        return judges[folder]

    return get
