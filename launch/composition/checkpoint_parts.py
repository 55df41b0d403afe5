"""What the composition root needs for checkpoints: their options, and the ledger that a resumed run begins with."""

from __future__ import annotations

from pathlib import Path

from ...actors.checkpoints.folder import look_at
from ...actors.checkpoints.run_part import ledger_in
from ...actors.ledger.file import is_in_use
from ...actors.ledger.resume import LEDGER, read_facts
from ...actors.trainer.checkpoints import CheckpointOptions
from ...core.config import RunConfig
from ...core.errors import LedgerError, TrainError
from ..actor_spec import ActorSpec
from ..lives.named_checkpoint import named_checkpoint
from ..lives.origin import Origin, origin_events, start_keeper


def checkpoint_options(spec: ActorSpec, config: RunConfig, run_dir: Path) -> CheckpointOptions:
    """How the leader writes them."""
    trainer = config.trainer
    return CheckpointOptions(
        run_dir=str(run_dir),
        every=trainer.checkpoint_every,
        keep_last=trainer.keep_last,
        keep_every=trainer.keep_every,
        at_stop=trainer.checkpoint_at_stop and not config.megatron.offload_optimizer,
        is_async=trainer.async_save,
        origin=tuple if spec.attempt else lambda: origin_events(run_dir),
        keep_start=start_keeper(run_dir),
        writer=(len(Origin.load(run_dir).lives), spec.attempt),
    )


def earlier_ledger(config: RunConfig, run_dir: Path) -> Path | None:
    """The ledger that the run's is copied from; None if it begins with an empty one, or has one already.

    With `trainer.resume`: that of the run that wrote the checkpoint, if it is over and can go back so far, else the
    copy in the checkpoint. Raises TrainError if there is neither.
    """
    if not config.trainer.resume or (run_dir / LEDGER).exists():
        return None
    checkpoint = named_checkpoint(config.trainer.resume)
    own = checkpoint.parent.parent / LEDGER
    reason = _why_not(own, look_at(checkpoint).version)
    if not reason:
        return own
    try:
        return ledger_in(checkpoint)
    except TrainError as error:
        raise TrainError(
            f"{checkpoint} has no ledger to go on with: {error.message}; and of its run's own: {reason}",
            remedy="resume from another checkpoint",
        ) from error


def _why_not(ledger: Path, version: int) -> str:
    if is_in_use(ledger):
        return f"{ledger} is in use: its run lives"
    try:
        return read_facts(ledger).why_not(version)
    except LedgerError as error:
        return error.message
