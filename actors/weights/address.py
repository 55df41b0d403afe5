"""Under which address an engine reaches this process."""

from __future__ import annotations

import socket

from ...core.weight_channel import JoinRequest

LOOPBACK = "127.0.0.1"
_LOCAL = ("localhost", "127.0.0.1", "::1")


def address_for(request: JoinRequest, own_host: str) -> str:
    """Loopback for an engine on this host, else the address of ours from which a packet to it would leave.

    An engine with a loopback address seen from another host is on that other host; then our host's name has to do.
    Raises OSError for a name that nobody knows.
    """
    if request.engine_host in _LOCAL:
        return LOOPBACK if request.asker_host == own_host else socket.gethostbyname(socket.gethostname())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((socket.gethostbyname(request.engine_host), 9))  # sends nothing
        return str(probe.getsockname()[0])
