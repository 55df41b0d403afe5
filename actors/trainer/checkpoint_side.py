"""What of the run, beside the trainer, belongs to a checkpoint: asked of buffer and coordinator, which may restart."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol, TypeVar

from ...core.errors import MyxaError, TrainError
from ...core.file_entry import FileEntry
from ...core.knobs import LiveKnobs
from ..contracts.roles import BufferContract, CoordinatorContract

T = TypeVar("T")


class Ask(Protocol):
    """Repeats what is sent while `who` is away, or, if it `waits_for_disk`, waits for its disk."""

    async def __call__(self, who: str, send: Callable[[], Awaitable[T]], *, waits_for_disk: bool = True) -> T: ...


class RunSide:
    """Knows both by their contracts."""

    def __init__(self, buffer: BufferContract, coordinator: CoordinatorContract, ask: Ask) -> None:
        self._buffer = buffer
        self._coordinator = coordinator
        self._ask = ask

    async def copy_ledger(self, path: Path, version: int) -> FileEntry:
        """Durably, with everything in it that was trained up to `version`. Raises TrainError if it cannot be made."""
        try:
            return await self._ask(
                "buffer",
                lambda: self._buffer.snapshot(str(path), version),
                waits_for_disk=False,  # that disk is this checkpoint's: training does not wait for it
            )
        except MyxaError as error:
            message = f"checkpoint {version} lacks its copy of the ledger: {error.message}"
            raise TrainError(message, remedy=error.remedy or "see the log of buffer") from error

    async def live_knobs(self) -> LiveKnobs:
        """What was decided so far. Raises CallError if the coordinator does not come back."""
        return await self._ask("coordinator", self._coordinator.live_knobs)

    async def durable(self, version: int, oldest: int | None) -> None:
        """The buffer may give away what only checkpoints older than `oldest` need (None: than the one before). Raises
        CallError if it does not come back."""
        await self._ask("buffer", lambda: self._buffer.durable(version, oldest))
