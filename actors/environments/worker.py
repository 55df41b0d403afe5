"""The process that environments run in, by the interpreter that has their package: Python 3.11 or newer.

It needs the standard library alone, and imports nothing of myxa. Frames are a length (4 bytes, little endian) and JSON.

    workflow.py                                       here
    {"kind", "id", "args"}                      ->    loads the environment
                                                <-    {"pid"}, or {"message", "remedy"}
    Open(call, row, session_id, ...)            ->
                                                <-    Reached(call, phase)    setup, run, finalize, score, teardown
                                                <-    Asks(call, turn, body)  as to OpenAI's /v1/chat/completions
    Told(call, turn, answer)                    ->
                                                <-    Closed(call)
    Cancel(call)                                ->    teardown, then Closed
                                                <-    Waits(place), Busy(call, place), each second

An environment is a class below with a method for each phase. What blocks runs in a thread of the session's own.
`python worker.py rows` reads the first frame's JSON and prints rows.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import json
import math
import os
import struct
import sys
import sysconfig
import threading
import types
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, cast

LENGTH = struct.Struct("<I")
BEAT_S = 1.0
PHASES = ("setup", "run", "finalize", "score")
KINDS = ("environment", "sandbox", "network", "policy", "user-code")
NETWORK = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "aiohttp", "urllib", "urllib3", "websockets")
MAX_METADATA = 32 << 10
TOO_LONG = "context_length_exceeded"
Row = dict[str, Any]
Message = dict[str, Any]


class Mistake(Exception):
    """Of the run file."""


class Blamed(Exception):
    """A failure whose kind is known."""

    def __init__(self, text: str, kind: str) -> None:
        super().__init__(text)
        self.kind = kind


class NoTurn(Exception):
    """The model has no further turn: `code` says why (max_turns, context_length_exceeded, ...)."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class EnvironmentSession:
    """One rollout in its environment."""

    def __init__(self, worker: Worker, told: Mapping[str, Any]) -> None:
        self.call: int = told["call"]
        self.row: Row = told["row"]
        """messages, tools, label, metadata."""
        self.session_id: str = told["session_id"]
        self.attempt: int = told["attempt"]
        self.is_replay: bool = told["is_replay"]
        self.max_turns: int = told["max_turns"]
        self.messages: list[Message] = list(self.row["messages"])
        self.num_turns = 0
        self.reward: float | None = None
        """None: the sum of what turns earned, if any did; else the run's reward function judges."""
        self.turn_rewards: dict[int, float] = {}
        self.metadata: dict[str, Any] = {}
        self.env: Any = None
        self.tools: list[dict[str, Any]] = []
        self.stack = contextlib.AsyncExitStack()
        """Left in the teardown."""
        self.threads: set[int] = set()
        """That its code runs in now."""
        self._worker = worker
        self._teardown_s: float = told["teardown_s"]
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._pool = ThreadPoolExecutor(1)
        self._is_begun = self._is_ending = False
        self.task = asyncio.get_running_loop().create_task(self._live())

    async def ask(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The policy's answer to a body of OpenAI's chat completions. Raises NoTurn, Blamed if it is refused."""
        self.num_turns += 1
        turn = self.num_turns
        answer = self._answers[turn] = asyncio.get_running_loop().create_future()
        self._worker.put("Asks", call=self.call, turn=turn, body=body)
        try:
            told = await answer
        finally:
            del self._answers[turn]
        if "error" in told:
            text, code = told["error"]["message"], told["error"].get("code")
            raise NoTurn(code, text) if code == TOO_LONG else Blamed(f"the turn was refused: {text}", "environment")
        return told

    async def turn(self, tools: Iterable[Mapping[str, Any]] = ()) -> Message:
        """The model's next turn after `messages`, where it is then entered. Raises NoTurn."""
        if self.num_turns >= self.max_turns:
            raise NoTurn("max_turns", f"{self.max_turns} turns were taken")
        given = {"tools": list(tools)} if tools else {}
        told = await self.ask({"messages": self.messages, **given})
        message: Message = told["choices"][0]["message"]
        self.messages.append({key: value for key, value in message.items() if value is not None})
        return {**message, "is_malformed": told["myxa"]["is_malformed"]}

    def heard(self, text: str, call: Mapping[str, Any] | None = None) -> None:
        """Enter what is said to the model, or what a tool answers that it called."""
        last = self.messages[-1] if self.messages else {"role": ""}
        if call is not None:
            name = call["function"]["name"]
            self.messages.append({"role": "tool", "content": text, "name": name, "tool_call_id": call["id"]})
        elif last["role"] == "user":  # templates want turns
            self.messages[-1] = {**last, "content": "\n\n".join(filter(None, (last["content"], text)))}
        elif text:
            self.messages.append({"role": "user", "content": text})

    def told(self, turn: int, answer: Any) -> None:
        waits = self._answers.get(turn)
        if waits is not None and not waits.done():
            waits.set_result(answer)

    def earned(self, reward: float) -> None:
        """By the last turn."""
        self.turn_rewards[self.num_turns] = self.turn_rewards.get(self.num_turns, 0.0) + float(reward)

    async def called(self, fn: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """What a function returns that may block, or be async. All plain ones of a session share a thread."""

        def run() -> Any:
            self.threads.add(threading.get_ident())
            try:
                return fn(*args, **named)
            finally:
                self.threads.discard(threading.get_ident())

        pool = ThreadPoolExecutor(1) if self.threads else self._pool  # that thread hangs
        returned = await asyncio.get_running_loop().run_in_executor(pool, run)
        return await returned if inspect.isawaitable(returned) else returned

    def cancel(self) -> None:
        """End its phases. Its teardown is not cut."""
        if not self._is_ending:
            self._is_ending = True
            if self._is_begun:
                self.task.cancel()

    async def _live(self) -> None:
        environment, failure, kind = self._worker.environment, "", "environment"
        self._is_begun = True
        try:
            for phase in () if self._is_ending else PHASES:
                self._worker.put("Reached", call=self.call, phase=phase)
                try:
                    await getattr(environment, phase)(self)
                except NoTurn as no:  # what there is, is scored
                    self.metadata["ended_by"] = no.code
            self._check()
        except asyncio.CancelledError:
            failure = "was cancelled"
        except BaseException as error:  # noqa: BLE001 -- any error is reported
            failure, kind = words_of(error), kind_of(error)
        self._is_ending = True
        result = {"reward": self.reward, "turn_rewards": self.turn_rewards, "metadata": self.metadata}
        ended = {"failure": failure, "kind": kind} if failure else result
        self._worker.put("Reached", call=self.call, phase="teardown", **ended)
        teardown = ""
        try:
            async with asyncio.timeout(self._teardown_s):
                try:
                    await environment.teardown(self)
                finally:
                    await self.stack.aclose()
        except BaseException as error:  # noqa: BLE001 -- any error is reported
            teardown = words_of(error)
        for one in self._answers.values():  # nothing will come: whoever waits elsewhere is told
            one.cancel()
        self._pool.shutdown(wait=False)
        del self._worker.sessions[self.call]
        self._worker.put("Closed", call=self.call, is_hanging=bool(self.threads), teardown=teardown)

    def _check(self) -> None:
        for reward in (*self.turn_rewards.values(), *(() if self.reward is None else (self.reward,))):
            if not math.isfinite(reward):
                raise ValueError(f"a reward is {reward}")
        self.metadata = plain(self.metadata)
        if (size := len(json.dumps(self.metadata))) > MAX_METADATA:
            self.metadata = {"left_out": f"{size} bytes of metadata"}


def words_of(error: BaseException) -> str:
    if isinstance(error, TimeoutError) and not str(error):
        return "took too long"
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    frames = [one for one in _frames(error) if not _is_library(one[0])]
    place = f" at {Path(frames[-1][0]).name}:{frames[-1][1]}" if frames else ""
    return f"raised {type(error).__name__}: {' '.join(str(error).split())[:500]}{place}"


def _frames(error: BaseException) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = []
    trace = error.__traceback__
    while trace is not None:
        found.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
        trace = trace.tb_next
    return found


def _is_library(file: str) -> bool:
    return file.startswith((str(Path(__file__).parent), sysconfig.get_path("stdlib"), "<"))


def kind_of(error: BaseException) -> str:
    """Who is to blame; an exception may say so by its attribute `kind`."""
    if (kind := getattr(error, "kind", None)) in KINDS:
        return str(kind)
    bases = {base.__module__.partition(".")[0] for base in type(error).__mro__}
    return "network" if isinstance(error, ConnectionError) or not bases.isdisjoint(NETWORK) else "environment"


def plain(value: Any) -> Any:
    """As JSON has it; what it has no form for becomes text."""
    return json.loads(json.dumps(value, default=str), parse_constant=str)


# -- environments


class Environment:
    """One of a worker, for all its sessions. A phase may be left out."""

    def __init__(self, name: str, args: Mapping[str, Any]) -> None:
        self.name, self.args = name, dict(args)

    def rows(self) -> Iterable[Row]:
        """prompt, label, metadata."""
        raise Mistake("this environment has no rows: name a file in data.train")

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


# -- the process


class Worker:
    """The sessions of this process."""

    def __init__(self, environment: Environment, outgoing: BinaryIO) -> None:
        self.environment = environment
        self.sessions: dict[int, EnvironmentSession] = {}
        self._outgoing = outgoing

    async def run(self, incoming: BinaryIO) -> None:
        """Until the input ends; then all sessions are torn down."""
        loop, over = asyncio.get_running_loop(), asyncio.Event()

        def read() -> None:
            while (told := read_frame(incoming)) is not None:
                loop.call_soon_threadsafe(self._take, told)
            loop.call_soon_threadsafe(over.set)

        async with contextlib.AsyncExitStack() as stack:
            try:
                await self.environment.start(stack)
            except Exception as error:  # noqa: BLE001 -- any error is reported
                write_frame(self._outgoing, refusal(self.environment.name, error))
                return
            write_frame(self._outgoing, {"pid": os.getpid()})
            threading.Thread(target=read, daemon=True).start()
            beating = loop.create_task(self._beat())
            await over.wait()
            beating.cancel()
            for session in self.sessions.values():
                session.cancel()
            if self.sessions:
                await asyncio.wait([one.task for one in self.sessions.values()])

    def _take(self, told: Mapping[str, Any]) -> None:
        if told["type"] == "Open":
            self.sessions[told["call"]] = EnvironmentSession(self, told)
        elif (session := self.sessions.get(told["call"])) is not None:
            if told["type"] == "Told":
                session.told(told["turn"], told["answer"])
            else:
                session.cancel()

    async def _beat(self) -> None:
        while True:
            places = [(call, self._place(session)) for call, session in self.sessions.items()]
            for call, place in places:
                self.put("Busy", call=call, place=place)
            self.put("Waits", place=next((place for _, place in places if place), ""))
            await asyncio.sleep(BEAT_S)

    def _place(self, session: EnvironmentSession) -> str:
        """Where the code of a session is: function, file and line; empty if none runs in a thread."""
        running = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
        for frame in (running.get(thread) for thread in tuple(session.threads)):
            while frame is not None:
                code = frame.f_code
                if not _is_library(code.co_filename):
                    return f"{code.co_qualname} ({Path(code.co_filename).name}:{frame.f_lineno})"
                frame = frame.f_back
        return ""

    def put(self, kind: str, /, **said: Any) -> None:
        write_frame(self._outgoing, {"type": kind, **said})


def read_frame(stream: BinaryIO) -> Any:
    """None at the end of the input."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    body = stream.read(size)
    return json.loads(body) if len(body) == size else None


def write_frame(stream: BinaryIO, message: Mapping[str, Any]) -> None:
    body = json.dumps(message, default=str, ensure_ascii=False).encode(
        errors="replace"
    )  # names of files may be no text
    data = memoryview(LENGTH.pack(len(body)) + body)
    with contextlib.suppress(OSError):  # its reader is gone; the end of the input says so too
        while data:
            data = data[stream.write(data) :]


def refusal(name: str, error: BaseException) -> dict[str, Any]:
    """In place of the first frame: it cannot be loaded."""
    words = str(error) if isinstance(error, Mistake) else words_of(error)
    remedy = f"mend it; it was loaded by {sys.executable}"
    return {"message": f"{name}: {words}", "remedy": remedy, "is_config": isinstance(error, Mistake | ImportError)}


def main() -> None:
    """Pipes get new numbers, so that an environment that prints does not write into them."""
    incoming, outgoing = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    is_for_rows = sys.argv[1:] == ["rows"]
    spec = json.loads(incoming.read()) if is_for_rows else read_frame(incoming)
    if spec is None:
        sys.exit()
    try:
        kinds = importlib.import_module(f"{__package__}.adapters").ENVIRONMENTS
        environment = kinds[spec["kind"]](spec["id"], spec["args"])
        if is_for_rows:
            for row in environment.rows():
                outgoing.write(json.dumps(plain(row)).encode() + b"\n")
            sys.exit()
    except Exception as error:  # noqa: BLE001 -- any error is reported
        told = refusal(f"{spec['kind']} {spec['id']}", error)
        if is_for_rows:
            sys.exit(told["message"])
        write_frame(outgoing, told)
        sys.exit()
    asyncio.run(Worker(environment, outgoing).run(incoming))
    os._exit(0)  # threads that hang would be waited for


if __name__ == "__main__":
    package = sys.modules["myxa_environments"] = types.ModuleType("myxa_environments")
    package.__path__ = [str(Path(__file__).parent)]
    importlib.import_module("myxa_environments.worker").main()
