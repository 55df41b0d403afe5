"""Names and numbers that identify processes and actors.

An actor's name is stable over restarts; an incarnation of its process is not: it has an *epoch*, issued by the
registry, and everything that an earlier epoch sent or was sent is void.
"""

from __future__ import annotations

import re
from typing import NamedTuple, NewType

from .errors import ConfigError

NodeId = NewType("NodeId", int)
"""u32, given to a node name by the registry at its first registration and kept over restarts."""
Epoch = NewType("Epoch", int)
"""u32, monotone per node name, issued by the registry: the fencing token of one process incarnation."""

NAME_PATTERN = re.compile(r"[a-z][a-z0-9_-]*(/[A-Za-z0-9_.-]+)*")
MAX_NAME_LENGTH = 120
LEADER = "trainer/0"
"""The trainer's first rank, which takes steps and publishes weights."""
POLICY = "policy"
"""How requests name the model that is trained."""
OVERLONG = "overlong"
"""Part of a reward: what the answer's length costs."""


class PeerKey(NamedTuple):
    """One incarnation of one node. Nothing addressed to a key ever reaches another incarnation. A tuple, because it is
    looked up several times per call and a dataclass hashes in Python."""

    node_id: int
    epoch: int

    def __str__(self) -> str:
        return f"node {self.node_id} epoch {self.epoch}"


def check_name(name: str) -> str:
    """`name` itself if it may name an actor or node ("rollout/0"), else ConfigError."""
    if len(name) > MAX_NAME_LENGTH or NAME_PATTERN.fullmatch(name) is None:
        raise ConfigError(
            f"{name[:MAX_NAME_LENGTH]!r} cannot name an actor",
            remedy=f"lower-case word, then parts after '/', e.g. 'rollout/0'; at most {MAX_NAME_LENGTH} characters",
        )
    return name
