"""torch-memory-saver behind the interface of an arena: the baseline of the benchmarks, and for engines built on it.

The library ends the process at every call that does not fit its state (a pause of a paused or unknown tag, a resume
without enough memory), so the state of each tag is kept here and no such call is made. It copies a tag whole, clean or
not, pins host memory again in each cycle unless `retain_cpu_backup` is set, and reports no sizes: the bytes here are
differences of the device's free memory. Releasing waits for the device first, which the library does not.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Collection, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib import import_module
from threading import RLock
from typing import Any, Literal, Protocol, cast

import torch

from ...core.clock import Clock
from ...core.device_memory import Backing, Tag, TagPolicy, TagReport
from ...core.errors import MemoryFault, OutOfDeviceMemory
from .cuda_memory import trim_torch_cache
from .tagged_memory import AWAY, MAPPED
from .transfer import TransferMeter, TransferStats

HookMode = Literal["preload", "torch"]
"""How it comes between torch and the driver: LD_PRELOAD set before the process began, or a pluggable allocator."""


class Saver(Protocol):
    """What is used of `torch_memory_saver.torch_memory_saver`, release 0.0.10."""

    hook_mode: HookMode
    retain_cpu_backup: bool

    def region(self, *, tag: str, enable_cpu_backup: bool) -> AbstractContextManager[None]: ...
    def pause(self, tag: str) -> None: ...
    def resume(self, tag: str) -> None: ...


class Device(Protocol):
    """The device as torch sees it."""

    def synchronise(self) -> None: ...
    def free_bytes(self) -> int: ...
    def reserved_bytes(self) -> int: ...
    def trim(self) -> None: ...


class TorchDevice:
    """GPU `ordinal` by torch."""

    def __init__(self, ordinal: int) -> None:
        self._ordinal = ordinal

    def synchronise(self) -> None:
        torch.cuda.synchronize(self._ordinal)

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self._ordinal)[0])

    def reserved_bytes(self) -> int:
        return int(torch.cuda.memory_reserved(self._ordinal))

    def trim(self) -> None:
        gc.collect()
        trim_torch_cache(self._ordinal)


@dataclass(slots=True)
class SavedTag:
    """One tag as far as we know."""

    policy: TagPolicy
    backing: Backing = "mapped_dirty"
    num_bytes: int = 0
    """torch's reservations while its regions were open."""


class TorchSaver:
    """The subset of an arena that torch-memory-saver can do; addresses stay there too."""

    def __init__(
        self,
        clock: Clock,
        *,
        ordinal: int = 0,
        hook_mode: HookMode = "torch",
        is_retaining: bool = False,
        saver: Saver | None = None,
        device: Device | None = None,
    ) -> None:
        """`is_retaining`: host memory is kept between cycles. Raises MemoryFault when the library is not there, or is
        used in this process already in another mode."""
        self._clock = clock
        self._device: Device = device or TorchDevice(ordinal)
        self._saver = saver or _import_saver()
        # Its pools free their segments when they are destructed, at the interpreter's end at the latest, and it ends
        # the process with status 1 when that is outside of a region: they never are.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._saver))
        self._tags: dict[Tag, SavedTag] = {}
        self._lock = RLock()
        self._begin(hook_mode, is_retaining=is_retaining)

    def tag(self, tag: Tag, policy: TagPolicy, *, priority: int = 0) -> None:
        """Declare a tag; the priority has no meaning here. MemoryFault when the policy of a used tag would change."""
        del priority
        with self._lock:
            known = self._tags.setdefault(tag, SavedTag(policy))
            if known.policy != policy and known.num_bytes:
                raise MemoryFault(
                    f"torch-memory-saver: tag {tag!r} holds {known.num_bytes:,} bytes under policy {known.policy}",
                    remedy="choose a tag's policy once",
                )
            known.policy = policy

    @contextmanager
    def region(self, tag: Tag, policy: TagPolicy, *, priority: int = 0) -> Generator[None]:
        """What this thread allocates by torch belongs to the tag. MemoryFault while it is away."""
        self.tag(tag, policy, priority=priority)
        saved = self._tags[tag]
        if saved.backing not in MAPPED:
            raise MemoryFault(
                f"torch-memory-saver: a region of tag {tag!r}, which is {saved.backing}", remedy="restore the tag first"
            )
        if policy == "keep":  # nothing of it ever leaves: it needs no saver
            yield
            return
        before = self._device.reserved_bytes()
        try:
            with self._saver.region(tag=tag, enable_cpu_backup=policy == "backup"):
                yield
        finally:
            saved.num_bytes += max(self._device.reserved_bytes() - before, 0)

    def release(self, tags: Collection[Tag]) -> TransferStats:
        """Pause the tags that are here and hold anything. MemoryFault, with nothing done, for unknown and kept ones."""
        with self._lock:
            meter = TransferMeter(self._clock)
            chosen = self._chosen(tags)
            for tag, saved in chosen:
                if saved.policy == "keep":
                    raise MemoryFault(f"torch-memory-saver: tag {tag!r} is kept", remedy="release other tags")
            self._device.trim()
            self._device.synchronise()
            for tag, saved in chosen:
                if saved.backing in AWAY:
                    continue
                if saved.num_bytes:
                    before = self._device.free_bytes()
                    with meter.part("pause"):
                        self._saver.pause(tag)
                    saved.num_bytes = max(self._device.free_bytes() - before, 0) or saved.num_bytes
                is_copied = saved.policy == "backup"
                saved.backing = "host" if is_copied else "discarded"
                meter.copied_bytes += saved.num_bytes if is_copied else 0
                meter.dropped_bytes += 0 if is_copied else saved.num_bytes
            return meter.total()

    def restore(self, tags: Collection[Tag]) -> TransferStats:
        """Resume the tags that are away. OutOfDeviceMemory before anything when they do not fit: the library would end
        the process in the middle. What has no copy comes back undefined, not zeroed."""
        with self._lock:
            meter = TransferMeter(self._clock)
            away = [(tag, saved) for tag, saved in self._chosen(tags) if saved.backing in AWAY]
            self._device.trim()
            wanted, free = sum(saved.num_bytes for _, saved in away), self._device.free_bytes()
            if wanted > free:
                names = ", ".join(tag for tag, _ in away)
                raise OutOfDeviceMemory(
                    f"torch-memory-saver: {names} take {wanted:,} bytes, {free:,} are free",
                    remedy="release others first",
                )
            for tag, saved in away:
                if saved.num_bytes:
                    with meter.part("resume"):
                        self._saver.resume(tag)
                meter.copied_bytes += saved.num_bytes if saved.backing == "host" else 0
                saved.backing = "mapped_dirty"
            self._device.synchronise()
            return meter.total()

    def mark_dirty(self, tag: Tag) -> None:
        """Nothing changes: it copies every time."""
        self._saved(tag)

    def mark_clean(self, tag: Tag) -> None:
        """Nothing changes: it copies every time."""
        self._saved(tag)

    def report(self) -> tuple[TagReport, ...]:
        """Every tag; bytes on the host are those of tags that are away with a copy."""
        with self._lock:
            return tuple(
                TagReport(
                    tag=tag,
                    num_bytes=saved.num_bytes,
                    policy=saved.policy,
                    backing=saved.backing,
                    host_bytes=saved.num_bytes if saved.backing == "host" else 0,
                )
                for tag, saved in self._tags.items()
            )

    def close(self) -> None:
        """Bring back what is away, so that nothing frees what is not there; the memory itself ends with its tensors."""
        with self._lock:
            self.restore([tag for tag, saved in self._tags.items() if saved.backing in AWAY])
            self._tags.clear()

    def _begin(self, hook_mode: HookMode, *, is_retaining: bool) -> None:
        saver = self._saver
        steps: list[tuple[str, Callable[[], None]]] = [
            (
                "it was used before in this process, perhaps in another mode: set the mode before its first use",
                lambda: setattr(saver, "hook_mode", hook_mode),
            ),
            (
                "start the process with LD_PRELOAD naming its library (torch_memory_saver.configure_subprocess)"
                if hook_mode == "preload"
                else "see that its wheel fits this CUDA release",
                lambda: setattr(saver, "retain_cpu_backup", is_retaining),
            ),
        ]
        for remedy, step in steps:
            try:
                step()
            except (AssertionError, AttributeError, OSError, RuntimeError, ValueError) as error:
                raise MemoryFault(
                    f"torch-memory-saver cannot be used in mode {hook_mode!r}: {str(error) or type(error).__name__}",
                    remedy=remedy,
                ) from error

    def _saved(self, tag: Tag) -> SavedTag:
        saved = self._tags.get(tag)
        if saved is None:
            raise MemoryFault(f"torch-memory-saver: tag {tag!r} was not declared", remedy="declare it first")
        return saved

    def _chosen(self, tags: Collection[Tag]) -> list[tuple[Tag, SavedTag]]:
        return [(tag, self._saved(tag)) for tag in dict.fromkeys(tags)]


def _import_saver() -> Saver:
    try:
        module = import_module("torch_memory_saver")
    except ImportError as error:
        raise MemoryFault(
            f"torch-memory-saver cannot be imported: {error}", remedy="pip install torch-memory-saver, or use an arena"
        ) from error
    return cast("Saver", cast("Any", module).torch_memory_saver)
