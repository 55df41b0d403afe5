"""What a trainer on GPUs of a deterministic run sets before CUDA starts; a program for the tests, one case a rank.

python kernels_rank.py RUN_FILE CASES.json RANK
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from megatron_steps import sibling


def preload() -> None:
    """What all ranks import."""
    sibling("megatron_on_cpu").install()
    import myxa.actors.backends.megatron.backend
    import myxa.launch.composition.trainer_parts
    import myxa.launch.supervisor.placement

    del myxa


def main() -> None:
    warnings.filterwarnings("ignore")
    import torch

    from myxa.actors.backends.torch_backend.world import Gang
    from myxa.core.clock import SystemClock
    from myxa.core.config import load_config
    from myxa.core.errors import LaunchError
    from myxa.launch.composition.trainer_parts import make_backend
    from myxa.launch.supervisor.placement import place

    case = json.loads(Path(sys.argv[2]).read_text())[int(sys.argv[3])]
    config = load_config([sys.argv[1]], case["sets"])
    spec = next(actor for actor in place(config, 1) if actor.name == "trainer/0")
    backend: Any = make_backend(spec, config, Gang(), SystemClock())
    settings = backend._config
    found = [
        torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled(),
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        os.environ.get("NCCL_ALGO"),
        getattr(settings, "megatron", None) and settings.megatron.model.get("deterministic_mode"),
    ]
    refusal = ""
    if case.get("begins"):
        from myxa.actors.backends.megatron import world

        def without_cuda(seed: int) -> None:
            raise AssertionError("Torch not compiled with CUDA enabled")

        world.tensor_parallel.model_parallel_cuda_manual_seed = without_cuda
        try:
            backend.setup()
        except LaunchError as error:
            refusal = str(error)
    print(json.dumps({"found": found, "refusal": refusal}))


if __name__ == "__main__":
    main()
