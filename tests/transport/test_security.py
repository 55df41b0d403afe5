"""Who may speak: only holders of the job's key over tcp, only the same user over ipc; nonsense has no effect."""

from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path

import orjson
import pytest
import zmq
from tests.harness.waiting import until
from tests.transport.cast_of_actors import Echo

from myxa.core.errors import LaunchError
from myxa.transport import address
from myxa.transport.node import JobKey, Node
from myxa.transport.session.frames import Envelope, Kind, batch, encode
from myxa.transport.session.session import PROTOCOL
from myxa.transport.wire import Endpoints

pytestmark = [pytest.mark.timeout(60)]


@pytest.fixture
def kind(request):
    return getattr(request, "param", "ipc")


def test_a_key_is_no_flag_of_a_command_line():
    assert all(JobKey.generate().public[0].isalnum() for _ in range(200))


@pytest.mark.parametrize("kind", ["tcp"], indirect=True)
async def test_another_key_is_not_admitted(world):
    with pytest.raises(LaunchError, match=r"no answer from the registry at tcp://127\.0\.0\.1:\d+ .*key"):
        await Node.attach(
            name="stranger", rdzv=world.host.rendezvous, key=JobKey.generate(), node_rank=1, timeout_s=1.0
        )  # fmt: skip


async def test_without_a_key_nobody_listens_on_tcp():
    with pytest.raises(LaunchError, match="needs the job's key"):
        await Node.attach(name="host", tcp="127.0.0.1:0")


async def test_an_address_that_is_not_ours_is_a_clear_error():
    with pytest.raises(LaunchError, match=r"cannot listen at tcp://203\.0\.113\.7"):
        await Node.attach(name="host", tcp="203.0.113.7:0", key=JobKey.generate())
    for tcp in ("0.0.0.0:0", "*:0"):  # others would be told to connect to themselves
        with pytest.raises(LaunchError, match="means every interface -- give this host's IP address"):
            await Node.attach(name="host", tcp=tcp, key=JobKey.generate())
    for tcp in ("127.0.0.1", ":0", "127.0.0.1:99999", "127.0.0.1:-1"):  # libzmq takes the last two, of another port
        with pytest.raises(LaunchError, match="address to listen at"):
            await Node.attach(name="host", tcp=tcp, key=JobKey.generate())


async def test_sockets_lie_where_only_we_can_go(world):
    folder = Path(world.host.rendezvous.socket_dir)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    near = await world.join("near")
    assert len(list(folder.iterdir())) == 4
    await near.close()
    assert len(list(folder.iterdir())) == 2
    folder.chmod(0o755)
    with pytest.raises(LaunchError, match="only we can enter"):
        await world.join("other")
    folder.chmod(0o700)


def raw_client(context, endpoint):
    client = context.socket(zmq.DEALER)
    client.setsockopt(zmq.LINGER, 500)
    client.connect(endpoint)
    return client


def hello(name, node_id, epoch, to, endpoints=None):
    body = {
        "name": name, "protocol": PROTOCOL, "to_node": to.node_id, "to_epoch": to.epoch,
        "endpoints": {"node_rank": 0, "inproc": "", "ipc": endpoints or ["", ""], "tcp": ["", ""]},
    }  # fmt: skip
    return Envelope(kind=Kind.HELLO, src_node=node_id, src_epoch=epoch, dst_epoch=to.epoch, body=orjson.dumps(body))


async def test_a_peer_that_talks_nonsense_is_answered_then_ignored(world):
    near, far = await world.pair(Echo())
    context = zmq.Context()
    inbox = context.socket(zmq.ROUTER)
    path = f"ipc://{world.host.rendezvous.socket_dir}/rogue"
    inbox.bind(path)
    client = raw_client(context, far._transport.endpoints.ipc[0])
    client.send(batch([encode(hello("rogue", 77, 3, far._key, [path, path]))]))
    bad_call = bytearray(
        encode(Envelope(kind=Kind.CALL, src_node=77, src_epoch=3, dst_epoch=1, corr=5, actor=0, method=0, body=b"{"))
    )
    client.send(batch([bad_call]))
    unknown = [
        encode(Envelope(kind=Kind.CALL, src_node=77, src_epoch=3, dst_epoch=1, corr=c, actor=a, method=m, body=b"[{}]"))
        for c, a, m in ((6, 99, 0), (7, 0, 999))
    ]
    client.send(batch(unknown))
    answers = {}
    async with asyncio.timeout(10):
        while not {5, 6, 7} <= set(answers):
            if inbox.poll(0):
                message = inbox.recv_multipart()[-1]
                from myxa.transport.session.frames import decode, split

                parts = split(memoryview(message))
                assert isinstance(parts, list)
                for part in parts:
                    envelope = decode(part)
                    assert isinstance(envelope, Envelope)
                    if envelope.corr:
                        answers[envelope.corr] = orjson.loads(bytes(envelope.body))["kind"]
            await asyncio.sleep(0.01)
    assert answers == {5: "BadRequest", 6: "NoSuchActor", 7: "NoSuchMethod"}
    assert far.counters()["calls_wrong"] == 3
    for _ in range(150):
        client.send(batch([bytearray(b"myxa") + bytes(60)]))
    client.send(batch([bad_call]))
    await until(lambda: far.counters().get("malformed", 0) >= 150)
    assert await near.ref(Echo, "callee").ping() > 0
    for thing in (client, inbox):
        thing.close(linger=0)
    context.term()


def test_the_job_key_is_kept_from_others(tmp_path):
    key = JobKey.generate()
    path = tmp_path / "job.key"
    key.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert JobKey.load(path) == key
    assert key.secret not in repr(key)
    with pytest.raises(FileExistsError):
        key.save(path)
    path.chmod(0o644)
    with pytest.raises(LaunchError, match="can be read by others"):
        JobKey.load(path)
    with pytest.raises(LaunchError, match="cannot be read"):
        JobKey.load(tmp_path / "none")
    for text in ("", "no key", key.text + " x", "\ufeff" + key.text):
        (path := tmp_path / "bad.key").write_text(text)
        path.chmod(0o600)
        with pytest.raises(LaunchError, match=r"bad\.key is no job key"):
            JobKey.load(path)
    path.write_bytes(key.text.encode("utf-16"))
    with pytest.raises(LaunchError, match="cannot be read"):
        JobKey.load(path)
    other = JobKey.generate()
    for text in ("", "a b", f"{key.public} {other.secret}", key.public):
        with pytest.raises(LaunchError, match="no job key"):
            JobKey.parse(text)


def test_socket_directories_have_short_paths(tmp_path):
    deep = tmp_path / ("x" * 80)
    made = address.make_socket_dir(deep)
    try:
        assert not made.is_relative_to(deep)  # too deep for the kernel
        assert all(len(os.fsencode(p)) < 107 for p in address.socket_paths(made))
    finally:
        made.rmdir()
    with pytest.raises(LaunchError, match="no such socket directory"):
        address.check_socket_dir(tmp_path / "none")


def test_rendezvous_travels_as_a_file(tmp_path):
    rdzv = address.Rendezvous(endpoints=Endpoints(tcp=("tcp://h:1", "")), socket_dir="/x")
    rdzv.save(tmp_path / "r.json")
    assert address.Rendezvous.load(tmp_path / "r.json") == rdzv
    assert address.Rendezvous.at("node0:29400").endpoints.tcp[0] == "tcp://node0:29400"
    for text in ("node0", "node0:x", ":1", "h:99999"):
        with pytest.raises(LaunchError, match="registry's address"):
            address.Rendezvous.at(text)
    (tmp_path / "bad").write_text("{}")
    with pytest.raises(LaunchError, match="no rendezvous record"):
        address.Rendezvous.load(tmp_path / "bad")
