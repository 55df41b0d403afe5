"""Checkpoints and exports that somebody asks for beside the schedule: written between two steps, answered when there.

An order waits for the leader, which serves all that wait at the end of a step, and while it waits for data (so also
while the run is paused). One that fails is told to whoever asked; the run goes on. Knows checkpoints and the ranks by
their contract; must not know when a step ends.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path

from ...core.activity import ActivityMeter
from ...core.actor_group import ActorGroup
from ...core.errors import GatherError, MyxaError, TrainError
from ..checkpoints.folder import newest_checkpoint
from ..contracts.roles import TrainerContract
from .checkpoints import Checkpoints

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class _Order:
    is_export: bool
    done: asyncio.Future[str]


class CheckpointOrders:
    """See the module's head. One per leader."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        ranks: ActorGroup[TrainerContract],
        run_dir: str,
        meter: ActivityMeter,
        log: logging.Logger,
    ) -> None:
        """`ranks` fail fast together."""
        self._checkpoints = checkpoints
        self._ranks = ranks
        self._exports = Path(run_dir) / "exports"
        self._meter = meter
        self._log = log
        self._waiting: list[_Order] = []
        self._closed = ""

    @property
    def are_waiting(self) -> bool:
        """Whether there is anything to serve."""
        return bool(self._waiting)

    async def ask(self, *, is_export: bool) -> str:
        """The folder, once it is written. Raises TrainError when it cannot be, or when the run is at its end."""
        if self._closed:
            raise TrainError(f"nothing is written on request any more: {self._closed}", remedy="see what it wrote then")
        order = _Order(is_export, asyncio.get_running_loop().create_future())
        self._waiting.append(order)
        return await order.done

    async def serve(self, version: int) -> None:
        """Write what is waited for; the ranks stand at `version` and may compute."""
        while self._waiting:
            if not self._waiting[0].is_export:  # one by schedule that cannot be written is no business of who asks now
                await self._checkpoints.settle_by_schedule(version)
            order = self._waiting.pop(0)
            if order.done.done():  # whoever asked does not wait any more
                continue
            try:
                folder = await (self._export(version) if order.is_export else self._save(version))
            except MyxaError as error:
                self._log.warning("what was asked for could not be written: %s", error)
                _tell(order, error)
            except BaseException as error:
                _tell(order, TrainError(f"the trainer stopped while writing: {error!r}", remedy="see its log"))
                raise
            else:
                _tell(order, str(folder))

    def close(self, reason: str) -> None:
        """Nothing more is served."""
        self._closed = reason
        for order in self._waiting:
            _tell(
                order, TrainError(f"it was not written before the end: {reason}", remedy="see what the run wrote then")
            )
        self._waiting.clear()

    async def _save(self, version: int) -> Path:
        if self._checkpoints.lacks(version):
            await asyncio.to_thread(_check_room, self._checkpoints.folder_of(version).parent)
        await self._checkpoints.save(version)
        await self._checkpoints.settle()
        return self._checkpoints.folder_of(version)

    async def _export(self, version: int) -> Path:
        folder = self._exports / f"version_{version:08d}"
        try:
            with self._meter.during("compute", f"export {version}"):
                await self._ranks.all(TrainerContract.export_hf, str(folder))
        except GatherError as error:
            name, cause = next(iter(error.errors.items()))
            raise TrainError(f"{name} could not export the model: {cause}", remedy=f"see the log of {name}") from cause
        return folder


def _check_room(holder: Path) -> None:
    """Raises TrainError where the disk has less room than the newest checkpoint takes. Without one nobody knows."""
    try:
        newest, _ = newest_checkpoint(holder)
        if newest is None:
            return
        num_bytes = sum(path.stat().st_size for path in newest.path.rglob("*") if path.is_file())
        num_free = shutil.disk_usage(holder).free
    except OSError:  # it is written, or not, as far as the disk goes
        return
    if num_free < num_bytes:
        raise TrainError(
            f"no space left for a checkpoint: the newest takes {num_bytes / MIB:.1f} MiB, and {num_free / MIB:.1f} MiB "
            f"are free in {holder}",
            remedy="make room there, for example by a lower trainer.keep_last",
        )


def _tell(order: _Order, outcome: str | Exception) -> None:
    if order.done.done():
        return
    if isinstance(outcome, str):
        order.done.set_result(outcome)
    else:
        order.done.set_exception(outcome)
