"""Becoming the process that hosts the registry: for the first time, or again after a death, from its journal.

A registry that comes back must be found: it takes the directory of sockets and the tcp port of its last incarnation,
and posts who it is now. Whatever was alive when it died is taken to be alive until it had time to come back.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ...core.errors import LaunchError
from ..address import Rendezvous, check_socket_dir
from ..opening import Opened
from .directory import NodeRecord
from .journal import Known, RegistryJournal, Seat
from .registry import RegistryActor
from .seat import POSTED, RegistrySeat


@dataclass(frozen=True, slots=True)
class Claim:
    """What the next incarnation of a registry should open."""

    journal: RegistryJournal | None
    tcp: str
    socket_dir: Path | None = None
    """Of the last incarnation, if it is still there."""

    def release(self) -> None:
        """It could not be opened."""
        if self.journal is not None:
            self.journal.close()


def claim_seat(name: str, tcp: str, journal_path: Path | str | None) -> Claim:
    """Raises LaunchError if the journal cannot be used, or is that of another name."""
    if journal_path is None:
        return Claim(None, tcp)
    journal = RegistryJournal.open(Path(journal_path))
    seat = journal.seat
    if seat is None:
        return Claim(journal, tcp)
    if seat.node != name:
        journal.close()
        raise LaunchError(
            f"registry journal {journal_path} is that of {seat.node}, not of {name}", remedy="names stay; take that one"
        )
    host, _, port = tcp.rpartition(":")
    if port == "0" and seat.tcp.rpartition(":")[0] == host:
        tcp = seat.tcp
    return Claim(journal, tcp, _still_there(seat.socket_dir))


def _still_there(socket_dir: str) -> Path | None:
    try:
        return check_socket_dir(Path(socket_dir)) if socket_dir else None
    except LaunchError:
        return None  # the host was restarted, or somebody tidied up


async def found_registry(name: str, opened: Opened, claim: Claim) -> tuple[RegistryActor, NodeRecord, RegistrySeat]:
    """The registry with this process as its first member (again), and how to find it."""
    registry = RegistryActor(opened.guard, claim.journal)
    state = registry.state
    record = state.grant(name, opened.transport.endpoints, os.getpid())
    state.history = record.epoch
    rdzv = Rendezvous(
        endpoints=record.endpoints,
        node_id=record.node_id,
        epoch=record.epoch,
        socket_dir=opened.socket_dir,
        key_file=opened.key_file,
    )
    if claim.journal is not None:
        tcp = record.endpoints.tcp[0].removeprefix("tcp://")
        claim.journal.append(Seat(node=name, epoch=record.epoch, socket_dir=opened.socket_dir, tcp=tcp))
        claim.journal.append(Known(record=record))
        await claim.journal.settle()
        if opened.socket_dir:
            rdzv.save(Path(opened.socket_dir) / POSTED)
    state.enter(record)
    if opened.guard is not None:
        opened.guard.follow(state.nodes(""))
    return registry, record, RegistrySeat(rdzv, record.endpoints.node_rank)
