"""Trainers on GPUs of a deterministic run: set before CUDA starts, so it can be seen without one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from myxa.actors.models.tiny import make_tiny_model

PROGRAM = """
import json, os, sys
from myxa.actors.backends.torch_backend.world import Gang
from myxa.core.clock import SystemClock
from myxa.core.config import load_config
from myxa.launch.composition.trainer_parts import make_backend
from myxa.launch.supervisor.placement import place

config = load_config([sys.argv[1]], sys.argv[2:])
spec = next(actor for actor in place(config, 1) if actor.name == "trainer/0")
backend = make_backend(spec, config, Gang(), SystemClock())
import torch
settings = backend._config
print(json.dumps([
    torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled(),
    os.environ.get("CUBLAS_WORKSPACE_CONFIG"), os.environ.get("NCCL_ALGO"),
    getattr(settings, "megatron", None) and settings.megatron.model.get("deterministic_mode"),
]))
"""


@pytest.mark.parametrize("kind", ["torch", "megatron"])
@pytest.mark.parametrize(("is_deterministic", "device"), [(True, "0"), (False, "0"), (True, "cpu")])
def test_c_kernels_of_a_deterministic_run(tmp_path: Path, kind: str, is_deterministic: bool, device: str) -> None:
    if kind == "megatron":
        pytest.importorskip("megatron.core")
    make_tiny_model(tmp_path / "model", "0p5m")
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "label": "a"}\n')
    run_file = tmp_path / "run.toml"
    run_file.write_text('[model]\npath = "model"\n[data]\ntrain = "data.jsonl"\n')
    sets = [
        f"rollout.deterministic={str(is_deterministic).lower()}",
        f'roles.trainer.kind="{kind}"',
        f'roles.trainer.devices="{device}"',
    ]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(run_file), *sets], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    is_strict, cublas, nccl, mode = json.loads(done.stdout.splitlines()[-1])
    on_gpus = is_deterministic and device == "0"
    assert (is_strict, cublas, nccl) == ((True, ":4096:8", "Ring") if on_gpus else (False, None, None))
    assert mode == (True if kind == "megatron" and is_deterministic else None)
