"""A file as another file tells of it: name, size, digest; and writing one so that it is there whole or not at all.

Knows bytes on a disk. Must not know what they mean.
"""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path
from typing import BinaryIO

import msgspec


class FileEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file."""

    name: str
    num_bytes: int
    sha256: str


def describe_file(path: Path) -> FileEntry:
    """Size and digest of a file, whose bytes are on the disk afterwards. Raises OSError."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        size = os.fstat(file.fileno()).st_size
    return FileEntry(name=path.name, num_bytes=size, sha256=digest)


def open_regular(path: Path) -> BinaryIO:
    """A file opened for reading, at its start. Never waits. Raises OSError, also for a pipe, socket or device."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError("it is a folder, pipe, socket or device, not a regular file")
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_regular(path: Path, max_bytes: int) -> bytes:
    """All bytes of a regular file. Raises OSError, also when it has more than `max_bytes`, before it reads them."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(max_bytes + 1) if size <= max_bytes else b""
    if max(size, len(data)) > max_bytes:
        raise OSError(f"it has {max(size, len(data))} bytes, more than {max_bytes}")
    return data


def sync_folder(folder: Path) -> None:
    """Names in a folder are on the disk too, so that a power cut does not take back what was told. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_durably(path: Path, data: bytes) -> None:
    """A file that is there whole or not at all, also after a power cut; an older one is replaced. Raises OSError."""
    draft = path.with_name(f".{path.name}.part")
    with draft.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    sync_folder(path.parent)
