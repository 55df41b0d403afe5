"""JSON in and out of the embedded engine's HTTP routes."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec
import orjson
from aiohttp import web

from ...core.errors import RequestRefused

T = TypeVar("T")

BODY_S = 60.0
"""Within which a body must have arrived."""
MAX_VERSION = 2**31 - 1
"""Stamps of tokens are int32."""


async def read_all(request: web.Request) -> bytes:
    """The bytes of its body. Raises RequestRefused for one that does not arrive in time."""
    try:
        async with asyncio.timeout(BODY_S):
            return await request.read()
    except TimeoutError:
        raise RequestRefused(
            f"{request.path}: the body did not arrive within {BODY_S:g} s", remedy="send it in one go"
        ) from None


async def read_body(request: web.Request, kind: type[T]) -> T:
    """The request's object. Raises RequestRefused for one of another form."""
    raw = await read_all(request)
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as err:
        raise RequestRefused(f"{request.path}: {err}", remedy="see SGLang's documentation of this route") from err


def json_response(value: object, status: int = 200) -> web.Response:
    """An answer with that value."""
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


def version_of(text: str) -> int:
    """A weight version. Raises RequestRefused for what is not a whole number."""
    try:
        version = int(text)
    except ValueError:
        version = -1
    if not 0 <= version <= MAX_VERSION:
        raise RequestRefused(
            f"weight version {text[:80]!r} is not a whole number up to {MAX_VERSION}", remedy="use 0, 1, 2, ..."
        )
    return version
