"""Where processes meet: the rendezvous record, and directories for sockets that only their owner can enter."""

from __future__ import annotations

import os
import random
import re
import secrets
import socket
import stat
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ..core.errors import LaunchError, raised_as
from ..core.files import write_durably
from .wire import Endpoints

MAX_IPC_PATH = 106
SOCKET_NAME_BYTES = 32


ADDRESS = re.compile(r"(?:tcp://)?(?:\[([\w.:%]+)\]|([^\s\[\]:/]+))(?::(\d{1,5}))?")


def in_url(host: str) -> str:
    """With the brackets of an IPv6 address."""
    return f"[{host}]" if ":" in host else host


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Host (name or address, of IPv6 without brackets) and port; port 0 of one's own means any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{in_url(self.host)}:{self.port}"

    @classmethod
    def parse(cls, text: str, default_port: int = -1) -> Endpoint:
        """`host:port`, `[v6]:port`, `tcp://host:port`, and with a default port `host`. ValueError for anything else."""
        match = ADDRESS.fullmatch(text.strip())
        if match is None or not 0 <= (port := int(match[3] or default_port)) < 65536:
            raise ValueError(f"{text!r} is no host and port")
        return cls(match[1] or match[2], port)


class Rendezvous(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a process must know to join: plain data for a file; holds no secret."""

    endpoints: Endpoints
    socket_dir: str = ""
    """Where nodes of the registry's host put their ipc sockets (0700)."""
    key_file: str = ""
    """File with the job's key pair (0600), for tcp; "": the key is given otherwise."""

    @classmethod
    def at(cls, host_and_port: str, key_file: str = "", curve: str = "") -> Rendezvous:
        """For another host, which knows no more than "host:port" (and `curve`, the job's public key)."""
        with raised_as(LaunchError, "the registry's address", ValueError, remedy=PORT_REMEDY):
            endpoint = Endpoint.parse(host_and_port)
        if endpoint.port == 0:
            raise LaunchError(f"the registry's address has port 0: {endpoint}", remedy="write its port")
        endpoints = Endpoints(node_rank=-1, tcp=(f"tcp://{endpoint}", ""), curve=curve)
        return cls(endpoints=endpoints, key_file=key_file)

    def save(self, path: Path) -> None:
        write_durably(path, msgspec.json.encode(self))

    @classmethod
    def load(cls, path: Path) -> Rendezvous:
        """Read what `save` wrote; raises LaunchError."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError) as error:
            raise LaunchError(f"{path} is no rendezvous record: {error}", remedy="is the launcher running?") from error


PORT_REMEDY = "write host:port, or [IPv6 address]:port, with a port of 0 to 65535"
EVERY_INTERFACE = ("*", "0.0.0.0", "::")


def own_endpoint(text: str) -> Endpoint:
    """To listen at; raises LaunchError. Other nodes get the same address."""
    with raised_as(LaunchError, "the address to listen at", ValueError, remedy=PORT_REMEDY):
        endpoint = Endpoint.parse(text)
    if endpoint.host in EVERY_INTERFACE:
        remedy = "give this host's IP address on the common network"
        problem = f"{text}: no other host can connect to {endpoint.host}, which means every interface"
        raise LaunchError(problem, remedy=remedy)
    return endpoint


def make_socket_dir(run_dir: Path | None) -> Path:
    """A fresh 0700 directory with a path short enough for sockets: in `run_dir` if that is short, else in /tmp."""
    longest = SOCKET_NAME_BYTES + 16
    parent = run_dir
    if parent is None or len(os.fsencode(parent.resolve())) + longest > MAX_IPC_PATH:
        parent = Path(tempfile.gettempdir())
    if len(os.fsencode(parent.resolve())) + longest > MAX_IPC_PATH:
        raise LaunchError(f"{parent} is too long a path for Unix sockets", remedy="set TMPDIR to a short one")
    parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix="myxa-", dir=parent.resolve()))


def make_private(folder: Path) -> Path:
    """A folder that only we can enter, made again where it is gone. Raises OSError; LaunchError for another's."""
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    return check_socket_dir(folder)


def check_socket_dir(folder: Path) -> Path:
    """`folder` if it exists, is ours and closed to others; else LaunchError."""
    try:
        facts = folder.stat()
    except OSError as error:
        remedy = "is the registry running on this host?"
        raise LaunchError(f"{folder}: no such socket directory", remedy=remedy) from error
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o077:
        raise LaunchError(f"{folder} is not a directory that only we can enter", remedy="chmod 700, same user")
    return folder


def check_owner(endpoint: str) -> None:
    """Raises LaunchError if another user listens at an ipc endpoint; one without a listener is found by connecting."""
    try:
        owner = Path(endpoint.removeprefix("ipc://")).stat().st_uid
    except OSError:
        return
    if owner != os.getuid():
        raise LaunchError(f"another user listens at {endpoint}")


def socket_paths(folder: Path) -> tuple[Path, Path]:
    """Two paths (control, bulk) that no other incarnation has or had."""
    token = f"{os.getpid()}-{secrets.token_hex(6)}"
    paths = folder / f"{token}.c", folder / f"{token}.b"
    if len(os.fsencode(paths[0])) > MAX_IPC_PATH:
        raise LaunchError(f"{paths[0]} is too long for a Unix socket", remedy="use a shorter run directory")
    return paths


def own_address_towards(host: str) -> str:
    """This host's address on the interface by which that one is reached; of IPv4 if it has such. Raises OSError."""
    entries = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, place = min(entries, key=lambda entry: entry[0] != socket.AF_INET)
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(place)  # sends nothing
        return str(probe.getsockname()[0])


LOOPBACK = "127.0.0.1"
PORTS = range(10_000, 30_000)
"""Below the range that Linux gives to connections unless it is set otherwise."""
PORTS_VARIABLE = "MYXA_PORTS"
NUM_TRIES = 100


def hold_port(host: str = "") -> socket.socket:
    """For a server at that host: a socket on a port of `ports_to_try` where nothing listens. Until it is closed, only a
    server gets the port that names it and reuses addresses, as those of ZeroMQ, torch's store and asyncio do. Raises
    LaunchError where none is free."""
    for port in ports_to_try():
        holder = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        with suppress(OSError):
            holder.bind(("", port))
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            return holder
        holder.close()
    text = os.environ.get(PORTS_VARIABLE, "any")  # noqa: TID251
    raise LaunchError(f"no port is free: {PORTS_VARIABLE} = {text}", remedy="give a wider range, or end what has them")


def ports_to_try() -> Sequence[int]:
    """At random those of $MYXA_PORTS ("29500-29600", of this machine), else some of `PORTS`, which the kernel gives to
    no connection, then 0: any. Raises LaunchError for what is no range."""
    text = os.environ.get(PORTS_VARIABLE, "")  # noqa: TID251 -- as NCCL_SOCKET_IFNAME: for all processes of a machine
    if not text:
        return *random.sample(PORTS, NUM_TRIES), 0
    first, _, last = text.partition("-")
    if first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last) < 65536:
        return random.sample(range(int(first), int(last) + 1), int(last) - int(first) + 1)
    raise LaunchError(f"{PORTS_VARIABLE} = {text} is no range of ports", remedy='write "FIRST-LAST", as in 29500-29600')


def interface_towards(endpoint: str) -> str:
    """Address of this host; an IPv6 one without brackets."""
    with raised_as(LaunchError, f"no way to {endpoint}", OSError, ValueError, remedy="check the registry's address"):
        return own_address_towards(Endpoint.parse(endpoint).host)
