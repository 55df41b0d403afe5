"""Where a trainer gang begins: part of the composition root.

first start    what `trainer.resume` names, else the model folder
started again  the newest whole state that this run wrote itself, durable or in the host's memory; else as at first
"""

from __future__ import annotations

from pathlib import Path

from ...actors.checkpoints.folder import CheckpointInfo, find_checkpoint, newest_whole
from ...actors.trainer.start_point import StartPoint
from ...core.config import RunConfig
from ..actor_spec import ActorSpec

CHECKPOINTS = "checkpoints"


def resume_point(config: RunConfig) -> Path | None:
    """The checkpoint that the run goes on from, if any. Raises TrainError if there is none where it should be."""
    return find_checkpoint(config.trainer.resume) if config.trainer.resume else None


def block_limit_s(spec: ActorSpec) -> float:
    """How long a rank may hold the interpreter lock where it sets up, compiles or writes. Nothing is compiled for a
    CPU."""
    return 600.0 if spec.devices else 10.0


def standby_folder(spec: ActorSpec, config: RunConfig) -> str:
    """Where the gang keeps its state in the host's memory; empty if it does not."""
    return spec.ram_dir if config.trainer.standby_every else ""


def gang_start(spec: ActorSpec, config: RunConfig, run_dir: Path) -> StartPoint:
    """See the module's head. Raises TrainError if `trainer.resume` names nothing that is whole."""
    if not spec.attempt:
        return StartPoint(checkpoint=str(resume_point(config) or ""))
    found: list[CheckpointInfo] = []
    passed_over: list[str] = []
    for folder in filter(None, (str(run_dir / CHECKPOINTS), standby_folder(spec, config))):
        newest, torn = newest_whole(folder)
        found += [newest] if newest is not None else []
        passed_over += [f"{info.path}: {info.problem}" for info in torn]
    own = max(found, key=lambda info: info.version, default=None)  # the durable one, of two of a version
    start = own.path if own is not None else resume_point(config)
    return StartPoint(checkpoint=str(start or ""), is_restart=True, passed_over=tuple(passed_over))
