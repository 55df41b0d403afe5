"""A stream of tokens that nobody reads to its end is closed at once: its engine has other work."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

from ...core.protocols import Delta


@asynccontextmanager
async def closing(stream: AsyncIterator[Delta]) -> AsyncGenerator[AsyncIterator[Delta]]:
    """The stream, closed on leaving the block if it can be: for an engine that is to abort the request."""
    try:
        yield stream
    finally:
        if isinstance(stream, AsyncGenerator):
            await stream.aclose()
