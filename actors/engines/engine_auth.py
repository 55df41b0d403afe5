"""Bearer keys in front of the embedded engine's routes, as SGLang asks for them. Knows aiohttp and route names.

With a key, everything but health needs it: SGLang's `--api-key` and `--admin-api-key` with the same value. Without
one, everything is open: bind to loopback, or trust your net.
"""

from __future__ import annotations

import secrets

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

OPEN = ("/health", "/metrics")
"""Beginnings of paths that never need a key."""


def require_key(key: str) -> Middleware:
    """A middleware that answers 401 to whoever does not send `key` as bearer. Raises ValueError for an empty key."""
    if not key:
        raise ValueError("an empty key protects nothing")

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path.startswith(OPEN) or _has(request, key):
            return await handler(request)
        body = orjson.dumps({"error": "Unauthorized"})
        return web.Response(body=body, status=401, content_type="application/json")

    return check


def _has(request: web.Request, key: str) -> bool:
    kind, _, told = request.headers.get("Authorization", "").partition(" ")
    return kind.lower() == "bearer" and secrets.compare_digest(told.encode(), key.encode())
