"""Recorded groups as data: the finished groups of a ledger, which `myxa dump` copied, are trained on as they are.

Each is a row with its prompt, so that the buffer draws it like any other. The buffer answers the draw itself with the
group (`Recording`): no rollout actor takes part.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from ...core.config import RunConfig
from ...core.config.data import parse_sources
from ...core.errors import DataError, LedgerError
from ...core.messages import Assignment
from ...core.samples import NO_VERSION, Group, Sample, check_sample
from ..ledger.file import FORMAT, WHOLE, LedgerReader, decode_group, is_in_use
from ..models.hf_folder import read_config
from .row_file import Columns, Row, RowError

RECORDED = "recorded"
"""Key of the metadata that describes the recording."""


class RecordedGroups:
    """The groups of a ledger whose tokens it has, in the order of training. A `RowFile`, readable at any time."""

    def __init__(self, path: str) -> None:
        """Raises DataError if it is no ledger, or has no such groups."""
        self._path = path
        try:
            if is_in_use(Path(path)):
                raise DataError(f"{path} is in use: its run is live", remedy="take a copy of it: `myxa dump`")
            self._ledger = LedgerReader(Path(path))
            meta = self._ledger.meta()
            if meta.get("format") != FORMAT:
                raise LedgerError(f"{path} has format {meta.get('format')}, this program reads {FORMAT}")
            self._run = meta["run"]
            self._ids = array("q", (group_id for (group_id,) in self._ledger.query(f"SELECT g.group_id {WHOLE}")))
        except LedgerError as error:
            raise DataError(f"{error.message}", remedy="name a file that `myxa dump` wrote") from error
        if not self._ids:
            raise DataError(f"{path}: the dump holds no groups", remedy="dump a run that has finished some")

    @property
    def num_rows(self) -> int:
        return len(self._ids)

    def rows(self) -> Iterator[Row]:
        return ((self.place(row), partial(self.read, row)) for row in range(self.num_rows))

    def place(self, row: int) -> str:
        return f"{self._path}: group {self._ids[row]}"

    def read(self, row: int) -> Columns:
        """Its prompt, as it was drawn. Raises RowError."""
        group, (entry,) = self.group(row), self._ledger.select("group_id = ?", self._ids[row])
        recording = {
            "run": self._run,
            "group": entry.group_id,
            "step": entry.step,
            "version": group.oldest_version(),
            "rewards": group.rollout_rewards().tolist(),
        }
        metadata = {**group.prompt.metadata, RECORDED: recording}
        return {"prompt": replace(group.prompt, source_name="", metadata=metadata)}

    def group(self, row: int) -> Group:
        """As it was recorded. Raises RowError."""
        try:
            _, data = self._ledger.stored(self._ids[row]) or (True, b"")
            return decode_group(self._ids[row], data)
        except LedgerError as error:
            raise RowError(error.message, "dump the run again") from error


class Recording:
    """The groups that answer the prompts of a run on recorded groups."""

    def __init__(self, config: RunConfig) -> None:
        """Raises ModelError."""
        model = read_config(config.model.path)
        self._vocab_size = model.vocab_size
        self._context_length = config.engine.context_length or model.context_length
        self._has_reference = bool(config.algo.ref_urls)
        self._sources = {
            str(source): source for part in config.data.parts().values() for source in parse_sources(part.train)
        }
        self._files: dict[str, RecordedGroups] = {}

    def group(self, work: Assignment) -> Group:
        """What was recorded of that prompt, as this run has it: without stamps of an engine, which takes no part.
        Raises DataError for a group that this run cannot be trained on."""
        name, number = work.prompt.source, work.prompt.row
        file = self._files.get(name) or self._files.setdefault(name, RecordedGroups(self._sources[name].path))
        row = self._sources[name].rows(file.num_rows)[number]
        try:
            group = file.group(row)
            used = [index for index, sample in enumerate(group.samples) if sample.index < work.num_samples]
            num_masked = work.num_samples - len({group.samples[index].index for index in used})
            if num_masked > group.num_masked:
                raise RowError(f"not {work.num_samples} samples are recorded", "lower rollout.num_samples")
            samples = tuple(self._fit(group.samples[index], work.prompt.group_id) for index in used)
        except RowError as error:
            raise DataError(f"{file.place(row)}: {error.cause}", remedy=error.remedy) from error
        parts = tuple(group.reward_parts[index] for index in used) if group.reward_parts else ()
        return Group(
            prompt=work.prompt, samples=samples, rewards=group.rewards[used], reward_parts=parts, knobs=work.knobs,
            num_masked=num_masked,
        )  # fmt: skip

    def _fit(self, sample: Sample, group_id: int) -> Sample:
        """Raises RowError for one that this run cannot have."""
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
                f"sample {sample.index} has no reference log-probs, which algo.ref_urls wants",
                "record it in a run with algo.ref_urls, or leave that out here: the trainer then keeps the model",
            )
        return replace(
            sample,
            group_id=group_id,
            versions=np.full_like(sample.versions, NO_VERSION),
            reference_logprobs=sample.reference_logprobs if self._has_reference else None,
        )
