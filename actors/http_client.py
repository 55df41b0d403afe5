"""HTTP sessions whose deadlines are the caller's `asyncio.timeout`.

aiohttp's own `ClientTimeout(total=...)` enters its timer (3.14) twice a call: in the turn of the loop in which the task
is cancelled it takes back both cancellations, and the task's waiters wait for ever.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

import aiohttp

from ..core.errors import ConfigError

T = TypeVar("T")
MAX_PAUSE_S = 30.0
MAX_RETRY_AFTER_S = 120.0


class NoAnswer(Exception):
    """None came in time; the text says of whom, and why."""

    retry_after_s: float = 0.0
    """What the server asked for, at most MAX_RETRY_AFTER_S."""


class AnswerTooLong(Exception):
    """It is longer than was allowed; the text says whose."""


def client_session(*, keepalive_s: float, max_connections: int = 0, url: str = "") -> aiohttp.ClientSession:
    """Needs a running loop. `keepalive_s`: how long an idle connection is used again. `max_connections` 0: no limit.
    `url`: of a service that may be far; with https it is asked by way of the proxy that the environment names. All
    others are in the cluster, and many clusters set a proxy that cannot reach them."""
    connector = aiohttp.TCPConnector(limit=max_connections, keepalive_timeout=keepalive_s)
    return aiohttp.ClientSession(
        connector=connector, raise_for_status=False, timeout=stream_timeout(), trust_env=url.startswith("https:")
    )


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
) -> tuple[int, bytes, float]:
    """Status, body, seconds of Retry-After. `name`: of the server. Raises NoAnswer and AnswerTooLong."""
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
            return answer.status, bytes(raw), _seconds(answer.headers.get("Retry-After", ""))
    except TimeoutError as late:
        raise NoAnswer(f"{name} did not answer within {within_s:g} s") from late
    except aiohttp.ClientError as error:
        raise NoAnswer(f"{name} cannot be asked: {type(error).__name__}: {error}") from error


def _seconds(text: str) -> float:
    return min(float(text), MAX_RETRY_AFTER_S) if text.isascii() and text.isdecimal() else 0.0


async def tried(once: Callable[[], Awaitable[T]], *, tries: int, backoff_s: float) -> T:
    """What `once` returns, called again after a pause when it raises NoAnswer. Raises that of the last try, with their
    number. `backoff_s`: of the first pause, doubled for each further one, and up to half as long or longer by chance.
    """
    for number in range(1, tries + 1):
        try:
            return await once()
        except NoAnswer as failed:
            if number == tries:
                raise NoAnswer(f"{failed}, the last of {tries} tries" if tries > 1 else str(failed)) from failed
            pause_s = max(min(backoff_s, MAX_PAUSE_S) * random.uniform(0.5, 1.5), failed.retry_after_s)
        await asyncio.sleep(pause_s)
        backoff_s *= 2
    raise AssertionError("there is at least one try")


def key_from(environment: Mapping[str, str], name: str, place: str) -> str:
    """The key in the variable; empty without a name. `place`: of the run file. Raises ConfigError if not set."""
    if name and not environment.get(name):
        raise ConfigError(
            f'{place} = "{name}": that variable is not set where the rollout actors run',
            remedy="set it in the environment of `myxa up`",
        )
    return environment.get(name, "") if name else ""
