"""Wrong key, no key, a replayed HELLO, a stale epoch: each is refused and counted, and a good neighbour notices nothing."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
import zmq
from tests.faults.depot import Depot, DepotContract
from tests.transport.raw_unix import RawUnix

from myxa.transport.node import JobKey, Node
from myxa.transport.session.frames import Envelope, Kind, batch, decode, encode
from myxa.transport.session.handshake import read_hello, write_hello
from myxa.transport.wire import Endpoints, Lane

pytestmark = [pytest.mark.timeout(60)]

STRANGER = 4711


class Cluster:
    def __init__(self, host: Node, good: Node, key: JobKey) -> None:
        self.host, self.good, self.key = host, good, key
        self.depot = good.ref(DepotContract, "depot")

    async def counted(self, name: str) -> None:
        """The counter of that name is above zero, and work goes on."""
        async with asyncio.timeout(10):
            while not self.host.counters().get(name):
                await asyncio.sleep(0.02)
        await self.depot.whoami()


@pytest_asyncio.fixture
async def cluster(tmp_path, caplog):
    caplog.set_level(logging.CRITICAL, "myxa")
    key = JobKey.generate()
    host = await Node.attach(name="launcher/0", key=key, tcp="127.0.0.1:0")
    good = await Node.attach(name="good", rdzv=host.rendezvous, key=key, node_rank=1)
    await host.start(Depot(tmp_path / "stock"), "depot")
    await good.wait_for("depot", timeout_s=5)
    yield Cluster(host, good, key)
    await good.close(grace_s=0.2)
    await host.close(grace_s=0.2)


class RawPeer:
    """Speaks our wire over ipc, where no key is asked for, and says what it likes."""

    def __init__(self, to: Node, friend: Node, folder: Path) -> None:
        self._context = zmq.Context()
        self.inbox = self._context.socket(zmq.ROUTER)
        path = f"ipc://{folder}/raw"
        self.inbox.bind(path)
        self.inbox.linger = 0
        self.outbox = RawUnix(to._opened.transport.endpoints.ipc[0])
        self._endpoints = Endpoints(ipc=(path, path))
        self._to = to._key
        greeting = decode(memoryview(friend._session.greeting(to._key, Lane.CONTROL, 0)))
        assert isinstance(greeting, Envelope)
        self._genuine = read_hello(greeting.body)

    def send(self, *envelopes: Envelope) -> None:
        self.outbox.send(batch([encode(envelope) for envelope in envelopes]))

    def hello(self, *, epoch: int = 1, to_epoch: int | None = None, attempt: int = 1) -> Envelope:
        body = msgspec.structs.replace(
            self._genuine, name="raw", endpoints=self._endpoints, to_epoch=to_epoch or self._to.epoch, attempt=attempt
        )
        return self.envelope(Kind.HELLO, body=write_hello(body), epoch=epoch)

    def envelope(self, kind: Kind, *, body: bytes = b"", epoch: int = 1, dst_epoch: int = 0, corr: int = 0) -> Envelope:
        return Envelope(
            kind=kind, src_node=STRANGER, src_epoch=epoch, dst_epoch=dst_epoch or self._to.epoch, corr=corr, body=body
        )

    def close(self) -> None:
        self.outbox.close()
        self.inbox.close()
        self._context.term()


@pytest_asyncio.fixture
async def raw(cluster, tmp_path):
    peer = RawPeer(cluster.host, cluster.good, tmp_path)
    yield peer
    peer.close()


async def test_a_hello_for_another_incarnation(cluster, raw):
    raw.send(raw.hello(to_epoch=77))
    await cluster.counted("hello_stale")


async def test_a_hello_of_an_incarnation_that_is_over(cluster, raw):
    raw.send(raw.hello(epoch=5))
    async with asyncio.timeout(10):
        while not any(key.node_id == STRANGER for key in cluster.host._session.peers()):
            await asyncio.sleep(0.02)
    raw.send(raw.hello(epoch=4, attempt=2))
    await cluster.counted("malformed")  # one connection has one owner
    late = RawUnix(cluster.host._opened.transport.endpoints.ipc[0])
    late.send(batch([encode(raw.hello(epoch=4, attempt=3))]))
    await cluster.counted("hello_stale")
    late.close()


async def test_a_call_meant_for_another_epoch(cluster, raw):
    raw.send(raw.hello())
    raw.send(raw.envelope(Kind.CALL, dst_epoch=99, corr=1, body=b"[{}]"))
    await cluster.counted("stale")


async def test_nothing_is_heard_before_hello(cluster, raw):
    raw.send(raw.envelope(Kind.CALL, corr=1, body=b"[{}]"))
    await cluster.counted("before_hello")
