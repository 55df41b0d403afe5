"""Ports for gangs of ranks that a test starts later, perhaps minutes later."""

from __future__ import annotations

import socket

from myxa.transport.address import hold_port

_HOLDERS: list[socket.socket] = []


def held_port() -> int:
    """Until this process ends, only a torch store gets it that is told its number."""
    _HOLDERS.append(holder := hold_port())
    return int(holder.getsockname()[1])
