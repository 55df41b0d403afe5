"""What the handlers of verbs may use, which actors a target names, and how they call the coordinator.

A coordinator that died is back within seconds, so a call waits that long for it. A coordinator that dies during a
call may have carried it out; the error says so.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from ...actors.contracts import CoordinatorContract
from ...core.config import RunConfig
from ...core.errors import CallError, ConfigError, LaunchError, NoSuchActor, NotSent, PeerDied
from ...core.refs import with_deadline
from ...core.suggestion import nearest
from ...transport.node import Node
from ..run_dir import RunDir
from ..supervisor.run_actors import ActorStatus

if TYPE_CHECKING:
    from ..supervisor.run_supervisor import RunSupervisor


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class VerbContext:
    """What verbs may use. The launcher of node 0 makes it."""

    node: Node
    """Makes references to every actor: `context.node.ref(CoordinatorContract, "coordinator")`."""
    run_dir: RunDir
    config: RunConfig
    supervisor: RunSupervisor
    started_wall_s: float


SHAPES = 'a role ("rollout"), an actor ("rollout/1"), "rollout/*", "node:0" or "all"'
MAX_SHOWN = 12

_NODE = re.compile(r"node:(\d{1,6})")


def find_targets(target: str, roster: Sequence[ActorStatus]) -> tuple[ActorStatus, ...]:
    """The actors that `target` means, in start order; never none. Raises ConfigError, with the names there are, if
    it names no actor."""
    word = target.strip()
    found = tuple(record for record in roster if _names_actor(record, word))
    if found:
        return found
    names = [record.name for record in roster]
    words = [*names, *sorted({record.role for record in roster}), *sorted({f"node:{r.node}" for r in roster}), "all"]
    near = nearest(word.removesuffix("/*"), words)
    shown = ", ".join(names[:MAX_SHOWN]) + (f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else "")
    raise ConfigError(
        f"{word[:64]!r} names no actor of this run; there are {shown or 'none'}",
        remedy=f"did you mean {near!r}?" if near else f"give {SHAPES}",
    )


def node_of(target: str) -> int | None:
    """3 for "node:3"; None: it means no node."""
    match = _NODE.fullmatch(target.strip())
    return int(match[1]) if match else None


def _names_actor(record: ActorStatus, word: str) -> bool:
    if (node := node_of(word)) is not None:
        return record.node == node
    return word in ("all", "*", record.name, record.role, f"{record.role}/*")


async def answer_or_none(question: Awaitable[T]) -> T | None:
    try:
        return await question
    except CallError:
        return None


NAME = "coordinator"
WAIT_S = 5.0


@asynccontextmanager
async def coordinator_call(context: VerbContext, seconds: float) -> AsyncGenerator[CoordinatorContract]:
    """A reference with that deadline, to be used inside the block. Raises NotSent while it is away, PeerDied when it
    ends meanwhile."""
    try:
        await context.node.wait_for(NAME, timeout_s=WAIT_S)
    except LaunchError as error:
        raise _away(context) from error
    try:
        yield with_deadline(context.node.ref(CoordinatorContract, NAME), seconds)
    except PeerDied as error:
        raise PeerDied(
            "the coordinator ended over this request and is being restarted; it may or may not have been carried out",
            remedy="look at `myxa history` and `myxa get`; then ask again",
        ) from error
    except (NoSuchActor, NotSent) as error:
        raise _away(context) from error


def _away(context: VerbContext) -> NotSent:
    record = next((record for record in context.supervisor.statuses() if record.name == NAME), None)
    state = f"{record.state}, attempt {record.attempt}" if record is not None else "not there"
    return NotSent(f"the coordinator is restarting ({state}): nothing was asked of it", remedy="ask again in a moment")
