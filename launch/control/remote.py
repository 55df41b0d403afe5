"""Asking a run on another host: the network half of the control client. Synchronous."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

from ...core.errors import DeadlineExceeded, LaunchError
from ...transport.security import JobKey
from ...transport.zeromq.control_endpoint import ControlCaller
from .live_runs import ControlNote

FIRST_S = 15.0
"""For the first answer of a stream; a beat comes every few seconds from then on."""
BEATS_S = 30.0


@contextmanager
def answers_of(note: ControlNote, verb: str, request: bytes, deadline: float | None) -> Generator[Iterator[bytes]]:
    """The answers to a request as they come; `deadline` by time.monotonic, None for a stream.

    Raises LaunchError for keys that cannot be used; the iterator DeadlineExceeded when nobody answers, which is also
    what a key that is not admitted gets: the endpoint says nothing to strangers.
    """
    try:
        key = JobKey.load(Path(note.key_file).expanduser())
    except LaunchError as error:
        raise LaunchError(f"our own key: {error.message}", remedy="`myxa control keygen FILE`") from error
    with ControlCaller(note.tcp, note.tcp_key, key) as caller:
        caller.send(request)
        yield _answers(caller, note, verb, deadline)


def _answers(caller: ControlCaller, note: ControlNote, verb: str, deadline: float | None) -> Iterator[bytes]:
    patience_s = FIRST_S
    while True:
        left_s = patience_s if deadline is None else max(0.0, deadline - time.monotonic())
        answer = caller.receive(left_s)
        if answer is None:
            raise DeadlineExceeded(
                f"tcp://{note.tcp} did not answer {verb} in time",
                remedy="does the run go on, and has it our public key (and it the key that we expect)?",
            )
        yield answer
        patience_s = BEATS_S
