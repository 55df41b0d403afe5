"""A network that is gone between some actors and all others, for a while: each side is told to cut the other off.

What actors of one host pass to each other through shared memory is announced by messages, so it stops as well. The
launchers see the ends of their own processes without a network, and go on doing so.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from ...core.actor import with_deadline
from ...core.errors import CallError, NoSuchActor
from ...transport.node import Node
from ...transport.registry.registry import REGISTRY
from ..contracts import ProcessContract, process_name

TELL_S = 5.0
LAUNCHER = "launcher"
"""Stands for node 0's, with the registry, among those from whom somebody is cut off."""

_log = logging.getLogger("myxa.chaos")


async def cut_apart(node: Node, some: Sequence[str], others: Sequence[str], for_s: float) -> tuple[str, ...]:
    """Between each actor of `some` and each of `others` (actors' names, or `LAUNCHER`) nothing passes, either way, for
    `for_s`. Returns those of `some` that were told; `node` is the launcher's own, which is cut off last."""
    far = [name for name in others if name != LAUNCHER and name not in some]
    beyond = (*far, REGISTRY) if LAUNCHER in others else tuple(far)
    await asyncio.gather(*(_tell(node, name, tuple(some), for_s) for name in far))
    told = await asyncio.gather(*(_tell(node, name, beyond, for_s) for name in some))
    met = tuple(name for name, heard in zip(some, told, strict=True) if heard)
    if LAUNCHER in others:
        for name in met:
            try:
                node.cut_off(name, for_s)
            except NoSuchActor as error:  # it has ended meanwhile
                _log.info("the launcher did not cut it off: %s", error)
    return met


async def _tell(node: Node, name: str, others: tuple[str, ...], for_s: float) -> bool:
    if not others:
        return False
    try:
        await with_deadline(node.ref(ProcessContract, process_name(name)), TELL_S).cut_off(others, for_s)
    except CallError as error:
        _log.info("%s was not told to cut %s off: %s", name, ", ".join(others), error)
        return False
    return True
