"""Saving and restoring the state of training: weights, AdamW's moments, RNG, number of updates; those of a critic too.

Every rank writes its own shards; a replicated model is written by rank 0 alone. Rows of a tensor are put together
from all files that hold them, so a checkpoint may be restored on another number of ranks; on the same number the next
step is the same to the last bit. Nothing is unpickled: files are safetensors.

Before they load, ranks agree that all of them mean the same checkpoint and that every byte of it is as it was written.
Rank 0 names the folder, each file is read by one rank, and what one rank finds wrong is raised on all: ranks that load
different checkpoints would otherwise train on without an error.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor

from ....core.errors import ModelError, TornCheckpoint, TrainError
from ....core.files import FileEntry, describe_file
from ....core.protocols import NamedArray
from ...checkpoints.folder import (
    FORMAT,
    Manifest,
    begin,
    check_model,
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
from ...models.hf_folder import ModelConfig
from ...models.safetensors_file import open_safetensors, write_safetensors
from .adamw import AdamW
from .critic import Critic
from .export import named_array
from .parallel import Replica
from .tensors import from_bytes, integers, local_part
from .world import World


class ManifestCheck(Protocol):
    """Raises TrainError if this rank cannot use what the manifest lists."""

    def __call__(self, folder: Path, manifest: Manifest, /) -> None: ...


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


KINDS = ("weights", "first_moments", "second_moments")
CRITIC = "critic."
"""Before the names of a critic's parameters; no policy's begin with it."""
RNG_CPU, RNG_CUDA = "rng/cpu", "rng/cuda"


@dataclass(frozen=True, slots=True)
class TrainingState:
    """What a checkpoint is made of."""

    replica: Replica
    optimizer: AdamW
    model: ModelConfig
    critic: Critic | None = None

    def trained(self) -> Iterator[tuple[str, Replica, AdamW]]:
        yield "", self.replica, self.optimizer
        if self.critic is not None:
            yield CRITIC, self.critic.replica, self.critic.optimizer

    def critic_identity(self) -> dict[str, Any]:
        """For the manifest; empty without a critic."""
        if self.critic is None:
            return {}
        return {**identity_of(self.critic.layers), "num_updates": self.critic.optimizer.num_updates}


class PendingCheckpoint:
    """A checkpoint whose content is copied away: training may continue while `write` runs in another thread."""

    def __init__(self, folder: str | Path, state: TrainingState, extra: Mapping[str, Any]) -> None:
        """Collective; raises TrainError on every rank if any rank fails. `extra` must be JSON."""
        check_extra(extra)
        self._world, self._target, self._extra = state.replica.world, Path(folder), dict(extra)
        self._model, self._num_updates = state.model, state.optimizer.num_updates
        self._critic = state.critic_identity()
        self._entry: FileEntry | None = None
        with self._world.together(self._what):
            if self._world.rank == 0:
                begin(self._target, writer_of(extra))
        with self._world.together(self._what):
            copies = [(name, tensor.to("cpu", copy=True)) for name, tensor in _tensors(state)]
            self._tensors = [named_array(name, tensor) for name, tensor in copies]

    @property
    def _what(self) -> str:
        return f"saving checkpoint {self._target}"

    def write(self) -> None:
        """This rank's file; any thread, not collective. Raises TrainError when the disk refuses."""
        path = partial_of(self._target, writer_of(self._extra)) / rank_file(self._world.rank)
        with of_a_checkpoint(self._what):
            write_safetensors(path, self._tensors)
        self._entry = describe_file(path)

    def finish(self) -> None:
        """Once every rank has written: the folder appears. Collective; an older checkpoint there stays until then."""
        files: list[FileEntry] = []
        with self._world.together(self._what):
            if self._entry is None:
                raise TrainError(f"rank {self._world.rank} has not written its part", remedy="call write() first")
            files = _gather_entries(self._world, self._entry)
        with self._world.together(self._what):
            if self._world.rank == 0:
                manifest = Manifest(
                    format=FORMAT,
                    model=identity_of(self._model),
                    world_size=self._world.size,
                    num_updates=self._num_updates,
                    files=tuple(files),
                    extra=self._extra,
                    critic=self._critic,
                )
                commit(self._target, manifest)


def load_checkpoint(folder: str | Path, state: TrainingState) -> dict[str, Any]:
    """Restore weights, optimizer and RNG; returns `extra`. Collective.

    Raises on every rank, before anything is changed, TornCheckpoint if it is not as it was written and TrainError if it
    is of another model or critic (or of one where there is none here, or the other way round), or another one on each
    rank. A TrainError while tensors are copied leaves a part of them restored: then only another `load` makes a state
    of it that may be trained.
    """
    world = state.replica.world

    def check(path: Path, manifest: Manifest) -> None:
        check_model(path, manifest, state.model, "torch")
        check_critic(path, manifest, state.critic)

    path, manifest = agreed_checkpoint(world, folder, check)
    what = f"loading checkpoint {path}"
    with world.together(what), of_a_checkpoint(what), ExitStack() as stack:
        files = [stack.enter_context(open_safetensors(path / entry.name)) for entry in manifest.files]
        _restore(state, files)
        state.optimizer.num_updates = manifest.num_updates
        if state.critic is not None:
            state.critic.optimizer.num_updates = manifest.critic["num_updates"]
    return manifest.extra


def _tensors(state: TrainingState) -> Iterator[tuple[str, Tensor]]:
    world = state.replica.world
    for prefix, replica, optimizer in state.trained():
        if not (replica.is_sharded or world.rank == 0):
            continue
        for name, parameter in replica.parameters():
            parts = (local_part(parameter.detach()), *optimizer.moments.get(name, ()))
            for kind, part in zip(KINDS, parts, strict=False):  # a frozen one has no moments
                if part.numel():  # a small tensor leaves the last ranks without rows
                    yield f"{kind}/{prefix}{name}", part
    yield from random_state(world.device)


def random_state(device: torch.device) -> Iterator[tuple[str, Tensor]]:
    yield RNG_CPU, torch.get_rng_state()
    if device.type == "cuda":
        yield RNG_CUDA, torch.cuda.get_rng_state(device)


def restore_random(own: Mapping[str, NamedArray], device: torch.device) -> None:
    if RNG_CPU in own:
        torch.set_rng_state(from_bytes(own[RNG_CPU]))
    if RNG_CUDA in own and device.type == "cuda":
        torch.cuda.set_rng_state(from_bytes(own[RNG_CUDA]), device)


def _restore(state: TrainingState, files: list[dict[str, NamedArray]]) -> None:
    world = state.replica.world
    for prefix, replica, optimizer in state.trained():
        for name, parameter in replica.parameters():
            parts = (local_part(parameter.detach()), *optimizer.moments.get(name, ()))
            num_rows, first_row = parameter.shape[0], 0
            if replica.is_sharded:  # `fully_shard` cuts like `torch.chunk`
                first_row = min(num_rows, -(-num_rows // world.size) * world.rank)
            for kind, part in zip(KINDS, parts, strict=False):  # a frozen one has no moments
                _copy_rows(f"{kind}/{prefix}{name}", files, part, first_row, num_rows)
    restore_random(files[world.rank] if world.rank < len(files) else {}, world.device)


def _copy_rows(key: str, files: list[dict[str, NamedArray]], part: Tensor, first: int, num_rows: int) -> None:
    """Fill `part`, rows `first ...` of a tensor, from the files' parts, which follow one another along dimension 0."""
    last = first + part.shape[0]
    start = 0
    for file in files:
        if key not in file:
            continue
        end = start + file[key].spec.shape[0]
        low, high = max(first, start), min(last, end)
        if low < high:
            part[low - first : high - first].copy_(from_bytes(file[key])[low - start : high - start])
        start = end
    if start == 0 < num_rows and not key.startswith("weights/"):
        name = key.partition("/")[2]
        raise TrainError(
            f"the checkpoint holds no moments of {name}, which was frozen", remedy="set trainer.freeze as it was"
        )
    if start != num_rows:
        raise TrainError(
            f"the checkpoint holds {start} of {num_rows} rows of {key}", remedy="it is torn; use an older one"
        )


def _gather_entries(world: World, entry: FileEntry) -> list[FileEntry]:
    own = torch.frombuffer(
        bytearray(entry.num_bytes.to_bytes(8, "little") + bytes.fromhex(entry.sha256)), dtype=torch.uint8
    )
    rows = world.gather(own).cpu()
    return [
        FileEntry(
            name=rank_file(rank),
            num_bytes=int.from_bytes(bytes(integers(row[:8])), "little"),
            sha256=bytes(integers(row[8:])).hex(),
        )
        for rank, row in enumerate(rows)
    ]


def check_extra(extra: Mapping[str, Any]) -> None:
    """Raise TrainError if `extra` would not come back as it is."""
    try:
        same = msgspec.json.decode(msgspec.json.encode(extra)) == dict(extra)
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        remedy = "use numbers, texts, lists, objects"
        raise TrainError(f"`extra` of a checkpoint is not JSON: {error}", remedy=remedy) from error
    if not same:
        raise TrainError("`extra` of a checkpoint changes in JSON", remedy="use lists for tuples and texts for keys")


def check_critic(path: Path, manifest: Manifest, critic: Critic | None) -> None:
    """Raise TrainError if a checkpoint's critic is not the one that is trained here, or one of the two is missing."""
    theirs = manifest.critic
    if critic is None:
        if theirs:
            raise TrainError(
                f"checkpoint {path} is of a run with a critic, and here is none",
                remedy="set [critic] as it was, or start from the exported model folder",
            )
        return
    if not theirs:
        raise TrainError(
            f"checkpoint {path} is of a run without a critic",
            remedy="set critic.enabled = false, or start from the exported model folder, with critic.warmup_steps",
        )
    for name, ours in identity_of(critic.layers).items():
        if theirs.get(name) != ours:
            raise TrainError(
                f"checkpoint {path} holds another critic: its {name} is {theirs.get(name)!r}, here it is {ours!r}",
                remedy="set critic.path as it was",
            )
    if not isinstance(theirs.get("num_updates"), int):
        raise TrainError(f"checkpoint {path} does not say how often its critic was updated", remedy="use an older one")
