"""Sandboxes with real processes: what a job may do in each of them, how it ends, and that nothing of it is left."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.harness.waiting import until, wait_until

from myxa.actors.user_code.sandbox import (
    DockerSandbox,
    Job,
    JobEnd,
    Limits,
    _linked_packages,
    file_out,
    namespaces_trouble,
    sandbox,
    scratch_folder,
    trouble_with,
)
from myxa.core.config.run import SandboxName
from myxa.core.errors import ConfigError
from myxa.core.files import SCRATCH

LIMITS: dict[str, Any] = {"wall_s": 30.0, "cpu_s": 5.0, "memory_gb": 0.5, "num_processes": 24}


def there(name: SandboxName) -> Any:
    trouble = trouble_with(name)
    return pytest.param(name, marks=pytest.mark.skipif(bool(trouble), reason=f"{name}: {trouble}"))


CONFINING = [there("rlimits"), there("bubblewrap")]
with_namespaces = pytest.mark.skipif(bool(namespaces_trouble()), reason=f"namespaces: {namespaces_trouble()}")
kinds = pytest.mark.parametrize("name", CONFINING)


async def ran(name: SandboxName, scratch: Path, code: str, limits: dict[str, Any] | None = None, **more: Any) -> JobEnd:
    """How a Python program ended."""
    scratch.mkdir(exist_ok=True)
    command = (os.path.realpath(sys.executable), "-I", "-S", "-c", code)
    told = Limits(**{**LIMITS, **(limits or {})})
    return await sandbox(name).run(Job(command=command, scratch=scratch, limits=told, env={"PATH": "/usr/bin"}, **more))


def named(mark: str) -> list[int]:
    """Processes with this in their command line, but for those that start them."""
    found = [(one.pid, one.info["cmdline"] or []) for one in psutil.process_iter(["cmdline"])]
    return [pid for pid, words in found if mark in words]


@kinds
async def test_files_in_and_out_and_the_end_of_the_output(name: SandboxName, tmp_path: Path) -> None:
    (tmp_path / "in").write_text("5")
    code = "n = int(open('in').read()); open('out', 'w').write(str(n + 1)); print('x' * 200000, 'end'); raise SystemExit(n)"
    end = await ran(name, tmp_path, code)
    assert (end.status, end.is_late, (tmp_path / "out").read_text()) == (5, False, "6")
    assert end.output.endswith("x end\n") and len(end.output) <= 1 << 16


@kinds
async def test_what_it_is_told_by_stdin(name: SandboxName, tmp_path: Path) -> None:
    end = await ran(name, tmp_path, "import sys; print(len(sys.stdin.read()))", stdin=b"y" * 300_000)
    assert end.output == "300000\n"


@kinds
@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import os; os.kill(os.getpid(), 9)", "signal SIGKILL"),
        ("raise SystemExit(3)", "exit status 3"),
        ("bytearray(10 << 30)", "exit status 1"),
        ("while True: pass", "signal SIGKILL"),
    ],
)
async def test_how_it_ended(name: SandboxName, tmp_path: Path, code: str, words: str) -> None:
    end = await ran(name, tmp_path, code, {"cpu_s": 1.0})
    assert (end.words, end.is_late) == (words, False)


HOSTILE = {
    "a fork bomb": "import os\nwhile True:\n try: os.fork()\n except OSError: pass",
    "a daemon": "import os, time\nfor _ in range(3):\n if os.fork(): os._exit(0)\n os.setsid()\ntime.sleep(300)",
    "deaf": "import signal, time\nfor n in range(1, 65):\n try: signal.signal(n, signal.SIG_IGN)\n except (OSError, ValueError): pass\ntime.sleep(300)",
    "endless output": "import os\nwhile True: os.write(1, b'z' * 65536)",
}


@kinds
@pytest.mark.parametrize("what", HOSTILE)
async def test_nothing_of_it_is_left(name: SandboxName, tmp_path: Path, what: str) -> None:
    mark = f"mark-{time.monotonic_ns()}"
    code = f"import sys; mark = {mark!r}\n" + HOSTILE[what]
    command = (os.path.realpath(sys.executable), "-I", "-S", "-c", code, mark)
    limits = Limits(**{**LIMITS, "wall_s": 1.0})
    begun_s = time.monotonic()
    end = await sandbox(name).run(Job(command=command, scratch=tmp_path, limits=limits))
    assert time.monotonic() - begun_s < 8
    assert end.is_late or what == "a daemon"
    assert named(mark) == []


@with_namespaces
@kinds
async def test_it_reaches_no_network_no_process_and_no_file_but_its_own(name: SandboxName, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s")
    secret.chmod(0o666)
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = f"""
import os, socket
def can(act, *args):
    try: act(*args)
    except OSError: return 0
    return 1
print(
    can(socket.create_connection, ("127.0.0.1", {server.getsockname()[1]}), 1),
    can(os.kill, {os.getpid()}, 0),
    can(open, {str(secret)!r}),
    can(open, "/etc/hostname_of_mine", "w"),
    can(os.mkdir, "/made"),
    can(os.mkdir, "made"),
)
"""
        end = await ran(name, tmp_path / "scratch", code)
    assert end.output == "0 0 0 0 0 1\n"
    assert secret.read_text() == "s"


@with_namespaces
@kinds
async def test_what_is_visible_can_be_read_and_not_changed(name: SandboxName, tmp_path: Path) -> None:
    shown = tmp_path / "shown"
    shown.mkdir(mode=0o777)
    shown.chmod(0o777)
    (shown / "file").write_text("text")
    code = "print(open('file').read())\ntry: open('other', 'w')\nexcept OSError as error: print(error.errno)"
    end = await ran(name, tmp_path / "scratch", code, folder=str(shown), visible=(str(shown),))
    assert end.output == "text\n30\n"


@with_namespaces
async def test_an_interpreter_and_packages_that_are_links_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As uv makes them: a minor version's folder, and files in its cache (UV_LINK_MODE=symlink)."""
    alias, site, cache = tmp_path / "python", tmp_path / "site", tmp_path / "cache"
    alias.symlink_to(sys.base_prefix)
    (cache / "one-1.dist-info").mkdir(parents=True)
    (site / "one-1.dist-info").mkdir(parents=True)
    for name, text in (("one.py", "said = 'one'"), ("one-1.dist-info/METADATA", "Name: one")):
        (cache / name).write_text(text)
        (site / name).symlink_to(cache / name)
    monkeypatch.setattr(sys, "base_prefix", str(alias))
    monkeypatch.setattr("myxa.actors.user_code.sandbox.get_path", lambda name: str(site))
    _linked_packages.cache_clear()
    code = f"import sys; sys.path.append({str(site)!r}); import one; print(one.said)"
    end = await ran("bubblewrap", tmp_path / "scratch", code, visible=(sys.prefix, str(site)))
    _linked_packages.cache_clear()
    assert end.output == "one\n"


@with_namespaces
@kinds
async def test_one_that_reads_all_files_changes_no_setting_and_asks_no_daemon(
    name: SandboxName, tmp_path: Path
) -> None:
    code = """
import os
def writable(path):
    try: os.close(os.open(path, os.O_WRONLY))
    except OSError: return False
    return True
found = [os.path.join(at, one) for at, _, files in os.walk("/proc/sys/kernel") for one in files]
found += [f"/proc/{one}" for one in ("sysrq-trigger", "irq", "bus")]
sockets = [os.path.join(at, one) for at, _, files in os.walk("/run") for one in files if one.endswith(("sock", "socket"))]
print([one for one in found if writable(one)], sockets, os.path.exists("/run/docker"), os.path.isdir("/root"))
"""
    end = await ran(name, tmp_path, code, {"num_processes": 0}, visible=("/",), has_network=True)
    assert end.output == "[] [] False True\n"


@with_namespaces
@kinds
async def test_its_only_network_is_what_is_served_inside(name: SandboxName, tmp_path: Path) -> None:
    answered = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello " + await reader.readline())
        writer.close()
        answered.set()

    @asynccontextmanager
    async def serve(listening: socket.socket) -> AsyncGenerator[None]:
        server = await asyncio.start_server(answer, sock=listening)
        try:
            yield
        finally:
            server.close()

    code = "import socket; s = socket.create_connection(('127.0.0.1', 4711)); s.send(b'me\\n'); print(s.recv(99))"
    end = await ran(name, tmp_path, code, port=4711, serve=serve)
    assert answered.is_set()
    assert end.output == "b'hello me\\n'\n"


@with_namespaces
async def test_a_cancellation_leaves_no_socket_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    received, come = socket.recv_fds, threading.Event()

    def slowly(*args: int) -> Any:
        found = received(*args)  # pyright: ignore[reportArgumentType]
        come.set()
        time.sleep(0.3)
        return found

    @asynccontextmanager
    async def serve(listening: socket.socket) -> AsyncGenerator[None]:
        await asyncio.sleep(60)
        yield

    monkeypatch.setattr(socket, "recv_fds", slowly)
    before = len(os.listdir("/proc/self/fd"))
    running = asyncio.ensure_future(ran("rlimits", tmp_path, "input()", port=4711, serve=serve))
    await until(come.is_set, "the socket")
    running.cancel()
    await asyncio.wait([running])
    await until(lambda: len(os.listdir("/proc/self/fd")) <= before, "the end of all descriptors")


STARTS = """
import asyncio, sys
from pathlib import Path
from myxa.actors.user_code.sandbox import DockerSandbox, Job, Limits, sandbox
name, scratch, *command = sys.argv[1:]
asyncio.run(sandbox(name).run(Job(command=tuple(command), scratch=Path(scratch), limits=Limits(num_processes=24))))
"""


@kinds
def test_when_its_owner_is_killed_it_ends(name: SandboxName, tmp_path: Path) -> None:
    mark = f"mark-{time.monotonic_ns()}"
    code = "import os, time; os.fork(); os.fork(); os.setsid(); time.sleep(300)"
    command = [sys.executable, "-c", STARTS, name, str(tmp_path), os.path.realpath(sys.executable)]
    owner = subprocess.Popen([*command, "-I", "-S", "-c", code, mark])
    wait_until(lambda: len(named(mark)) >= 6, "the job's processes")
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    wait_until(lambda: not named(mark), "the end of the job")


def test_one_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    trouble_with.cache_clear()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="there is no (bwrap|prlimit)"):
        sandbox("bubblewrap")
    with pytest.raises(ConfigError, match="docker"):
        sandbox("docker", "image")
    trouble_with.cache_clear()


def test_a_folder_in_place_of_a_file_costs_no_descriptor(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(IsADirectoryError):
            file_out(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_command_line_of_a_container_has_no_key(tmp_path: Path) -> None:
    env = {"OPENAI_API_KEY": "sk-1", "HOME": "/h", "DOCKER_HOST": "mine"}
    job = Job(command=("true",), scratch=tmp_path, env=env, environ={"HOME": "/home/me", "OPENAI_API_KEY": "own"})
    box = DockerSandbox("image")
    words = box.wrapped(job, 1000, -1)
    assert "sk-1" not in " ".join(words) and words[words.index("OPENAI_API_KEY") - 1] == "--env"
    assert "DOCKER_HOST=mine" in words  # for the program, not for docker's client
    assert box.environment(job) == {"HOME": "/home/me", "OPENAI_API_KEY": "sk-1"}


async def test_scratch_folders_of_killed_processes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = tmp_path / f"{SCRATCH}left"
    (left / "home").mkdir(parents=True)
    async with scratch_folder() as living:
        sandbox("none")
        assert living.exists() and not left.exists()
    assert not living.exists()
