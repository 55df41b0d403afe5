"""The receiving half: one ROUTER that is only read, pumped by the loop's own reader.

`zmq.asyncio` was considered and measured: 4 times the latency and 20 times the CPU. The rules of the pump: the file
descriptor is only a hint and edge-like, so look once after registering it; take messages until there are none, at most
`BUDGET` per turn of the loop and no longer than the node's turn may take, be it in the middle of a batch; never send
on a socket that is polled; never wait.

`HandshakeWatch` counts the connections to a bound tcp endpoint that failed: no key, no ZeroMQ at all, dropped half-way.
Those with a key that is not admitted are the gatekeeper's to count.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator

import zmq

from ..outbox import WriteCoalescing
from ..session.frames import SOLE_BYTES, is_sole
from ..session.reassembly import Unwrapping
from ..turn_budget import TurnBudget
from ..wire import Lane, Sink
from .sockets import Socket, read_event

BUDGET = 256
BULK_BUDGET = 8
"""Of 1 MiB chunks: about a millisecond."""

_NOBLOCK, _EVENTS, _POLLIN = int(zmq.NOBLOCK), int(zmq.EVENTS), int(zmq.POLLIN)

_log = logging.getLogger("myxa.transport")


class Pump:
    """Calls `take` for a socket until it says that there is nothing more, whenever there may be something."""

    def __init__(self, socket: Socket, take: Callable[[], bool], budget: int, turn: TurnBudget | None = None) -> None:
        self._socket = socket
        self._take = take
        self._budget = budget
        self._turn = turn
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._is_stopped = False
        self._loop.add_reader(self._fd, self._drain)
        self._loop.call_soon(self._drain)  # arm: without this look the first message may never be signalled

    def look(self) -> None:
        """Something was sent on this very socket: a wake-up may have been eaten, so look once."""
        if not self._is_stopped:
            self._loop.call_soon(self._drain)

    def stop(self) -> None:
        if not self._is_stopped:
            self._is_stopped = True
            self._loop.remove_reader(self._fd)

    def _drain(self) -> None:
        turn = self._turn
        try:
            if turn is None or turn.begin():
                for _ in range(self._budget):
                    if self._is_stopped or not self._take():
                        return
                    if turn is not None and turn.is_spent:
                        break
        except BaseException:  # an interrupt; a host that polls by hand may go on after it
            self._loop.call_soon(self._drain)
            raise
        if not self._is_stopped:
            self._loop.call_soon(self._drain)


class ZmqInbox:
    """One bound endpoint of one lane."""

    def __init__(
        self, socket: Socket, lane: Lane, turn: TurnBudget | None = None, departures: WriteCoalescing | None = None
    ) -> None:
        self._socket = socket
        self._departures = departures or WriteCoalescing()
        self._lane = lane
        self._turn = turn or TurnBudget()
        self._turn.add_inbox()
        self._sink: Sink | None = None
        self._unwrapping = Unwrapping(lane)
        self._pump: Pump | None = None
        self._frame: zmq.Frame | None = None
        """Being handled now."""
        self._rest: tuple[bytes, zmq.Frame, Iterator[memoryview] | None] | None = None
        """Of a batch: what had to wait for the next turn."""

    @property
    def proof(self) -> str:
        """Public key under which the sender of the message being handled was admitted; "": none is handled, or ipc."""
        if self._frame is None:
            return ""
        try:
            return str(self._frame.get("User-Id"))
        except zmq.ZMQError:
            return ""

    def start(self, sink: Sink) -> None:
        """Report to `sink` from now on."""
        self._sink = sink
        if self._pump is None:
            budget = BULK_BUDGET if self._lane is Lane.BULK else BUDGET
            self._pump = Pump(self._socket, self._take, budget, self._turn)

    def listen_again(self, endpoint: str) -> None:
        """Its file is gone: newcomers come in by a new one. The old listener goes with the socket: ZeroMQ would remove
        the new file with it. Raises zmq.ZMQError."""
        if self._pump is not None and not self._socket.closed:
            self._socket.bind(endpoint)
            self._pump.look()

    def forget(self, source: bytes) -> None:
        self._unwrapping.forget(source)

    def stop(self) -> None:
        """Take nothing in any more."""
        if self._pump is not None:
            self._pump.stop()

    def close(self) -> None:
        self.stop()
        self._socket.close(linger=0)

    def _take(self) -> bool:
        """One message of ZeroMQ, or what had to wait of the last one. False: there are no more."""
        sink, socket, rest, turn = self._sink, self._socket, self._rest, self._turn
        if rest is None:
            try:
                source, envelopes = socket.recv(_NOBLOCK), None
                frame = socket.recv(_NOBLOCK, copy=False)
            except zmq.Again:
                return False
        else:
            source, frame, envelopes = rest
        if sink is None:
            return True
        self._rest, self._frame = None, frame
        departures = self._departures
        departures.hold()
        try:
            if envelopes is None and is_sole(data := frame.buffer) and not frame.more:  # nearly always, and alone
                sink.received(source, self._lane, data[SOLE_BYTES:])
                turn.note_taken()
            else:
                if envelopes is None:
                    envelopes = self._opened(sink, source, frame)
                    turn.look()
                self._hand_over(sink, source, frame, envelopes)
        except Exception as error:  # noqa: BLE001  # a bug in the session must be heard of and not stop the pump
            _log.exception("the session failed on a message")
            sink.crashed(error)
        finally:
            self._frame = None
            departures.is_holding = False
            if departures.due:
                departures.release()
        if self._rest is not None:
            return True
        # Asking whether there is more costs half of the exception that would say that there is not.
        return not socket.closed and bool(int(socket.getsockopt(_EVENTS)) & _POLLIN)

    def _hand_over(self, sink: Sink, source: bytes, frame: zmq.Frame, envelopes: Iterator[memoryview]) -> None:
        """Until they or the turn are over."""
        lane, received, note_taken = self._lane, sink.received, self._turn.note_taken
        try:
            for envelope in envelopes:
                received(source, lane, envelope)
                if note_taken():
                    self._rest = source, frame, envelopes
                    return
        except (KeyboardInterrupt, SystemExit):
            self._rest = source, frame, envelopes
            raise

    def _opened(self, sink: Sink, source: bytes, frame: zmq.Frame) -> Iterator[memoryview]:
        """The envelopes in a message of ZeroMQ."""
        if not frame.more:
            return self._unwrapping.envelopes(sink, source, frame.buffer)
        while self._socket.getsockopt(zmq.RCVMORE):
            self._socket.recv(zmq.NOBLOCK, copy=False)
        sink.malformed(source, self._lane, "several frames")
        return iter(())


WATCHED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_ACCEPT_FAILED
_NAMES = {
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "handshake_wrong",
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "handshake_unfinished",
    int(zmq.EVENT_ACCEPT_FAILED): "accept_failed",
}
_REMEDIES = {
    "handshake_wrong": "a client without a key, or something that does not speak ZeroMQ; who connects to this port?",
    "handshake_unfinished": "something connects to this port and says nothing or hangs up",
    "accept_failed": "are there free file descriptors? raise the limit (ulimit -n)",
}


class HandshakeWatch:
    """Of one bound socket."""

    def __init__(self, socket: Socket, counters: Counter[str], note: Callable[[str, str, str], None]) -> None:
        self._socket = socket
        self._counters = counters
        self._note = note
        self._monitor: Socket | None = socket.get_monitor_socket(WATCHED)
        self._pump = Pump(self._monitor, self._take, 64)

    def close(self) -> None:
        """Before the socket itself is closed."""
        self._pump.stop()
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._monitor = None

    def _take(self) -> bool:
        if self._monitor is None:
            return False
        try:
            event, _, endpoint = read_event(self._monitor)
        except zmq.Again:
            return False
        name = _NAMES.get(event)
        if name is not None:
            self._counters[name] += 1
            self._note(name, endpoint, _REMEDIES[name])
        return True
