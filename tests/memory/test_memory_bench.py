"""The memory part of the GPU benchmark, as far as a machine without a GPU can show that it is right: its scripts know
their arguments, run to their ends in dry runs, notice wrong contents, and tell when a stage dies."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from myxa.core.config import load_config
from myxa.launch.supervisor.placement import place

ROOT = Path(__file__).resolve().parents[2]
GPU = ROOT / "bench" / "gpu"

pytestmark = pytest.mark.timeout(90)


def test_a_stage_that_dies_or_hangs_is_told_with_the_end_of_its_log(
    bench: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    stages = bench("memory_stages")
    script = tmp_path / "stage.py"
    script.write_text(
        "import sys, time\nprint('words of mine', file=sys.stderr, flush=True)\ntime.sleep(float(sys.argv[1]))\n"
    )
    with pytest.raises(stages.StageFailedError, match="ended with 0(.|\n)*words of mine"):
        stages.run_stage("dead", str(script), ["0"], log=tmp_path / "log", limit_s=20)
    started_s = time.monotonic()
    with pytest.raises(stages.StageFailedError, match="no answer within"):
        stages.run_stage("hung", str(script), ["60"], log=tmp_path / "log2", limit_s=1)
    assert time.monotonic() - started_s < 30


@pytest.mark.parametrize(
    ("device", "way", "gpus", "servers"),
    [("cuda", "ours", 1, "each"), ("cpu", "ours", 1, "each"),
     ("cuda", "ours", 2, "each"), ("cuda", "ours", 2, "one"), ("cpu", "ours", 2, "each")],
)  # fmt: skip
def test_the_colocated_runs_load_and_differ_in_the_memory_only(
    bench: Callable[[str], ModuleType], tmp_path: Path, way: str, device: str, gpus: int, servers: str
) -> None:
    colocated = bench("memory_colocated")
    bench("trial_runs").stage(tmp_path, colocated.RUN_FILE, launches=device == "cuda")
    options = argparse.Namespace(
        device=device, steps=5, overrides=[], capacity_mib=100, tokens=8192, gpus=gpus, servers=servers
    )
    config = load_config([tmp_path / colocated.RUN_FILE], colocated.sets_of(options, way, 0.9))
    assert config.memory.share == "switch"
    dealt = {actor.name: actor.devices for actor in place(config, 1) if actor.role in ("trainer", "rollout")}
    if device == "cuda":
        servers_on = {"rollout/0": (0, 1)} if servers == "one" else {f"rollout/{gpu}": (gpu,) for gpu in range(gpus)}
        assert dealt == {f"trainer/{gpu}": (gpu,) for gpu in range(gpus)} | servers_on
        assert config.sglang["mem_fraction_static"] == 0.9
        assert config.memory.workspace_mb == 24 * 1024
    else:
        assert set(dealt.values()) == {()}
