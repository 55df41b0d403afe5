"""Rows arrive the same from every format, from several files in a fixed order, and broken files are told by cause."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc as ipc
import pyarrow.parquet as pq
import pytest
from tests.data.opened import open_prompts, prompts, run_on

from myxa.actors.data import row_file
from myxa.actors.data.data_files import needs_pyarrow
from myxa.core.errors import ConfigError, DataError, MyxaError

ROWS: list[dict[str, Any]] = [
    {
        "prompt": [{"role": "user", "content": f'{row} + 1? \u00e9 \U0001f600 \\ " \n'}],
        "label": str(row + 1),
        "metadata": {"z": row, "a": [1.5, None, 0.1], "big": 2**63 - 1},
    }
    for row in range(300)
]


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def zstd(data: bytes) -> bytes:
    return pa.Codec("zstd").compress(data).to_pybytes()


def arrow(path: Path, rows: list[dict[str, Any]], *, is_stream: bool = False) -> None:
    table = pa.Table.from_pylist(rows)
    make = ipc.new_stream if is_stream else ipc.new_file
    with make(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=70)


def saved(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """As `datasets` writes it."""
    folder.mkdir()
    names = [f"data-{number:05d}-of-00002.arrow" for number in (0, 1)]
    for name, part in zip(names, (rows[:100], rows[100:]), strict=True):
        arrow(folder / name, part, is_stream=True)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def write(folder: Path, kind: str) -> Path:
    path, whole, parts = folder / kind, lines(ROWS), [lines(ROWS[:100]), lines(ROWS[100:])]
    match kind:
        case "t.json":
            path.write_text(json.dumps(ROWS, indent=1))
        case "flat.json":
            path.write_bytes(b"\xef\xbb\xbf" + json.dumps(ROWS, ensure_ascii=False).encode())
        case "t.jsonl.gz" | "gz without suffix":
            path.write_bytes(b"".join(map(gzip.compress, parts)))
        case "t.json.gz":
            path.write_bytes(gzip.compress(json.dumps(ROWS).encode()))
        case "t.jsonl.zst":
            path.write_bytes(b"".join(b"\x50\x2a\x4d\x18\4\0\0\0size" + zstd(part) for part in parts))  # as pzstd does
        case "t.parquet":
            pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=77)
        case "t.arrow" | "stream.arrow":
            arrow(path, ROWS, is_stream=kind == "stream.arrow")
        case "saved":
            saved(path, ROWS)
        case "folder" | "*.jsonl":
            inner = folder / "folder" if kind == "folder" else folder
            inner.mkdir(exist_ok=True)
            for name, part in zip(("a.jsonl", "b.jsonl"), parts, strict=True):
                (inner / name).write_bytes(part)
            (inner / "README.md").write_text("#")
        case _:
            path.write_bytes(whole)
    return path


def opened(path: Path | str, **data: Any) -> Any:
    return open_prompts(run_on(path, data={"shuffle": False, **data}))


def refused(path: Path | str, **data: Any) -> str:
    with pytest.raises(MyxaError) as caught:
        opened(path, **data)
    assert isinstance(caught.value, DataError | ConfigError)
    return str(caught.value).replace(f"{Path(path).parent}/", "")


KINDS = (
    *("t.jsonl", "a name without suffix", "t.json", "flat.json", "t.jsonl.gz", "gz without suffix", "t.json.gz"),
    *("t.jsonl.zst", "t.parquet", "t.arrow", "stream.arrow", "saved", "folder", "*.jsonl"),
)


@pytest.mark.parametrize("kind", KINDS)
def test_g_rows_are_the_same_from_every_format(tmp_path: Path, kind: str) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    wanted = opened(write(plain, "t.jsonl"))
    dataset = opened(write(tmp_path, kind))
    assert dataset.fingerprint == wanted.fingerprint
    for draw in (0, 299, 99, 100, 7, 250, 301):
        prompt, other = dataset.prompt(draw), wanted.prompt(draw)
        assert prompt is not None and other is not None
        assert (prompt.messages, prompt.label, prompt.row) == (other.messages, other.label, other.row)
        assert json.dumps(prompt.metadata) == json.dumps(other.metadata), "in the order of the row"
    cut, again = (opened(f"{tmp_path / kind}@[{slice_}]", shuffle=True) for slice_ in ("-201:200", "99:-100"))
    assert sorted(prompt.label for prompt in prompts(cut)) == sorted(row["label"] for row in ROWS[99:200])
    assert (len(cut), cut.fingerprint) == (101, again.fingerprint)


@pytest.mark.parametrize("kind", ["t.json", "t.jsonl.gz", "t.jsonl.zst", "t.parquet", "t.arrow", "folder"])
def test_f7_a_bad_row_is_told_with_its_place_in_every_format(tmp_path: Path, kind: str, monkeypatch: Any) -> None:
    rows = [*ROWS[:150], {**ROWS[150], "label": None}, *ROWS[151:]]
    monkeypatch.setitem(globals(), "ROWS", rows)
    path = write(tmp_path, kind)
    text = refused(path)
    places = {"t.json": "t.json, element 150: ", "folder": "folder/b.jsonl:51: ", "t.parquet": "t.parquet, row 150: "}
    places |= {"t.jsonl.gz": "t.jsonl.gz:151: ", "t.jsonl.zst": "t.jsonl.zst:151: ", "t.arrow": "t.arrow, row 150: "}
    assert text.startswith(places[kind])
    assert 'column "label" is null' in text
    assert (len(opened(path, on_bad_line="skip")), opened(path, on_bad_line="skip").num_bad) == (299, 1)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ('[{"prompt": "a", "label": "1"},\n {"prompt": "b", "la', "t.json: is no JSON array: Input data was truncated"),
        ('[{"prompt": "a", "label": "1"}\n {}]', "t.json: is no JSON array: JSON is malformed: expected ',' or ']'"),
        ('[{"prompt": "a", "label": "1"},]', "t.json: is no JSON array: "),
        ('[{"prompt": "a",\n "label": nope}]', "t.json: is no JSON array: "),
        ("[]", "t.json: the file holds no rows"),
        ('[{"prompt": "a", "label": "1"}]\n["b"]', "t.json: is no JSON array: "),
        ('[{"prompt": "a", "label": "1"}, 3]', "t.json, element 1: it is no JSON object: 3"),
        ("[" * 100_000, "t.json: is no JSON array: "),
        ('[{"prompt": "a", "label": NaN}]', "t.json: is no JSON array: "),
    ],
)
def test_f7_a_broken_array_is_told(tmp_path: Path, text: str, cause: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    assert refused(path).startswith(cause)


def test_an_array_that_is_too_large_to_be_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_file, "MAX_ARRAY_BYTES", 100)
    assert "write it as JSONL" in refused(write(tmp_path, "t.json"))


def damaged(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]


@pytest.mark.parametrize("pack", [gzip.compress, zstd])
def test_f7_packed_files_that_are_cut_damaged_or_foreign(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "t.jsonl.gz"
    whole = pack(lines(ROWS))
    for size in (len(whole) - 1, len(whole) - 9, len(whole) // 2, 6):
        path.write_bytes(whole[:size])
        assert "t.jsonl.gz: is cut off: its" in refused(path)
    path.write_bytes(damaged(whole, len(whole) // 2))
    assert "t.jsonl.gz: " in refused(path)
    path.write_bytes(whole + b"garbage")
    assert "cannot be unpacked: its" in refused(path)
    path.write_bytes(pack(whole))
    assert "t.jsonl.gz: is compressed twice" in refused(path)
    path.write_bytes(pack(b""))
    assert "t.jsonl.gz: the file is empty" in refused(path)
    path.write_bytes(pack(b"PAR1 and so on"))
    assert "-compressed parquet -- unpack it" in refused(path)


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n"
FOREIGN: list[tuple[str, bytes, str]] = [
    ("t.jsonl", LFS, "git-LFS"), ("t.parquet", LFS, "git-LFS"), ("t.parquet", b"plain text", "no parquet or Arrow"),
    ("t.arrow", b"plain text", "no parquet or Arrow"), ("t.arrow", b"ARROW1\x00\x00 and so on", "Arrow"),
    ("t.arrow", b"\xff\xff\xff\xff and so on", "Arrow"), ("t.jsonl", "{}".encode("utf-16"), "UTF-16"),
    ("t.jsonl", '{"prompt"'.encode("utf-16-le"), "UTF-16"), ("t.jsonl", "{}".encode("utf-32"), "UTF-32"),
    ("t.pkl", b"\x80\x04\x95", "a binary file: it begins with b'\\x80"), ("t.jsonl.lz4", b"\x04\x22\x4d\x18", "a binary file"),
    ("t.jsonl.zz", zlib.compress(b"{}"), "a binary file"), ("t.lzma", b"]\0\0\x80", "a binary file"), ("t.Z", b"\x1f\x9d\x90", "a binary file"),
    ("t.jsonl.bz2", b"BZh9", "bzip2-compressed"), ("t.jsonl", "中文\n".encode(), ":1: it is not JSON"),
    ("t.jsonl", b"PK\x03\x04", "zip"), ("t.tar", tarfile.TarInfo("000.json").tobuf(), "a tar archive"),
    ("t.tar.gz", gzip.compress(tarfile.TarInfo("000.json").tobuf(tarfile.GNU_FORMAT)), "a tar archive"), ("t.jsonl", b"<!DOCTYPE html>", "web page"),
    ("t.csv", b"prompt,label\n2+2,4\n", "CSV"), ("t.jsonl", b"", "empty"), ("t.jsonl", b"\xef\xbb\xbf", "empty"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "kind"), FOREIGN)
def test_f7_files_of_another_kind_are_told_what_they_are(tmp_path: Path, name: str, content: bytes, kind: str) -> None:
    (tmp_path / name).write_bytes(content)
    told = refused(tmp_path / name)
    assert told.startswith(f"{name}:") and kind in told


def test_a_file_of_json_under_another_name_is_read(tmp_path: Path) -> None:
    for name in ("t.parquet", "t.arrow", "t.jsonl.gz", "t.jsonl.zst", "t.txt"):
        (tmp_path / name).write_bytes(lines(ROWS[:3]))
        assert len(opened(tmp_path / name)) == 3


def test_g_folders_that_do_not_say_what_is_meant(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    assert refused(folder).startswith("data.train: data is a folder without data files; it is empty")
    (folder / "README.md").write_text("#")
    assert "without data files; it holds README.md" in refused(folder)
    (folder / "train-00000.jsonl").write_bytes(lines(ROWS[:2]))
    (folder / ".hidden.jsonl").write_bytes(b"torn")
    assert len(opened(folder)) == 2
    (folder / "test-00000.jsonl").write_bytes(lines(ROWS[:2]))
    assert "holds files of several splits: test, train -- say which by a pattern" in refused(folder)
    assert len(opened(folder / "train-*.jsonl")) == 2
    (folder / "test-00000.jsonl").unlink()
    (folder / "train-00000.jsonl.gz").write_bytes(gzip.compress(lines(ROWS[:2])))
    assert "holds files of several formats: .jsonl, .jsonl.gz" in refused(folder)
    assert "no file matches" in refused(folder / "*.parquet")
    (folder / "train[1].jsonl").write_bytes(lines(ROWS[:1]))
    assert len(opened(folder / "train[1].jsonl")) == 1


@pytest.mark.parametrize("name", ["more.csv", "b.JSONL.bz2", "b.jsonl.part", "more/b.jsonl", "a-00001-of-00003.jsonl"])
def test_a2_a_folder_of_which_some_rows_would_be_left_out_is_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "data"
    (folder / name).parent.mkdir(parents=True)
    (folder / "a-00000-of-00003.jsonl" if "-of-" in name else folder / "a.jsonl").write_bytes(lines(ROWS[:2]))
    (folder / name).write_bytes(lines(ROWS[:1]))
    told = refused(folder)
    assert (name.partition("/")[0] if "-of-" not in name else "a-00002-of-00003 is missing") in told
    assert "say by a pattern which files are meant" in told
    assert not needs_pyarrow(str(folder))  # of a folder that is refused elsewhere
    assert len(opened(folder / "a*.jsonl")) in (2, 3)


def test_parts_of_a_set_are_told_by_their_numbers(tmp_path: Path) -> None:
    """The hub's older names have a hash of each part."""
    folder = tmp_path / "data"
    folder.mkdir()
    for number, digest in enumerate(("2d5a14", "5852b5")):
        (folder / f"train-0000{number}-of-00002-{digest}.jsonl").write_bytes(lines(ROWS[number : number + 1]))
    assert len(opened(folder)) == 2
    for name in ("c4-train.00000-of-01024.jsonl", "00000-of-01024.jsonl"):
        (folder / name).write_bytes(lines(ROWS[:1]))
        assert "00001-of-01024 is missing, by the names of the others" in refused(folder)
        (folder / name).unlink()
    for name in ("train-00000-of-00001.jsonl", "train-00000-of-00002-aa0077.jsonl"):
        (folder / name).write_bytes(lines(ROWS[:2]))
        assert "parts of more than one set train-*, perhaps of the same rows: train-00000-of-0000" in refused(folder)
        (folder / name).unlink()


def test_a2_a_saved_dataset_is_the_files_that_it_names(tmp_path: Path) -> None:
    """`map` of `datasets` puts its results beside them."""
    folder = saved(tmp_path / "saved", ROWS)
    arrow(folder / "cache-0123456789abcdef.arrow", ROWS[:7], is_stream=True)
    assert len(opened(folder)) == 300
    (folder / "data-00001-of-00002.arrow").unlink()
    assert "data-00001-of-00002.arrow is missing" in refused(folder)


def test_a2_names_in_large_letters_are_read_too(tmp_path: Path) -> None:
    for name in ("a.jsonl", "B.JSONL"):
        (tmp_path / name).write_bytes(lines(ROWS[:2]))
    assert len(opened(tmp_path)) == 4


def test_g_saved_datasets_that_cannot_be_read(tmp_path: Path) -> None:
    folder = saved(tmp_path / "saved", ROWS)
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(
        json.dumps({**state, "_indices_data_files": [{"filename": "i.arrow"}]}, indent=2)
    )
    assert "the saved dataset is a selection of rows -- " in refused(folder)
    (tmp_path / "dict").mkdir()
    (tmp_path / "dict" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    saved(tmp_path / "dict" / "train", ROWS)
    assert "without data files; it holds dataset_dict.json, train -- " in refused(tmp_path / "dict")
    assert len(opened(tmp_path / "dict" / "train")) == 300


def test_pipes_devices_and_links_to_nothing_do_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert "pipe.jsonl is a pipe or a device" in refused(tmp_path / "pipe.jsonl")
    assert "pipe.jsonl is a pipe or a device" in refused(tmp_path / "*.jsonl")
    assert "is a pipe or a device" in refused("/dev/zero")
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "gone")
    assert "there is no file link.jsonl; it is a link to" in refused(tmp_path / "link.jsonl")
    (tmp_path / "loop.jsonl").symlink_to(tmp_path / "loop.jsonl")
    assert "loop.jsonl" in refused(tmp_path / "loop.jsonl")


def test_more_files_than_a_process_may_have_open(tmp_path: Path) -> None:
    for number in range(200):
        (tmp_path / f"part-{number:03}.jsonl").write_bytes(lines(ROWS[number : number + 1]))
    before = len(os.listdir("/proc/self/fd"))
    dataset = opened(tmp_path, shuffle=True)
    assert sorted(int(prompt.label) for prompt in prompts(dataset)) == list(range(1, 201))
    assert len(os.listdir("/proc/self/fd")) - before < 5


def test_g_large_files_are_parsed_in_batches(tmp_path: Path) -> None:
    """8,000 rows of 6 kB each, in three formats."""
    row = {"prompt": [{"role": "user", "content": "word " * 1200}], "label": "1"}
    table = pa.Table.from_pylist([row] * 8_000)
    paths = [tmp_path / name for name in ("t.parquet", "t.arrow", "t.jsonl")]
    pq.write_table(table, paths[0], use_dictionary=False)
    with ipc.new_file(str(paths[1]), table.schema) as sink:
        sink.write_table(table, max_chunksize=1024)
    paths[2].write_text((json.dumps(row) + "\n") * 8_000)
    code = """
import re, sys, threading
from pathlib import Path
import pyarrow, pyarrow.parquet, pyarrow.ipc
import tarfile
from myxa.actors.data import open_data
from myxa.core.config import RunConfig
configs = [RunConfig.model_validate({"model": {"path": "m"}, "data": {"train": path}}) for path in sys.argv[1:]]
seen, over = [], threading.Event()

def look():  # pages of mapped files do not count: the kernel takes them back
    while not over.wait(0.01):
        seen.append(int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10)

threading.Thread(target=look, daemon=True).start()
for config in configs:
    assert len(open_data(config).by_name[""]) == 8_000
over.set()
print(max(seen) - seen[0])
"""
    command = [sys.executable, "-c", code, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert int(done.stdout) < 45, done.stdout
