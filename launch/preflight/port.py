"""Is a port free? Asked before anything is started that would need it."""

from __future__ import annotations

import socket

from ...core.errors import LaunchError


def check_port(place: str, host: str, port: int, remedy: str) -> None:
    """Raise LaunchError, naming `place`, if nothing can listen there now. Port 0 means any free one."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, _, _, address = found[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: a port used lately is free
            probe.bind(address)
    except OSError as error:
        raise LaunchError(f"{place}: cannot listen on {host}:{port}: {error.strerror}", remedy=remedy) from error
