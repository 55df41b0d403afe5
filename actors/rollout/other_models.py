"""Models of the run's own beside the policy: judges, user simulators, opponents (`[models.NAME]`).

`ModelServer` is the actor: one engine, with the weights of its folder for good. `OtherModel` is how a rollout actor
reaches the actors of one name: it asks the one that has least to do, and another one, or the same one once it is
restarted, when that dies. An answer that was lost is drawn again: nothing depends on it yet.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from typing import cast

import numpy as np
from msgspec.structs import replace

from ...core.actor import ActorContext
from ...core.errors import CallError, EngineError, MemberFailed, RequestRefused, UserCodeError
from ...core.protocols import Delta, Engine, GenerateRequest, Tokenizer
from ...core.refs import with_deadline
from ...core.samples import Message
from ...core.timeouts import TIMEOUTS
from ..contracts import ModelContract
from ..telemetry import REPORT_S, Reporter
from ..workflows.episode import ModelSpec, ReachedModel, draw_turn, stops_of

_log = logging.getLogger(__name__)
REST_S = 2.0
"""For which an actor that failed is asked only if there is no other."""


class ModelServer(ModelContract):
    """One engine of a frozen model."""

    mailbox_size = 4096

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._serves = asyncio.Event()
        self._num_running = self._num_asked = self._num_tokens = 0

    async def on_start(self) -> None:
        report = Reporter.begin(self.ctx)
        self._meter, self._telemetry, self._clock = report.meter, report.telemetry, report.clock
        self._meter.switch("other", "start")
        self.ctx.spawn(self._run(), name="model-run")

    async def _run(self) -> None:
        with self.ctx.busy(TIMEOUTS.rollout.start_s, "starts its engine"):
            self._context_length = (await self._engine.start()).context_length
        self._serves.set()
        self._book(0)
        self.ctx.spawn(self._gauge_forever(), name="model-gauges")
        await self._engine.until_lost()  # its error ends the actor, which is restarted

    async def on_stop(self, why: str) -> None:
        await self._engine.close()

    async def answer(self, request: GenerateRequest) -> Delta:
        await self._serves.wait()
        self._num_asked += 1
        sampling, room = request.sampling, self._context_length - len(request.input_ids)
        request = replace(
            request,
            request_id=f"{self.ctx.name}.{self.ctx.epoch}.{self._num_asked}",
            sampling=sampling.for_rest(num_done=0, limit=max(min(sampling.max_new_tokens, room), 1)),
        )
        self._book(1)
        try:
            stops = stops_of(request.sampling.stop, self._tokenizer)
            delta, finish = await draw_turn(self._engine.generate, request, stops, [])
        finally:
            self._book(-1)
        self._num_tokens += len(delta.output_ids)
        if finish == "abort":
            raise EngineError(f"{self.ctx.name} ends", remedy="ask another one")
        return replace(delta, finish=finish, kept=None, experts=None)

    def _book(self, more: int) -> None:
        self._num_running += more
        self._meter.switch(*(("compute", "generate") if self._num_running else ("wait-data", "requests")))

    async def _gauge_forever(self) -> None:
        began_s = self._clock.monotonic()
        while True:
            await asyncio.sleep(REPORT_S)
            took_s, began_s = self._clock.monotonic() - began_s, self._clock.monotonic()
            values = {
                "model/running": float(self._num_running),
                "model/num_requests": float(self._num_asked),
                "model/tokens_per_s": self._num_tokens / max(took_s, 1e-6),
            }
            self._num_tokens = 0
            self._telemetry.metric(-1, values)


class OtherModel:
    """How one rollout actor reaches a model of that name. Used from one loop, after `join`."""

    def __init__(self, name: str, spec: ModelSpec, *, num_actors: int, max_requests: int, timeout_s: float) -> None:
        """`timeout_s`: for a request, deaths of actors included. Raises ModelError as `ReachedModel.of`."""
        self.name = name
        self.reached = ReachedModel.of(spec, self.generate)
        self._names = tuple(f"model/{name}/{index}" for index in range(num_actors))
        self._refs: Mapping[str, ModelContract] = {}
        self._open = dict.fromkeys(self._names, 0)
        self._rests_until_s = dict.fromkeys(self._names, 0.0)
        self._room = asyncio.Semaphore(max_requests)
        self._timeout_s = timeout_s

    def join(self, ctx: ActorContext) -> None:
        """Ask by the calls of this actor."""
        self._refs = {name: ctx.ref(ModelContract, name) for name in self._names}

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        """One delta. Raises UserCodeError for a refused request, MemberFailed ("environment") without an answer."""
        yield await self._answer(request)

    async def _answer(self, request: GenerateRequest) -> Delta:
        loop = asyncio.get_running_loop()
        until_s, why = loop.time() + self._timeout_s, "all its requests were taken"
        try:
            async with asyncio.timeout_at(until_s), self._room:
                while True:
                    now_s = loop.time()
                    name = min(self._names, key=lambda name: (self._rests_until_s[name] > now_s, self._open[name]))
                    self._open[name] += 1
                    try:
                        ref = with_deadline(self._refs[name], max(until_s - loop.time(), 0.1))
                        return await ref.answer(request)
                    except RequestRefused as error:
                        raise UserCodeError(
                            f'the model "{self.name}" refused: {error.message}', remedy=error.remedy
                        ) from error
                    except (CallError, EngineError) as error:
                        why = error.message
                        if self._rests_until_s[name] <= loop.time():
                            _log.warning('the model "%s": %s; asking again', self.name, error)
                        self._rests_until_s[name] = loop.time() + REST_S
                    finally:
                        self._open[name] -= 1
                    await asyncio.sleep(TIMEOUTS.wire.ask_again_s)
        except TimeoutError:
            raise MemberFailed(
                f'the model "{self.name}" did not answer within {self._timeout_s:g} s: {why}',
                kind="environment",
                remedy=f"see the logs of model/{self.name}/*; raise models.{self.name}.timeout_s",
            ) from None

    async def chat(self, text: str, temperature: float, max_tokens: int) -> tuple[str | None, int]:
        """As a judge asks it: see `rewards/judge.py`."""
        from ..http_client import NoAnswer
        from ..rewards.call import CallFailed

        messages = (Message(role="user", content=text),)
        ids = self.reached.tokenizer.render(messages, add_generation_prompt=True)
        room = self.reached.spec.context_length - len(ids)
        if room < 1:
            raise CallFailed(f"has no room for a text of {len(ids)} tokens", is_refusal=True)
        limit = min(max_tokens, room)
        sampling = replace(self.reached.spec.sampling, temperature=temperature, max_new_tokens=limit, seed=None)
        request = GenerateRequest(request_id="judge", input_ids=np.asarray(ids, np.int32), sampling=sampling)
        try:
            answer = await self._answer(request)
        except MemberFailed as away:
            raise NoAnswer(away.message) from away
        except UserCodeError as refused:
            raise CallFailed(refused.message, is_refusal=True) from refused
        output_ids = cast("list[int]", answer.output_ids.tolist())
        return self.reached.tokenizer.decode(output_ids), len(ids) + len(output_ids)
