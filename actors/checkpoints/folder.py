"""Checkpoints as folders: the manifest that makes one complete, listing them, finding the newest whole one. No torch.

    version_00000040/
        rank-00000.safetensors   weights, optimizer state and RNG state of rank 0 (its shards)
        rank-00001.safetensors   ... (other trainers keep other files here)
        manifest.json            written last: names, sizes and digests of the files, model, counters, `extra`
        ledger.sqlite, run.json  added by the run (`RunPart`)
    .partial-2.0-version_00000040/   grows: of life 2 of the run, attempt 0 of its gang

A manifest that is missing or does not fit its files marks a torn checkpoint. Each writer has hidden names of its own,
so a process of an earlier life never touches what a later one writes; the later one deletes its files. A complete
folder replaces an older one by two renames: between them the older one is found as `old_of(place)`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ...core.errors import TornCheckpoint, TrainError, raised_as
from ...core.files import FileEntry, describe_file, locked_folder, read_regular, sync_folder, write_durably
from ..ledger.file import LEDGER
from ..models.model_config import MAY_DIFFER, ModelConfig

RUN_FILE = "run.json"
RUN_PART_FORMAT = 2
MAX_BYTES = 64 << 20
_REMEDY = "use an older checkpoint, or the run's own ledger"


class RunPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What run.json says."""

    format: int = RUN_PART_FORMAT
    run: str
    """Name of the run directory that wrote it."""
    version: int
    ledger: FileEntry
    is_kept: bool = False
    """Whether it stays for ever (`trainer.keep_every`)."""


def write_run_part(folder: Path, part: RunPart, ledger: Path) -> None:
    """Move the ledger's copy into the folder, write run.json. Raises TrainError if the disk refuses."""
    with raised_as(
        TrainError, f"cannot write the run's part of checkpoint {folder}", OSError, remedy="check disk and rights"
    ):
        ledger.replace(folder / LEDGER)
        write_durably(folder / RUN_FILE, msgspec.json.format(msgspec.json.encode(part), indent=2))


def read_run_part(folder: Path) -> RunPart:
    """What the folder's run.json says. Raises TrainError if there is none, or it cannot be read."""
    path = folder / RUN_FILE
    try:
        part = msgspec.json.decode(read_regular(path, MAX_BYTES), type=RunPart)
    except FileNotFoundError as error:
        raise TrainError(f"{folder} has no {RUN_FILE}: the run ended while it was written", remedy=_REMEDY) from error
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise TrainError(f"{path} cannot be read: {error}", remedy=_REMEDY) from error
    if part.format != RUN_PART_FORMAT:
        raise TrainError(
            f"{path} has format {part.format}, this program reads {RUN_PART_FORMAT}", remedy="use what wrote it"
        )
    return part


def ledger_in(folder: Path) -> Path:
    """The checkpoint's copy of the ledger, every byte as it was written. Raises TrainError saying what is wrong."""
    entry, path = read_run_part(folder).ledger, folder / LEDGER
    with raised_as(TrainError, f"{path} cannot be read", OSError, remedy=_REMEDY):
        actual = describe_file(path)
    if actual != entry:
        raise TrainError(
            f"{path} has changed: {actual.num_bytes} bytes instead of {entry.num_bytes}, or others", remedy=_REMEDY
        )
    return path


def writing_run(folder: Path) -> str:
    """Name of the run that wrote it; empty if the folder does not say."""
    try:
        return read_run_part(folder).run
    except TrainError:
        return ""


def is_kept(folder: Path) -> bool:
    """Whether the folder says that it stays for ever. One that cannot be read does not."""
    try:
        return read_run_part(folder).is_kept
    except TrainError:
        return False


FORMAT = 1
READERS = 8
"""Threads that compute digests at the same time."""
PLACE_S = 60.0
"""How long a writer waits for other writers to put theirs in place: an older one is deleted meanwhile."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a checkpoint holds."""

    format: int
    model: dict[str, Any]
    """Sizes that weights of another model would not share."""
    world_size: Annotated[int, Meta(ge=1)]
    num_updates: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    """Optimizer updates since the beginning of the run."""
    files: tuple[FileEntry, ...]
    """backend "torch": one per rank, in their order."""
    extra: dict[str, Any]
    """The caller's own JSON values."""
    backend: str = "torch"
    """Which trainer can read it."""
    layout: dict[str, Any] = {}
    """How its ranks shared the model, where that is of interest."""
    critic: dict[str, Any] = {}
    """Sizes of the critic in it, and its `num_updates`; empty: there is none."""
    lora: dict[str, Any] = {}
    """What the adapters in it are (`adapters.adapter_facts`), in place of a model's weights; empty: all weights."""
    reference_version: int = 0
    """Of the policy that is the reference model, whose weights are in it too; 0: the reference is as it was given."""


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

    @property
    def version(self) -> int:
        """Of the weights. -1: unknown."""
        return weights_version(self.path, self.extra)

    @property
    def writer(self) -> Writer | None:
        return writer_of(self.extra)


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def version_in(folder: Path) -> int:
    """The version that a folder's name says; -1 if it says none."""
    number = folder.name.removeprefix(OLD).removeprefix("version_")
    return int(number) if number.isdecimal() else -1


def weights_version(folder: Path, extra: Mapping[str, Any]) -> int:
    """As the manifest's `extra` says, or else the folder's name; -1 if neither does."""
    version: int = extra.get("version", version_in(folder))
    return version


def commit(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, move the folder to its place. Raises TrainError for the disk, or a later writer."""
    writer = writer_of(manifest.extra)
    fresh = partial_of(folder, writer)
    with raised_as(TrainError, f"cannot commit checkpoint {folder}", OSError, remedy="check disk and rights"):
        path = fresh / MANIFEST
        with path.open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(manifest), indent=2))
            file.flush()
            os.fsync(file.fileno())
        sync_folder(fresh)
        with place_of(folder, writer):
            put_in_place(fresh, folder)


@contextmanager
def place_of(folder: Path, writer: Writer | None) -> Generator[None]:
    """`writer` puts something there, and no other process does meanwhile. Raises TrainError if a later life or attempt
    of the run was there first, which makes this writer obsolete; OSError if the disk refuses."""
    with locked_folder(folder.parent, PLACE_S) as is_mine:
        if not is_mine:
            raise TrainError(
                f"another process has been putting a checkpoint into {folder.parent} for {PLACE_S:g} s",
                remedy="see which one has that folder open (`fuser` names it); it is stopped or stuck",
            )
        other = look_at(folder).writer if writer else None
        run = folder.parent.parent.name
        if writer and other and other > writer and writing_run(folder) in ("", run):  # a fork begins with another's
            raise TrainError(
                f"{folder} is of life {other[0]}, attempt {other[1]} of the run: life {writer[0]}, attempt {writer[1]} "
                "comes too late",
                remedy="nothing is lost; this process is left over from before: end it",
            )
        yield


def read_manifest(folder: Path) -> Manifest:
    """The manifest; sizes of its files fit. Raises TornCheckpoint, and TrainError for one of another format."""
    path = folder / MANIFEST
    try:
        manifest = msgspec.json.decode(read_regular(path, MAX_BYTES), type=Manifest)
    except FileNotFoundError as error:
        raise _torn(folder, f"{MANIFEST} is missing: it was never completed") from error
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _torn(folder, f"{MANIFEST} cannot be read: {error}") from error
    if manifest.format != FORMAT:
        raise TrainError(
            f"checkpoint {folder} has format {manifest.format}, this program reads {FORMAT}",
            remedy="use the version that wrote it",
        )
    version = manifest.extra.get("version", 0)
    if type(version) is not int or version < 0:
        raise _torn(folder, f"{MANIFEST} gives {version!r} as the version of its weights")
    names = [f.name for f in manifest.files]
    if manifest.backend == "torch" and names != [rank_file(r) for r in range(manifest.world_size)]:
        raise _torn(folder, f"{MANIFEST} names other files than those of {manifest.world_size} ranks")
    if any(name in ("", ".", "..") or Path(name).name != name for name in names):
        raise _torn(folder, f"{MANIFEST} names files outside the folder")
    for entry in manifest.files:
        file = folder / entry.name
        size = file.stat().st_size if file.is_file() else -1
        if size != entry.num_bytes:
            fault = "is missing" if size < 0 else f"has {size} bytes instead of {entry.num_bytes}"
            raise _torn(folder, f"{entry.name} {fault}")
    return manifest


def forget_writer(folder: Path) -> None:
    """Remove the writer: another run takes it over, and counts its lives from one. Raises TrainError or OSError."""
    manifest = read_manifest(folder)
    extra = {key: value for key, value in manifest.extra.items() if key not in ("life", "attempt")}
    nameless = msgspec.structs.replace(manifest, extra=extra)
    write_durably(folder / MANIFEST, msgspec.json.format(msgspec.json.encode(nameless), indent=2))


def check_digest(folder: Path, entry: FileEntry) -> None:
    """Raise TornCheckpoint if a file's bytes are not those that were written."""
    try:
        actual = describe_file(folder / entry.name)
    except OSError as error:
        raise _torn(folder, f"{entry.name} cannot be read: {error}") from error
    if actual.sha256 != entry.sha256:
        raise _torn(folder, f"the bytes of {entry.name} have changed")


def check_share(folder: Path, manifest: Manifest, reader: int, num_readers: int) -> None:
    """Look at every byte of this reader's share of the files. Raises TornCheckpoint."""
    with ThreadPoolExecutor(READERS, thread_name_prefix="digest") as pool:
        for _ in pool.map(partial(check_digest, folder), manifest.files[reader::num_readers]):
            pass


def digest_of_manifest(folder: Path) -> str:
    """By which readers know that they look at the same checkpoint. Raises TornCheckpoint if it cannot be read."""
    try:
        return hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
    except OSError as error:
        raise _torn(folder, f"{MANIFEST} cannot be read: {error}") from error


def list_checkpoints(folder: str | Path) -> tuple[CheckpointInfo, ...]:
    """All checkpoints in `folder`, oldest first; torn ones come first and say why in `problem`. Sizes are checked,
    digests are not. A folder that does not exist holds none."""
    root = Path(folder)
    if not root.is_dir():
        return ()
    infos = [look_at(path) for path in sorted(root.iterdir()) if path.is_dir() and is_meant(path)]
    return tuple(sorted(infos, key=lambda info: (info.num_updates, info.path.name)))


WhyNot = Callable[[CheckpointInfo], str]
"""Why a whole checkpoint is not to be used; empty if it is."""


def newest_whole(
    folder: str | Path, why_not: WhyNot = lambda _: "", *, reads_all: bool = True
) -> tuple[CheckpointInfo | None, tuple[CheckpointInfo, ...]]:
    """(newest checkpoint whole in every byte, or as `whole_ones`, or None; those passed over for it, newest first, with
    `problem`)."""
    passed_over: list[CheckpointInfo] = []
    for info in whole_ones(folder, reads_all=reads_all):
        judged = info if info.problem else replace(info, problem=why_not(info))
        if judged.is_complete:
            return judged, tuple(passed_over)
        passed_over.append(judged)
    return None, tuple(passed_over)


def whole_ones(folder: str | Path, version: int | None = None, *, reads_all: bool = True) -> Iterator[CheckpointInfo]:
    """All checkpoints, or those of `version`, newest version first; each is looked at in every byte (`reads_all` False:
    as far as sizes show), but only when it is asked for. If one was deleted meanwhile those follow that are newer."""
    seen: set[Path] = set()
    while True:
        infos = [info for info in list_checkpoints(folder) if version in (None, info.version) and info.path not in seen]
        for info in sorted(infos, key=lambda info: (info.version, info.num_updates), reverse=True):
            seen.add(info.path)
            yield _read_through(info) if reads_all and info.is_complete else info
        if not infos or all(path.exists() for path in seen):
            return


def _read_through(info: CheckpointInfo) -> CheckpointInfo:
    try:
        check_share(info.path, read_manifest(info.path), 0, 1)
    except TrainError as error:
        return replace(info, problem=error.message)
    return info


def find_checkpoint(place: str | Path, *, reads_all: bool = True, why_not: WhyNot = lambda _: "") -> Path:
    """The checkpoint meant by `trainer.resume`: a checkpoint folder itself, which is not looked into, or the newest
    whole one in a folder of checkpoints or in a run directory; `reads_all` False: as far as sizes show. `why_not`: for
    one of several. Raises TrainError naming what was found instead."""
    root = Path(place)
    if (root / MANIFEST).exists() or (root / rank_file(0)).exists():
        return root
    if not root.exists() and old_of(root).exists():
        return old_of(root)
    if version_in(root) >= 0 and not root.exists():
        raise TrainError(f"there is no checkpoint {root}", remedy=OTHERS_ONE)
    holder = root / "checkpoints" if (root / "checkpoints").is_dir() else root
    if root.is_file():
        raise TrainError(f"{root} is a file, not a checkpoint", remedy=f"name the folder that it is in: {root.parent}")
    if (root / "config.json").is_file():
        raise TrainError(f"{root} is a model folder, not a checkpoint", remedy="begin with it by model.path")
    newest, passed_over = newest_whole(holder, why_not, reads_all=reads_all)
    if newest is None:
        problems = "; ".join(f"{info.path.name}: {info.problem}" for info in passed_over) or "nothing"
        raise TrainError(
            f"no complete checkpoint in {holder} ({problems})",
            remedy="name a checkpoint, or a run made with trainer.checkpoint_every above 0",
        )
    return newest.path


def look_at(path: Path) -> CheckpointInfo:
    """What a folder is, as far as its manifest and the sizes of its files show."""
    try:
        manifest = read_manifest(path)
    except TrainError as error:
        return CheckpointInfo(path=path, num_updates=-1, extra={}, problem=error.message)
    return CheckpointInfo(path=path, num_updates=manifest.num_updates, extra=manifest.extra, problem="")


OTHERS_ONE = "its run deletes old ones (trainer.keep_last): name the run, or a newer one"


def _torn(folder: Path, why: str) -> TornCheckpoint:
    return TornCheckpoint(f"checkpoint {folder} is torn: {why}", remedy="use an older one")


OLD = ".old-"
GONE = ".gone-"


def old_of(place: Path) -> Path:
    return place.with_name(OLD + place.name)


def is_meant(path: Path) -> bool:
    """Whether a folder is to be looked at. A crash while one took another's place may have left the older one only."""
    if path.name.startswith(OLD):
        return not path.with_name(path.name.removeprefix(OLD)).exists()
    return not path.name.startswith(".")


def put_in_place(fresh: Path, place: Path) -> None:
    """`fresh` becomes `place`; what was there is deleted afterwards. Raises OSError; then one of the two is there."""
    old = old_of(place)
    if place.exists() or place.is_symlink():
        _remove(old)
        place.replace(old)
    fresh.replace(place)
    sync_folder(place.parent)
    _remove(old)


def take_away(place: Path) -> None:
    """Delete a folder so that no reader finds half of it; what cannot be deleted stays under a hidden name."""
    gone = place.with_name(GONE + place.name)
    try:
        _remove(gone)
        place.replace(gone)
        _remove(gone)
    except OSError:
        return


GROWING = ".partial-"
"""How the names of what is being written begin."""

Writer = tuple[int, int]
"""Life of the run, and attempt of its gang in it; the later one is the larger."""


def writer_of(extra: Mapping[str, Any]) -> Writer | None:
    """Who writes, or wrote, what has that beside it. None: it does not say, as older ones do not."""
    life, attempt = extra.get("life"), extra.get("attempt")
    return (life, attempt) if isinstance(life, int) and isinstance(attempt, int) else None


def partial_of(folder: Path, writer: Writer | None = None) -> Path:
    return folder.with_name(f"{GROWING}{f'{writer[0]}.{writer[1]}-' if writer else ''}{folder.name}")


def begin(folder: Path, writer: Writer | None = None) -> Path:
    """Make an empty place to write to. Raises TrainError if the disk refuses."""
    fresh = partial_of(folder, writer)
    with raised_as(TrainError, f"cannot make checkpoint folder {fresh}", OSError, remedy="check disk and rights"):
        if fresh.exists():
            shutil.rmtree(fresh)
        fresh.mkdir(parents=True)
    return fresh


def sweep(holder: Path, sweeper: Writer | None = None) -> None:
    """Delete what crashes and earlier writers left; files of a later writer than `sweeper` are left to it."""
    for path in holder.glob(f"{GROWING}*"):
        writer = _writer_in(path.name.removeprefix(GROWING).partition("-")[0])
        if not (writer and sweeper and writer > sweeper):
            _remove(path)
    for path in [*holder.glob(f"{GONE}*"), *holder.glob(f"{OLD}*")]:
        if not path.name.startswith(OLD) or not is_meant(path):
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():  # of a link what it leads to stays
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def _writer_in(name: str) -> Writer | None:
    life, dot, attempt = name.partition(".")
    return (int(life), int(attempt)) if dot and life.isdecimal() and attempt.isdecimal() else None


MANIFEST = "manifest.json"


def identity_of(config: ModelConfig) -> dict[str, Any]:
    """What makes the weights of one model useless to another, or have it compute something else."""
    names = [field.name for field in fields(ModelConfig) if field.name not in MAY_DIFFER | {"folder_shapes"}]
    facts = {name: getattr(config, name) for name in (*names, "is_scorer")}
    return msgspec.json.decode(msgspec.json.encode(facts))


def check_model(path: Path, manifest: Manifest, config: ModelConfig, backend: str) -> None:
    """Raise TrainError if a checkpoint holds weights of another model, or was written by the other trainer."""
    saved = {"has_mtp": False, "is_scorer": False} | manifest.model
    for name, value in identity_of(config).items():
        if saved.get(name, value) != value:
            raise TrainError(
                f"checkpoint {path} is of another model: {name} is {saved[name]!r}, here it is {value!r}",
                remedy="resume with the model folder that the run began with",
            )
    if manifest.backend != backend:
        raise TrainError(
            f"checkpoint {path} was written by the {manifest.backend} trainer",
            remedy=f'set roles.trainer.kind = "{manifest.backend}", or start from its exported model folder',
        )
