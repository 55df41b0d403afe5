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
from typing import Any

import pytest
import torch

from myxa.core.config import load_config
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
        [sys.executable, GPU / "memory_rates.py", "--device", "cpu", "--stages", "arena"],
        env=environment(tmp_path), capture_output=True, text=True, timeout=80, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out" / "gpu.json").read_text())["memory_rates"]
    exact = found["arena"]["exact"]
    assert (exact["wrong"], exact["unzeroed"], exact["moved_pointers"], exact["drift"]["fds"]) == (0, 0, 0, 0)
    assert found["arena"]["graph"]["wrong"] == 0
    assert found["arena"]["rates"]["is_equal"]
    copied = found["arena"]["rates"]["dirty"]["copied"]
    assert copied[0] == copied[1] == found["arena"]["rates"]["num_bytes"]
    assert found["arena"]["rates"]["clean"]["copied"][1:] == [0] * (len(found["arena"]["rates"]["clean"]["copied"]) - 1)


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
        assert config.memory.host_devices == gpus


@pytest.mark.soak
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


def steps_of(*norms: float, weights: str = "w") -> list[dict[str, Any]]:
    """What two ranks found, the second one's norms as given."""
    mates = ((1.0,) * len(norms), norms)
    return [{"steps": [{"train/grad_norm": norm} for norm in rank], "weights": weights} for rank in mates]


@pytest.mark.parametrize(
    ("left", "again", "verdict", "said"),
    [
        (steps_of(1.0, 2.0), None, "met", ""),
        (steps_of(1.0, 2.5), steps_of(1.0, 2.0), "missed by 1.00", "rank 1, step 1: train/grad_norm 2.0 and 2.5"),
        (steps_of(1.0, 2.0, weights="v"), steps_of(1.0, 2.0), "missed by 2.00", "at first the last weights alone"),
        (steps_of(1.0, 2.5), steps_of(1.5, 2.0), "not measured", "training itself does not repeat: 1 differ"),
    ],
)
def test_a_difference_is_a_switchs_only_where_training_itself_repeats(
    bench: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    left: list[dict[str, Any]], again: list[dict[str, Any]] | None, verdict: str, said: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("OUT", str(tmp_path))
    report = bench("figures").Report("some")

    def third() -> list[dict[str, Any]]:
        assert again is not None, "nothing differs: it is not made"
        return again

    bench("memory_gang_training").judge(report, steps_of(1.0, 2.0), left, third)
    found = json.loads((tmp_path / "gpu.json").read_text())["some"]
    assert found["goals"][0][3] == verdict
    assert said in (tmp_path / "gpu.md").read_text()


@pytest.mark.soak
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


def test_a_part_that_is_ended_from_outside_tells_what_it_has(tmp_path: Path) -> None:
    code = f"""
import sys; sys.path.insert(0, {str(GPU)!r})
import os, signal
from figures import Report
from memory_figures import tell_when_ended
report = Report("some")
tell_when_ended(report, lambda: report.say("half of it") or {{}}["no such"])
report.goal("speed", 2.0, at_least=1.0)
os.kill(os.getpid(), signal.SIGTERM)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(tmp_path), capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 1
    for said in ("ended by signal 15", "half of it", "cannot be told: KeyError", "| speed | >= 1.00 | 2.00 | met |"):
        assert said in done.stdout
