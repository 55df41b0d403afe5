"""The whole loop with weights sent from the trainer's ranks to a server, through the launcher."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.harness.run_job import Job, audit, events, make_job, metrics
from tests.harness.waiting import wait_until
from tests.weights.weight_lab import serving

from myxa.actors.contracts import CoordinatorContract
from myxa.core.knobs import ChangeRequest, Operator
from myxa.transport.address import Rendezvous
from myxa.transport.node import Node


@pytest.mark.timeout(180)
async def test_a_gang_sends_what_the_server_then_computes_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FLEET_KEY", "between-us")
    job = make_job(tmp_path)
    with serving(tmp_path / "model", key="between-us") as server:
        process = job.start(
            "roles.rollout.kind=sglang", f'engine.attach=["{server.url}"]', "weights.channel=nccl",
            "engine.key_env=FLEET_KEY", "weights.bucket_mb=1", "roles.trainer.count=2",
            "async.max_staleness=0", "reward.fn=regex", 'reward.pattern="[1-4]"', "run.num_steps=100000",
        )  # fmt: skip
        try:
            wait_until(lambda: len(_adopted(job, "rollout/0")) >= 2, "the second version in the server")
            run_dir = job.run_dir()
            node = await Node.attach(name="operator-1", rdzv=Rendezvous.load(run_dir / "rdzv.json"))
            coordinator, me = node.ref(CoordinatorContract, "coordinator"), Operator(user="test")

            last = await coordinator.set_pause("pause", me, "") + 1
            assert not (await coordinator.change_knobs(ChangeRequest(values={"num_steps": last}, who=me))).refused
            await coordinator.set_pause("resume", me, "")
            await node.close()
            said, _ = process.communicate(timeout=120)
        finally:
            process.kill()
            process.wait()
    assert process.returncode == 0, said
    assert len(set(audit(run_dir).trained)) == 4 * last
    steps = [p["values"] for p in metrics(run_dir) if "train/logprob_diff_abs_max" in p["values"]]
    assert len(steps) == last
    assert max(abs(s["train/grad_norm"]) for s in steps) > 0, "the weights changed"
    assert max(s["train/logprob_diff_abs_max"] for s in steps) < 2e-4, "the server computes with the trainer's weights"
    adopted = _adopted(job, "rollout/0")
    assert adopted == list(range(last + 1)), "each version"
    assert not events(run_dir, "engine-fenced") and not events(run_dir, "weights-refused")


def _adopted(job: Job, rollout: str) -> list[int]:
    if not job.has("events.jsonl"):
        return []
    found = [e for e in events(job.run_dir(), "weights-adopted") if e["source"] == rollout]
    return [e["data"]["version"] for e in found]
