"""The memory part of the GPU benchmark, as far as a machine without a GPU can show that it is right: its scripts know
their arguments, run to their ends in dry runs, notice wrong contents, and tell when a stage dies.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from myxa.core.config import load_config
from myxa.core.device_memory import OPTIMIZER_PARTS
from myxa.launch.supervisor.placement import place

ROOT = Path(__file__).resolve().parents[2]
GPU = ROOT / "bench" / "gpu"

pytestmark = pytest.mark.timeout(90)


def environment(tmp_path: Path) -> dict[str, str]:
    names = {"OUT": "out", "GPU_WORK": "work", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
    folders = {variable: str(tmp_path / name) for variable, name in names.items()}
    return {**os.environ, **folders, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable}


def test_the_rates_run_dry_and_every_byte_comes_back(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, GPU / "memory_rates.py", "--device", "cpu", "--stages", "scrub,arena"],
        env=environment(tmp_path), capture_output=True, text=True, timeout=80, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out" / "gpu.json").read_text())["memory_rates"]
    for ways in found["scrub"]["after"].values():
        assert {way: len(seconds) for way, seconds in ways.items()} == {"engines": 3, "kernel": 3}
    exact = found["arena"]["exact"]
    assert (exact["wrong"], exact["unzeroed"], exact["moved_pointers"], exact["drift"]["fds"]) == (0, 0, 0, 0)
    assert found["arena"]["graph"]["wrong"] == 0
    assert found["arena"]["rates"]["is_equal"]
    copied = found["arena"]["rates"]["dirty"]["copied"]
    assert copied[0] == copied[1] == found["arena"]["rates"]["num_bytes"]
    assert found["arena"]["rates"]["clean"]["copied"][1:] == [0] * (len(found["arena"]["rates"]["clean"]["copied"]) - 1)


def test_the_part_called_memory_stands_for_its_parts(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", str(ROOT / "bench" / "gpu.sh"), "memory"],
        env={**environment(tmp_path), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    if "nvidia-smi shows 0" in done.stdout:
        for part in ("memory_rates", "memory_switch", "memory_colocated"):
            assert f"| {part} | NOT RUN: needs 1 GPU" in done.stdout
        assert done.returncode == 1


def test_a_changed_or_moved_word_changes_the_hash(bench: Callable[[str], ModuleType]) -> None:
    device = bench("memory_device")
    words = torch.zeros(1000, dtype=torch.int64)
    device.fill(words, 3)
    before = device.hashes(words)
    device.fill(words, 3)
    assert device.hashes(words) == before
    words[7] += 1
    assert device.hashes(words) != before
    words[7] -= 1
    words[[3, 4]] = words[[4, 3]]
    assert device.hashes(words) != before


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


def test_the_worked_example_has_the_bytes_of_the_specification(bench: Callable[[str], ModuleType]) -> None:
    shape = bench("memory_standins").Shape.scaled(1.0)
    sizes = [shape.bytes_of(tag) / 1e9 for tag in ("params", "grads")]
    sizes.append(sum(shape.bytes_of(tag) for tag in ("masters", *OPTIMIZER_PARTS)) / 1e9)
    assert sizes == pytest.approx([16.4, 32.8, 24.6], rel=0.03)


@pytest.mark.parametrize(
    ("device", "way", "gpus", "servers"),
    [("cuda", "ours", 1, "each"), ("cuda", "saver", 1, "each"), ("cpu", "ours", 1, "each"),
     ("cuda", "ours", 2, "each"), ("cuda", "ours", 2, "one"), ("cpu", "ours", 2, "each")],
)  # fmt: skip
def test_the_colocated_runs_load_and_differ_in_the_memory_only(
    bench: Callable[[str], ModuleType], tmp_path: Path, way: str, device: str, gpus: int, servers: str
) -> None:
    colocated = bench("memory_colocated")
    bench("runs").stage(tmp_path, colocated.RUN_FILE, launches=device == "cuda")
    options = argparse.Namespace(
        device=device, steps=5, overrides=[], capacity_mib=100, tokens=8192, gpus=gpus, servers=servers
    )
    config = load_config([tmp_path / colocated.RUN_FILE], colocated.sets_of(options, way, 0.9))
    assert config.memory.share == "switch"
    assert config.memory.backend == ("auto" if way == "ours" else "torch_memory_saver")
    dealt = {actor.name: actor.devices for actor in place(config, 1) if actor.role in ("trainer", "rollout")}
    if device == "cuda":
        servers_on = {"rollout/0": (0, 1)} if servers == "one" else {f"rollout/{gpu}": (gpu,) for gpu in range(gpus)}
        assert dealt == {f"trainer/{gpu}": (gpu,) for gpu in range(gpus)} | servers_on
        assert config.sglang["mem_fraction_static"] == 0.9
        assert config.memory.workspace_mb == 24 * 1024
    else:
        assert set(dealt.values()) == {()}
        assert config.memory.host_devices == gpus


def test_a_gang_that_leaves_its_devices_makes_the_steps_of_one_that_stays(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, GPU / "memory_gang_training.py", "--device", "cpu"],
        env=environment(tmp_path), capture_output=True, text=True, timeout=85, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out" / "gpu.json").read_text())["memory_gang_training2"]
    assert {verdict for *_, verdict in found["goals"]} == {"met"}
    for stayed, left in zip(found["stayed"], found["left"], strict=True):
        assert not stayed["switches"]
        assert [switch["copied"] > 0 for switch in left["switches"]] == [True] * 3
        assert stayed["weights"] == left["weights"]


def test_a_lab_of_stand_ins_takes_turns_and_loses_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, GPU / "memory_switch.py", "--device", "cpu"],
        env=environment(tmp_path), capture_output=True, text=True, timeout=85, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out" / "gpu.json").read_text())["memory_switch"]
    verdicts = {goal: verdict for goal, _, _, verdict in found["goals"]}
    for way in ("plain", "overlap"):
        assert verdicts[f"{way}: optimizer equal after checked switches (1 = yes)"] == "met"
        assert verdicts[f"{way}: rounds without a refusal or an error"] == "met"
        later = found[way]["cycles"][1:]
        assert later
        for cycle in later:  # the optimizer alone is copied, out and in
            assert cycle["copied_out"] == cycle["copied_in"] > 0
            assert cycle["dropped_out"] > cycle["copied_out"]
