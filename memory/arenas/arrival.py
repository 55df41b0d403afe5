"""How tags come back to a device: all of their memory first, or none; then contents stream in, in order.

Every tag has its addresses' memory before the first byte moves, so a device that is too full is found out while nothing
has happened. What comes back empty (discarded, rebuilt by its owner) costs no copy.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...core.errors import MemoryFault, OutOfDeviceMemory
from .moving import Account, Floor, at_place, finish_copy_out, wait_out
from .tag_states import Event
from .tagged_memory import Chunk, TaggedMemory


def arrive(floor: Floor, coming: Sequence[TaggedMemory], account: Account) -> None:
    """Map memories that are away and begin to fill them, highest priority first; `settle` waits for each.

    Of one priority those go first that need no copy: a lane is waited for in the order of its work, and a tag that is
    only zeroed would stand behind the longest copy.
    """
    ordered = sorted(coming, key=lambda memory: (-memory.priority, memory.backing == "host"))
    try:
        with account.part("map"):
            floor.give_all(chunk for memory in ordered for chunk in memory.chunks())
    except MemoryFault as error:
        raise _refusal(floor, ordered, error) from error
    for index, memory in enumerate(ordered):
        was_away = memory.backing
        memory.step(Event.MAPPED)
        try:
            for chunk in memory.chunks():
                ticket = _fill(floor, memory, chunk, is_empty=was_away == "discarded")
                if ticket is not None:
                    memory.pending.append((ticket, chunk))
        except MemoryFault as error:
            wait_out(floor, [ticket for ticket, _ in memory.pending])
            memory.pending.clear()
            memory.step(Event.FAULT)
            for behind in ordered[index + 1 :]:
                for chunk in behind.chunks():
                    floor.take_memory(chunk)
            raise at_place(f"{floor.place}: tag {memory.tag!r}", error) from error
        if was_away == "host":
            account.copied_bytes += memory.num_bytes


def _fill(floor: Floor, memory: TaggedMemory, chunk: Chunk, *, is_empty: bool) -> int | None:
    if memory.policy == "rematerialise":
        return None
    if is_empty:
        return floor.driver.zero(chunk.address, chunk.num_bytes)
    if chunk.slab is None or not chunk.is_copied:
        raise MemoryFault(f"{chunk.num_bytes:,} bytes of {chunk.address:#x} have no copy on the host")
    if chunk.checksum is not None and floor.readback.checksum(chunk, chunk.slab) != chunk.checksum:
        raise MemoryFault(
            f"the host copy of {chunk.num_bytes:,} bytes of {chunk.address:#x} changed while it was away",
            remedy="do not trust this host's memory; restart from a checkpoint",
        )
    return floor.driver.copy_in(chunk.address, chunk.slab, chunk.num_bytes)


def _refusal(floor: Floor, ordered: Sequence[TaggedMemory], error: MemoryFault) -> MemoryFault:
    names = ", ".join(memory.tag for memory in ordered)
    wanted = sum(memory.num_bytes for memory in ordered)
    kind = OutOfDeviceMemory if isinstance(error, OutOfDeviceMemory) else MemoryFault
    return kind(
        f"{floor.place}: {names} cannot come back ({wanted:,} bytes in all), nothing was moved: {error.message}",
        remedy=error.remedy,
    )


def settle(floor: Floor, memory: TaggedMemory, *, until: int | None = None) -> None:
    """Wait for what was begun on a tag; with `until` for the chunk that holds this address only, and those before it.

    Raises MemoryFault when a copy failed or (verifying) is none. The tag is poisoned then, unless the copy was one
    beside the work: it is whole where it is, and dirty.
    """
    if memory.backing == "poisoned":
        raise MemoryFault(
            f"{floor.place}: tag {memory.tag!r} is poisoned: a copy of it failed before",
            remedy="restart this process, its state comes back from a checkpoint",
        )
    try:
        while memory.pending:
            ticket, chunk = memory.pending.pop(0)
            _finish(floor, memory, chunk, ticket)
            if until is not None and chunk.address <= until < chunk.address + chunk.num_bytes and memory.pending:
                return
    except MemoryFault as error:
        wait_out(floor, [ticket for ticket, _ in memory.pending])
        memory.pending.clear()
        memory.is_saving = False
        if memory.backing == "copy_in":
            memory.step(Event.FAULT)
        raise at_place(f"{floor.place}: tag {memory.tag!r}", error) from error
    if memory.is_saving:
        memory.is_saving = False
        memory.step(Event.EQUAL)
    elif memory.backing == "copy_in" and not (memory.policy == "rematerialise" and memory.regions):
        has_copy = memory.policy == "backup" and memory.has_whole_copy
        memory.step(Event.ARRIVED if has_copy else Event.WRITTEN)


def _finish(floor: Floor, memory: TaggedMemory, chunk: Chunk, ticket: int) -> None:
    if memory.is_saving:
        finish_copy_out(floor, chunk, ticket)
        return
    floor.driver.wait(ticket)
    if floor.is_verifying and memory.backing == "copy_in" and chunk.slab is not None:
        floor.readback.prove(chunk, chunk.slab)
