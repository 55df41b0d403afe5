"""The bytes of a data file, unpacked if they are packed: from the start, or at a place.

Libraries: gzip is Python's, zstd is pyarrow's, which is imported for it only. Knows bytes; must not know rows.
"""

from __future__ import annotations

import contextlib
import gzip
import importlib
import io
import os
import weakref
import zlib
from collections.abc import Generator
from pathlib import Path
from typing import Any, BinaryIO, cast

from ...core.errors import ConfigError, DataError
from ...core.files import open_regular

GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
SKIPPED = 1 << 20
"""Bytes that are passed over at a time."""


class FileBytes:
    """A file that is read at any place; one that is packed only forward, and from its start after going back."""

    def __init__(self, path: str) -> None:
        """Look at its first bytes. Raises OSError."""
        self._path = path
        with open_regular(Path(path)) as file:
            head = file.read(4)
        self.packing = "gzip" if head.startswith(GZIP_MAGIC) else "zstd" if head == ZSTD_MAGIC else ""
        """Empty: not packed."""
        self._file: BinaryIO | None = None
        self._closing: weakref.finalize[..., FileBytes] | None = None
        self._at = 0

    def stream(self) -> BinaryIO:
        """A new reader, at the start; errors of its reading are for `told`. Raises OSError, ConfigError for pyarrow."""
        if self.packing == "zstd":
            arrow = pyarrow(self._path, "zstd")
            return cast("BinaryIO", io.BufferedReader(arrow.CompressedInputStream(arrow.OSFile(self._path), "zstd")))
        file = open_regular(Path(self._path))
        if not self.packing:
            return file
        unpacked: Any = gzip.GzipFile(fileobj=file, mode="rb")
        unpacked.myfileobj = file  # it is closed with the reader
        return cast("BinaryIO", unpacked)

    def read_at(self, offset: int, size: int) -> bytes:
        """Fewer bytes at the end of the file. Raises OSError, DataError if it cannot be unpacked."""
        if self._file is None or (self.packing and offset < self._at):
            self.close()
            self._file, self._at = self.stream(), 0
            self._closing = weakref.finalize(self, self._file.close)
        if not self.packing:
            return os.pread(self._file.fileno(), size, offset)
        try:
            while self._at < offset and (passed := self._file.read(min(offset - self._at, SKIPPED))):
                self._at += len(passed)
            data = self._file.read(size)
        except (OSError, EOFError, zlib.error) as error:
            raise self._damage(error) from error
        self._at += len(data)
        return data

    @contextlib.contextmanager
    def told(self) -> Generator[None]:
        """Errors of unpacking become a DataError that names the file."""
        try:
            yield
        except (OSError, EOFError, zlib.error) as error:
            if not self.packing:
                raise
            raise self._damage(error) from error

    def _damage(self, error: Exception) -> DataError:
        # pyarrow has no class of its own for data that ends too early.
        is_cut = isinstance(error, EOFError) or "runcated" in str(error)
        cause = "is cut off: its {} data ends in the middle" if is_cut else "cannot be unpacked: its {} data is damaged"
        return DataError(
            f"{self._path}: {cause.format(self.packing)}", remedy=f"copy it again; `{self.packing} -t` checks it"
        )

    def close(self) -> None:
        """The next reading opens the file again."""
        if self._file is not None and self._closing is not None:
            self._closing()
            self._file = None


def pyarrow(path: str, what: str, module: str = "pyarrow") -> Any:
    """pyarrow, by name, because it is optional, heavy and untyped: only who reads such files pays for it. Raises
    ConfigError if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{path}: {what} needs pyarrow, which is not installed", remedy="pip install 'myxa[parquet]'"
        ) from error
