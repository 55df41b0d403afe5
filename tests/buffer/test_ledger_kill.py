"""kill -9 at any moment: what the writer was told is written is there, whole, and the life goes on."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from myxa.actors.ledger.ledger import Ledger
from myxa.actors.ledger.states import State

SEED = 907
NUM_KILLS = 3

# Runs until killed: draws, finishes, drops, claims, trains; one line per verb, after it returned.
WRITER = """
import json, random, sys
from pathlib import Path
from myxa.actors.ledger.ledger import Ledger
from myxa.actors.ledger.states import Row, State

ledger = Ledger(Path(sys.argv[1]), run="kill", fingerprint="d", wall=lambda: 0.0)
rng = random.Random(int(sys.argv[2]))

def say(verb, *ids):
    sys.stdout.write(json.dumps([verb, *ids]) + "\\n")
    sys.stdout.flush()

say("open")
while True:
    held = ledger.rows(State.DISPATCHED)
    back = ledger.rows(State.REQUEUED)[:2]
    first = ledger.next_group_id
    new = [Row(first + i, ledger.next_draw + i, -1, 1, rollout="r", epoch=1, version=0) for i in range(3)]
    ledger.dispatch(new, back)
    say("DISPATCHED", *[row.group_id for row in new + back])
    became = {}
    with ledger.together():
        for row in held:
            if rng.random() < 0.1:
                ledger.drop([(row.group_id, "engine-error")])
                became[row.group_id] = "DROPPED"
            else:
                ledger.finish(row.group_id, b"%d" % row.group_id * 5000, version=0, num_tokens=1)
                became[row.group_id] = "READY"
    for group_id, state in became.items():
        say(state, group_id)
    ready = [row.group_id for row in ledger.rows(State.READY)]
    if len(ready) >= 4:
        step = ledger.next_step
        ledger.claim(step, ready[:4])
        say("CLAIMED", *ready[:4])
        ledger.trained(step)
        say("TRAINED", *ready[:4])
    if rng.random() < 0.2:
        ledger.durable(ledger.newest_version)
        say("durable")
"""

# States that a group may be in after it was acknowledged in the key's state: the writer had gone on when it died.
AFTER = {
    "DISPATCHED": {"REQUEUED", "READY", "DROPPED"},
    "READY": {"READY", "CLAIMED"},
    "CLAIMED": {"CLAIMED", "TRAINED"},
    "TRAINED": {"TRAINED", "DURABLE"},
    "DURABLE": {"DURABLE"},
    "DROPPED": {"DROPPED"},
}


def test_nothing_is_lost_when_the_buffer_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    rng = random.Random(SEED)
    told: dict[int, str] = {}
    for round_number in range(NUM_KILLS):
        command = [sys.executable, "-c", WRITER, str(path), str(SEED + round_number)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            assert json.loads(writer.stdout.readline()) == ["open"]
            time.sleep(rng.uniform(0.0, 0.25))
            writer.send_signal(signal.SIGKILL)
            lines = writer.stdout.read().splitlines(keepends=True)
        for line in lines:
            if line.endswith("\n"):
                state, *ids = json.loads(line)
                told |= dict.fromkeys(ids, state)
        ledger = Ledger(path, run="kill", fingerprint="d", wall=lambda: 0.0)
        for group_id, state in told.items():
            row = ledger.find(group_id)
            assert row is not None, f"seed {SEED}: group {group_id} was {state} and is lost"
            assert row.state in AFTER[state], f"seed {SEED}: group {group_id} was {state}, is {row.state}"
            told[group_id] = "DISPATCHED" if row.state is State.REQUEUED else row.state
            if row.state in (State.READY, State.CLAIMED, State.TRAINED):
                assert ledger.payload(group_id) == b"%d" % group_id * 5000
        assert not ledger.rows(State.DISPATCHED)
        claimed = ledger.rows(State.CLAIMED)
        assert len(claimed) in (0, 4)
        if claimed:  # the trainer asks for the same step again, and reports it
            assert ledger.claim_of(ledger.newest_version) == claimed
            ledger.trained(ledger.newest_version)
            told |= dict.fromkeys([row.group_id for row in claimed], "TRAINED")
        assert ledger.next_group_id >= max(told, default=-1) + 1
        ledger.close()
    assert len(told) > 25, f"seed {SEED}: the writer hardly wrote"
