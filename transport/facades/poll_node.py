"""A node that its host turns by hand: for programs with a busy loop of their own, such as an engine's scheduler.

    node = PollNode(name="scheduler/0", rdzv=Rendezvous.load(path))
    node.start(Engine(), "engine/0")
    while True:
        node.poll(max_messages=64)      # takes what is there, never waits
        ...                             # the host's own step

No thread, and no loop of the host is needed or touched. Whoever waits in `select` or `epoll` adds `node.fileno()` and
polls when it is readable; whoever does not, polls at least some twenty times a second, for deadlines run by it.
"""

from __future__ import annotations

import concurrent.futures
import math
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, ParamSpec, TypeVar, Unpack

from ...core.errors import CallError, DeadlineExceeded, NotSent
from ..fork_guard import guard, release
from ..node import Node
from .stepped_loop import SteppedLoop
from .sync_node import AttachOptions, HomeCaller, SyncNode, check_options

T = TypeVar("T")
P = ParamSpec("P")

MAX_MESSAGES = 256
CLOSE_SLACK_S = 30.0


class PollNode(SyncNode):
    """See the module's head. Belongs to the thread that made it; another one, or a handler of its own, is refused."""

    def __init__(self, **options: Unpack[AttachOptions]) -> None:
        """Join the system; arguments and errors as of `Node.attach`. Waits until that is done."""
        check_options(options)
        self._is_closed = False
        self._loop = SteppedLoop(options["name"])
        try:
            limit_s = options.get("timeout_s", 10.0) + CLOSE_SLACK_S
            self._node = self._loop.run(Node.attach(**options), limit_s)
        except BaseException:
            self._is_closed = True
            self._loop.close()
            raise
        self._caller = HomeCaller(self._node, self._loop.loop)
        self._turn = self._node.turn
        guard(self)

    def poll(self, max_messages: int = MAX_MESSAGES, timeout_s: float = 0.0) -> int:
        """Do what is to be done and return the number of messages taken in.

        Takes at most `max_messages` and goes on for `turn_budget_s` at most; what is left is done by the next call.
        Waits up to `timeout_s` for the first message, 0: not at all. What handlers do between two awaits is done in
        here: a host that must not be held up keeps them short.
        """
        self._refuse_closed()
        if max_messages < 1 or timeout_s < 0:
            raise ValueError(f"max_messages = {max_messages} and timeout_s = {timeout_s:g} leave nothing to do")
        turn = self._turn
        before = turn.num_taken
        turn.max_taken = before + max_messages

        give_back_at = math.inf

        def has_enough(is_idle: bool) -> bool:
            nonlocal give_back_at
            num_taken = turn.num_taken - before
            if is_idle:
                return num_taken > 0
            now = time.monotonic()
            give_back_at = min(give_back_at, now + turn.turn_s)
            return num_taken >= max_messages or now >= give_back_at

        try:
            self._loop.step(timeout_s, has_enough)
        finally:
            turn.max_taken = turn.UNLIMITED
        return turn.num_taken - before

    def fileno(self) -> int:
        """A descriptor that is readable when `poll` has something to do, deadlines included; for select or epoll."""
        self._refuse_closed()
        return self._loop.fileno()

    def submit(
        self, method: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> concurrent.futures.Future[T]:
        """Begin a call; polling carries it on. `future.done()` says whether it has ended."""
        self._refuse_closed()
        future: PolledFuture[T] = PolledFuture()

        async def work() -> T:
            return await method(*args, **kwargs)

        self._loop.start(work(), future)
        return future

    def run(self, make: Callable[[], Coroutine[Any, Any, T]], timeout_s: float) -> T:
        """Poll until that coroutine has ended; other messages are handled meanwhile."""
        self._refuse_closed()
        try:
            return self._loop.run(make(), timeout_s)
        except TimeoutError as error:
            if error.args:
                raise
            raise DeadlineExceeded(
                f"{self.name}: no answer within {timeout_s:g} s", remedy="is a handler of this node blocking?"
            ) from None

    def close(self, grace_s: float = 5.0) -> None:
        if self._is_closed:
            return
        self.run(lambda: self._node.close(grace_s), grace_s + CLOSE_SLACK_S)
        self._is_closed = True
        release(self)
        self._loop.close()

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise NotSent("this node is closed")


class PolledFuture(concurrent.futures.Future[T]):
    """Outcome of a call that only goes on while its node is polled; waiting for it would be waiting for ever."""

    def result(self, timeout: float | None = None) -> T:
        self._check(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._check(timeout)
        return super().exception(0)

    def _check(self, timeout: float | None) -> None:
        del timeout
        if not self.done():
            raise CallError("this call has not ended", remedy="poll() the node until done(), or use call()")
