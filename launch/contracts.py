"""What the launchers of a run say to each other: one agent per node, one run supervisor on node 0. Plain records."""

from __future__ import annotations

import msgspec

from ..core.actor import Actor
from ..core.handlers import call
from .actor_spec import ActorSpec, GangMeeting

SUPERVISOR = "supervisor"
"""Actor name of the run supervisor."""


def agent_name(node: int) -> str:
    """Actor name of a node's agent."""
    return f"launcher/{node}"


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the records below."""


class NodeFacts(_Record, frozen=True, kw_only=True):
    """How a node introduces itself. Version and configuration must be those of node 0."""

    node: int
    num_nodes: int
    version: str
    """Of myxa."""
    config: str
    """The resolved configuration as TOML."""
    host: str


class JoinReply(_Record, frozen=True, kw_only=True):
    """Whether the node may take part."""

    accepted: bool
    reason: str = ""


class RunPlan(_Record, frozen=True, kw_only=True):
    """What a node must know before it starts actors."""

    run_id: str
    run_dir: str


class StartOrder(_Record, frozen=True, kw_only=True):
    """Start one attempt of an actor."""

    actor: ActorSpec
    attempt: int
    meeting: GangMeeting | None = None


class ChildEnd(_Record, frozen=True, kw_only=True):
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
    """Last lines of its log."""


class AgentContract(Actor):
    """Starts and ends the processes of its node; decides nothing."""

    @call(deadline=30)
    async def prepare(self, plan: RunPlan) -> None:
        """Make the run directory and be ready for orders."""
        raise NotImplementedError

    @call(deadline=60)
    async def start_actor(self, order: StartOrder) -> str:
        """Start a process; an empty text, or why it could not be started."""
        raise NotImplementedError

    @call(deadline=120, reentrant=True)
    async def end_actors(self, names: tuple[str, ...], grace_s: float) -> None:
        """SIGTERM, and SIGKILL after `grace_s` (0: at once); answered when all have ended."""
        raise NotImplementedError

    @call(deadline=30, reentrant=True)
    async def kill_hung(self, names: tuple[str, ...]) -> None:
        """These do not react: have their stacks written into their logs, then SIGKILL."""
        raise NotImplementedError

    @call(deadline=30)
    async def meeting_place(self) -> GangMeeting:
        """An address of this node that others reach, and a port that is free now."""
        raise NotImplementedError

    @call(deadline=30, reentrant=True)
    async def leave(self, exit_code: int, reason: str) -> None:
        """The run is over; this node's launcher exits with that code."""
        raise NotImplementedError


class SupervisorContract(Actor):
    """Gathers the nodes, has actors started, decides when they end."""

    @call(deadline=30)
    async def join(self, facts: NodeFacts) -> JoinReply:
        """A node is here."""
        raise NotImplementedError

    @call(deadline=30)
    async def decline(self, node: int, host: str, reason: str) -> None:
        """A node cannot take part: its preflight failed. Nobody shall wait for it."""
        raise NotImplementedError

    @call(deadline=5, reentrant=True)
    async def ping(self, node: int) -> None:
        """That node's launcher lives. An answer says that this one does."""
        raise NotImplementedError

    @call(deadline=30)
    async def child_ended(self, end: ChildEnd) -> None:
        """A node's process ended."""
        raise NotImplementedError

    @call(deadline=30, reentrant=True)
    async def stop_run(self, reason: str, signal_number: int) -> None:
        """Any node's launcher got SIGINT or SIGTERM: the run shall end in good order."""
        raise NotImplementedError
