"""Answers libzmq's question, for every tcp connection, whether its key is admitted (ZeroMQ's RFC 27), in our own pump.

Decides nothing: the guard does, and a change of its list takes effect with the next connection. A key that is not known
yet is kept waiting for a moment, because a process may connect before the directory has told us of it.
pyzmq's `ThreadAuthenticator` was considered: it needs a thread, and its wildcard admits everybody by default.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import zmq
from zmq.utils import z85

from ..session.guard import Verdict
from .inbox import Pump
from .sockets import ZAP_DOMAIN, Socket

ENDPOINT = "inproc://zeromq.zap.01"
NUM_REQUEST_FRAMES = 9
"""Routing id, delimiter, version, request id, domain, address, identity, mechanism, credentials."""
HOLD_S = 1.0
MAX_HELD = 64
"""Connections with an unknown key that are kept waiting; the others are refused at once."""
NOTE_ADDRESS_CHARS = 64

_STATUS: dict[Verdict, tuple[bytes, bytes]] = {
    Verdict.ADMIT: (b"200", b"OK"),
    Verdict.UNKNOWN: (b"400", b"not of this job"),
    Verdict.BANNED: (b"400", b"banned for a while"),
    Verdict.OVER: (b"500", b"this incarnation is over"),
}
_REMEDIES: dict[str, str] = {
    "key_unknown": "has it the job's key of this run, and was it registered? a process that joins needs both",
    "key_banned": "it sent nonsense; is it of another version?",
    "key_over": "that process was replaced or reported dead; it must end",
    "key_malformed": "only CURVE is spoken here",
}
_COUNTED: dict[Verdict, str] = {
    Verdict.UNKNOWN: "key_unknown",
    Verdict.BANNED: "key_banned",
    Verdict.OVER: "key_over",
}

Note = Callable[[str, str, str], None]
"""What was refused, whom, remedy: to be told once."""


class Doorman(Protocol):
    """Who decides: the guard of the job's processes, or somebody's own list of keys."""

    on_change: Callable[[], None] | None
    """Called by it when keys became known; set by the gatekeeper."""

    def verdict(self, key: str, now: float) -> Verdict: ...


@dataclass(frozen=True, slots=True)
class _Question:
    """Of libzmq."""

    head: tuple[bytes, ...]
    """What the answer begins with."""
    key: str
    address: str
    until: float
    """When it is answered at the latest."""


class Gatekeeper:
    """Of one context."""

    def __init__(self, context: zmq.Context[Socket], guard: Doorman, counters: Counter[str], note: Note) -> None:
        self._guard = guard
        self._note = note
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ENDPOINT)
        self._pump: Pump | None = None
        self._held: list[_Question] = []
        self._timer: asyncio.TimerHandle | None = None
        self._counters = counters

    def start(self) -> None:
        if self._pump is None:
            self._pump = Pump(self._socket, self._take, 64)
            self._guard.on_change = self._look_again

    def close(self) -> None:
        self._guard.on_change = None
        if self._timer is not None:
            self._timer.cancel()
        if self._pump is not None:
            self._pump.stop()
        self._socket.close(linger=0)

    def _take(self) -> bool:
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        head = (*frames[:4],)
        address = frames[5].decode("ascii", "replace")[:NOTE_ADDRESS_CHARS] if len(frames) > 5 else ""
        is_curve = len(frames) == NUM_REQUEST_FRAMES and frames[4] == ZAP_DOMAIN and frames[7] == b"CURVE"
        if not is_curve or len(frames[8]) != 32:
            self._refuse_for("key_malformed", address)
            self._answer(head, b"400", b"CURVE is needed", "")
            return True
        key = z85.encode(frames[8]).decode("ascii")
        self._judge(_Question(head, key, address, asyncio.get_running_loop().time() + HOLD_S))
        return True

    def _judge(self, question: _Question) -> None:
        now = asyncio.get_running_loop().time()
        verdict = self._guard.verdict(question.key, now)
        if verdict is Verdict.UNKNOWN and now < question.until and len(self._held) < MAX_HELD:
            self._held.append(question)
            self._wake_at(question.until)
            return
        if verdict is not Verdict.ADMIT:
            self._refuse_for(_COUNTED[verdict], question.address)
        self._answer(question.head, *_STATUS[verdict], question.key)

    def _look_again(self) -> None:
        """The list has changed, or somebody has waited long enough."""
        held, self._held = self._held, []
        for question in held:
            self._judge(question)
        if held and self._pump is not None:
            self._pump.look()

    def _wake_at(self, when: float) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_at(when, self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        self._look_again()
        if self._held:
            self._wake_at(min(question.until for question in self._held))

    def _refuse_for(self, what: str, address: str) -> None:
        self._counters[what] += 1
        self._note(what, address, _REMEDIES[what])

    def _answer(self, head: tuple[bytes, ...], status: bytes, text: bytes, key: str) -> None:
        user = key.encode() if status == b"200" else b""
        self._socket.send_multipart([*head, status, text, user, b""], zmq.DONTWAIT)
