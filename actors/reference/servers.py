"""Several servers of one reference model: whom to ask, and whom next.

The one that has least to do is asked, of those that did not fail lately. If it fails, the others are asked once each;
then all again after a pause, until there were enough tries. Knows servers; must not know samples.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence

from ...core.errors import ConfigError
from ...core.protocols import Tokenizer
from ...core.samples import F32
from ..http_client import client_session
from .server import Access, NoScore, ReferenceServer, Refused
from .vocabulary import Probes
from .wire import Wanted

MIN_TRIES = 3
CALLS_PER_SERVER = 32
"""At a time, of one rollout actor."""
PAUSE_S = 0.5
"""Before all servers are asked again, doubled each time, half as long or longer by chance."""
MAX_PAUSE_S = 10.0
KEEPALIVE_S = 2.0
"""An idle connection is not used again after so long: uvicorn closes it after 5 s."""


class ReferenceServers:
    """Used from one loop."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        tokenizer: Tokenizer,
        model_path: str,
        timeout_s: float,
        key: str = "",
        pause_s: float = PAUSE_S,
    ) -> None:
        """`tokenizer`, `model_path`: the policy's. `timeout_s`: for one answer. `key`: sent as bearer; empty: none."""
        self._servers = [ReferenceServer(url) for url in urls]
        self._probes = Probes.of(tokenizer)
        self._model_path = model_path
        self._timeout_s = timeout_s
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._pause_s = pause_s
        self._room = asyncio.Semaphore(CALLS_PER_SERVER * len(self._servers))
        self._access: Access | None = None
        self._is_closed = False

    async def logprobs(self, wanted: Wanted) -> F32:
        """float32 [wanted tokens]. Raises NoScore that says what each server answered last, Refused, ConfigError.

        Takes at most `timeout_s` and a pause for each try, once there is room: those before take no longer each.
        """
        async with self._room:
            return await self._with_patience(wanted)

    async def _with_patience(self, wanted: Wanted) -> F32:
        failed: dict[str, str] = {}
        num_tries = max(MIN_TRIES, len(self._servers))
        pause_s, asked = self._pause_s, set[ReferenceServer]()
        for number in range(1, num_tries + 1):
            server = self._next(asked)
            asked.add(server)
            try:
                return await server.logprobs(self._open(), wanted)
            except Refused:
                raise
            except NoScore as no:
                failed[server.url] = str(no)
            if len(asked) == len(self._servers) and number < num_tries:
                asked.clear()
                await asyncio.sleep(min(pause_s, MAX_PAUSE_S) * random.uniform(0.5, 1.5))
                pause_s *= 2
        raise NoScore(f"{'; '.join(failed.values())}; in {num_tries} tries")

    def _next(self, asked: set[ReferenceServer]) -> ReferenceServer:
        now_s = asyncio.get_running_loop().time()
        left = [server for server in self._servers if server not in asked]
        return min(left, key=lambda server: (server.rests_until_s > now_s, server.num_asked))

    def _open(self) -> Access:
        if self._is_closed:
            raise NoScore("asked after the servers were given up")
        if self._access is None:
            session = client_session(keepalive_s=KEEPALIVE_S)
            self._access = Access(session, self._headers, self._timeout_s, self._probes, self._model_path)
        return self._access

    async def close(self) -> None:
        """End all connections; calls that run fail."""
        self._is_closed = True
        if self._access is not None:
            await self._access.session.close()


def key_from(environment: Mapping[str, str], name: str) -> str:
    """The key that the variable holds; empty without a name. Raises ConfigError if it is not set."""
    if name and not environment.get(name):
        raise ConfigError(
            f'algo.ref_key_env = "{name}": that variable is not set where the rollout actors run',
            remedy="set it in the environment of `myxa up`",
        )
    return environment.get(name, "") if name else ""
