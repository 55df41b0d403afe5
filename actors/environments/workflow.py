"""The workflow `environment`: a rollout is what the policy does in an environment of the run file.

Environments run in worker processes, by interpreters of their own (`worker.py`). A worker asks for turns as an agent
asks the gateway: with the whole conversation, so what is trained is what was recorded (`gateway/session.py`). Each
phase has a limit. A session whose worker ends, falls silent or is late fails by its environment, so it is tried again
elsewhere, then masked. Teardown runs in every case, also when this process is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import sys
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from ...core.config.run import EnvironmentSettings
from ...core.errors import DataError, FailureKind, MemberFailed
from ...core.samples import Prompt, Sample
from ..gateway.answering import Answering, read_exchange
from ..gateway.openai_chat import ChatCompletion, openai_fault
from ..gateway.server import task_of
from ..gateway.session import AgentSession, RequestFault
from ..user_code.process import Call, Ended, Lost, Waits, WorkerPool
from ..workflows.episode import Episode, WorkflowContext

_log = logging.getLogger(__name__)
WORKER = str(Path(__file__).with_name("worker.py"))
SLACK_S = 5.0
"""For a worker to say that a teardown is over whose limit has passed."""
Phase = Literal["setup", "run", "finalize", "score", "teardown"]


class Open(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A session begins."""

    call: int
    row: dict[str, Any]
    session_id: str
    attempt: int
    is_replay: bool
    max_turns: int
    teardown_s: float


class Told(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The turn that was asked for, or why there is none."""

    call: int
    turn: int
    answer: dict[str, Any]


class Asks(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """For a turn of the policy."""

    call: int
    turn: int
    body: msgspec.Raw


class Reached(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A phase begins; with `teardown`, what came of the others."""

    call: int
    phase: Phase
    failure: str = ""
    kind: FailureKind = "environment"
    reward: float | None = None
    turn_rewards: dict[int, float] = {}
    metadata: dict[str, Any] = {}


class Closed(Ended, frozen=True, kw_only=True, tag=True):
    """The teardown is over."""

    teardown: str = ""
    """What went wrong in it."""


class Busy(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Where the code of a session is: function, file and line; empty: none runs."""

    call: int
    place: str


class _Answered:
    """A turn was given to the worker."""


from_worker = msgspec.json.Decoder(Asks | Reached | Closed | Busy | Waits)


class EnvironmentPool(WorkerPool):
    """The workers of one environment, with at most `concurrency` sessions each."""

    def __init__(self, name: str, of: EnvironmentSettings, *, max_workers: int, environ: Mapping[str, str]) -> None:
        super().__init__(
            (of.python or sys.executable, "-P", WORKER),
            {"kind": of.kind, "id": of.id, "args": of.args},
            f'environment "{name}"',
            from_worker,
            max_workers=max_workers,
            max_calls=of.concurrency,
            grace_s=of.teardown_s,
        )
        self._env, self._silent_s = {**environ, **of.env}, of.silence_s
        self.name, self.settings = name, of
        self._num_open = 0
        self._room = asyncio.Event()

    @contextlib.asynccontextmanager
    async def opened(self, episode: Episode) -> AsyncGenerator[Call]:
        """A call, once there is room. Raises as `calling`."""
        with episode.waits_for("environment", f"{self.name} (room in a worker)"):
            while self._num_open >= self.max_workers * self.settings.concurrency:
                self._room.clear()
                await self._room.wait()
        self._num_open += 1
        try:
            async with self.calling() as call:
                yield call
        finally:
            self._num_open -= 1
            self._room.set()

    def resize(self, num: int) -> None:
        super().resize(num)
        self._room.set()


class EnvironmentWorkflow:
    """One per rollout actor."""

    def __init__(
        self, environments: Mapping[str, EnvironmentSettings], *, max_workers: int, environ: Mapping[str, str]
    ) -> None:
        """`environ`: of this process, for all workers."""
        self.pools = {
            name: EnvironmentPool(name, of, max_workers=max_workers, environ=environ)
            for name, of in environments.items()
        }

    async def start(self) -> None:
        """Have one worker of each load its environment. Raises ConfigError or UserCodeError if it cannot."""
        await asyncio.gather(*(pool.take() for pool in self.pools.values()))

    async def close(self) -> None:
        await asyncio.gather(*(pool.close() for pool in self.pools.values()))

    def resize(self, num: int) -> None:
        """The number of workers of each environment at most; what runs in others comes to its end there."""
        for pool in self.pools.values():
            pool.resize(num)

    async def __call__(self, ctx: WorkflowContext, prompt: Prompt) -> tuple[Sample, ...]:
        """One rollout: its samples. Raises what the engine raised, MemberFailed for a fault of the environment."""
        pool = self._pool_of(prompt)
        session = AgentSession(ctx.episode, ctx.tokenizer)
        async with pool.opened(ctx.episode) as call:
            one = _Play(pool, call, ctx, session)
            try:
                await one.play(prompt)
            except Lost as lost:
                is_bystander = lost.culprit not in (-1, call.number)
                raise one.failed(
                    f"lost its worker in the phase {one.phase}: {lost}", is_bystander=is_bystander
                ) from None
            finally:
                await one.close()
        return one.samples()

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


class _Play:
    """One session in a worker."""

    def __init__(
        self,
        pool: EnvironmentPool,
        call: Call,
        ctx: WorkflowContext,
        session: AgentSession,
    ) -> None:
        self._pool, self._call, self._ctx, self._session = pool, call, ctx, session
        self._waits = contextlib.ExitStack()
        self.phase: Phase = "setup"
        self._place = ""
        self._loop = asyncio.get_running_loop()
        self._began_s = self._since_s = self._loop.time()
        """Of the phase; and of what its limit counts."""
        self._drawing: set[asyncio.Task[None]] = set()
        self._answers: dict[int, str] = {}
        """Turn -> id of the answer."""
        self._malformed: set[int] = set()
        self._end: Reached | None = None

    def failed(self, words: str, kind: FailureKind = "environment", *, is_bystander: bool = False) -> MemberFailed:
        """With the environment, the session and the worker that failed."""
        place = f"(session {self._ctx.session_id}, worker process {self._call.worker.pid})"
        text = f'environment "{self._pool.name}" {words} {place}'
        remedy = "see the actor's log: what it did there"
        return MemberFailed(text, kind=kind, remedy=remedy, is_bystander=is_bystander)

    async def play(self, prompt: Prompt) -> None:
        """To its end. Raises MemberFailed, Lost, and what the engine raised."""
        ctx, row = self._ctx, task_of(prompt)
        await self._call.worker.send(
            Open(
                call=self._call.number,
                row={**row, "metadata": {"row": prompt.row, **row["metadata"]}},
                session_id=ctx.session_id,
                attempt=ctx.attempt,
                is_replay=ctx.is_replay,
                max_turns=ctx.max_turns,
                teardown_s=self._pool.settings.teardown_s,
            )
        )
        while True:
            try:
                async with asyncio.timeout_at(self._due_s()):
                    event = await self._call.inbox.get()
            except TimeoutError:
                if self._end is None:
                    raise self._late() from None
                self._call.worker.kill(self._call.number)
                event = Closed(call=self._call.number, teardown="did not end; its worker was killed")
            if isinstance(event, Closed):
                if event.teardown:
                    _log.warning("%s", self.failed(f"was not torn down: {event.teardown}").message)
                break
            self._heard(event)
        if self._end is None or self._end.failure:
            end = self._end or Reached(call=0, phase="teardown", failure="ended without a word")
            raise self.failed(f"failed: {end.failure}", end.kind)

    def _heard(self, event: object) -> None:
        if isinstance(event, BaseException):
            raise event
        if isinstance(event, Reached):
            self._reach(event.phase)
            self._end = event if event.phase == "teardown" else None
        elif isinstance(event, Asks):
            task = asyncio.ensure_future(self._drawn(event))  # noqa: TID251 -- ended by close
            self._drawing.add(task)
            task.add_done_callback(self._drawing.discard)
        elif isinstance(event, Busy):
            self._place = event.place
        elif isinstance(event, _Answered):
            self._place, self._since_s = "", self._loop.time()

    def _reach(self, phase: Phase) -> None:
        now_s = self._loop.time()
        self._waits.close()
        name = "step" if phase == "run" else phase
        self._waits.enter_context(self._ctx.episode.waits_for("environment", f"{self._pool.name} {name}"))
        self.phase, self._began_s, self._since_s, self._place = phase, now_s, now_s, ""

    def _due_s(self) -> float:
        of, run_due_s = self._pool.settings, math.inf
        if self.phase == "run":
            run_due_s = self._began_s + self._ctx.run_s
            if any(not one.done() for one in self._drawing):  # it waits for the model
                return run_due_s
        limit_s: float = of.step_s if self.phase == "run" else getattr(of, f"{self.phase}_s")
        return min(run_due_s, self._since_s + limit_s + (SLACK_S if self.phase == "teardown" else 0.0))

    def _late(self) -> MemberFailed:
        of, name = self._pool.settings, "step" if self.phase == "run" else self.phase
        if self.phase == "run" and self._loop.time() >= self._began_s + self._ctx.run_s:
            return self.failed(f"did not finish within {self._ctx.run_s:g} s (rollout.timeout_s)")
        limit_s: float = getattr(of, f"{name}_s")
        place = f" at {self._place}" if self._place else ""
        return self.failed(f"did not end its {name} within {limit_s:g} s{place} ({name}_s)")

    async def _drawn(self, asks: Asks) -> None:
        session = self._session
        try:
            exchange = read_exchange(ChatCompletion.path, bytes(asks.body), session, str(asks.turn))
            answering = Answering(exchange, session)
            answer = await answering.whole()
            answering.delivered()
            self._answers[asks.turn] = answer["myxa"]["answers"][0]
            if answer["myxa"]["is_malformed"]:
                self._malformed.add(asks.turn)
        except RequestFault as fault:
            if session.fault is not None:
                self._call.inbox.put_nowait(session.fault)
                return
            answer = openai_fault(fault)
        await self._call.worker.send(Told(call=self._call.number, turn=asks.turn, answer=answer))
        self._call.inbox.put_nowait(_Answered())

    async def close(self) -> None:
        """End the turns under way."""
        self._waits.close()
        for one in self._drawing:
            one.cancel()
        if self._drawing:
            await asyncio.wait(self._drawing)
        await self._session.close()

    def samples(self) -> tuple[Sample, ...]:
        """Raises MemberFailed where there was no turn."""
        assert self._end is not None
        of, end = self._pool.settings, self._end
        earned, reward = dict(end.turn_rewards), end.reward
        if of.malformed_reward:
            for turn in self._malformed:
                earned[turn] = earned.get(turn, 0.0) + of.malformed_reward
            reward = None if reward is None else reward + of.malformed_reward * len(self._malformed)
        for turn, value in earned.items():
            if turn in self._answers:
                self._session.reward_turn(self._answers[turn], value)
        found = self._session.samples(reward)
        if not found:
            raise self.failed("ended without a turn of the model")
        told = {**end.metadata, "environment": self._pool.name, "num_malformed": len(self._malformed)}
        return (*found[:-1], replace(found[-1], metadata=told))
