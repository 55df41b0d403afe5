"""Random and mutated frames into the session of a living node, without sockets between."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.fuzz import audit, mutations, stubs
from tests.fuzz.mutations import ENVELOPE_MUTATIONS, HEADER, Corpus, as_messages
from tests.harness.inproc import InprocNetwork

from myxa.actors.contracts import BufferContract, RolloutContract
from myxa.core.handlers import handlers_of
from myxa.core.ids import PeerKey
from myxa.transport.codec import UndecodableError, decode_value
from myxa.transport.node import Node
from myxa.transport.session.frames import Assemblies, Envelope, EnvelopeChunk, Kind, Malformed, batch, decode, split
from myxa.transport.wire import Endpoints, Lane

CONTRACTS = (stubs.MixedContract, BufferContract, RolloutContract)
PER_TURN = 50
ASSEMBLY_BYTES = 1 << 20


@dataclass
class Tally:
    """What happened."""

    seed: int
    frames: int = 0
    valid_calls: int = 0
    may_run: int = 0
    """Calls whose header is right, whatever their body: only these may reach a handler."""
    good_calls: int = 0
    connections: int = 0
    counters: dict[str, int] = field(default_factory=dict)
    executed: int = 0
    misfits: list[str] = field(default_factory=list)
    deeds: list[str] = field(default_factory=list)
    objects: list[int] = field(default_factory=list)
    rss_mib: list[float] = field(default_factory=list)
    answers: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0


class Rogue:
    """A peer with the right to speak, whose frames are whatever the fuzzer says. Hears the answers.

    Now and then it comes as a new incarnation: a changed number of a call can make all later ones look like copies.
    """

    def __init__(self, network: InprocNetwork, victim: Node, rng: random.Random, size: int) -> None:
        self.answers: Counter[str] = Counter()
        self._rng = rng
        self.left = 0
        """Messages until the next incarnation."""
        self._transport = network.transport()
        self._transport.start(self)
        self._session = victim._session
        self._assemblies = (Assemblies(ASSEMBLY_BYTES), Assemblies(ASSEMBLY_BYTES))
        self._to = PeerKey(victim._key.node_id, victim._key.epoch)
        self._num_attempts = 0
        self._sources = [b"", b""]
        self.num_connections = 0
        tables = [handlers_of(contract) for contract in CONTRACTS]
        self._tables = tables
        self.corpus = Corpus(rng, PeerKey(900, 1), self._to, tables, size)

    # a sink, for what the victim says to it

    def received(self, source: bytes, lane: Lane, data: memoryview) -> None:
        envelope = decode(data)
        self.answers[envelope.kind.name if isinstance(envelope, Envelope) else "malformed"] += 1

    def greeting(self, peer, lane):
        raise AssertionError("the rogue calls nobody")

    def connected(self, peer, lane): ...
    def lost(self, peer, lane, why): ...
    def unreachable(self, peer, why): ...
    def turned_away(self, peer, why): ...
    def is_known(self, source, lane):
        return True

    def overflowed(self, source, lane, head, total): ...
    def silence_s(self, peer):
        return 0.0

    def malformed(self, source, lane, reason): ...
    def crashed(self, error):
        raise error

    # what it does

    def introduce(self) -> None:
        """A new connection on each lane with a right HELLO; a new incarnation if the old one was buried."""
        self.left = self._rng.randrange(20, 800)
        me = PeerKey(self.corpus.me.node_id, self.corpus.me.epoch + 1)
        # A changed HELLO may have announced an incarnation from far ahead: then this node is done for.
        self.corpus.me = PeerKey(me.node_id + 1, 1) if self._session._links.is_over(me) else me
        self.corpus.corr = 0
        for lane in Lane:
            while self._rng.random() < 0.5:
                change = self._rng.choice(ENVELOPE_MUTATIONS)
                self._greet(lane, change(self._rng, bytearray(self._hello()), self.corpus))
            self._greet(lane, bytearray(self._hello()))

    def _hello(self) -> bytes:
        self._num_attempts += 1
        return self.corpus.hello(self.endpoints, self._num_attempts)

    def _greet(self, lane: Lane, hello: bytearray) -> None:
        self._connect(lane)
        self.take(lane, batch([hello]))

    def _connect(self, lane: Lane) -> None:
        self.num_connections += 1
        self._assemblies[lane].forget(self._sources[lane])
        self._sources[lane] = f"rogue-{self.num_connections}".encode()

    @property
    def endpoints(self) -> Endpoints:
        return self._transport.endpoints

    @property
    def is_heard(self) -> bool:
        return self.left > 0 and all(self._session.is_known(self._sources[lane], lane) for lane in Lane)

    def take(self, lane: Lane, message: bytes) -> None:
        """What an inbox does with a message of ZeroMQ."""
        source, session = self._sources[lane], self._session
        self.left -= 1
        parts = split(memoryview(message))
        if isinstance(parts, EnvelopeChunk):
            parts = self._assembled(source, lane, parts)
        if isinstance(parts, Malformed):
            session.malformed(source, lane, parts.reason)
            return
        for part in parts:
            session.received(source, lane, part)

    def _assembled(self, source: bytes, lane: Lane, chunk: EnvelopeChunk) -> list[memoryview] | Malformed:
        if not self._session.is_known(source, lane):
            return Malformed(reason="a chunk before HELLO")
        given_up = self._assemblies[lane].overflow(source, chunk)
        if given_up is not None:
            self._session.overflowed(source, lane, given_up, chunk.total)
            return []
        whole = self._assemblies[lane].add(source, chunk)
        assert self._assemblies[lane].num_bytes <= ASSEMBLY_BYTES
        return whole if isinstance(whole, Malformed) else [memoryview(whole)] if whole is not None else []

    def may_run(self, data: bytes | bytearray) -> bool:
        """By the header alone, read without the code under test."""
        if len(data) < HEADER.size:
            return False
        f = HEADER.unpack_from(data)
        me = (self.corpus.me.node_id, self.corpus.me.epoch)
        return (
            f[mutations.MAGIC] == b"my" and f[mutations.KIND] in (Kind.CALL, Kind.CAST)
            and (f[mutations.SRC_NODE], f[mutations.SRC_EPOCH]) == me and f[mutations.DST_EPOCH] == self._to.epoch
            and f[mutations.ACTOR] < len(self._tables) and f[mutations.METHOD] < len(self._tables[f[mutations.ACTOR]].specs)
        )  # fmt: skip


async def fuzz(num_frames: int, seed: int, corpus_size: int = 3000) -> Tally:
    """Throw that many frames at a node that serves real contracts while a good peer calls it."""
    rng = random.Random(seed)
    tally = Tally(seed)
    stubs.executed.clear()
    stubs.misfits.clear()
    network = InprocNetwork()
    host = await Node.attach(name="launcher/0", network=network)
    victim = await Node.attach(name="victim", rdzv=host.rendezvous, network=network)
    friend = await Node.attach(name="friend", rdzv=host.rendezvous, network=network)
    for contract in CONTRACTS:
        await victim.start(stubs.stub_of(contract)(), name=contract.__name__.removesuffix("Contract").lower())
    await victim.start(stubs.Pong(), name="pong")
    await friend.wait_for("pong", timeout_s=10)
    rogue = Rogue(network, victim, rng, corpus_size)
    warm(victim)
    assert await friend.ref(stubs.Pong, "pong").ping(1) == 2
    began = time.monotonic()
    try:
        with audit.watched() as deeds:
            await _storm(num_frames, rng, rogue, friend, tally)
            await _settled(victim)
            tally.deeds = list(deeds)
        assert not victim.failed.done(), victim.failed.result()
    finally:
        tally.seconds = time.monotonic() - began
        tally.counters = victim.counters()
        tally.executed, tally.misfits = stubs.executed.total(), list(stubs.misfits)
        tally.answers, tally.connections = rogue.answers, rogue.num_connections
        await rogue._transport.close(0.0)
        for node in (friend, victim, host):
            await node.close(grace_s=2.0)
    return tally


def warm(victim: Node) -> None:
    """Decode every type once: annotations are resolved at the first use, and that is compiling."""
    for spec in (spec for cell in victim._hosting.cells() for spec in cell.table.specs):
        for kind in (spec.request, spec.reply):
            with contextlib.suppress(UndecodableError):
                decode_value(b"[{}]", [], kind)


async def _storm(num_frames: int, rng: random.Random, rogue: Rogue, friend: Node, tally: Tally) -> None:
    ref = friend.ref(stubs.Pong, "pong")
    marks = {num_frames * i // 10 for i in range(1, 11)}
    while tally.frames < num_frames:
        for _ in range(PER_TURN):
            if not rogue.is_heard:
                rogue.introduce()
            envelopes = [_envelope(rng, rogue, tally) for _ in range(rng.choice((1, 1, 2, 5)))]
            lane = Lane(rng.randrange(2))
            for message in as_messages(rng, envelopes):
                rogue.take(lane, message)
                tally.frames += 1
                if tally.frames in marks:
                    _measure(tally)
            if rng.random() < 0.02:
                _decode_alone(rng, rogue)
        if rng.random() < 0.05:
            assert await ref.ping(tally.frames) == tally.frames + 1
            tally.good_calls += 1
        else:
            await asyncio.sleep(0)


def _envelope(rng: random.Random, rogue: Rogue, tally: Tally) -> bytes:
    corpus = rogue.corpus
    data = corpus.numbered(rng.choice(corpus.calls if rng.random() < 0.75 else corpus.others))
    if rng.random() < 0.1:
        tally.valid_calls += rogue.may_run(data)
        tally.may_run += rogue.may_run(data)
        return data
    changed = rng.choice(ENVELOPE_MUTATIONS)(rng, bytearray(data), corpus)
    tally.may_run += rogue.may_run(changed)
    return bytes(changed)


def _decode_alone(rng: random.Random, rogue: Rogue) -> None:
    """A body and arrays against types that they were not made for."""
    envelope = decode(memoryview(bytearray(rng.choice(rogue.corpus.calls))))
    assert isinstance(envelope, Envelope)
    body = bytearray(envelope.body)
    if body and rng.random() < 0.7:
        body[rng.randrange(len(body))] = rng.randrange(256)
    spec = rng.choice(rng.choice(rogue._tables).specs)
    try:
        decode_value(bytes(body), [memoryview(f) for f in envelope.frames], spec.request)
    except UndecodableError:
        pass


def _measure(tally: Tally) -> None:
    gc.collect()
    tally.objects.append(len(gc.get_objects()))
    tally.rss_mib.append(psutil.Process().memory_info().rss / 2**20)


async def _settled(victim: Node) -> None:
    """Until every call that was taken in has been handled."""
    for _ in range(2000):
        await asyncio.sleep(0.002)
        if not any(cell._running or len(cell._mailbox) for cell in victim._hosting.cells()):
            return
    raise AssertionError("calls were left unhandled")


def check(tally: Tally) -> None:
    """The promises."""
    assert tally.deeds == [], f"the interpreter was made to do something: {tally.deeds[:5]}"
    assert tally.misfits == [], f"a handler got what it does not declare: {tally.misfits[:3]}"
    assert 0 < tally.executed <= tally.may_run, f"{tally.executed} handlers ran, {tally.may_run} calls could"
    for name in ("malformed", "banned", "stale", "calls_wrong"):
        assert tally.counters.get(name, 0) > 0, f"nothing was counted as {name}: {tally.counters}"
    assert tally.answers["NACK"] > 0
    assert tally.good_calls > 0
    if len(tally.objects) >= 10:
        assert tally.objects[-1] <= tally.objects[2] + 20_000, f"objects grow: {tally.objects}"
        assert tally.rss_mib[-1] <= tally.rss_mib[2] + 64, f"memory grows: {tally.rss_mib}"
