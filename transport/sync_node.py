"""A node for hosts without an event loop of asyncio: it runs in a thread of its own, behind functions that block.

References are typed as ever; `call` takes a method of one and its arguments, and waits as long as the call's deadline.
Any number of the host's threads may call.

    with NodeThread(name="judge", rdzv=Rendezvous.load(path)) as node:
        stats = node.call(node.ref(BufferContract, "buffer").stats)

Touches nothing of the host: its loop is not the current one of any thread, no signal handler, no atexit. A host that
forgets to close it and ends: the thread sees that the main thread has ended and closes the node, so that Python, which
waits for threads, can end.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import math
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from pathlib import Path
from typing import Any, ParamSpec, Required, Self, TypedDict, TypeVar, Unpack

import msgspec
import uvloop

from ..core.clock import Clock
from ..core.errors import CallError, DeadlineExceeded, LaunchError, NotSent, WouldDeadlock
from ..core.handlers import HandlerSpec, handlers_of
from ..core.refs import ActorGroup, Ref, make_ref
from .address import Rendezvous
from .node import Node, guard, release
from .security import KeyPair

A = TypeVar("A")
T = TypeVar("T")
P = ParamSpec("P")

SLACK_S = 2.0
"""How much longer than its deadline a call is waited for: the node ends it itself, unless its loop is held up."""
START_LIMIT_S = 300.0


class AttachOptions(TypedDict, total=False):
    """As `Node.attach` takes them, without `network`: that of one process belongs to one loop."""

    name: Required[str]
    rdzv: Rendezvous | None
    run_dir: Path | str | None
    node_rank: int
    clock: Clock | None
    key: KeyPair | None
    tcp: str
    timeout_s: float
    turn_budget_s: float
    journal: Path | str | None


class HomeCaller:
    """Carries the calls of a `NodeThread`'s references, and only from the node's own loop: a future of one loop that is
    resolved on another thread is lost or wakes no task. Implements `core.refs.RequestSender`."""

    def __init__(self, node: Node, loop: asyncio.AbstractEventLoop) -> None:
        self._node = node
        self._loop = loop

    async def request(self, target: str, spec: HandlerSpec, request: msgspec.Struct, deadline_s: float | None) -> Any:
        if asyncio.get_running_loop() is not self._loop:
            raise LaunchError(
                f"{target}.{spec.name}: this reference belongs to the loop of {self._node.name}, not to this one",
                remedy=f"node.call(ref.{spec.name}, ...), or asyncio.wrap_future(node.submit(ref.{spec.name}, ...))",
            )
        return await self._node.caller.request(target, spec, request, deadline_s)


def _called(method: Callable[..., Any]) -> tuple[str, float | None]:
    """Actor and handler, and the deadline of a reference's method. Raises LaunchError for anything else."""
    ref = getattr(method, "__self__", None)
    spec = handlers_of(ref.ref_contract).by_name.get(method.__name__) if isinstance(ref, Ref) else None
    if ref is None or spec is None:
        raise LaunchError(
            f"{method!r} is no method of a reference",
            remedy="node.call(ref.handler, ...); for other coroutines node.run(lambda: ..., timeout_s=...)",
        )
    declared_s = spec.declaration.deadline_s
    return f"{ref.ref_target}.{spec.name}", declared_s if ref.ref_deadline_s is None else ref.ref_deadline_s


HOST_LOOK_S = 0.1
"""How often the thread looks whether its host has ended."""
FORGOTTEN_GRACE_S = 1.0
CLOSE_SLACK_S = 30.0

LoopFactory = Callable[[], asyncio.AbstractEventLoop]

_log = logging.getLogger("myxa.transport")
_threads: set[threading.Thread] = set()
"""Of all nodes of this process: they wait for the host's threads, not for each other."""


class NodeThread:
    """A node whose loop runs in a thread of its own. Calls may come from any thread but that one."""

    def __init__(self, *, loop_factory: LoopFactory = uvloop.new_event_loop, **options: Unpack[AttachOptions]) -> None:
        """Start the thread and join the system; arguments and errors as of `Node.attach`. `loop_factory`: uvloop is
        faster, but its first loop leaves a pipe (two descriptors) in the process; `asyncio.SelectorEventLoop` leaves
        nothing."""
        if options.get("network") is not None:
            raise LaunchError(
                f"{options['name']}: an in-process network connects nodes of one loop, and this node has its own",
                remedy="leave `network` out: nodes of one host find each other by sockets",
            )
        self._gate = threading.Lock()
        self._is_closing = False
        self._grace_s = 0.0
        self._wakes: asyncio.Event
        self._loop: asyncio.AbstractEventLoop
        attached: concurrent.futures.Future[None] = concurrent.futures.Future()
        name = f"myxa {options['name']}"
        self._thread = threading.Thread(target=self._main, args=(loop_factory, options, attached), name=name)
        _threads.add(self._thread)
        self._thread.start()
        try:
            attached.result()
        except BaseException:
            self._is_closing = True  # seen as soon as attaching has ended, which has a limit
            self._thread.join()
            raise
        guard(self)

    def submit(
        self, method: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> concurrent.futures.Future[T]:
        """Begin a call without waiting for it. Cancelling the future cancels the call."""

        async def work() -> T:
            return await method(*args, **kwargs)

        return self._submit(work)

    def run(self, make: Callable[[], Coroutine[Any, Any, T]], timeout_s: float) -> T:
        """Run a coroutine on the node's loop and wait for it, at most `timeout_s`, then it is cancelled. Raises
        DeadlineExceeded after that, and what the coroutine raises."""
        if threading.current_thread() is self._thread:
            raise WouldDeadlock(
                f"the thread of {self.name} would wait for itself", remedy="await references inside handlers"
            )
        future = self._submit(make)
        try:
            return future.result(None if timeout_s == math.inf else timeout_s)
        except TimeoutError:
            if future.done():
                return future.result()  # it came in the last moment, or this error is its own
            raise DeadlineExceeded(
                f"{self.name}: no answer within {timeout_s:g} s; its thread is at {self._place()}",
                remedy="a handler that blocks holds up all of the node's work",
            ) from None
        except concurrent.futures.CancelledError:
            raise CallError(f"{self.name} was closed while the call was under way") from None
        finally:
            future.cancel()

    def close(self, grace_s: float = 5.0) -> None:
        """Finish what was accepted (within `grace_s`), stop the actors, leave, release everything. Again: nothing."""
        if threading.current_thread() is self._thread:
            raise WouldDeadlock(f"{self._thread.name} cannot wait for its own end", remedy="close it from the host")
        with self._gate:
            if not self._is_closing:
                self._is_closing = True
                self._grace_s = grace_s
                with contextlib.suppress(RuntimeError):  # the loop ended by itself
                    self._loop.call_soon_threadsafe(self._wakes.set)
        self._thread.join(grace_s + CLOSE_SLACK_S)
        if self._thread.is_alive():
            raise DeadlineExceeded(f"{self._thread.name} does not end; it is at {self._place()}")

    def _submit(self, make: Callable[[], Coroutine[Any, Any, T]]) -> concurrent.futures.Future[T]:
        async def work() -> T:
            return await make()

        with self._gate:
            coro = work()
            try:
                if self._is_closing:
                    raise RuntimeError
                return asyncio.run_coroutine_threadsafe(coro, self._loop)
            except RuntimeError:
                coro.close()
                raise NotSent(f"{self._thread.name} is closed") from None

    def _place(self) -> str:
        frame = sys._current_frames().get(self._thread.ident or 0)  # pyright: ignore[reportPrivateUsage]  # no other way
        if frame is None:
            return "its end"
        innermost = traceback.extract_stack(frame)[-1]
        return f"{innermost.filename}:{innermost.lineno}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ref(self, contract: type[A], name: str) -> A:
        return make_ref(self._caller, contract, name)

    def group(self, contract: type[A], members: str | Sequence[str]) -> ActorGroup[A]:
        """See `Node.group`; to be used by `run`: `node.run(lambda: ranks.all(TrainerContract.publish, 3), 60.0)`."""
        return ActorGroup(self._caller, contract, members, self._node.peers)

    def call(self, method: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a reference's method and wait for the answer: `node.call(buffer.stats)`. Ends by the call's own deadline
        (`with_deadline(buffer, 5)` changes it) with the outcomes of every call."""
        target, deadline_s = _called(method)

        async def work() -> T:
            return await method(*args, **kwargs)

        try:
            return self.run(work, math.inf if deadline_s is None else deadline_s + SLACK_S)
        except DeadlineExceeded as error:
            error.callee = error.callee or target
            raise

    def start(self, actor: A, name: str, timeout_s: float = START_LIMIT_S) -> A:
        """Host an actor on the node's loop, once its `on_start` is through; returns a reference. See `Node.start`."""
        self.run(lambda: self._node.start(actor, name), timeout_s)
        return self.ref(type(actor), name)

    def stop(self, name: str, why: str = "stopped", grace_s: float = 5.0) -> None:
        """Stop one actor cleanly. Raises NoSuchActor if it is not here."""
        self.run(lambda: self._node.stop(name, why, grace_s), grace_s + START_LIMIT_S)

    def wait_for(self, *names: str, timeout_s: float) -> None:
        """Until all these actors are registered; LaunchError naming the missing ones."""
        self.run(lambda: self._node.wait_for(*names, timeout_s=timeout_s), timeout_s + SLACK_S)

    @contextlib.contextmanager
    def busy(self, limit_s: float, why: str) -> Generator[None, None, None]:
        """While inside, but for `limit_s` at most, no peer takes this node for hung, though the
        interpreter lock is held. See `ActorContext.busy`."""
        declared = self._node.busy(self.name, limit_s, why)

        async def begin() -> None:
            declared.__enter__()

        async def end() -> None:
            declared.__exit__(None, None, None)

        self.run(begin, SLACK_S)
        try:
            yield
        finally:
            with contextlib.suppress(NotSent):  # it was closed meanwhile
                self.run(end, SLACK_S)

    @property
    def name(self) -> str:
        return self._node.name

    @property
    def rendezvous(self) -> Rendezvous:
        return self._node.rendezvous

    @property
    def epoch(self) -> int:
        return self._node.epoch

    @property
    def failure(self) -> BaseException | None:
        return self._node.failed.result() if self._node.failed.done() else None

    def peers(self, prefix: str) -> tuple[str, ...]:
        return self._node.peers(prefix)

    def counters(self) -> dict[str, int]:
        return self._node.counters()

    def _main(
        self, loop_factory: LoopFactory, options: AttachOptions, attached: concurrent.futures.Future[None]
    ) -> None:
        try:
            with asyncio.Runner(loop_factory=loop_factory) as runner:
                runner.run(self._live(options, attached))
        except BaseException as error:  # noqa: BLE001  # raised in the host's thread, or logged
            if attached.done():
                _log.exception("%s ended", self._thread.name)
            else:
                attached.set_exception(error)
        finally:
            _threads.discard(self._thread)

    async def _live(self, options: AttachOptions, attached: concurrent.futures.Future[None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._wakes = asyncio.Event()
        self._node = await Node.attach(**options)
        self._caller = HomeCaller(self._node, self._loop)
        attached.set_result(None)
        try:
            while not self._is_closing and not self._host_has_ended():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(HOST_LOOK_S):
                        await self._wakes.wait()
        finally:
            await self._end()

    async def _end(self) -> None:
        with self._gate:
            if not self._is_closing:
                _log.warning("%s: the program ended without closing it", self._thread.name)
                self._is_closing = True
                self._grace_s = FORGOTTEN_GRACE_S
        release(self)
        await self._node.close(self._grace_s)

    def _host_has_ended(self) -> bool:
        if threading.main_thread().is_alive():
            return False
        return not any(t.is_alive() and not t.daemon and t not in _threads for t in threading.enumerate())
