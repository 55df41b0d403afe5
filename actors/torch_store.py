"""torch's store, listening at one address only: torch itself opens it on every interface, without a key."""

from __future__ import annotations

import ipaddress
import os
import socket
from contextlib import suppress
from datetime import timedelta

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  # documented, not in __all__

from ..transport.address import hold_port, own_address_towards

LOOPBACK_INTERFACE = "lo"
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_BACKLOG = 4096
_FAR = ("192.0.2.1", "2001:db8::1")
"""Addresses that no host has."""


def host_store(address: str, port: int, world_size: int, timeout_s: float) -> TCPStore:
    """A store in this process that listens at `address` alone; port 0: any free one. Where a host's name means loopback
    here, or a proxy's address, it listens on every interface, as torch does. Raises OSError or RuntimeError."""
    listener = _listen(address, port)
    number = int(listener.getsockname()[1])
    return TCPStore(
        address,
        number,
        world_size,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # the store closes it
    )


def find_store(address: str, port: int, world_size: int, timeout_s: float) -> TCPStore:
    """The store that another process hosts. Raises RuntimeError."""
    return TCPStore(
        address, port, world_size, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
    )


def keep_gloo_within(address: str) -> None:
    """Process groups that meet on this host alone connect over loopback alone, unless the user named interfaces; gloo
    takes the host's own address otherwise. All groups of a process read the variable."""
    if not address or address == "localhost" or (_is_number(address) and ipaddress.ip_address(address).is_loopback):
        os.environ.setdefault(_GLOO_INTERFACE, LOOPBACK_INTERFACE)  # noqa: TID251 -- gloo reads nothing else


def own_address() -> str:
    """This host's address for others: what its name means or, where that is loopback (Debian's 127.0.1.1), that of the
    interface by which far networks are reached. Raises OSError."""
    for place in (socket.gethostname(), *_FAR):
        with suppress(OSError):
            address = own_address_towards(place)
            if not ipaddress.ip_address(address).is_loopback:
                return address
    raise OSError("this host has no address but loopback")


def _listen(address: str, port: int) -> socket.socket:
    if not port:
        with hold_port(address) as holder:
            return _listen(address, int(holder.getsockname()[1]))
    family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    is_name = not _is_number(address) and address != "localhost"
    if is_name and (ipaddress.ip_address(str(place[0])).is_loopback or not _is_own(family, str(place[0]))):
        return socket.create_server(("", port), backlog=_BACKLOG)
    return socket.create_server(place[:2], family=family, backlog=_BACKLOG)


def _is_number(address: str) -> bool:
    with suppress(ValueError):
        return bool(ipaddress.ip_address(address))
    return False


def _is_own(family: socket.AddressFamily, address: str) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe, suppress(OSError):
        probe.bind((address, 0))
        return True
    return False
