"""The placement as a picture: a grid of nodes and devices with letters for roles, and who has them when. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...core.config import RunConfig
from ..actor_spec import ActorSpec
from ..composition.memory_parts import takes_turns

LETTERS = {"coordinator": "C", "buffer": "B", "monitor": "M", "memory": "Y", "trainer": "T", "rollout": "R"}
CPU = "cpu"


def grid(actors: Sequence[ActorSpec], num_nodes: int) -> dict[str, dict[str, list[str]]]:
    """Node -> device ("cpu", "GPU 0", ...) -> letters with numbers, like "T0"."""
    found: dict[str, dict[str, list[str]]] = {f"node {node}": {CPU: []} for node in range(num_nodes)}
    for actor in actors:
        row = found[f"node {actor.node}"]
        for device in [f"GPU {number}" for number in used_devices(actor)] or [CPU]:
            row.setdefault(device, []).append(mark(actor))
    return found


def used_devices(actor: ActorSpec) -> tuple[int, ...]:
    """GPUs that the actor's process works on: a rank takes one of its gang's by its local rank."""
    if actor.rank is None or not actor.visible_devices:
        return actor.devices
    return (actor.visible_devices[actor.rank.local_rank % len(actor.visible_devices)],)


def mark(actor: ActorSpec) -> str:
    """`trainer/3` -> "T3", `buffer` -> "B"."""
    return LETTERS[actor.role] + (str(actor.index) if "/" in actor.name else "")


def picture(rows: dict[str, dict[str, list[str]]]) -> list[str]:
    """The grid as lines of text."""
    devices = sorted({device for row in rows.values() for device in row}, key=_order)
    cells = {(node, device): _cell(row.get(device)) for node, row in rows.items() for device in devices}
    widths = {device: max(len(device), *(len(cells[node, device]) for node in rows)) for device in devices}
    first = max(len(node) for node in rows)
    lines = [" " * first + "  " + "  ".join(device.ljust(widths[device]) for device in devices)]
    lines += [
        node.ljust(first) + "  " + "  ".join(cells[node, device].ljust(widths[device]) for device in devices)
        for node in rows
    ]
    return [line.rstrip() for line in lines]


def _order(device: str) -> tuple[bool, int]:
    return (device != CPU, int(device.rpartition(" ")[2]) if device != CPU else 0)


def _cell(marks: list[str] | None) -> str:
    return "" if marks is None else " ".join(_shortened(marks)) or "-"


def _shortened(marks: list[str]) -> list[str]:
    """Sixteen engines on a CPU: R0-R15."""
    out: list[str] = []
    for letter in dict.fromkeys(one[0] for one in marks):
        same = [one for one in marks if one[0] == letter]
        out += same if len(same) <= 4 else [f"{same[0]}-{same[-1]}"]
    return out


def legend(actors: Sequence[ActorSpec]) -> str:
    """`C coordinator  B buffer ...`, of the roles there are."""
    return "  ".join(f"{LETTERS[role]} {role}" for role in dict.fromkeys(actor.role for actor in actors))


def turns(config: RunConfig, actors: Sequence[ActorSpec]) -> list[str]:
    """Who has shared devices when; nothing where nobody takes turns."""
    if not takes_turns(config):
        return []
    drawn = {"trainer": "####====........", "rollout": "....====########"}
    lines = [f"  {mark(actor).ljust(4)} {drawn[actor.role]}" for actor in actors if actor.role in drawn]
    return [
        'in turns (memory.share = "switch"): # has the device, = weights of both, . has left it',
        *lines,
        "       step    generation, and again",
    ]


def processes(actors: Sequence[ActorSpec]) -> list[dict[str, Any]]:
    """Processes of each node: how many, threads, interpreters."""
    found: list[dict[str, Any]] = []
    for node in sorted({actor.node for actor in actors}):
        mine = [actor for actor in actors if actor.node == node]
        found.append(
            {
                "node": node,
                "num_processes": len(mine),
                "threads": sum(actor.threads for actor in mine),
                "interpreters": sorted({actor.python or "the launcher's" for actor in mine}),
            }
        )
    return found
