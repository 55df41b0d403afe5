"""`myxa mem`: asks the memory manager of a run of this host who holds what. It looks, and changes nothing."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ..actors.memory_contracts import MemoryContract
from ..core.actor import with_deadline
from ..core.config import load_config
from ..core.device_memory import MemoryView
from ..core.errors import LaunchError
from .memory_parts import manager_name, takes_turns
from .run_link import attach_to, live_run
from .views.memory_view import memory_text

ASK_S = 10.0


async def memory_page(named: Path | None, *, as_json: bool = False) -> str:
    """The page, or the view as JSON. Raises LaunchError for a run that is over or whose memory nobody manages."""
    place = live_run(named)
    config = load_config(place.config)
    if not takes_turns(config):
        raise LaunchError(
            f"the run in {place.path} has no memory manager",
            remedy='trainer and engines have their own memory there; see memory.share = "switch"',
        )
    node = await attach_to(place, "mem", ASK_S)
    try:
        await node.wait_for(manager_name(config), timeout_s=ASK_S)
        view: MemoryView = await with_deadline(node.ref(MemoryContract, manager_name(config)), ASK_S).view()
    finally:
        await node.close(grace_s=0.0)
    if as_json:
        return msgspec.json.format(msgspec.json.encode(view)).decode() + "\n"
    return memory_text(view)
