"""HTTP sessions whose deadlines are the caller's `asyncio.timeout`.

aiohttp's own `ClientTimeout(total=...)` is not used: a call enters its timer (3.14) twice, and when it goes off in the
same turn of the loop in which the task is cancelled, it takes back both cancellations and raises TimeoutError. The task
continues, and its waiters wait for ever. `asyncio.timeout` distinguishes the two.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import aiohttp


class NoAnswer(Exception):
    """None came in time; the text says of whom, and why."""


class AnswerTooLong(Exception):
    """It is longer than was allowed; the text says whose."""


def client_session(*, keepalive_s: float, max_connections: int = 0) -> aiohttp.ClientSession:
    """Needs a running loop. `keepalive_s`: how long an idle connection is used again. `max_connections` 0: no limit."""
    connector = aiohttp.TCPConnector(limit=max_connections, keepalive_timeout=keepalive_s)
    return aiohttp.ClientSession(connector=connector, raise_for_status=False, timeout=stream_timeout())


def stream_timeout(connect_s: float | None = None, silence_s: float | None = None) -> aiohttp.ClientTimeout:  # noqa: TID251 -- names the type
    """For a call that may last: bounds only how long connecting takes, and how long nothing comes. None: unbounded
    (aiohttp's default would be 30 s, and 300 s for the whole call)."""
    return aiohttp.ClientTimeout(total=None, sock_connect=connect_s, sock_read=silence_s)  # noqa: TID251 -- no timer


async def post_bounded(
    session: aiohttp.ClientSession,
    url: str,
    body: bytes,
    headers: Mapping[str, str],
    *,
    within_s: float,
    max_bytes: int,
    name: str,
) -> tuple[int, bytes]:
    """Status and body of the answer. `name`: of the server, for messages. Raises NoAnswer and AnswerTooLong."""
    try:
        async with (
            asyncio.timeout(within_s),
            session.post(url, data=body, headers=headers, allow_redirects=False) as answer,
        ):
            raw = bytearray()
            async for chunk in answer.content.iter_chunked(1 << 16):
                raw += chunk
                if len(raw) > max_bytes:
                    raise AnswerTooLong(f"{name} answered with more than {max_bytes} bytes")
            return answer.status, bytes(raw)
    except TimeoutError as late:
        raise NoAnswer(f"{name} did not answer within {within_s:g} s") from late
    except aiohttp.ClientError as error:
        raise NoAnswer(f"{name} cannot be asked: {type(error).__name__}: {error}") from error
