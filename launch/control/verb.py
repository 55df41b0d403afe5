"""What a verb of the control socket is, and what it may use. The server knows only this; verbs know no sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import msgspec

from ...core.config import RunConfig
from ...core.errors import ConfigError
from ...core.knobs import Operator
from ...core.suggestion import nearest
from ...transport.node import Node
from ..chaos.desk import ChaosDesk
from ..run_dir import RunDir
from .proposals import Proposals

if TYPE_CHECKING:
    from ..supervisor.run_supervisor import RunSupervisor

Access = Literal["view", "operate"]
"""view: changes nothing, also served on the read-only socket; operate: on the control socket only, and audited."""


class Arguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of a verb's arguments: decoded from JSON, types checked, unknown names refused."""


A = TypeVar("A", bound=Arguments)


@dataclass(frozen=True, slots=True)
class Room:
    """What verbs may use. The launcher of node 0 makes it."""

    node: Node
    """Makes references to every actor: `room.node.ref(CoordinatorContract, "coordinator")`."""
    run_dir: RunDir
    config: RunConfig
    """As the run was started."""
    supervisor: RunSupervisor
    started_wall_s: float
    proposals: Proposals = field(default_factory=Proposals)
    """Suggestions that were shown."""
    chaos: ChaosDesk = field(default_factory=ChaosDesk)
    """Faults on purpose."""


@dataclass(frozen=True, slots=True)
class Verb(Generic[A]):
    """One verb. `run` answers with JSON types or msgspec structs and raises MyxaError; `stream` yields such answers
    until the caller goes away. Exactly one of the two is given."""

    name: str
    access: Access
    arguments: type[A]
    help: str
    """One line, as `myxa --help` shows it."""
    run: Callable[[Room, A, Operator], Awaitable[Any]] | None = None
    stream: Callable[[Room, A, Operator], AsyncIterator[Any]] | None = None
    is_noted_elsewhere: bool = False
    """Of "operate" verbs: whoever carries it out writes it into the audit log (the coordinator does); else the server
    does."""


class VerbTable:
    """All verbs by name."""

    def __init__(self, verbs: Sequence[Verb[Any]]) -> None:
        self._verbs = {verb.name: verb for verb in verbs}
        if len(self._verbs) != len(verbs):
            raise ValueError("two verbs have the same name")

    def __iter__(self) -> Iterator[Verb[Any]]:
        return iter(self._verbs.values())

    def find(self, name: str, *, may_operate: bool) -> Verb[Any]:
        """The verb. Raises ConfigError: unknown (did you mean), or not for a reader."""
        verb = self._verbs.get(name)
        if verb is None:
            near = nearest(name, tuple(self._verbs))
            raise ConfigError(
                f"{name[:64]!r} is no verb", remedy=f"did you mean {near!r}?" if near else "ask for the verb `verbs`"
            )
        if verb.access == "operate" and not may_operate:
            raise ConfigError(f"{name} changes the run, and this socket only shows", remedy="use the control socket")
        return verb
