"""Chooses and opens a node's transport: in-process, or ZeroMQ over ipc and, where wanted, tcp."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import LaunchError
from .address import Rendezvous, check_socket_dir, interface_towards, make_socket_dir
from .inproc import InprocNetwork
from .security import JobKey, Tcp
from .wire import Transport
from .zmq_transport import ZmqTransport


@dataclass(slots=True)
class Opened:
    """A transport and what was made for it."""

    transport: Transport
    socket_dir: str = ""
    key_file: str = ""
    made_dir: Path | None = None

    async def close(self, linger_s: float) -> None:
        """Close the transport and remove the directory, if we made it."""
        await self.transport.close(linger_s)
        if self.made_dir is not None:
            shutil.rmtree(self.made_dir, ignore_errors=True)


def open_transport(
    *, rdzv: Rendezvous | None, run_dir: Path | None, node_rank: int, tcp: Tcp | None, network: InprocNetwork | None
) -> Opened:
    """See `Node.attach`. Raises LaunchError."""
    if network is not None:
        return Opened(network.transport())
    tcp = _tcp(rdzv, tcp)
    if rdzv is not None and rdzv.endpoints.node_rank == node_rank and rdzv.socket_dir:
        folder, made = check_socket_dir(Path(rdzv.socket_dir)), None
    else:
        folder = made = make_socket_dir(run_dir)
    transport = ZmqTransport(node_rank=node_rank, folder=folder, tcp=tcp)
    try:
        transport.bind()
    except BaseException:
        transport.abort()
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
        raise
    return Opened(transport, str(folder), rdzv.key_file if rdzv is not None else "", made)


def _tcp(rdzv: Rendezvous | None, tcp: Tcp | None) -> Tcp | None:
    """Whether and where to listen on tcp."""
    registry = rdzv.endpoints.tcp[0] if rdzv is not None else ""
    if tcp is None and registry and rdzv is not None and rdzv.key_file:
        tcp = Tcp(JobKey.load(Path(rdzv.key_file)))
    if tcp is None or tcp.listen:
        return tcp
    if not registry:
        raise LaunchError("no interface to listen on", remedy='give Tcp(key, listen="host:port")')
    return Tcp(tcp.key, f"{interface_towards(registry)}:0")
