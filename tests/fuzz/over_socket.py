"""Broken frames over real sockets, and peers that speak ZeroMQ wrongly, against a node in a process of its own.

A good peer calls the node all the time. The attackers are strangers with nothing, and an insider who was let in
and then sends nonsense. Keys of others and names of others: `tests/transport/test_keys.py`.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.fuzz import mutations
from tests.fuzz.mutations import ENVELOPE_MUTATIONS, HEADER, Corpus, as_messages
from tests.fuzz.raw_peers import ONE_SHOT, Attack
from tests.fuzz.stubs import MixedContract
from tests.fuzz.victim import State, Witness

from myxa.actors.contracts import BufferContract
from myxa.core.errors import CallError
from myxa.core.handlers import handlers_of
from myxa.core.ids import PeerKey
from myxa.transport.node import JobKey, KeyPair, Node, Rendezvous
from myxa.transport.registry.registry import REGISTRY_KEY, RegistryActor
from myxa.transport.session.frames import Kind, batch
from myxa.transport.socket_transport import SocketTransport
from myxa.transport.wire import Endpoints, Lane

PER_INSIDER = 300
"""More than what is listened to: after a hundred malformed ones the rest is ignored."""
MAX_LEAVING = 16
"""Insiders that take their leave at the same time."""
VICTIM = Path(__file__).parent / "victim.py"
TABLES = [handlers_of(each) for each in (RegistryActor, BufferContract, MixedContract)]
"""Of the victim's actors, in the order of their numbers."""
FAR_RANK = 7
"""Of nodes that must not use ipc."""


@dataclass
class SocketTally:
    """What happened."""

    frames: int = 0
    may_run: int = 0
    """Calls whose header is right, whatever their body: only these may reach a handler."""
    pings: int = 0
    slowest_s: float = 0.0
    before: State | None = None
    after: State | None = None


class Field:
    """The victim, and how to reach it."""

    def __init__(self, rdzv: Rendezvous, key: JobKey, friend: Node) -> None:
        self.rdzv, self.key, self.friend = rdzv, key, friend
        self.witness = friend.ref(Witness, "witness")
        host, _, port = rdzv.endpoints.tcp[0].removeprefix("tcp://").rpartition(":")
        self.host, self.port = host, int(port)
        self.to = REGISTRY_KEY


@asynccontextmanager
async def battlefield() -> AsyncIterator[Field]:
    """A victim, and a friend of it over tcp."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(VICTIM), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None and process.stdin is not None
    try:
        facts = json.loads(await asyncio.wait_for(process.stdout.readline(), 30))
        rdzv = msgspec.convert(facts["rdzv"], Rendezvous)
        key = JobKey.parse(facts["key"])
        friend = await Node.attach(name="friend", rdzv=rdzv, key=key, node_rank=FAR_RANK)
        try:
            yield Field(rdzv, key, friend)
        finally:
            await friend.close(grace_s=1.0)
        assert process.returncode is None, f"the victim died with status {process.returncode}"
    finally:
        if process.returncode is None:
            process.stdin.close()
            await asyncio.wait_for(process.wait(), 20)
    assert process.returncode == 0, f"the victim ended with status {process.returncode}"


class Insider:
    """A node that was let in, and raw sockets with its key."""

    def __init__(self, node: Node, victim: Endpoints, corpus: Corpus, rng: random.Random) -> None:
        self.node = node
        self._rng = rng
        self._victim = victim
        self.context = zmq.Context()
        self._num_attempts = 1 << 40
        self.may_run = 0
        self.corpus = corpus
        corpus.me, corpus.corr = node._key, 0
        transport = node._transport
        assert isinstance(transport, SocketTransport)
        assert transport.keys is not None
        self.pair: KeyPair = transport.keys.own

    def _connect(self, endpoint: str, over_tcp: bool) -> zmq.Socket[bytes]:
        client = self.context.socket(zmq.DEALER)
        client.setsockopt(zmq.SNDHWM, 200)
        client.setsockopt(zmq.SNDTIMEO, 1000)
        if over_tcp:
            client.setsockopt(zmq.CURVE_SERVERKEY, self._victim.curve.encode())
            client.setsockopt(zmq.CURVE_PUBLICKEY, self.pair.public.encode())
            client.setsockopt(zmq.CURVE_SECRETKEY, self.pair.secret.encode())
        client.connect(endpoint)
        return client

    def hello(self) -> bytearray:
        self._num_attempts += 1
        endpoints = self.node._transport.endpoints
        return bytearray(self.corpus.hello(endpoints, self._num_attempts, self.node.name))

    def storm(self, num_frames: int, over_tcp: bool) -> int:
        """Frames over one connection, and a HELLO that is none at its end; returns how many left."""
        rng, num_sent, lane = self._rng, 0, Lane(self._rng.randrange(2))
        client = self._connect((self._victim.tcp if over_tcp else self._victim.ipc)[lane], over_tcp)
        linger_ms = 5000  # a loaded machine takes its time
        client.send(batch([self.hello()]))
        try:
            for message in self._frames(num_frames):
                parts = [message] if rng.random() < 0.98 else [message] * rng.randrange(2, 10)
                client.send_multipart(parts)
                num_sent += 1
            change = rng.choice((mutations.other_body, mutations.other_node))
            client.send(batch([change(rng, self.hello(), self.corpus)]))
        except zmq.Again:  # the connection broke, and is not let in again
            linger_ms = 0
        client.close(linger=linger_ms)
        return num_sent

    def _frames(self, num: int) -> Iterator[bytes]:
        """So many of the corpus, most of them broken; some come as several messages."""
        rng = self._rng
        for _ in range(num):
            pool = self.corpus.calls if rng.random() < 0.7 else self.corpus.others
            data = bytearray(self.corpus.numbered(rng.choice(pool)))
            if rng.random() < 0.7:
                data = rng.choice(ENVELOPE_MUTATIONS)(rng, data, self.corpus)
            if self._may_run(data):
                self.may_run += 1
                newest = HEADER.unpack_from(data)[mutations.CORR]  # a changed one makes all below it copies
                self.corpus.corr = max(self.corpus.corr, min(newest, 1 << 63))
            yield from as_messages(rng, [bytes(data)])

    def _may_run(self, data: bytearray) -> bool:
        """By the header alone, read without the code under test."""
        if len(data) < HEADER.size:
            return False
        f, me, to = HEADER.unpack_from(data), self.corpus.me, self.corpus.to
        return (
            f[mutations.MAGIC] == b"my" and f[mutations.KIND] == Kind.CALL
            and (f[mutations.SRC_NODE], f[mutations.SRC_EPOCH], f[mutations.DST_EPOCH]) == (me.node_id, me.epoch, to.epoch)
            and f[mutations.ACTOR] < len(TABLES) and f[mutations.METHOD] < len(TABLES[f[mutations.ACTOR]].specs)
        )  # fmt: skip


async def attack(num_frames: int, num_raw: int, seed: int) -> SocketTally:
    """Everything at once; returns what was seen."""
    rng = random.Random(seed)
    tally = SocketTally()
    async with battlefield() as ground:
        tally.before = await ground.witness.state()
        stop = asyncio.Event()
        good = asyncio.get_running_loop().create_task(_keep_calling(ground, stop, tally), name="good peer")
        try:
            await _strangers(ground, num_raw, rng)
            await _insiders(ground, num_frames, rng, tally)
        finally:
            stop.set()
            await good
        await asyncio.sleep(1.0)
        tally.after = await ground.witness.state()
    return tally


async def _keep_calling(ground: Field, stop: asyncio.Event, tally: SocketTally) -> None:
    while not stop.is_set():
        began = time.monotonic()
        assert await ground.witness.ping(tally.pings) == tally.pings + 1
        tally.slowest_s = max(tally.slowest_s, time.monotonic() - began)
        tally.pings += 1
        await asyncio.sleep(0.01)


async def _strangers(ground: Field, num_raw: int, rng: random.Random) -> None:
    hostile = Attack(ground.host, ground.port, rng)
    silent = await asyncio.to_thread(hostile.silent, min(num_raw, 200))
    slow_until = time.monotonic() + min(8.0, num_raw / 20)
    slow = [threading.Thread(target=hostile.slow, args=(slow_until,), daemon=True) for _ in range(min(num_raw, 10))]
    for thread in slow:
        thread.start()

    def once_each() -> None:
        for i in range(num_raw):
            getattr(hostile, ONE_SHOT[i % len(ONE_SHOT)])()
        hostile.flood(num_raw * 5)

    try:
        await asyncio.to_thread(once_each)
    finally:
        for thread in slow:
            await asyncio.to_thread(thread.join)
        for raw in silent:
            raw.close()


async def _insiders(ground: Field, num_frames: int, rng: random.Random, tally: SocketTally) -> None:
    """One after the other. Their leaves overlap: where the frames used up the numbers of calls, the victim takes the
    leave for a copy, and each waits two seconds for its answer."""
    number, corpus = 0, Corpus(rng, PeerKey(0, 1), ground.to, TABLES, 800)
    leaving: set[asyncio.Task[None]] = set()
    while tally.frames < num_frames:
        number += 1
        if len(leaving) >= MAX_LEAVING:
            _, leaving = await asyncio.wait(leaving, return_when=asyncio.FIRST_COMPLETED)
        node = await _let_in(ground, f"insider/{number}")
        insider = Insider(node, ground.rdzv.endpoints, corpus, rng)
        try:
            want = min(num_frames - tally.frames, PER_INSIDER)
            tally.frames += await asyncio.to_thread(insider.storm, want, number % 2 == 1)
        finally:
            tally.may_run += insider.may_run
            await asyncio.to_thread(insider.context.term)
            leaving.add(asyncio.get_running_loop().create_task(node.close(grace_s=0.0), name=f"leave of {number}"))
    await asyncio.gather(*leaving)


async def _let_in(ground: Field, name: str) -> Node:
    for _ in range(20):
        try:
            return await Node.attach(name=name, rdzv=ground.rdzv, key=ground.key, node_rank=FAR_RANK)
        except CallError:
            await asyncio.sleep(0.2)
    raise AssertionError(f"{name} was not let in")


def check(tally: SocketTally) -> None:
    """The promises."""
    before, after = tally.before, tally.after
    assert before is not None and after is not None
    assert after.failed == "", after.failed
    assert after.deeds == [], f"the victim was made to do something: {after.deeds}"
    assert after.misfits == 0
    assert 0 < after.executed <= tally.may_run, f"{after.executed} handlers ran, {tally.may_run} calls could"
    assert tally.pings > 10 and tally.slowest_s < 15, f"{tally.pings} good calls, the slowest took {tally.slowest_s} s"
    for name in ("handshake_wrong", "malformed", "stale", "calls_wrong"):
        assert after.counters.get(name, 0) > 0, f"nothing was counted as {name}: {after.counters}"
    assert after.rss_mib <= before.rss_mib + 96, f"memory grew from {before.rss_mib} to {after.rss_mib} MiB"
    assert after.objects <= before.objects + 30_000, f"objects grew from {before.objects} to {after.objects}"
    assert after.fds <= before.fds + 40, f"descriptors grew from {before.fds} to {after.fds}"
