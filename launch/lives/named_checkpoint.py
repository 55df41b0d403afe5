"""Which checkpoint is meant by a run's name, as `trainer.resume` has it: the newest whole one that training there did
not go back behind. Everybody who begins something with such a name asks here.

Sizes are looked at, not bytes: the ranks read those when they load, and reading them here as well would keep every
other node waiting for node 0.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ...actors.checkpoints.folder import MANIFEST, being_read, find_checkpoint, version_in
from ...core.errors import LaunchError, TornCheckpoint, TrainError
from .origin import Origin
from .resume_point import CHECKPOINTS


def named_checkpoint(place: str | Path, *, reads_all: bool = False) -> Path:
    """`place`: a checkpoint, which is not looked into, a run directory, or its folder of checkpoints. `reads_all`: look
    at every byte all the same, where nobody waits. Raises TrainError naming what was found instead."""
    root = Path(place)
    try:
        origin = Origin.load(root.parent if root.name == CHECKPOINTS else root)
    except LaunchError as error:
        raise TrainError(error.message, remedy=error.remedy) from error
    if (root / "config.toml").is_file() and not (root / CHECKPOINTS).exists():
        remedy = "set trainer.checkpoint_every, or say `myxa ckpt` while it goes on"
        raise TrainError(f"{root} has no checkpoint: it wrote none", remedy=remedy)
    return find_checkpoint(root, reads_all=reads_all, why_not=origin.why_undone)


@contextmanager
def kept_meanwhile(place: str) -> Generator[None]:
    """The run that wrote it may live: it deletes no checkpoint as too old that ranks and buffer of another run begin
    from inside. Raises LaunchError if it has, since that place was found."""
    folder = Path(place)
    is_gone = folder.is_absolute() and version_in(folder) >= 0 and not folder.exists()
    with ExitStack() as stack:
        if is_gone or (place and (folder / MANIFEST).is_file()):  # else none, or something that is not ours to judge
            try:
                stack.enter_context(being_read(folder))
            except TornCheckpoint as error:
                remedy = "start again, or name another one"
                raise LaunchError(f"trainer.resume: {error.message}", remedy=remedy) from error
        yield
