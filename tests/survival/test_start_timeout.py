"""A run whose trainer or engines do not come to work in time fails, and says who was waited for: another attempt of the
coordinator would wait as long for the same."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.knobs.coordinator_room import until

from myxa.actors.contracts import CoordinatorContract
from myxa.actors.coordinator.coordinator import Coordinator
from myxa.actors.coordinator.options import CoordinatorOptions
from myxa.core.clock import SystemClock
from myxa.transport.node import InprocNetwork, Node


@pytest.mark.parametrize(
    ("has_trainer", "said"),
    [
        (False, "trainer/0: it was not ready within 0.3 s -- see its log"),
        (True, "rollout: no rollout actor had an engine that serves within 0.3 s -- see its log"),
    ],
)
async def test_the_run_has_failed_and_not_its_coordinator(tmp_path: Path, has_trainer: bool, said: str) -> None:
    node = await Node.attach(name="launcher/0", network=InprocNetwork())
    options = CoordinatorOptions(
        name="late", num_steps=0, has_engines=True, eval_at_start=False, launch="late", start_timeout_s=0.3,
        audit_path=tmp_path / "audit.jsonl", journal_path=tmp_path / "coordinator.journal",
    )  # fmt: skip
    coordinator = Coordinator(options=options, clock=SystemClock())
    try:
        await node.start(coordinator, "coordinator")
        ref = node.ref(CoordinatorContract, "coordinator")
        if has_trainer:
            await ref.trainer_ready(0, None, {})
        await until(lambda: coordinator._state.phase == "failed", "the run to be given up")
        status = await ref.status()
        assert status.error.startswith(said)
        await asyncio.sleep(0.05)
        assert not node.failed.done(), "it goes on answering"
    finally:
        await node.close(grace_s=0.5)
