"""What checkpoints of both trainers have in common: who agrees on what, when a folder appears, and the random state.

    begin      collective: a hidden folder is made, and what each rank writes is copied to the host
    write      this rank's files; any thread, while training changes the originals
    finish     collective: the manifest names all files, and the folder appears

Before they load, ranks agree that all of them mean the same checkpoint and that every byte of it is as it was written.
Rank 0 names the folder, each file is read by one rank, and what one rank finds wrong is raised on all: ranks that load
different checkpoints would otherwise train on without an error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import torch
from torch import Tensor

from ...core.errors import ModelError, TornCheckpoint, TrainError
from ...core.files import FileEntry, describe_file
from ...core.protocols import NamedArray
from ..checkpoints.folder import (
    FORMAT,
    Manifest,
    begin,
    check_share,
    commit,
    digest_of_manifest,
    find_checkpoint,
    identity_of,
    partial_of,
    rank_file,
    read_manifest,
    writer_of,
)
from ..models.adapters import check_facts
from ..models.model_config import ModelConfig
from ..models.safetensors_file import write_safetensors
from .torch_backend.accounting import ReferenceModel, TrainedModel
from .torch_backend.tensors import from_bytes
from .torch_backend.world import World


class Shards(Protocol):
    """Files that a rank writes beside its own."""

    def write(self) -> None:
        """Any thread, not collective."""

    def finish(self) -> None:
        """Once every rank has written. Collective."""


class RankCopy(NamedTuple):
    """What one rank writes, copied away."""

    tensors: list[NamedArray]
    """Of its own file."""
    shards: Shards | None = None


class PendingCheckpoint:
    """A checkpoint whose content is copied away: training may continue while `write` runs in another thread."""

    def __init__(self, folder: str | Path, world: World, manifest: Manifest, copy: Callable[[Path], RankCopy]) -> None:
        """Collective; raises TrainError on every rank if any rank fails. `manifest`: without files; its `extra` must be
        JSON. `copy(partial folder)`: collective."""
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
            if self._content.shards is not None:
                self._content.shards.write()
            write_safetensors(self._partial / rank_file(self._world.rank), self._content.tensors)
        self._entries = {path.name: describe_file(path) for path in self._files()}

    def finish(self) -> None:
        """Once every rank has written: the folder appears. Collective; an older checkpoint there stays until then."""
        world, entries = self._world, list[FileEntry]()
        with world.together(self._what):
            if self._entries is None:
                raise TrainError(f"rank {world.rank} has not written its part", remedy="call write() first")
            if self._content.shards is not None:
                self._content.shards.finish()
            entries = [self._entries.get(path.name) or describe_file(path) for path in self._files()]
        texts = world.exchange(msgspec.json.encode(entries).decode())
        with world.together(self._what):
            if world.rank == 0:
                files = [entry for text in texts for entry in msgspec.json.decode(text, type=list[FileEntry])]
                commit(self._target, msgspec.structs.replace(self._manifest, files=tuple(files)))

    def _files(self) -> list[Path]:
        """What this rank wrote, rank 0 for all of them; not what another rank has under way and will rename:
        safetensors gives it a name that begins with .tmp, torch one that ends so."""
        names = sorted(path.name for path in self._partial.iterdir() if not path.name.startswith(".tmp"))
        own_names = [name for name in names if not name.endswith(".tmp") and _writer_of(name) == self._world.rank]
        return [self._partial / name for name in own_names]


def _writer_of(name: str) -> int:
    """The rank that wrote a file: `__3_0.distcp`, `rank-00003.safetensors`; rank 0 for what all share."""
    number = name.removeprefix("__").split("_")[0] if name.startswith("__") else name[5:10]
    return int(number) if number.isdigit() and name.startswith(("__", "rank-")) else 0


@dataclass(frozen=True, kw_only=True)
class TrainingState(ABC):
    """What a checkpoint of a trainer is made of."""

    world: World
    model: ModelConfig
    policy: TrainedModel
    reference: ReferenceModel[Any] | None = None
    lora: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """`adapter_facts` of this run."""

    def begin_save(self, folder: str | Path, extra: Mapping[str, Any]) -> PendingCheckpoint:
        """Copy everything away. Collective."""
        version = self.reference.version if self.reference else 0
        manifest = Manifest(
            format=FORMAT, model=identity_of(self.model), world_size=self.world.size, files=(),
            num_updates=self.policy.num_updates, extra=dict(extra), reference_version=version, lora=dict(self.lora),
        )  # fmt: skip
        return PendingCheckpoint(folder, self.world, msgspec.structs.replace(manifest, **self.facts()), self.copy)

    def load(self, folder: str | Path) -> dict[str, Any]:
        """Restore what a trainer saved; returns `extra`. Collective. Raises on every rank, before anything is changed,
        TornCheckpoint if it is not as it was written and TrainError if it cannot be used here, or is another one on
        each rank. A TrainError while it is restored leaves a part restored: then only another load makes a state of it
        that may be trained."""
        path, manifest = agreed_checkpoint(self.world, folder, self._check)
        action = f"loading checkpoint {path}"
        with self.world.together(action), of_a_checkpoint(action):
            if self.reference is not None:
                self.reference.version = manifest.reference_version
            self.restore(path, manifest)
            self.policy.optimizer.num_updates = manifest.num_updates
            if self.reference is not None and self.reference.version:
                self.reference.written()
        return manifest.extra

    def _check(self, path: Path, manifest: Manifest) -> None:
        self.check(path, manifest)
        check_facts(path, manifest.lora, self.lora)

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Further fields of the manifest."""

    @abstractmethod
    def copy(self, partial: Path) -> RankCopy: ...

    @abstractmethod
    def check(self, path: Path, manifest: Manifest) -> None:
        """Raise TrainError if this rank cannot use what the manifest, in that folder, lists."""

    @abstractmethod
    def restore(self, path: Path, manifest: Manifest) -> None: ...


def agreed_checkpoint(
    world: World, place: str | Path, check: Callable[[Path, Manifest], None]
) -> tuple[Path, Manifest]:
    """The folder that rank 0 finds at `place`, and its manifest. Collective. Raises on every rank: TornCheckpoint if
    anything is not as it was written, TrainError if there is none, if `check` refuses it, or if ranks see different
    checkpoints there."""
    rank0_path = torn = digest = ""
    with world.together(f"loading checkpoint {place}"):
        if world.rank == 0:
            rank0_path = str(find_checkpoint(place))
    folder = Path(world.exchange(rank0_path)[0])
    manifests: list[Manifest] = []
    with world.together(f"loading checkpoint {folder}"):
        try:
            manifests.append(read_manifest(folder))
            check(folder, manifests[0])
            check_share(folder, manifests[0], world.rank, world.size)
            digest = digest_of_manifest(folder)
        except TornCheckpoint as error:
            torn = error.message
    for rank, message in enumerate(world.exchange(torn)):
        if message:
            raise world.agreed(TornCheckpoint(f"rank {rank}: {message}", remedy="use an older one"))
    digests = world.exchange(digest)
    if len(set(digests)) > 1:
        differences = "; ".join(f"rank {rank}: manifest {text[:12]}" for rank, text in enumerate(digests))
        raise world.agreed(
            TrainError(
                f"ranks see different checkpoints in {folder}: {differences}",
                remedy="is it on a file system that all ranks share?",
            )
        )
    return folder, manifests[0]


@contextmanager
def of_a_checkpoint(action: str) -> Generator[None]:
    """Raise TrainError for a file that cannot be read or written: a ModelError would say that the configuration is
    wrong, and the run would not retry."""
    try:
        yield
    except (ModelError, OSError) as error:
        cause = error.message if isinstance(error, ModelError) else str(error)
        raise TrainError(f"{action}: {cause}", remedy="check disk and rights; another attempt may do") from error


RNG_CPU, RNG_CUDA = "rng/cpu", "rng/cuda"


def random_state(device: torch.device) -> Iterator[tuple[str, Tensor]]:
    yield RNG_CPU, torch.get_rng_state()
    if device.type == "cuda":
        yield RNG_CUDA, torch.cuda.get_rng_state(device)


def restore_random(tensors: Mapping[str, NamedArray], device: torch.device) -> None:
    if RNG_CPU in tensors:
        torch.set_rng_state(from_bytes(tensors[RNG_CPU]))
    if RNG_CUDA in tensors and device.type == "cuda":
        torch.cuda.set_rng_state(from_bytes(tensors[RNG_CUDA]), device)
