"""The production transport: ZeroMQ's ipc within one host, encrypted tcp between hosts.

Per lane one inbox per kind of endpoint, and one outbox per peer; replies travel by the replier's own outbox. Knows how
connections are made and ended; the session decides what is said on them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import zmq

from ..core.errors import LaunchError
from ..core.ids import PeerKey
from ..core.timeouts import TIMEOUTS
from .address import (
    Endpoint,
    Rendezvous,
    check_owner,
    check_socket_dir,
    hold_port,
    in_url,
    interface_towards,
    make_private,
    make_socket_dir,
    own_endpoint,
    socket_paths,
)
from .outbox import Outbox
from .registry.registry import REGISTRY_KEY
from .security import CurveKeys, JobKey, KeyPair
from .session.guard import PeerGuard
from .wire import Endpoints, InboundSink, Lane, Parcel, Transport
from .zeromq import HandshakeWatch, Inbox, Socket, ZapHandler, make_context, make_inbox, make_outbox

LOOK_S = 0.5
"""How often it is looked whether the files of the sockets are there."""
_log = logging.getLogger("myxa.transport")


class _Peer:
    """Outboxes to one incarnation; bulk is opened when first needed."""

    def __init__(self, endpoints: Endpoints) -> None:
        self.endpoints = endpoints
        self.outboxes: list[Outbox | None] = [None, None]


@dataclass(eq=False, kw_only=True)
class SocketTransport(Transport):
    """`bind` first; everything else on the running loop."""

    node_rank: int
    folder: Path
    listen: str
    keys: CurveKeys | None
    guard: PeerGuard | None = None
    key_file: str = ""
    is_own_folder: bool = False
    """It goes with this."""

    def __post_init__(self) -> None:
        self.socket_dir = str(self.folder)
        self._has_joined = False
        self.counters: Counter[str] = Counter()
        self._context = make_context()
        self._inboxes: list[tuple[Lane, Inbox]] = []
        self._zap_handler: ZapHandler | None = None
        self._watches: list[HandshakeWatch] = []
        self._paths: list[Path] = []
        self._looking: asyncio.TimerHandle | None = None
        self._made_again: dict[Path, None] = {}
        """The folder was gone, and its owner may have ended: the last one who leaves removes it."""
        self._peers: dict[PeerKey, _Peer] = {}
        self._lingering: set[Outbox] = set()
        self._all_closed = asyncio.Event()
        self._sink: InboundSink | None = None
        self.endpoints = Endpoints(node_rank=self.node_rank)
        self._is_closed = False

    def bind(self) -> None:
        """Open the endpoints. Raises LaunchError naming the one that cannot be bound; then nothing is left of this."""
        try:
            self._open()
        except BaseException:
            self._close_inboxes()
            self._context.destroy(linger=0)
            raise

    def _open(self) -> None:
        self._paths = list(socket_paths(self.folder))
        control, bulk = self._paths
        ipc = self._bind(Lane.CONTROL, f"ipc://{control}", None), self._bind(Lane.BULK, f"ipc://{bulk}", None)
        tcp = ("", "")
        curve = ""
        if self.listen and self.keys is not None and self.guard is not None:
            endpoint = own_endpoint(self.listen)
            self._zap_handler = ZapHandler(self._context, self.guard, self.counters, self._note)
            key, curve = self.keys.own, self.keys.own.public
            control_tcp = self._bind_tcp(Lane.CONTROL, endpoint, key)
            tcp = control_tcp, self._bind_tcp(Lane.BULK, Endpoint(endpoint.host, 0), key)
        self.endpoints = Endpoints(node_rank=self.node_rank, ipc=ipc, tcp=tcp, curve=curve)

    def _bind_tcp(self, lane: Lane, endpoint: Endpoint, key: KeyPair) -> str:
        if endpoint.port:
            return self._bind(lane, f"tcp://{endpoint}", key)
        with hold_port(endpoint.host) as holder:
            return self._bind(lane, f"tcp://{in_url(endpoint.host)}:{holder.getsockname()[1]}", key)

    def _bind(self, lane: Lane, endpoint: str, key: KeyPair | None) -> str:
        socket = make_inbox(self._context, lane, key)
        self._inboxes.append((lane, Inbox(socket, lane)))
        if key is not None:
            self._watches.append(HandshakeWatch(socket, self.counters, self._note))
        try:
            socket.setsockopt(zmq.IPV6, "[" in endpoint)
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            remedy = "is the address ours, is it free?"
            raise LaunchError(f"cannot listen at {endpoint}: {error}", remedy=remedy) from error
        return socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def start(self, sink: InboundSink) -> None:
        self._sink = sink
        if self._zap_handler is not None:
            self._zap_handler.start()
        for _, inbox in self._inboxes:
            inbox.start(sink)
        if self._looking is None:
            self._look_for_files()

    def _look_for_files(self) -> None:
        """Cleaners of temporary folders remove files under a run; new peers need them."""
        try:
            for path, (_, inbox) in zip(self._paths, self._inboxes, strict=False):  # those of this host come first
                if not path.exists():
                    gone = (folder for folder in (self.folder, self.folder.parent) if not folder.exists())
                    self._made_again |= dict.fromkeys(gone)
                    make_private(self.folder)
                    inbox.listen_again(f"ipc://{path}")
                    _log.warning("%s was removed under this process; it is there again", path)
        except (OSError, LaunchError, zmq.ZMQError) as error:
            self.counters["files_gone"] += 1
            self._note("files_gone", str(self.folder), f"who comes later does not reach this process: {error}")
        self._looking = asyncio.get_running_loop().call_later(LOOK_S, self._look_for_files)

    def joined(self) -> None:
        self._has_joined = True

    def follow(self, members: Mapping[str, tuple[PeerKey, str]]) -> None:
        if self.guard is not None:
            self.guard.follow(members)

    def objection(self, lane: Lane, peer: PeerKey, name: str) -> str:
        if self.guard is None:
            return ""
        # The public key that was shown by the sender of what is being handled now.
        proof = next((inbox.proof for inbox_lane, inbox in self._inboxes if inbox_lane is lane and inbox.proof), "")
        return self.guard.objection(proof, peer, name)

    def _note(self, counter: str, sender: str, remedy: str) -> None:
        if self.counters[counter] == 1:
            _log.warning("refused (%s) from %s; the next ones are only counted. %s", counter, sender or "?", remedy)

    def connect(self, peer: PeerKey, endpoints: Endpoints) -> None:
        if self._is_closed:
            raise LaunchError(f"{peer} cannot be reached: this process is closing")
        self._address(peer, endpoints, Lane.CONTROL)
        entry = self._peers.get(peer)
        if entry is not None:
            entry.endpoints = endpoints
            return
        self._peers[peer] = _Peer(endpoints)
        self._outbox(peer, self._peers[peer], Lane.CONTROL)

    def send(self, peer: PeerKey, lane: Lane, parcel: Parcel) -> None:
        entry = self._peers.get(peer)
        if entry is not None:
            (entry.outboxes[lane] or self._outbox(peer, entry, lane)).send(parcel)

    def flush(self) -> None:
        until = time.monotonic() + TIMEOUTS.wire.settle_s
        for entry in self._peers.values():
            if (outbox := entry.outboxes[Lane.CONTROL]) is not None:
                outbox.settle(until)
                outbox.depart()

    def disconnect(self, peer: PeerKey, linger_s: float) -> None:
        entry = self._peers.pop(peer, None)
        for outbox in entry.outboxes if entry is not None else ():
            if outbox is not None:
                self._lingering.add(outbox)
                self._all_closed.clear()
                outbox.close(linger_s)

    def forget(self, source: bytes, lane: Lane) -> None:
        for inbox_lane, inbox in self._inboxes:
            if inbox_lane is lane:
                inbox.forget(source)

    def _outbox(self, peer: PeerKey, entry: _Peer, lane: Lane) -> Outbox:
        outbox = entry.outboxes[lane]
        if outbox is None:
            endpoint = self._address(peer, entry.endpoints, lane)
            make = functools.partial(self._make_outbox, endpoint, peer, entry, lane)
            outbox = entry.outboxes[lane] = Outbox(endpoint, make, peer, lane, lambda: self.sink, self._on_closed)
        return outbox

    def _make_outbox(self, endpoint: str, peer: PeerKey, entry: _Peer, lane: Lane) -> Socket:
        keys = self.keys if endpoint.startswith("tcp:") else None
        if keys is None:
            check_owner(endpoint)
            return make_outbox(self._context, lane, None)
        server = entry.endpoints.curve or keys.registry
        return make_outbox(self._context, lane, keys.own if self._has_joined else keys.joining, server)

    def _address(self, peer: PeerKey, endpoints: Endpoints, lane: Lane) -> str:
        address = endpoints.ipc[lane] if endpoints.node_rank == self.node_rank else ""
        address = address or (endpoints.tcp[lane] if self.keys is not None else "")
        if not address:
            raise LaunchError(
                f"{peer} listens at {endpoints}, which cannot be reached from node rank {self.node_rank}",
                remedy="nodes of other hosts need tcp and the job's key",
            )
        return address

    async def close(self, linger_s: float) -> None:
        self._is_closed = True
        for peer in list(self._peers):
            self.disconnect(peer, linger_s)
        if self._lingering:
            try:
                async with asyncio.timeout(linger_s + 1.0):
                    await self._all_closed.wait()
            except TimeoutError:
                _log.warning("%d connections did not close in time", len(self._lingering))
            for outbox in list(self._lingering):
                outbox.abort()
        self._close_inboxes()
        await self._terminate()

    def _close_inboxes(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        for watch in self._watches:
            watch.close()
        self._watches.clear()
        for _, inbox in self._inboxes:
            inbox.close()
        self._inboxes.clear()
        if self._zap_handler is not None:
            self._zap_handler.close()
        for path in self._paths:
            path.unlink(missing_ok=True)
        if self.is_own_folder:
            shutil.rmtree(self.folder, ignore_errors=True)
        for folder in self._made_again:
            with contextlib.suppress(OSError):
                folder.rmdir()

    async def _terminate(self) -> None:
        """`term` waits for the sockets' linger, so it must not run on the loop."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def term() -> None:
            self._context.term()
            loop.call_soon_threadsafe(lambda: ended.done() or ended.set_result(None))

        thread = threading.Thread(target=term, name="myxa-zmq-term", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # Python is ending and starts no thread any more (3.12); no caller is delayed by now
            self._context.term()
            return
        try:
            async with asyncio.timeout(TIMEOUTS.wire.term_s):
                await ended
        except TimeoutError:
            _log.exception("ZeroMQ did not end within %.0f s; its sockets are left behind", TIMEOUTS.wire.term_s)
            return
        thread.join()

    def _on_closed(self, outbox: Outbox) -> None:
        self._lingering.discard(outbox)
        if not self._lingering:
            self._all_closed.set()

    @property
    def sink(self) -> InboundSink:
        if self._sink is None:
            raise RuntimeError("the transport was not started")
        return self._sink


def open_transport(
    *,
    rdzv: Rendezvous | None,
    run_dir: Path | None,
    node_rank: int,
    key: KeyPair | None,
    listen: str,
    network: Callable[[], Transport] | None,
) -> Transport:
    """See `Node.attach`. Raises LaunchError."""
    if network is not None:
        return network()
    if key is None and rdzv is not None and rdzv.key_file:
        key = JobKey.load(Path(rdzv.key_file))
    if not listen and key is not None and rdzv is not None and (registry := rdzv.endpoints.tcp[0]):
        host = interface_towards(registry)  # towards a registry on tcp, else nowhere
        listen = f"{in_url(host)}:0"
    if listen and key is None:
        raise LaunchError("listening on tcp needs the job's key", remedy="give key=JobKey.load(path)")
    if rdzv is not None and rdzv.endpoints.node_rank == node_rank and rdzv.socket_dir:
        folder, is_own = check_socket_dir(Path(rdzv.socket_dir)), False
    else:
        folder, is_own = make_socket_dir(run_dir), True
    keys, guard = _keys_and_guard(rdzv, key) if key is not None and listen else (None, None)
    try:
        transport = SocketTransport(
            node_rank=node_rank, folder=folder, listen=listen, keys=keys, guard=guard,
            key_file=rdzv.key_file if rdzv is not None else "", is_own_folder=is_own,
        )  # fmt: skip
        transport.bind()
    except BaseException:
        if is_own:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return transport


def _keys_and_guard(rdzv: Rendezvous | None, key: KeyPair) -> tuple[CurveKeys, PeerGuard]:
    if rdzv is None:
        keys = CurveKeys.of_registry(key)
        return keys, PeerGuard(keys.registry, registry_node=REGISTRY_KEY.node_id, is_registry=True)
    keys = CurveKeys.to_join(key, rdzv.endpoints.curve)
    return keys, PeerGuard(keys.registry, registry_node=REGISTRY_KEY.node_id, is_registry=False)
