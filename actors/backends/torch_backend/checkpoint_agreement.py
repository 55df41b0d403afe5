"""Before ranks load a checkpoint: that all of them mean the same one, and that every byte of it is as it was written.

Rank 0 says which folder; each file is read by one rank, so that a gang reads a checkpoint once, and what one rank finds
wrong is raised on all. Ranks that would load different checkpoints would train on in silence. Knows folders and ranks.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import msgspec

from ....core.errors import ModelError, TornCheckpoint, TrainError
from ...checkpoints.folder import Manifest, check_share, digest_of_manifest, find_checkpoint, read_manifest
from .world import World


class Check(Protocol):
    """Raises TrainError if this rank cannot use what the manifest tells of."""

    def __call__(self, folder: Path, manifest: Manifest, /) -> None: ...


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank sees."""

    version: int = -1
    num_updates: int = -1
    digest: str = ""
    """Of the manifest."""
    torn: str = ""
    """What is not as it was written."""


def agreed_checkpoint(world: World, place: str | Path, check: Check) -> tuple[Path, Manifest]:
    """The folder that rank 0 finds at `place`, and its manifest. Collective.

    Raises on every rank: TornCheckpoint if anything is not as it was written, TrainError if there is none, if `check`
    refuses it, or if ranks see different checkpoints there.
    """
    folder = _named(world, place)
    what = f"loading checkpoint {folder}"
    manifests: list[Manifest] = []
    own = Finding()
    with world.together(what):
        own = _look(folder, world, check, manifests)
    findings = [msgspec.json.decode(text, type=Finding) for text in world.exchange(msgspec.json.encode(own).decode())]
    for rank, found in enumerate(findings):
        if found.torn:
            raise world.agreed(TornCheckpoint(f"rank {rank}: {found.torn}", remedy="use an older one"))
    if len(set(findings)) > 1:
        seen = "; ".join(
            f"rank {rank}: version {found.version} after {found.num_updates} updates, manifest {found.digest[:12]}"
            for rank, found in enumerate(findings)
        )
        raise world.agreed(
            TrainError(
                f"ranks see different checkpoints in {folder}: {seen}",
                remedy="is it on a file system that all ranks share?",
            )
        )
    return folder, manifests[0]


def _named(world: World, place: str | Path) -> Path:
    folder = ""
    with world.together(f"loading checkpoint {place}"):
        if world.rank == 0:
            folder = str(find_checkpoint(place))
    return Path(world.exchange(folder)[0])


def _look(folder: Path, world: World, check: Check, found: list[Manifest]) -> Finding:
    try:
        manifest = read_manifest(folder)
        check(folder, manifest)
        check_share(folder, manifest, world.rank, world.size)
        digest = digest_of_manifest(folder)
    except TornCheckpoint as error:
        return Finding(torn=error.message)
    found.append(manifest)
    version = manifest.extra.get("version")
    return Finding(version=version if isinstance(version, int) else -1, num_updates=manifest.num_updates, digest=digest)


@contextmanager
def of_a_checkpoint(what: str) -> Generator[None]:
    """Raise TrainError for a file that cannot be read or written: a ModelError would say that the configuration is
    wrong, and nobody would try again."""
    try:
        yield
    except (ModelError, OSError) as error:
        cause = error.message if isinstance(error, ModelError) else str(error)
        raise TrainError(f"{what}: {cause}", remedy="check disk and rights; another attempt may do") from error
