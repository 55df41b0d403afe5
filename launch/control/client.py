"""The command line's side of the control socket: ask a verb, follow a stream. Synchronous, by plain sockets.

Knows the protocol (newline JSON). Must not know what verbs mean. Imports neither zmq nor asyncio: commands start fast.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...core import errors
from ...core.errors import DeadlineExceeded, LaunchError, MyxaError, PeerDied
from .live_runs import ControlNote, find_run

CONNECT_S = 5.0
CHUNK_BYTES = 1 << 16


class ControlClient:
    """Speaks to one run. Each call has a connection of its own, so a client may be kept for as long as one likes."""

    def __init__(self, note: ControlNote, *, view: bool = False) -> None:
        self.note = note
        self.may_operate = not view
        """Whether this speaks to the socket that takes orders; `view` is for the one that only shows."""
        self._path = note.view if view else note.control

    @classmethod
    def of(cls, run: Path | None, *, view: bool = False) -> ControlClient:
        """Of the run directory, or of the only live run. Raises LaunchError naming what there is."""
        return cls(find_run(run), view=view)

    @property
    def run_dir(self) -> Path:
        """Of the run that is spoken to."""
        return Path(self.note.run_dir)

    def ask(self, verb: str, timeout_s: float = 30.0, **arguments: Any) -> Any:
        """The verb's answer, as JSON types. Raises the error that the run told, with its remedy and exit code;
        DeadlineExceeded when it took longer, PeerDied when the run ended meanwhile."""
        deadline = time.monotonic() + timeout_s
        with self._answers(verb, arguments, deadline) as lines:
            for line in lines:
                return _opened(line)["result"]
        raise PeerDied(f"the run ended before it answered {verb}", remedy="`myxa report RUN` tells how it ended")

    def follow(self, verb: str, **arguments: Any) -> Generator[Any]:
        """The verb's items as they come, until it ends or the run does. Close the iterator to stop."""
        with self._answers(verb, arguments, None) as lines:
            for line in lines:
                answer = _opened(line)
                if answer.get("end"):
                    return
                if "beat" in answer:
                    continue
                yield answer["item"] if "item" in answer else answer["result"]

    @contextmanager
    def _answers(self, verb: str, arguments: dict[str, Any], deadline: float | None) -> Generator[Iterator[bytes]]:
        """The lines that come back, until the other side closes."""
        request = json.dumps({"id": 1, "verb": verb, "args": arguments}).encode()
        if self.note.is_remote:
            from .remote import answers_of  # zmq is needed here only

            with answers_of(self.note, verb, request, deadline) as lines:
                yield lines
        else:
            with self._connected(verb, request + b"\n") as link:
                yield _lines(link, deadline, verb)

    @contextmanager
    def _connected(self, verb: str, request: bytes) -> Generator[socket.socket]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.settimeout(CONNECT_S)
            try:
                link.connect(self._path)
            except OSError as error:
                raise LaunchError(
                    f"the run in {self.note.run_dir} does not answer at {self._path}: {error.strerror or error}",
                    remedy="is it over? sockets belong to the user that started the run",
                ) from error
            try:
                link.sendall(request)
            except OSError as error:
                raise PeerDied(f"the run ended while it was asked to {verb}: {error.strerror or error}") from error
            yield link


def _lines(link: socket.socket, deadline: float | None, verb: str) -> Iterator[bytes]:
    """Whole lines until the other side closes."""
    kept = bytearray()
    while True:
        try:
            link.settimeout(None if deadline is None else max(0.001, deadline - time.monotonic()))
            chunk = link.recv(CHUNK_BYTES)
        except TimeoutError:
            raise too_late(verb) from None
        except ConnectionError:
            return
        if not chunk:
            return
        kept += chunk
        *whole, rest = kept.split(b"\n") if b"\n" in chunk else (kept,)
        kept = bytearray(rest)
        yield from (bytes(line) for line in whole if line)


def too_late(verb: str) -> DeadlineExceeded:
    """For a caller who waited long enough."""
    return DeadlineExceeded(f"the run did not answer {verb} in time; it may still do it", remedy="`myxa history` tells")


def _opened(line: bytes) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(line)
    if answer.get("ok"):
        return answer
    raise told_error(answer.get("error", {}))


def told_error(facts: dict[str, Any]) -> MyxaError:
    """The error that a run told, of the same class where the class is ours."""
    named = getattr(errors, str(facts.get("type")), None)
    kind = named if isinstance(named, type) and issubclass(named, MyxaError) else MyxaError
    error = kind(str(facts.get("message", "?")), remedy=str(facts.get("remedy", "")))
    error.exit_code = int(facts.get("exit_code", 1))
    return error
