"""eta changed on a running system by an actor call: looser at once, tighter at once, and never a token too old."""

from __future__ import annotations

import pytest
from run_job import Job, audit, metrics, until

from myxa.actors.contracts import CoordinatorContract
from myxa.transport.address import Rendezvous
from myxa.transport.node import Node

pytestmark = pytest.mark.timeout(180)


def lags(job: Job) -> list[tuple[int, float]]:
    """(version trained from, largest lag) of every step so far."""
    try:
        points = metrics(job.run_dir())
    except (OSError, ValueError):
        return []
    return [(p["step"] - 1, p["values"]["lag/max"]) for p in points if "lag/max" in p["values"]]


async def set_eta(job: Job, eta: int) -> int:
    """Join the run from outside, change eta, leave; returns the newest version at the time of the change."""
    node = await Node.attach(name=f"operator-{eta}", rdzv=Rendezvous.load(job.run_dir() / "rdzv.json"))
    try:
        coordinator = node.ref(CoordinatorContract, "coordinator")
        stats = await coordinator.set_max_staleness(eta)
        assert stats.max_staleness == eta
        return (await coordinator.status()).version
    finally:
        await node.close()


@pytest.mark.asyncio
async def test_eta_changes_while_the_run_goes_on(job: Job) -> None:
    process = job.start("async.max_staleness=0", "run.num_steps=90")
    try:
        until(lambda: len(lags(job)) >= 5, "the fifth step")
        raised = await set_eta(job, 3)
        until(lambda: len(lags(job)) >= raised + 25, "steps at eta 3")
        lowered = await set_eta(job, 0)
        said, _ = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, said
    by_step = dict(lags(job))
    assert max(lag for step, lag in by_step.items() if step < raised) == 0
    assert max(by_step.values()) >= 1, "with eta 3 generation ran ahead"
    assert max(by_step.values()) <= 3
    # One batch may have been claimed before the change arrived.
    assert max(lag for step, lag in by_step.items() if step > lowered + 1) == 0
    trained = audit(job.run_dir()).trained
    assert len(trained) == len(set(trained)) == 90 * 4
