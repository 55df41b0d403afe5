"""Another user of the same host: the kernel keeps it out of folder and socket."""

from __future__ import annotations

import asyncio
import os
import pwd
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.control.control_room import Place, control_bench

from myxa.core.config.run import ControlSettings
from myxa.launch.control.server import VerbContext
from myxa.launch.launcher import open_control
from myxa.launch.run_dir import RunDir
from myxa.launch.runtime_dir import RuntimeDir

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")

STRANGER = """
import os, socket, sys
os.setgroups([]); os.setgid({gid}); os.setuid({uid})
for path in sys.argv[1:]:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    link.settimeout(10)
    try:
        link.connect(path)
        link.sendall(b"POST /put HTTP/1.0\\r\\nHost: myxa\\r\\nContent-Length: 12\\r\\n\\r\\n" + b'{{"value": 1}}')
        refused = link.recv(4096)
        link.close()
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        link.connect(path)
        link.sendall(b"GET /echo HTTP/1.0\\r\\nHost: myxa\\r\\n\\r\\n")
        print("answer", refused, link.recv(4096))
    except PermissionError:
        print("kept out")
    except OSError as error:
        print("closed", error)
"""


async def as_nobody(*paths: Path) -> list[str]:
    """What a process of the user nobody gets from these sockets."""
    nobody = pwd.getpwnam("nobody")
    code = STRANGER.format(uid=nobody.pw_uid, gid=nobody.pw_gid)
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-c", code, *map(str, paths), stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd="/"
    )
    out, err = await asyncio.wait_for(child.communicate(), 60)
    assert child.returncode == 0, err.decode()
    return out.decode().splitlines()


@needs_root
@pytest.mark.parametrize("is_open", [False, True], ids=["runtime folder", "open folder"])
async def test_the_kernel_keeps_another_user_out(is_open: bool):
    with RuntimeDir() as runtime:
        assert runtime.path.stat().st_mode & 0o777 == 0o700
        if is_open:
            reachable(runtime.path)
        async with control_bench(runtime.path) as bench:
            assert await as_nobody(bench.control) == ["kept out"]
            assert bench.value == 0


def reachable(folder: Path) -> None:
    """Let others pass as far as this folder, but not list anything."""
    if folder.exists():
        folder.chmod(0o711)
    for parent in folder.parents:
        if parent.name.startswith("t-") and not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o011)


def context_of(folder: Path, **settings: Any) -> VerbContext:
    """Of a run with these settings of [control], of which nothing is there but its directory."""
    config = SimpleNamespace(control=ControlSettings(**settings))
    return cast(Any, VerbContext)(Place(), RunDir(folder), config, None, 0.0)


async def test_without_sockets_a_run_cannot_be_spoken_to(tmp_path: Path):
    async with open_control(context_of(tmp_path, socket=False), tmp_path) as url:
        assert not url
        assert list(tmp_path.iterdir()) == []
