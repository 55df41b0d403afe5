"""Chooses and opens a node's transport: in-process, or ZeroMQ over ipc and, where wanted, tcp."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import LaunchError
from .address import Rendezvous, check_socket_dir, interface_towards, make_socket_dir
from .inproc import InprocNetwork
from .security import JobKey
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
    *,
    rdzv: Rendezvous | None,
    run_dir: Path | None,
    node_rank: int,
    key: JobKey | None,
    listen: str,
    network: InprocNetwork | None,
) -> Opened:
    """See `Node.attach`. Raises LaunchError."""
    if network is not None:
        return Opened(network.transport())
    if key is None and rdzv is not None and rdzv.key_file:
        key = JobKey.load(Path(rdzv.key_file))
    listen = listen or _found_interface(rdzv, key)
    if listen and key is None:
        raise LaunchError("listening on tcp needs the job's key", remedy="give key=JobKey.load(path)")
    if rdzv is not None and rdzv.endpoints.node_rank == node_rank and rdzv.socket_dir:
        folder, made = check_socket_dir(Path(rdzv.socket_dir)), None
    else:
        folder = made = make_socket_dir(run_dir)
    transport = ZmqTransport(node_rank=node_rank, folder=folder, listen=listen, key=key if listen else None)
    try:
        transport.bind()
    except BaseException:
        transport.abort()
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
        raise
    return Opened(transport, str(folder), rdzv.key_file if rdzv is not None else "", made)


def _found_interface(rdzv: Rendezvous | None, key: JobKey | None) -> str:
    """Where to listen on tcp if nobody said so: towards a registry that does, else nowhere."""
    registry = rdzv.endpoints.tcp[0] if rdzv is not None else ""
    return f"{interface_towards(registry)}:0" if registry and key is not None else ""
