"""From where a run that has ended can resume: which of its checkpoints, with which ledger. Writes and locks nothing.

Checkpoints are tried from the newest on; a torn one is passed over and named. Only file sizes are checked: ranks check
bytes when they load. The run's own ledger is preferred; if it is missing, damaged or cannot go back so far, the
checkpoint's copy is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...actors.checkpoints.folder import OLD, CheckpointInfo, find_checkpoint, is_kept, ledger_in, look_at, whole_ones
from ...actors.ledger.file import LEDGER, is_in_use, read_facts
from ...core.config import RunConfig
from ...core.errors import LaunchError, LedgerError, TrainError, raised_as
from ..run_dir import CONFIG
from .origin import CHECKPOINTS, RunOrigin

OWN_LEDGER = "its own ledger"


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """A checkpoint and a ledger to resume with."""

    checkpoint: Path
    version: int
    ledger: Path
    ledger_words: str
    is_own_ledger: bool
    passed_over: tuple[str, ...]
    """Newer checkpoints that cannot be used, each with the reason."""

    @property
    def place(self) -> Path:
        """Proper path of the checkpoint; a crash during its replacement may have left it beside it."""
        return self.checkpoint.with_name(self.checkpoint.name.removeprefix(OLD))


def choose_point(
    run_dir: Path, version: int | None, *, needs_copy: bool = False, reads_all: bool = False
) -> ResumePoint:
    """The newest point, or that of `version`. `needs_copy`: do not read the run's own ledger; without it, no process
    may be writing that ledger. `reads_all`: check every byte of the checkpoint, for callers that cannot pass over it
    later.

    Raises LaunchError saying what there is instead.
    """
    why_not = _refused("it is not read") if needs_copy else _own_ledger(run_dir / LEDGER)
    origin = RunOrigin.load(run_dir)
    passed: list[str] = []
    for info in whole_ones(run_dir / CHECKPOINTS, version, reads_all=reads_all):
        problem = info.problem or ("" if info.version >= 0 else "it does not say of which version it is")
        problem = problem or origin.why_undone(info)
        point = problem or _with_ledger(info, run_dir / LEDGER, why_not, tuple(passed))
        if isinstance(point, ResumePoint):
            return point
        passed.append(f"{info.path.name}: {point}")
    raise _nothing(run_dir, version, passed)


WhyNot = Callable[[int], str]
"""Why training cannot continue from a version with some ledger; empty if it can."""


def _own_ledger(path: Path) -> WhyNot:
    try:
        return read_facts(path).why_not
    except LedgerError as error:
        return _refused(error.message)


def _refused(reason: str) -> WhyNot:
    return lambda _: reason


def _with_ledger(info: CheckpointInfo, ledger: Path, why_not: WhyNot, passed: tuple[str, ...]) -> ResumePoint | str:
    """A point at this checkpoint, or why there is none."""
    reason = why_not(info.version)
    if not reason:
        return ResumePoint(info.path, info.version, ledger, OWN_LEDGER, is_own_ledger=True, passed_over=passed)
    try:
        copy = ledger_in(info.path)
    except TrainError as error:
        return f"{error.message}; and of the run's own ledger: {reason}"
    text = f"the checkpoint's copy of the ledger (of the run's own: {reason})"
    return ResumePoint(info.path, info.version, copy, text, is_own_ledger=False, passed_over=passed)


def _nothing(run_dir: Path, version: int | None, passed: list[str]) -> LaunchError:
    listed = "".join(f"\n  {text}" for text in passed)
    if version is not None:
        if passed:
            return LaunchError(f"{run_dir} cannot resume from version {version}:{listed}", remedy="leave --from out")
        versions = ", ".join(str(info.version) for info in whole_ones(run_dir / CHECKPOINTS, reads_all=False))
        return LaunchError(f"{run_dir} has no checkpoint of version {version}; there are: {versions or 'none'}")
    if passed:
        return LaunchError(
            f"no checkpoint in {run_dir} can be used:{listed}", remedy="start a new run with its config.toml"
        )
    return LaunchError(
        f"{run_dir} has no checkpoint: it wrote none",
        remedy=f"start a new run: myxa up {run_dir / 'config.toml'} (and set trainer.checkpoint_every)",
    )


def checkpoints_of(run_dir: Path) -> list[dict[str, Any]]:
    """Every checkpoint, each byte checked, as JSON types, newest first. Raises LaunchError for the directory."""
    if not run_dir.is_dir():
        raise LaunchError(f"there is no run directory {run_dir}", remedy="`myxa up` prints it when it starts")
    origin, rows = RunOrigin.load(run_dir), list[dict[str, Any]]()
    for info in whole_ones(run_dir / CHECKPOINTS):
        problem, lacks = info.problem or origin.why_undone(info), ""
        try:
            ledger_in(info.path)
        except TrainError as error:  # it serves its own run only
            lacks = "" if problem else f"whole, but needs the run's own ledger: {error.message}"
        stays = "for ever" if is_kept(info.path) else ""
        row = {"version": info.version, "folder": info.path.name, "stays": stays, "problem": problem, "lacks": lacks}
        rows.append(row)
    return rows


def named_checkpoint(place: str | Path, *, reads_all: bool = False) -> Path:
    """`place`: a checkpoint, which is not looked into, a run directory, or its folder of checkpoints. `reads_all`:
    check every byte, for callers that others do not wait for. Raises TrainError naming what was found instead."""
    root = Path(place)
    with raised_as(TrainError, "", LaunchError):
        origin = RunOrigin.load(root.parent if root.name == CHECKPOINTS or root.is_file() else root)
    if (root / CONFIG).is_file() and not (root / CHECKPOINTS).exists():
        remedy = "set trainer.checkpoint_every, or say `myxa ckpt` while it runs"
        raise TrainError(f"{root} has no checkpoint: it wrote none", remedy=remedy)
    return find_checkpoint(root, reads_all=reads_all, why_not=origin.why_undone)


def earlier_ledger(config: RunConfig, run_dir: Path) -> Path | None:
    """The ledger that the run's is copied from; None if it begins with an empty one, or has one already.

    With `trainer.resume`: that of the run that wrote the checkpoint, if it is over and can go back so far, else the
    copy in the checkpoint. Raises TrainError if there is neither.
    """
    if not config.trainer.resume or (run_dir / LEDGER).exists():
        return None
    checkpoint = named_checkpoint(config.trainer.resume)
    ledger = checkpoint.parent.parent / LEDGER
    why_not = _refused(f"{ledger} is in use: its run is live") if is_in_use(ledger) else _own_ledger(ledger)
    point = _with_ledger(look_at(checkpoint), ledger, why_not, ())
    if isinstance(point, ResumePoint):
        return point.ledger
    raise TrainError(f"{checkpoint} has no usable ledger: {point}", remedy="resume from another checkpoint")
