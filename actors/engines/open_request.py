"""The requests that a client has sent to a server, from sending to the end of their streams."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import aiohttp

from ...core.errors import EngineError

RID_END = "~"
"""Ends the request's own id on the wire, and the whole: SGLang aborts by prefix, and "r1" must not abort "r10". Between
them stands what makes it unique: two seconds after a stream SGLang 0.5.17 aborts whatever has its id by then, and of a
request whose reader left it gives the last tokens to the next of that id.
"""


class OpenRequest:
    """A request whose stream has not ended."""

    def __init__(self, request_id: str, unique: str) -> None:
        self.request_id = request_id
        self.rid = f"{request_id}{RID_END}{unique}{RID_END}"
        """Its id on the wire."""
        self.has_arrived = asyncio.Event()
        """The server answered, with a stream or with a refusal."""
        self.is_aborted = False
        self.answer: aiohttp.ClientResponse | None = None


class OpenRequests:
    """All of one client's."""

    def __init__(self, place: str, call_s: float) -> None:
        """`place`: whom errors name. `call_s`: within which a server answers at all."""
        self._place = place
        self._call_s = call_s
        self._open: list[OpenRequest] = []
        self._self_id = uuid.uuid4().hex[:8]
        """Tells this client from others of the server, and from an earlier life of its own."""
        self._num_sent = 0

    def __len__(self) -> int:
        return len(self._open)

    @property
    def num_arrived(self) -> int:
        """Those that the server has."""
        return sum(one.has_arrived.is_set() for one in self._open)

    @contextmanager
    def sent(self, request_id: str) -> Generator[OpenRequest]:
        """A new one, open inside the block."""
        self._num_sent += 1
        one = OpenRequest(request_id, f"{self._self_id}.{self._num_sent}")
        self._open.append(one)
        try:
            yield one
        finally:
            one.has_arrived.set()
            self._open.remove(one)

    def named(self, request_id: str | None) -> list[OpenRequest]:
        """Those of that id; None: all."""
        return [one for one in self._open if request_id in (None, one.request_id)]

    def cut(self) -> None:
        """End all streams here and now: whoever reads them gets an error."""
        for one in self._open:
            if one.answer is not None:
                one.answer.close()  # wakes its reader, which closing the session does not

    async def arrived(self, streams: Sequence[OpenRequest]) -> None:
        """Wait until the server has these: what it has not seen it can neither abort nor pause. Raises EngineError."""
        try:
            async with asyncio.timeout(self._call_s):
                for one in streams:
                    await one.has_arrived.wait()
        except TimeoutError as err:
            raise EngineError(
                f"{self._place}: did not answer {len(streams)} requests within {self._call_s:g} s",
                remedy="see the server's log",
            ) from err
