"""Another user of the same host: the kernel keeps it out of folder and sockets, and the server looks again."""

from __future__ import annotations

import asyncio
import grp
import os
import pwd
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.control.control_room import Place, ask, control_bench

from myxa.core.config.run import ControlSettings
from myxa.core.errors import ConfigError
from myxa.core.knobs import Operator
from myxa.launch.control.server import VerbContext, is_ours
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
            assert await as_nobody(bench.control, bench.view) == ["kept out", "kept out"]
            assert bench.value == 0


@needs_root
async def test_another_user_that_could_connect_is_not_served():
    with tempfile.TemporaryDirectory() as name:
        reachable(Path(name))
        async with control_bench(Path(name)) as bench:
            for path in (bench.control, bench.view):
                path.chmod(0o666)
            told = await as_nobody(bench.control, bench.view)
            assert all(line.count("this socket is for the user that started the run") == 2 for line in told), told
            assert bench.server.counters["strangers"] == 4
            assert bench.value == 0
            assert await ask(bench.control, "put", value=4) == 4


@needs_root
async def test_a_group_may_look_and_no_more():
    """The view socket of `control.view_group`: its members are let in and told what is shown."""
    nobody = pwd.getpwnam("nobody")
    with tempfile.TemporaryDirectory() as name:
        reachable(Path(name))
        async with control_bench(Path(name), gid=nobody.pw_gid) as bench:
            control, view = await as_nobody(bench.control, bench.view)
            assert control == "kept out"
            assert "only shows" in view
            assert bench.value == 0
            assert f'"user":"nobody","uid":{nobody.pw_uid},' in view, "the kernel said who it is"
            assert bench.audit == []
            assert bench.server.counters["refused"] == 1


async def test_only_this_user_and_root_are_ours():
    assert [is_ours(Operator(uid=uid)) for uid in (os.getuid(), 0, os.getuid() + 12345)] == [True, True, False]


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


@needs_root
async def test_the_socket_for_a_group_lies_in_a_folder_of_its_own(tmp_path: Path):
    nobody = pwd.getpwnam("nobody")
    context = context_of(tmp_path, view_group=grp.getgrgid(nobody.pw_gid).gr_name)
    with RuntimeDir() as runtime:
        async with open_control(context, runtime.path) as note:
            assert note is not None
            control, view = Path(note.control), Path(note.view)
            assert control.parent.stat().st_mode & 0o777 == 0o700
            assert (view.parent.stat().st_mode & 0o777, view.parent.stat().st_gid) == (0o750, nobody.pw_gid)
            reachable(view.parent / "x")
            told = await as_nobody(control, view)
            assert told[0] == "kept out"
            assert "is no verb" in told[1], "it is served, and `put` is not among the product's verbs"
    assert not view.parent.exists()


async def test_a_group_that_is_not_there_is_an_error(tmp_path: Path):
    with pytest.raises(ConfigError, match="there is no group 'no such group' here"):
        async with open_control(context_of(tmp_path, view_group="no such group"), tmp_path):
            pass


async def test_without_sockets_a_run_cannot_be_spoken_to(tmp_path: Path):
    async with open_control(context_of(tmp_path, socket=False), tmp_path) as note:
        assert note is None
        assert list(tmp_path.iterdir()) == []
