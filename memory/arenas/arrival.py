"""How tags come back to a device: all of them, or none; contents stream in while memory is still being mapped.

A device that is too full is found out before anybody may touch a tag: the copies begun by then are waited for and
given up, and the host has what it had. What comes back empty (discarded, rebuilt by its owner) costs no copy.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ...core.device_memory import Tag
from ...core.errors import MemoryFault, OutOfDeviceMemory
from .moving import Account, Floor, at_place, finish_copy_out, wait_out
from .tag_states import Event
from .tagged_memory import Chunk, TaggedMemory


def arrive(floor: Floor, coming: Sequence[TaggedMemory], awaited: Collection[Tag], account: Account) -> None:
    """Map memories that are away and begin to fill them, highest priority first; `settle` waits for each. `awaited`:
    tags for which it will be called at once.

    Of those awaited, what is copied goes before the others: the link is busy from the first chunk on, and mapping the
    rest (1.5 ms a GiB on an H200) happens beside it. What streams in is begun when everything is mapped: its copies
    take turns with the driver's clearing of freed memory, and mapping may wait for both (0.46 s until an 8B-shaped
    trainer had what it begins with, on two H200s; 0.20 this way).
    """
    ordered = sorted(coming, key=lambda memory: (memory.tag not in awaited, memory.backing != "host", -memory.priority))
    come: list[TaggedMemory] = []
    for memory in ordered:
        try:
            _map(floor, memory, account, is_awaited=memory.tag in awaited)
        except Unfilled as fault:
            raise _stranded(floor, [*come, memory], account, fault) from fault.error
        except MemoryFault as error:
            for back in (*come, memory):
                _go_back(floor, back)
            raise _refusal(floor, ordered, error) from error
        come.append(memory)
    for index, memory in enumerate(come):
        if memory.tag in awaited:
            continue
        try:
            for chunk in memory.chunks():
                _fill(floor, memory, chunk, is_awaited=False)
        except Unfilled as fault:
            for back in come[index + 1 :]:  # nothing of them was begun
                _go_back(floor, back)
            raise _stranded(floor, come[: index + 1], account, fault) from fault.error
    _step(floor, come, account)


class Unfilled(Exception):
    """There was memory, but no copy into it."""

    def __init__(self, error: MemoryFault) -> None:
        super().__init__(str(error))
        self.error = error


def _map(floor: Floor, memory: TaggedMemory, account: Account, *, is_awaited: bool) -> None:
    """And begin to fill what is awaited. Raises MemoryFault when a chunk gets no memory, Unfilled."""
    for chunk in memory.chunks():
        with account.part("map"):
            floor.give_memory(chunk)
        if is_awaited:
            _fill(floor, memory, chunk, is_awaited=True)


def _stranded(floor: Floor, come: Sequence[TaggedMemory], account: Account, fault: Unfilled) -> MemoryFault:
    """There was memory for all of `come`, and no copy into the last one: that is poisoned. What to raise."""
    _step(floor, come, account)
    memory = come[-1]
    wait_out(floor, [ticket for ticket, _ in memory.pending])
    memory.pending.clear()
    memory.step(Event.FAULT)
    return at_place(f"{floor.place}: tag {memory.tag!r}", fault.error)


def _step(floor: Floor, come: Sequence[TaggedMemory], account: Account) -> None:
    for memory in come:
        if memory.backing == "host":
            account.copied_bytes += memory.num_bytes
        memory.step(Event.MAPPED)


def _go_back(floor: Floor, memory: TaggedMemory) -> None:
    wait_out(floor, [ticket for ticket, _ in memory.pending])
    memory.pending.clear()
    for chunk in memory.chunks():
        floor.take_memory(chunk)


def _fill(floor: Floor, memory: TaggedMemory, chunk: Chunk, *, is_awaited: bool) -> None:
    """Raises Unfilled when nothing can be copied into it."""
    try:
        ticket = _begin_to_fill(floor, memory, chunk, is_awaited=is_awaited)
    except MemoryFault as error:
        raise Unfilled(error) from error
    if ticket is not None:
        memory.pending.append((ticket, chunk))


def _begin_to_fill(floor: Floor, memory: TaggedMemory, chunk: Chunk, *, is_awaited: bool) -> int | None:
    if memory.policy == "rematerialise":
        return None
    if memory.backing == "discarded":
        return floor.driver.zero(chunk.address, chunk.num_bytes)
    if chunk.slab is None or not chunk.is_copied:
        raise MemoryFault(f"{chunk.num_bytes:,} bytes of {chunk.address:#x} have no copy on the host")
    if chunk.checksum is not None and floor.readback.checksum(chunk, chunk.slab) != chunk.checksum:
        raise MemoryFault(
            f"the host copy of {chunk.num_bytes:,} bytes of {chunk.address:#x} changed while it was away",
            remedy="do not trust this host's memory; restart from a checkpoint",
        )
    return floor.driver.copy_in(chunk.address, chunk.slab, chunk.num_bytes, is_awaited=is_awaited)


def _refusal(floor: Floor, ordered: Sequence[TaggedMemory], error: MemoryFault) -> MemoryFault:
    names = ", ".join(memory.tag for memory in ordered)
    wanted = sum(memory.num_bytes for memory in ordered)
    kind = OutOfDeviceMemory if isinstance(error, OutOfDeviceMemory) else MemoryFault
    return kind(
        f"{floor.place}: {names} cannot come back ({wanted:,} bytes in all), all is as it was: {error.message}",
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
