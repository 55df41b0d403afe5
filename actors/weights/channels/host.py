"""The channels by which rank 0 writes what engines read, in the memory of a host or in folders.

    shm     each version is an anonymous memory file (`memfd_create`), written once and sealed, so a
            reader sees it unchanged. It has no name, so nothing is ever left in /dev/shm, and the kernel frees it with
            its last holder. Others open it through `/proc/<pid>/fd/<n>`, which the same user may do. Linux
    disk    each version is a HuggingFace folder, so any server that takes a model path can load it:
            `models/hf_folder.py` writes and reads it. With `weights.full_every` the versions between are what changed
            (`delta.py`); a folder stays while the newest version, or one that was not released, needs it
    tcp     the same folders. A rollout actor fetches their files by calls to rank 0, piece by piece, into a folder of
            its host; of versions that are deltas only those that it lacks

The digest is zlib's CRC-32: 3.9 GiB/s where BLAKE2b does 0.9 and SHA-256 1.7. It guards against mistakes, not against
malice: a process that can write the bytes could also write the manifest. `multiprocessing.shared_memory` was
considered: on 3.11 the resource tracker of any reader unlinks it under the others.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import mmap
import os
import re
import shutil
import threading
import zlib
from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import numpy as np
from msgspec.structs import replace

from ....core.errors import ConfigError, EngineError, ModelError, MyxaError, TrainError, raised_as
from ....core.files import locked_scratch, remove_dead_scratch
from ....core.host_memory import available_bytes
from ....core.ids import LEADER
from ....core.messages import TensorSpec, WeightDelta, WeightManifest
from ....core.process import boot_id
from ....core.protocols import NamedArray, WeightSenders, WeightWriter
from ....core.weight_channel import FETCH_BYTES, FetchReply, FetchRequest, SenderOrder
from ...models.adapters import WEIGHTS, write_adapter
from ...models.hf_folder import ADAPTER_CONFIG, open_weights, read_config, read_json, write_folder
from ...models.safetensors_file import open_safetensors
from .delta import FILE, Bytes, patch_folder, write_delta

A = TypeVar("A")
ReadChannel = Literal["shm", "disk", "tcp"]
NO_FACTS: Mapping[str, Any] = {}


def make_writer(
    channel: ReadChannel, folder: Path, model_folder: Path, *, full_every: int = 1, lora: Mapping[str, Any] = NO_FACTS
) -> WeightWriter:
    """The trainer's end. `folder` holds the versions of the disk channel; `model_folder` gives config and tokenizer;
    `lora`: rank and alpha of adapters, which then are what a version is."""
    if channel != "shm":
        return DiskWeightWriter(folder, model_folder, boot_id(), full_every, lora, channel)
    clear_folders(folder)  # the run wrote folders before it was resumed
    return ShmWeightWriter(boot_id())


def read_version(manifest: WeightManifest) -> AbstractContextManager[Mapping[str, NamedArray]]:
    """The published tensors by HuggingFace name, by whatever channel the manifest names; their bytes are valid inside
    the block only, and checked on entry. Raises EngineError; shared memory of another host is refused by name."""
    if manifest.channel == "disk":
        return read_folder(manifest)
    if manifest.channel != "shm" or manifest.host != boot_id():
        raise EngineError(
            f"weight version {manifest.version} lies in the shared memory of another host ({manifest.host})",
            remedy="let trainer and rollout share their nodes, or name different nodes so that folders are used",
        )
    return read_memory(manifest)


def digest_of(tensors: Iterable[NamedArray]) -> str:
    """Over names, types, shapes and bytes, in order: "crc32:" and eight digits."""
    value = 0
    for tensor in tensors:
        spec = tensor.spec
        value = zlib.crc32(f"{spec.name}|{spec.dtype}|{spec.shape}|".encode(), value)
        value = zlib.crc32(tensor.data, value)
    return f"crc32:{value:08x}"


def _check(manifest: WeightManifest, tensors: Mapping[str, NamedArray]) -> None:
    if digest_of(tensors[spec.name] for spec in manifest.tensors) != manifest.digest:
        raise EngineError(
            f"weight version {manifest.version} in {manifest.location} does not match its digest",
            remedy="the bytes were altered or are torn; the next version will be read afresh",
        )


def _manifest(version: int, tensors: Sequence[NamedArray], specs: Sequence[TensorSpec], **place: Any) -> WeightManifest:
    num_bytes = sum(spec.num_bytes for spec in specs)
    return WeightManifest(
        version=version, num_bytes=num_bytes, tensors=tuple(specs), digest=digest_of(tensors), **place
    )


# -- shm

ALIGNMENT = 64
NAME = "myxa-weights"
"""Of memory files."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_PATH = re.compile(r"/proc/\d+/fd/\d+")


@dataclass
class ShmWeightWriter:
    """Publishes versions as memory files; `release` frees them."""

    host: str
    _files: dict[int, int] = field(default_factory=dict[int, int])
    """Version -> descriptor."""

    def publish(self, version: int, tensors: Sequence[NamedArray]) -> WeightManifest:
        """Raises TrainError if there is no memory for it."""
        self.release(version)
        specs, size, free = list[TensorSpec](), 0, available_bytes()
        for tensor in tensors:
            specs.append(replace(tensor.spec, offset=size))
            size += -(-tensor.spec.num_bytes // ALIGNMENT) * ALIGNMENT
        descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            if size > free:  # the kernel would give pages until it has to kill a process
                raise OSError(f"{free} are available")
            os.posix_fallocate(descriptor, 0, max(size, 1))
            with open(descriptor, "wb", closefd=False) as file:
                for spec, tensor in zip(specs, tensors, strict=True):
                    file.seek(spec.offset)
                    file.write(tensor.data)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        except OSError as err:
            os.close(descriptor)
            raise TrainError(
                f"weight version {version} was not published: no shared memory of {size} bytes: {err}",
                remedy="free memory, or use the disk channel",
            ) from err
        self._files[version] = descriptor
        location = f"/proc/{os.getpid()}/fd/{descriptor}"
        return _manifest(version, tensors, specs, channel="shm", location=location, host=self.host)

    def release(self, version: int) -> None:
        """Readers in the middle of one keep its memory until they are done."""
        descriptor = self._files.pop(version, None)
        if descriptor is not None:
            os.close(descriptor)

    def answer(self, order: SenderOrder[A]) -> A:
        raise TrainError("weights lie in shared memory", remedy='fetch them with weights.channel = "tcp"')

    def close(self) -> None:
        for version in list(self._files):
            self.release(version)


@contextmanager
def read_memory(manifest: WeightManifest) -> Generator[Mapping[str, NamedArray]]:
    """Tensors where they lie; valid inside the block. Raises EngineError for memory that is gone, or does not match its
    digest."""
    place = f"weight version {manifest.version}: {manifest.location}"
    if _PATH.fullmatch(manifest.location) is None:  # whatever else has that name is not opened: a pipe would block
        raise EngineError(f"{place} is no place of shared memory", remedy="take it from the manifest")
    try:
        target = str(Path(manifest.location).readlink())
        if not target.startswith(f"/memfd:{NAME}"):
            raise EngineError(f"{place} is {target!r}", remedy="its owner has ended; the number is reused")
        with Path(manifest.location).open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
    except OSError as err:
        remedy = "the process that published it has ended, or runs as another user or in another container"
        raise EngineError(f"{place} cannot be opened: {err.strerror}", remedy=remedy) from err
    memory = memoryview(mapped)
    views: dict[str, NamedArray] = {}
    try:
        for spec in manifest.tensors:
            if not 0 <= spec.offset <= spec.offset + spec.num_bytes <= len(memory):
                raise EngineError(f"{place}: {spec.name} at {spec.offset} + {spec.num_bytes} lies outside")
            views[spec.name] = NamedArray(spec=spec, data=memory[spec.offset : spec.offset + spec.num_bytes])
        _check(manifest, views)
        yield views
    finally:
        with suppress(BufferError):  # a copy that failed still has a view: the memory then goes with it
            for view in (*(tensor.data for tensor in views.values()), memory):
                view.release()
            mapped.close()


# -- disk


@dataclass(slots=True)
class DiskWeightWriter:
    """Publishes versions as folders `<root>/version_<v>`; `release` deletes them."""

    root: Path
    model_folder: Path
    host: str
    full_every: int = 1
    """One version of so many is whole, the others are deltas; 0 as 1: all are. A version that is published again, or
    has other tensors, is whole, and so is one whose base has gone."""
    lora: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Rank and alpha: each version is an adapter folder. Empty: a model folder."""
    channel: Literal["disk", "tcp"] = "disk"
    _folders: set[Path] = field(default_factory=set[Path])
    _unreleased: dict[int, WeightManifest] = field(default_factory=dict[int, WeightManifest])
    _last: WeightManifest | None = None
    """What the next delta changes."""
    _bytes: dict[str, Bytes] = field(default_factory=dict[str, Bytes])
    """Its tensors."""
    _is_clear: bool = False

    def publish(self, version: int, tensors: Sequence[NamedArray]) -> WeightManifest:
        """Write the folder; the first one takes the place of all that a killed trainer left. Raises TrainError naming
        the path when the disk refuses."""
        if not self._is_clear:
            clear_folders(self.root)
            self._is_clear = True
        folder = self._folder(version)
        specs = [tensor.spec for tensor in tensors]
        full = _manifest(version, tensors, specs, channel=self.channel, location=str(folder), host=self.host)
        self._folders.add(folder)
        what, remedy = f"cannot write weight version {version} to {folder}", "free disk space, or put run.dir elsewhere"
        with raised_as(TrainError, what, OSError, MyxaError, remedy=remedy):
            manifest = self._write_delta(full, tensors)
            if self.lora:
                write_adapter(folder, str(self.model_folder.absolute()), self.lora, tensors)
                manifest = full
            elif manifest is None:
                config = json.loads((self.model_folder / "config.json").read_text(encoding="utf-8"))
                write_folder(folder, config, tensors, tokenizer_from=self.model_folder)
                manifest = full
        self._unreleased[version], self._last = manifest, None
        if self.full_every > 1:
            for tensor in tensors:
                new = np.frombuffer(tensor.data, np.uint8)
                old = self._bytes.setdefault(tensor.spec.name, np.empty(0, np.uint8))
                if old.size == new.size:
                    np.copyto(old, new)
                else:
                    self._bytes[tensor.spec.name] = new.copy()
            self._last = manifest
        self._clean()
        return manifest

    def _write_delta(self, full: WeightManifest, tensors: Sequence[NamedArray]) -> WeightManifest | None:
        """None where the version is to be whole. Raises OSError, ModelError."""
        last = self._last
        if last is None or len(last.deltas) + 1 >= self.full_every or full.version <= last.version:
            return None
        is_there = all(Path(path).exists() for path in (last.location, *(delta.path for delta in last.deltas)))
        if not is_there or [*map(_shape, full.tensors)] != [*map(_shape, last.tensors)]:
            return None
        path, size = write_delta(Path(full.location), self._bytes, tensors)
        delta = WeightDelta(
            version=full.version, base=last.version, path=str(path), num_bytes=size, digest=full.digest,
            base_digest=last.digest,
        )  # fmt: skip
        return replace(full, location=last.location, deltas=(*last.deltas, delta))

    def _folder(self, version: int) -> Path:
        return self.root / f"version_{version:08d}"

    def answer(self, order: SenderOrder[A]) -> A:
        """Of a FetchRequest, beside a version that is being written."""
        if not isinstance(order, FetchRequest):
            raise TrainError("weights are written, not sent", remedy="see weights.channel")
        folder = self._folder(order.version)
        what = f"weight version {order.version}: {order.file} in {folder} cannot be read"
        with raised_as(TrainError, what, OSError, ValueError, remedy="the newest version will be offered next"):
            if folder not in self._folders:
                raise FileNotFoundError("it was released, or never written")
            files = {path.name: path.stat().st_size for path in folder.iterdir()}
            data = b""
            if order.file in files:
                with (folder / order.file).open("rb") as file:
                    file.seek(order.offset)
                    data = file.read(max(0, min(order.num_bytes, FETCH_BYTES)))
        return cast(A, FetchReply(data=np.frombuffer(data, np.uint8), files=files))

    def release(self, version: int) -> None:
        self._unreleased.pop(version, None)
        self._clean()

    def _clean(self) -> None:
        """Delete what no version needs that engines may still read, or that the next delta changes."""
        needed = [*self._unreleased.values(), *([] if self._last is None else [self._last])]
        paths = {Path(manifest.location) for manifest in needed}
        paths |= {Path(delta.path).parent for manifest in needed for delta in manifest.deltas}
        for folder in self._folders - paths:
            shutil.rmtree(folder, ignore_errors=True)
        self._folders &= paths

    def close(self) -> None:
        """Delete every folder that was not released, and the one around them."""
        self._unreleased, self._last = {}, None
        self._clean()
        _remove_empty(self.root)


def _shape(spec: TensorSpec) -> tuple[str, str, tuple[int, ...]]:
    return spec.name, spec.dtype, spec.shape


def clear_folders(root: Path) -> None:
    """Delete what a trainer that was killed has left below `root`, where one at a time writes. Never raises: a version
    of the same number is written over what stayed."""
    for folder in root.glob("version_*"):
        shutil.rmtree(folder, ignore_errors=True)
    _remove_empty(root)


def _remove_empty(root: Path) -> None:
    with suppress(OSError):  # there is none, or it holds other files
        root.rmdir()


@contextmanager
def read_folder(manifest: WeightManifest, *, reads_all: bool = True) -> Generator[Mapping[str, NamedArray]]:
    """Named tensors of the version. Raises EngineError for a missing, torn or altered folder; `reads_all` False: as far
    as its headers show, at the same cost for any model."""
    folder = Path(manifest.location)
    if manifest.deltas:
        raise EngineError(
            f"{folder} is not weight version {manifest.version}", remedy="this is a bug: apply its deltas"
        )
    what = f"cannot read weight version {manifest.version} from {folder}"
    remedy = "the folder must be reachable from this host (a shared file system) and left as it was written"
    with (
        raised_as(EngineError, what, ConfigError, ModelError, remedy=remedy),
        open_weights(folder, read_config(folder)) as tensors,
    ):
        for spec in manifest.tensors:
            tensor = tensors.get(spec.name)
            if tensor is None or _shape(tensor.spec) != _shape(spec):
                raise EngineError(
                    f"weight version {manifest.version}: {spec.name} in {folder} is not what was published",
                    remedy="do not write into the run's weight folders",
                )
        if reads_all:
            _check(manifest, tensors)
        yield tensors


def check_adapter(manifest: WeightManifest) -> str:
    """The model folder that the adapters of the version's folder belong to. Raises EngineError unless they are those
    that were published."""
    path = Path(manifest.location) / WEIGHTS
    with raised_as(EngineError, f"cannot read {path}", ModelError):
        with open_safetensors(path) as tensors:
            held = [_shape(tensors[spec.name].spec) for spec in manifest.tensors if spec.name in tensors]
            if held != [*map(_shape, manifest.tensors)]:
                raise EngineError(f"{path} holds other adapters than were published", remedy="do not write there")
            _check(manifest, tensors)
        about = read_json(path.with_name(ADAPTER_CONFIG), remedy="do not write there")
        return str(about.get("base_model_name_or_path"))


FETCHED = "fetched"
"""Folder of deltas that were fetched."""
NUM_ASKED = 4
"""Pieces that are on their way at a time."""
FETCH_S = 60.0
"""For one piece; the call itself has a shorter deadline."""


def _await_reply(reply: Future[FetchReply]) -> FetchReply:
    """Blocks. Raises EngineError where nothing comes, and what the call raises."""
    what = f"{LEADER} sent no piece of a weight version in {FETCH_S:g} s"
    with raised_as(EngineError, what, TimeoutError, remedy="see its log, and the network between the nodes"):
        return reply.result(FETCH_S)


class RebuiltFolder:
    """Whole versions of deltas, or of what was fetched, in a temporary folder of this host. One per engine; it goes
    with the process that has its lock."""

    def __init__(self, senders: WeightSenders | None = None) -> None:
        """`senders`: whose files are fetched; None: none are."""
        self.at = ""
        """What it does now."""
        self._senders = senders
        self._loop: asyncio.AbstractEventLoop | None = None
        """In which they are asked."""
        self._turn = threading.Lock()
        """A call that was given up runs on in its thread."""
        self._root: Path | None = None
        self._scratch = ExitStack()
        self._held: tuple[str, Path] = "", Path()
        """Digest of a version, and the folder that has it."""

    async def whole(self, manifest: WeightManifest) -> tuple[WeightManifest, str]:
        """What the engine can read: as it is, or rebuilt."""
        if manifest.channel != "tcp" and not manifest.deltas:
            self.seen(manifest)
            return manifest, ""
        self._loop = asyncio.get_running_loop()
        return await asyncio.to_thread(self.rebuild, manifest)

    def seen(self, manifest: WeightManifest) -> None:
        """The engine is handed a whole version, which later deltas may change."""
        if manifest.channel == "disk" and self._turn.acquire(blocking=False):
            self._held = manifest.digest, Path(manifest.location)
            self._turn.release()

    def rebuild(self, manifest: WeightManifest) -> tuple[WeightManifest, str]:
        """The same version, whole and checked, and why it was made from the full folder, if it was though it has
        deltas. Blocks. Raises EngineError, CallError where files cannot be fetched: what is held stays."""
        what = f"weight version {manifest.version} cannot be fetched"
        with self._turn, raised_as(EngineError, what, OSError, remedy="has TMPDIR room?"):
            try:
                self.at = f"rebuilds weight version {manifest.version}"
                if self._root is None:
                    remove_dead_scratch()
                    self._root = Path(self._scratch.enter_context(locked_scratch("weights")).name)
                return self._rebuild(self._root, manifest)
            finally:
                self.at = ""

    def _rebuild(self, root: Path, manifest: WeightManifest) -> tuple[WeightManifest, str]:
        (digest, folder), deltas = self._held, manifest.deltas
        digests = [deltas[0].base_digest if deltas else manifest.digest, *(delta.digest for delta in deltas)]
        reason = f"what is held ({digest or 'nothing'}) is the base of none of its deltas"
        if digest in digests:
            begin = digests.index(digest)
            near = self._near(root, deltas[begin:], manifest)
            try:
                return self._make(root, folder, manifest, near), ""
            except (OSError, ValueError, MyxaError) as err:
                reason = str(err)
        full, near = Path(manifest.location), self._near(root, deltas, manifest)
        what = (
            f"weight version {manifest.version} cannot be made from {full} and {len(deltas)} deltas (first: {reason})"
        )
        remedy = 'folders must be reachable from this host (a shared file system, or weights.channel = "tcp")'
        with raised_as(EngineError, what, OSError, ValueError, MyxaError, remedy=f"{remedy}, and TMPDIR have room"):
            rebuilt = self._make(root, full, manifest, near)
        return rebuilt, f"version {manifest.version} is made from {full}: {reason}" if deltas else ""

    def _make(self, root: Path, base: Path, manifest: WeightManifest, deltas: Sequence[WeightDelta]) -> WeightManifest:
        """From `base`, which is the version before the first of `deltas`. What is held goes once all is here."""
        # A server that fails to load goes back to the path that it loaded before: that must not be these bytes.
        folder = root / f"version_{manifest.version:08d}-{manifest.digest.rpartition(':')[2]}"
        if base.parent == root:
            self._held = "", Path()
            base.rename(folder)
        else:
            shutil.rmtree(folder, ignore_errors=True)
            if manifest.channel == "tcp":
                self._fetch(manifest.deltas[0].base if manifest.deltas else manifest.version, folder)
            self._held = "", Path()
            for old in root.glob("version_*"):
                if old != folder:
                    shutil.rmtree(old, ignore_errors=True)
            if manifest.channel != "tcp":
                shutil.copytree(base, folder)
        patch_folder(folder, deltas)
        shutil.rmtree(root / FETCHED, ignore_errors=True)
        rebuilt = replace(manifest, channel="disk", location=str(folder), deltas=())
        with read_folder(rebuilt):
            self._held = manifest.digest, folder
        return rebuilt

    def _near(self, root: Path, deltas: Sequence[WeightDelta], manifest: WeightManifest) -> Sequence[WeightDelta]:
        """As files of this host."""
        if manifest.channel != "tcp":
            return deltas
        near = [replace(delta, path=str(root / FETCHED / delta.digest / FILE)) for delta in deltas]
        for delta in near:
            self._fetch(delta.version, Path(delta.path).parent)
        return near

    def _fetch(self, version: int, folder: Path) -> None:
        """All files of a version's folder; one that is complete stays. Raises CallError, EngineError, OSError."""
        if folder.exists():
            return
        draft = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        for name, size in _await_reply(self._ask(FetchRequest(version=version))).files.items():
            if Path(name).name != name:
                raise EngineError(f"weight version {version} has a file {name!r:.200}", remedy="this is a bug")
            offsets, replies = iter(range(0, size, FETCH_BYTES)), deque[Future[FetchReply]]()
            with (draft / name).open("wb") as file:
                while file.tell() < size:
                    for offset in islice(offsets, NUM_ASKED - len(replies)):
                        piece = FetchRequest(version=version, file=name, offset=offset, num_bytes=FETCH_BYTES)
                        replies.append(self._ask(piece))
                    data = _await_reply(replies.popleft()).data
                    if data.nbytes != min(FETCH_BYTES, size - file.tell()):
                        raise EngineError(f"weight version {version}: {name} ends at {file.tell() + data.nbytes}")
                    file.write(data.data)
                    self.at = f"fetches weight version {version}: {name}, {file.tell()} of {size} bytes"
        draft.rename(folder)

    def _ask(self, request: FetchRequest) -> Future[FetchReply]:
        if self._senders is None or self._loop is None:
            raise EngineError("there is no sender of weights", remedy="this is a bug: name the senders")
        return asyncio.run_coroutine_threadsafe(self._senders.ask(LEADER, request), self._loop)

    async def close(self) -> None:
        if self._root is not None:  # else no thread is left in an embedding program
            await asyncio.to_thread(self._remove)

    def _remove(self) -> None:
        """Blocks while files are deleted. Never raises."""
        with self._turn:
            self._root, self._held = None, ("", Path())
            self._scratch.close()
