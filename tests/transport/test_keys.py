"""Who may speak as whom over tcp: a key of its own for every process, and nobody speaks in another's name."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
import zmq
from tests.harness.waiting import until
from tests.transport.cast_of_actors import Echo

from myxa.core.errors import CallError, LaunchError, NotPermitted, StaleEpoch
from myxa.core.ids import PeerKey
from myxa.core.refs import with_deadline
from myxa.transport.address import Rendezvous
from myxa.transport.node import JobKey, KeyPair, Node
from myxa.transport.registry.directory import NodeRecord, keys_of
from myxa.transport.session.frames import Envelope, Kind, batch, encode
from myxa.transport.session.guard import MAX_CANDIDATES, PROVISIONAL, KeyRights, PeerGuard
from myxa.transport.session.session import PROTOCOL, Hello, write_hello
from myxa.transport.socket_transport import SocketTransport
from myxa.transport.wire import Endpoints, Lane

pytestmark = [pytest.mark.timeout(60)]
ABOVE = 1 << 40
"""More connections than any node has made."""


@pytest.fixture
def kind():
    return "tcp"


def key_of(node: Node) -> KeyPair:
    transport = node._transport
    assert isinstance(transport, SocketTransport)
    keys = transport.keys
    assert keys is not None
    return keys.own


class Raw:
    """A plain socket that connects to a node over tcp."""

    def __init__(self, to: Node, pair: KeyPair | None, lane: Lane = Lane.CONTROL) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 200)
        self.socket.setsockopt(zmq.SNDTIMEO, 300)
        self.socket.setsockopt(zmq.IMMEDIATE, 1)
        self.socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self.to = to._key
        endpoints = to._transport.endpoints
        if pair is not None:
            self.socket.curve_serverkey = endpoints.curve.encode()
            self.socket.curve_publickey, self.socket.curve_secretkey = pair.public.encode(), pair.secret.encode()
        self.socket.connect(endpoints.tcp[lane])

    def hello(
        self, name: str, me: PeerKey, endpoints: Endpoints | None = None, attempt: int = ABOVE
    ) -> bytes | bytearray:
        body = write_hello(Hello(
            protocol=PROTOCOL, name=name, to_node=self.to.node_id, to_epoch=self.to.epoch, endpoints=endpoints or Endpoints(),
            attempt=attempt,
        ))  # fmt: skip
        return encode(Envelope(kind=Kind.HELLO, src_node=me.node_id, src_epoch=me.epoch, dst_epoch=1, body=body))

    def call(self, me: PeerKey, method: int) -> bytes | bytearray:
        own, to = me, self.to
        return encode(Envelope(
            kind=Kind.CALL, corr=ABOVE, src_node=own.node_id, src_epoch=own.epoch, dst_epoch=to.epoch, method=method,
            body=b"[{}]",
        ))  # fmt: skip

    async def send(self, *envelopes: bytes | bytearray) -> bool:
        """False if the connection was refused."""
        try:
            await asyncio.to_thread(self.socket.send, batch(list(envelopes)))
        except zmq.Again:
            return False
        return True

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        self.context.term()


async def counted(node: Node, name: str, number: int = 1) -> None:
    await until(lambda: node.counters().get(name, 0) >= number)


def no_handshakes(node: Node) -> int:
    """A client without a key is turned away, or sees first that it lacks one and hangs up."""
    counters = node.counters()
    return counters.get("handshake_wrong", 0) + counters.get("handshake_unfinished", 0)


# -- keys


async def test_every_process_has_a_key_of_its_own(world):
    near, far = await world.pair(Echo())
    keys = {key_of(node).public for node in (world.host, near, far)}
    assert len(keys) == 3
    assert key_of(world.host).public == world.key.public
    assert await near.ref(Echo, "callee").ping() > 0


async def test_a_process_whose_key_was_announced_needs_no_job_key_and_has_one_name(world):
    key = KeyPair.generate()
    await world.host.registry.expect("rollout/0", key.public)
    rdzv = world.host.rendezvous
    with pytest.raises(LaunchError, match=r"announced for rollout/0 was used to join as trainer/0"):
        await Node.attach(name="trainer/0", rdzv=rdzv, key=key, node_rank=5, timeout_s=2)
    node = await Node.attach(name="rollout/0", rdzv=rdzv, key=key, node_rank=5)
    world.nodes.append(node)
    assert key_of(node) == key
    await world.host.start(Echo(), "callee")
    await node.wait_for("callee", timeout_s=20)
    assert await node.ref(Echo, "callee").ping() > 0
    with pytest.raises(LaunchError):  # it served to join once
        await Node.attach(name="rollout/0", rdzv=rdzv, key=key, node_rank=6, timeout_s=2)


async def test_the_job_key_opens_only_the_registry(world):
    """With it one may ask to join, and do nothing else; other nodes do not even let it in to ask."""
    near = await world.join("near")
    await near.start(Echo(), "callee")
    with Raw(world.host, world.key) as raw:
        await raw.send(raw.hello("near", near._key), raw.call(near._key, 0))
        await counted(world.host, "hello_in_anothers_name")
    with Raw(near, world.key) as raw:
        me = PeerKey(PROVISIONAL | 5, 0)
        await raw.send(raw.hello("stranger", me), raw.call(me, 0))
        await counted(near, "hello_in_anothers_name")
        await counted(near, "before_hello")


# -- names


async def test_a_node_cannot_speak_in_anothers_name(world):
    near, far = await world.pair(Echo())
    other = await world.join("other")
    with Raw(far, key_of(other)) as raw:
        await raw.send(raw.hello("near", near._key), raw.call(near._key, 0))
        await counted(far, "hello_in_anothers_name")
        await raw.send(raw.hello("other", near._key))
        await raw.send(raw.hello("near", other._key))
        await raw.send(raw.hello("other", PeerKey(other._key.node_id, 9)))
        await counted(far, "hello_in_anothers_name", 4)
        await counted(far, "before_hello")
        await raw.send(raw.hello("other", other._key, other._transport.endpoints))  # as itself it may
        await raw.send(raw.hello("near", near._key))  # and then not become somebody else
        await counted(far, "malformed", 5)
    assert await near.ref(Echo, "callee").seen() == []
    assert far.counters()["hello_in_anothers_name"] == 4


async def test_the_registry_hears_of_a_node_only_from_itself_and_from_launchers(world):
    announced_key = KeyPair.generate()
    await world.host.registry.expect("rollout/0", announced_key.public)
    node = await Node.attach(name="rollout/0", rdzv=world.host.rendezvous, key=announced_key, node_rank=5)
    world.nodes.append(node)
    other = await world.join("other")
    registry = node.registry
    for deed in (
        registry.leave("other", 1, "gone"),
        registry.announce("other", 1, (), {}),
        registry.process_exited("other", 1, 0),
        registry.expect("trainer/0", KeyPair.generate().public),
        registry.register("other", Endpoints(), 1),
    ):
        with pytest.raises(NotPermitted):
            await deed
    assert await other.registry.process_exited("nobody", 1, 0) is False  # it joined with the job's key
    with pytest.raises(NotPermitted, match="no public key"):
        await other.registry.expect("trainer/0", "short")
    with pytest.raises(LaunchError, match="registry itself"):
        await world.join("launcher/0", timeout_s=2)


# -- replays, stale epochs, dead incarnations


async def test_a_hello_that_was_recorded_has_no_effect(world):
    near, far = await world.pair(Echo())
    assert await near.ref(Echo, "callee").ping() > 0
    pair, me, endpoints = key_of(near), near._key, near._transport.endpoints
    for number in (1, 2):
        with Raw(far, pair) as raw:
            await raw.send(raw.hello("near", me, endpoints, attempt=1))  # an old one
            await counted(far, "hello_replayed", number)
    assert await near.ref(Echo, "callee").ping() > 0  # its own connection is still the one that counts


async def test_the_key_of_a_dead_incarnation_is_dropped(world):
    near, far = await world.pair(Echo())
    gone = await world.join("gone")
    pair, me = key_of(gone), gone._key
    assert await gone.ref(Echo, "callee").ping() > 0
    await world.host.registry.process_exited("gone", me.epoch, -9)
    error = await asyncio.wait_for(gone.failed, 10)
    assert isinstance(error, StaleEpoch)
    await until(lambda: not far._mirror.directory.epoch_of("gone"))
    with Raw(far, pair) as raw:
        assert not await raw.send(raw.hello("gone", me))
        await counted(far, "key_unknown")
    assert await near.ref(Echo, "callee").ping() > 0


# -- refusals are told once


async def test_refusals_are_counted_and_the_first_is_logged_with_a_remedy(world, caplog):
    with caplog.at_level(logging.WARNING, logger="myxa.transport"):
        for number in (1, 2, 3):
            with Raw(world.host, KeyPair.generate()) as raw:
                assert not await raw.send(raw.hello("x", PeerKey(9, 9)))
            with Raw(world.host, None) as raw:
                assert not await raw.send(raw.hello("x", PeerKey(9, 9)))
            await counted(world.host, "key_unknown", number)
            await until(lambda n=number: no_handshakes(world.host) >= n)
    messages = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    names = [line.partition("(")[2].partition(")")[0] for line in messages]
    assert len(names) == len(set(names)), "each kind is told once"
    assert "key_unknown" in names and len(names) >= 2
    assert any("job's key" in line for line in messages)
    assert any("without a key" in line or "hangs up" in line for line in messages)


async def test_a_hello_with_a_nonsensical_address_or_key_hurts_nobody(world):
    near, far = await world.pair(Echo())
    rogue = await world.join("rogue")
    overflowing = "#" * 40  # of the right alphabet, and more than 32 bytes can say
    with Raw(far, key_of(rogue)) as raw:
        for number, endpoints in enumerate(
            (
                Endpoints(curve="x", tcp=("tcp://127.0.0.1:1", "")),
                Endpoints(tcp=("tcp://127.0.0.1:1", "")),
                Endpoints(ipc=("tcp://127.0.0.1:1", "")),
                Endpoints(curve=overflowing, tcp=("ipc:///var/run/some.sock", "")),
            ),
            start=1,
        ):
            await raw.send(raw.hello("rogue", rogue._key, endpoints))
            await counted(far, "malformed", number)
        await raw.send(raw.hello("rogue", rogue._key, Endpoints(curve=overflowing, tcp=("tcp://127.0.0.1:1", ""))))
        await asyncio.sleep(0.3)
    assert not far.failed.done()
    assert await near.ref(Echo, "callee").ping() > 0


# -- the guard alone


def record(name: str, node_id: int, epoch: int, key: str, role: str = "node") -> NodeRecord:
    return NodeRecord(name=name, node_id=node_id, epoch=epoch, endpoints=Endpoints(curve=key), role=role)


def test_the_guard_follows_the_directory_at_once():
    guard = PeerGuard("root", registry_node=1, is_registry=False)
    assert not guard.admits("a")
    guard.follow(keys_of([record("a", 2, 1, "a")]))
    assert guard.admits("a")
    assert guard.objection("a", PeerKey(2, 1), "a") == ""
    assert "is that of a" in guard.objection("a", PeerKey(2, 2), "a")
    assert "is that of a" in guard.objection("a", PeerKey(2, 1), "b")
    guard.follow(keys_of([record("a", 2, 2, "a2")]))
    assert not guard.admits("a")
    assert "is not registered" in guard.objection("a", PeerKey(2, 1), "a")
    assert guard.admits("a2")
    assert guard.objection("root", PeerKey(1, 4), "launcher/0") == ""
    assert guard.objection("root", PeerKey(2, 2), "a") != ""


def test_the_guard_of_the_registry_lets_strangers_ask_and_no_more():
    guard = PeerGuard("root", registry_node=1, is_registry=True)
    stranger = PeerKey(PROVISIONAL | 7, 0)
    assert guard.objection("root", stranger, "new") == ""
    assert guard.stranger(stranger) == KeyRights("", "keeper")
    assert guard.objection("other", stranger, "new") != ""
    guard.expect(KeyRights("rollout/0", "node", "k1"))
    guard.expect(KeyRights("rollout/0", "node", "k2"))
    assert not guard.admits("k1")  # a later key of the same name replaced it
    assert guard.objection("k2", PeerKey(PROVISIONAL | 8, 0), "rollout/0") == ""
    assert guard.objection("k2", PeerKey(8, 1), "rollout/0") != ""
    guard.joined("k2")
    assert not guard.admits("k2")


def test_the_guard_is_bounded():
    guard = PeerGuard("root", registry_node=1, is_registry=True)
    for i in range(MAX_CANDIDATES + 100):
        guard.expect(KeyRights(f"n/{i}", "node", f"k{i}"))
    assert len(guard._candidates) == MAX_CANDIDATES


def test_a_secret_is_never_shown():
    pair = JobKey.generate()
    assert pair.secret not in f"{pair!r} {pair}"


async def test_a_registry_at_a_known_port_has_no_ear_for_those_of_an_earlier_job(tmp_path: Path, caplog):
    """Same port, same job key, same names, same numbers, only the keys of the processes are others."""
    caplog.set_level("CRITICAL")
    key = JobKey.generate()
    first = await Node.attach(name="launcher/0", key=key, tcp="127.0.0.1:0", run_dir=tmp_path)
    address = first.rendezvous.endpoints.tcp[0].removeprefix("tcp://")
    left_over = await Node.attach(name="launcher/1", rdzv=Rendezvous.at(address), key=key, node_rank=1)
    await first._transport.close(0.0)  # it dies without a goodbye
    second = await Node.attach(name="launcher/0", key=key, tcp=address, run_dir=tmp_path)
    successor = await Node.attach(name="launcher/1", rdzv=Rendezvous.at(address), key=key, node_rank=1)
    assert (left_over.epoch, first.epoch) == (successor.epoch, second.epoch)
    await successor.start(Echo(), "echo")
    assert await second.ref(Echo, "echo").ping() > 0
    with pytest.raises(CallError):
        await with_deadline(left_over.registry, 1.5).updates(-1)
    await until(lambda: sum(second._transport.counters.values()) > 0, "the refusal is counted")
    assert not successor.failed.done()
    assert not second.failed.done()
    for node in (left_over, first, successor, second):
        await node.close(grace_s=0)
