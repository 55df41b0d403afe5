"""A server as the actor's child: real processes from start to end, and everything that can go wrong on the way."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.engines.contract import ask, collect
from tests.harness.fake_sglang import stand_in_environment
from tests.harness.manifests import manifest_of
from tests.harness.waiting import is_running, until, until_gone

from myxa.actors.engines.sglang import launch
from myxa.actors.engines.sglang.engine import SglangEngine, SglangOptions
from myxa.actors.engines.sglang.launch import LaunchedSglang, ServerCommand, SglangLaunch, start_server
from myxa.core.errors import ConfigError, EngineError, LaunchError

CHILD = Path(__file__).parent / "launch_child.py"
DEADLINE_S = 90
OPTIONS = SglangOptions(vocab_size=320, start_s=60, call_s=20, health_every_s=0.2, lost_after_s=1, name="rollout/3")


@asynccontextmanager
async def launched(
    folder: Path, log: Path, fault: str = "", options: SglangOptions = OPTIONS, **changes: Any
) -> AsyncIterator[LaunchedSglang]:
    plain = {
        "python": sys.executable, "model_path": str(folder), "table": {}, "log_path": log, "dtype": "float32", "seed": 1,
        "env": stand_in_environment(fault, light=True), "num_devices": 0, "max_running": 8,
    }  # fmt: skip
    engine = LaunchedSglang(SglangLaunch(**(plain | changes)), options)
    try:
        async with asyncio.timeout(DEADLINE_S):
            await engine.start()
            yield engine
    finally:
        await engine.close()


def helper_in(log: Path) -> int:
    return int(re.findall(r"helper (\d+)", log.read_text())[0])


async def test_from_start_to_end(folders, tmp_path, capfd):
    """It serves nobody without its key; once it was stopped it is lost long before its silence counts."""
    log = tmp_path / "logs" / "rollout.3.sglang.log"
    async with launched(folders[0], log, table={"stream_interval": 4}) as engine:
        await engine.prepare_weights(manifest_of(7, folders[1]))
        await engine.commit_weights(7)
        got = await collect(engine, ask("r1", 5, max_new_tokens=12, ignore_eos=True))
        assert (got.versions.tolist(), got.finish) == ([7] * 12, "length")
        assert (await engine.info()).version == 7
        pid = engine.memory_pids()[0]
        server = psutil.Process(pid)
        words = server.cmdline()
        assert "--stream-interval=4" in words
        assert not [word for word in words if "api-key" in word]
        assert not Path(words[words.index("--config") + 1]).exists()
        assert "MYXA_WORKER_SPEC" not in server.environ()
        addresses = {c.laddr.ip for c in server.net_connections() if c.status == psutil.CONN_LISTEN}
        assert addresses == {"127.0.0.1"}
        port = next(word for word in words if word.startswith("--port=")).split("=")[1]
        for key in ("", "guess"):
            stranger = SglangEngine(
                f"http://127.0.0.1:{port}", SglangOptions(vocab_size=320, context_length=64, admin_key=key)
            )
            with pytest.raises(EngineError, match=r"answered 401: .*Unauthorized.* set engine"):
                await stranger.start()
            await stranger.close()
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(EngineError, match=r"rollout/3 at http.*: no healthy answer for \d+ s"):
            async with asyncio.timeout(OPTIONS.lost_after_s + 10):
                await engine.until_lost()
    await until_gone(pid)
    assert "fired up" in log.read_text()
    assert log.stat().st_mode & 0o777 == 0o600
    assert capfd.readouterr().err == ""


async def test_a_death_in_mid_generation_is_noticed_at_once(folders, tmp_path):
    log = tmp_path / "log"
    async with launched(folders[0], log, "child spans") as engine:
        assert (await engine.info()).version >= -1
        stream = engine.generate(ask("r1", 5, max_new_tokens=100, ignore_eos=True))
        await anext(stream)
        os.kill(engine.memory_pids()[0], signal.SIGKILL)
        for asked in (engine.info, engine.until_lost):
            with pytest.raises(EngineError, match=r"ended while it served with signal SIGKILL"):
                await asked()
        with pytest.raises(EngineError, match="the stream broke"):
            async for _ in stream:
                pass
    await until_gone(helper_in(log))


async def test_a_server_that_dies_while_loading_or_loads_too_long_is_shown_with_its_last_words(folders, tmp_path):
    log = tmp_path / "log"
    with pytest.raises(EngineError) as caught:
        async with asyncio.timeout(OPTIONS.start_s / 2), launched(folders[0], log, "crash"):
            pass
    told = str(caught.value)
    assert re.search(r"rollout/3: its server \(pid \d+\) ended while it was loading with exit status 1", told)
    for words in ("loading the model\n", "CUDA out of memory (stand-in)", str(log)):
        assert words in told
    late = SglangOptions(vocab_size=320, start_s=0.05, name="rollout/3")
    with pytest.raises(EngineError, match=r"no healthy answer within 0\.05 s; the last lines of its log:"):
        async with launched(folders[0], log, options=late):
            pass


async def test_a_server_that_cannot_be_started_says_why(folders, tmp_path):
    log = tmp_path / "log"
    for table, says in (
        ({"tp_sise": 1}, "unrecognized arguments: --tp-sise=1"),
        ({"tp_size": "two"}, "invalid int value"),
    ):
        with pytest.raises(ConfigError, match=says):
            async with launched(folders[0], log, table=table):
                pass
    for python, says in (("/nowhere/python", "No such file"), (sys.executable, r"No module named .?sglang")):
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        with pytest.raises(EngineError, match=says):
            async with launched(folders[0], log, python=python, env=env):
                pass


async def test_nothing_of_the_server_outlives_its_actor(folders, tmp_path):
    """kill -9 of the actor, or of the subreaper; the server has a child of its own that would live for ten minutes."""

    async def kill(victim: str) -> None:
        log = tmp_path / victim
        actor = subprocess.Popen(  # noqa: ASYNC220 -- quick, and it is to be killed like any process
            [sys.executable, str(CHILD), str(folders[0]), str(log)],
            env=stand_in_environment("child", light=True), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            assert actor.stdout is not None
            line = await asyncio.wait_for(asyncio.to_thread(actor.stdout.readline), DEADLINE_S)
            server = int(json.loads(line)["server"])
            helper, subreaper = helper_in(log), psutil.Process(server).ppid()
            assert is_running(helper)
            os.kill(actor.pid if victim == "actor" else subreaper, signal.SIGKILL)
            await until_gone(server, subreaper, helper)
            if victim == "subreaper":
                _, told = await asyncio.to_thread(actor.communicate, timeout=DEADLINE_S)
                assert "signal SIGKILL" in told
        finally:
            actor.kill()
            actor.communicate()

    await asyncio.gather(kill("actor"), kill("subreaper"))


def command(*words: str, log: Path) -> ServerCommand:
    return ServerCommand("rollout/3", list(words), dict(os.environ), log)


async def test_a_deaf_server_is_killed_and_one_that_is_not_there_is_named(tmp_path):
    code = (
        "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    )
    log = tmp_path / "log"
    server = await start_server(command(sys.executable, "-c", code, log=log))
    await until(lambda: "deaf" in log.read_text())
    await server.close()
    assert await server.until_ended() == "signal SIGKILL"
    await server.close()
    server = await start_server(command("/nowhere", log=log))
    assert await server.until_ended() == "exit status 1"
    assert server.last_lines().endswith("/nowhere cannot be started: No such file or directory")
    with pytest.raises(LaunchError, match=r"rollout/3: .*/log/log cannot be made: "):
        await start_server(command("/opt/python", log=log / "log"))


async def test_a_cancelled_start_leaves_nothing(tmp_path):
    def children() -> set[psutil.Process]:
        return set(psutil.Process().children(recursive=True))

    before = children()
    for wait_s in (0.0, 0.001, 0.01):
        start = asyncio.ensure_future(start_server(command("/bin/sleep", "600", log=tmp_path / "log")))
        await asyncio.sleep(wait_s)
        start.cancel()
        try:
            await (await start).close()
        except asyncio.CancelledError:
            pass
        await until(lambda: not children() - before)


async def test_a_server_that_loads_says_what_it_does(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "LOOK_S", 0.05)
    log = tmp_path / "server.log"
    log.write_text("Application startup complete (of the one before)\n")
    said = ["Load weight begin. avail mem=1 GB", "Capture target decode CUDA graph begin. bs=[1, 2]",
            "Capturing batches (bs=2 avail_mem=1 GB):   6%|x | 1/16 [01:11<17:53, 71.58s/it]",
            "Application startup complete."]  # fmt: skip
    words = (
        "import os, time\n"
        f"for number, line in enumerate({said}):\n"
        f"    while not os.path.exists(f'{tmp_path}/{{number}}'):\n        time.sleep(0.01)\n"
        "    print(line, flush=True)\n"
        "time.sleep(60)"
    )
    kernels = "compiles kernels and captures CUDA graphs"
    expected = ["loads the weights", kernels, f"{kernels}: 1 of 16", "warms up"]
    server = await start_server(ServerCommand("rollout/0", (sys.executable, "-c", words), os.environ, log))
    told: list[str] = []
    loading = asyncio.ensure_future(server.tell_loading(told.append))
    try:
        for number, phase in enumerate(expected):
            (tmp_path / f"{number}").touch()
            await until(lambda phase=phase: phase in told, phase)
    finally:
        loading.cancel()
        await asyncio.wait([loading])
        await server.close()
    assert [one for one in told if one != "imports SGLang"] == expected
