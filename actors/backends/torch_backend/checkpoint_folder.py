"""Checkpoints as folders: the manifest that makes one complete, listing them, finding the newest whole one.

    version_00000040/
        rank-00000.safetensors   weights, optimizer state and RNG state of rank 0 (its shards)
        rank-00001.safetensors   ... (other trainers keep other files here)
        manifest.json            written last: names, sizes and digests of the files, model, counters, `extra`

A folder is written beside its place under a hidden name and moved there when complete; a manifest that is missing or
does not fit its files marks a torn one. Knows files; no torch, so launcher and coordinator may import it.

Library considered: torch.distributed.checkpoint. Not used: its metadata file is a pickle, which runs code of whoever
wrote it, and it has no digests.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ....core.errors import TrainError

MANIFEST = "manifest.json"
FORMAT = 1
MAX_MANIFEST_BYTES = 64 << 20


class FileEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file of a checkpoint."""

    name: str
    num_bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a checkpoint holds."""

    format: int
    model: dict[str, Any]
    """Sizes that weights of another model would not share."""
    world_size: int
    num_updates: int
    """Optimizer updates since the beginning of the run."""
    files: tuple[FileEntry, ...]
    """backend "torch": one per rank, in their order."""
    extra: dict[str, Any]
    """The caller's own JSON values."""
    backend: str = "torch"
    """Which trainer can read it."""
    layout: dict[str, Any] = {}
    """How its ranks shared the model, where that is of interest."""


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """One folder that is, or was meant to be, a checkpoint."""

    path: Path
    num_updates: int
    """-1 if torn."""
    extra: dict[str, Any]
    problem: str
    """Why it cannot be used; empty if it can."""

    @property
    def is_complete(self) -> bool:
        return not self.problem


def rank_file(rank: int) -> str:
    """File name of a rank's part."""
    return f"rank-{rank:05d}.safetensors"


def describe_file(path: Path) -> FileEntry:
    """Size and digest of a file, whose bytes are on the disk afterwards."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        size = os.fstat(file.fileno()).st_size
    return FileEntry(name=path.name, num_bytes=size, sha256=digest)


def partial_of(folder: Path) -> Path:
    """Where a checkpoint grows before it is complete."""
    return folder.with_name(f".partial-{folder.name}")


def begin(folder: Path) -> Path:
    """Make an empty place to write to. Raises TrainError if the disk refuses."""
    partial = partial_of(folder)
    try:
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
    except OSError as error:
        raise TrainError(f"cannot make checkpoint folder {partial}: {error}", remedy="check disk and rights") from error
    return partial


def commit(folder: Path, manifest: Manifest) -> None:
    """Write the manifest into the partial folder and move it to its place, over an older checkpoint of that name."""
    partial = partial_of(folder)
    old = folder.with_name(f".old-{folder.name}")
    try:
        path = partial / MANIFEST
        with path.open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(manifest), indent=2))
            file.flush()
            os.fsync(file.fileno())
        _sync(partial)
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.replace(old)
        partial.replace(folder)
        _sync(folder.parent)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise TrainError(f"cannot commit checkpoint {folder}: {error}", remedy="check disk and rights") from error


def _sync(folder: Path) -> None:
    """Names in a folder are on the disk too, so that a power cut does not take back what was told."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_manifest(folder: Path) -> Manifest:
    """The manifest, after a look at the sizes of the files it names. Raises TrainError saying what is torn."""
    path = folder / MANIFEST
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise _torn(folder, f"{MANIFEST} is larger than any honest one")
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError as error:
        raise _torn(folder, f"{MANIFEST} is missing: it was never completed") from error
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _torn(folder, f"{MANIFEST} cannot be read: {error}") from error
    if manifest.format != FORMAT:
        raise TrainError(
            f"checkpoint {folder} has format {manifest.format}, this program reads {FORMAT}",
            remedy="use the version that wrote it",
        )
    names = [f.name for f in manifest.files]
    if manifest.backend == "torch" and names != [rank_file(r) for r in range(manifest.world_size)]:
        raise _torn(folder, f"{MANIFEST} names other files than those of {manifest.world_size} ranks")
    if any(name in ("", ".", "..") or Path(name).name != name for name in names):
        raise _torn(folder, f"{MANIFEST} names files outside the folder")
    for entry in manifest.files:
        file = folder / entry.name
        size = file.stat().st_size if file.is_file() else -1
        if size != entry.num_bytes:
            what = "is missing" if size < 0 else f"has {size} bytes instead of {entry.num_bytes}"
            raise _torn(folder, f"{entry.name} {what}")
    return manifest


def check_digest(folder: Path, entry: FileEntry) -> None:
    """Raise TrainError if a file's bytes are not those that were written."""
    if describe_file(folder / entry.name).sha256 != entry.sha256:
        raise _torn(folder, f"the bytes of {entry.name} have changed")


def list_checkpoints(folder: str | Path) -> tuple[CheckpointInfo, ...]:
    """All checkpoints in `folder`, oldest first; torn ones come first and say why in `problem`.

    Sizes are checked, digests only when one is loaded. A folder that does not exist holds none.
    """
    root = Path(folder)
    if not root.is_dir():
        return ()
    infos = [_info(path) for path in sorted(root.iterdir()) if path.is_dir() and not path.name.startswith(".")]
    return tuple(sorted(infos, key=lambda info: (info.num_updates, info.path.name)))


def newest_checkpoint(folder: str | Path) -> tuple[CheckpointInfo | None, tuple[CheckpointInfo, ...]]:
    """(newest complete checkpoint or None, the torn ones that were passed over)."""
    infos = list_checkpoints(folder)
    complete = [info for info in infos if info.is_complete]
    return (complete[-1] if complete else None), tuple(info for info in infos if not info.is_complete)


def find_checkpoint(place: str | Path) -> Path:
    """The checkpoint meant by `trainer.resume`: a checkpoint folder itself, or the newest in a folder of checkpoints or
    in a run directory. Raises TrainError naming what was found instead."""
    root = Path(place)
    if (root / MANIFEST).exists() or (root / rank_file(0)).exists():
        return root
    holder = root / "checkpoints" if (root / "checkpoints").is_dir() else root
    newest, torn = newest_checkpoint(holder)
    if newest is None:
        found = "; ".join(f"{info.path.name}: {info.problem}" for info in torn) or "nothing"
        raise TrainError(
            f"no complete checkpoint in {holder} ({found})",
            remedy="name a checkpoint, or a run made with trainer.checkpoint_every above 0",
        )
    return newest.path


def _info(path: Path) -> CheckpointInfo:
    try:
        manifest = read_manifest(path)
    except TrainError as error:
        return CheckpointInfo(path=path, num_updates=-1, extra={}, problem=error.message)
    return CheckpointInfo(path=path, num_updates=manifest.num_updates, extra=manifest.extra, problem="")


def _torn(folder: Path, why: str) -> TrainError:
    return TrainError(f"checkpoint {folder} is torn: {why}", remedy="use an older one")
