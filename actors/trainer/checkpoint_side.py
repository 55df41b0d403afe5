"""What of the run, beside the trainer, belongs to a checkpoint: asked of buffer and coordinator, which may restart."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from ...core.errors import DiskRefused, MyxaError, TrainError
from ...core.file_entry import FileEntry
from ...core.knobs import LiveKnobs
from ..contracts.roles import BufferContract, CoordinatorContract


class RunSide:
    """Knows both by their contracts."""

    def __init__(
        self,
        buffer: BufferContract,
        coordinator: CoordinatorContract,
        ask: Callable[[str, Callable[[], Awaitable[Any]]], Awaitable[Any]],
    ) -> None:
        """`ask(who, send)` repeats what is sent while `who` is away, or waits for its disk."""
        self._buffer = buffer
        self._coordinator = coordinator
        self._ask = ask

    async def copy_ledger(self, path: Path, version: int) -> FileEntry:
        """Durably, with everything in it that was trained up to `version`. Raises TrainError if it cannot be made."""

        async def send() -> FileEntry | DiskRefused:  # that disk is this checkpoint's: training does not wait for it
            try:
                return await self._buffer.snapshot(str(path), version)
            except DiskRefused as refused:
                return refused

        try:
            copied: FileEntry | MyxaError = await self._ask("buffer", send)
        except MyxaError as error:
            copied = error
        if isinstance(copied, MyxaError):
            message = f"checkpoint {version} lacks its copy of the ledger: {copied.message}"
            raise TrainError(message, remedy=copied.remedy or "see the log of buffer") from copied
        return copied

    async def live_knobs(self) -> LiveKnobs:
        """What was decided so far. Raises CallError if the coordinator does not come back."""
        return await self._ask("coordinator", self._coordinator.live_knobs)

    async def durable(self, version: int, oldest: int | None) -> None:
        """The buffer may give away what only checkpoints older than `oldest` need (None: than the one before). Raises
        CallError if it does not come back."""
        await self._ask("buffer", lambda: self._buffer.durable(version, oldest))
