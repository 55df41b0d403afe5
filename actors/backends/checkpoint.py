"""What checkpoints of both trainers have in common: who agrees on what, when a folder appears, and the random state.

    begin      collective: a hidden folder is made, and what each rank writes is copied to the host
    write      this rank's files; any thread, while training changes the originals
    finish     collective: the manifest names all files, and the folder appears

Before they load, ranks agree that all of them mean the same checkpoint and that every byte of it is as it was written.
Rank 0 names the folder, each file is read by one rank, and what one rank finds wrong is raised on all: ranks that load
different checkpoints would otherwise train on without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor

from ...core.errors import ModelError, TornCheckpoint, TrainError
from ...core.files import FileEntry, describe_file
from ...core.protocols import NamedArray
from ..checkpoints.folder import (
    Manifest,
    begin,
    check_share,
    commit,
    digest_of_manifest,
    find_checkpoint,
    partial_of,
    read_manifest,
    writer_of,
)
from .torch_backend.tensors import from_bytes
from .torch_backend.world import World


class RankContent(Protocol):
    """What one rank writes, copied away."""

    def write(self, partial: Path) -> None:
        """Any thread, not collective."""

    def finish(self, partial: Path) -> None:
        """Once every rank has written. Collective."""

    def files(self, partial: Path) -> list[Path]:
        """Of this rank, those that are there."""
        ...


class PendingCheckpoint:
    """A checkpoint whose content is copied away: training may continue while `write` runs in another thread."""

    def __init__(
        self, folder: str | Path, world: World, manifest: Manifest, copy: Callable[[Path], RankContent]
    ) -> None:
        """Collective; raises TrainError on every rank if any rank fails. `manifest`: without files; its `extra` must be
        JSON. `copy(partial folder)`: collective."""
        check_extra(manifest.extra)
        self._world, self._target, self._manifest = world, Path(folder), manifest
        self._partial = partial_of(self._target, writer_of(manifest.extra))
        self._entries: dict[str, FileEntry] | None = None
        with world.together(self._what):
            if world.rank == 0:
                begin(self._target, writer_of(manifest.extra))
        with world.together(self._what):
            self._content = copy(self._partial)

    @property
    def _what(self) -> str:
        return f"saving checkpoint {self._target}"

    def write(self) -> None:
        """This rank's files; any thread, not collective. Raises TrainError when the disk refuses."""
        with of_a_checkpoint(self._what):
            self._content.write(self._partial)
        self._entries = {path.name: describe_file(path) for path in self._content.files(self._partial)}

    def finish(self) -> None:
        """Once every rank has written: the folder appears. Collective; an older checkpoint there stays until then."""
        world, own = self._world, list[FileEntry]()
        with world.together(self._what):
            if self._entries is None:
                raise TrainError(f"rank {world.rank} has not written its part", remedy="call write() first")
            self._content.finish(self._partial)
            own = [self._entries.get(p.name) or describe_file(p) for p in self._content.files(self._partial)]
        said = world.exchange(msgspec.json.encode(own).decode())
        with world.together(self._what):
            if world.rank == 0:
                files = [entry for text in said for entry in msgspec.json.decode(text, type=list[FileEntry])]
                commit(self._target, msgspec.structs.replace(self._manifest, files=tuple(files)))


def load_checkpoint(
    folder: str | Path, world: World, check: ManifestCheck, restore: Callable[[Path, Manifest], None]
) -> dict[str, Any]:
    """Restore what a trainer saved; returns `extra`. Collective. Raises on every rank, before anything is changed,
    TornCheckpoint if it is not as it was written and TrainError if `check` refuses it, or it is another one on each
    rank. A TrainError of `restore` leaves a part restored: then only another load makes a state of it that may be
    trained."""
    path, manifest = agreed_checkpoint(world, folder, check)
    what = f"loading checkpoint {path}"
    with world.together(what), of_a_checkpoint(what):
        restore(path, manifest)
    return manifest.extra


ManifestCheck = Callable[[Path, Manifest], None]
"""Raises TrainError if this rank cannot use what the manifest, in that folder, lists."""


class CheckpointFinding(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank sees."""

    version: int = -1
    num_updates: int = -1
    digest: str = ""
    torn: str = ""
    """What is not as it was written."""


def agreed_checkpoint(world: World, place: str | Path, check: ManifestCheck) -> tuple[Path, Manifest]:
    """The folder that rank 0 finds at `place`, and its manifest. Collective. Raises on every rank: TornCheckpoint if
    anything is not as it was written, TrainError if there is none, if `check` refuses it, or if ranks see different
    checkpoints there."""
    named = ""
    with world.together(f"loading checkpoint {place}"):
        if world.rank == 0:
            named = str(find_checkpoint(place))
    folder = Path(world.exchange(named)[0])
    what = f"loading checkpoint {folder}"
    manifests: list[Manifest] = []
    own = CheckpointFinding()
    with world.together(what):
        own = _look(folder, world, check, manifests)
    findings = [
        msgspec.json.decode(text, type=CheckpointFinding) for text in world.exchange(msgspec.json.encode(own).decode())
    ]
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


def _look(folder: Path, world: World, check: ManifestCheck, found: list[Manifest]) -> CheckpointFinding:
    try:
        manifest = read_manifest(folder)
        check(folder, manifest)
        check_share(folder, manifest, world.rank, world.size)
        digest = digest_of_manifest(folder)
    except TornCheckpoint as error:
        return CheckpointFinding(torn=error.message)
    found.append(manifest)
    version = manifest.extra.get("version")
    return CheckpointFinding(
        version=version if isinstance(version, int) else -1, num_updates=manifest.num_updates, digest=digest
    )


@contextmanager
def of_a_checkpoint(what: str) -> Generator[None]:
    """Raise TrainError for a file that cannot be read or written: a ModelError would say that the configuration is
    wrong, and the run would not retry."""
    try:
        yield
    except (ModelError, OSError) as error:
        cause = error.message if isinstance(error, ModelError) else str(error)
        raise TrainError(f"{what}: {cause}", remedy="check disk and rights; another attempt may do") from error


RNG_CPU, RNG_CUDA = "rng/cpu", "rng/cuda"


def random_state(device: torch.device) -> Iterator[tuple[str, Tensor]]:
    yield RNG_CPU, torch.get_rng_state()
    if device.type == "cuda":
        yield RNG_CUDA, torch.cuda.get_rng_state(device)


def restore_random(own: Mapping[str, NamedArray], device: torch.device) -> None:
    if RNG_CPU in own:
        torch.set_rng_state(from_bytes(own[RNG_CPU]))
    if RNG_CUDA in own and device.type == "cuda":
        torch.cuda.set_rng_state(from_bytes(own[RNG_CUDA]), device)


def check_extra(extra: Mapping[str, Any]) -> None:
    """Raise TrainError if `extra` would not come back as it is."""
    try:
        same = msgspec.json.decode(msgspec.json.encode(extra)) == dict(extra)
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        remedy = "use numbers, texts, lists, objects"
        raise TrainError(f"`extra` of a checkpoint is not JSON: {error}", remedy=remedy) from error
    if not same:
        raise TrainError("`extra` of a checkpoint changes in JSON", remedy="use lists for tuples and texts for keys")
