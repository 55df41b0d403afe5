"""Model folders, batches and gangs of real processes for the tests of the trainer backend."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.backends import gang_rank
from tests.harness.commands import MEGATRON, Command
from tests.harness.ports import held_port

from myxa.actors.backends.torch_backend.backend import TorchBackend
from myxa.actors.models.tiny import make_tiny_model

PROGRAM = Path(__file__).with_name("gang_rank.py")
RANK_GANG = Path(__file__).with_name("rank_gang.py")

RANK_TIMEOUT_S = 90
LOAD_S = 30
"""Time for imports before a gang's own limit begins to count, and for its end."""


@pytest.fixture(scope="session", autouse=True)
def one_thread(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One thread, and a place for the folder that torch's compiler makes when torch.utils.checkpoint imports it."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """0.46M parameters, 2 layers, 262 tokens."""
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder, "0p5m", seed=3, vocab_size=gang_rank.VOCAB)
    return folder


@pytest.fixture
def backends(model: Path) -> Iterator[Callable[..., TorchBackend]]:
    """Makes backends of a gang of one, set up; closes them at the end."""
    made: list[TorchBackend] = []

    def make(**options: Any) -> TorchBackend:
        backend = gang_rank.make_backend(options.pop("folder", model), **options)
        backend.setup()
        made.append(backend)
        return backend

    yield make
    for backend in made:
        backend.close()


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[tuple[int, str]]]:
    """Runs one process per command to its end: [(exit status, output)]. None outlives the call."""
    scratch = tmp_path_factory.mktemp("scratch")  # Megatron imports wandb where it is installed, which leaves folders

    def run_all(commands: list[list[str]], timeout_s: float = RANK_TIMEOUT_S) -> list[tuple[int, str]]:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(scratch)}
        children = [
            subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env) for c in commands
        ]
        try:
            outputs = [child.communicate(timeout=timeout_s)[0] for child in children]
        finally:
            for child in children:
                if child.poll() is None:
                    child.kill()
                    child.communicate()
        return [(child.returncode, output) for child, output in zip(children, outputs, strict=True)]

    return run_all


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[tuple[int, str]]]:
    """Runs that many ranks of a program to their end: [(exit status, output)]. All are forked from one process, which
    has imported what they need: importing Megatron takes longer than most gangs run."""
    scratch = tmp_path_factory.mktemp("ranks")
    # Megatron imports wandb where it is installed, which leaves folders
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(scratch)}

    def run_all(
        num_ranks: int, program: Path, *arguments: str, timeout_s: float = RANK_TIMEOUT_S
    ) -> list[tuple[int, str]]:
        folder = tmp_path_factory.mktemp("gang")
        request = {
            "program": str(program), "arguments": arguments, "num_ranks": num_ranks, "limit_s": timeout_s,
            "folder": str(folder),
        }  # fmt: skip
        words = [json.dumps(request)]
        with Command(words, folder, is_merged=False, env=env, program=RANK_GANG, server=MEGATRON) as gang:
            statuses, said = gang.communicate(timeout=timeout_s + LOAD_S)
        assert gang.returncode == 0, f"{program.name} cannot be loaded:\n{said}"
        said = [(folder / f"rank{rank}.log").read_text(errors="replace") for rank in range(num_ranks)]
        return list(zip(json.loads(statuses), said, strict=True))

    return run_all


@pytest.fixture(scope="session")
def run_gang(
    model: Path, tmp_path_factory: pytest.TempPathFactory, ranks: Callable[..., list[tuple[int, str]]]
) -> Callable[..., tuple[Path, list[dict[str, Any]]]]:
    """Runs `gang_rank.run` on that many ranks; returns the output folder and each rank's result."""

    def run(
        num_ranks: int,
        strategy: str,
        algo: dict[str, Any],
        critic: dict[str, Any] | None = None,
        lora: dict[str, Any] | None = None,
    ) -> tuple[Path, list[dict[str, Any]]]:
        out = tmp_path_factory.mktemp(f"{strategy}{num_ranks}")
        spec = {
            "model": str(model),
            "out": str(out),
            "port": held_port(),
            "num_ranks": num_ranks,
            "algo": algo,
            "critic": critic,
            "lora": lora,
            "optimizer": {"lr": 1e-3, "eps": 1e-4, "weight_decay": 0.1, "schedule": "cosine", "warmup_steps": 2},
            "trainer": {"strategy": strategy, "freeze": gang_rank.FROZEN if strategy == "fsdp" and not lora else ()},
        }
        if num_ranks == 1:
            return out, [gang_rank.run(spec, 0)]
        place = out / "spec.json"
        place.write_text(json.dumps(spec))
        ended = ranks(num_ranks, PROGRAM, str(place))
        for rank, (status, output) in enumerate(ended):
            assert status == 0, f"rank {rank} ended with {status}:\n{output}"
        return out, [json.loads((out / f"rank{r}.json").read_text()) for r in range(num_ranks)]

    return run
