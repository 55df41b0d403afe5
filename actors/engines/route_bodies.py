"""JSON in and out of the embedded engine's HTTP routes."""

from __future__ import annotations

from typing import TypeVar

import msgspec
import orjson
from aiohttp import web

from ...core.errors import RequestRefused

T = TypeVar("T")


async def read_body(request: web.Request, kind: type[T]) -> T:
    """The request's object. Raises RequestRefused for one of another form."""
    raw = await request.read()
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.MsgspecError as err:
        raise RequestRefused(f"{request.path}: {err}", remedy="see SGLang's documentation of this route") from err


def json_response(value: object, status: int = 200) -> web.Response:
    """An answer with that value."""
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


def version_of(text: str) -> int:
    """A weight version. Raises RequestRefused for what is not a whole number."""
    try:
        return int(text)
    except ValueError as err:
        raise RequestRefused(f"weight version {text!r} is not a whole number", remedy="use 0, 1, 2, ...") from err
