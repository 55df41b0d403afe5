"""The whole loop with weights sent from the trainer's ranks to a server, through the launcher."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.harness.run_job import (  # of tests/integration
    Job,
    audit,
    events,
    make_job,
    metrics,
)
from tests.harness.waiting import wait_until
from tests.weights.weight_lab import serving

from myxa.actors.contracts import CoordinatorContract
from myxa.core.knobs import ChangeReply, ChangeRequest, KnobValue, Operator
from myxa.transport.address import Rendezvous
from myxa.transport.node import Node


@pytest.mark.timeout(180)
async def test_a_sharded_trainer_sends_what_the_server_then_computes_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """And goes over to folders and back, while the run goes on."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))  # sharding imports torch's compiler
    monkeypatch.setenv("FLEET_KEY", "between-us")
    job = make_job(tmp_path)
    with serving(tmp_path / "model", key="between-us") as server:
        process = job.start(
            "roles.rollout.kind=sglang", f'engine.attach=["{server.url}"]', "weights.channel=nccl",
            "engine.key_env=FLEET_KEY", "weights.bucket_mb=1", "roles.trainer.count=2", "trainer.strategy=fsdp",
            "async.max_staleness=0", "reward.fn=regex", 'reward.pattern="[1-4]"', "run.num_steps=100000",
            "guard.every=0",
        )  # fmt: skip
        try:
            wait_until(lambda: len(_adopted(job, "rollout/0")) >= 2, "the second version in the server")
            run_dir = job.run_dir()
            node = await Node.attach(name="operator-1", rdzv=Rendezvous.load(run_dir / "rdzv.json"))
            coordinator, me = node.ref(CoordinatorContract, "coordinator"), Operator(user="test")

            async def turn(**values: KnobValue) -> ChangeReply:
                reply = await coordinator.change_knobs(ChangeRequest(values=values, who=me))
                if reply.epoch:
                    wait_until(lambda: reply.at in _adopted(job, "rollout/0"), f"version {reply.at} in the server")
                return reply

            assert 'they take "nccl", "cuda_ipc" or "disk"' in (await turn(weight_channel="shm")).refused
            assert "and it names none" in (await turn(weight_channel="cuda_ipc")).refused
            over = (await turn(weight_channel="disk")).at
            assert [path.name for path in (run_dir / "weights").iterdir()][-1:], "they go through folders now"
            back = (await turn(weight_channel="nccl")).at
            last = await coordinator.pause_run(me, "") + 1
            assert not (await coordinator.change_knobs(ChangeRequest(values={"num_steps": last}, who=me))).refused
            await coordinator.resume_run(me, "")
            await node.close()
            said, _ = process.communicate(timeout=120)
        finally:
            process.kill()
            process.wait()
    assert process.returncode == 0, said
    assert 2 <= over < back
    assert len(set(audit(run_dir).trained)) == 4 * last
    steps = [p["values"] for p in metrics(run_dir) if "train/logprob_diff_abs_max" in p["values"]]
    assert len(steps) == last
    assert max(abs(s["train/grad_norm"]) for s in steps) > 0, "the weights changed"
    assert max(s["train/logprob_diff_abs_max"] for s in steps) < 2e-4, "the server computes with the trainer's weights"
    adopted = _adopted(job, "rollout/0")
    assert adopted == list(range(last + 1)), "each version, by whichever channel"
    assert not (run_dir / "weights").exists(), "folders went with the last version that lay in one"
    assert not events(run_dir, "engine-fenced") and not events(run_dir, "weights-refused")


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_a_killed_server_comes_back_and_is_given_the_weights_before_it_works(tmp_path: Path):
    """SIGKILL at an arbitrary moment, three times; the server is started again at the same address, as a supervisor
    would. The run goes on with the other one and takes it up again."""
    job = make_job(tmp_path)
    folder = tmp_path / "model"
    with serving(folder) as first, ExitStack() as stack:
        second = stack.enter_context(serving(folder))
        port = int(second.url.rpartition(":")[2])
        process = stack.enter_context(
            job.start(
                "roles.rollout.kind=sglang", f'engine.attach=["{first.url}", "{second.url}"]',
                "roles.rollout.count=2", "roles.rollout.max_restarts=10", "weights.channel=nccl",
                "weights.join_s=10.0", "weights.transfer_s=10.0", "reward.fn=regex", 'reward.pattern="[1-4]"',
                "run.num_steps=100000", "run.max_wall_s=120.0", "guard.every=0",
            )
        )  # fmt: skip
        try:
            wait_until(lambda: len(_adopted(job, "rollout/1")) >= 3, "the third version in the second server")
            for life in range(3):
                second.kill()
                second = stack.enter_context(serving(folder, port))
                joined = 3 + life
                wait_until(
                    lambda n=joined: len(events(job.run_dir(), "engine-joined")) >= n, "the return of the server"
                )
                seen = len(_adopted(job, "rollout/1"))
                wait_until(lambda n=seen: len(_adopted(job, "rollout/1")) >= n + 3, "new versions in it")
            said, _ = process.communicate(timeout=200)
        finally:
            process.kill()
    assert process.returncode == 0, said
    trained = audit(job.run_dir()).trained
    assert len(trained) == len(set(trained)) > 0
    lags = [p["values"]["lag/max"] for p in metrics(job.run_dir()) if "lag/max" in p["values"]]
    assert max(lags) <= 2, "nobody served older weights than allowed"


def _adopted(job: Job, rollout: str) -> list[int]:
    if not (job.folder / "runs").exists():
        return []
    found = [e for e in events(job.run_dir(), "weights-adopted") if e["source"] == rollout]
    return [e["data"]["version"] for e in found]
