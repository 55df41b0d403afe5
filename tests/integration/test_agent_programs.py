"""Programs as agents, in sandboxes, in a real run: kill -9 of programs and of the actor that started them."""

from __future__ import annotations

import os
import signal
import sqlite3
import sys
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from tests.harness.ledger_audit import audit_ledger
from tests.harness.run_job import make_job, metrics, worker_pids
from tests.harness.waiting import wait_until

from myxa.actors.ledger.file import decode_group
from myxa.actors.user_code.sandbox import sandbox as make_sandbox
from myxa.actors.user_code.sandbox import trouble_with
from myxa.core.config.run import SandboxName

AGENT = """
import json, os, sys, time, urllib.request
task = json.load(open(os.environ["MYXA_TASK_FILE"]))
def post(path, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["MYXA_BASE_URL"] + path, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))
messages = task["messages"]
said = post("/v1/chat/completions", {"messages": messages})["choices"][0]["message"]["content"]
time.sleep(1.5 if task["attempt"] == 0 else 0)
post("/v1/chat/completions", {"messages": [*messages, {"role": "assistant", "content": said}, messages[-1]]})
json.dump(10.0 * task["is_replay"] + task["attempt"], open(os.environ["MYXA_REWARD_FILE"], "w"))
"""


def programs(mark: str, below: int | None = None) -> list[int]:
    """Running ones, without what started them; those of one actor."""
    found: list[int] = []
    for one in psutil.process_iter(["cmdline"]) if below is None else psutil.Process(below).children(recursive=True):
        try:
            words = one.cmdline()
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
        if words[-2:] == ["agent.py", mark] and "confine.py" not in " ".join(words) and "bwrap" not in words:
            found.append(one.pid)
    return found


def rewards(ledger: Path) -> list[float]:
    with closing(sqlite3.connect(f"file:{ledger}?mode=ro", uri=True)) as db:
        rows = db.execute("SELECT group_id, data FROM payloads WHERE is_whole").fetchall()
    return [float(one) for group_id, data in rows for one in decode_group(group_id, data).rewards]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "sandbox",
    [
        "rlimits",
        pytest.param(
            "bubblewrap",
            marks=[pytest.mark.soak, pytest.mark.skipif(bool(trouble_with("bubblewrap")), reason="there is no bwrap")],
        ),
    ],
)
def test_programs_and_their_actor_are_killed_and_nothing_is_lost(tmp_path: Path, sandbox: SandboxName) -> None:
    job, mark = make_job(tmp_path), f"mark-{time.monotonic_ns()}"
    (tmp_path / "agent.py").write_text(AGENT)
    with (tmp_path / "run.toml").open("a") as file:
        file.write(f'[agent]\ncommand = "{sys.executable} -I -S agent.py {mark}"\n')
    process = job.start(
        "run.num_steps=6", "algo.batch_size=2", "rollout.num_samples=2", "rollout.max_groups=4", "async.max_staleness=2",
        "roles.rollout.count=2", 'rollout.workflow="agent"',
        f'agent.sandbox="{sandbox}"', 'agent.reward="file"', 'reward.fn="workflow"',
    )  # fmt: skip
    try:
        wait_until(lambda: len(programs(mark)) > 2 or process.poll() is not None, "a program")
        assert process.poll() is None, process.communicate()[0]
        ((actor,), (other,)) = (worker_pids(process.pid, f"rollout/{number}") for number in (0, 1))
        wait_until(lambda: programs(mark, other), "a program of the second actor")
        os.kill(programs(mark, other)[0], signal.SIGKILL)
        wait_until(lambda: programs(mark, actor), "a program of the first actor")
        its = programs(mark, actor)
        os.kill(actor, signal.SIGKILL)
        wait_until(lambda: not any(psutil.pid_exists(pid) for pid in its), "the end of its programs")
        text, _ = process.communicate(timeout=180)
        assert process.returncode == 0, text
    finally:
        process.terminate()
    assert programs(mark) == []
    make_sandbox(sandbox)  # the next owner removes the folders that the killed one left
    found = audit_ledger(job.run_dir() / "ledger.sqlite")
    assert found.problems == ()
    assert set(found.trained.values()) == {1}
    seen = rewards(job.run_dir() / "ledger.sqlite")
    assert any(one >= 10.0 for one in seen), "a program was told that it is a replay"
    assert any(one % 10 for one in seen), "one that was killed was started again"
    retried = [point["values"].get("rollout/num_retried", 0) for point in metrics(job.run_dir())]
    assert max(retried) >= 1
