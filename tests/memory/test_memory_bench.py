"""The memory part of the GPU benchmark, as far as a machine without a GPU can show that it is right: its scripts know
their arguments, run to their ends in dry runs, notice wrong contents, and tell when a stage dies.
"""

from __future__ import annotations

import argparse
import importlib
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


def test_a_gang_that_stands_still_has_told_what_it_measured(
    bench: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    communicators = bench("memory_communicators")
    mib = 1 << 20
    half_way = {
        "cycles": {part: [9.0, 0.5, 0.5] for part in ("release", "restore", "first")},
        "freed": [5 * mib, 7 * mib, 7 * mib], "counts": [[90, 20, 9 * mib], [91, 20, 8 * mib], [91, 21, 6 * mib]],
    }  # fmt: skip
    communicators.tell_unfinished(bench("figures").Report("some"), "suspend", [half_way, {"at": "nothing yet"}])
    told = (tmp_path / "gpu.md").read_text()
    assert "| 0 | 3 | 0.500 | 0.500 | 0.500 | 7.00 | 91 -> 91 | 20 -> 21 | 2.00 |" in told
    assert "| 1 | 0 | - | - | - | - |  |  | - |" in told


@pytest.mark.timeout(60)
def test_a_rank_that_stands_still_ends_with_its_stacks_and_the_step_that_it_was_in(tmp_path: Path) -> None:
    code = f"""
import sys; sys.path.insert(0, {str(GPU)!r})
import threading, memory_comm_rank as ranks
class Alone(ranks.Rank):
    def __init__(self): self.options = {{"hangs": "1"}}
me = Alone()
me.step("cycle 3: release")
threading.Event().wait(30)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(tmp_path), capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 1
    assert "cycle 3: release" in done.stdout and "Timeout" in done.stderr and "<string>" in done.stderr


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


# -- runs that do not come to their end --------------------------------------------------------------------------------


@pytest.mark.soak
def test_a_run_that_is_not_through_in_time_is_asked_what_it_does(tmp_path: Path) -> None:
    """One engine over both devices; the guard pauses it for good, so that waiting for its limit costs nothing."""
    words = ["--device", "cpu", "--gpus", "2", "--servers", "one", "--part", "turns", "--limit", "20", "--budget", "70"]
    paused = ["--set", "guard.bound=0", "--set", 'guard.above="pause"']
    done = subprocess.run(
        [sys.executable, GPU / "memory_colocated.py", *words, *paused],
        env=environment(tmp_path), capture_output=True, text=True, timeout=85, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "ended with nothing within 20 s" in done.stdout
    for said in ("--- myxa why", "--- myxa mem\nmemory/0, epoch", "--- trainer.1.0.log", "--- rollout.0.0.log"):
        assert said in done.stdout, done.stdout
    run_dir = next((tmp_path / "work" / "memory_colocated" / "runs" / "memory_colocated").glob("ours-*"))
    assert "trainer/1" in (run_dir / "look.stack.log").read_text()
    assert json.loads((tmp_path / "out" / "gpu.json").read_text())["turns"]["failed"] == "ours"


def test_a_run_that_failed_is_told_as_far_as_it_came(
    bench: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setenv("GPU_WORK", str(tmp_path))
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    run_dir = importlib.import_module("planted_run").plant_run(tmp_path / "run", num_steps=6)
    with (run_dir / "metrics.jsonl").open("a") as metrics:
        for step in range(1, 7):
            point = {"source": "trainer/0", "step": step, "wall_s": 0.0, "values": {"memory/exposed_s": 0.1 * step}}
            metrics.write(json.dumps(point) + "\n")
        metrics.write('{"source": "trainer/0", "step": 7, "values": {"memory/exp')  # it was killed in the middle
    colocated, failure = bench("memory_colocated"), bench("runs").RunFailedError

    def up(*args: object, **limits: float) -> Path:
        raise failure("it died: CUDA error", run_dir)

    monkeypatch.setattr(colocated, "up", up)
    options = argparse.Namespace(
        device="cuda", steps=7, overrides=[], tokens=8192, gpus=2, servers="each", mem_fraction="0.85,0.8", limit=60.0,
        give_up_at=time.monotonic() + 500,
    )  # fmt: skip
    monkeypatch.setattr(colocated, "device_bytes", lambda gpu: (gpu, 1))
    monkeypatch.setattr(colocated, "used_by_process", lambda gpu: {})
    report = bench("figures").Report("some")
    way = colocated.try_run(report, options, "ours", tmp_path)
    assert (way.is_whole, way.mem_fraction, len(way.exposed_s)) == (False, 0.85, 4)
    told = (tmp_path / "gpu.md").read_text()
    assert "it had made 6 steps" in told
    assert "0.8: " not in told, "less memory for the engine is no remedy for that"


def test_a_run_stands_still_once_it_was_running_and_tells_nothing(
    bench: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    looks = bench("run_looks")
    assert not looks.stands_still(None, 1.0)
    assert not looks.stands_still(tmp_path, 1.0)
    events = tmp_path / "events.jsonl"
    for text, age_s, verdict in (
        ("starting", 100, False),
        ("starting -> running", 5, False),
        ("-> running", 100, True),
    ):
        events.write_text(json.dumps({"kind": "phase", "text": text}))
        os.utime(events, (time.time(), time.time() - age_s))
        assert looks.stands_still(tmp_path, 60.0) is verdict


def test_of_many_logs_those_of_ranks_and_servers_are_told_and_nobodys_questions(
    bench: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    looks = bench("run_looks")
    logs = tmp_path / "run" / "logs"
    logs.mkdir(parents=True)
    for name in ("buffer.0", "coordinator.0", "monitor.0", "memory.0.0", "rollout.1.sglang", "trainer.1.0"):
        (logs / f"{name}.log").write_text("".join(f"{name} says {n} {'x' * 100}\n" for n in range(40)))
    with (logs / "rollout.1.sglang.log").open("a") as log:
        log.write("CUDA error\n" + 'INFO: 127.0.0.1:1 - "GET /model_info HTTP/1.1" 200 OK\n' * 50)
    (tmp_path / "up.log").write_text("it failed\n")
    told = looks.ends_of_logs(tmp_path / "up.log", tmp_path / "run")
    heads = [line.removeprefix("--- ") for line in told.splitlines() if line.startswith("--- ")]
    first = ["up.log", "memory.0.0.log", "trainer.1.0.log", "rollout.1.sglang.log", "coordinator.0.log"]
    assert heads == [*first, "buffer.0.log", "monitor.0.log"]
    assert "CUDA error" in told
    assert "GET /model_info" not in told


def test_a_part_may_take_what_the_script_says_less_the_telling(
    bench: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = bench("figures")
    monkeypatch.delenv("PART_SECONDS", raising=False)
    assert figures.part_seconds(285.0) == 285.0
    monkeypatch.setenv("PART_SECONDS", "200")
    assert figures.part_seconds(285.0) == 200.0 - figures.TELLING_S


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


# -- gangs that fail ---------------------------------------------------------------------------------------------------


def test_nobody_waits_for_ranks_that_have_ended(bench: Callable[[str], ModuleType], tmp_path: Path) -> None:
    communicators = bench("memory_communicators")
    store: Any = communicators.dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    living, failed = (
        subprocess.Popen([sys.executable, "-c", code])
        for code in ("import time; time.sleep(60)", "raise SystemExit(3)")
    )
    try:
        failed.wait(20)
        began_s = time.monotonic()
        assert not communicators.await_keys(store, ["a", "b"], 30.0, [living, failed])
        assert time.monotonic() - began_s < 10
        store.set("a", "1")
        assert communicators.await_keys(store, ["a"], 30.0, [living])
    finally:
        living.kill()
        living.wait()


def test_the_switches_of_a_gang_that_failed_are_told_and_its_steps_compared(
    bench: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    training = bench("memory_gang_training")
    parts = ("communicators out", "tags out", "tags in", "communicators in", "all")
    switch = {**dict.fromkeys(parts, 0.5), "freed": 1.0, "copied": 1.0}
    stayed = [{**rank, "switches": []} for rank in steps_of(1.0, 2.0, 3.0)]
    left = [{**rank, "switches": [switch] * (3 - number)} for number, rank in enumerate(steps_of(1.0, 2.5, weights=""))]
    training.tell_cut_short(bench("figures").Report("some"), stayed, left)
    told = (tmp_path / "gpu.md").read_text()
    assert "of the 2 steps that were made with switches 1 differ" in told
    assert "2 switches of 2 ranks" in told


def test_which_operation_is_not_deterministic_is_found_in_any_ranks_log(
    bench: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = bench("memory_gang_training")
    words = f"x does not have a deterministic implementation, but you set\n{'-' * 9000}"

    def ran(command: object, base: object, logs: list[Path], limit_s: float) -> list[int | None]:
        logs[0].write_text("waits")
        logs[1].write_text(words)
        return [None, 1]

    monkeypatch.setattr(training, "run_ranks", ran)
    options = argparse.Namespace(
        ranks=2, device="cpu", folder=tmp_path, lenient=False, limit=5.0, ends_at=time.monotonic() + 60
    )
    with pytest.raises(training.RanksFailedError, match="rank 0 was not through in time") as failed:
        training.run(options, "stayed", switches=False)
    assert failed.value.strict == "x does not have a deterministic implementation"
    options.ends_at = time.monotonic()
    with pytest.raises(training.RanksFailedError, match="no time was left"):
        training.run(options, "left", switches=True)
