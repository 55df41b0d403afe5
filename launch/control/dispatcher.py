"""Finds the verb of a request, decodes its arguments, runs it, writes it into the audit log, counts. Knows no sockets.

`all_verbs` is the table of every verb. Lines and HTTP both call the dispatcher.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from ...core.errors import CallError, MyxaError, Overloaded
from ...core.knobs import AuditRecord, Operator
from .data_verbs import DATA_VERBS
from .knob_verbs import KNOB_VERBS
from .look_verbs import LOOK_VERBS, PS_VERBS, STATUS_VERBS, TRACE_VERBS
from .process_verbs import PROCESS_VERBS
from .run_verbs import RUN_VERBS
from .verb import Arguments, Verb, VerbContext, VerbTable
from .why_verbs import WHY_VERBS
from .wire import check_depth, decode_arguments

MAX_AT_ONCE = 64
"""Requests of one caller that are served at the same time."""
CLOSE_S = 5.0
"""For running requests to end when the run ends."""
MAX_NOTED_CHARS = 2000
"""Of a request's arguments, in the audit log."""
_log = logging.getLogger("myxa.control")


@dataclass(frozen=True, slots=True)
class VerbCaller:
    """The socket that a caller came in by. Each has its own share of the running requests, so that
    readers never keep an operator from steering."""

    name: str
    may_operate: bool


@dataclass(frozen=True, slots=True)
class VerbCall:
    """A request that was understood."""

    verb: Verb[Any]
    arguments: Arguments
    who: Operator
    caller: VerbCaller


class Dispatcher:
    """One per run. `note` appends to the audit log; it is called in its own thread, one call at a time."""

    def __init__(self, context: VerbContext, verbs: VerbTable, note: Callable[[AuditRecord], object]) -> None:
        self.verbs = verbs
        self.counters: Counter[str] = Counter()
        """Absent in a healthy run: "malformed", "refused", "failed", "bug", what connections were closed for, and
        "unnoted": refusals that came faster than the audit log takes them."""
        self._context = context
        self._note = note
        # Not the loop's own threads: verbs that only show may keep all of those busy.
        self._notary = ThreadPoolExecutor(1, thread_name_prefix="audit")
        self._running: set[asyncio.Task[Any]] = set()
        self._shares: Counter[str] = Counter()

    def understand(self, name: str, arguments: msgspec.Raw | bytes, who: Operator, caller: VerbCaller) -> VerbCall:
        """The request as a call. Raises ConfigError; nothing has happened then."""
        return self.order(name, lambda verb: self.decode(verb, arguments), who, caller)

    def order(
        self,
        name: str,
        arguments: Callable[[Verb[Any]], Arguments],
        who: Operator,
        caller: VerbCaller,
        *,
        only_shows: bool = False,
    ) -> VerbCall:
        """The same with arguments that are decoded by the caller. `only_shows`: although the caller may more."""
        verb = self.verbs.find(name, may_operate=caller.may_operate and not only_shows)
        return VerbCall(verb, arguments(verb), who, caller)

    @staticmethod
    def decode(verb: Verb[Any], raw: msgspec.Raw | bytes) -> Arguments:
        """The verb's arguments from JSON. Raises ConfigError."""
        check_depth(bytes(raw))
        return decode_arguments(verb.name, verb.arguments, raw)

    async def answer(self, order: VerbCall) -> Any:
        """Carry out a verb that is no stream. It is carried out to its end even if the caller goes meanwhile."""
        if order.verb.run is None:
            raise AssertionError(f"{order.verb.name} is a stream")
        share = self._share_of(order.caller)
        work = order.verb.run(self._context, order.arguments, order.who)
        return await self._kept(self._carried_out(order, work), share)

    async def refuse(self, name: str, who: Operator, caller: VerbCaller, error: MyxaError) -> None:
        """Count a request that was not understood; note it, if it was a change by a caller who may operate.

        Raises nothing: the caller gets the refusal, and nothing else. A caller that may only look must not be able to
        make the audit log grow.
        """
        self.counters["refused"] += 1
        verb = next((verb for verb in self.verbs if verb.name == name), None)
        if not caller.may_operate or verb is None or verb.access != "operate":
            return
        try:
            # A separate share, beside that of running requests: a refusal is noted also where that one is full.
            share = self._share_of(caller, "refused")
        except Overloaded:
            self.counters["unnoted"] += 1
            return
        await self._kept(self._noted(name, who, {}, "refused", str(error)), share)

    @contextlib.asynccontextmanager
    async def items(self, order: VerbCall) -> AsyncGenerator[AsyncGenerator[Any]]:
        """The answers of a stream; leaving the block ends it."""
        if order.verb.stream is None:
            raise AssertionError(f"{order.verb.name} is no stream")
        stream: Any = order.verb.stream(self._context, order.arguments, order.who)
        if order.verb.access == "operate":
            share, asked = self._share_of(order.caller), _noted_arguments(order.arguments)
            await self._kept(self._noted(order.verb.name, order.who, asked, "done", ""), share)
        async with contextlib.aclosing(stream):
            yield stream

    async def close(self) -> None:
        """Cancels the running requests."""
        given_up = set(self._running)
        for task in given_up:
            task.cancel()
        if given_up:
            await asyncio.wait(given_up, timeout=CLOSE_S)
        self._notary.shutdown(wait=False)

    async def _carried_out(self, order: VerbCall, work: Any) -> Any:
        verb = order.verb
        is_ours = verb.access == "operate" and not verb.is_noted_elsewhere
        asked = _noted_arguments(order.arguments)
        try:
            result = await work
        except MyxaError as error:
            self.counters["failed"] += 1
            # The coordinator notes what it refuses, but not what never reached it.
            if is_ours or (verb.access == "operate" and isinstance(error, CallError)):
                await self._noted(verb.name, order.who, asked, _outcome(error), str(error))
            raise
        except Exception as error:
            self.counters["bug"] += 1
            _log.exception("%s failed", verb.name)
            if verb.access == "operate":
                await self._noted(verb.name, order.who, asked, "failed", f"{type(error).__name__}: {error}")
            raise
        if is_ours:
            await self._noted(verb.name, order.who, asked, "done", _brief(result))
        return result

    async def _noted(self, verb: str, who: Operator, asked: dict[str, Any], result: str, detail: str) -> None:
        reason = str(asked.get("reason", ""))
        record = AuditRecord(
            number=0, wall_s=self._context.node.clock.wall(), verb=verb, who=who, arguments=asked, result=result,
            detail=detail[:MAX_NOTED_CHARS], reason=reason,
        )  # fmt: skip
        try:
            await asyncio.get_running_loop().run_in_executor(self._notary, self._note, record)
        except (OSError, MyxaError) as error:
            _log.error("the audit log did not take %s: %s", verb, error)

    def _share_of(self, caller: VerbCaller, what: str = "requests") -> str:
        """What the next request counts towards. Raises Overloaded if that share is full."""
        share = f"{caller.name}: {what}"
        if self._shares[share] >= MAX_AT_ONCE:
            raise Overloaded(f"{MAX_AT_ONCE} requests are being served", remedy="wait for the answers of earlier ones")
        return share

    async def _kept(self, work: Coroutine[Any, Any, Any], share: str) -> Any:
        self._shares[share] += 1
        # Its own task, because a caller that goes away must not leave a change half made.
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(partial(self._let_go, share))
        return await asyncio.shield(task)

    def _let_go(self, share: str, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        self._shares[share] -= 1
        if not task.cancelled():
            task.exception()  # the caller has the error, if it is still there


def _outcome(error: MyxaError) -> str:
    return "refused" if error.exit_code == 2 else "failed"


def _noted_arguments(arguments: Arguments) -> dict[str, Any]:
    table = msgspec.to_builtins(arguments)
    text = msgspec.json.encode(table)
    return table if len(text) <= MAX_NOTED_CHARS else {"cut": text[:MAX_NOTED_CHARS].decode(errors="replace")}


def _brief(result: Any) -> str:
    return (
        "" if result is None else msgspec.json.encode(result, enc_hook=str)[:MAX_NOTED_CHARS].decode(errors="replace")
    )


def all_verbs() -> VerbTable:
    """The table that the server serves."""
    return VerbTable((
        Verb("verbs", "view", Arguments, "every verb with its arguments", run=_verbs),
        *RUN_VERBS, *PS_VERBS, *STATUS_VERBS, *KNOB_VERBS, *PROCESS_VERBS, *LOOK_VERBS, *DATA_VERBS, *WHY_VERBS,
        *TRACE_VERBS,
    ))  # fmt: skip


async def _verbs(context: VerbContext, arguments: Arguments, who: Operator) -> list[dict[str, Any]]:
    del context, arguments, who
    return [describe(verb) for verb in all_verbs()]


def describe(verb: Verb[Any]) -> dict[str, Any]:
    """A verb for people and programs: name, access, help, arguments as a JSON schema."""
    schema = msgspec.json.schema(verb.arguments)
    own = schema["$defs"][verb.arguments.__name__]
    return {
        "name": verb.name,
        "access": verb.access,
        "help": verb.help,
        "is_stream": verb.stream is not None,
        "arguments": own.get("properties", {}),
        "required": own.get("required", []),
    }
