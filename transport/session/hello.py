"""The first envelope of every connection: who speaks, to whom, and where it can be answered. Pure."""

from __future__ import annotations

import re

import msgspec
import orjson

from ...core.ids import MAX_NAME_LENGTH, NAME_PATTERN
from ..payload import Buffer
from ..wire import Endpoints

MAX_HELLO_BYTES = 4096
_Z85 = re.compile(r"[0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40}")


class Hello(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of a HELLO."""

    name: str
    """Node name."""
    protocol: str
    """See `dialect.py`."""
    wire: int
    to_node: int
    to_epoch: int
    endpoints: Endpoints
    """Where the sender listens, so that it can be answered without asking the registry."""
    sent_units: int
    """Credit spent on this lane before this connection."""
    attempt: int = 1
    """Grows with every connection that the sender makes: a HELLO that was recorded and comes again is an old one."""


def is_public_key(text: str) -> bool:
    """Whether it looks like the public half of a CURVE pair."""
    return _Z85.fullmatch(text) is not None


def write_hello(hello: Hello) -> bytes:
    return orjson.dumps(msgspec.to_builtins(hello))


def read_hello(body: Buffer) -> Hello:
    """Raises ValueError for anything that is no HELLO."""
    if len(body) > MAX_HELLO_BYTES:
        raise ValueError(f"{len(body)} bytes are too many")
    try:
        hello = msgspec.convert(orjson.loads(body), Hello)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if len(hello.name) > MAX_NAME_LENGTH or NAME_PATTERN.fullmatch(hello.name) is None:
        raise ValueError("that is no node's name")
    if not (0 <= hello.sent_units <= 0xFFFF and 0 < hello.attempt < 1 << 63):
        raise ValueError("numbers out of range")
    _check_endpoints(hello.endpoints)
    return hello


def _check_endpoints(endpoints: Endpoints) -> None:
    """We will connect there: to what listens as nodes do, and to nothing else."""
    for schemes, pair in ((("unix://", "ipc://"), endpoints.ipc), (("tcp://",), endpoints.tcp)):
        if any(address and not address.startswith(schemes) for address in pair):
            raise ValueError(f"an address that does not begin with {' or '.join(schemes)}")
    if endpoints.curve and not is_public_key(endpoints.curve):
        raise ValueError("that is no public key")
    if any(endpoints.tcp) and not endpoints.curve:
        raise ValueError("tcp without a public key")
