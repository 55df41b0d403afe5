"""One address for a run of two rollout actors: tasks of both, people beside them, and its process killed meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sqlite3
import stat
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import anthropic
import httpx2 as httpx
import openai
import pytest
from tests.harness.commands import run as run_command
from tests.harness.ledger_audit import audit_ledger
from tests.harness.run_job import make_job, metrics, worker_pids
from tests.harness.waiting import wait_until

from myxa.actors.ledger.file import decode_group

pytestmark = pytest.mark.timeout(300)
HELLO: Any = [{"role": "user", "content": "hello"}]


class Service:
    """An agent service elsewhere, which knows nothing but the file with the address."""

    def __init__(self, file: Path) -> None:
        self.place = json.loads(file.read_bytes())
        self.taken = Counter[str]()
        self.http = httpx.AsyncClient(base_url=self.place["base_url"], timeout=60)

    async def post(self, path: str, key: str, body: object) -> httpx.Response | None:
        """None: the gateway is away, or has not met the actors yet."""
        with contextlib.suppress(httpx.TransportError):
            answer = await self.http.post(path, headers={"Authorization": f"Bearer {key}"}, json=body)
            if answer.status_code != 503:
                return answer
        await asyncio.sleep(0.2)
        return None

    async def work(self) -> None:
        while True:
            told = await self.post("/v1/tasks/next", self.place["tasks_key"], {})
            if told is None or told.status_code != 200:
                continue
            task = told.json()
            assert task["base_url"] == self.place["base_url"]
            self.taken[task["key"].split("-")[2]] += 1
            async with openai.AsyncOpenAI(base_url=task["openai_base_url"], api_key=task["key"], max_retries=20) as one:
                messages = task["messages"]
                for _ in range(2):
                    try:
                        chat = await one.chat.completions.create(model="policy", messages=messages)
                    except openai.AuthenticationError:  # the run's last step came first: in a run it counts as an error
                        break
                    said = chat.choices[0].message.content or ""
                    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "again"}]
            while await self.post("/v1/session/end", task["key"], {"reward": 0.5}) is None:
                pass


async def people(place: dict[str, Any]) -> None:
    """Every dialect, with the eval key."""
    url, key = place["base_url"], place["eval_key"]
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=20) as client:
        assert [one.id async for one in client.models.list()] == ["policy"]
        whole = await client.chat.completions.create(model="policy", messages=HELLO)
        assert whole.usage is not None
        assert whole.usage.completion_tokens > 0
        stream = await client.chat.completions.create(model="policy", messages=HELLO, stream=True)
        assert [one.choices[0].finish_reason async for one in stream][-1] in ("stop", "length")
        assert (await client.completions.create(model="policy", prompt="12", max_tokens=3)).choices
        assert (await client.responses.create(model="policy", input="hello")).status in ("completed", "incomplete")
    async with anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=20) as client:
        message = await client.messages.create(model="policy", max_tokens=5, messages=HELLO)
        assert message.usage.output_tokens > 0


async def refused(url: str, tasks_key: str) -> None:
    async with httpx.AsyncClient(timeout=60, base_url=url) as http:
        for path, key, status in (
            ("/v1/chat/completions", "sk-other", 401),
            ("/v1/messages", "sk-myxa-r0-nobody", 401),
            ("/v1/messages", "sk-myxa-r77-nobody", 503),
            ("/v1/chat/completions", tasks_key, 401),
        ):
            answer = await http.post(path, headers={"x-api-key": key}, json={"messages": HELLO, "max_tokens": 5})
            assert answer.status_code == status, answer.text
            assert ("type" in answer.json()) is (path == "/v1/messages")
            assert answer.json()["error"]["message"]
        assert (await http.get("/health")).json() == {"ok": True}


async def act(run_dir: Path, pid: int, is_over: Any) -> Counter[str]:
    service = Service(run_dir / "agents.json")
    workers = [asyncio.ensure_future(service.work()) for _ in range(8)]
    await people(service.place)
    await refused(service.place["base_url"], service.place["tasks_key"])
    await until(lambda: service.taken.total() > 4, workers)
    (gateway,) = await asyncio.to_thread(worker_pids, pid, "gateway")
    os.kill(gateway, signal.SIGKILL)
    await people(service.place)
    await until(is_over, workers)
    for one in workers:
        one.cancel()
    await asyncio.gather(*workers, return_exceptions=True)
    await service.http.aclose()
    return service.taken


async def until(is_so: Any, workers: Sequence[asyncio.Future[None]]) -> None:
    async with asyncio.timeout(150):
        while not is_so():
            assert not any(one.done() for one in workers), [one.exception() for one in workers if one.done()]
            await asyncio.sleep(0.05)


def num_turns(ledger: Path) -> set[int]:
    """Of the rollouts that the ledger holds."""
    with closing(sqlite3.connect(f"file:{ledger}?mode=ro", uri=True)) as db:
        rows = db.execute("SELECT group_id, data FROM payloads WHERE is_whole").fetchall()
    turns = Counter[tuple[int, int]]()
    for group_id, data in rows:
        for sample in decode_group(group_id, data).samples:
            turns[group_id, sample.index] += sample.num_turns
    return set(turns.values())


def test_one_address_of_a_run(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    process = job.start(
        "run.num_steps=3", "roles.rollout.count=2", 'rollout.workflow="agent"', "agent.polls=true",
        "roles.gateway.count=1", "gateway.eval_requests=2", 'reward.fn="workflow"', "rollout.max_groups=4", "agent.silence_s=5",
    )  # fmt: skip
    try:
        wait_until(
            lambda: process.poll() is not None or any((tmp_path / "runs").glob("small-*/agents.json")), "the address"
        )
        assert process.poll() is None, process.communicate()[0]
        file = job.run_dir() / "agents.json"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        taken = asyncio.run(act(job.run_dir(), process.pid, lambda: process.poll() is not None))
        text, _ = process.communicate(timeout=60)
        assert process.returncode == 0, text
    finally:
        process.terminate()
    assert set(taken) == {"r0", "r1"}, "tasks of both actors"
    found = audit_ledger(job.run_dir() / "ledger.sqlite")
    assert found.problems == ()
    assert set(found.trained.values()) == {1}
    assert num_turns(job.run_dir() / "ledger.sqlite") == {2}, "none lost, none drawn again for a client that had left"
    points = metrics(job.run_dir())
    assert max(point["values"].get("gateway/requests", 0) for point in points) > 0
    assert not any(point["values"].get("rollout/num_errors", 0) for point in points)


def test_people_ask_beside_any_workflow(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    process = job.start(
        "run.num_steps=0", "data.max_passes=0", "run.max_wall_s=100", "gateway.eval_requests=1", *job.paced()
    )
    try:
        wait_until(lambda: any((tmp_path / "runs").glob("small-*/agents.0.json")), "the address")
        run = ("--run", str(job.run_dir()))
        (place,) = json.loads(run_command("gateway", *run, "--json", folder=tmp_path).stdout)
        assert place["eval_key"] in run_command("gateway", *run, folder=tmp_path).stdout
        asyncio.run(people(place))

        async def after(value: int) -> int:
            done = run_command("set", f"eval_requests={value}", *run, folder=tmp_path, timeout_s=60)
            assert done.returncode == 0, done.stderr
            async with httpx.AsyncClient(base_url=place["base_url"], timeout=60) as http:
                headers = {"Authorization": f"Bearer {place['eval_key']}"}
                status = (await http.get("/v1/session", headers=headers)).status_code
                assert status == 401, "it has no task"
                body = {"messages": HELLO}
                return (await http.post("/v1/chat/completions", headers=headers, json=body)).status_code

        assert asyncio.run(after(0)) == 503
        assert asyncio.run(after(1)) == 200
    finally:
        process.terminate()
        process.communicate(timeout=60)
