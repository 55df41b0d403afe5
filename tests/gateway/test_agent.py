"""Agents of both kinds in a rollout: what they get, how they end, what becomes of their faults."""

from __future__ import annotations

import asyncio
import math
import os
import shlex
import socket
import sys
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import msgspec
import psutil
import pytest
from aiohttp import web
from tests.gateway.scripted import SAMPLING, Says
from tests.workflows.chat_models import QWEN3

from myxa.actors.gateway.agent import AgentWorkflow
from myxa.actors.gateway.server import Gateway
from myxa.actors.user_code.sandbox import namespaces_trouble, trouble_with
from myxa.actors.workflows.episode import Episode, ModelAccess, ModelSpec, ReachedModel, WorkflowContext
from myxa.actors.workflows.turn_renderer import TurnRenderer
from myxa.core.config.run import AgentSettings
from myxa.core.errors import EngineError, FailureKind, MemberFailed
from myxa.core.samples import Message, Prompt, Sample

bubblewrap = pytest.mark.skipif(bool(trouble_with("bubblewrap")), reason=trouble_with("bubblewrap"))
ROW = Prompt(group_id=7, row=3, pass_index=0, messages=(Message(role="user", content="task"),), label="L", source="d")
PROGRAM = shlex.join((sys.executable, "agent.py"))
ASKS = """
import json, os, sys, urllib.request
task = json.load(open(os.environ["MYXA_TASK_FILE"]))
def post(path, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["MYXA_BASE_URL"] + path, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))
answer = post("/v1/chat/completions", {"messages": task["messages"]})
"""
TWO_REWARDS = """
rewards = {"reward": 2, "answers": {answer["myxa"]["answers"][0]: 1.5}}
json.dump(rewards, open(os.environ["MYXA_REWARD_FILE"], "w"))
"""


def context(
    says: Says, recorded: tuple[Sample, ...] = (), attempt: int = 0, run_s: float = math.inf
) -> WorkflowContext:
    access = ModelAccess(generate=says.generate, sampling=SAMPLING, context_length=8192)
    episode = Episode(prompt=ROW, index=0, tokenizer=says.tokenizer, model=access, recorded=recorded)
    return WorkflowContext(
        episode=episode, tokenizer=says.tokenizer, max_turns=1, index=0, session_id="s", attempt=attempt, run_s=run_s
    )


@asynccontextmanager
async def running(models: Any = None, **options: Any) -> AsyncGenerator[AgentWorkflow]:
    gateway = Gateway()
    workflow = AgentWorkflow(AgentSettings(**options), gateway, models or {})
    await gateway.start()
    await workflow.start()
    try:
        yield workflow
    finally:
        await workflow.close()
        await gateway.stop()


async def programmed(
    tmp_path: Path, code: str, says: Says | None = None, run_s: float = math.inf, **options: Any
) -> tuple[Sample, ...]:
    (tmp_path / "agent.py").write_text(ASKS + code)
    async with running(command=PROGRAM, dir=str(tmp_path), **options) as workflow:
        return await workflow(context(says or Says(QWEN3, lambda prompt: "hello"), run_s=run_s), ROW)


async def test_a_program_asks_a_model_of_the_run_by_its_name_and_learns_nothing_of_what_it_says(tmp_path: Path) -> None:
    policy, judge = Says(QWEN3, lambda prompt: "hello"), Says(QWEN3, lambda prompt: "fine")
    access = ModelAccess(generate=judge.generate, sampling=SAMPLING, context_length=8192)
    spec = ModelSpec(model_path="", chat_template_kwargs={}, date="", sampling=SAMPLING, context_length=8192)
    models = {"judge": ReachedModel(spec, judge.tokenizer, TurnRenderer(judge.tokenizer), access)}
    code = """
def said(answer): return answer["choices"][0]["message"]["content"]
about = [{"role": "user", "content": "Is it good? " + said(answer)}]
judged = post("/v1/chat/completions", {"model": "judge", "messages": about})
again = post("/v1/chat/completions", {"model": "judge", "messages": [
    *about, judged["choices"][0]["message"], {"role": "user", "content": "Sure?"}]})
other = post("/v1/messages", {"model": "judge", "max_tokens": 9, "messages": about})
assert said(judged) == said(again) == other["content"][0]["text"] == "fine", (judged, again, other)
head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
listed = json.load(urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/models", None, head)))
assert [one["id"] for one in listed["data"]] == ["policy", "judge"]
"""
    (tmp_path / "agent.py").write_text(ASKS + code)
    options: dict[str, Any] = {"command": PROGRAM, "dir": str(tmp_path)}
    async with running(models=models, **options) as workflow:
        (sample,) = await workflow(context(policy), ROW)
    assert sample.num_turns == 1 and "hello" in sample.text and len(policy.prompts) == 1 and len(judge.prompts) == 3


async def test_a_program_is_a_rollout_and_asks_no_proxy(tmp_path: Path) -> None:
    (sample,) = await programmed(tmp_path, "", env={"http_proxy": "http://127.0.0.1:9", "NO_PROXY": "elsewhere"})
    assert sample.text == "hello<|im_end|>" or sample.text == "hello"
    assert sample.reward is None


@pytest.mark.parametrize(
    ("code", "how", "reward"),
    [
        ("sys.exit(0)", "exit", 1.0),
        ("sys.exit(3)", "exit", 0.0),
        ('open(os.environ["MYXA_REWARD_FILE"], "w").write("0.5")', "file", 0.5),
        (TWO_REWARDS, "file", 2.0),
        ('post("/v1/session/reward", {"reward": 0.25})', "verifier", 0.25),
        ('post("/v1/session/reward", {"reward": 0.25}); sys.exit(1)', "exit", 0.25),
    ],
)  # fmt: skip
async def test_where_the_reward_comes_from(tmp_path: Path, code: str, how: Any, reward: float) -> None:
    (sample,) = await programmed(tmp_path, code, reward=how)
    assert sample.reward == reward


@pytest.mark.parametrize(
    ("code", "options", "kind", "words"),
    [
        ("sys.stderr.write('boom'); sys.exit(3)", {}, "environment", "exit status 3: boom"),
        ("os.kill(os.getpid(), 9)", {}, "environment", "SIGKILL"),
        ("os.kill(os.getpid(), 9)", {"reward": "exit"}, "environment", "SIGKILL"),
        ("", {"reward": "file"}, "environment", "wrote no reward"),
        (
            'open(os.environ["MYXA_REWARD_FILE"], "w").write("much")',
            {"reward": "file"},
            "environment",
            "cannot be read",
        ),
        ('os.mkfifo(os.environ["MYXA_REWARD_FILE"])', {"reward": "file"}, "environment", "cannot be read"),
        (
            'os.symlink("/dev/zero", os.environ["MYXA_REWARD_FILE"])',
            {"reward": "file"},
            "environment",
            "cannot be read",
        ),
        ('open(os.environ["MYXA_REWARD_FILE"], "w").write("1e999")', {"reward": "file"}, "environment", "read|finite"),
        (
            TWO_REWARDS.replace('["myxa"]["answers"][0]', '["id"]'),
            {"reward": "file"},
            "environment",
            "no answer chatcmpl-",
        ),
        (TWO_REWARDS.replace("1.5", "1e39"), {"reward": "file"}, "environment", "float32"),
        ('post("/v1/session/end", {"failure": "no browser", "kind": "sandbox"})', {}, "sandbox", "no browser"),
        ("import time; time.sleep(60)", {"run_s": 1.5}, "environment", "within 1.5 s"),
    ],
)
async def test_faults_of_a_program(
    tmp_path: Path, code: str, options: dict[str, Any], kind: FailureKind, words: str
) -> None:
    with pytest.raises(MemberFailed, match=words) as caught:
        await programmed(tmp_path, code, **options)
    assert caught.value.kind == kind


async def test_a_program_that_asks_nothing(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("")
    async with running(command=PROGRAM, dir=str(tmp_path)) as workflow:
        with pytest.raises(MemberFailed, match="without a turn"):
            await workflow(context(Says(QWEN3, lambda prompt: "hello")), ROW)


async def test_nothing_of_a_program_outlives_its_rollout(tmp_path: Path) -> None:
    seconds = f"77.{os.getpid():07d}"  # other suites of the machine have another number
    code = f"import subprocess; subprocess.Popen(['sleep', '{seconds}'], start_new_session=True); import time; time.sleep(60)"
    with pytest.raises(MemberFailed):
        await programmed(tmp_path, code, run_s=2.0)
    assert not [one for one in psutil.process_iter(["cmdline"]) if seconds in (one.info["cmdline"] or ())]


async def test_an_engine_that_fails_ends_the_program_and_keeps_the_cause(tmp_path: Path) -> None:
    def fails(prompt: str) -> str:
        raise EngineError("out of memory")

    with pytest.raises(EngineError, match="out of memory"):
        await programmed(tmp_path, "", Says(QWEN3, fails))


async def test_a_second_attempt_replays_the_turns_that_were_recorded(tmp_path: Path) -> None:
    first = Says(QWEN3, lambda prompt: "hello")
    (sample,) = await programmed(tmp_path, "", first)
    again = Says(QWEN3, lambda prompt: "other")
    code = 'open("seen.json", "w").write(json.dumps([task["is_replay"], answer["choices"][0]["message"]["content"]]))'
    (tmp_path / "agent.py").write_text(ASKS + code)
    async with running(command=PROGRAM, dir=str(tmp_path)) as workflow:
        (replayed,) = await workflow(context(again, recorded=(sample,), attempt=1), ROW)
    assert again.prompts == []
    assert replayed.response_ids.tolist() == sample.response_ids.tolist()
    assert msgspec.json.decode((tmp_path / "seen.json").read_bytes()) == [True, "hello"]


INSIDE = """
def can(act, *args):
    try: act(*args)
    except OSError: return 0
    return 1
import socket, urllib.parse
told = [
    can(os.mkdir, "made"), can(open, os.environ["MYXA_SCRATCH"] + "/file", "w"),
    can(socket.create_connection, ("127.0.0.1", int(open("port").read())), 1),
]
json.dump({"reward": sum(n << i for i, n in enumerate(told))}, open(os.environ["MYXA_REWARD_FILE"], "w"))
"""


@pytest.mark.skipif(bool(namespaces_trouble()), reason=f"namespaces: {namespaces_trouble()}")
@pytest.mark.parametrize(
    ("options", "can"),
    [
        ({"sandbox": "none"}, 7),
        ({"sandbox": "rlimits"}, 2),
        ({"sandbox": "rlimits", "network": "all"}, 6),
        pytest.param({"sandbox": "bubblewrap"}, 2, marks=bubblewrap),
        pytest.param({"sandbox": "bubblewrap", "network": "all"}, 6, marks=bubblewrap),
    ],
)
async def test_in_a_sandbox_it_reaches_the_gateway_and_its_scratch_folder(
    tmp_path: Path, options: dict[str, Any], can: int
) -> None:
    limits = {} if options["sandbox"] == "none" else {"memory_gb": 4.0, "cpu_s": 60.0}
    with socket.create_server(("127.0.0.1", 0)) as server:
        (tmp_path / "port").write_text(str(server.getsockname()[1]))
        (sample,) = await programmed(tmp_path, INSIDE, reward="file", **limits, **options)
    assert sample.reward == can


Taken = Callable[[dict[str, Any]], Awaitable[web.Response]]


@asynccontextmanager
async def service(take: Taken) -> AsyncGenerator[str]:
    async def handle(request: web.Request) -> web.Response:
        return await take(await request.json())

    app = web.Application()
    app.router.add_post("/tasks", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/tasks"
    finally:
        await runner.cleanup()


async def test_a_service_that_is_absent_and_refuses_at_first() -> None:
    tried = 0
    ending: set[asyncio.Task[None]] = set()

    async def act(task: dict[str, Any]) -> None:
        async with httpx.AsyncClient(timeout=60, headers={"Authorization": f"Bearer {task['key']}"}) as client:
            await client.post(f"{task['openai_base_url']}/chat/completions", json={"messages": task["messages"]})
            await client.post(f"{task['base_url']}/v1/session/end", json={"reward": 0.5})

    async def take(task: dict[str, Any]) -> web.Response:
        nonlocal tried
        tried += 1
        if tried == 1:
            return web.Response(status=503)
        ending.add(asyncio.ensure_future(act(task)))
        return web.Response(status=202)

    async with service(take) as url, running(url=url) as workflow:
        (sample,) = await workflow(context(Says(QWEN3, lambda prompt: "hello")), ROW)
        await asyncio.gather(*ending)
    assert (tried, sample.reward) == (2, 0.5)


async def test_a_service_that_refuses_the_task() -> None:
    async def take(task: dict[str, Any]) -> web.Response:
        return web.Response(status=422, text="what is a task?")

    async with service(take) as url, running(url=url) as workflow:
        with pytest.raises(MemberFailed, match="what is a task") as caught:
            await workflow(context(Says(QWEN3, lambda prompt: "hello")), ROW)
    assert caught.value.kind == "network"


async def test_a_service_that_answers_a_task_without_end() -> None:
    async def take(task: dict[str, Any]) -> web.Response:
        return web.Response(body=bytes(2 << 20))

    async with service(take) as url, running(url=url) as workflow:
        with pytest.raises(MemberFailed, match="more than 1048576 bytes") as caught:
            await workflow(context(Says(QWEN3, lambda prompt: "hello")), ROW)
    assert caught.value.kind == "network"


async def test_a_scratch_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(MemberFailed, match="cannot be started") as caught:
        await programmed(tmp_path, "")
    assert caught.value.kind == "sandbox"
    async with running(command=PROGRAM, dir=str(tmp_path), polls=True, workers=1) as workflow:
        failing = asyncio.ensure_future(workflow(context(Says(QWEN3, lambda prompt: "hello"), run_s=30), ROW))
        await asyncio.sleep(0.2)
        (tmp_path / "gone").mkdir()
        (tmp_path / "agent.py").write_text(POLLS)
        with pytest.raises(MemberFailed, match="exit status 1"):  # it took its task after all
            await failing


def test_a_command_with_an_open_quote_is_refused() -> None:
    with pytest.raises(ValueError, match="No closing quotation"):
        AgentSettings(command="python 'agent.py")


POLLS = """
import json, os, sys, urllib.error, urllib.request
def post(path, body, key):
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["MYXA_BASE_URL"] + path, json.dumps(body).encode(), headers)
    answer = urllib.request.urlopen(request)
    return json.load(answer) if answer.status == 200 else None
while True:
    task = post("/v1/tasks/next", {}, os.environ["MYXA_TASKS_KEY"])
    if task is None:
        continue
    post("/v1/chat/completions", {"messages": task["messages"]}, task["key"])
    if not os.path.exists("died"):
        open("died", "w").close()
        sys.exit(1)
    post("/v1/session/end", {"reward": 0.5}, task["key"])
"""


async def test_a_program_that_polls_is_started_again_and_what_it_had_taken_fails(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(POLLS)
    more: dict[str, Any] = {"polls": True, "workers": 1}
    says = Says(QWEN3, lambda prompt: "hello")
    async with running(command=PROGRAM, dir=str(tmp_path), **more) as workflow:
        with pytest.raises(MemberFailed, match="ended with exit status 1"):
            await workflow(context(says), ROW)
        (sample,) = await workflow(context(says), ROW)
    assert sample.reward == 0.5


async def test_a_service_that_falls_silent_is_given_up() -> None:
    async def take(task: dict[str, Any]) -> web.Response:
        return web.Response(status=202)

    async with service(take) as url, running(url=url, silence_s=0.5) as workflow:
        with pytest.raises(MemberFailed, match="nothing was heard"):
            await workflow(context(Says(QWEN3, lambda prompt: "hello")), ROW)


async def test_a_program_that_never_takes_a_task_fails_its_rollouts(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("import no_such_module")
    async with running(command=PROGRAM, dir=str(tmp_path), polls=True, workers=1) as workflow:
        async with asyncio.timeout(30):
            with pytest.raises(MemberFailed, match="no_such_module") as caught:
                await workflow(context(Says(QWEN3, lambda prompt: "hello")), ROW)
    assert caught.value.kind == "user-code"


async def test_a_service_that_waits_for_a_task_does_not_hold_up_the_end() -> None:
    gateway = Gateway()
    await gateway.start()
    place = await gateway.served()
    async with httpx.AsyncClient(timeout=60) as http:
        headers = {"Authorization": f"Bearer {place.tasks_key}"}
        waits = asyncio.ensure_future(http.post(f"{place.base_url}/v1/tasks/next", headers=headers))
        await asyncio.sleep(0.2)
        async with asyncio.timeout(8):
            await gateway.stop()
        await asyncio.wait([waits])
