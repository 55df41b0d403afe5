"""From what a run file names to files: one file, a folder of them, a pattern, or a dataset saved by `datasets`.

Several files are read as one, in the order of their names, which is the same at every start. The format follows from
name and first bytes.
"""

from __future__ import annotations

import glob
import itertools
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import cast

import orjson

from ...core.errors import ConfigError, DataError, raised_as
from .columnar import ColumnarFile, Kind
from .layout import RowLayout
from .recorded import RecordedGroups
from .row_file import BOM, PACKED, FileBytes, JsonlFile, Row, RowFile

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow", ".feather", ".ipc")
PACKINGS = (".gz", ".zst")
FORMATS = "JSONL, JSON arrays (both also as .gz or .zst), parquet and Arrow files are read"
HEAD_BYTES = 512
NO_DATA = ("dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json")
"""Beside the Arrow files of a dataset that `datasets` saved."""
SHOWN_NAMES = 8
COLUMNAR_MAGIC: tuple[tuple[bytes, Kind], ...] = (
    (b"PAR1", "parquet"), (b"ARROW1", "arrow"), (b"\xff\xff\xff\xff", "arrow stream"),
)  # fmt: skip
LEDGER_MAGIC, TAR_AT = b"SQLite format 3", 257
FOREIGN_MAGIC: tuple[tuple[bytes, str, str], ...] = (
    (b"version https://git-lfs", "a git-LFS pointer, not the data itself", "fetch the data: `git lfs pull`"),
    (b"PK\x03\x04", "a zip archive", "unpack it"),
    (b"BZh", "bzip2-compressed", "unpack it"), (b"\xfd7zXZ", "xz-compressed", "unpack it"),
    (b"\xff\xfe\x00\x00", "UTF-32 text", "save it as UTF-8"),
    *((magic, "UTF-16 text", "save it as UTF-8")
      for magic in (b"\xff\xfe", b"\xfe\xff", b"{\x00", b"[\x00", b"\x00{", b"\x00[")),
    (b"<?xml", "an XML file", "write it as JSONL"),
    *((magic, "a web page", "download the file itself") for magic in (b"<!DOCTYPE", b"<!doctype", b"<html")),
)  # fmt: skip
BINARY = re.compile(rb"[\x01-\x08\x0e-\x1f]|[\xc0-\xff](?![\x80-\xbf]|$)|(?<![\x80-\xff])[\x80-\xbf]")
"""In what is no text in UTF-8."""
UNREAD = (".csv", ".tsv", ".bz2", ".xz", ".lz4", ".zip", ".tar", ".tgz", ".part")
SHARD = re.compile(r"(?P<head>(?:.*[-._])?)(?P<number>\d{5})-of-(?P<total>\d{5}).*")
SPLIT = re.compile(r"(?:^|[-_.])(train|training|test|testing|valid|validation|val|dev|eval)(?=[-_.])", re.IGNORECASE)


def check_data_files(path: str, key: str) -> tuple[str, ...]:
    """The files that a path names, each of a format that is read. Raises ConfigError naming the run file's key if
    they are not there, DataError for a format that is not known."""
    files = files_of(path, key)
    for file in files:
        _kind(file, key)
    return files


def is_large(path: str, key: str, max_bytes: int) -> bool:
    """Whether the rows of JSON files cannot be counted without reading more than so much."""
    files = [file for file in files_of(path, key) if _kind(file, key) == "json"]
    return sum(Path(file).stat().st_size for file in files) > max_bytes


def needs_pyarrow(path: str) -> bool:
    """Whether a name says that such files are read. Those that are not there need nothing."""
    try:
        files = files_of(path, "")
    except (ConfigError, DataError):
        files = (path,)
    return any(file.endswith((*SUFFIXES[3:], ".zst")) for file in files)


def open_rows(path: str, layout: RowLayout, key: str) -> RowFile:
    """The rows of the files that a path names. Raises ConfigError naming `key`, DataError, OSError."""
    files = files_of(path, key)
    if layout.is_recorded and files != (path,):
        raise ConfigError(f"{key}: {path} is not one file", remedy="name each dump that `myxa dump` wrote")
    row_files = [_open_file(file, layout, key) for file in files]
    return row_files[0] if len(row_files) == 1 else RowFiles(row_files)


class RowFiles:
    """Rows of several files, one file after another."""

    def __init__(self, files: Sequence[RowFile]) -> None:
        self._files = files

    @property
    def num_rows(self) -> int:
        return sum(file.num_rows for file in self._files)

    def rows(self) -> Iterator[Row]:
        return itertools.chain.from_iterable(file.rows() for file in self._files)


def files_of(path: str, key: str) -> tuple[str, ...]:
    """The files that a path names, in the order in which they are read. Raises ConfigError."""
    with raised_as(ConfigError, f"{key}: {path} cannot be read", OSError, remedy="check its permissions"):
        if Path(path).is_dir():
            return _of_folder(path, key)
        if not Path(path).exists() and glob.has_magic(path):
            # as a shell reads it
            names = sorted(name for name in glob.glob(path, recursive=True) if not Path(name).is_dir())  # noqa: PTH207
            if not names:
                raise ConfigError(f"{key}: no file matches {path}", remedy=f"check {key}; {_neighbours(path)}")
            return tuple(names)
    return (path,)


def _of_folder(path: str, key: str) -> tuple[str, ...]:
    folder = Path(path)
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith((".", "_")))
    saved = _saved_names(folder)
    data = saved or [name for name in names if _suffix(name) and name not in NO_DATA]
    if not data:
        holds = f"holds {', '.join(names[:SHOWN_NAMES])}" if names else "is empty"
        raise ConfigError(
            f"{key}: {path} is a folder without data files; it {holds}",
            remedy="name a file, or a folder or pattern (`folder/*.jsonl`) of them",
        )
    _check_shards(folder, data)
    if lacks := sorted(set(saved) - set(names)):
        raise DataError(f"{folder}: {lacks[0]} is missing, by state.json", remedy="copy the folder again")
    if not saved and (left_out := [name for name in names if _is_left_out(folder / name)]):
        raise ConfigError(
            f"{key}: the folder {path} holds {left_out[0]}, which would not be read",
            remedy="say by a pattern which files are meant, for example folder/*.jsonl or folder/**/*.jsonl",
        )
    splits = {match[1].lower() for match in map(SPLIT.search, data) if match is not None}
    for kind, values in (("formats", {_suffix(name) for name in data}), ("splits", splits)):
        if len(values) > 1:
            raise ConfigError(
                f"{key}: the folder {path} holds files of several {kind}: {', '.join(sorted(values))}",
                remedy=f"say which by a pattern, for example {folder / (data[0][:5] + '*' + _suffix(data[0]))}",
            )
    return tuple(str(folder / name) for name in data)


def _check_shards(folder: Path, names: Sequence[str]) -> None:
    """Files that are parts of one set must be all of it, each once. Raises DataError."""
    shards: dict[str, list[re.Match[str]]] = {}
    for match in filter(None, map(SHARD.fullmatch, names)):
        shards.setdefault(match["head"], []).append(match)
    for head, matches in shards.items():
        remedy = "copy the folder again, or say by a pattern which files are meant"
        numbers, totals = Counter(int(match["number"]) for match in matches), {match["total"] for match in matches}
        if len(totals) > 1 or numbers.total() > len(numbers):
            shown = ", ".join(match[0] for match in matches[:SHOWN_NAMES])
            raise DataError(
                f"{folder}: parts of more than one set {head}*, perhaps of the same rows: {shown}", remedy=remedy
            )
        (total,) = totals
        if missing := set(range(int(total))) - numbers.keys():
            raise DataError(
                f"{folder}: {head}{min(missing):05}-of-{total} is missing, by the names of the others", remedy=remedy
            )


def _saved_names(folder: Path) -> list[str]:
    """The files of a dataset that `datasets` saved there; others beside them are its caches. Raises DataError."""
    try:
        state = orjson.loads((folder / "state.json").read_bytes())
        names = [str(file["filename"]) for file in state["_data_files"]]
    except (OSError, ValueError, TypeError, KeyError):
        return []
    if state.get("_indices_data_files"):  # which rows are meant
        raise DataError(
            f"{folder}: the saved dataset is a selection of rows", remedy="`flatten_indices()` before `save_to_disk`"
        )
    return names


def _is_left_out(path: Path) -> bool:
    """Whether rows may be in it that a folder's own files are not."""
    is_folder = path.is_dir() and any(_suffix(file.name) for file in path.iterdir())
    return is_folder or path.name.lower().endswith(UNREAD)


def _suffix(name: str) -> str:
    """Of a data file, with that of its packing; empty for another file."""
    name = name.lower()
    packing = next(filter(name.endswith, PACKINGS), "")
    suffix = next(filter(name.removesuffix(packing).endswith, SUFFIXES), "")
    return suffix + packing if suffix else ""


def _kind(path: str, key: str) -> Kind | str:
    """The format of a file, by its first bytes: a Kind, "json" or "ledger". Raises as `check_data_files`."""
    if path.lower().endswith((".csv", ".tsv", ".csv.gz", ".tsv.gz")):
        raise DataError(
            f"{path}: is CSV, whose values have no types and no nesting",
            remedy="write it as JSONL; with pandas: `pd.read_csv(..., dtype=str, keep_default_na=False).to_json(..., "
            "orient='records', lines=True)`",
        )
    head, packing = _head(path, key)
    if head.startswith(LEDGER_MAGIC):
        return "ledger"
    columnar = next((kind for magic, kind in COLUMNAR_MAGIC if head.startswith(magic)), None)
    if columnar and packing:
        raise DataError(f"{path}: is {packing}-compressed {columnar}", remedy="unpack it")
    if PACKED.match(head):
        raise DataError(f"{path}: is compressed twice", remedy="unpack it once")
    if columnar is None:
        _check_json(path, head)
    return columnar or "json"


def _check_json(path: str, head: bytes) -> None:
    """What begins as nothing that is read is said to be what it is, if that is known. Raises DataError."""
    if not head.removeprefix(BOM):
        raise DataError(f"{path}: the file is empty", remedy="write one JSON object per line")
    for magic, kind, remedy in FOREIGN_MAGIC:
        if head.lstrip(b" \r\n\t").startswith(magic):
            raise DataError(f"{path}: is {kind}", remedy=f"{remedy}; {FORMATS}")
    if b"\0" in head[:TAR_AT] and head[TAR_AT:].startswith(b"ustar"):
        raise DataError(f"{path}: is a tar archive", remedy=f"unpack it; {FORMATS}")
    is_text = head.removeprefix(BOM).lstrip().startswith((b"{", b"["))
    if not is_text and (path.endswith(SUFFIXES[3:]) or BINARY.search(head[:16])):
        kind = "a binary file" if BINARY.search(head[:16]) else "no parquet or Arrow file"
        raise DataError(f"{path}: is {kind}: it begins with {head[:8]!r}", remedy=f"unpack or copy it; {FORMATS}")


def _head(path: str, key: str) -> tuple[bytes, str]:
    """The first bytes, unpacked, and the packing."""
    try:
        if Path(path).exists() and not Path(path).is_file():  # rows are read again when they are drawn
            raise ConfigError(f"{key}: {path} is a pipe or a device", remedy="write what it gives into a file")
        file = FileBytes(path)
        if file.packing == "zstd" and find_spec("pyarrow") is None:
            return b"{", file.packing
        with file.naming_damage(), file.stream() as stream:
            return stream.read(HEAD_BYTES), file.packing
    except FileNotFoundError:
        link = f"; it is a link to {os.readlink(path)}" if Path(path).is_symlink() else ""  # noqa: PTH115
        raise ConfigError(f"{key}: there is no file {path}{link}", remedy=f"check {key}; {_neighbours(path)}") from None
    except OSError as error:
        raise ConfigError(
            f"{key}: {path} cannot be read: {error.strerror or error}", remedy="check its permissions"
        ) from error


def _open_file(path: str, layout: RowLayout, key: str) -> RowFile:
    kind = _kind(path, key)
    if (kind == "ledger") != layout.is_recorded:
        raise DataError(
            f"{path} {'is' if kind == 'ledger' else 'is not'} an SQLite file, as dumps of groups are",
            remedy=f'preset = "recorded" reads what `myxa dump` wrote, other presets read rows; {FORMATS}',
        )
    if kind == "ledger":
        return RecordedGroups(path)
    return JsonlFile(path) if kind == "json" else ColumnarFile(path, layout, cast("Kind", kind))


def _neighbours(path: str) -> str:
    folder = Path(path).parent
    if not folder.is_dir():
        return f"there is no folder {folder}"
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_file())[:SHOWN_NAMES]
    return f"its folder holds {', '.join(names)}" if names else "its folder is empty"
