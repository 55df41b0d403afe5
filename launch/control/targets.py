"""Which actors the target of a verb names: "rollout/1", "rollout", "rollout/*", "node:1", "all"."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ...core.errors import ConfigError
from ...core.suggestion import nearest
from ..supervisor.run_actors import ActorStatus

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
