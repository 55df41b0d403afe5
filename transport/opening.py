"""Chooses and opens a node's transport: in-process, or sockets of this host and, where wanted, tcp."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

from ..core.errors import LaunchError
from .address import Rendezvous, check_socket_dir, interface_towards, make_socket_dir
from .inproc import InprocNetwork
from .registry.state import REGISTRY_NODE_ID
from .security import JobKey, KeyPair, Keys
from .session.guard import Guard
from .socket_transport import SocketTransport
from .turn_budget import TurnBudget
from .wire import Door, Transport


@dataclass(slots=True)
class Opened:
    """A transport and what was made for it."""

    transport: Transport
    socket_dir: str = ""
    key_file: str = ""
    made_dir: Path | None = None
    guard: Guard | None = None
    """Who may speak over tcp, if that is listened on."""
    door: Door | None = None
    keys: Keys | None = None
    turn: TurnBudget = field(default_factory=TurnBudget)

    def joined(self) -> None:
        """The registry knows this process now."""
        if isinstance(self.transport, SocketTransport):
            self.transport.joined()

    @property
    def counters(self) -> dict[str, int]:
        """Connections that were refused, by reason."""
        return dict(self.transport.counters) if isinstance(self.transport, SocketTransport) else {}

    def cut_off(self, node_id: int, for_s: float) -> None:
        """See `SocketTransport.cut_off`. Raises LaunchError for a transport inside one process: its network is told."""
        if not isinstance(self.transport, SocketTransport):
            raise LaunchError("only connections of sockets can be cut here", remedy="tell the in-process network")
        self.transport.cut_off(node_id, for_s)

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
    key: KeyPair | None,
    listen: str,
    network: InprocNetwork | None,
    turn: TurnBudget,
    reused_dir: Path | None = None,
) -> Opened:
    """See `Node.attach`. `reused_dir`: of an earlier incarnation of this process. Raises LaunchError."""
    if network is not None:
        return Opened(network.transport(), turn=turn)
    if key is None and rdzv is not None and rdzv.key_file:
        key = JobKey.load(Path(rdzv.key_file))
    listen = listen or _found_interface(rdzv, key)
    if listen and key is None:
        raise LaunchError("listening on tcp needs the job's key", remedy="give key=JobKey.load(path)")
    if rdzv is not None and rdzv.endpoints.node_rank == node_rank and rdzv.socket_dir:
        folder, made = check_socket_dir(Path(rdzv.socket_dir)), None
    else:
        folder = made = reused_dir or make_socket_dir(run_dir)
    keys, guard = _keys_and_guard(rdzv, key) if key is not None and listen else (None, None)
    try:
        transport = _bound(
            SocketTransport(node_rank=node_rank, folder=folder, listen=listen, keys=keys, guard=guard, turn=turn)
        )
    except BaseException:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
        raise
    return Opened(
        transport, str(folder), rdzv.key_file if rdzv is not None else "", made,
        guard=guard, door=transport, keys=keys, turn=turn,
    )  # fmt: skip


def _bound(transport: SocketTransport) -> SocketTransport:
    try:
        transport.bind()
    except BaseException:
        transport.abort()
        raise
    return transport


def _keys_and_guard(rdzv: Rendezvous | None, key: KeyPair) -> tuple[Keys, Guard]:
    if rdzv is None:
        keys = Keys.of_registry(key)
        return keys, Guard(keys.registry, registry_node=REGISTRY_NODE_ID, is_registry=True)
    keys = Keys.to_join(key, rdzv.endpoints.curve)
    return keys, Guard(keys.registry, registry_node=rdzv.node_id, is_registry=False)


def _found_interface(rdzv: Rendezvous | None, key: KeyPair | None) -> str:
    """Where to listen on tcp if nobody said so: towards a registry that does, else nowhere."""
    registry = rdzv.endpoints.tcp[0] if rdzv is not None else ""
    return f"{interface_towards(registry)}:0" if registry and key is not None else ""
