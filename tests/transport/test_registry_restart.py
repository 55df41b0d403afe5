"""The process that hosts the registry is killed and comes back: nobody else may notice more than a pause in the news."""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from tests.harness.waiting import until
from tests.transport.cast_of_actors import Echo, EchoContract, Watcher

from myxa.core.errors import CallError, LaunchError, StaleEpoch
from myxa.core.refs import with_deadline
from myxa.transport.address import Rendezvous
from myxa.transport.node import JobKey, Node
from myxa.transport.registry.journal import NodeEntry, RegistryJournal

pytestmark = [pytest.mark.timeout(90)]

HERE = Path(__file__).parent


class Job:
    """A registry in a process of its own, members in others and in this one."""

    def __init__(self, kind: str, tmp: Path) -> None:
        self.kind = kind
        self.tmp = tmp
        self.journal = tmp / "registry.journal"
        self.sockets = Path(tempfile.mkdtemp(prefix="j-"))
        self.key_file = ""
        if kind == "tcp":
            self.key_file = str(tmp / "job.key")
            JobKey.generate().save(Path(self.key_file))
        self.nodes: list[Node] = []
        self.children: list[asyncio.subprocess.Process] = []
        self.registry: asyncio.subprocess.Process

    async def spawn(self, script: str, *args: str, **options: Any) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(sys.executable, str(HERE / script), *args, **options)
        self.children.append(process)
        return process

    async def start_registry(self) -> str:
        """What it said first."""
        self.registry = await self.spawn(
            "registry_child.py", str(self.journal), str(self.tmp / "rdzv.json"), self.key_file, str(self.sockets),
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert self.registry.stdout is not None
        return (await asyncio.wait_for(self.registry.stdout.readline(), 30)).decode().strip()

    @property
    def rdzv(self) -> Rendezvous:
        """Of the registry's first incarnation, as it stands in a file."""
        return Rendezvous.load(self.tmp / "rdzv.json")

    async def join(self, name: str) -> Node:
        rank = len(self.nodes) + 2 if self.kind == "tcp" else 0
        key = JobKey.load(Path(self.key_file)) if self.key_file else None
        node = await Node.attach(name=name, rdzv=self.rdzv, key=key, node_rank=rank, run_dir=self.sockets)
        self.nodes.append(node)
        return node

    async def child(self, name: str) -> asyncio.subprocess.Process:
        return await self.spawn("child.py", str(self.tmp / "rdzv.json"), self.key_file, str(self.sockets), name)

    async def close(self) -> None:
        for node in reversed(self.nodes):
            await node.close(grace_s=1.0)
        for process in self.children:
            if process.returncode is None:
                process.kill()
            await process.wait()
            if process.stdout is not None:
                # nothing public closes the pipe of a process before the collector does
                process._transport.close()  # pyright: ignore[reportAttributeAccessIssue]
        shutil.rmtree(self.sockets)
        for left in Path(self.rdzv.socket_dir).parent.glob(Path(self.rdzv.socket_dir).name):
            shutil.rmtree(left)


@pytest_asyncio.fixture(params=["ipc", "tcp"])
async def job(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Job]:
    made = Job(request.param, tmp_path)
    yield made
    await made.close()


def epochs_in(journal: Path) -> list[tuple[str, int, int]]:
    """(name, number, epoch) of every grant, in order."""
    lines = [line.partition(b" ")[2] for line in journal.read_bytes().splitlines()]
    seen: dict[tuple[str, int, int], None] = {}
    for line in lines:
        entry = msgspec.json.decode(line)
        if entry["type"] == "known":
            record = entry["record"]
            seen[record["name"], record["node_id"], record["epoch"]] = None
    return list(seen)


def check_endpoints(journal: Path) -> None:
    """No two incarnations ever listened at the same place, but for the registry's own tcp address."""
    owners: dict[str, tuple[str, int]] = {}
    for line in journal.read_bytes().splitlines():
        entry = msgspec.json.decode(line.partition(b" ")[2])
        if entry["type"] != "known":
            continue
        record = entry["record"]
        incarnation = record["name"], record["epoch"]
        places = record["endpoints"].get("ipc", ()) + record["endpoints"].get("tcp", ())
        for place in places:
            if place and not (record["name"] == "launcher/0" and place.startswith("tcp")):
                assert owners.setdefault(place, incarnation) == incarnation
    assert len(owners) >= 8


@pytest.mark.parametrize("job", ["tcp"], indirect=True)
async def test_calls_go_on_while_the_registry_is_dead_and_it_is_found_when_it_is_back(job: Job):
    assert await job.start_registry() == "epoch 1"
    near = await job.join("near")
    watcher = Watcher("")
    await near.start(watcher, "watcher")
    child = await job.child("far")
    await near.wait_for("far", timeout_s=20)
    ref = near.ref(EchoContract, "far")
    num_calls, errors = 0, []

    async def keep_calling() -> None:
        nonlocal num_calls
        while True:
            try:
                assert await ref.ping() == child.pid
                num_calls += 1
            except CallError as error:
                errors.append(error)
            await asyncio.sleep(0.01)

    calling = asyncio.ensure_future(keep_calling())
    await until(lambda: num_calls > 5, "calls are under way")

    job.registry.send_signal(signal.SIGKILL)
    await job.registry.wait()
    before = num_calls
    await until(lambda: num_calls > before + 50, "50 calls were made without a registry")
    assert await job.start_registry() == "epoch 2"
    await until(lambda: near.rendezvous.epoch == 2, "the registry is found again")

    third = await job.join("third")  # with the record of the registry's first incarnation
    assert third.rendezvous.epoch == 2
    await third.start(Echo(), "third")
    assert await third.ref(EchoContract, "far").ping() == child.pid
    await near.wait_for("third", timeout_s=20)
    assert await near.ref(EchoContract, "third").ping() > 0
    calling.cancel()
    assert errors == []
    told = [(event.kind, event.name) for event in watcher.told]
    assert ("up", "third") in told
    assert [name for kind, name in told if kind == "down"] == []
    assert [name for kind, name in told if kind == "restarted"] == ["registry"]
    assert (near.epoch, third.epoch) == (1, 1)
    ids = {name: number for name, number, _ in epochs_in(job.journal)}
    check_endpoints(job.journal)
    assert ids == {"launcher/0": 1, "near": 2, "far": 3, "third": 4}
    assert not near.failed.done()

    # It knows the old ones as if nothing had been: an end is news to all, and the next incarnation is a new epoch.
    child.send_signal(signal.SIGKILL)
    status = await child.wait()
    assert await near.registry.process_exited("far", 0, status, pid=child.pid)
    await until(lambda: any(e.kind == "down" and e.name == "far" for e in watcher.told), "near heard of it")
    again = await job.child("far")
    await until(lambda: near._mirror.directory.epoch_of("far") == 2 and near.peers("far"), "far is back")
    assert await ref.ping() == again.pid


@pytest.mark.parametrize("job", ["ipc"], indirect=True)
async def test_a_zombie_is_refused_and_counted_and_learns_that_it_is_over(job: Job, caplog):
    caplog.set_level("CRITICAL")
    await job.start_registry()
    zombie = await job.join("far")
    zombie._mirror.look_for_registry = lambda: None  # it does not notice ...
    job.registry.kill()
    await job.registry.wait()
    key = JobKey.load(Path(job.key_file)) if job.key_file else None
    host = await Node.attach(name="launcher/0", run_dir=job.sockets, journal=job.journal, key=key)
    job.nodes.insert(0, host)
    successor = await Node.attach(name="far", rdzv=host.rendezvous, run_dir=job.sockets)
    job.nodes.append(successor)
    assert successor.epoch == 2
    refused = host.counters()["rejoins_refused"]
    assert await host.registry.rejoin(zombie._describe()) == "far epoch 1 is over; epoch 2 is there"
    del zombie._mirror.look_for_registry  # ... until now
    error = await asyncio.wait_for(zombie.failed, 20)
    assert isinstance(error, StaleEpoch)
    assert "epoch 2 is there" in str(error) or "replaced" in str(error)
    assert host.counters()["rejoins_refused"] > refused
    stranger = msgspec.structs.replace(successor._describe(), pid=1)
    assert await host.registry.rejoin(stranger) == "far epoch 2 is another process"
    unknown = msgspec.structs.replace(successor._describe(), epoch=9)
    assert await host.registry.rejoin(unknown) == "far epoch 9 was not given out by this registry"
    assert not successor.failed.done()


@pytest.mark.parametrize("job", ["ipc"], indirect=True)
async def test_who_does_not_report_after_a_restart_is_gone_then_and_not_before(job: Job, monkeypatch):
    from myxa.transport.registry import registry

    monkeypatch.setattr(registry, "REJOIN_S", 1.5)
    await job.start_registry()
    near = await job.join("near")
    watcher = Watcher("far")
    await near.start(watcher, "watcher")
    child = await job.child("far")
    await near.wait_for("far", timeout_s=20)
    job.registry.kill()
    child.kill()  # while nobody is there to hear of it
    await job.registry.wait()
    await child.wait()
    host = await Node.attach(name="launcher/0", run_dir=job.sockets, journal=job.journal)
    job.nodes.insert(0, host)
    assert host.peers("far") == ("far",)
    assert [event.kind for event in watcher.told] == ["up"]
    await until(lambda: [event.kind for event in watcher.told] == ["up", "down"], "far is gone")
    assert "did not report within 1.5 s of the registry's restart" in watcher.told[-1].reason
    assert host.peers("watcher") == ("watcher",)


async def test_a_registry_at_a_known_port_has_no_ear_for_those_of_an_earlier_job(tmp_path: Path, caplog):
    """Same port, same job key, same names, same numbers, no journal: only the keys of the processes are others."""
    caplog.set_level("CRITICAL")
    key = JobKey.generate()
    first = await Node.attach(name="launcher/0", key=key, tcp="127.0.0.1:0", run_dir=tmp_path)
    address = first.rendezvous.endpoints.tcp[0].removeprefix("tcp://")
    left_over = await Node.attach(name="launcher/1", rdzv=Rendezvous.at(address), key=key, node_rank=1)
    await first._opened.close(0.0)  # it dies without a goodbye
    second = await Node.attach(name="launcher/0", key=key, tcp=address, run_dir=tmp_path)
    successor = await Node.attach(name="launcher/1", rdzv=Rendezvous.at(address), key=key, node_rank=1)
    assert (left_over.epoch, first.epoch) == (successor.epoch, second.epoch)
    await successor.start(Echo(), "echo")
    assert await second.ref(EchoContract, "echo").ping() > 0
    with pytest.raises(CallError):
        await with_deadline(left_over.registry, 1.5).list_nodes()
    await until(lambda: sum(second._opened.counters.values()) > 0, "the refusal is counted")
    assert not successor.failed.done()
    assert not second.failed.done()
    for node in (left_over, first, successor, second):
        await node.close(grace_s=0)


async def test_one_journal_serves_one_registry_and_one_name(tmp_path: Path):
    path = tmp_path / "journal"
    node = await Node.attach(name="launcher/0", journal=path)
    with pytest.raises(LaunchError, match="in use"):
        await Node.attach(name="launcher/0", journal=path)
    await node.close()
    with pytest.raises(LaunchError, match=r"is that of launcher/0, not of other"):
        await Node.attach(name="other", journal=path)
    again = await Node.attach(name="launcher/0", journal=path)
    assert again.epoch == 2
    await again.close()
    journal = RegistryJournal.open(path)
    assert [e.record.epoch for e in journal.entries if isinstance(e, NodeEntry) and not e.record.actors] == [1, 2]
    journal.close()
