"""Where a trainer gang begins: part of the composition root. Rank 0 asks, for all ranks.

first start    what `trainer.resume` names, else the model folder. A run that was resumed passes over what it finds torn
               there for the next older one of its own that its ledger can go back to
started again  the newest state that this run wrote itself, durable or in the host's memory, and that was not undone
               since; else as at first

Sizes are looked at here, bytes when it is loaded; what is torn then is passed over. Once all ranks have begun, whatever
is newer is put away: training goes on under the same numbers, and a checkpoint that was passed over for a moment's
trouble would be taken for the newest after the next restart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from ...actors.checkpoints.folder import CheckpointInfo, list_checkpoints, take_away
from ...actors.trainer.start_point import StartPoint
from ...core.config import RunConfig
from ...core.errors import LaunchError, TrainError
from ..actor_spec import ActorSpec
from ..lives.named_checkpoint import named_checkpoint
from ..lives.origin import Origin, start_keeper
from ..lives.undone import UNDONE, past_of, put_away

CHECKPOINTS = "checkpoints"


def block_limit_s(spec: ActorSpec) -> float:
    """How long a rank may hold the interpreter lock where it sets up, compiles or writes. Nothing is compiled for a
    CPU."""
    return 600.0 if spec.devices else 10.0


def standby_folder(spec: ActorSpec, config: RunConfig) -> str:
    """Where the gang keeps its state in the host's memory; empty if it does not."""
    return spec.ram_dir if config.trainer.standby_every else ""


class GangStart:
    """A `StartFinder`; see the module's head."""

    def __init__(self, spec: ActorSpec, config: RunConfig, run_dir: Path) -> None:
        self._attempt = spec.attempt
        self._named = config.trainer.resume
        self._run_dir = run_dir
        self._own = run_dir / CHECKPOINTS
        self._standby = standby_folder(spec, config)

    def find(self, torn: Mapping[str, str]) -> StartPoint:
        """See `StartFinder`. Raises TrainError if `trainer.resume` names nothing that is whole, or nothing older will
        do."""
        origin = Origin.load(self._run_dir)
        floor = origin.lives[-1].floor if origin.lives else 0
        place, passed_over = "", list[str]()
        goes_older = self._goes_on_from_older(torn)
        there, too_old = list(self._there()) if self._attempt or goes_older else [], list[int]()
        for info in sorted(there, key=lambda info: info.version, reverse=True):  # the durable one first, of two
            problem = torn.get(str(info.path)) or info.problem or origin.why_undone(info)
            if not problem and info.version < floor:
                too_old.append(info.version)
                problem = f"the run's own ledger goes back to version {floor} at most"
            if not problem:
                place = str(info.path)
                break
            passed_over.append(problem if str(info.path) in problem else f"{info.path}: {problem}")
        if goes_older and not place:
            raise self._nothing(passed_over, too_old)
        return StartPoint(
            checkpoint=place or self._named_one(torn),
            is_restart=bool(self._attempt),
            passed_over=tuple(passed_over),
            life=len(origin.lives),
            attempt=self._attempt,
        )

    def begun(self, start: StartPoint, version: int) -> None:
        """See `StartFinder`."""
        if not (start.is_restart or start.passed_over):
            return
        try:
            for info in self._there():
                if info.version <= version or str(info.path) == start.checkpoint:
                    continue
                if info.path.parent == self._own:
                    put_away(info.path, past_of(self._run_dir, start.life) / UNDONE)
                else:
                    take_away(info.path)
            Origin.load(self._run_dir).went_back(start.attempt, version).save(self._run_dir)
            if (place := Path(start.checkpoint)).parent == self._own:
                start_keeper(self._run_dir)(place)
        except (OSError, LaunchError) as error:
            raise TrainError(
                f"what is newer than version {version} cannot be put away: {error}",
                remedy=f"check disk and rights of {self._run_dir}",
            ) from error

    def _goes_on_from_older(self, torn: Mapping[str, str]) -> bool:
        """Whether a life that has just begun cannot go on from where it was to."""
        return bool(torn) and Path(self._named).resolve().parent == self._own.resolve()

    def _nothing(self, passed_over: list[str], too_old: list[int]) -> TrainError:
        """Everything stays where it is: what was a moment's trouble of a disk may be read by the next life."""
        found = "".join(f"\n  {text}" for text in passed_over)
        again = f"`myxa resume {self._run_dir} --from"
        return TrainError(
            f"no checkpoint in {self._own} can be gone on from:{found}",
            remedy=f"end the run, then {again} {too_old[0]}`, with the copy of the ledger in that checkpoint"
            if too_old
            else "start anew with its config.toml",
        )

    def _there(self) -> Iterator[CheckpointInfo]:
        for folder in filter(None, (str(self._own), self._standby)):
            yield from list_checkpoints(folder)

    def _named_one(self, torn: Mapping[str, str]) -> str:
        if not self._named:
            return ""
        place = str(named_checkpoint(self._named))
        if place in torn:
            raise TrainError(torn[place], remedy="name an older one, as trainer.resume or with --from")
        return place
