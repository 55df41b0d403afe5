"""A session of an environment, and what a kind of environment is: a workflow of phases in a worker (`worker.py`).

A session asks for turns as an agent asks the gateway: with the whole conversation, so what is trained is what was
recorded (`gateway/session.py`). Plain calls of an environment run in a thread of the session's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

from msgspec.structs import replace

from ...core.errors import ConfigError
from ...core.samples import Prompt, Sample
from ..gateway.answering import Answering, read_exchange
from ..gateway.openai_chat import ChatCompletion
from ..gateway.session import AgentSession, RequestFault, task_of
from ..user_code.process import CALL, CallThreads
from ..workflows.episode import WorkflowContext
from ..workflows.failures import EnvironmentFailure

T = TypeVar("T")
Row = dict[str, Any]
Message = dict[str, Any]
TOO_LONG = "context_length_exceeded"


class NoTurn(Exception):
    """The model has no further turn: the text says why (max_turns, context_length_exceeded)."""


class Environment:
    """One of a worker, for all its sessions. A phase may be left out."""

    def __init__(self, name: str, args: Mapping[str, Any]) -> None:
        self.name, self.args = name, dict(args)

    def rows(self) -> Iterable[Row]:
        """prompt, label, metadata. Raises ConfigError where it has none of its own."""
        raise ConfigError("this environment has no rows", remedy="name a file in data.train")

    async def start(self, stack: contextlib.AsyncExitStack) -> None:
        """Once in a process, before the first session. The stack is left at its end."""

    async def setup(self, session: EnvironmentSession) -> None:
        """Until the first turn can be asked for."""

    async def run(self, session: EnvironmentSession) -> None:
        """All turns."""

    async def finalize(self, session: EnvironmentSession) -> None:
        """What follows the last turn."""

    async def score(self, session: EnvironmentSession) -> None:
        """Say the reward."""

    async def teardown(self, session: EnvironmentSession) -> None:
        """Always runs, in whatever phase the session ended."""


class EnvironmentSession:
    """One rollout in its environment."""

    def __init__(self, environment: Environment, name: str, malformed_reward: float) -> None:
        """`name`: of its table in the run file."""
        self._environment, self._name, self._malformed_reward = environment, name, malformed_reward
        self.num_turns = 0
        self.reward: float | None = None
        """None: the sum of what turns earned, if any did; else the run's reward function judges."""
        self.turn_rewards: dict[int, float] = {}
        self.metadata: dict[str, Any] = {}
        self.env: Any = None
        self.tools: list[dict[str, Any]] = []
        self._answers: dict[int, str] = {}
        """Turn -> id of the answer."""
        self._malformed: set[int] = set()
        self._thread = CallThreads(1)
        self._entered: list[tuple[asyncio.Task[None], asyncio.Future[Any]]] = []
        self._is_over = asyncio.Event()

    # -- for environments

    @property
    def seed(self) -> Any:
        """The same for all members of a group: they begin alike."""
        return self.row["metadata"].get("seed", self.row["metadata"]["row"])

    async def ask(self, body: bytes, path: str = ChatCompletion.path) -> dict[str, Any]:
        """The policy's answer to a body of OpenAI's or Anthropic's API. Raises RequestFault."""
        self.num_turns += 1
        turn = self.num_turns
        answering = Answering(read_exchange(path, body, self._session, str(turn)), self._session)
        with answering.delivering():
            answer = await answering.body()
        self._answers[turn] = answer["myxa"]["answers"][0]
        if answer["myxa"]["is_malformed"]:
            self._malformed.add(turn)
        return answer

    async def turn(self, tools: Iterable[Mapping[str, Any]] = ()) -> Message:
        """The model's next turn after `messages`, where it is then entered. Raises NoTurn."""
        if self.num_turns >= self.ctx.max_turns:
            raise NoTurn("max_turns")
        body = {"messages": self.messages, **({"tools": list(tools)} if tools else {})}
        try:
            reply = await self.ask(json_of(body))
        except RequestFault as fault:
            if fault.kind == "too-long":
                raise NoTurn(TOO_LONG) from None
            raise EnvironmentFailure(f"the turn was refused: {fault.text}") from fault
        message: Message = reply["choices"][0]["message"]
        self.messages.append({key: value for key, value in message.items() if value is not None})
        return {**message, "is_malformed": reply["myxa"]["is_malformed"]}

    def heard(self, text: str, call: Mapping[str, Any] | None = None) -> None:
        """Enter what is said to the model, or what a tool answers that it called."""
        message = self.messages[-1] if self.messages else {"role": ""}
        if call is not None:
            name = call["function"]["name"]
            self.messages.append({"role": "tool", "content": text, "name": name, "tool_call_id": call["id"]})
        elif message["role"] == "user":  # templates want turns
            self.messages[-1] = {**message, "content": "\n\n".join(filter(None, (message["content"], text)))}
        elif text:
            self.messages.append({"role": "user", "content": text})

    def earned(self, reward: float) -> None:
        self.turn_rewards[self.num_turns] = self.turn_rewards.get(self.num_turns, 0.0) + float(reward)

    async def called(self, fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """What a function returns that may block, or be async. All plain ones of a session share a thread."""
        call = CALL.get()
        threads = CallThreads(1) if call is not None and call.threads else self._thread  # that one hangs
        returned = await asyncio.get_running_loop().run_in_executor(threads, partial(fn, *args, **options))
        return await returned if inspect.isawaitable(returned) else returned

    async def entered(self, context: contextlib.AbstractAsyncContextManager[T]) -> T:
        """What a context gives. It is left in the teardown, by the task that entered it."""
        inside: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        async def live() -> None:
            async with context as value:
                inside.set_result(value)
                await self._is_over.wait()

        task = asyncio.ensure_future(live())  # noqa: TID251 -- ended by the teardown
        self._entered.append((task, inside))
        await asyncio.wait({task, inside}, return_when=asyncio.FIRST_COMPLETED)
        return inside.result() if inside.done() else task.result()  # pyright: ignore[reportReturnType] -- it raises

    # -- the phases

    async def setup(self, ctx: WorkflowContext, prompt: Prompt) -> None:
        assert ctx.clients is not None
        self.ctx, row = ctx, task_of(prompt)
        self._session: AgentSession = ctx.clients.session
        self.row: Row = {**row, "metadata": {"row": prompt.row, **row["metadata"]}}
        """messages, tools, label, metadata."""
        self.messages: list[Message] = list(self.row["messages"])
        await self._environment.setup(self)

    async def run(self, ctx: WorkflowContext, prompt: Prompt) -> tuple[Sample, ...]:
        try:
            await self._environment.run(self)
        except NoTurn as no:  # what there is, is scored
            self.metadata["ended_by"] = str(no)
        malformed = self._malformed if self._malformed_reward else set[int]()
        for turn in (self.turn_rewards.keys() | malformed) & self._answers.keys():
            reward = self.turn_rewards.get(turn, 0.0) + self._malformed_reward * (turn in malformed)
            self._session.reward_turn(self._answers[turn], _finite(reward))
        samples = self._session.samples()
        if not samples:
            raise EnvironmentFailure("it ended without a turn of the model")
        metadata = json.loads(json_of(self.metadata), parse_constant=str)
        metadata |= {"environment": self._name, "num_malformed": len(self._malformed)}
        return (*samples[:-1], replace(samples[-1], metadata=metadata))

    async def finalize(self, ctx: WorkflowContext, samples: object) -> None:
        await self._environment.finalize(self)

    async def score(self, ctx: WorkflowContext, samples: tuple[Sample, ...]) -> float | None:
        await self._environment.score(self)
        if self.reward is None:
            return samples[-1].reward
        return _finite(self.reward + self._malformed_reward * len(self._malformed))

    async def teardown(self) -> None:
        try:
            await self._environment.teardown(self)
        finally:
            self._is_over.set()
            for task, inside in self._entered:
                if not inside.done():
                    task.cancel()
            ends = await asyncio.gather(*(task for task, _ in self._entered), return_exceptions=True)
            self._thread.shutdown(wait=False)
        for end in ends:
            if isinstance(end, Exception):
                raise end


def json_of(value: object) -> bytes:
    """What has no form in JSON becomes text; names of files may be no text."""
    return json.dumps(value, default=str, ensure_ascii=False).encode(errors="replace")


def _finite(reward: float) -> float:
    if not math.isfinite(reward):
        raise ValueError(f"a reward is {reward}")
    return reward
