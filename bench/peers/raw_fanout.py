"""The reference of `fanout.py`: blocking pyzmq with the sockets that our transport has, and nothing else.

A DEALER to each of N processes, one ROUTER for what they answer; messages as long as those of the typed call.

python raw_fanout.py server FOLDER PLACE | python raw_fanout.py root FOLDER NUM_PEERS
"""

from __future__ import annotations

import json
import os
import sys
import time

import zmq
from meter import WARM_UP_S, Result, end_with_input, say

MESSAGE = bytes(4 + 4 + 48 + 74)
"""Batch of one, header, five fields in JSON."""


def new_socket(kind: int) -> zmq.Socket[bytes]:
    socket = zmq.Context.instance().socket(kind)
    socket.set_hwm(0)
    return socket


def server(folder: str, place: str) -> None:
    inbox, outbox = new_socket(zmq.ROUTER), new_socket(zmq.DEALER)
    inbox.bind(f"ipc://{folder}/raw{place}")
    outbox.connect(f"ipc://{folder}/raw")
    end_with_input()
    say("ready")
    while True:
        inbox.recv()
        outbox.send(inbox.recv())


def root(folder: str, num_peers: int) -> None:
    inbox, outboxes = new_socket(zmq.ROUTER), [new_socket(zmq.DEALER) for _ in range(num_peers)]
    inbox.bind(f"ipc://{folder}/raw")
    for place, outbox in enumerate(outboxes):
        outbox.connect(f"ipc://{folder}/raw{place}")

    def ask(size: int, seconds: float) -> list[int]:
        taken: list[int] = []
        sends, recv = [outbox.send for outbox in outboxes[:size]], inbox.recv
        stop = time.perf_counter() + seconds
        while time.perf_counter() < stop:
            before = time.perf_counter_ns()
            for send in sends:
                send(MESSAGE)
            for _ in sends:
                recv()
                recv()
            taken.append(time.perf_counter_ns() - before)
        return taken

    ask(num_peers, WARM_UP_S)
    say("ready")
    for text in sys.stdin:
        command = json.loads(text)
        ask(command["peers"], WARM_UP_S)
        result = Result([os.getpid()])
        taken = ask(command["peers"], command["seconds"])
        say(result.line(len(taken), taken))


if __name__ == "__main__":
    if sys.argv[1] == "server":
        server(*sys.argv[2:4])
    else:
        root(sys.argv[2], int(sys.argv[3]))
