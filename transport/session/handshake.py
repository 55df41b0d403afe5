"""HELLO: who speaks, to whom, in which version of the runtime. Pure.

HELLO is the first envelope of every connection. Its `protocol` is one fingerprint over everything that both ends must
agree on, so processes of different versions find out when they meet and not at some later message. The types of
handlers are not part of it: they are compared per handler, when a call looks its callee up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec
import orjson

from ...core.errors import LaunchError, ProtocolMismatch
from ...core.handlers import fingerprint, handlers_of
from ...core.ids import MAX_NAME_LENGTH, NAME_PATTERN, PeerKey
from ..codec import Buffer
from ..registry.registry import RegistryContract
from ..wire import ConnectionGuard, Endpoints, Lane, is_public_key
from .calls import Calls
from .faults import Fault, encode_fault
from .frames import HEADER_BYTES, VERSION, Envelope, Kind, encode
from .heartbeat import Vitals
from .links import Links
from .pending import UNIT_BYTES, WINDOW_UNITS

MAX_HELLO_BYTES = 4096


class Hello(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of a HELLO."""

    name: str
    protocol: str
    """The speaker's fingerprint, see `Handshake`."""
    wire: int
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


def protocol_of(*records: type[msgspec.Struct]) -> str:
    """The fingerprint, with these records as the session's own."""
    kinds = ",".join(f"{kind.name}={kind.value}" for kind in Kind)
    registry = ",".join(f"{name}={schema}" for name, schema in handlers_of(RegistryContract).schema.items())
    numbers = f"{VERSION}/{HEADER_BYTES}/{WINDOW_UNITS}/{UNIT_BYTES}"
    return fingerprint(numbers, kinds, registry, *records)


PROTOCOL = protocol_of(Hello, Fault, Vitals)


class _Stranger(msgspec.Struct, frozen=True, kw_only=True):
    """What of a HELLO must stay readable for ever, whatever else changes in it."""

    protocol: str = ""
    name: str = ""
    endpoints: Endpoints | None = None


class Handshake:
    """Of one session: looks at every HELLO first, and turns those away that it could not understand."""

    def __init__(
        self,
        links: Links,
        calls: Calls,
        counters: Counter[str],
        door: ConnectionGuard | None,
        over: Callable[[PeerKey, str], None],
    ) -> None:
        self._links = links
        self._calls = calls
        self._counters = counters
        self._door = door
        self._over = over

    def objection(self, lane: Lane, key: PeerKey, body: Buffer) -> str:
        """Why we cannot talk to the sender of this HELLO; "" if we can, or if it is no HELLO at all. Calls to it that
        wait end as not executed: it takes nothing from us either."""
        try:
            stranger = msgspec.convert(orjson.loads(body), _Stranger)
        except (msgspec.ValidationError, ValueError, RecursionError):
            return ""
        if stranger.protocol in ("", PROTOCOL):
            return ""
        if self._door is not None and (objection := self._door.objection(lane, key, stranger.name)):
            return objection
        self._counters["hello_of_another_version"] += 1
        error = ProtocolMismatch(
            f"{stranger.name[:MAX_NAME_LENGTH]} speaks protocol {stranger.protocol[:16]}, this process {PROTOCOL}",
            remedy="run the same version of myxa in all processes of a job",
        )
        link = self._links.find(key)
        if link is not None:
            self._calls.on_refused(link, error)
            self._over(key, error.message)
        elif stranger.endpoints is not None:
            self._tell(key, stranger.endpoints, error)
        return error.message

    def _tell(self, key: PeerKey, endpoints: Endpoints, error: ProtocolMismatch) -> None:
        """With our own HELLO in front, from which it sees the same."""
        own = self._links.own
        refusal = Envelope(
            kind=Kind.NACK, src_node=own.node_id, src_epoch=own.epoch, dst_epoch=key.epoch, body=encode_fault(error)
        )
        try:
            self._links.tell_stranger(key, endpoints, encode(refusal))
        except LaunchError:
            self._counters["cannot_answer"] += 1
