"""Whatever type a column of parquet or Arrow has: its values arrive as they are, or the row is refused by name (A2)."""

from __future__ import annotations

import datetime as dt
import decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc as ipc
import pyarrow.parquet as pq
import pytest
from tests.data.opened import open_prompts, prompts, run_on

from myxa.core.errors import DataError
from myxa.core.samples import Prompt


def first(path: Path) -> Prompt:
    return prompts(open_prompts(run_on(path, data={"shuffle": False}, reward={"fn": "format"})))[0]


def store(folder: Path, table: Any, kind: str) -> Path:
    path = folder / f"t.{kind}"
    if kind == "parquet":
        pq.write_table(table, path)
    else:
        with ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table)
    return path


def table(**columns: Any) -> Any:
    return pa.table({"prompt": pa.array(["?", "?"]), **columns})


TEXTS = [
    pa.array(["a", "b"], pa.large_string()),
    pa.array(["a", "b"], pa.string_view()),
    pa.array(["a", "b"]).dictionary_encode(),
    pa.array(["a", "b"], pa.dictionary(pa.int8(), pa.large_string(), ordered=True)),
]
OF_BOTH = ["parquet", "arrow"]


@pytest.mark.parametrize("kind", OF_BOTH)
@pytest.mark.parametrize("label", TEXTS, ids=lambda one: str(one.type))
def test_a2_text_of_every_type_is_text(tmp_path: Path, kind: str, label: Any) -> None:
    assert first(store(tmp_path, table(label=label), kind)).label == "a"


@pytest.mark.parametrize("kind", OF_BOTH)
@pytest.mark.parametrize("of", [pa.list_, pa.large_list, pa.list_view, pa.large_list_view, lambda of: pa.list_(of, 1)])
def test_a2_conversations_in_lists_of_every_type(tmp_path: Path, kind: str, of: Any) -> None:
    message = pa.struct([("role", pa.string()), ("content", pa.large_string())])
    talk = pa.array([[{"role": "user", "content": "hi"}]] * 2, of(message))
    try:
        path = store(tmp_path, pa.table({"prompt": talk, "label": ["a", "b"]}), kind)
    except pa.ArrowNotImplementedError:
        pytest.skip("pyarrow does not write it")
    assert [(one.role, one.content) for one in first(path).messages] == [("user", "hi")]


VALUES: list[tuple[Any, Any]] = [
    (pa.array([2**63 - 1, 0], pa.int64()), 2**63 - 1),
    (pa.array([2**64 - 1, 0], pa.uint64()), 2**64 - 1),
    (pa.array([decimal.Decimal("0.10000000000000000001"), None]), "0.10000000000000000001"),
    (pa.array([decimal.Decimal("1.50"), None], pa.decimal256(40, 2)), "1.50"),
    (pa.array([dt.date(2026, 1, 2), None]), "2026-01-02"),
    (pa.array([dt.time(1, 2, 3, 4), None], pa.time64("us")), "01:02:03.000004"),
    (pa.array([0, None], pa.timestamp("ms", "UTC")), "1970-01-01T00:00:00Z"),
    (pa.array([1_500, None], pa.timestamp("ns")).cast(pa.timestamp("us"), safe=False), "1970-01-01T00:00:00.000001"),
    (pa.array([[("k", 1), ("l", None)], []], pa.map_(pa.string(), pa.int64())), {"k": 1, "l": None}),
    (pa.array([0.1, None], pa.float32()), 0.1),
    (pa.array([0.1, None], pa.float16()), 0.1),
    (pa.array([{"x": [0.7, None]}, None], pa.struct({"x": pa.list_(pa.float32())})), {"x": [0.7, None]}),
    (pa.array([1 / 3, None], pa.float64()), 1 / 3),
    (pa.array([None, None], pa.null()), None),
    (pa.array([True, False]), True),
    (pa.array([[("level", "hard")], []], pa.map_(pa.string(), pa.string())), {"level": "hard"}),
    (pa.array([{"x": [1, None]}, None]), {"x": [1, None]}),
]


@pytest.mark.parametrize("kind", OF_BOTH)
@pytest.mark.parametrize(("values", "wanted"), VALUES, ids=lambda one: str(getattr(one, "type", "")))
def test_a2_values_of_every_type_in_metadata(tmp_path: Path, kind: str, values: Any, wanted: Any) -> None:
    metadata = pa.StructArray.from_arrays([values], names=["v"])
    assert first(store(tmp_path, table(label=["a", "b"], metadata=metadata), kind)).metadata == {"v": wanted}


def broken_text() -> Any:
    offsets = pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0")
    return pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"\xffb")])


REFUSED: list[Any] = [
    pa.array([b"a", b"b"]), pa.array([b"a", b"b"], pa.large_binary()), pa.array([b"aa", b"bb"], pa.binary(2)),
    pa.array([float("nan"), 1.0]), pa.array([float("-inf"), 1.0], pa.float32()), pa.array([1, 2], pa.timestamp("ns")),
    pa.array([1, 2], pa.duration("ns")), pa.array([2**62, 0], pa.timestamp("s")),
    pa.array([[("k", 1), ("k", 2)], []], pa.map_(pa.string(), pa.int64())), broken_text(),
]  # fmt: skip


@pytest.mark.parametrize("label", REFUSED, ids=lambda one: str(one.type))
def test_a2_values_that_cannot_arrive_are_refused_by_column(tmp_path: Path, label: Any) -> None:
    with pytest.raises(DataError, match=r't\.arrow, row 0: column "label"'):
        first(store(tmp_path, table(label=label), "arrow"))


def test_a2_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    rows = pa.Table.from_arrays([pa.array(["?"])] * 3, names=["prompt", "label", "label"])
    for kind in OF_BOTH:
        with pytest.raises(DataError, match='two columns are named "label"'):
            first(store(tmp_path, rows, kind))


def many(folder: Path, num_rows: int = 3000) -> Path:
    path = folder / "t.parquet"
    talk = [[{"role": "user", "content": f"{row} " + "word " * 20}] for row in range(num_rows)]
    rows = pa.table({"prompt": talk, "label": [str(row) for row in range(num_rows)], "metadata": [{"a": 1}] * num_rows})
    pq.write_table(rows, path, row_group_size=1000, use_dictionary=False, compression="none")
    return path


def test_f7_damage_in_a_parquet_file_names_file_and_row(tmp_path: Path) -> None:
    path = many(tmp_path)
    data = bytearray(path.read_bytes())
    group = pq.ParquetFile(path).metadata.row_group(1)
    label = next(one for at in range(group.num_columns) if (one := group.column(at)).path_in_schema == "label")
    data[label.data_page_offset : label.data_page_offset + 40] = bytes(40)
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"t\.parquet: cannot be read from row \d+ on: "):
        first(path)


@pytest.mark.parametrize("size", [4, 12, 1000, -1, -9, -100])
def test_f7_a_parquet_file_that_is_cut_is_refused(tmp_path: Path, size: int) -> None:
    path = many(tmp_path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(DataError, match=r"t\.parquet: is not a readable parquet file"):
        first(path)


def test_f7_an_arrow_file_that_is_cut_is_refused(tmp_path: Path) -> None:
    rows = table(label=["a", "b"])
    path = store(tmp_path, rows, "arrow")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"t\.arrow: is not a readable Arrow file"):
        first(path)
    with ipc.new_stream(str(path), rows.schema) as writer:
        writer.write_table(rows)
    path.write_bytes(path.read_bytes()[:-70])
    with pytest.raises(DataError, match=r"t\.arrow: "):
        first(path)


def test_f7_rows_are_kept_where_tmpdir_says_and_a_full_disk_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from myxa.actors.data import prompts

    def full(*_: Any, **__: Any) -> Any:
        return Path("/dev/full").open("r+b", buffering=0)

    monkeypatch.setattr(prompts.tempfile, "TemporaryFile", full)
    with pytest.raises(
        DataError, match=r"cannot be kept in .*: No space left on device -- make room there, or .*TMPDIR"
    ):
        first(many(tmp_path))
