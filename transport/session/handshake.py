"""HELLO: who speaks, to whom, in which version of the runtime. Pure.

HELLO is the first envelope of every connection. Its `protocol` is the version of wire and package, so processes of
different versions find out when they meet and not at some later message.
"""

from __future__ import annotations

import msgspec
import orjson

from ... import __version__
from ...core.ids import MAX_NAME_LENGTH, NAME_PATTERN
from ..codec import Buffer
from ..wire import Endpoints, is_public_key
from .frames import VERSION

MAX_HELLO_BYTES = 4096


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """Body of a HELLO. That of another version is read too, so that it hears why it is refused."""

    name: str
    protocol: str
    """The speaker's, see `PROTOCOL`."""
    to_node: int
    to_epoch: int
    endpoints: Endpoints
    """Where the sender listens, so that it can be answered without asking the registry."""
    attempt: int = 1
    """Grows with every connection that the sender makes: a HELLO that was recorded and comes again is an old one."""


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
    if not 0 < hello.attempt < 1 << 63:
        raise ValueError("numbers out of range")
    _check_endpoints(hello.endpoints)
    return hello


def _check_endpoints(endpoints: Endpoints) -> None:
    """We will connect there: to what listens as nodes do, and to nothing else."""
    for scheme, pair in (("ipc://", endpoints.ipc), ("tcp://", endpoints.tcp)):
        if any(address and not address.startswith(scheme) for address in pair):
            raise ValueError(f"an address that does not begin with {scheme}")
    if endpoints.curve and not is_public_key(endpoints.curve):
        raise ValueError("that is no public key")
    if any(endpoints.tcp) and not endpoints.curve:
        raise ValueError("tcp without a public key")


PROTOCOL = f"{VERSION}/{__version__}"
