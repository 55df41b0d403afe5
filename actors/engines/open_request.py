"""A request that a client has sent to a server, from sending to the end of its stream."""

from __future__ import annotations

import asyncio

import aiohttp

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
