"""From where a run that is over, or died, can go on: which of its checkpoints, with which ledger.

    newest version first; what is torn is passed over and named. Files' sizes are looked at: their bytes by the ranks
    that load them, which pass over what they find damaged (`composition/gang_start.py`), and here for whoever means
    one version and no other
    with it the run's own ledger, which has all that was generated since; where that is gone, damaged, behind the
    checkpoint or has given away what it would need: the checkpoint's own copy of it

Writes nothing and takes no lock: whoever asks knows that nobody writes the ledger, or that it is not to be looked at.
Knows run directories and what is in checkpoints; must not know how a run is started.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...actors.checkpoints.folder import OLD, CheckpointInfo, whole_ones
from ...actors.checkpoints.run_part import ledger_in
from ...actors.ledger.resume import LEDGER, LedgerFacts, read_facts
from ...core.errors import LaunchError, LedgerError, TrainError
from .origin import Origin

CHECKPOINTS = "checkpoints"
OWN_LEDGER = "its own ledger"


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """A choice."""

    checkpoint: Path
    version: int
    ledger: Path
    ledger_words: str
    """Which ledger that is, and why not another."""
    is_own_ledger: bool
    passed_over: tuple[str, ...]
    """Newer checkpoints that cannot be used, each with the reason."""

    @property
    def place(self) -> Path:
        """Where the checkpoint belongs; a crash while it was replaced may have left it beside that."""
        return self.checkpoint.with_name(self.checkpoint.name.removeprefix(OLD))


def choose_point(
    run_dir: Path, version: int | None, *, needs_copy: bool = False, reads_all: bool = False
) -> ResumePoint:
    """The newest point, or that of `version`. `needs_copy`: the run's own ledger is not for the taking and not looked
    at; else nobody may be writing it. `reads_all`: look at every byte of the checkpoint, for whoever can pass over
    nothing later.

    Raises LaunchError saying what there is instead.
    """
    own = _refused("it is not looked at") if needs_copy else _own_ledger(run_dir / LEDGER)
    origin = Origin.load(run_dir)
    passed: list[str] = []
    for info in whole_ones(run_dir / CHECKPOINTS, version, reads_all=reads_all):
        point = _problem(info) or origin.why_undone(info) or _with_ledger(info, run_dir / LEDGER, own, tuple(passed))
        if isinstance(point, ResumePoint):
            return point
        passed.append(f"{info.path.name}: {point}")
    raise _nothing(run_dir, version, passed)


def _problem(info: CheckpointInfo) -> str:
    if info.problem or info.version >= 0:
        return info.problem
    return "it does not say of which version it is"


WhyNot = Callable[[int], str]
"""Why training cannot go on from a version with some ledger; empty if it can."""


def _own_ledger(path: Path) -> WhyNot:
    if not path.exists():
        return _refused("there is none")
    try:
        facts: LedgerFacts = read_facts(path)
    except LedgerError as error:
        return _refused(error.message)
    return facts.why_not


def _refused(reason: str) -> WhyNot:
    return lambda _: reason


def _with_ledger(info: CheckpointInfo, own: Path, why_not: WhyNot, passed: tuple[str, ...]) -> ResumePoint | str:
    """A point at this checkpoint, or why there is none."""
    reason = why_not(info.version)
    if not reason:
        return ResumePoint(info.path, info.version, own, OWN_LEDGER, is_own_ledger=True, passed_over=passed)
    try:
        copy = ledger_in(info.path)
    except TrainError as error:
        return f"{error.message}; and of the run's own ledger: {reason}"
    words = f"the checkpoint's copy of the ledger (of the run's own: {reason})"
    return ResumePoint(info.path, info.version, copy, words, is_own_ledger=False, passed_over=passed)


def _nothing(run_dir: Path, version: int | None, passed: list[str]) -> LaunchError:
    found = "".join(f"\n  {text}" for text in passed)
    if version is not None:
        if passed:
            return LaunchError(f"{run_dir} cannot go on from version {version}:{found}", remedy="leave --from out")
        there = ", ".join(str(info.version) for info in whole_ones(run_dir / CHECKPOINTS, reads_all=False))
        there = there or "none"
        return LaunchError(f"{run_dir} has no checkpoint of version {version}; there are: {there}")
    if passed:
        return LaunchError(f"no checkpoint in {run_dir} can be used:{found}", remedy="start anew with its config.toml")
    return LaunchError(
        f"{run_dir} has no checkpoint to go on from: it wrote none",
        remedy=f"start anew: myxa up {run_dir / 'config.toml'} (and set trainer.checkpoint_every)",
    )
