"""How the processes of a run find each other: the registry on node 0, the rendezvous record, the job's key.

On one node all traffic uses Unix sockets in the run-time directory; several nodes use tcp, encrypted, and admit only
holders of the job's key. This file and embed.py alone use transport's `Node` in launch/.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ...core.errors import CallError, ConfigError, LaunchError, raised_as
from ...core.files import write_durably
from ...transport.address import LOOPBACK, Endpoint, Rendezvous, in_url, interface_towards
from ...transport.node import JobKey, KeyPair, Node
from ..contracts import ChildEnd, agent_name
from ..host import check_port
from ..node_place import NodePlace, parse_endpoint
from ..run_dir import RunDir
from ..worker_spec import ProcessSpec

ATTACH_S = 10.0
WORKER_ATTACH_S = 30.0
CLOSE_S = 5.0
FOLDER_S = 5.0
"""How long an actor's process waits for the folder of sockets; its launcher restores a removed one (runtime_dir.py)."""
POLL_S = 0.1
RDZV = "rdzv.json"
"""The rendezvous record in a launcher's folder of sockets."""
NOWHERE = 1 << 30
"""Node number of a launcher that has none yet: it shares no sockets."""

_log = logging.getLogger("myxa.launcher")


@dataclass(frozen=True, slots=True)
class NodeRendezvous:
    """This launcher's connection to the run's registry."""

    node: Node
    endpoint: str
    """Address of node 0's registry, "host:port"; empty on a single node."""
    address: str
    """Address at which other nodes reach this one."""
    rdzv_path: Path
    """Rendezvous record for this node's workers."""

    async def exit_seen(self, end: ChildEnd) -> None:
        """Report a process's end to the registry: calls that wait for it fail now instead of at their deadlines."""
        try:
            await self.node.registry.process_exited(end.name, 0, end.status, end.pid)
        except CallError as error:
            _log.warning("the end of %s did not reach the registry: %s", end.name, error)

    async def key_for(self, name: str) -> str:
        """A new key pair for a process of this node; it may join under that name only. Raises CallError."""
        pair = KeyPair.generate()
        await self.node.registry.expect(name, pair.public)
        return pair.text

    @contextlib.contextmanager
    def posted(self, path: Path) -> Generator[None]:
        """Inside, other programs of this host and user find the run by that file (see embed.py)."""
        Rendezvous.load(self.rdzv_path).save(path)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


@contextlib.asynccontextmanager
async def host_rendezvous(place: NodePlace, runtime_dir: Path) -> AsyncGenerator[NodeRendezvous]:
    """Node 0: open the registry. Raises LaunchError if the endpoint cannot be listened on."""
    is_alone, rdzv_file = place.is_alone, place.file
    key_path = None if is_alone else await _own_key(place.job_key or default_job_key())
    host = LOOPBACK if is_alone else await _listen_address(place.endpoint)
    if place.endpoint is not None:
        remedy = "name an address of the host that runs node 0, and a free port there (0: any)"
        check_port("--rdzv", host, place.endpoint.port, remedy)
    node = await Node.attach(
        name=agent_name(0),
        run_dir=runtime_dir,
        key=None if key_path is None else JobKey.load(key_path),
        tcp="" if is_alone else f"{in_url(host)}:{place.endpoint.port if place.endpoint else 0}",
    )
    try:
        record = msgspec.structs.replace(node.rendezvous, key_file=str(key_path or ""))
        endpoint = record.endpoints.tcp[0].removeprefix("tcp://")
        if rdzv_file is not None:
            with raised_as(LaunchError, f"{rdzv_file} cannot be written", OSError, remedy="give another --rdzv-file"):
                write_durably(rdzv_file, f"{endpoint or in_url(host)}\n".encode())
        record.save(runtime_dir / RDZV)
        yield NodeRendezvous(node, endpoint, host, runtime_dir / RDZV)
    finally:
        await node.close(grace_s=CLOSE_S)
        if rdzv_file is not None:
            rdzv_file.unlink(missing_ok=True)


@contextlib.asynccontextmanager
async def join_rendezvous(
    place: NodePlace, runtime_dir: Path, timeout_s: float, *, name: str = ""
) -> AsyncGenerator[NodeRendezvous]:
    """Other nodes: join the registry of node 0, which may start later than we do. `name`: for a launcher that has no
    number yet. Raises LaunchError naming the endpoint after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    key_path = place.job_key or default_job_key()
    await _wait_for_file(key_path, deadline, "the job's key")
    public = JobKey.load(key_path).public
    rank, name = place.rank if place.rank >= 0 else NOWHERE, name or agent_name(place.rank)

    async def attach(left_s: float) -> Node:
        """The file may be an earlier run's until node 0 has written its own."""
        node_0 = place.endpoint or await _read_endpoint(place.file, deadline)
        endpoint = Endpoint(await _address_of(node_0.host), node_0.port)
        record = Rendezvous.at(str(endpoint), key_file=str(key_path.absolute()), curve=public)
        timeout_s = min(ATTACH_S, left_s)
        return await Node.attach(name=name, rdzv=record, run_dir=runtime_dir, node_rank=rank, timeout_s=timeout_s)

    node = await _attach_until(attach, deadline)
    endpoint = node.rendezvous.endpoints.tcp[0].removeprefix("tcp://")
    try:
        node.rendezvous.save(runtime_dir / RDZV)
        yield NodeRendezvous(node, endpoint, interface_towards(endpoint), runtime_dir / RDZV)
    finally:
        await node.close(grace_s=CLOSE_S)


async def attach_worker(spec: ProcessSpec) -> Node:
    """Join from an actor's process. The launcher restores folders that were removed during the run in a moment."""

    def attach(_: float) -> Awaitable[Node]:
        return Node.attach(
            name=spec.actor.name, rdzv=Rendezvous.load(Path(spec.socket_dir, RDZV)),
            key=KeyPair.parse(spec.key) if spec.key else None, run_dir=spec.socket_dir, node_rank=spec.actor.node,
            timeout_s=WORKER_ATTACH_S,
        )  # fmt: skip

    return await _attach_until(attach, time.monotonic() + FOLDER_S)


def default_job_key() -> Path:
    """Default path of the key: in the home directory, which the nodes of a cluster usually share."""
    with raised_as(LaunchError, "the job's key has no default path", RuntimeError, remedy="give --job-key"):
        base = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(base) / "myxa" / "job.key"


async def _own_key(path: Path) -> Path:
    """The key of node 0, which makes it if it is missing."""
    if not path.exists():
        problem = f"the job's key cannot be written to {path}"
        with raised_as(LaunchError, problem, OSError, remedy="give --job-key"):
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):  # another run of this user made it at the same time
                JobKey.generate().save(path)
    await _wait_for_file(path, time.monotonic() + FOLDER_S, "the job's key")
    return path.absolute()


async def _address_of(host: str) -> str:
    """IPv4 where there is one. Resolved here: libzmq takes names for interfaces, and only IPv6 once that is on."""
    with raised_as(LaunchError, f"--rdzv: {host!r} is unknown here", OSError, remedy="give an IP address"):
        entries = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return str(min(entries, key=lambda entry: entry[0] != socket.AF_INET)[4][0])


async def _listen_address(endpoint: Endpoint | None) -> str:
    """Address of this host to listen on, as other nodes get it."""
    host = endpoint.host if endpoint is not None else socket.gethostname()
    address = await _address_of(host)
    number = ipaddress.ip_address(address)
    is_meant = host in ("localhost", address)
    if number.is_unspecified or (number.is_loopback and not is_meant):
        raise LaunchError(
            f"--rdzv: {host!r} means {address} on this host, where no other node can reach it",
            remedy="give this host's IP address on the common network",
        )
    return address


async def _attach_until(attach: Callable[[float], Awaitable[Node]], deadline: float) -> Node:
    """`attach` gets the seconds that are left."""
    while True:
        try:
            return await attach(max(0.1, deadline - time.monotonic()))
        except LaunchError:
            if time.monotonic() >= deadline:
                raise
            await asyncio.sleep(POLL_S)


async def _read_endpoint(rdzv_file: Path | None, deadline: float) -> Endpoint:
    if rdzv_file is None:
        raise ConfigError("the address of node 0 is not known", remedy="give --rdzv HOST:PORT")
    await _wait_for_file(rdzv_file, deadline, "node 0's endpoint")
    return parse_endpoint(rdzv_file.read_text(encoding="utf-8"), where=str(rdzv_file))


async def _wait_for_file(path: Path, deadline: float, content: str) -> None:
    """A file is empty for a moment after it is made; on NFS its bytes may come seconds after its name."""
    while not (path.exists() and path.stat().st_size):
        if time.monotonic() > deadline:
            fault = "is empty" if path.exists() else "did not appear"
            raise LaunchError(
                f"{path} with {content} {fault}", remedy="is node 0's launcher running? is the folder shared?"
            )
        await asyncio.sleep(POLL_S)


def find_late_rendezvous(location: str, job_key: Path | None) -> NodePlace:
    """The place of a node that joins late. `location`: a run directory, HOST:PORT, or a file with that. Raises
    ConfigError and LaunchError."""
    path = Path(location)
    if path.is_file():
        return NodePlace(-1, 0, None, file=path, job_key=job_key, is_late=True)
    if path.is_dir():
        run_dir = RunDir(path.resolve())
        if not run_dir.rdzv.exists():
            raise LaunchError(f"no live run in {run_dir.path}", remedy="name the directory of a live run")
        record = Rendezvous.load(run_dir.rdzv)
        location, key = record.endpoints.tcp[0], record.key_file
        if not any(record.endpoints.tcp):
            raise LaunchError(
                f"the run in {run_dir.path} was started for one machine: no other can reach it",
                remedy="start it with `myxa launch --nnodes 1:MAX --rdzv HOST:PORT` to admit other nodes",
            )
        job_key = job_key or (Path(key) if key else None)
    elif "/" in location.removeprefix("tcp://"):
        raise ConfigError(f"--join: there is no {location}", remedy="name the directory of a live run, or HOST:PORT")
    endpoint = parse_endpoint(location, where="--join")
    if endpoint.port == 0:
        raise ConfigError(f"--join: {endpoint} has port 0", remedy="give the port that node 0 listens on")
    return NodePlace(-1, 0, endpoint, job_key=job_key, is_late=True)
