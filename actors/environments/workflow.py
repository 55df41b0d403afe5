"""The workflow `environment`: a rollout is what the policy does in an environment of the run file.

Environments run in worker processes of their own interpreters (`worker.py`), as workflows do. A session whose worker
ends, falls silent or is late fails by its environment: it is tried again elsewhere, then masked.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping

import msgspec

from ...core.config import RunConfig
from ...core.config.run import EnvironmentSettings
from ...core.errors import DataError
from ...core.process import past_proxies
from ...core.protocols import Tokenizer
from ...core.samples import Prompt, Sample
from ...transport.address import LOOPBACK
from ..models.tokenizer import FolderTokenizer
from ..user_code.process import Call
from ..workflows.episode import ModelAccess
from ..workflows.pool import TokensSoFar, WorkflowPool, spec_of
from ..workflows.timeline import waiting
from ..workflows.worker_messages import PhaseLimits, StartEpisode, WorkflowSpec


class EnvironmentPool(WorkflowPool):
    """The workers of one environment, with at most `concurrency` sessions each."""

    module = "myxa.actors.environments.worker"

    def __init__(
        self, name: str, settings: EnvironmentSettings, spec: WorkflowSpec, tokenizer: Tokenizer, *,
        max_workers: int, environ: Mapping[str, str],
    ) -> None:  # fmt: skip
        """`spec`: but for which environment it is. `environ`: of this process."""
        which = {"name": name, **settings.model_dump(include={"kind", "id", "args", "malformed_reward"})}
        super().__init__(
            msgspec.structs.replace(spec, args=which, max_block_s=settings.silence_s / 2),
            msgspec.convert(settings, PhaseLimits, from_attributes=True),
            tokenizer,
            max_workers=max_workers,
            max_calls=settings.concurrency,
        )
        self.name, self.what = name, f'environment "{name}"'
        self._python = settings.python or sys.executable, "-P"  # files where the run was started shadow no package
        env = {**environ, **settings.env}
        self._env, self._silent_s = env | past_proxies(env, LOOPBACK), settings.silence_s
        self._num_open, self._room = 0, asyncio.Event()

    async def play(
        self, start: StartEpisode, run_s: float, model: ModelAccess, record: TokensSoFar
    ) -> tuple[tuple[Sample, ...], dict[int, float]]:
        with waiting(model.on_wait, "environment", f"{self.name} (room in a worker)", 0):
            while self._num_open >= self.max_workers * self.max_calls:
                self._room.clear()
                await self._room.wait()
        self._num_open += 1
        try:
            return await super().play(start, run_s, model, record)
        finally:
            self._num_open -= 1
            self._room.set()

    def what_of(self, start: StartEpisode, call: Call) -> str:
        return f"{self.what} (session {start.session_id}, worker process {call.worker.pid})"

    def resize(self, num: int) -> None:
        super().resize(num)
        self._room.set()


class EnvironmentPools:
    """One per rollout actor."""

    def __init__(self, config: RunConfig, tokenizer: FolderTokenizer, environ: Mapping[str, str]) -> None:
        spec, max_workers = spec_of(config, tokenizer, {}), config.rollout.workers
        self.pools = {
            name: EnvironmentPool(name, settings, spec, tokenizer, max_workers=max_workers, environ=environ)
            for name, settings in config.environments.items()
        }

    async def start(self) -> None:
        """Have one worker of each load its environment. Raises ConfigError or UserCodeError if it cannot."""
        await asyncio.gather(*(pool.start() for pool in self.pools.values()))

    async def close(self) -> None:
        await asyncio.gather(*(pool.close() for pool in self.pools.values()))

    def resize(self, num: int) -> None:
        """The number of workers of each environment at most; what runs in others comes to its end there."""
        for pool in self.pools.values():
            pool.resize(num)

    async def play(
        self, start: StartEpisode, run_s: float, model: ModelAccess, record: TokensSoFar
    ) -> tuple[tuple[Sample, ...], dict[int, float]]:
        """As `WorkflowPool.play`, in the environment that the row names, or the only one. Raises DataError too."""
        return await self._pool_of(start.prompt).play(start, run_s, model, record)

    def _pool_of(self, prompt: Prompt) -> EnvironmentPool:
        name = prompt.metadata.get("environment", "")
        if not name and len(self.pools) == 1:
            return next(iter(self.pools.values()))
        if name not in self.pools:
            raise DataError(
                f'row {prompt.row} of {prompt.source}: its metadata names the environment "{name}"',
                remedy=f"name one of {', '.join(self.pools)}",
            )
        return self.pools[name]
