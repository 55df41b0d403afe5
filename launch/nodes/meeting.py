"""How the processes of a run find each other: the registry on node 0, the rendezvous record, the job's key.

With embed.py the one place in launch/ that knows transport's `Node`. On one node everything goes over Unix sockets in
the run-time directory; several nodes meet over tcp, encrypted, admitting only holders of the job's key.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import socket
import time
from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ...core.errors import CallError, LaunchError
from ...transport.address import Rendezvous, interface_towards
from ...transport.node import JobKey, KeyPair, Node
from ..contracts import ChildEnd, agent_name
from ..node_place import Endpoint, NodePlace, parse_endpoint
from ..preflight.machine import check_port
from ..worker_spec import WorkerSpec

ATTACH_S = 10.0
WORKER_ATTACH_S = 30.0
CLOSE_S = 5.0
FOLDER_S = 5.0
"""How long an actor's process waits for the folder of sockets, which its launcher makes again (runtime_dir.py)."""
POLL_S = 0.1
NOWHERE = 1 << 30
"""Node number of a launcher that has none yet: it shares sockets with nobody."""

_log = logging.getLogger("myxa.launcher")


@dataclass(frozen=True, slots=True)
class Meeting:
    """This launcher's seat at the meeting."""

    node: Node
    endpoint: str
    """Where other nodes meet node 0, "host:port"; empty on a single node."""
    address: str
    """Under which other nodes reach this one."""
    rdzv_path: Path
    """For this node's workers."""

    async def exit_seen(self, end: ChildEnd) -> None:
        """Tell everybody at once that a process is gone: calls that wait for it fail now, not at their deadlines."""
        try:
            await self.node.registry.process_exited(end.name, 0, end.status, end.pid)
        except CallError as error:
            _log.warning("the registry could not be told that %s ended: %s", end.name, error)

    async def key_for(self, name: str) -> str:
        """A new key pair for a process of this node, which may join under that name only. Raises CallError."""
        pair = KeyPair.generate()
        await self.node.registry.expect(name, pair.public)
        return pair.text

    @contextlib.contextmanager
    def posted(self, path: Path) -> Generator[None]:
        """While this lasts, other programs of this host and user find the run by that file (see embed.py)."""
        Rendezvous.load(self.rdzv_path).save(path)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


@contextlib.asynccontextmanager
async def host_meeting(
    place: NodePlace, runtime_dir: Path, job_key: Path | None, rdzv_file: Path | None
) -> AsyncGenerator[Meeting]:
    """Node 0: open the registry. Raises LaunchError if the endpoint cannot be listened on."""
    is_alone = place.is_alone
    key_path = None if is_alone else _own_key(job_key or default_job_key())
    host = "127.0.0.1" if is_alone else _listen_address(place.endpoint)
    if place.endpoint is not None:
        check_port("--rdzv", host, place.endpoint.port, "choose another port, or 0 for any free one")
    node = await Node.attach(
        name=agent_name(0),
        run_dir=runtime_dir,
        key=None if key_path is None else JobKey.load(key_path),
        tcp="" if is_alone else f"{host}:{place.endpoint.port if place.endpoint else 0}",
    )
    try:
        record = msgspec.structs.replace(node.rendezvous, key_file=str(key_path or ""))
        endpoint = record.endpoints.tcp[0].removeprefix("tcp://")
        if rdzv_file is not None:
            _write_in_one_step(rdzv_file, f"{endpoint or host}\n")
        record.save(runtime_dir / "rdzv.json")
        yield Meeting(node, endpoint, host, runtime_dir / "rdzv.json")
    finally:
        await node.close(grace_s=CLOSE_S)
        if rdzv_file is not None:
            rdzv_file.unlink(missing_ok=True)


@contextlib.asynccontextmanager
async def join_meeting(
    place: NodePlace,
    runtime_dir: Path,
    job_key: Path | None,
    rdzv_file: Path | None,
    deadline: float,
    *,
    name: str = "",
) -> AsyncGenerator[Meeting]:
    """Other nodes: join the registry of node 0, which may come later than we do. `name`: of a launcher that has no
    number yet.

    `deadline` is a moment of `time.monotonic`. Raises LaunchError naming the endpoint if it passes.
    """
    endpoint = place.endpoint or await _read_endpoint(rdzv_file, deadline)
    key_path = job_key or default_job_key()
    await _until_there(key_path, deadline, "the job's key")
    public = JobKey.load(key_path).public
    record = Rendezvous.at(str(endpoint), key_file=str(key_path.absolute()), curve=public)
    node = await _attach_until(record, name or agent_name(place.rank), place.rank, runtime_dir, deadline)
    try:
        record.save(runtime_dir / "rdzv.json")
        yield Meeting(node, str(endpoint), interface_towards(str(endpoint)), runtime_dir / "rdzv.json")
    finally:
        await node.close(grace_s=CLOSE_S)


async def attach_worker(spec: WorkerSpec) -> Node:
    """An actor's process joins. Folders that were removed under the run are there again in a moment."""
    deadline = time.monotonic() + FOLDER_S
    while not (Path(spec.rdzv_path).exists() and _is_there(spec)) and time.monotonic() < deadline:
        await asyncio.sleep(POLL_S)
    rdzv = Rendezvous.load(Path(spec.rdzv_path))
    return await Node.attach(
        name=spec.actor.name,
        rdzv=rdzv,
        key=KeyPair.parse(spec.key) if spec.key else None,
        run_dir=spec.socket_dir,
        node_rank=spec.actor.node,
        timeout_s=WORKER_ATTACH_S,
    )


def _is_there(spec: WorkerSpec) -> bool:
    """The folder of the registry's sockets, if they are on this host."""
    try:
        rdzv = Rendezvous.load(Path(spec.rdzv_path))
    except LaunchError:
        return False
    return rdzv.endpoints.node_rank != spec.actor.node or not rdzv.socket_dir or Path(rdzv.socket_dir).is_dir()


def default_job_key() -> Path:
    """Where the key is if no flag says so: in the home directory, which the nodes of a cluster usually share."""
    base = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(base) / "myxa" / "job.key"


def _own_key(path: Path) -> Path:
    """Node 0 makes the key if it is missing."""
    if not path.exists():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            JobKey.generate().save(path)
        except FileExistsError:
            pass  # another run of ours made it in the same moment
        except OSError as error:
            raise LaunchError(
                f"the job's key cannot be written to {path}: {error.strerror}", remedy="give --job-key"
            ) from error
    return path.absolute()


def _listen_address(endpoint: Endpoint | None) -> str:
    """Address of this host to listen on. A name is looked up here, for libzmq would take it for an interface."""
    host = endpoint.host if endpoint is not None else socket.gethostname()
    try:
        address = str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise LaunchError(f"--rdzv: {host!r} is unknown here: {error}", remedy="give an IP address") from error
    named_loopback = host == "localhost" or host.startswith("127.")
    if ipaddress.ip_address(address).is_loopback and not named_loopback:
        raise LaunchError(
            f"--rdzv: {host!r} means {address} on this host, where no other node can reach it",
            remedy="give this host's IP address on the common network",
        )
    return address


async def _attach_until(record: Rendezvous, name: str, rank: int, runtime_dir: Path, deadline: float) -> Node:
    while True:
        left_s = deadline - time.monotonic()
        try:
            return await Node.attach(
                name=name,
                rdzv=record,
                run_dir=runtime_dir,
                node_rank=rank if rank >= 0 else NOWHERE,
                timeout_s=max(0.1, min(ATTACH_S, left_s)),
            )
        except LaunchError:
            if deadline - time.monotonic() <= 0:
                raise
            await asyncio.sleep(POLL_S)


async def _read_endpoint(rdzv_file: Path | None, deadline: float) -> Endpoint:
    if rdzv_file is None:
        raise LaunchError("nobody said where node 0 is met", remedy="give --rdzv HOST:PORT")
    await _until_there(rdzv_file, deadline, "node 0's endpoint")
    return parse_endpoint(rdzv_file.read_text(encoding="utf-8"), where=str(rdzv_file))


async def _until_there(path: Path, deadline: float, what: str) -> None:
    while not path.exists():
        if time.monotonic() > deadline:
            raise LaunchError(f"{path} with {what} did not come", remedy="is node 0's launcher running? is it shared?")
        await asyncio.sleep(POLL_S)


def _write_in_one_step(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        raise LaunchError(f"{path} cannot be written: {error.strerror}", remedy="give another --rdzv-file") from error
