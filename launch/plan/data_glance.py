"""A look at the data files: their first rows, and how many there are. Cheap: a large file is not read through.

The buffer checks every row when it starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...actors.data.data_files import check_data_files, is_large, needs_pyarrow, open_rows
from ...actors.data.layout import RowLayout
from ...actors.data.prompts import held_out_layout, layout_of
from ...actors.data.row_file import RowError, RowFile
from ...actors.data.row_set import encode_item
from ...core.config import DataSettings, RunConfig
from ...core.config.data import Source, parse_sources
from ...core.errors import DataError, MyxaError
from ..preflight.finding import ConfigFinding
from ..preflight.interpreters import has_module

FIRST_ROWS = 50
MAX_BYTES = 64 << 20
"""A JSONL file up to this size is indexed, which counts its rows; of a larger one only the size is looked at."""


@dataclass(frozen=True, slots=True)
class DataGlance:
    """What was seen of one key's files."""

    num_rows: int | None
    """Chosen rows of all files; None: too large to be counted, or not to be read."""
    findings: tuple[ConfigFinding, ...]
    num_draws: int | None = None
    """Prompts in all passes over all sources that have a weight; None: endless, or not counted."""


@dataclass(frozen=True, slots=True)
class PlannedSource:
    """One of several sources of prompts, before the run."""

    name: str
    num_rows: int | None
    """As in `DataGlance`."""
    share: float
    """Of the prompts that are drawn, as long as no source has ended."""
    max_passes: int
    """0: endless."""
    passes: float | None
    """At least so many, of a run that ends by steps; None: it does not, or the rows were not counted."""


def glance_at_sources(config: RunConfig) -> tuple[DataGlance, tuple[PlannedSource, ...]]:
    """Look at the files of all sources of prompts; the second is empty where there is one without a name."""
    parts = config.data.parts()
    seen = {name: glance(config, config.data.key_of(name), part.train, part, name) for name, part in parts.items()}
    counts = [one.num_rows for one in seen.values()]
    known = [count for count in counts if count is not None]
    total = sum(known) if len(known) == len(counts) else None
    findings = tuple(finding for one in seen.values() for finding in one.findings)
    drawn = [name for name in parts if not name or config.data.sources[name].weight]
    draws = [(seen[name].num_rows or 0) * parts[name].max_passes for name in drawn]
    planned = tuple(
        _planned(config, name, seen[name].num_rows, part.max_passes) for name, part in parts.items() if name
    )
    return DataGlance(total, findings, sum(draws) if all(draws) else None), planned


def _planned(config: RunConfig, name: str, num_rows: int | None, max_passes: int) -> PlannedSource:
    share = config.data.sources[name].weight / sum(source.weight for source in config.data.sources.values())
    prompts = config.run.num_steps * config.algo.batch_size * share
    passes = prompts / num_rows if num_rows and config.run.num_steps else None
    return PlannedSource(name, num_rows, share, max_passes, passes)


def glance_at_held_out(config: RunConfig) -> dict[str, DataGlance]:
    """Look at the files of every evaluation set, by its name."""
    return {
        name: _glance(key, files, held_out_layout(config, name), skips_bad=config.data.on_bad_line == "skip")
        for name, (key, files) in config.eval.files().items()
    }


def glance(
    config: RunConfig, key: str, value: str | tuple[str, ...], part: DataSettings | None = None, name: str = ""
) -> DataGlance:
    """Look at the files that a key names, of the source of that name, whose rows are laid out as `part` says (or
    `[data]`); errors of the files themselves (missing, empty, of a foreign format) are left to the preflight."""
    part = part or config.data
    layout = layout_of(config, part, config.reward, name)
    return _glance(key, value, layout, skips_bad=part.on_bad_line == "skip")


def _glance(key: str, value: str | tuple[str, ...], layout: RowLayout, *, skips_bad: bool) -> DataGlance:
    total: int | None = 0
    findings: list[ConfigFinding] = []
    for source in parse_sources(value):
        if not _can_be_opened(source, key):
            return DataGlance(None, tuple(findings))
        if is_large(source.path, key, MAX_BYTES):
            total = None
            continue
        try:
            file = open_rows(source.path, layout, key)
        except (MyxaError, OSError, ImportError) as error:
            findings.append(ConfigFinding(key, error if isinstance(error, MyxaError) else DataError(str(error))))
            continue
        rows = source.rows(file.num_rows)
        total = None if total is None else total + len(rows)
        findings += _first_rows(source, file, rows, layout, key, skips_bad=skips_bad)
    return DataGlance(total, tuple(findings))


def _can_be_opened(source: Source, key: str) -> bool:
    try:
        check_data_files(source.path, key)
    except MyxaError:
        return False
    return not needs_pyarrow(source.path) or has_module("pyarrow")


def _first_rows(
    source: Source, file: RowFile, rows: range, layout: RowLayout, key: str, *, skips_bad: bool
) -> Iterator[ConfigFinding]:
    if not rows:
        size = f"{file.num_rows} row{'s' if file.num_rows > 1 else ''}"
        yield ConfigFinding(
            key, DataError(f"{source}: the slice is empty; the file has {size}", remedy="mend the slice")
        )
        return
    for row in rows[:FIRST_ROWS]:
        try:
            encode_item(layout.item(file.read(row)))
        except RowError as bad:
            error = DataError(f"{file.place(row)}: {bad.cause}", remedy=bad.remedy)
            yield ConfigFinding(key, error, is_warning=skips_bad)
            return


def source_findings(config: RunConfig, sources: Sequence[PlannedSource]) -> Iterator[ConfigFinding]:
    """Sources that end before the run, or have weight 0."""
    for source in sources:
        key = f"data.sources.{source.name}"
        if source.max_passes and source.passes is not None and source.passes > source.max_passes:
            error = DataError(
                f"{key}.max_passes = {source.max_passes}: the run asks for {source.passes:.2f} passes over "
                f"{source.num_rows} rows; from its end on the other sources fill its share",
                remedy=f"raise it (0 = endless), or lower {key}.weight",
            )
            yield ConfigFinding(f"{key}.max_passes", error, is_warning=True)
        if not source.share:
            error = DataError(
                f"{key}.weight = 0: nothing is drawn from it", remedy="set the knob mix when it is wanted"
            )
            yield ConfigFinding(f"{key}.weight", error, is_warning=True)


def batch_findings(config: RunConfig, seen: DataGlance) -> Iterator[ConfigFinding]:
    """Data that is less than the run asks for."""
    num_rows, num_draws, batch = seen.num_rows, seen.num_draws, config.algo.batch_size
    if not num_rows:
        return
    key = "data.sources" if config.data.sources else "data.train"
    bound = "max_passes of the sources" if config.data.sources else f"data.max_passes = {config.data.max_passes}"
    if num_draws is not None and num_draws < batch:
        error = DataError(
            f"{key}: {num_rows} rows and {bound} are fewer prompts than one batch, algo.batch_size = {batch}",
            remedy="lower algo.batch_size, or raise data.max_passes (0 = endless)",
        )
        yield ConfigFinding("algo.batch_size", error)
    elif num_draws is not None and config.run.num_steps and num_draws < batch * config.run.num_steps:
        error = DataError(
            f"{bound}: the data ends after {num_draws // batch} of {config.run.num_steps} steps, earlier if groups are "
            "left out",
            remedy="raise data.max_passes (0 = endless), or lower run.num_steps",
        )
        yield ConfigFinding("data.max_passes", error, is_warning=True)
    elif num_rows < batch:
        error = DataError(
            f"algo.batch_size = {batch}: the data has {num_rows} rows, so a batch holds the same prompt several times",
            remedy="lower algo.batch_size, or use more data",
        )
        yield ConfigFinding("algo.batch_size", error, is_warning=True)
