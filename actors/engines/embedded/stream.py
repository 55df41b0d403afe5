"""What one request's reader has not been given yet. Belongs to the loop."""

from __future__ import annotations

import asyncio
from collections import deque

from ....core.errors import EngineError
from ....core.protocols import Delta


class Stream:
    """Filled by the engine's events, emptied by one `generate` call."""

    def __init__(self) -> None:
        self._news: deque[Delta | EngineError] = deque()
        self._has_news = asyncio.Event()

    def put(self, news: Delta | EngineError) -> None:
        """New tokens, or the error that ended the request."""
        self._news.append(news)
        self._has_news.set()

    async def get(self) -> Delta:
        """The next news; raises it if it is an error."""
        while not self._news:
            self._has_news.clear()
            await self._has_news.wait()
        news = self._news.popleft()
        if isinstance(news, EngineError):
            raise news
        return news
