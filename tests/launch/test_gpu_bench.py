"""The GPU benchmark, as far as it can be shown to be right without a GPU: its run files load, its scripts know their
arguments, its figures are read and told correctly, and what it starts is ended."""

from __future__ import annotations

import argparse
import json
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from myxa.core.config import RunConfig, load_config
from myxa.launch.supervisor.placement import place

ROOT = Path(__file__).resolve().parents[2]
GPU = ROOT / "bench" / "gpu"
SCRIPTS = (
    "facts", "learn", "async20", "rollout_speed", "train_speed", "weights_latency", "logprob_gap", "layouts",
    "kill_in_broadcast", "live", "chaos", "memory_selfcheck", "memory_rates", "memory_switch", "memory_gang", "memory_colocated",
    "memory_communicators", "repeats", "trl_step", "verl_step", "verl_learn",
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


@pytest.mark.parametrize("engine", ["launched", "attach"])
@pytest.mark.parametrize("backend", ["torch", "megatron"])
@pytest.mark.parametrize("placement", ["colocated", "two"])
def test_runs_load_whatever_the_command_line_chooses_on_gpus(
    bench: Callable[[str], ModuleType], tmp_path: Path, engine: str, backend: str, placement: str
) -> None:
    runs, two_gpus = bench("trial_runs"), placement == "two"
    choice = runs.Choice(is_cpu=False, engine=engine, backend=backend, placement=placement)
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
            chosen = runs.Choice(is_cpu=False, engine=engine, backend=backend, placement=placement, channel=channel)
            sets = bench("weights_latency").run_sets(chosen, url, channel, 14)
            assert load_config([tmp_path / "async20.toml"], sets).weights.channel == channel


def devices_of(config: RunConfig, role: str) -> list[tuple[int, ...]]:
    return [actor.devices for actor in place(config, 1) if actor.role == role]


def test_one_half_of_the_gpus_trains_and_each_of_the_other_has_an_engine(
    bench: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    runs = bench("trial_runs")
    choice = runs.Choice(is_cpu=False, engine="launched", backend="torch", placement="halves", num_gpus=8)
    runs.stage(tmp_path, "async20.toml", launches=True)
    config = load_config([tmp_path / "async20.toml"], bench("long_tail").run_sets(choice, "", 2, 10))
    assert devices_of(config, "trainer") == [(0,), (1,), (2,), (3,)]
    assert devices_of(config, "rollout") == [(4,), (5,), (6,), (7,)]
    assert config.algo.batch_size == 32


def test_experts_in_turns_are_one_server_in_fp8_over_all_ranks(
    bench: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    bench("trial_runs").stage(tmp_path, "memory_colocated.toml", launches=True)
    options = argparse.Namespace(
        device="cuda", gpus=8, servers="one", steps=6, tokens=8192,
        overrides=["megatron.ep=8", "sglang.ep_size=8", "memory.workspace_mb=8192"],
    )  # fmt: skip
    config = load_config(
        [tmp_path / "memory_colocated.toml"],
        bench("memory_colocated").sets_of(options, "ours", 0.8, tmp_path / "served"),
    )
    assert devices_of(config, "trainer") == [(gpu,) for gpu in range(8)]
    assert devices_of(config, "rollout") == [tuple(range(8))]
    assert config.weights.served_folder == str(tmp_path / "served")
    assert config.memory.workspace_mb == 8192


@pytest.mark.parametrize("engine", ["attach", "embedded"])
def test_runs_load_on_a_cpu(bench: Callable[[str], ModuleType], tmp_path: Path, engine: str) -> None:
    runs = bench("trial_runs")
    choice = runs.Choice(is_cpu=True, engine=engine, backend="torch")
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
    bench("trial_runs").stage(tmp_path, "async20.toml")
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


def test_steps_of_verl_are_read_from_what_it_prints_and_told(
    bench: Callable[[str], ModuleType], out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verl = bench("verl_step")
    assert verl.read_step("(TaskRunnerV1 pid=9) Training Progress:  12%| 1/8 [00:09<01:04]") is None
    found = verl.Watched(peak_mib=51200.0)
    for step in range(1, 6):
        line = (
            f"(TaskRunnerV1 pid=9) step:{step} - actor/grad_norm:np.float64(1.5e-05) - timing_s/step:{step}.5 - "
            f"timing_s/gen:0.5 - response_length/mean:250.0 - training/off_policy/x/min:-1"
        )
        found.steps.append(verl.read_step(line))
        found.at_s.append(100.0 + 4 * step)
    assert found.steps[0] == {
        "actor/grad_norm": 1.5e-05, "timing_s/step": 1.5, "timing_s/gen": 0.5, "response_length/mean": 250.0,
        "training/off_policy/x/min": -1.0,
    }  # fmt: skip
    report = bench("figures").Report("peer_verl")
    verl.tell(report, "shipped", found)
    told = capsys.readouterr().out
    assert "| 5.00; 4.00 |" in told, "the median of steps 4 and 5 by verl, and what passed from one to the next"
    assert "| 8,000 |" in told, "16 x 8 answers of 250 tokens in 4 s"
    assert json.loads((out / "gpu.json").read_text())["peer_verl"]["shipped"]["at_s"][0] == 104.0


@pytest.mark.parametrize(("case", "staleness"), [("myxa_sync", 0), ("myxa_async", 2)])
def test_myxa_learns_beside_verl_with_a_server_of_its_own(
    bench: Callable[[str], ModuleType], tmp_path: Path, case: str, staleness: int
) -> None:
    runs, learn = bench("trial_runs"), bench("verl_learn")
    choice = runs.Choice(is_cpu=False, engine="launched", backend="torch")
    runs.stage(tmp_path, "learn_colocated.toml", launches=choice.launches)
    options = argparse.Namespace(seed=0, steps=100, reward=0.9)
    config = load_config([tmp_path / "learn_colocated.toml"], learn.myxa_sets(case, options, choice))
    assert config.sglang
    assert config.asynchrony.max_staleness == staleness
    assert config.algo.batch_size == learn.PROMPTS_A_STEP
    assert config.rollout.max_new_tokens == learn.LONGEST
    assert config.engine.context_length == learn.CONTEXT
    assert config.optimizer.betas == (0.9, 0.95)
    assert config.rollout.num_samples == bench("verl_step").GROUP


def test_what_both_learnt_is_told_up_to_the_reward_that_was_asked_for(bench: Callable[[str], ModuleType]) -> None:
    verl, learn = bench("verl_step"), bench("verl_learn")
    before = verl.read_step(
        "(TaskRunnerV1 pid=9) step:0 - val-aux/rows/reward/mean@1:0.5 - val-core/rows/acc/mean@1:0.25"
    )
    assert verl.read_eval(before) == 0.25
    assert verl.read_eval(verl.read_step("step:1 - critic/score/mean:0.5 - timing_s/step:1.5")) is None
    learnt = learn.Learnt([(0, 0.25, 90.0), (5, 0.91, 130.0), (7, 0.89, 135.0)], 100.0, 2.0, 51200.0)
    assert learn.row("verl_polled", learnt, 0.9) == ("verl_polled", "130", "30.0", "5", "2.00", "0.250, 0.910", "50.0")
    assert learn.row("verl_polled", learnt, 0.95)[1:4] == ("-", "-", "-")
    assert learn.row("myxa_sync", learn.Learnt(), 0.9)[1:] == ("-", "-", "-", "-", "-", "0")


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
        [sys.executable, GPU / "limited.py", "3", "sh", "-c", command], capture_output=True, timeout=60, check=False
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
