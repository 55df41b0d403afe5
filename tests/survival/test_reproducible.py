"""Two runs of one file are equal to the bit: weights, samples, metrics; also on another number of engines, and when every
process of one of them died."""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace
from importlib import util
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from tests.harness.commands import Command
from tests.harness.waiting import wait_until

from myxa.launch.control.client import ControlClient

BENCH = Path(__file__).resolve().parents[2] / "bench" / "reproducible.py"


@pytest.fixture(scope="module")
def bench() -> Any:
    spec = util.spec_from_file_location("reproducible", BENCH)
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    sys.modules["reproducible"] = module  # its records look themselves up there
    spec.loader.exec_module(module)
    module.Repeat._start = start
    return module


def start(repeat: Any, *words: str) -> Command:
    with (repeat.folder / "run.log").open("a") as log:
        return Command([*words, "--quiet"], repeat.folder, log=log)


def strike(job: Any, kills: tuple[tuple[str, int], ...]) -> None:
    """Kill actors by name, each once that step has its batch."""
    for name, step in kills:
        wait_until(
            lambda step=step: job.records.exists() and f"\n[{step}," in job.records.read_text(), "a step", timeout_s=240
        )
        ControlClient.of(job.run_dir()).ask("kill", target=name)


@pytest.mark.timeout(600)
def test_c_one_engine_and_two_that_died_are_equal_to_the_bit(bench: Any, tmp_path: Path) -> None:
    """The second run is killed after step 4; steps 3 and 4 are made again, from the same samples (`Differs` else)."""
    found: list[Any] = []
    for layout, kill_at in (("1x1", 0), ("2x1", 4)):
        folder = tmp_path / layout
        folder.mkdir()
        options = Namespace(steps=6, overrides=["trainer.checkpoint_every=3"])
        found.append(bench.make(folder, layout, options).run(kill_at=kill_at, limit_s=270))
    one, two = found
    assert not one.differences(two), one.first_difference(two)
    assert one.whole == two.whole
    assert list(one.steps) == list(range(6))
    assert all(len(groups) == 8 for groups in one.steps.values())
    draws = [int(group.split()[0]) for groups in one.steps.values() for group in groups]
    assert draws == sorted(draws), "batches are in the order of draws"
    assert len(draws) < draws[-1] + 1, "some groups taught nothing and were replaced"


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_c_an_engine_the_trainer_and_the_buffer_die_and_no_bit_changes(bench: Any, tmp_path: Path) -> None:
    """The trainer goes back to version 5 while engines serve newer weights, which are undone."""
    found: list[Any] = []
    for number, kills in enumerate(((), (("rollout/0", 3), ("trainer/0", 7), ("buffer", 10)))):
        folder = tmp_path / str(number)
        folder.mkdir()
        job = bench.make(folder, "2x1", Namespace(steps=14, overrides=[]))
        killer = Thread(target=strike, args=(job, kills), daemon=True)
        killer.start()
        found.append(job.run(limit_s=270))
        killer.join(10)
        assert not killer.is_alive(), "every kill was made"
    assert not found[0].differences(found[1]), found[0].first_difference(found[1])


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_c_two_ranks_repeat_to_the_bit_too() -> None:
    words = ("--steps", "12", "--layouts", "1x2", "--kill")
    done = subprocess.run(
        [sys.executable, str(BENCH), *words], capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("equal to the bit\n")
