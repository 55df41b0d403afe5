"""Peers that speak ZeroMQ's wire protocol wrongly, or not at all, over a plain TCP connection."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import time

SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
TIMEOUT_S = 5.0


def greeting(mechanism: bytes, *, as_server: bool = False, version: bytes = b"\x03\x01") -> bytes:
    return SIGNATURE + version + mechanism.ljust(20, b"\0") + bytes([as_server]) + bytes(31)


def command(name: bytes, body: bytes) -> bytes:
    """A ZMTP command frame."""
    content = bytes([len(name)]) + name + body
    return (
        b"\x06" + struct.pack(">Q", len(content)) + content
        if len(content) > 255
        else b"\x04" + bytes([len(content)]) + content
    )


class Attack:
    """One connection at a time to one port."""

    def __init__(self, host: str, port: int, rng: random.Random) -> None:
        self.host, self.port, self.rng = host, port, rng

    def _send(self, *parts: bytes, listen: bool = True) -> None:
        with contextlib.suppress(OSError), socket.create_connection((self.host, self.port), timeout=TIMEOUT_S) as raw:
            for part in parts:
                raw.sendall(part)
            raw.settimeout(0.05)
            if listen:
                raw.recv(4096)

    def noise(self) -> None:
        self._send(self.rng.randbytes(self.rng.randrange(1, 2000)))

    def http(self) -> None:
        self._send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 3)

    def no_key(self) -> None:
        """A client without a key, as plain ZeroMQ has it."""
        self._send(greeting(b"NULL"), command(b"READY", b"\x0bSocket-Type\0\0\0\x06DEALER"), bytes(20))

    def plain(self) -> None:
        self._send(greeting(b"PLAIN"), command(b"HELLO", b"\x01a\x01b"))

    def old_version(self) -> None:
        self._send(greeting(b"CURVE", version=self.rng.choice((b"\x00\x00", b"\x01\x00", b"\x02\x00", b"\xff\xff"))))

    def half_greeting(self) -> None:
        self._send(greeting(b"CURVE")[: self.rng.randrange(1, 64)])

    def broken_curve(self) -> None:
        """The right greeting, then a handshake of the right or wrong length without sense."""
        size = self.rng.choice((194, 194, 0, 1, 193, 195, 2000))
        version = self.rng.choice((b"\x01\x00", b"\x01\x00", b"\xff\xff"))
        self._send(greeting(b"CURVE"), command(b"HELLO", (version + self.rng.randbytes(2000))[:size]))

    def initiate_first(self) -> None:
        self._send(greeting(b"CURVE"), command(b"INITIATE", self.rng.randbytes(257)))

    def huge_frame(self) -> None:
        """Announces eight exabytes."""
        length = self.rng.choice((2**63 - 1, 2**63, 2**64 - 1, 1 << 31, 1 << 40))
        self._send(greeting(b"CURVE"), b"\x06" + struct.pack(">Q", length), self.rng.randbytes(500))

    def many_commands(self) -> None:
        self._send(greeting(b"CURVE"), *[command(b"PING", b"\0\x01") for _ in range(500)])

    def slow(self, until: float) -> None:
        """A byte at a time, as long as it may."""
        with contextlib.suppress(OSError), socket.create_connection((self.host, self.port), timeout=TIMEOUT_S) as raw:
            for byte in greeting(b"CURVE"):
                if time.monotonic() > until:
                    return
                raw.sendall(bytes([byte]))
                time.sleep(0.15)

    def flood(self, number: int) -> None:
        """Connections that are given up at once."""
        for _ in range(number):
            with contextlib.suppress(OSError):
                raw = socket.socket()
                raw.setblocking(False)
                raw.connect_ex((self.host, self.port))
                raw.close()

    def silent(self, number: int) -> list[socket.socket]:
        """Connections that say nothing; to be closed by the caller."""
        held: list[socket.socket] = []
        with contextlib.suppress(OSError):
            for _ in range(number):
                held.append(socket.create_connection((self.host, self.port), timeout=TIMEOUT_S))
        return held


ONE_SHOT = (
    "noise", "http", "no_key", "plain", "old_version", "half_greeting", "broken_curve", "initiate_first", "huge_frame",
    "many_commands",
)  # fmt: skip
