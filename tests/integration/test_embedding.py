"""A rollout actor of a real run inside other programs: the FastAPI example under uvicorn, and this process."""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import os
import re
import shlex
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from tests.harness.commands import Command
from tests.harness.run_job import Job, audit, events, make_job, metrics
from tests.harness.waiting import wait_until

from myxa.actors.contracts import CoordinatorContract, RolloutContract
from myxa.actors.ledger.file import decode_partial
from myxa.core.errors import LaunchError
from myxa.core.knobs import Operator
from myxa.launch.control.client import ControlClient
from myxa.launch.embed import EmbeddedRollout, rollout_in
from myxa.launch.run_dir import RunDir

pytestmark = pytest.mark.timeout(240)

ROOT = Path(__file__).parents[2]
README = ROOT / "examples/embed_in_fastapi/README.md"
"""What the first embedded actor is called: the run itself has one."""


@dataclass(frozen=True)
class Run:
    process: subprocess.Popen[str]
    folder: Path

    @property
    def steps(self) -> int:
        try:
            return sum("reward/mean" in point["values"] for point in metrics(self.folder))
        except (OSError, ValueError):
            return 0

    def query(self, sql: str, *args: object) -> list[tuple[Any, ...]]:
        db = sqlite3.connect(f"file:{self.folder / 'ledger.sqlite'}?mode=ro", uri=True, timeout=10)
        try:
            return db.execute(sql, args).fetchall()
        finally:
            db.close()

    def num_trained(self, rollout: str) -> int:
        """Groups that this actor finished and the trainer used."""
        return self.query("SELECT COUNT(*) FROM groups WHERE rollout = ? AND state = 'TRAINED'", rollout)[0][0]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run without end. One engine alone cannot hold all the groups that are under way, so a second one gets some;
    answers are long, so that there is always something unfinished."""
    job = make_job(tmp_path_factory.mktemp("embedding"))
    job.be_patient(0.5)
    process = job.start(
        "run.num_steps=100000", "algo.batch_size=8", "rollout.max_groups=4", "rollout.num_samples=2",
        "rollout.max_new_tokens=128",
    )  # fmt: skip
    try:
        wait_until(lambda: process.poll() is not None or _is_there(job), "the run's directory")
        assert process.poll() is None, process.communicate()[0]
        yield Run(process, job.run_dir())
    finally:
        process.terminate()
        process.communicate(timeout=60)


def _is_there(job: Job) -> bool:
    return (job.folder / "runs/latest/rdzv.json").exists()


def loop_problems() -> list[dict[str, Any]]:
    """What callbacks of the running loop raise from now on; asyncio itself would only log it."""
    problems: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
    return problems


async def until_status(rollout: EmbeddedRollout, is_met: Callable[[Any], bool], timeout_s: float = 60) -> None:
    async with asyncio.timeout(timeout_s):
        while not is_met(await rollout.status()):
            await asyncio.sleep(0.01)


# -- nothing is left behind ------------------------------------------------------------------------------------------


def traces() -> dict[str, Any]:
    """Everything that a guest could leave behind in this process. Libraries that it needs have handlers and threads of
    their own: transformers, numpy and torch, whose first sums in a fork start some."""
    importlib.import_module("transformers")
    _ = np.ones((256, 256)) @ np.ones((256, 256)), torch.ones(1 << 20).exp()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        policy = asyncio.get_event_loop_policy()
    loop = asyncio.get_running_loop()
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    loggers = [logging.getLogger(), *(logging.getLogger(name) for name in list(logging.root.manager.loggerDict))]
    return {
        "tasks": asyncio.all_tasks(), "threads": {task.name for task in Path("/proc/self/task").iterdir()},
        "python threads": set(threading.enumerate()), "children": psutil.Process().children(),
        "signal handlers": {sig: signal.getsignal(sig) for sig in signal.valid_signals()}, "wake-up descriptor": wakeup,
        "loop policy": policy, "loop's exception handler": loop.get_exception_handler(),
        "task factory": loop.get_task_factory(),
        "log handlers": {logger.name: list(logger.handlers) for logger in loggers if logger.handlers},
        "log levels": (logging.root.level, logging.getLogger("myxa").level, logging.getLogger("myxa").propagate),
        "hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook), "environment": dict(os.environ),
        "folder": Path.cwd(),
    }  # fmt: skip


async def settled_traces(before: dict[str, Any]) -> dict[str, Any]:
    """A thread that was joined is the kernel's for a moment longer."""
    give_up_at = time.monotonic() + 5
    while not (now := traces())["threads"] <= before["threads"] and time.monotonic() < give_up_at:
        await asyncio.sleep(0.01)
    return now


def open_files() -> dict[str, str]:
    found: dict[str, str] = {}
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            found[descriptor.name] = str(descriptor.readlink())
        except FileNotFoundError:  # the listing's own
            continue
    return found


async def test_a_plain_program_is_as_it_was_after_the_actor_has_left(run: Run) -> None:
    problems = loop_problems()
    before, files_before = traces(), set(open_files().items())
    async with rollout_in(run.folder) as rollout:
        own = rollout.name
        assert (await rollout.status()).phase in ("joining", "serving")
        await until_status(rollout, lambda status: status.phase == "serving" and status.running >= 4)
        # From now on nobody is given anything: what is handed back stays where it can be looked at.
        await rollout.node.ref(CoordinatorContract, "coordinator").set_pause("pause", Operator(), "")
    assert (await rollout.status()).phase == "left"
    assert (await rollout.status()).reason == "it was asked to leave"
    after = await settled_traces(before)
    for what, value in before.items():  # what earlier tests of this process left may have gone meanwhile
        is_left = not after[what] <= value if isinstance(value, set) else after[what] != value
        assert not is_left, f"{what}: {after[what]}, before {value}"
    # Files that earlier tests of this process left open may be closed meanwhile; none may be opened.
    assert set(open_files().items()) <= files_before

    requeued = run.query("SELECT group_id FROM transitions WHERE detail = ?", f"handed back by {own}")
    assert requeued, "no group was unfinished"
    assert run.query("SELECT * FROM groups WHERE rollout = ? AND state = 'DISPATCHED'", own) == []
    payloads = run.query("SELECT group_id, data FROM payloads WHERE NOT is_whole")
    num_tokens = sum(len(s.response_ids) for group_id, data in payloads for s in decode_partial(group_id, data))
    assert num_tokens > 0, "the groups came back without their tokens"

    async with rollout_in(run.folder, timeout_s=30) as rollout:
        await rollout.node.ref(CoordinatorContract, "coordinator").set_pause("resume", Operator(), "")
        again = ", ".join(str(group_id) for (group_id,) in requeued)
        sql = f"SELECT COUNT(*) FROM groups WHERE state = 'TRAINED' AND attempt = 2 AND group_id IN ({again})"
        async with asyncio.timeout(60):
            while run.query(sql)[0][0] == 0:
                await asyncio.sleep(0.1)
    assert problems == []


async def test_programs_that_join_at_once_get_names_of_their_own_and_a_cancelled_one_leaves(run: Run) -> None:
    problems = loop_problems()
    inside: list[EmbeddedRollout] = []

    async def host() -> None:
        async with rollout_in(run.folder) as rollout:
            inside.append(rollout)
            await asyncio.sleep(60)

    hosts = [asyncio.get_running_loop().create_task(host()) for _ in range(2)]
    async with asyncio.timeout(55):
        while len(inside) < 2:
            assert not any(task.done() for task in hosts), hosts
            await asyncio.sleep(0.01)
    assert len({rollout.name for rollout in inside}) == 2
    for task in hosts:
        task.cancel()
    assert all(isinstance(end, asyncio.CancelledError) for end in await asyncio.gather(*hosts, return_exceptions=True))
    assert [(await rollout.status()).phase for rollout in inside] == ["left", "left"]
    assert problems == []


async def test_an_actor_that_fails_leaves_and_its_program_goes_on(run: Run) -> None:
    async with rollout_in(run.folder) as rollout:
        assert await rollout.node.ref(RolloutContract, rollout.name).fence(rollout.node.epoch, "a test wants it")
        async with asyncio.timeout(30):
            reason = await rollout.ended()
        assert "fenced: a test wants it" in reason
        status = await rollout.status()
        assert (status.phase, status.reason) == ("left", reason)


def test_groups_of_a_program_that_is_killed_go_to_others(run: Run) -> None:
    host = Command([str(run.folder)], run.folder.parent, program=Path(__file__).with_name("host_program.py"))
    dispatched = "SELECT group_id FROM groups WHERE rollout = ? AND state = 'DISPATCHED'"
    try:
        assert host.stdout is not None
        name, said = host.stdout.readline().split()
        assert said == "serves"
        wait_until(lambda: bool(run.query(dispatched, name)), "groups of its own")
    finally:
        host.kill()
        host.communicate()
    wait_until(lambda: not run.query(dispatched, name), "its groups to go back")
    num_steps = run.steps
    wait_until(lambda: run.steps >= num_steps + 2, "two more steps")
    wait_until(lambda: any(e["text"].startswith(name) for e in events(run.folder, "engine-gone")), "the event")


# -- what cannot be joined -------------------------------------------------------------------------------------------


async def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(LaunchError) as caught:
        async with rollout_in(folder, **options):
            pass
    assert caught.value.remedy
    return str(caught.value)


async def test_runs_that_are_not_there_are_refused(run: Run, tmp_path: Path) -> None:
    assert f"no live run in {tmp_path}" in await refusal(tmp_path)
    record = json.loads((run.folder / "rdzv.json").read_text())
    (tmp_path / "rdzv.json").write_text(json.dumps({**record, "socket_dir": str(tmp_path / "gone")}))
    assert "is over, or runs on another host" in await refusal(tmp_path)
    nobody = {"node_rank": 0, "ipc": [f"ipc://{tmp_path}/c", f"ipc://{tmp_path}/b"]}
    (tmp_path / "rdzv.json").write_text(json.dumps({**record, "endpoints": nobody}))
    with RunDir(tmp_path).held():
        assert "no answer from the registry" in await refusal(tmp_path, timeout_s=1)


# -- the example -----------------------------------------------------------------------------------------------------


def command_in_readme() -> tuple[dict[str, str], list[str]]:
    """The line that starts the service: variables and words."""
    (line,) = re.findall(r"^MYXA_RUN=\S+ uvicorn .*$", README.read_text(), re.M)
    variable, program, *words = shlex.split(line)
    assert program == "uvicorn"
    return dict([variable.split("=", 1)]), words


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return json.load(answer)


def test_the_fastapi_example_serves_both_its_users_and_the_run(run: Run, tmp_path: Path) -> None:
    variables, words = command_in_readme()
    assert variables == {"MYXA_RUN": "examples/calculator/runs/latest"}
    words[words.index("--port") + 1] = "0"
    said = tmp_path / "said"
    live = ControlClient.of(run.folder)
    live.ask("pause", reason="the processor is for the service's start")
    with said.open("w") as out:
        service = subprocess.Popen(
            [sys.executable, "-m", "uvicorn", *words],
            env={**os.environ, "MYXA_RUN": str(run.folder.parent / "latest"), "OMP_NUM_THREADS": "1"},
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
        )
    try:
        wait_until(
            lambda: service.poll() is not None or "Uvicorn running on" in said.read_text(), "the service's start"
        )
        url = re.findall(r"http://[\d.]+:\d+", said.read_text())
        assert url, said.read_text()
        wait_until(lambda: get(f"{url[0]}/myxa")["phase"] == "serving", "the embedded actor's first weights")
        live.ask("resume", reason="it serves")
        status = get(f"{url[0]}/myxa")
        own, answers = status["rollout"], 0
        assert status["version"] >= 0
        while answers < 50 or run.num_trained(own) < 4:
            assert get(f"{url[0]}/health") == {"status": "ok"}
            assert get(f"{url[0]}/hello?name=you") == {"message": "Hello, you!"}
            answers += 2
        service.send_signal(signal.SIGINT)
        service.wait(60)
    finally:
        service.kill()
        service.wait()
    assert "Application shutdown complete" in said.read_text(), "Ctrl-C is uvicorn's business, and it had it"
    assert "Traceback" not in said.read_text()
    assert run.query("SELECT * FROM groups WHERE rollout = ? AND state = 'DISPATCHED'", own) == []
    num_steps = run.steps
    wait_until(lambda: run.steps >= num_steps + 2, "the run going on without the service")
    gone = lambda: [e["text"] for e in events(run.folder, "engine-gone") if e["text"].startswith(own)]  # noqa: E731
    wait_until(lambda: any("closed" in text for text in gone()), "the event")


async def test_when_the_run_ends_the_actor_leaves_and_the_books_are_clean(run: Run) -> None:
    async with rollout_in(run.folder) as rollout:
        await until_status(rollout, lambda status: status.running > 0)
        run.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            reason = await rollout.ended()
        assert reason.startswith("the run")
        assert (await rollout.status()).phase == "left"
    said, _ = await asyncio.to_thread(run.process.communicate, timeout=60)
    assert run.process.returncode == 0, said
    facts = audit(run.folder)
    assert len(facts.trained) == len(set(facts.trained)) >= 16
    assert set(facts.states) <= {"TRAINED", "DURABLE", "READY", "DISPATCHED", "REQUEUED", "DROPPED"}, facts.states
    assert not (run.folder / "rdzv.json").exists()
    assert "no live run" in await refusal(run.folder)
