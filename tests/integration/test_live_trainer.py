"""Knobs of a trainer of two ranks turned in a real run: both use them in the step that was decided, and say so."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.harness.commands import run as run_command
from tests.harness.ledger_audit import audit_ledger
from tests.harness.run_job import Job, audit, events, metrics, worker_pids
from tests.harness.waiting import wait_until
from tests.integration.device_sampler import Sampler

from myxa.actors.contracts import CoordinatorContract
from myxa.core.knobs import ChangeReply, ChangeRequest, KnobValue, Operator
from myxa.transport.address import Rendezvous
from myxa.transport.node import Node

pytestmark = pytest.mark.timeout(400)

ME = Operator(user="test")


def steps(job: Job) -> dict[int, dict[str, float]]:
    """Version trained from -> what the trainer told of that step."""
    try:
        points = metrics(job.run_dir())
    except (OSError, ValueError):
        return {}
    return {p["step"] - 1: p["values"] for p in points if "knobs/epoch" in p["values"]}


@asynccontextmanager
async def at_the_seat(job: Job, name: str) -> AsyncGenerator[CoordinatorContract]:
    node = await Node.attach(name=name, rdzv=Rendezvous.load(job.run_dir() / "rdzv.json"))
    try:
        yield node.ref(CoordinatorContract, "coordinator")
    finally:
        await node.close()


async def change(coordinator: CoordinatorContract, **values: KnobValue) -> ChangeReply:
    reply = await coordinator.change_knobs(ChangeRequest(values=values, who=ME, reason="a test"))
    assert not reply.refused, reply.refused
    return reply


async def test_two_ranks_use_a_knob_in_the_same_step_and_a_resumed_run_goes_on_with_it(job: Job) -> None:
    with job.start("run.num_steps=100000", "roles.trainer.count=2", "async.max_staleness=2", *job.paced(8)) as process:
        wait_until(lambda: len(steps(job)) >= 3, "the third step")
        async with at_the_seat(job, "operator-1") as coordinator:
            first = await change(coordinator, lr=4e-4, entropy_coef=0.01)
            refused = await coordinator.change_knobs(ChangeRequest(values={"mis_low": 9.0}, who=ME))
            assert refused.epoch == 0
            assert "mis_low" in refused.refused
            wait_until(lambda: len(steps(job)) >= first.at + 3, "steps with it")
            second = await change(coordinator, weights_every=3, temperature=1.3, minibatches=2)
            wait_until(lambda: len(steps(job)) >= second.at + 8, "steps with weights given every third step")
            folder = Path(await coordinator.checkpoint_now(False))
            rest = await coordinator.set_pause("pause", ME, "")
            export = Path(await coordinator.checkpoint_now(True))
            await change(coordinator, num_steps=rest + 2)
            await coordinator.set_pause("resume", ME, "")
        said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    told = steps(job)
    assert sorted(told) == list(range(rest + 2)), "every step once, up to the end that was set"
    for step, values in told.items():
        assert values["train/lr"] == pytest.approx(4e-4 if step >= first.at else 1e-3), step
        assert values["knobs/epoch"] >= (first.epoch if step >= first.at else 0), step
        assert values["train/num_updates"] == step + 1 + max(0, step - second.at + 1), step
        assert values["lag/max"] <= 2, step
    assert told[rest + 1]["batch/temperature_max"] == pytest.approx(1.3)
    assert (export / "config.json").is_file()
    in_force = {e["data"]["name"]: e["data"] for e in events(job.run_dir(), "knob-in-force")}
    assert (in_force["lr"]["at"], in_force["lr"]["new"]) == (first.at, 4e-4)
    extra = json.loads((folder / "manifest.json").read_text())["extra"]
    assert extra["knobs"]["epoch"] == second.epoch
    groups = audit(job.run_dir()).trained
    assert len(groups) == len(set(groups)) == (rest + 2) * 4
    adopted = [e["data"]["version"] for e in events(job.run_dir(), "weights-adopted")]
    assert adopted == sorted(set(adopted)) and adopted[-1] == rest + 2, "none was missed"
    assert not events(job.run_dir(), "weights-refused")


TURNS = (
    'memory.share="switch"', "memory.capacity_mb=9", "memory.switch_s=40", "engine.context_length=64",
    "engine.max_running=4", "run.num_steps=100000", "async.max_staleness=2", "trainer.async_save=true",
    "monitor.trace=true", 'eval.data="data/heldout.jsonl"', "eval.num_prompts=8", "eval.every=4",
)  # fmt: skip


def trained(job: Job) -> int:
    """Steps, by the ledger: no monitor may have noted them."""
    return len(audit(job.run_dir()).trained) // 4


def goes_on(job: Job, num_steps: int = 2) -> None:
    before = trained(job)
    wait_until(lambda: trained(job) >= before + num_steps, f"{num_steps} more steps")


async def test_where_engines_and_trainer_take_turns_everybody_may_die_and_checkpoints_are_written(job: Job) -> None:
    """An engine, the monitor (the gap is marked) and the memory manager, for which nobody waits. A checkpoint while it
    runs, and one while it is paused, when the engines have the device; `myxa mem` shows both."""
    with job.start(*TURNS, *job.paced()) as process:
        wait_until(lambda: len(steps(job)) >= 2, "the second step")
        run_dir = job.run_dir()
        page = run_command("mem", folder=job.folder)
        for shown in ("host:0: 9.0 MiB, free", "trainer/0 (trainer)", "rollout/0 (rollout)", "optimizer"):
            assert shown in page.stdout, page.stdout + page.stderr
        view = run_command("mem", "--run", str(run_dir), "--json", folder=job.folder)
        (device,) = json.loads(view.stdout)["devices"]
        assert device["capacity_bytes"] == 9 << 20
        assert {tenant["gang"] for tenant in device["tenants"]} == {"trainer", "rollout"}
        with Sampler(process.pid) as sampler:
            goes_on(job, 4)
            wait_until(lambda: sampler.num_looks > 10, "looks at the device")
        assert not events(run_dir, "lease-refused")
        gap = a_monitor_stops_and_dies(job, process.pid)
        os.kill(worker_pids(process.pid, "memory/0")[-1], signal.SIGKILL)
        goes_on(job)
        assert (run_dir / "logs/memory.0.1.log").exists(), "it was started again; tenants kept their memory"
        os.kill(worker_pids(process.pid, "rollout/0")[0], signal.SIGKILL)
        wait_until(lambda: len(events(run_dir, "engine-joined")) >= 2, "the return of the killed engine")
        async with at_the_seat(job, "operator-1") as coordinator:
            values: dict[str, KnobValue] = {"weights_every": 2}
            refused = await coordinator.change_knobs(ChangeRequest(values=values, who=ME))
            assert all(f"no knob {name!r}" in refused.refused for name in values)
            running = Path(await coordinator.checkpoint_now(False))
            rest = await coordinator.set_pause("pause", ME, "")
            wait_until(lambda: rest - 1 in steps(job), "the pause")
            paused = Path(await coordinator.checkpoint_now(False))
            export = Path(await coordinator.checkpoint_now(True))
            assert max(steps(job)) == rest - 1, "it was not trained meanwhile"
            await change(coordinator, lr=2e-4, num_steps=rest + 2)
            await coordinator.set_pause("resume", ME, "")
        said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert paused.name == export.name == f"version_{rest:08d}"
    assert (export / "config.json").is_file()
    for folder in (running, paused):
        assert (folder / "manifest.json").is_file()
    told = steps(job)
    assert [told[step]["train/lr"] for step in (rest - 1, rest, rest + 1)] == pytest.approx([1e-3, 2e-4, 2e-4])
    found = audit_ledger(run_dir / "ledger.sqlite")
    assert found.problems == () and not found.dropped
    assert found.trained.total() == len(found.trained) == (rest + 2) * 4, "parked groups are neither lost nor doubled"
    assert sampler.num_looks > 10 and sampler.highest["host:0"] <= 9 << 20
    points = [point["values"] for point in metrics(run_dir)]
    shares = [values for values in points if "memory/exposed_s" in values]
    assert shares and all(v["memory/exposed_s"] > 0 and v["memory/copied_bytes"] > 0 for v in shares)
    assert any(v.get("time/wait-memory", 0.0) > 0 for v in points)
    assert max(v["lag/max"] for v in points if "lag/max" in v) <= 2
    assert [v for v in points if "eval/reward" in v]
    on_policy = [v["train/logprob_diff_abs_mean"] for v in points if v.get("lag/max") == 0]
    assert max(on_policy) < 1e-4, "after a hand-over"
    later = json.loads((run_dir / "trace.json").read_text())
    assert any(entry["ph"] == "X" for entry in later), "the trace goes on behind the gap"
    assert gap["data"]["until_s"] > gap["data"]["since_s"]


def a_monitor_stops_and_dies(job: Job, launcher: int) -> dict[str, Any]:
    """The gap that the next one tells of, once curves go on behind it."""
    run_dir = job.run_dir()
    (monitor,) = worker_pids(launcher, "monitor")
    os.kill(monitor, signal.SIGSTOP)
    stopped_s = time.time()
    goes_on(job)
    assert not [point for point in metrics(run_dir) if point["wall_s"] > stopped_s + 1.0], "it stood still"
    os.kill(monitor, signal.SIGKILL)
    goes_on(job)
    wait_until(lambda: bool(events(run_dir, "telemetry-gap")), "the next monitor to mark the gap")
    (gap,) = events(run_dir, "telemetry-gap")
    assert gap["data"]["since_s"] <= stopped_s + 1.0 < gap["data"]["until_s"] + 1.0
    before = max(steps(job))
    wait_until(lambda: max(steps(job)) >= before + 2, "the curves to go on")
    return gap
