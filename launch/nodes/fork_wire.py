"""What a launcher and its fork servers say to each other, one message a packet. Plain records.

    launcher -> server    ForkRequest, with two descriptors: the new process's end of a socket pair of its own, its log
    new process -> launcher, on that pair    ForkReply: here I am; or why there is none
    launcher -> new process                  GO: you are wanted. Anything else, or the end of the pair: end at once
    server -> launcher, when it has begun    ForkReply: the imports are done; or why not

So nobody comes to life whom the launcher has given up, however late: the launcher has closed its end by then.
"""

from __future__ import annotations

import msgspec

MAX_BYTES = 1 << 20
"""Largest packet; the kernel takes less where its limit on buffers is lower."""
GO = b"go"


class ForkRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A process that is wanted."""

    name: str
    launcher_pid: int
    kit: str = ""
    """Set: it is to be a fork server too, with this kit (preloads.py); empty: an actor."""
    env: tuple[tuple[bytes, bytes], ...] = ()
    """All its variables."""


class ForkReply(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """See the module's head."""

    pid: int = 0
    problem: str = ""


pack = msgspec.msgpack.encode
unpack_request = msgspec.msgpack.Decoder(ForkRequest).decode
unpack_reply = msgspec.msgpack.Decoder(ForkReply).decode
