"""A server as the actor's child: real processes from start to end, and everything that can go wrong on the way.

The server is `stand_in/`: SGLang's name, flags and routes with the embedded engine inside.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import psutil
import pytest

from myxa.actors.engines.sglang import launch
from myxa.actors.engines.sglang.engine import SglangEngine, SglangOptions
from myxa.actors.engines.sglang.launch import LaunchedSglang, ServerCommand, SglangLaunch, start_server
from myxa.core.errors import ConfigError, EngineError, LaunchError
from myxa.core.messages import WeightManifest

STAND_IN = Path(__file__).parent / "stand_in"
CHILD = Path(__file__).parent / "launch_child.py"
DEADLINE_S = 90
OPTIONS = SglangOptions(vocab_size=320, start_s=60, call_s=20, health_every_s=0.5, name="rollout/3")


def environment(fault: str = "") -> dict[str, str]:
    paths = [str(STAND_IN), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "STAND_IN_FAULT": fault}


def build(folder: Path, log: Path, fault: str = "", options: SglangOptions = OPTIONS, **changes) -> LaunchedSglang:
    plain = {
        "python": sys.executable, "model_path": str(folder), "table": {}, "env": environment(fault), "log_path": log,
        "dtype": "float32", "seed": 1, "num_devices": 0, "max_running": 8,
    }  # fmt: skip
    return LaunchedSglang(SglangLaunch(**(plain | changes)), options)


@asynccontextmanager
async def launched(*args, **kwargs):
    engine = build(*args, **kwargs)
    try:
        async with asyncio.timeout(DEADLINE_S):
            await engine.start()
            yield engine
    finally:
        await engine.close()


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def until_gone(*pids: int) -> None:
    async with asyncio.timeout(20):
        while any(is_running(pid) for pid in pids):
            await asyncio.sleep(0.05)


def manifest(version: int, folder: Path) -> WeightManifest:
    return WeightManifest(
        version=version, channel="disk", location=str(folder), generation=0, num_bytes=0, tensors=(), digest="", host=""
    )


async def collect(engine, request, result):
    return result([delta async for delta in engine.generate(request)])


@pytest.mark.asyncio
async def test_from_start_to_end(folders, tmp_path, ask, result, capfd):
    log = tmp_path / "logs" / "rollout.3.sglang.log"
    async with launched(folders[0], log, table={"stream_interval": 4}) as engine:
        await engine.prepare_weights(manifest(7, folders[1]))
        await engine.commit_weights(7)
        got = await collect(engine, ask("r1", 5, max_new_tokens=12, ignore_eos=True), result)
        assert (got.versions.tolist(), got.finish) == ([7] * 12, "length")
        assert (await engine.info()).version == 7
        server = psutil.Process(engine.server_pid)
        words = server.cmdline()
        assert "--stream-interval=4" in words
        assert not [word for word in words if "api-key" in word]
        assert not Path(words[words.index("--config") + 1]).exists()
        assert "MYXA_WORKER_SPEC" not in server.environ()
        addresses = {c.laddr.ip for c in server.net_connections() if c.status == psutil.CONN_LISTEN}
        assert addresses == {"127.0.0.1"}
        pid = engine.server_pid
    await until_gone(pid)
    assert "fired up" in log.read_text()
    assert log.stat().st_mode & 0o777 == 0o600
    assert capfd.readouterr().err == ""


@pytest.mark.asyncio
async def test_without_the_key_nothing_but_health_is_answered(folders, tmp_path, ask, result):
    async with launched(folders[0], tmp_path / "log") as engine:
        port = next(w for w in psutil.Process(engine.server_pid).cmdline() if w.startswith("--port=")).split("=")[1]
        url = f"http://127.0.0.1:{port}"
        for key in ("", "guess"):
            stranger = SglangEngine(url, SglangOptions(vocab_size=320, context_length=64, admin_key=key))
            with pytest.raises(EngineError, match=r"answered 401: .*Unauthorized.* set engine"):
                await stranger.start()
            with pytest.raises(EngineError, match="answered 401"):
                await collect(stranger, ask("r1", 5, max_new_tokens=2), result)
            await stranger.close()
        async with aiohttp.ClientSession() as session:
            async with session.post(f"{url}/abort_request", json={"abort_all": True}) as answer:
                assert answer.status == 401
            async with session.get(f"{url}/health") as answer:
                assert answer.status == 200


@pytest.mark.asyncio
async def test_a_server_that_dies_while_loading_is_told_with_its_last_words(folders, tmp_path):
    started = time.monotonic()
    with pytest.raises(EngineError) as caught:
        async with launched(folders[0], tmp_path / "log", "crash"):
            pass
    assert time.monotonic() - started < OPTIONS.start_s / 2
    told = str(caught.value)
    assert re.search(r"rollout/3: its server \(pid \d+\) ended while it was loading with exit status 1", told)
    assert "loading the model\n" in told
    assert "CUDA out of memory (stand-in)" in told
    assert str(tmp_path / "log") in told


@pytest.mark.asyncio
async def test_one_that_does_not_load_in_time_is_told_with_its_last_words(folders, tmp_path):
    late = SglangOptions(vocab_size=320, start_s=0.2, name="rollout/3")
    with pytest.raises(EngineError, match=r"no healthy answer within 0\.2 s; the last lines of its log:"):
        async with launched(folders[0], tmp_path / "log", options=late):
            pass


@pytest.mark.asyncio
async def test_a_port_that_was_taken_is_replaced_by_another(folders, tmp_path, caplog):
    taken = tmp_path / "taken"
    taken.touch()
    async with launched(folders[0], tmp_path / "log", f"port:{taken}") as engine:
        assert (await engine.info()).version >= -1
    assert "address already in use" in caplog.text
    assert "another port is tried" in caplog.text


@pytest.mark.asyncio
async def test_arguments_are_checked_before_anything_is_started(folders, tmp_path):
    with pytest.raises(ConfigError, match='sglang.tp_sise = 1: .* did you mean "tp_size"'):
        async with launched(folders[0], tmp_path / "log", table={"tp_sise": 1}):
            pass
    assert not (tmp_path / "log").exists()
    for python, says in (("/nowhere/python", "No such file"), (sys.executable, "has no SGLang")):
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        with pytest.raises(ConfigError, match=says):
            async with launched(folders[0], tmp_path / "log", python=python, env=env):
                pass


@pytest.mark.asyncio
async def test_death_in_mid_generation_is_noticed_at_once(folders, tmp_path, ask, result):
    async with launched(folders[0], tmp_path / "log") as engine:
        request = ask("r1", 5, max_new_tokens=100, ignore_eos=True)
        stream = engine.generate(request)
        await anext(stream)
        os.kill(engine.server_pid, signal.SIGKILL)
        for asked in (engine.info, engine.until_lost, engine.resume):
            with pytest.raises(EngineError, match=r"ended while it served with signal SIGKILL"):
                await asked()
        with pytest.raises(EngineError, match="the stream broke"):
            async for _ in stream:
                pass


@pytest.mark.asyncio
async def test_a_server_that_was_stopped_is_lost_long_before_its_silence_counts(folders, tmp_path):
    async with launched(folders[0], tmp_path / "log") as engine:
        pid = engine.server_pid
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(EngineError, match=rf"rollout/3: process {pid} of its server was stopped \(SIGSTOP\)"):
            async with asyncio.timeout(OPTIONS.lost_after_s / 2):
                await engine.until_lost()
    await until_gone(pid)


@pytest.mark.asyncio
@pytest.mark.parametrize("victim", ["actor", "guardian"])
async def test_nothing_of_the_server_outlives_its_actor(victim, folders, tmp_path):
    """kill -9 of the actor; the server has a child of its own that would live for ten minutes."""
    log = tmp_path / "log"
    actor = subprocess.Popen(  # noqa: ASYNC220 -- quick, and it is to be killed like any process
        [sys.executable, str(CHILD), str(folders[0]), str(log)],
        env=environment("child"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert actor.stdout is not None
        line = await asyncio.wait_for(asyncio.to_thread(actor.stdout.readline), DEADLINE_S)
        server = int(json.loads(line)["server"])
        (helper,) = (int(number) for number in re.findall(r"helper (\d+)", log.read_text())[:1])
        guardian = psutil.Process(server).ppid()
        assert is_running(helper)
        os.kill(actor.pid if victim == "actor" else guardian, signal.SIGKILL)
        await until_gone(server, guardian, helper)
        if victim == "guardian":
            _, told = await asyncio.to_thread(actor.communicate, timeout=DEADLINE_S)
            assert "its guardian, which was killed" in told
    finally:
        actor.kill()
        actor.communicate()


@pytest.mark.asyncio
async def test_a_server_deaf_to_sigterm_is_killed(tmp_path):
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    )
    log = tmp_path / "log"
    server = await start_server(ServerCommand("x", [sys.executable, "-c", code], dict(os.environ), log))
    async with asyncio.timeout(DEADLINE_S):
        while "deaf" not in log.read_text():
            await asyncio.sleep(0.02)
        await server.close()
        assert await server.until_ended() == "signal SIGKILL"
        await server.close()
    assert not server.is_alive


@pytest.mark.asyncio
async def test_a_program_that_is_not_there(tmp_path):
    with pytest.raises(LaunchError, match=r"x: its server cannot be started: /nowhere: No such file .*engine\.python"):
        await start_server(ServerCommand("x", ["/nowhere"], dict(os.environ), tmp_path / "log"))


@pytest.fixture
def odd_guardian(monkeypatch, tmp_path):
    """Has `start_server` start a shell script in the guardian's place."""

    def put(script: str) -> None:
        program = tmp_path / "odd"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o700)
        monkeypatch.setattr(launch.sys, "executable", str(program))

    return put


@pytest.mark.asyncio
async def test_a_guardian_that_says_nothing_is_given_up_by_name_and_leaves_nothing(odd_guardian, monkeypatch, tmp_path):
    odd_guardian("exec sleep 600")
    monkeypatch.setattr(launch, "START_S", 0.5)
    monkeypatch.setattr(launch, "CLOSE_S", 0.2)
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(LaunchError, match=r"rollout/3: /opt/python was not started within 0\.5 s"):
        await start_server(ServerCommand("rollout/3", ["/opt/python"], dict(os.environ), tmp_path / "log"))
    assert set(psutil.Process().children(recursive=True)) == before


@pytest.mark.asyncio
async def test_a_start_that_is_cancelled_leaves_nothing(odd_guardian, tmp_path):
    odd_guardian("exec cat > /dev/null")
    before = set(psutil.Process().children(recursive=True))
    start = asyncio.ensure_future(
        start_server(ServerCommand("rollout/3", ["/opt/python"], dict(os.environ), tmp_path / "log"))
    )
    while set(psutil.Process().children(recursive=True)) == before:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert set(psutil.Process().children(recursive=True)) == before


@pytest.mark.asyncio
async def test_a_port_held_for_a_server_is_given_to_nobody_else():
    """What the launch relies on: bound and not listening keeps others away, and lets the server in."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        others = [socket.socket() for _ in range(200)]
        for other in others:
            other.bind(("127.0.0.1", 0))
        assert port not in [other.getsockname()[1] for other in others]
        for other in others:
            other.close()
        server = await asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1", port)
        server.close()
        await server.wait_closed()
