"""Control from another host: CURVE only, keys on a list, each with what it may do."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zmq
from tests.control.control_room import Bench, control_bench

from myxa.core.config.run import ControlSettings
from myxa.core.errors import ConfigError, DeadlineExceeded
from myxa.launch.control.client import ControlClient, ControlNote
from myxa.launch.control.tcp import MAX_RUNNING, TcpServer, parse_allow_list
from myxa.transport.security import JobKey

pytestmark = pytest.mark.asyncio


@dataclass
class Remote:
    bench: Bench
    server: TcpServer
    endpoint: str
    folder: Path
    keys: dict[str, JobKey]

    def client(self, who: str, server_key: str = "") -> ControlClient:
        note = ControlNote(
            run_dir="tcp", control="", view="", pid=0, tcp=self.endpoint, tcp_key=server_key or self.server.public,
            key_file=str(self.folder / f"{who}.key"),
        )  # fmt: skip
        return ControlClient(note)

    async def ask(self, who: str, verb: str, timeout_s: float = 20.0, **arguments: Any) -> Any:
        return await asyncio.to_thread(self.client(who).ask, verb, timeout_s, **arguments)

    def allow(self, **access: str) -> None:
        lines = [f"{what} {self.keys[who].public} {who} of the lab" for who, what in access.items()]
        (self.folder / "allowed").write_text("# who may\n\n" + "\n".join(lines) + "\n")


@asynccontextmanager
async def remote_bench(folder: Path) -> AsyncGenerator[Remote]:
    keys = {name: JobKey.generate() for name in ("server", "ada", "screen", "stranger")}
    for name, key in keys.items():
        key.save(folder / f"{name}.key")
    async with control_bench(folder) as bench:
        settings = ControlSettings(
            tcp="127.0.0.1:0", key_file=str(folder / "server.key"), allow_file=str(folder / "allowed")
        )
        remote = Remote(bench, cast(TcpServer, None), "", folder, keys)
        remote.allow(ada="operate", screen="view")
        remote.server = TcpServer(bench.dispatcher, cast(Any, SimpleNamespace(control=settings)))
        remote.endpoint = remote.server.open()
        try:
            yield remote
        finally:
            await remote.server.close()


async def test_a_key_may_what_its_line_says(tmp_path: Path):
    async with remote_bench(tmp_path) as remote:
        who = (await remote.ask("ada", "echo"))["who"]
        assert (who["user"], who["via"], who["host"], who["uid"]) == ("ada of the lab", "tcp", "127.0.0.1", -1)
        assert await remote.ask("ada", "put", value=3) == 3
        assert (await remote.ask("screen", "echo", text="x"))["text"] == "x"
        with pytest.raises(ConfigError, match="only shows"):
            await remote.ask("screen", "put", value=4)
        assert remote.bench.value == 3
        assert [(r.verb, r.result, r.who.user) for r in remote.bench.audit] == [("put", "done", "ada of the lab")], (
            "whoever may only look cannot make the audit log grow"
        )
        with pytest.raises(ConfigError, match="Expected `int`"):
            await remote.ask("ada", "put", value="x")
        assert [(r.verb, r.result) for r in remote.bench.audit[1:]] == [("put", "refused")]


async def test_a_key_has_a_share_of_its_own_of_what_is_in_hand(tmp_path: Path):
    async with remote_bench(tmp_path) as remote:
        with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
            dial(peer, remote, "screen")
            for number in range(MAX_RUNNING + 1):
                peer.send(b'{"id": %d, "verb": "gaze"}' % number)
            assert (await heard(peer))["error"]["type"] == "Overloaded"
            assert remote.bench.gazes == MAX_RUNNING
            assert await remote.ask("ada", "put", value=3) == 3
            remote.bench.leave.set()
            assert (await heard(peer))["result"] == 3


async def heard(peer: Any, timeout_s: float = 20.0) -> Any:
    """The next answer."""
    async with asyncio.timeout(timeout_s):
        while True:
            try:
                return json.loads(peer.recv(zmq.NOBLOCK))
            except zmq.Again:
                await asyncio.sleep(0.01)


def dial(peer: Any, remote: Remote, who: str) -> None:
    """A plain socket that shows a key."""
    peer.setsockopt(zmq.LINGER, 0)
    peer.setsockopt(zmq.CURVE_SERVERKEY, remote.server.public.encode())
    peer.setsockopt(zmq.CURVE_PUBLICKEY, remote.keys[who].public.encode())
    peer.setsockopt(zmq.CURVE_SECRETKEY, remote.keys[who].secret.encode())
    peer.connect(f"tcp://{remote.endpoint}")


async def test_a_key_that_is_not_on_the_list_is_told_nothing(tmp_path: Path):
    async with remote_bench(tmp_path) as remote:
        with pytest.raises(DeadlineExceeded):
            await remote.ask("stranger", "put", timeout_s=3.0, value=4)
        assert remote.bench.value == 0
        assert (await remote.ask("ada", "echo"))["number"] == 0


async def test_a_server_that_has_not_the_expected_key_learns_nothing(tmp_path: Path):
    async with remote_bench(tmp_path) as remote:
        client = remote.client("ada", server_key=remote.keys["stranger"].public)
        with pytest.raises(DeadlineExceeded):
            await asyncio.to_thread(client.ask, "put", 3.0, value=4)
        assert remote.bench.value == 0


async def test_without_encryption_nobody_is_heard(tmp_path: Path):
    async with remote_bench(tmp_path) as remote:
        with zmq.Context() as context, context.socket(zmq.DEALER) as plain:
            plain.setsockopt(zmq.LINGER, 0)
            plain.connect(f"tcp://{remote.endpoint}")
            plain.send(b'{"verb": "put", "args": {"value": 5}}')
            assert await asyncio.to_thread(plain.poll, 1500) == 0
        assert remote.bench.value == 0


async def test_a_key_that_is_taken_out_is_refused_at_once(tmp_path: Path):
    async with remote_bench(tmp_path) as remote:
        items = remote.client("screen").follow("count", until=100000)
        assert (await asyncio.to_thread(next, items))["number"] == 0
        remote.allow(ada="operate")
        with pytest.raises(DeadlineExceeded):
            await remote.ask("screen", "echo", timeout_s=3.0)
        assert await remote.ask("ada", "put", value=6) == 6
        await asyncio.to_thread(items.close)
        while remote.bench.streams:
            await asyncio.sleep(0.02)


async def test_nonsense_is_answered_and_changes_nothing(tmp_path: Path):
    seed = 11
    print(f"seed {seed}")
    drawn = random.Random(seed)
    async with remote_bench(tmp_path) as remote:
        with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
            dial(peer, remote, "ada")
            good = json.dumps({"id": 1, "verb": "put", "args": {"value": 7}}).encode()
            for _ in range(500):
                body = bytearray(good)
                body[drawn.randrange(len(body) - 3)] = drawn.randrange(256)
                peer.send(bytes(body).replace(b"put", b"pot"))
                if await asyncio.to_thread(peer.poll, 5000):
                    assert not json.loads(peer.recv())["ok"]
            peer.send_multipart([b"a", b"b"])
            peer.send(b"x" * (2 << 20))  # over the limit: the connection ends
        assert remote.bench.value == 0
        assert (await remote.ask("ada", "echo"))["number"] == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("operate short name", ":1: is no line"),
        ("# x\nwrite " + "a" * 40, ":2: is no line"),
        ("view " + "a" * 40 + "\noperate " + "a" * 40, ":2: that key is there already"),
    ],
)
async def test_a_wrong_list_names_its_line(text: str, said: str):
    with pytest.raises(ConfigError, match=said):
        parse_allow_list(text, "allowed")


async def test_files_that_others_can_change_or_read_are_refused(tmp_path: Path):
    async with remote_bench(tmp_path) as remote:
        settings = ControlSettings(
            tcp="127.0.0.1:0", key_file=str(tmp_path / "server.key"), allow_file=str(tmp_path / "allowed")
        )
        config = cast(Any, SimpleNamespace(control=settings))
        (tmp_path / "allowed").chmod(0o666)
        with pytest.raises(ConfigError, match="others may write"):
            TcpServer(remote.bench.dispatcher, config)
        (tmp_path / "server.key").chmod(0o644)
        with pytest.raises(ConfigError, match="can be read by others"):
            TcpServer(remote.bench.dispatcher, config)
