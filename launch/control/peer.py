"""Who is at the other end of a Unix socket: the kernel says so, whatever the caller claims."""

from __future__ import annotations

import os
import pwd
import socket
import struct
from dataclasses import dataclass
from functools import cache
from typing import Any

from ...core.knobs import Operator

_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class Peer:
    """Process and user that opened the connection."""

    pid: int
    uid: int
    gid: int

    @classmethod
    def of(cls, link: Any) -> Peer:
        """By SO_PEERCRED of a connected Unix socket. Raises OSError if the connection is gone already."""
        raw = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return cls(*_CREDENTIALS.unpack(raw))

    @property
    def is_ours(self) -> bool:
        """Whether it is the user of this process, or root."""
        return self.uid in (os.getuid(), 0)

    def operator(self, via: str) -> Operator:
        """For the audit log."""
        return Operator(user=_user(self.uid), uid=self.uid, pid=self.pid, host=socket.gethostname(), via=via)


@cache
def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
