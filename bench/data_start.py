"""How long a run's data takes until the first prompt can be drawn, and how much memory, by format.

    python bench/data_start.py [--rows 400000] [--formats jsonl,gz,zst,parquet,arrow,array]

The same rows (a conversation, a label, metadata) in each format. "ours" opens them as the buffer does: every row is
parsed, checked, hashed, and where the format has no random access, kept in a temporary file; then 2000 prompts are
drawn in shuffled order. "plain" only parses every row to Python objects, and keeps none: orjson or pyarrow in a loop.
Each figure is of a process of its own; memory is its peak above what it had before, pyarrow's import included.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = {
    "jsonl": "t.jsonl",
    "gz": "t.jsonl.gz",
    "zst": "t.jsonl.zst",
    "parquet": "t.parquet",
    "arrow": "t.arrow",
    "array": "t.json",
}
NUM_DRAWS = 2000
BATCH = 1024


def rows(num_rows: int) -> Iterator[dict[str, Any]]:
    """A sum each, with a system message and a score of 17 digits."""
    for row in range(num_rows):
        asked = f"What is {row} + {row * 7 % 1000}? " + "Think step by step. " * 6
        yield {
            "prompt": [{"role": "system", "content": "You solve sums."}, {"role": "user", "content": asked}],
            "label": str(row + row * 7 % 1000),
            "metadata": {"level": row % 5, "source": "sums", "score": row / 7},
        }


def write(folder: Path, num_rows: int, formats: list[str]) -> None:
    """The files, a batch of rows at a time."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from pyarrow import ipc

    schema = pa.Table.from_pylist(list(rows(1))).schema
    with (
        (folder / "t.jsonl").open("wb") as plain,
        gzip.open(folder / "t.jsonl.gz", "wb", compresslevel=1) as packed,
        pa.CompressedOutputStream(str(folder / "t.jsonl.zst"), "zstd") as zstd,
        (folder / "t.json").open("wb") as array,
        pq.ParquetWriter(folder / "t.parquet", schema) as parquet,
        ipc.new_file(str(folder / "t.arrow"), schema) as arrow,
    ):
        made, is_first = rows(num_rows), True
        while part := [row for row, _ in zip(made, range(1 << 16), strict=False)]:
            lines = [json.dumps(row).encode() for row in part]
            text = b"\n".join(lines) + b"\n"
            plain.write(text)
            packed.write(text) if "gz" in formats else None
            zstd.write(text) if "zst" in formats else None
            array.write((b"[" if is_first else b",") + b",\n".join(lines))
            table = pa.Table.from_pylist(part, schema)
            parquet.write_table(table, row_group_size=len(part))
            arrow.write_table(table)
            is_first = False
        array.write(b"]")


def memory_mib(field: str) -> float:
    """VmRSS or VmHWM of this process."""
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith(field))) / 1024


def ours(path: str) -> None:
    """As the buffer opens its data, and some draws."""
    from myxa.actors.data import open_data
    from myxa.core.config import RunConfig

    dataset = open_data(RunConfig.model_validate({"model": {"path": "m"}, "data": {"train": path}})).by_name[""]
    began = time.perf_counter()
    for draw in range(NUM_DRAWS):
        dataset.prompt(draw)
    print(f"draw_us={(time.perf_counter() - began) / NUM_DRAWS * 1e6:.0f}", end=" ")


def plain(path: str, kind: str) -> None:
    """Every row once, as Python objects."""
    import orjson

    if kind == "parquet":
        import pyarrow.parquet as pq

        for batch in pq.ParquetFile(path).iter_batches(BATCH):
            batch.to_pylist()
    elif kind == "arrow":
        from pyarrow import OSFile, ipc

        reader = ipc.open_file(OSFile(path))
        for at in range(reader.num_record_batches):
            batch = reader.get_batch(at)
            for first in range(0, batch.num_rows, BATCH):
                batch.slice(first, BATCH).to_pylist()
    elif kind == "array":
        orjson.loads(Path(path).read_bytes())
    else:
        with opened(path, kind) as file:
            for line in file:
                orjson.loads(line)


def opened(path: str, kind: str) -> Any:
    if kind == "gz":
        return gzip.open(path, "rb")
    if kind == "zst":
        import pyarrow as pa

        return io.BufferedReader(pa.CompressedInputStream(pa.OSFile(path), "zstd"))
    return Path(path).open("rb")


def measure(who: str, kind: str, path: str) -> None:
    """In a process of its own: what the parent reads off the line printed."""
    if who == "ours":
        import myxa.actors.data
        import myxa.core.config

        del myxa
    before, began, cpu = memory_mib("VmRSS"), time.perf_counter(), time.process_time()
    ours(path) if who == "ours" else plain(path, kind)
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    print(f"wall={wall:.2f} cpu={cpu:.2f} mib={memory_mib('VmHWM') - before:.0f}")


def main() -> None:
    """Write the files, measure each, print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--formats", default=",".join(NAMES))
    parser.add_argument("--one", nargs=3, metavar=("WHO", "FORMAT", "PATH"))
    options = parser.parse_args()
    if options.one:
        measure(*options.one)
        return
    formats = options.formats.split(",")
    print(f"{options.rows:,} rows | file MB | ours s (CPU s) | MiB | draw us | plain s (CPU s) | MiB")
    with tempfile.TemporaryDirectory(prefix="data-start-") as folder:
        write(Path(folder), options.rows, formats)
        for kind in formats:
            path = Path(folder) / NAMES[kind]
            found = {who: child(who, kind, path) for who in ("ours", "plain")}
            mine, other = found["ours"], found["plain"]
            print(
                f"{kind} | {path.stat().st_size / 1e6:.0f} | {mine['wall']} ({mine['cpu']}) | {mine['mib']} | "
                f"{mine['draw_us']} | {other['wall']} ({other['cpu']}) | {other['mib']}",
                flush=True,
            )


def child(who: str, kind: str, path: Path) -> dict[str, str]:
    """Figures of one process."""
    command = [sys.executable, __file__, "--one", who, kind, str(path)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return dict(word.split("=", 1) for word in printed.split())


if __name__ == "__main__":
    main()
