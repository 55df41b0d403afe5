"""The guard in front of the embedded engine's routes. Knows aiohttp and route names; who may ask is `http_guard.py`'s.

With a key, everything but health needs it: SGLang's `--api-key` and `--admin-api-key` with the same value.
"""

from __future__ import annotations

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from ..http_guard import Head, HttpAccess
from .route_bodies import json_response

OPEN = ("/health", "/metrics")
"""Beginnings of paths that never need a key."""
KINDS = {401: "unauthorized", 403: "forbidden", 415: "unsupported_media_type", 421: "misdirected_request"}


def guarded(key: str, host: str) -> Middleware:
    """A middleware that answers a request which may not be served with the reason."""
    door = HttpAccess(key, host=host, open_paths=OPEN)

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        refusal = door.refusal(Head.of(request.method, request.headers), request.path)
        if refusal is None:
            return await handler(request)
        error = {"message": refusal.text, "type": KINDS[refusal.status], "code": refusal.status}
        return json_response({"error": error}, status=refusal.status)

    return check
