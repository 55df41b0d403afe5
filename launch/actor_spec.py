"""What a launcher knows of one actor before it runs: who it is, where it runs, and on what. Plain values."""

from __future__ import annotations

import msgspec

from ..core.config import RoleName
from ..core.supervision import WhenHung


class RankSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A place in a gang, in torchrun's words."""

    gang: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    group_rank: int
    """Number of the node among the nodes that hold ranks of this gang."""


class ActorSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One actor process."""

    name: str
    """`coordinator`, `rollout/1`, ..."""
    role: RoleName
    kind: str
    """Adapter or implementation that the role asks for."""
    index: int
    """Number among the actors of the role, 0-based over all nodes."""
    node: int
    devices: tuple[int, ...] = ()
    """GPU numbers of this actor on its node; empty on CPU."""
    visible_devices: tuple[int, ...] = ()
    """GPU numbers its process sees: for a gang's ranks all of the gang on the node; LOCAL_RANK picks one."""
    python: str = ""
    """Interpreter; empty: the launcher's own."""
    env: dict[str, str] = {}
    threads: int = 1
    max_restarts: int = 3
    when_hung: WhenHung = "wait"
    quorum: int = 0
    """So many actors of its role are enough; 0: all."""
    attach: str = ""
    """Servers that were named when it joined; empty: its share of the run file's, if there are any."""
    rank: RankSpec | None = None
    attempt: int = 0
    """Which of its starts this is; 0: the first. Set by the order to start it."""

    @property
    def model(self) -> str:
        """Of the role `model`: NAME of `[models.NAME]`."""
        return self.name.split("/")[1]


class GangRendezvous(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the ranks of one attempt of a gang meet (torch's store listens there)."""

    address: str
    port: int
