"""The torch trainer's state in a checkpoint: weights, AdamW's moments, RNG, number of updates; those of a critic too,
and a reference model that is an earlier policy.

Every rank writes its own shards; a replicated model is written by rank 0 alone. Rows of a tensor are put together
from all files that hold them, so a checkpoint may be restored on another number of ranks; on the same number the next
step is the same to the last bit. Nothing is unpickled: files are safetensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ....core.errors import TrainError
from ....core.protocols import NamedArray
from ...checkpoints.folder import Manifest, check_model
from ...models.safetensors_file import open_safetensors
from ..checkpoint import RankCopy, TrainingState, random_state, restore_random
from ..rank_backend import named_array
from .critic import Critic
from .parallel import Replica, TorchModel
from .tensors import from_bytes, local_part

KINDS = ("weights", "first_moments", "second_moments")
CRITIC, REFERENCE = "critic.", "reference."
"""Before the names of their parameters; no policy's begin with it."""
Moments = Mapping[str, tuple[Tensor, ...]]


@dataclass(frozen=True, kw_only=True)
class TorchState(TrainingState):
    """What a checkpoint is made of."""

    policy: TorchModel
    critic: Critic | None = None

    def parts(self) -> Iterator[tuple[str, Replica, Moments]]:
        yield "", self.policy, self.policy.optimizer.moments
        if self.critic is not None:
            yield CRITIC, self.critic.model, self.critic.model.optimizer.moments
        if self.reference is not None and self.reference.version:
            yield REFERENCE, self.reference.model, {}

    def facts(self) -> dict[str, Any]:
        return {"critic": {} if self.critic is None else {"num_updates": self.critic.model.num_updates}}

    def copy(self, partial: Path) -> RankCopy:
        copies = [(name, tensor.to("cpu", copy=True)) for name, tensor in _tensors(self)]
        return RankCopy([named_array(name, tensor) for name, tensor in copies])

    def check(self, path: Path, manifest: Manifest) -> None:
        check_model(path, manifest, self.model, "torch")
        if bool(manifest.critic) != (self.critic is not None):
            raise TrainError(
                f"checkpoint {path} is of a run {'with' if manifest.critic else 'without'} a critic, this run is not",
                remedy="set [critic] as it was, or start from the exported model folder, with critic.warmup_steps",
            )

    def restore(self, path: Path, manifest: Manifest) -> None:
        with ExitStack() as stack:
            _restore(self, [stack.enter_context(open_safetensors(path / entry.name)) for entry in manifest.files])
        if self.critic is not None:
            self.critic.model.optimizer.num_updates = manifest.critic["num_updates"]


def _tensors(state: TorchState) -> Iterator[tuple[str, Tensor]]:
    world = state.policy.world
    for prefix, replica, moments in state.parts():
        if not (replica.is_sharded or world.rank == 0):
            continue
        for name, parameter in replica.kept():
            parts = (local_part(parameter.detach()), *moments.get(name, ()))
            for kind, part in zip(KINDS, parts, strict=False):  # a frozen one has no moments
                if part.numel():  # a small tensor leaves the last ranks without rows
                    yield f"{kind}/{prefix}{name}", part
    yield from random_state(world.device)


def _restore(state: TorchState, files: list[dict[str, NamedArray]]) -> None:
    world = state.policy.world
    for prefix, replica, moments in state.parts():
        for name, parameter in replica.kept():
            parts = (local_part(parameter.detach()), *moments.get(name, ()))
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
