"""Knobs of a trainer of two ranks turned in a real run: both use them in the step that was decided, and say so."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from run_job import Job, audit, events, metrics, until

from myxa.actors.contracts.roles import CoordinatorContract
from myxa.core.knobs import ChangeReply, ChangeRequest, KnobValue, Operator
from myxa.transport.address import Rendezvous
from myxa.transport.node import Node

pytestmark = pytest.mark.timeout(240)

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


@pytest.mark.asyncio
async def test_two_ranks_use_a_knob_in_the_same_step_and_a_resumed_run_goes_on_with_it(job: Job) -> None:
    process = job.start("run.num_steps=100000", "roles.trainer.count=2", "async.max_staleness=2")
    try:
        until(lambda: len(steps(job)) >= 3, "the third step")
        async with at_the_seat(job, "operator-1") as coordinator:
            first = await change(coordinator, lr=4e-4, entropy_coef=0.01)
            refused = await coordinator.change_knobs(ChangeRequest(values={"mis_low": 9.0}, who=ME))
            assert refused.epoch == 0
            assert "mis_low" in refused.refused
            until(lambda: len(steps(job)) >= first.at + 3, "steps with it")
            second = await change(coordinator, weights_every=3, temperature=1.3, minibatches=2)
            until(lambda: len(steps(job)) >= second.at + 8, "steps with weights given every third step")
            folder = Path(await coordinator.checkpoint_now(ME, "", False))
            rest = await coordinator.pause_run(ME, "")
            export = Path(await coordinator.checkpoint_now(ME, "", True))
            await change(coordinator, num_steps=rest + 2)
            await coordinator.resume_run(ME, "")
        said, _ = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
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
    trained = audit(job.run_dir()).trained
    assert len(trained) == len(set(trained)) == (rest + 2) * 4

    version = extra["version"]
    status, said, run = job.run(f"trainer.resume={folder}", f"run.num_steps={version + 2}", "roles.trainer.count=2")
    assert status == 0, said
    resumed = {p["step"] - 1: p["values"] for p in metrics(run) if "knobs/epoch" in p["values"]}
    assert sorted(resumed) == [version, version + 1]
    for values in resumed.values():
        assert values["train/lr"] == pytest.approx(4e-4)
        assert values["knob/minibatches"] == 2
    assert events(run, "knobs-restored")


@pytest.mark.asyncio
async def test_where_engines_and_trainer_take_turns_things_are_written_in_the_trainers_turn(job: Job) -> None:
    """A checkpoint while it runs, and one while it is paused, when the engines have the device."""
    process = job.start(
        'memory.share="switch"', "memory.capacity_mb=9", "memory.switch_s=40", "engine.context_length=64",
        "engine.max_running=4", "run.num_steps=100000", "trainer.async_save=true",
    )  # fmt: skip
    try:
        until(lambda: len(steps(job)) >= 2, "the second step")
        async with at_the_seat(job, "operator-1") as coordinator:
            refused = await coordinator.change_knobs(ChangeRequest(values={"weights_every": 2}, who=ME))
            assert "weights_every" in refused.refused
            running = Path(await coordinator.checkpoint_now(ME, "", False))
            rest = await coordinator.pause_run(ME, "")
            until(lambda: rest - 1 in steps(job), "the pause")
            paused = Path(await coordinator.checkpoint_now(ME, "", False))
            export = Path(await coordinator.checkpoint_now(ME, "", True))
            assert max(steps(job)) == rest - 1, "it was not trained meanwhile"
            await change(coordinator, lr=2e-4, num_steps=rest + 2)
            await coordinator.resume_run(ME, "")
        said, _ = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, said
    assert paused.name == export.name == f"version_{rest:08d}"
    assert (export / "config.json").is_file()
    for folder in (running, paused):
        assert (folder / "manifest.json").is_file()
    told = steps(job)
    assert sorted(told) == list(range(rest + 2))
    assert [told[step]["train/lr"] for step in (rest - 1, rest, rest + 1)] == pytest.approx([1e-3, 2e-4, 2e-4])
    trained = audit(job.run_dir()).trained
    assert len(trained) == len(set(trained)) == (rest + 2) * 4
