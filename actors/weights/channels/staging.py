"""Copies of published versions in flat buckets on the sender's device, so that training continues while they are read.

Buffers are made once per version in flight (at most two) and reused after `release`; views of every tensor's place are
made with them, so that staging a version is one copy per tensor. Methods may be called from any thread: a version that
is being read is held by its reader, not by its place in a table.

`buffer_mark` is a 64-bit checksum of a buffer, computed where it lies (GPU or CPU) in two passes over memory. It finds
lost, doubled, swapped and torn stretches; it is no defence against malice. Words of 8 bytes are laid out as rows of
`ROW_WORDS`; with all sums modulo 2**64,

    mark = sum_r a(r) * (sum of row r)  +  sum_c b(c) * (sum of column c)

with a(r) = 2 r + 1 and b(c) = K c, K even. A word's weight a + b is odd, hence invertible: any single changed word
changes the mark. Words that change places are found unless their difference is a multiple of a large power of two.
xxhash and BLAKE2 do not run on a GPU, and copying to the host for them costs more than the transfer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from ....core.errors import TrainError
from ....core.messages import TensorSpec
from ...models.safetensors_file import DTYPES
from .plan import WeightPlan, make_plan

TRAVEL = (*(name for name, _ in DTYPES.values()), "float8_e4m3fn", "float8_e5m2")
"""Number types that engines take, by torch's names."""


WAITING_BYTES = 1 << 28
"""Copied together at most, plus one tensor."""
COPIED_TOGETHER = frozenset({torch.bfloat16, torch.float16, torch.float32})
"""What torch's kernel for many tensors takes, of one type at a time."""


@dataclass(slots=True)
class Buffers:
    """Memory of one version: a flat uint8 tensor per bucket, and every tensor's place in it."""

    plan: WeightPlan
    device: torch.device
    flat: tuple[Tensor, ...]
    """Padded to what a digest wants; the padding is zero for ever."""
    views: dict[str, Tensor]
    batches: dict[tuple[str, ...], list[Tensor]] = field(default_factory=dict[tuple[str, ...], list[Tensor]])
    """Names that come together -> their views, as `_Copies` takes them."""
    num_readers: int = 0
    is_released: bool = False

    def bucket(self, number: int) -> Tensor:
        """uint8 [num_bytes]: exactly what travels."""
        return self.flat[number][: self.plan.buckets[number].num_bytes]


@dataclass(frozen=True, slots=True)
class Staged:
    """A version that can be read."""

    version: int
    buffers: Buffers
    digest: str


def place(flat: Tensor, spec: TensorSpec) -> Tensor:
    """The tensor that lies at its offset in a flat uint8 buffer; shares memory."""
    return flat[spec.offset : spec.offset + spec.num_bytes].view(getattr(torch, spec.dtype)).view(spec.shape)


class _Copies:
    """Copies of many tensors by few calls: on a GPU a launch each would take longer than the copying."""

    def __init__(self) -> None:
        self._waiting = dict[torch.dtype, tuple[list[Tensor], list[Tensor]]]()
        """Of one number type each: targets, and their sources."""
        self._num_bytes = 0

    def add(self, target: Tensor, source: Tensor) -> None:
        """Copied now or with a later one; sources may be temporary tensors, so not too many are kept waiting."""
        if target.dtype not in COPIED_TOGETHER or not source.is_contiguous():
            target.copy_(source)
            return
        targets, sources = self._waiting.setdefault(target.dtype, ([], []))
        targets.append(target)
        sources.append(source)
        self._num_bytes += target.nbytes
        if self._num_bytes >= WAITING_BYTES:
            self.flush()

    def flush(self) -> None:
        for targets, sources in self._waiting.values():
            torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
        self._waiting, self._num_bytes = {}, 0


def _as_bytes(tensor: Tensor) -> Tensor:
    """Of a type that torch's kernel for many tensors takes."""
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor


def _check_target(version: int, target: Tensor | None, name: str, tensor: Tensor) -> Tensor:
    if target is None or target.shape != tensor.shape or target.dtype != tensor.dtype:
        raise TrainError(
            f"weight version {version}: {name} came as {tensor.dtype} {list(tensor.shape)}, which is not what the "
            "first version had",
            remedy="a model keeps its tensors for a whole run",
        )
    return target


class Staging:
    """Published versions of one sender."""

    def __init__(self, bucket_bytes: int, *, keeps_buffers: bool = True, joins: bool = False) -> None:
        """`keeps_buffers` False: memory is given back with every release, for it is wanted by others meanwhile.
        `joins`: see `make_plan`."""
        self._bucket_bytes = bucket_bytes
        self._joins = joins
        self._keeps_buffers = keeps_buffers
        self._lock = threading.Lock()
        self._plan: WeightPlan | None = None
        self._is_cut = False
        self.device: torch.device | None = None
        """Where the weights are; None before the first version."""
        self._free: list[Buffers] = []
        self._staged: dict[int, Staged] = {}

    def publish(
        self, version: int, export: Callable[[], Iterator[tuple[str, Tensor]]],
        batches: Callable[[], Iterator[tuple[str | tuple[str, ...], Tensor]]] | None = None,
    ) -> Staged | None:  # fmt: skip
        """Copy all tensors; None if this rank hands none over. Returns when the copies are done on the device. The
        first time `export` is gone through once more, on every rank: to see the shapes, so that nothing has to be kept
        while the buckets are cut. Later versions must have the same names, types and shapes, else TrainError.
        `batches`: the same tensors; those that are alike may come stacked, as (names, tensors)."""
        self.release(version)
        if not self._is_cut:
            specs = [self._spec(name, tensor) for name, tensor in export()]
            self._plan = make_plan(specs, self._bucket_bytes, joins=self._joins) if specs else None
            self._is_cut = True
        buffers = self._take()
        if buffers is None:
            for _ in export():  # other ranks gather from this one
                pass
            return None
        with torch.no_grad():
            self._copy(version, buffers, (batches or export)())
            digest = join_marks([buffer_mark(flat) for flat in buffers.flat])  # waits for the copies too
        staged = Staged(version=version, buffers=buffers, digest=digest)
        with self._lock:
            self._staged[version] = staged
        return staged

    def _spec(self, name: str, tensor: Tensor) -> TensorSpec:
        self.device = tensor.device
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in TRAVEL:
            raise TrainError(
                f"weight {name} has dtype {dtype}, which no engine takes", remedy=f"export one of {TRAVEL}"
            )
        return TensorSpec(name=name, dtype=dtype, shape=tuple(tensor.shape), offset=0, num_bytes=tensor.nbytes)

    def _copy(self, version: int, buffers: Buffers, tensors: Iterator[tuple[str | tuple[str, ...], Tensor]]) -> None:
        num_copied = 0
        copies = _Copies()
        for names, tensor in tensors:
            if isinstance(names, str):
                copies.add(_check_target(version, buffers.views.get(names), names, tensor), tensor)
                num_copied += 1
                continue
            views = buffers.batches.get(names)
            num_unknown = len(names) if views is None else 1
            for name, matrix in zip(names[:num_unknown], tensor[:num_unknown], strict=True):
                _check_target(version, buffers.views.get(name), name, matrix)
            if views is None:
                views = buffers.batches[names] = [_as_bytes(buffers.views[name]) for name in names]
            torch._foreach_copy_(views, _as_bytes(tensor).unbind())  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
            num_copied += len(names)
        copies.flush()
        if num_copied != len(buffers.views):
            raise TrainError(
                f"weight version {version}: {num_copied} of {len(buffers.views)} weights came",
                remedy="see the exporting backend; a model keeps its tensors for a whole run",
            )

    def _take(self) -> Buffers | None:
        with self._lock:
            if self._free:
                buffers = self._free.pop()
                buffers.is_released = False
                return buffers
        return self._allocate(self._plan) if self._plan is not None else None

    def _allocate(self, plan: WeightPlan) -> Buffers:
        device = self.device
        assert device is not None
        flat = tuple(
            torch.zeros(padded_bytes(bucket.num_bytes), dtype=torch.uint8, device=device) for bucket in plan.buckets
        )
        views = {
            spec.name: place(buffer, spec)
            for buffer, bucket in zip(flat, plan.buckets, strict=True)
            for spec in bucket.tensors
        }
        return Buffers(plan=plan, device=device, flat=flat, views=views)

    def read(self, version: int) -> Staged:
        """The version, held until `done`: its memory is not used again before. Raises TrainError if it is not there."""
        with self._lock:
            staged = self._staged.get(version)
            if staged is None:
                raise TrainError(
                    f"weight version {version} is not staged (staged: {sorted(self._staged)})",
                    remedy="it was released; the newest version will be offered next",
                )
            staged.buffers.num_readers += 1
            return staged

    def done(self, staged: Staged) -> None:
        with self._lock:
            staged.buffers.num_readers -= 1
            self._reuse(staged.buffers)

    def release(self, version: int) -> None:
        """The version may be overwritten once it has no reader."""
        with self._lock:
            staged = self._staged.pop(version, None)
            if staged is not None:
                staged.buffers.is_released = True
                self._reuse(staged.buffers)

    def _reuse(self, buffers: Buffers) -> None:
        is_free = buffers.is_released and not buffers.num_readers
        if is_free and self._keeps_buffers and all(b is not buffers for b in self._free):
            self._free.append(buffers)

    def close(self) -> None:
        """Forget everything; memory that is being read goes with its readers."""
        with self._lock:
            self._staged.clear()
            self._free.clear()


@contextmanager
def beside_training(device: torch.device) -> Generator[None]:
    """This thread's work on a GPU goes to its own stream, not behind queued training kernels. Nothing on a CPU."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device, priority=-1)):
        yield


ROW_WORDS = 4096
ROW_BYTES = ROW_WORDS * 8
"""Buffers are padded with zeros to a multiple of this."""
_SPREAD = 4354685564936845354
"""2**65 / golden ratio modulo 2**64, as a signed word; even: keeps column weights away from row weights."""


def padded_bytes(num_bytes: int) -> int:
    """Size of a buffer that holds `num_bytes` and can be digested."""
    return -(-num_bytes // ROW_BYTES) * ROW_BYTES


def buffer_mark(buffer: Tensor) -> Tensor:
    """0-dim int64 on the buffer's device: the mark of a flat uint8 buffer of a multiple of ROW_BYTES."""
    words = buffer.view(torch.int64).view(-1, ROW_WORDS)
    rows, columns = words.sum(dim=1), words.sum(dim=0)
    row_weights = torch.arange(rows.numel(), device=buffer.device, dtype=torch.int64) * 2 + 1
    column_weights = torch.arange(ROW_WORDS, device=buffer.device, dtype=torch.int64) * _SPREAD
    return (rows * row_weights).sum() + (columns * column_weights).sum()


def join_marks(marks: Sequence[Tensor]) -> str:
    """The digest of several buffers: their marks in order, as hexadecimal words. Waits for the device."""
    numbers = cast("list[int]", torch.stack(list(marks)).cpu().tolist())  # pyright: ignore[reportUnknownMemberType]
    return ".".join(f"{number & 0xFFFFFFFFFFFFFFFF:016x}" for number in numbers)
