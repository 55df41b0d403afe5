"""A process's part in the exchange of large arrays on its host: what a node and its actors see of it.

Arrays in messages take the best way by themselves. To produce data where others can read it (`SharedTensorBlock`):

    async with node.tensors.allocate((4096, 4096), "float32") as block:
        np.matmul(a, b, out=block.array)
        await ref.take(block.array)  # one small message, whatever the size
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
from collections.abc import AsyncGenerator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ...core.clock import Clock
from ...core.errors import SlabError
from ...core.handlers import current_caller
from ...core.ids import PeerKey
from ..call_client import CallClient
from ..session.calls import Calls
from ..wire import Endpoints
from .blocks import BlockState, BlockTable, SharedBlock
from .same_host_peers import Directions, Findings, Peers, SameHostPeers, Shown, TensorMemoryContract
from .shared_array_transfer import PullGrants, ReceiveMemory, Releases, SharedArrayTransfer, TensorPolicy
from .slabs import Copier, SlabPool

HOUSEKEEPING_S = 0.5


class PeerSession(Peers, Protocol):
    """What is needed of the session."""

    @property
    def own(self) -> PeerKey: ...

    @property
    def calls(self) -> Calls: ...


class Tensors:
    """Large arrays of one node."""

    def __init__(self, ways: PeerSession, endpoints: Endpoints, clock: Clock) -> None:
        self._clock = clock
        self._ways = ways
        self._copier = Copier()
        self._block_table = BlockTable(secrets.randbits(60))
        self._pool = SlabPool(self._block_table, self._copier, TensorPolicy().pool_bytes)
        self._grants = PullGrants(secrets.randbits(60))
        self._receive_memory = ReceiveMemory(TensorPolicy().spare_bytes)
        directions = Directions(ways.own, endpoints, ways)
        call_client = CallClient(ways.calls, directions, clock)
        self._same_host_peers = SameHostPeers(endpoints, directions, call_client, clock)
        self._same_host_peers.when_gone = self._on_gone
        self._releases = Releases(self._same_host_peers)
        self.transfer = SharedArrayTransfer(
            clock, self._copier, self._block_table, self._pool, self._grants, self._receive_memory,
            self._same_host_peers, self._releases,
        )  # fmt: skip
        self.actor = MemoryActor(self._same_host_peers, self._block_table, self._pool)
        self._next_housekeeping = 0.0

    # -- for users

    @property
    def policy(self) -> TensorPolicy:
        """May be set at any time; holds for what is sent from then on."""
        return self.transfer.policy

    @policy.setter
    def policy(self, policy: TensorPolicy) -> None:
        self.transfer.policy = policy
        self._pool.pool_bytes = policy.pool_bytes
        self._receive_memory.spare_bytes = policy.spare_bytes

    @contextlib.asynccontextmanager
    async def allocate(
        self, shape: tuple[int, ...] | int, dtype: npt.DTypeLike, *, timeout_s: float = 5.0
    ) -> AsyncGenerator[SharedTensorBlock]:
        """An array in shared memory, to be filled and sent. Its content is undefined.

        Its memory is given back when the block is left and all who read it are done; do not write after that. Waits
        for room up to `timeout_s`, then raises SlabError.
        """
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        kind = np.dtype(dtype)
        if kind.hasobject or any(n < 0 for n in sizes):
            raise SlabError(f"no block for shape {sizes} of {kind}", remedy="numbers only, and no negative sizes")
        num_bytes = math.prod(sizes) * kind.itemsize
        block = await self._pool.allocate(max(1, num_bytes), timeout_s)
        if block is None:
            raise SlabError(
                f"no room for a block of {num_bytes} bytes within {timeout_s:g} s: "
                f"{self._block_table.num_blocks} blocks are in use, the pool may have {self._pool.pool_bytes} bytes",
                remedy="raise pool_bytes of the policy; do readers keep arrays that they do not need?",
            )
        memory = self._pool.memory(block)[:num_bytes]
        made = SharedTensorBlock(block, memory.view(kind).reshape(sizes), self._block_table, self._pool)
        try:
            yield made
        finally:
            made.leave()

    def counters(self) -> dict[str, int]:
        """For a monitor: arrays sent by each way, arrays that could not be fetched, what is in use now."""
        ways = {f"arrays_{name.replace(' ', '_')}": number for name, number in self.transfer.num_by.items()}
        return {
            **ways,
            "tensor_leases": self._block_table.num_leases,
            "tensor_blocks": self._block_table.num_blocks,
            "tensor_loans": len(self._grants),
            "tensor_pool_bytes": self._pool.num_bytes,
        }

    # -- for the node

    def tick(self) -> None:
        """Time has passed."""
        now = self._clock.monotonic()
        if now < self._next_housekeeping:
            return
        self._next_housekeeping = now + HOUSEKEEPING_S
        self._pool.freed(self._block_table.expire(now))
        for key in {n.key for n in self._same_host_peers.known()} | self._block_table.holders():
            if self._ways.is_over(key):
                self._on_gone(key)
        for host_peer in self._same_host_peers.known():
            host_peer.trim(now)
        self._receive_memory.trim(now)
        self._pool.trim(now)

    def _on_gone(self, key: PeerKey) -> None:
        self._same_host_peers.forget(key)
        self._pool.freed(self._block_table.over(key))

    async def close(self) -> None:
        """Nothing is left: no file, no thread, no task. Arrays in use keep their memory."""
        self._releases.close()
        await self._same_host_peers.close()
        self._copier.close()
        self._pool.close()
        self._receive_memory.close()


class MemoryActor(TensorMemoryContract):
    """Answers other processes. Who they are, their connections have proved."""

    def __init__(self, same_host_peers: SameHostPeers, block_table: BlockTable, pool: SlabPool) -> None:
        self._same_host_peers = same_host_peers
        self._block_table = block_table
        self._pool = pool

    async def probe(self, pid: int, boot_id: str) -> Findings:
        caller = current_caller()
        return Findings() if caller is None else await self._same_host_peers.probe(caller, pid, boot_id)

    async def show(self, challenge: str, reader: int) -> Shown:
        return self._same_host_peers.show(challenge, reader)

    async def hold(self, ticket: int) -> bool:
        caller = current_caller()
        return caller is not None and self._block_table.hold(ticket, caller)

    async def release(self, tickets: tuple[int, ...]) -> None:
        caller = current_caller()
        if caller is not None:
            self._pool.freed(self._block_table.release(tickets, caller))


LOOK_S = 0.01


class SharedTensorBlock:
    """See `Tensors.allocate`. Fill `array`, then send it or contiguous parts of it, to as many as wanted."""

    def __init__(self, block: SharedBlock, array: npt.NDArray[Any], block_table: BlockTable, pool: SlabPool) -> None:
        self._block = block
        self._array = array
        self._block_table = block_table
        self._pool = pool
        self._is_left = False

    @property
    def array(self) -> npt.NDArray[Any]:
        """Writable. Leave it alone while it is lent: until a call with it has returned, and see `reclaim`."""
        if self._is_left:
            raise SlabError("the block was left; its memory may be another's now")
        return self._array

    @property
    def is_lent(self) -> bool:
        """A reader uses it, or may begin to."""
        return self._block.state is not BlockState.OWNED

    async def reclaim(self, timeout_s: float) -> None:
        """Wait until no reader is left, then it may be written again.

        Raises SlabError after `timeout_s`, naming who still does.
        """
        if self._is_left:
            raise SlabError("the block was left; its memory may be another's now")
        try:
            async with asyncio.timeout(timeout_s):
                while self.is_lent:
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            names = ", ".join(map(str, self._block_table.holders_of(self._block)))
            raise SlabError(f"a block is still read after {timeout_s:g} s by {names}") from None
        self._pool.unpublish(self._block)
        self._block_table.renew(self._block)

    def leave(self) -> None:
        """Its producer is done; what is lent stays until its readers are."""
        if not self._is_left:
            self._is_left = True
            self._array.flags.writeable = False
            self._array = np.empty(0)
            self._pool.freed(self._block_table.drop(self._block))
