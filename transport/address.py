"""Where processes meet: the rendezvous record, and directories for sockets that only their owner can enter."""

from __future__ import annotations

import os
import secrets
import socket
import stat
import tempfile
from pathlib import Path

import msgspec

from ..core.errors import LaunchError
from ..core.files import write_durably
from .wire import Endpoints

MAX_IPC_PATH = 106
SOCKET_NAME_BYTES = 32


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
        host, port = split_address(host_and_port, "of a registry", range(1, 65536))
        endpoints = Endpoints(node_rank=-1, tcp=(f"tcp://{host}:{port}", ""), curve=curve)
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


def in_url(host: str) -> str:
    """With the brackets of an IPv6 address."""
    return f"[{host}]" if ":" in host else host


def split_address(text: str, purpose: str, ports: range) -> tuple[str, int]:
    """Host and port of "host:port"; raises LaunchError."""
    host, _, port = text.removeprefix("tcp://").rpartition(":")
    if not host or not port.isdecimal() or int(port) not in ports:
        raise LaunchError(f"{text!r} is no address {purpose}", remedy='write "host:port"')
    return host, int(port)


EVERY_INTERFACE = ("*", "0.0.0.0", "[::]", "::")


def split_listen(text: str) -> tuple[str, int]:
    """Of an own interface, port 0: any; raises LaunchError. Other nodes get the same address."""
    host, port = split_address(text, "to listen at", range(65536))
    if host in EVERY_INTERFACE:
        remedy = "give this host's IP address on the common network"
        raise LaunchError(f"{text}: no other host can connect to {host}, which means every interface", remedy=remedy)
    return host, port


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


def interface_towards(endpoint: str) -> str:
    """Address of this host; an IPv6 one without brackets."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    with socket.socket(socket.AF_INET6 if host.startswith("[") else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host.strip("[]"), int(port)))
        except (OSError, ValueError) as error:
            raise LaunchError(f"no way to {endpoint}: {error}", remedy="check the registry's address") from error
        return str(probe.getsockname()[0])
