"""What the launchers of a run say to each other: one agent per node, one run supervisor on node 0. Plain records."""

from __future__ import annotations

from ..core.actor import Actor
from ..core.handlers import call
from ..core.record import Record
from .actor_spec import ActorSpec, GangRendezvous
from .verbs import LogsArguments

SUPERVISOR = "supervisor"


def agent_name(node: int) -> str:
    return f"launcher/{node}"


class NodeFacts(Record, frozen=True, kw_only=True):
    """How a node introduces itself."""

    node: int
    """-1: a late node that asks for its number."""
    version: str
    """Of myxa; it must be that of node 0."""
    host: str
    address: str = ""
    """At which other nodes reach it."""
    machine: str = ""
    """The running system (boot id): what it shares with others of the same is memory, not only files."""
    gpus: tuple[str, ...] = ()
    """UUIDs of those that its actors see."""
    is_late: bool = False
    """It joins a live run; its number is the one that `enlist` gave it."""
    problem: str = ""
    """Why it cannot take part: the run must not wait for it."""
    doing: str = ""
    """What it does before it can take part. The run waits for it as long as it says something new."""
    nonce: str = ""
    """Random per launcher: a request repeated because its answer was lost does not count as a second node."""


class EnlistReply(Record, frozen=True, kw_only=True):
    """What a node needs to know before it joins, all of it from node 0."""

    node: int = -1
    """Its number in this run; -1: it may not come."""
    reason: str = ""
    """Why not."""
    is_early: bool = False
    """The run is being started: it may ask again."""
    run_dir: str = ""
    config: str = ""
    """The run's configuration as TOML, with the checkpoint to begin from and the names of copies of code."""
    code: dict[str, str] = {}
    """Copies of the user's files: path below the run directory -> text; see `frozen_code.py`."""
    program: str = ""
    actors: tuple[ActorSpec, ...] = ()
    """Of the run's start; for a late node one such as it will have."""


class LogChunk(Record, frozen=True, kw_only=True):
    """Whole lines of a log, and where the next ones begin."""

    name: str
    file: str
    offset: int
    lines: tuple[str, ...]
    is_more: bool = False
    """More can be read at once."""


class StackReply(Record, frozen=True, kw_only=True):
    """Where a process is."""

    name: str
    pid: int
    text: str
    """One stack per thread, and per asyncio task where the process itself answered."""
    how: str
    """"process" (it answered), "signal" (faulthandler wrote it, without its cooperation)."""


class ProfileReply(Record, frozen=True, kw_only=True):
    """A profile was written."""

    name: str
    node: int
    path: str
    """On that node."""
    top: tuple[str, ...]
    """Where most was seen, most first."""
    refused: str = ""
    """Why there is no profile of this one, where there is one of others."""


class ChildEnd(Record, frozen=True, kw_only=True):
    """A process ended."""

    name: str
    attempt: int
    status: int
    """As `subprocess` gives it: negative is a signal."""
    node: int
    log_path: str
    pid: int = 0
    """Of the process; 0: it was never started."""
    tail: tuple[str, ...] = ()


class AgentContract(Actor):
    """Starts and ends the processes of its node; decides nothing."""

    @call(deadline=30, reentrant=True)
    async def hold_meeting(self, gang: str, attempt: int, address: str) -> GangRendezvous:
        """Where the ranks of that attempt meet, at this node's `address`: the port is free here, and held until the
        next attempt. Idempotent. Raises LaunchError."""
        raise NotImplementedError

    @call(deadline=60, reentrant=True)
    async def start_actor(self, actor: ActorSpec, meeting: GangRendezvous | None = None) -> int:
        """Start a process, as the attempt that `actor` names; returns its id. Raises ConfigError where another attempt
        would end the same way, else LaunchError."""
        raise NotImplementedError

    @call(deadline=120, reentrant=True)
    async def end_actors(self, names: tuple[str, ...], grace_s: float, is_hung: bool = False) -> None:
        """ORDERLY_END, and SIGKILL after `grace_s` (0: at once); answered when all have ended, or should have.
        `is_hung`: these do not react; have their stacks written into their logs, then SIGKILL."""
        raise NotImplementedError

    @call(deadline=30, reentrant=True)
    async def read_logs(self, request: LogsArguments) -> tuple[LogChunk, ...]:
        """A part of a log of this node. Its target: an actor, or "launcher", that of the node itself."""
        raise NotImplementedError

    @call(deadline=60, reentrant=True)
    async def stacks_from_outside(self, name: str) -> StackReply:
        """Where a process is that need not answer: a signal makes it write its stacks down."""
        raise NotImplementedError

    @call(deadline=30, reentrant=True)
    async def leave(self, exit_code: int, reason: str) -> None:
        """The run is over; this node's launcher exits with that code."""
        raise NotImplementedError


class ProcessContract(Actor):
    """What every actor's process answers beside its actor, under the name `process_name` gives."""

    @call(deadline=10, reentrant=True)
    async def stacks(self) -> StackReply:
        raise NotImplementedError

    @call(deadline=60, reentrant=True, cancellable=False)
    async def profile(self, duration_s: float) -> ProfileReply:
        """By torch's profiler for so long, then write a file into the run directory. One profile at a time."""
        raise NotImplementedError


def process_name(actor: str) -> str:
    """Under which name an actor's process answers for itself."""
    return f"process/{actor}"


class SupervisorContract(Actor):
    """Gathers the nodes, has actors started, decides when they end."""

    @call(deadline=30)
    async def enlist(self, facts: NodeFacts) -> EnlistReply:
        """What a node has to know, or why it may not come. It joins afterwards. The same launcher may repeat this."""
        raise NotImplementedError

    @call(deadline=30)
    async def join(self, facts: NodeFacts) -> str:
        """A node is ready for actors, or says what it does before that: why it may not take part, or empty. The same
        launcher may repeat this."""
        raise NotImplementedError

    @call(deadline=30, reentrant=True)
    async def leave_node(self, node: int, reason: str) -> None:
        """A late node's launcher got a signal: its actors hand their work back and end; then it may leave."""
        raise NotImplementedError

    @call(deadline=5, reentrant=True)
    async def ping(self, node: int) -> bool:
        """That node's launcher is alive; whether it is still a member. If not, it has to end its processes."""
        raise NotImplementedError

    @call(deadline=30)
    async def child_ended(self, end: ChildEnd) -> None:
        """A node's process ended."""
        raise NotImplementedError

    @call(deadline=30, reentrant=True)
    async def stop_run(self, reason: str, signal_number: int) -> None:
        """Any node's launcher got SIGINT or SIGTERM: the run shall end in an orderly way."""
        raise NotImplementedError
