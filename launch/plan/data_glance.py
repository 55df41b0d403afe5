"""A look at the data files: their first rows, and how many there are. Cheap: a large file is not read through.

Knows row files and layouts. Must not know who draws from them; the buffer looks at every row when it starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...actors.data.layout import Layout
from ...actors.data.prompts import LABEL_REWARDS
from ...actors.data.row_file import RowError, RowFile, check_data_file
from ...actors.data.row_set import open_rows
from ...core.config import RunConfig
from ...core.config.source import Source, parse_sources
from ...core.errors import DataError, MyxaError
from ..preflight.finding import Finding
from ..preflight.interpreters import has_module

FIRST_ROWS = 50
MAX_BYTES = 64 << 20
"""A JSONL file up to this size is indexed, which counts its rows; of a larger one only the size is looked at."""


@dataclass(frozen=True, slots=True)
class DataGlance:
    """What was seen of one key's files."""

    num_rows: int | None
    """Chosen rows of all files; None: too large to be counted, or not to be read."""
    findings: tuple[Finding, ...]


def glance(config: RunConfig, key: str, value: str | tuple[str, ...]) -> DataGlance:
    """Look at the files of `data.train` or `eval.data`; errors of the files themselves (missing, empty, of a foreign
    format) are left to the preflight."""
    is_sft = config.algo.kind == "sft"
    layout = Layout(
        config.data, needs_label=config.reward.fn in LABEL_REWARDS and not is_sft, needs_demonstration=is_sft
    )
    total: int | None = 0
    findings: list[Finding] = []
    for source in parse_sources(value):
        if not _can_be_opened(source, key):
            return DataGlance(None, tuple(findings))
        if _is_large(source):
            total = None
            continue
        try:
            file = open_rows(source.path, layout, key)
        except (MyxaError, OSError, ImportError) as error:
            findings.append(Finding(key, error if isinstance(error, MyxaError) else DataError(str(error))))
            continue
        rows = source.rows(file.num_rows)
        total = None if total is None else total + len(rows)
        findings += _first_rows(config, source, file, rows, layout, key)
    return DataGlance(total, tuple(findings))


def _can_be_opened(source: Source, key: str) -> bool:
    try:
        check_data_file(source.path, key)
    except MyxaError:
        return False
    return not source.path.endswith(".parquet") or has_module("pyarrow")


def _is_large(source: Source) -> bool:
    return not source.path.endswith(".parquet") and Path(source.path).stat().st_size > MAX_BYTES


def _first_rows(
    config: RunConfig, source: Source, file: RowFile, rows: range, layout: Layout, key: str
) -> Iterator[Finding]:
    if not rows:
        size = f"{file.num_rows} row{'s' if file.num_rows > 1 else ''}"
        yield Finding(key, DataError(f"{source}: the slice is empty; the file has {size}", remedy="mend the slice"))
        return
    for row in rows[:FIRST_ROWS]:
        try:
            layout.item(file.read(row))
        except RowError as bad:
            error = DataError(f"{file.place(row)}: {bad.cause}", remedy=bad.remedy)
            yield Finding(key, error, is_warning=config.data.on_bad_line == "skip")
            return


def batch_findings(config: RunConfig, num_rows: int | None) -> Iterator[Finding]:
    """Data that is less than the run asks for."""
    if not num_rows:
        return
    batch, passes = config.algo.batch_size, config.data.max_passes
    if passes and passes * num_rows < batch:
        error = DataError(
            f"data.train: {num_rows} rows and data.max_passes = {passes} are fewer prompts than one batch, "
            f"algo.batch_size = {batch}",
            remedy="lower algo.batch_size, or raise data.max_passes (0 = endless)",
        )
        yield Finding("algo.batch_size", error)
    elif passes and config.run.num_steps and passes * num_rows < batch * config.run.num_steps:
        error = DataError(
            f"data.max_passes = {passes}: the data ends after {passes * num_rows // batch} of {config.run.num_steps} "
            "steps, earlier if groups are left out",
            remedy="raise data.max_passes (0 = endless), or lower run.num_steps",
        )
        yield Finding("data.max_passes", error, is_warning=True)
    elif num_rows < batch:
        error = DataError(
            f"algo.batch_size = {batch}: the data has {num_rows} rows, so a batch holds the same prompt several times",
            remedy="lower algo.batch_size, or use more data",
        )
        yield Finding("algo.batch_size", error, is_warning=True)
