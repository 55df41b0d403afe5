"""The body of a GOODBYE: empty from a process that is going now, else what one says that will go. Pure."""

from __future__ import annotations

from typing import Annotated

import msgspec

from .frames import Buffer

MAX_RETRY_S = 3600.0


class Farewell(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """It drains: what it has accepted is finished, new calls are answered with `Draining`."""

    retry_after_s: Annotated[float, msgspec.Meta(ge=0.0, le=MAX_RETRY_S)]
    """When its next incarnation may be there."""


def write_farewell(retry_after_s: float) -> bytes:
    return msgspec.json.encode(Farewell(retry_after_s=min(MAX_RETRY_S, max(0.0, retry_after_s))))


def read_farewell(body: Buffer) -> Farewell | None:
    """None: it is going now. A body that cannot be read says no more than that it drains."""
    if not body:
        return None
    try:
        return msgspec.json.decode(body, type=Farewell)
    except msgspec.DecodeError:
        return Farewell(retry_after_s=0.0)
