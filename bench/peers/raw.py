"""The reference: blocking pyzmq, one DEALER and one ROUTER over ipc, 64 bytes there and back, nothing else.

python raw.py server ENDPOINT | python raw.py client ENDPOINT SERVER_PID
"""

from __future__ import annotations

import os
import sys
import time

import zmq
from meter import blocking_client, end_with_input, say

MESSAGE = bytes(64)


def server(endpoint: str) -> None:
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.set_hwm(0)
    socket.bind(endpoint)
    end_with_input()
    say("ready")
    recv, send = socket.recv, socket.send
    while True:
        source = recv()
        message = recv()
        send(source, zmq.SNDMORE)
        send(message)


def client(endpoint: str, server_pid: int) -> None:
    socket = zmq.Context().socket(zmq.DEALER)
    socket.set_hwm(0)
    socket.connect(endpoint)
    send, recv = socket.send, socket.recv

    def once() -> None:
        send(MESSAGE)
        recv()

    def flood(depth: int, seconds: float) -> int:
        for _ in range(depth):
            send(MESSAGE)
        num_calls = 0
        stop = time.perf_counter() + seconds
        while time.perf_counter() < stop:
            recv()
            send(MESSAGE)
            num_calls += 1
        for _ in range(depth):
            recv()
        return num_calls + depth

    blocking_client(once, flood, lambda: [os.getpid(), server_pid])


if __name__ == "__main__":
    if sys.argv[1] == "server":
        server(sys.argv[2])
    else:
        client(sys.argv[2], int(sys.argv[3]))
