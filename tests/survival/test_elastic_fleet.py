"""Engines and machines come and go under load: no prompt is lost or trained twice, and throughput follows.

Proved of a real run on tcp with CURVE, from the ledger's own transitions: 2 -> 6 -> 1 engines on the first machine, then
a second machine that comes, leaves in order, comes again and is killed with all its processes.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest
from tests.harness.run_job import events
from tests.harness.waiting import wait_until
from tests.survival.fleet import Fleet, fleet_in

pytestmark = [pytest.mark.timeout(600), pytest.mark.soak]


def check_ledger(fleet: Fleet) -> None:
    """Every prompt that was drawn is in exactly one state, and none was trained twice."""
    audit = fleet.audit()
    assert audit.problems == ()
    assert set(audit.trained.values()) == {1}, "nothing is trained twice"
    ids = [row[0] for row in fleet.rows("SELECT group_id FROM groups ORDER BY group_id")]
    assert ids == list(range(len(ids))), "every prompt that was drawn is in the ledger"
    assert not audit.dropped
    assert not events(fleet.run_dir, "run-failed")


def test_throughput_follows_the_number_of_engines_and_nothing_is_lost(tmp_path: Path):
    with fleet_in(tmp_path, "roles.rollout.count=2") as fleet:
        fleet.until_engines(2)
        two = fleet.pace()
        assert fleet.ask("scale", role="rollout", count=6, wait_s=150)["is_done"], fleet.said()
        fleet.until_engines(6)
        six = fleet.pace()
        assert fleet.ask("scale", role="rollout", count=1, wait_s=150)["is_done"], fleet.said()
        fleet.until_engines(1)
        one = fleet.pace()
        print(f"groups/s with 2, 6, 1 engines: {two:.2f}, {six:.2f}, {one:.2f}")
        assert six > 1.4 * two, "more engines make more"
        assert one < 0.8 * two, "fewer make less"
        fleet.goes_on(1)
        fleet.end()
        check_ledger(fleet)


def test_a_machine_comes_leaves_in_order_comes_again_and_is_killed(tmp_path: Path):
    with fleet_in(tmp_path, "roles.rollout.count=1") as fleet:
        alone = fleet.pace()
        second = fleet.join(3)
        fleet.until_engines(4)
        together = fleet.pace()
        serving = {event["text"].split()[0] for event in events(fleet.run_dir, "engine-joined")}
        assert serving >= {f"rollout/{number}" for number in range(4)}
        second.send_signal(signal.SIGTERM)
        assert second.wait(90) == 0, fleet.said()
        fleet.until_engines(1)
        again = fleet.pace()
        print(f"groups/s alone, with a second machine, alone again: {alone:.2f}, {together:.2f}, {again:.2f}")
        assert together > 1.4 * alone
        assert again < 0.7 * together
        assert not fleet.rows("SELECT 1 FROM groups WHERE state = 'DISPATCHED' AND rollout != 'rollout/0'")
        third = fleet.join(2)
        fleet.until_engines(3)
        fleet.goes_on(1)
        workers = third.below()
        os.kill(third.pid, signal.SIGKILL)
        third.wait()
        gone, left = psutil.wait_procs(workers, timeout=30)
        assert not left, f"{len(gone)} ended, {left} outlived their launcher"
        fleet.until_engines(1)
        held = "SELECT 1 FROM groups WHERE state = 'DISPATCHED' AND rollout != 'rollout/0'"
        wait_until(lambda: not fleet.rows(held), "what it had in hand to be given to others")
        fleet.goes_on(2)
        fleet.end()
        check_ledger(fleet)
        given_back = fleet.rows("SELECT COUNT(*) FROM transitions WHERE to_state = 'REQUEUED'")
        assert given_back[0][0] > 0, "it was killed with work in hand"
