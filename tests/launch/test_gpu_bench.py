"""The GPU benchmark, as far as it can be shown to be right without a GPU: its run files load, its scripts know their
arguments, its figures are read and told correctly, and what it starts is ended.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import psutil
import pytest

from myxa.core.config import load_config

ROOT = Path(__file__).resolve().parents[2]
GPU = ROOT / "bench" / "gpu"
SCRIPTS = (
    "facts", "learn", "async20", "rollout_speed", "train_speed", "weights_latency", "logprob_gap", "layouts",
    "kill_in_broadcast", "live", "chaos", "memory_selfcheck", "memory_rates", "memory_switch", "memory_gang", "memory_colocated",
    "memory_communicators", "repeats",
)  # fmt: skip
RUN_FILES = ("learn_sft.toml", "learn_colocated.toml", "learn_two.toml", "async20.toml")


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    monkeypatch.setenv("GPU_WORK", str(tmp_path / "work"))
    return tmp_path / "out"


@pytest.mark.parametrize("name", [*RUN_FILES, "kill.toml", "repeats.toml"])
def test_run_files_load(name: str) -> None:
    config = load_config([GPU / name], [])
    assert config.roles.trainer.devices == "0"


def test_the_two_learning_runs_differ_in_placement_only() -> None:
    one, two = (load_config([GPU / f"learn_{name}.toml"], []).model_dump() for name in ("colocated", "two"))
    assert one["roles"]["rollout"].pop("devices") == "0"
    assert two["roles"]["rollout"].pop("devices") == "1"
    for different in ("sglang", "weights"):
        one.pop(different, None)
        two.pop(different, None)
    assert one == two


ENDS = [
    (engine, backend, placement)
    for engine in ("launched", "attach")
    for backend in ("torch", "megatron")
    for placement in ("colocated", "two")
]


@pytest.mark.parametrize(("engine", "backend", "placement"), ENDS)
def test_runs_load_whatever_the_command_line_chooses_on_gpus(
    bench: Callable[[str], ModuleType], tmp_path: Path, engine: str, backend: str, placement: str
) -> None:
    runs, two_gpus = bench("runs"), placement == "two"
    choice = runs.Choice(is_cpu=False, engine=engine, backend=backend, two_gpus=two_gpus, channel="")
    runs.stage(tmp_path, *RUN_FILES, launches=choice.launches)
    url = "http://127.0.0.1:1" if engine == "attach" else ""
    learn = load_config([tmp_path / f"learn_{placement}.toml"], runs.overrides(choice, url))
    many = load_config([tmp_path / "async20.toml"], bench("async20").run_sets(choice, url))
    for config in (learn, many):
        assert config.roles.trainer.kind == backend
        assert config.roles.rollout.devices == ("1" if two_gpus else "0")
        assert bool(config.sglang) is (engine == "launched")
    assert load_config([tmp_path / "learn_sft.toml"], [runs.trainer_override(choice)]).algo.kind == "sft"
    if engine == "attach":
        for channel in ("nccl" if two_gpus else "cuda_ipc", "disk"):
            chosen = runs.Choice(is_cpu=False, engine=engine, backend=backend, two_gpus=two_gpus, channel=channel)
            sets = bench("weights_latency").run_sets(chosen, url, channel, 14)
            assert load_config([tmp_path / "async20.toml"], sets).weights.channel == channel


@pytest.mark.parametrize("engine", ["attach", "embedded"])
def test_runs_load_on_a_cpu(bench: Callable[[str], ModuleType], tmp_path: Path, engine: str) -> None:
    runs = bench("runs")
    choice = runs.Choice(is_cpu=True, engine=engine, backend="torch", two_gpus=False, channel="")
    runs.stage(tmp_path, *RUN_FILES)
    url = "http://127.0.0.1:1" if engine == "attach" else ""
    for name in RUN_FILES[1:]:
        config = load_config([tmp_path / name], runs.overrides(choice, url))
        assert not config.roles.trainer.device_ids
        assert not config.roles.rollout.device_ids


@pytest.mark.parametrize("backend", ["torch", "megatron"])
@pytest.mark.parametrize("world", [1, 4])
def test_settings_of_the_speed_runs_load(
    bench: Callable[[str], ModuleType], tmp_path: Path, backend: str, world: int
) -> None:
    bench("runs").stage(tmp_path, "async20.toml")
    options = argparse.Namespace(device="cuda", backend=backend, world=world, per_pack=16, length=1024, sets=[])
    config = load_config([tmp_path / "async20.toml"], bench("train_speed").rank_sets(options))
    assert config.roles.trainer.device_ids == tuple(range(world))
    assert config.trainer.max_tokens_per_microbatch == 16_384
    for dtype in ("float32", "bfloat16"):
        options = argparse.Namespace(device="cuda", backend=backend, dtype=dtype, sets=[])
        config = load_config([tmp_path / "async20.toml"], bench("logprob_gap").score_sets(options))
        assert config.trainer.dtype == dtype


@pytest.mark.usefixtures("bench")
@pytest.mark.parametrize("name", SCRIPTS)
def test_every_part_of_the_script_is_there_and_knows_its_arguments(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as told:
        runpy.run_path(str(GPU / f"{name}.py"), run_name="__main__")
    assert not told.value.code
    assert "--device" in capsys.readouterr().out


def test_the_script_says_what_it_lacks_and_counts_it_as_not_passed(tmp_path: Path) -> None:
    environment = {**os.environ, "OUT": str(tmp_path / "out"), "PYTHON": sys.executable, "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        ["bash", str(ROOT / "bench" / "gpu.sh"), "layouts", "nonsense"],
        env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    if "2 GPUs" not in done.stdout:
        assert "| layouts | NOT RUN: needs 2 GPU" in done.stdout
    assert "there is no such part" in done.stdout
    assert done.returncode == 1
    assert (tmp_path / "out" / "gpu.md").exists()


def test_a_command_past_its_limit_is_ended_with_all_it_started(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    command = f"setsid sh -c 'echo $$ > {note}; trap \"\" TERM; sleep 300' & sleep 300"
    started_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, GPU / "limited.py", "1", "sh", "-c", command], capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 124
    assert time.monotonic() - started_s < 40
    assert not psutil.pid_exists(int(note.read_text()))


def test_goals_decide_the_status_and_everything_is_written_down(
    bench: Callable[[str], ModuleType], out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = bench("figures")
    report = figures.Report("some")
    report.table("T", ("a", "b"), [("1", "x|y")])
    report.goal("small enough", 0.5, at_most=1.0)
    with pytest.raises(SystemExit) as ended:
        report.end()
    assert ended.value.code == figures.OK
    for value in (None, 0.5):
        other = figures.Report("other")
        other.goal("large enough", value, at_least=1.0)
        with pytest.raises(SystemExit) as ended:
            other.end()
        assert ended.value.code == figures.MISSED
    none = figures.Report("none")
    none.goal("nothing lost", 3.0, at_most=0.0)
    none.goal("nothing lost", 0.0, at_most=0.0)
    with pytest.raises(SystemExit) as ended:
        none.end()
    assert ended.value.code == figures.MISSED
    with pytest.raises(SystemExit) as ended:
        figures.Report("third").missing("no server")
    assert ended.value.code == figures.MISSING
    assert "| 1 | x/y |" in capsys.readouterr().out
    found = json.loads((out / "gpu.json").read_text())
    assert found["other"]["goals"][0][3] == "missed by 50%"
    assert [goal[3] for goal in found["none"]["goals"]] == ["missed by 3.00", "met"], "of 0 there are no shares"
    assert found["third"]["missing"] == "no server"


def test_flops_are_counted_as_the_formula_says(bench: Callable[[str], ModuleType]) -> None:
    flops, config = bench("flops"), bench("make_model").shape_config("0.6b")
    weights = 28 * (1024 * 128 * 32 + 16 * 128 * 1024 + 3 * 1024 * 3072) + 151_936 * 1024
    assert flops.matrix_weights(config) == weights
    counted = flops.train_flops(config, [1024] * 3)
    assert counted == pytest.approx(3 * (6 * weights * 1024 + 6 * 28 * 16 * 128 * 1024**2))
    assert flops.mfu(989e12, 2.0) == pytest.approx(0.5)


# -- reading runs ------------------------------------------------------------------------------------------------------


@pytest.fixture
def run_dir(tmp_path: Path, bench: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of simulated actors with the real sinks."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("planted_run").plant_run(tmp_path / "run", num_steps=30)


def test_a_runs_figures_are_read_from_its_files(
    bench: Callable[[str], ModuleType], run_dir: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, figures = bench("run_figures"), bench("figures")
    run = reader.read_run(run_dir)
    assert len(run.steps) == 30
    assert [step for step, _ in run.evals] == [10, 20, 30]
    assert 0.4 < np.median(run.column("train/step_s")) < 0.9
    assert len(run.adopt_s) > 20
    assert 0.3 < sum(run.idle["trainer/0"].values()) < 0.9  # it waits for about 0.5 to 1.6 s before 0.6 s of work
    reader.tell_run(figures.Report("part"), "run", run, bench("make_model").shape_config("0.6b"))
    told = capsys.readouterr().out
    assert "| idle share of trainer/0 | " in told
    assert "| 30 | 0." in told


def test_a_run_that_left_nothing_is_an_error(bench: Callable[[str], ModuleType], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="did not get that far"):
        bench("run_figures").read_run(tmp_path)


def test_the_stall_is_the_longest_silence_around_a_commit(
    bench: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    latency = bench("weights_latency")
    notes = tmp_path / "notes.txt"
    lines: list[str] = []
    now = 100.0
    for number in range(400):
        now += 0.03 if number and number % 100 == 0 else 0.01  # a silence of 30 ms instead of 10 every second
        lines.append(f"{now:.6f},{number // 100},1")
    notes.write_text("\n".join(lines) + "\n")
    tokens = latency.read_tokens(notes)
    commits = [100.0 + 1.02 * k for k in range(1, 4)]
    spans = {
        "train": [(k - 1, c - 0.08, c - 0.06) for k, c in enumerate(commits, 1)],
        "publish": [(k, c - 0.06, c - 0.04) for k, c in enumerate(commits, 1)],
        "adopt": [(k, c - 0.01, c + 0.01) for k, c in enumerate(commits, 1)],
    }
    monkeypatch.setattr(latency, "spans", lambda run_dir, word: iter(spans[word]))
    monkeypatch.setattr(latency, "SKIPPED_UPDATES", 0)
    monkeypatch.setattr(latency, "LAST_UPDATES", 0)
    updates = latency.find_updates(tmp_path, tokens)
    assert [update.version for update in updates] == [1, 2, 3]
    for update in updates:
        assert update.stall_s == pytest.approx(0.02, abs=1e-6)
        assert 0.0 < update.first_token_s < 0.1
        assert (update.publish_s, update.announce_s, update.commit_s) == pytest.approx((0.02, 0.03, 0.02), abs=1e-6)
        parts = update.publish_s + update.announce_s + update.commit_s + update.resume_s
        assert parts == pytest.approx(update.first_token_s)
    usual = latency.usual_gaps(tokens, [(start_s, end_s) for _, start_s, end_s in spans["adopt"]])
    assert usual == pytest.approx((0.01, 0.01, 0.01), abs=1e-6)


@pytest.mark.parametrize("how", ["distributed", "tensor"])
def test_the_server_log_tells_how_far_a_broadcast_was(bench: Callable[[str], ModuleType], how: str) -> None:
    kill = bench("kill_in_broadcast")
    received = f'"POST /update_weights_from_{how} HTTP/1.1" 200'
    lines = {"pause": kill.PAUSED, "bucket": received, "resume": kill.RESUMED, "other": '"GET /model_info'}

    def log(*words: str) -> str:
        return "\n".join(f"INFO:     127.0.0.1:1 - {lines[word]}" for word in words)

    version = ("pause", "bucket", "bucket", "other", "bucket", "resume")
    assert kill.buckets_of_a_version(log("other", *version)) == 3
    torn = ("pause", "bucket", "bucket")
    assert kill._torn(log(*version, *torn)) == 2
    assert kill._torn(log(*version, *torn, *version, *version)) == 2
    assert kill._torn(log(*version, *version)) == 0
