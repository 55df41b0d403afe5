"""`ctx.openai` and `ctx.anthropic`: the SDKs' own clients, whose requests never leave the process.

An SDK is given a transport that answers from the rollout's session. What agents say to it is recorded as at the
gateway's door, and `ctx.samples()` gives the samples. The packages `openai` and `anthropic` are the user's to install.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
from msgspec.structs import replace

from ...core.errors import UserCodeError
from ...core.messages import SamplingParams
from ...core.protocols import Delta, GenerateRequest, Tokenizer
from ...core.samples import Sample
from ..user_code.process import run_worker
from ..workflows.episode import AskOther, Draw, Episode, ModelOfRollout, ModelsOfRollout, ReachedModel
from ..workflows.worker import WorkflowWorker, no_engine
from .answering import Answering, answer_of, fault_body
from .exchange import STATUS
from .session import AgentSession, RequestFault

ADDRESS = "http://policy"
KEY = "rollout"
SDKS = ("openai", "anthropic")


@dataclass(slots=True)
class SessionClients:
    """Of one rollout. `loop`: where the session lives; for clients of other threads."""

    episode: Episode
    tokenizer: Tokenizer
    loop: asyncio.AbstractEventLoop
    models: ModelsOfRollout = field(default_factory=ModelsOfRollout)
    """Of the run's own: requests may name one."""
    _session: AgentSession | None = None

    @property
    def session(self) -> AgentSession:
        """Begun when it is asked for first."""
        if self._session is None:
            self._session = AgentSession(self.episode, self.tokenizer)
        return self._session

    def openai(self, *, is_async: bool) -> Any:
        """An `openai.AsyncOpenAI` or `openai.OpenAI`. Raises UserCodeError where the package is missing."""
        return self._client("openai", "AsyncOpenAI" if is_async else "OpenAI", f"{ADDRESS}/v1", is_async=is_async)

    def anthropic(self, *, is_async: bool) -> Any:
        """An `anthropic.AsyncAnthropic` or `anthropic.Anthropic`. Raises UserCodeError where the package is missing."""
        return self._client("anthropic", "AsyncAnthropic" if is_async else "Anthropic", ADDRESS, is_async=is_async)

    def _client(self, package: str, kind: str, address: str, *, is_async: bool) -> Any:
        try:
            sdk: Any = importlib.import_module(package)
        except ImportError as error:
            raise UserCodeError(
                f"workflow: ctx.{package} needs the package {package}",
                remedy=f"pip install {package}, where workflows run",
            ) from error
        http = self._http(_http_package(sdk), is_async=is_async)
        return getattr(sdk, kind)(base_url=address, api_key=KEY, max_retries=0, http_client=http)

    def samples(self, reward: float | None = None) -> tuple[Sample, ...]:
        """Of all conversations that had a turn. Raises UserCodeError where none had."""
        samples = self.session.samples(reward)
        if not samples:
            raise UserCodeError(
                "workflow: ctx.samples() before any turn", remedy="ask ctx.openai or ctx.anthropic for one first"
            )
        return samples

    async def close(self) -> None:
        """End the turns under way."""
        if self._session is not None:
            await self._session.close()

    def _http(self, httpx: Any, *, is_async: bool) -> Any:
        """A client of that HTTP package, whose requests are answered here."""

        async def whole(request: Any) -> Any:
            answer = await self._answered(httpx, request)
            await answer.aread()  # of a stream: all its events
            return httpx.Response(answer.status_code, headers=answer.headers, content=answer.content)

        def waits(request: Any) -> Any:
            return asyncio.run_coroutine_threadsafe(whole(request), self.loop).result()

        if is_async:
            return httpx.AsyncClient(transport=httpx.MockTransport(partial(self._answered, httpx)))
        return httpx.Client(transport=httpx.MockTransport(waits))

    async def _answered(self, httpx: Any, request: Any) -> Any:
        body: bytes = request.content

        class Events(httpx.AsyncByteStream):
            async def __aiter__(self) -> AsyncIterator[bytes]:
                with answering.delivering():
                    async with contextlib.aclosing(answering.events()) as events:
                        async for text in events:
                            yield text.encode()

        path, status = request.url.path, 200
        try:
            data = answer_of(path, body, request.headers, self.session, self.models)
            if isinstance(data, Answering):
                answering = data
                if answering.is_stream:
                    return httpx.Response(200, headers={"Content-Type": "text/event-stream"}, stream=Events())
                with answering.delivering():
                    data = await answering.body()
        except RequestFault as fault:
            data, status = fault_body(path, fault), STATUS[fault.kind]
        head = {"Content-Type": "application/json"}
        return httpx.Response(status, headers=head, content=msgspec.json.encode(data))


def models_of_rollout(
    episode: Episode, models: Mapping[str, ReachedModel], loop: asyncio.AbstractEventLoop, ask: AskOther | None = None
) -> ModelsOfRollout:
    """`ctx.models`. `ask`: draws their turns, if `access` does not."""

    def draw_of(name: str) -> Draw | None:
        async def draw(so_far: Sample, request: GenerateRequest, start: Delta, params: SamplingParams) -> Any:
            assert ask is not None
            with episode.waits_for("agent", name):
                return await ask(so_far, request, start, params, name)

        return None if ask is None else draw

    models_by_name = ModelsOfRollout()
    for name, model in models.items():
        root = Episode(
            prompt=replace(episode.prompt, messages=(), tools=()),
            index=episode.index,
            tokenizer=model.tokenizer,
            model=model.access,
            renderer=model.renderer,
            prompt_ids=np.zeros(0, np.int32),
            draw=draw_of(name),
        )
        models_by_name[name] = ModelOfRollout(root=root, clients=SessionClients(root, model.tokenizer, loop))
    return models_by_name


def _http_package(sdk: Any) -> Any:
    base = next(base for base in sdk.DefaultAsyncHttpxClient.__mro__[1:] if base.__name__ == "AsyncClient")
    return importlib.import_module(base.__module__.partition(".")[0])


def main() -> None:
    """A worker process: load what the first frame names, then run episodes until the input ends."""
    run_worker(SdkWorker)


class SdkWorker(WorkflowWorker):
    """One whose workflows may use the SDKs."""

    def __init__(self, first: bytes, outgoing: BinaryIO) -> None:
        super().__init__(first, outgoing)
        preload(self.workflow.fn)
        self.models = {name: ReachedModel.of(spec, no_engine) for name, spec in self.spec.models.items()}

    def clients(self, episode: Episode, ask: AskOther) -> tuple[SessionClients, ModelsOfRollout]:
        models = models_of_rollout(episode, self.models, self.loop, ask)
        return SessionClients(episode, self.tokenizer, self.loop, models), models


def preload(fn: Any) -> None:
    """Import the SDKs that the file of a workflow speaks of: seconds that would hold the loop of its worker later."""
    with contextlib.suppress(OSError, TypeError):
        source = Path(inspect.getfile(fn)).read_text(encoding="utf-8", errors="replace")
        for name in SDKS:
            if f".{name}" in source:
                with contextlib.suppress(ImportError):
                    importlib.import_module(name)
