"""Engines the contract is asked of: in process, behind our HTTP, behind recorded answers; and the models they serve."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.engines.contract import CONTEXT, MAX_RUNNING, SCENARIOS, VOCAB, Scenario, Scoring, Subject
from tests.engines.recording import Places, read_recording
from tests.engines.replay import replaying
from tests.harness.engine_server import serve

from myxa.actors.engines.embedded.engine import EmbeddedEngine, EmbeddedOptions
from myxa.actors.engines.sglang.engine import SglangEngine, SglangOptions
from myxa.actors.models.hf_folder import open_weights, read_config
from myxa.actors.models.tiny import make_tiny_model
from myxa.actors.weights.channels.host import DiskWeightWriter
from myxa.core.messages import WeightManifest

RECORDINGS = Path(__file__).parent / "recordings"
OPTIONS = EmbeddedOptions(max_running=MAX_RUNNING, stream_interval=4, seed=5)
END_IDS = (257, 319)
CLIENT = SglangOptions(vocab_size=VOCAB, start_s=20, call_s=30, stall_s=100, end_token_ids=END_IDS)
"""`stall_s`: the first repetition penalty of a server's life has it compile something, and everybody waits."""
EXACT = 1e-5
"""Tolerance of the embedded engine."""
RUNS_S = 0.03


def make_versions(root: Path) -> list[Path]:
    """Three weight versions of one model: 0.46M parameters, 2 layers. The same on every machine.

    As published models do, they have a second end token, and generation settings that no engine may take by itself."""
    made: list[Path] = []
    for seed in range(3):
        folder = root / f"model{seed}"
        make_tiny_model(folder, "0p5m", seed=seed, vocab_size=VOCAB, context_length=CONTEXT)
        path = folder / "generation_config.json"
        settings = json.loads(path.read_text())
        settings |= {"eos_token_id": list(END_IDS), "repetition_penalty": 1.3, "top_p": 0.5}
        path.write_text(json.dumps(settings))
        made.append(folder)
    return made


def digest_of(versions: Sequence[Path]) -> str:
    """Tells whether recordings were made with these models."""
    digest = hashlib.blake2b(digest_size=16)
    for folder in versions:
        digest.update((folder / "model.safetensors").read_bytes())
    return digest.hexdigest()


class Score:
    """transformers' full forward of one folder: no cache, no batching, no padding."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def logits(self, prompt: Any, output: Any) -> np.ndarray:
        ids = torch.tensor(np.concatenate([prompt, output]).astype(np.int64))[None]
        return self._model(ids).logits[0, len(prompt) - 1 : -1].numpy()

    def logprobs(self, prompt: Any, output: Any, temperature: float) -> np.ndarray:
        logits = torch.tensor(self.logits(prompt, output)) / (temperature or 1.0)
        chosen = torch.tensor(np.asarray(output).astype(np.int64))
        return logits.log_softmax(-1).gather(1, chosen[:, None])[:, 0].numpy()


class Scores:
    """One `Score` per folder."""

    def __init__(self) -> None:
        self._made: dict[Path, Score] = {}

    def __call__(self, folder: Path) -> Scoring:
        if folder not in self._made:
            self._made[folder] = Score(folder)
        return self._made[folder]


def publisher(root: Path, versions: Sequence[Path]) -> Callable[[int, Path], WeightManifest]:
    """Publishes folders as versions on the disk channel."""
    writer = DiskWeightWriter(root, versions[0], "here")

    def publish(version: int, folder: Path) -> WeightManifest:
        with open_weights(folder, read_config(folder)) as tensors:
            return writer.publish(version, list(tensors.values()))

    return publish


def kinds() -> list[str]:
    """Every engine that can be asked on any machine."""
    return ["embedded", "http", *sorted(path.parent.name for path in RECORDINGS.glob("*/about.json"))]


def about_of(kind: str) -> Mapping[str, Any]:
    """What a recorded server was, and which scenarios it could not serve; nothing for an engine that runs."""
    path = RECORDINGS / kind / "about.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"left_out": {}}


@asynccontextmanager
async def running(
    kind: str, scenario: str, versions: Sequence[Path], weights: Path, scores: Scores
) -> AsyncIterator[Subject]:
    """A subject of that kind, for one scenario; everything is closed at the end."""
    publish = publisher(weights, versions)
    if kind == "embedded":
        engine = EmbeddedEngine(versions[0], OPTIONS)
        await engine.start()
        try:
            yield Subject(engine, versions, publish, scores, EXACT, tells_spans=True, runs_s=RUNS_S)
        finally:
            await engine.close()
    elif kind == "http":
        async with serve(versions[0], options=OPTIONS, is_incremental=True) as served, client_of(served.url) as engine:
            yield Subject(engine, versions, publish, scores, EXACT, tells_spans=True, runs_s=RUNS_S)
    else:
        about = about_of(kind)
        assert about["models"] == digest_of(versions), f"{kind} was recorded with other models: record it again"
        recording = read_recording(RECORDINGS / kind / f"{scenario}.jsonl")
        places = Places({"models": versions[0].parent, "weights": weights})
        async with replaying(recording, places) as url, client_of(url) as engine:
            tolerance, tells_spans, penalties = about["tolerance"], about["tells_spans"], about["penalties"]
            yield Subject(engine, versions, publish, scores, tolerance, tells_spans, penalties, RUNS_S)


@asynccontextmanager
async def client_of(url: str) -> AsyncIterator[SglangEngine]:
    engine = SglangEngine(url, CLIENT)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def all_scenarios() -> dict[str, Scenario]:
    """Name -> scenario, in the order in which they are written."""
    from tests.engines import contract_requests, contract_sampling, contract_weights

    assert contract_requests and contract_sampling and contract_weights
    return dict(SCENARIOS)
