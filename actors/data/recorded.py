"""A dump of groups as a data file: each finished group is a row whose prompt is drawn again, and whose samples may
answer it (`RecordedAnswers`), without an engine.

A row is good if it has a prompt and finished samples. Whether this run can use these as they are, by its model's
vocabulary and context, is seen when they answer.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import orjson
from msgspec.structs import replace

from ...core.config import RunConfig
from ...core.config.data import parse_sources
from ...core.config.learning import RECORDED_REFERENCE
from ...core.daemon_thread import in_daemon_thread
from ...core.errors import DataError
from ...core.files import open_regular
from ...core.samples import NO_VERSION, Group, Prompt, Sample, check_sample
from ..buffer.dumps import DumpedGroup, group_of, read_header
from ..models.hf_folder import read_config
from ..workflows.episode import WorkflowContext
from .row_file import Columns, Row, RowError

KEPT_GROUPS = 64
"""In memory: their samples are asked for side by side."""
RECORDED = "recorded"
"""Key of the metadata that describes the recording."""
UNCHANGED = "use the file as `myxa dump` wrote it"


class RecordedGroups:
    """The groups of one dump, in its order. A `RowFile`, whose rows can be read at any time too."""

    def __init__(self, path: str) -> None:
        """Raises DataError if it is no dump."""
        self._path = path
        self._run = read_header(Path(path)).run
        self._lines = array("q")  # where each begins
        at = 0
        with open_regular(Path(path)) as file:
            for line in file:
                self._lines.append(at)
                at += len(line)
        if not self.num_rows:
            raise DataError(f"{path}: the dump holds no groups", remedy="dump a run that has finished some")

    @property
    def num_rows(self) -> int:
        return len(self._lines) - 1

    def rows(self) -> Iterator[Row]:
        return ((self.place(row), partial(self.read, row)) for row in range(self.num_rows))

    def place(self, row: int) -> str:
        return f"{self._path}:{row + 2}"

    def read(self, row: int) -> Columns:
        """Of its prompt. Raises RowError."""
        dumped, group = self._finished(row)
        columns: Columns = orjson.loads(msgspec.json.encode(group.prompt))
        recording = {
            "run": self._run,
            "group": dumped.group_id,
            "step": dumped.step,
            "version": group.oldest_version(),
            "rewards": group.rollout_rewards().tolist(),
        }
        columns["metadata"] = {**group.prompt.metadata, RECORDED: recording}
        if not group.prompt.label:
            del columns["label"]
        return columns

    def group(self, row: int) -> Group:
        """The group as it was recorded. Raises RowError."""
        return self._finished(row)[1]

    def _finished(self, row: int) -> tuple[DumpedGroup, Group]:
        try:
            with open_regular(Path(self._path)) as file:
                file.seek(self._lines[row + 1])
                dumped = group_of(file.readline())
        except ValueError as error:
            raise RowError(f"is no dumped group: {error}", f"{UNCHANGED}; was it cut off?") from error
        group = dumped.group
        if len(group.rewards) != len(group.samples) or not bool(np.isfinite(group.rewards).all()):
            raise RowError(f"{len(group.samples)} samples have rewards {group.rewards.tolist()}", UNCHANGED)
        for sample in group.samples:
            try:
                check_sample(sample)
            except ValueError as error:
                raise RowError(str(error), UNCHANGED) from error
            if sample.finish == "abort":
                raise RowError(f"sample {sample.index} was not finished", UNCHANGED)
        return dumped, group


class RecordedAnswers:
    """The workflow of a run whose answers are recorded: each sample as it was finished, but for the number of its group
    and the stamps of its engine, which takes no part in this run."""

    def __init__(self, config: RunConfig) -> None:
        """Raises DataError for a file that is no dump."""
        model = read_config(config.model.path)
        self._vocab_size = model.vocab_size
        self._context_length = config.engine.context_length or model.context_length
        self._has_reference = config.algo.ref_urls == RECORDED_REFERENCE
        self._sources: dict[str, tuple[RecordedGroups, range]] = {}
        for _, value in config.data_files():
            for source in parse_sources(value):
                file = RecordedGroups(source.path)
                self._sources[str(source)] = file, source.rows(file.num_rows)
        self._kept: dict[tuple[str, int], Group] = {}
        self._reading = asyncio.Lock()

    async def __call__(self, ctx: WorkflowContext, prompt: Prompt) -> tuple[Sample, ...]:
        file, rows = self._sources[prompt.source]
        row = rows[prompt.row]
        try:
            group = await self._group(file, row)
            found = tuple(sample for sample in group.samples if sample.index == ctx.index)
            if not found:
                raise RowError(f"no sample {ctx.index} is recorded", "lower rollout.num_samples")
            if not np.array_equal(ctx.episode.sample().prompt_ids, found[0].prompt_ids):
                raise RowError(
                    "its prompt was asked by other tokens than this run asks by",
                    "name the model that it was recorded with (model.path), and the same data.apply_chat_template and "
                    "data.chat_template_kwargs",
                )
            return tuple(self._fit(sample, prompt) for sample in found)
        except RowError as error:
            raise DataError(f"{file.place(row)}: {error.cause}", remedy=error.remedy) from error

    def _fit(self, sample: Sample, prompt: Prompt) -> Sample:
        """As this run has it. Raises RowError for one that it cannot have."""
        try:
            check_sample(sample, self._vocab_size)
        except ValueError as error:
            raise RowError(str(error), "name the model that it was recorded with: model.path") from error
        if sample.num_tokens > self._context_length:
            raise RowError(
                f"sample {sample.index} has more tokens than the context of {self._context_length}",
                "raise engine.context_length, or name the model that the groups were recorded with",
            )
        if self._has_reference and sample.reference_logprobs is None and bool(sample.loss_mask.any()):
            raise RowError(
                f'sample {sample.index} has no reference log-probs, which algo.ref_urls = ["recorded"] wants',
                "record it in a run with algo.ref_urls, or name servers here too",
            )
        return replace(
            sample,
            group_id=prompt.group_id,
            versions=np.full_like(sample.versions, NO_VERSION),
            reference_logprobs=sample.reference_logprobs if self._has_reference else None,
        )

    async def _group(self, file: RecordedGroups, row: int) -> Group:
        async with self._reading:
            key = file.place(row), row
            if key not in self._kept:
                self._kept[key] = await in_daemon_thread(lambda: file.group(row), "recording")
                if len(self._kept) > KEPT_GROUPS:
                    del self._kept[next(iter(self._kept))]
            return self._kept[key]
