"""kill -9 of agents and of the actor that has their gateway, in each phase of a rollout: no sample is lost or
doubled, recorded turns are answered from the record, an attempt that comes after another one knows it, and the run
ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.harness.ledger_audit import audit_ledger
from tests.harness.run_job import Job, is_alive, make_job, metrics, worker_pids
from tests.harness.waiting import wait_until

PHASES = ("before", "stream", "between", "reward", "end")
NUM_STEPS = 4
COMMON = """
import http.client, json, os, signal, time, urllib.parse
from pathlib import Path

HERE = Path(__file__).resolve().parent

def note(**facts):
    facts["life"] = len(list(HERE.glob("done.*.rollout")))
    with (HERE / "log").open("a") as file:
        file.write(json.dumps(facts) + chr(10))

def is_held():  # between strikes nothing begins, so that the run does not end before the last of them
    return not (HERE / "over").exists() and not list(HERE.glob("strike.*"))

def reached(phase):
    for who in ("agent", "rollout"):
        try:
            (HERE / f"strike.{phase}.{who}").rename(HERE / f"done.{phase}.{who}.part")
        except FileNotFoundError:
            continue
        time.sleep(1.5 if who == "rollout" else 0.2)  # what was said is reported to the buffer meanwhile
        (HERE / f"done.{phase}.{who}.part").rename(HERE / f"done.{phase}.{who}")
        if who == "agent":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)  # until the actor's death ends it

def rewarded(texts):
    return float(sum(map(len, texts)) % 3)
"""
OVER_HTTP = """
class Door:
    def __init__(self, url, key):
        self.where, self.key = urllib.parse.urlsplit(url).netloc, key

    def post(self, path, body, then=lambda: None):
        connection = http.client.HTTPConnection(self.where, timeout=60)
        headers = {"Authorization": "Bearer " + self.key, "Content-Type": "application/json"}
        connection.request("POST", path, json.dumps(body), headers)
        then()
        return connection.getresponse()

def rollout(task, url, key, end):
    while is_held():
        time.sleep(0.02)
    door, who = Door(url, key), {name: task[name] for name in ("session_id", "attempt", "is_replay")}
    note(at="begin", pid=os.getpid(), **who)
    reached("before")
    messages = list(task["messages"])
    lines = door.post("/v1/chat/completions", {"messages": messages, "stream": True})
    text, ids = "", []
    for line in lines:
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:])["choices"]:
                text += choice["delta"].get("content") or ""
                ids += choice.get("token_ids", [])
            reached("stream")
    note(at="first", ids=ids, **who)
    reached("between")
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "again"}]
    answer = json.load(door.post("/v1/chat/completions", {"messages": messages}))["choices"][0]
    note(at="second", ids=answer["token_ids"], **who)
    door.post(end, {"reward": rewarded([text, answer["message"]["content"] or ""])}, lambda: reached("reward")).read()
    reached("end")
"""
AGENTS = {
    "program": """
task = json.loads(Path(os.environ["MYXA_TASK_FILE"]).read_text())
rollout(task, os.environ["MYXA_BASE_URL"], os.environ["OPENAI_API_KEY"], "/v1/session/reward")
""",
    "polls": """
while True:
    door = Door(os.environ["MYXA_BASE_URL"], os.environ["MYXA_TASKS_KEY"])
    found = door.post("/v1/tasks/next", {})
    if found.status == 200:
        task = json.load(found)
        rollout(task, task["base_url"], task["key"], "/v1/session/end")
""",
    "pushed": """
import sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Service(BaseHTTPRequestHandler):
    def do_POST(self):
        task = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(202)
        self.end_headers()
        again = {"daemon": True, "target": rollout, "args": (task, task["base_url"], task["key"], "/v1/session/end")}
        threading.Thread(**again).start()

    def log_message(self, *words):
        pass

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Service).serve_forever()
""",
    "workflow": """
import asyncio

async def solve(ctx, prompt):
    while is_held():
        await asyncio.sleep(0.02)
    who = {"session_id": ctx.session_id, "attempt": ctx.attempt, "is_replay": ctx.is_replay}
    note(at="begin", **who)
    reached("before")
    messages = [{"role": "user", "content": prompt.messages[-1].content}]
    text, ids = "", []
    async with ctx.openai as client:
        async for chunk in await client.chat.completions.create(model="policy", messages=messages, stream=True):
            text += chunk.choices[0].delta.content or ""
            ids += getattr(chunk.choices[0], "token_ids", None) or []
            reached("stream")
        note(at="first", ids=ids, **who)
        reached("between")
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "again"}]
        chat = await client.chat.completions.create(model="policy", messages=messages)
    note(at="second", ids=chat.choices[0].token_ids, **who)
    reached("reward")
    samples = ctx.samples(reward=rewarded([text, chat.choices[0].message.content or ""]))
    reached("end")
    return samples
""",
}


@dataclass
class Deaths:
    """A run whose agents are struck."""

    job: Job
    command: Any
    killed: list[str] = field(default_factory=list[str])

    def notes(self, at: str) -> list[dict[str, Any]]:
        path = self.job.folder / "log"
        found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [one for one in found if one["at"] == at]

    def done(self) -> set[str]:
        return {path.name[5:] for path in self.job.folder.glob("done.*.*") if path.suffix != ".part"}

    def kill_actors(self) -> None:
        """Those that agents ask for."""
        for name in sorted(self.done() - set(self.killed)):
            if name.endswith(".rollout"):
                pids = worker_pids(self.command.pid, "rollout/0")
                if not pids:  # it is being started
                    continue
                with suppress(ProcessLookupError):
                    os.kill(pids[0], signal.SIGKILL)
            self.killed.append(name)


@contextmanager
def served(job: Job, port: int) -> Iterator[Callable[[], None]]:
    """The service of kind "pushed"; to be called from time to time: one that died is started again."""
    words = [sys.executable, str(job.folder / "agent.py"), str(port)]
    process = subprocess.Popen(words)

    def look() -> None:
        nonlocal process
        if process.poll() is not None:
            process = subprocess.Popen(words)

    try:
        yield look
    finally:
        process.kill()
        process.wait()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def struck(folder: Path, kind: str, strikes: tuple[str, ...], *more: str) -> Deaths:
    """A run to its end, with the strikes one after the other."""
    job = make_job(folder)
    text = AGENTS[kind] if kind == "workflow" else OVER_HTTP + AGENTS[kind]
    (folder / "agent.py").write_text(COMMON + text)
    port = free_port()
    how = {
        "program": ('rollout.workflow="agent"', f'agent.command="{sys.executable} agent.py"'),
        "polls": ('rollout.workflow="agent"', f'agent.command="{sys.executable} agent.py"', "agent.polls=true", "agent.workers=2"),
        "pushed": ('rollout.workflow="agent"', f'agent.url="http://127.0.0.1:{port}/"', "agent.silence_s=3"),
        "workflow": ('rollout.workflow="agent.py:solve"', "rollout.workers=1"),
    }[kind]  # fmt: skip
    flags = (
        *how, 'reward.fn="workflow"', f"run.num_steps={NUM_STEPS + len(strikes)}", "rollout.num_samples=2", "rollout.max_groups=2",
        "roles.rollout.max_restarts=20", "rollout.save_partials_s=0.2", "rollout.max_retries=10", "algo.batch_size=2", "data.max_passes=1",
    )  # fmt: skip
    command = job.start(*flags, *more)
    run = Deaths(job, command)
    try:
        with served(job, port) if kind == "pushed" else nullcontext(lambda: None) as look:
            for strike in strikes:
                (folder / f"strike.{strike}").touch()

                def is_over(strike: str = strike) -> bool:
                    look()
                    run.kill_actors()
                    return strike in run.killed or command.poll() is not None

                wait_until(is_over, strike, timeout_s=120)
                assert command.poll() is None, f"the run ended before {strike}: {command.communicate()[0]}"
            (folder / "over").touch()
            wait_until(lambda: look() or command.poll() is not None, "the end of the run", timeout_s=200)
        printed, _ = command.communicate(timeout=60)
        assert command.returncode == 0, printed
    finally:
        command.terminate()
    return run


def check(run: Deaths, num_strikes: int) -> None:
    run_dir = run.job.run_dir()
    found = audit_ledger(run_dir / "ledger.sqlite")
    assert found.problems == ()
    num_steps = NUM_STEPS + num_strikes
    assert sum(found.trained.values()) >= 2 * num_steps and set(found.trained.values()) == {1}
    assert {p["step"] for p in metrics(run_dir) if "train/loss" in p["values"]} == set(range(1, num_steps + 1))
    assert found.dropped == {}, "no group was given up"
    attempts: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for one in run.notes("begin"):
        attempts[one["session_id"]].append(one)
    for each in attempts.values():
        assert [one["is_replay"] for one in each] == [one["attempt"] > 0 for one in each]
        assert sum(one["attempt"] == 0 for one in each) <= 1, "no session is begun twice as if it were new"


def replayed(run: Deaths) -> int:
    """First turns that an attempt was told as the one before it, which another life of the actor had drawn."""
    told: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for one in run.notes("first"):
        told[one["session_id"]].append(one)
    pairs = [pair for each in told.values() for pair in pairwise(each)]
    return sum(one["ids"] == other["ids"] and one["life"] != other["life"] for one, other in pairs)


@pytest.mark.timeout(240)
def test_programs_and_their_actor_are_killed(tmp_path: Path) -> None:
    strikes = ("before.agent", "stream.agent", "stream.rollout", "between.rollout", "reward.agent")
    run = struck(tmp_path, "program", strikes)
    check(run, len(strikes))
    assert replayed(run) > 0
    assert not is_alive([one["pid"] for one in run.notes("begin")]), "programs end with their actor"


@pytest.mark.timeout(240)
def test_an_interpreter_of_workflows_is_killed_while_a_turn_streams(tmp_path: Path) -> None:
    strikes = ("stream.agent",)
    run = struck(tmp_path, "workflow", strikes)
    check(run, len(strikes))


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize("who", ["agent", "rollout"])
@pytest.mark.parametrize("kind", AGENTS)
def test_in_each_phase(kind: str, who: str, tmp_path: Path) -> None:
    strikes = tuple(f"{phase}.{who}" for phase in PHASES)
    run = struck(tmp_path, kind, strikes)
    check(run, len(strikes))
    assert who == "agent" or replayed(run) > 0
