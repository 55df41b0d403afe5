"""Which runtime this process speaks: one fingerprint over everything that both ends of a connection must agree on.

It is in every HELLO, so that processes of different versions find out when they meet and not at some later message. The
types of handlers are not part of it: they are compared per handler, when a call looks its callee up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec
import orjson

from ...core.errors import LaunchError, ProtocolMismatch
from ...core.handlers import handlers_of
from ...core.ids import MAX_NAME_LENGTH, PeerKey
from ...core.schema import fingerprint
from ..payload import Buffer
from ..registry.registry import RegistryContract
from ..wire import Door, Endpoints, Lane
from .calls import Calls
from .credit import UNIT_BYTES, WINDOW_UNITS
from .farewell import Farewell
from .faults import Fault, encode_fault
from .frames import HEADER_BYTES, VERSION, Envelope, Kind, encode
from .hello import Hello
from .links import Links
from .pulse import Vitals


def protocol_of(*records: type[msgspec.Struct]) -> str:
    """The fingerprint, with these records as the session's own."""
    kinds = ",".join(f"{kind.name}={kind.value}" for kind in Kind)
    registry = ",".join(f"{name}={schema}" for name, schema in handlers_of(RegistryContract).schema.items())
    numbers = f"{VERSION}/{HEADER_BYTES}/{WINDOW_UNITS}/{UNIT_BYTES}"
    return fingerprint(numbers, kinds, registry, *records)


PROTOCOL = protocol_of(Hello, Fault, Vitals, Farewell)


class _Stranger(msgspec.Struct, frozen=True, kw_only=True):
    """What of a HELLO must stay readable for ever, whatever else changes in it."""

    protocol: str = ""
    name: str = ""
    endpoints: Endpoints | None = None


class Dialect:
    """Of one session: looks at every HELLO first, and turns those away that it could not understand."""

    def __init__(
        self,
        links: Links,
        calls: Calls,
        counters: Counter[str],
        door: Door | None,
        over: Callable[[PeerKey, str], None],
    ) -> None:
        self._links = links
        self._calls = calls
        self._counters = counters
        self._door = door
        self._over = over

    def objection(self, source: bytes, lane: Lane, key: PeerKey, body: Buffer) -> str:
        """Why we cannot talk to whoever sent this HELLO; "" if we can, or if it is no HELLO at all. Calls to it that
        wait end as not executed: it takes nothing from us either."""
        try:
            stranger = msgspec.convert(orjson.loads(body), _Stranger)
        except (msgspec.ValidationError, ValueError, RecursionError):
            return ""
        if stranger.protocol in ("", PROTOCOL):
            return ""
        if self._door is not None and (objection := self._door.objection(source, lane, key, stranger.name)):
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
