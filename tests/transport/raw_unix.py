"""A client of a node's Unix socket that speaks our stream by hand, and says what it likes."""

from __future__ import annotations

import socket
import struct

TIMEOUT_S = 5


class RawUnix:
    """One blocking connection; used where tests otherwise hold a DEALER."""

    def __init__(self, endpoint: str) -> None:
        assert endpoint.startswith("unix://"), endpoint
        self.socket = socket.socket(socket.AF_UNIX)
        # Not `settimeout`: with it Python waits, before each send, until three quarters of the buffer are free.
        for limit in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            self.socket.setsockopt(socket.SOL_SOCKET, limit, struct.pack("@ll", TIMEOUT_S, 0))
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        self.socket.connect(endpoint.removeprefix("unix://"))

    def send(self, message: bytes | bytearray) -> None:
        """A message behind its length."""
        self.send_raw(struct.pack("<Q", len(message)) + message + bytes(-len(message) % 8))

    def send_multipart(self, parts: list[bytes]) -> None:
        for part in parts:
            self.send(part)

    def send_raw(self, data: bytes) -> None:
        self.socket.sendall(data)

    def is_ended(self) -> bool:
        """Whether the other side has closed it; waits for that."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionResetError:
            return True
        except BlockingIOError:
            return False

    def close(self, linger: int = 0) -> None:
        del linger  # what was sent will be found
        self.socket.close()
