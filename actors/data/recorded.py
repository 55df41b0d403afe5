"""A dump of groups as a data file: each finished group is a row whose prompt is drawn again, and whose samples may
answer it (`RecordedAnswers`), without an engine.

A row is good if it has a prompt. Where its samples answer, this run must also be able to use them as they are: its
model's vocabulary and context, as many of them as it asks for (`RecordedTerms`).
"""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import orjson
from msgspec.structs import replace

from ...core.config import RunConfig
from ...core.config.data import parse_sources
from ...core.config.learning import RECORDED_REFERENCE
from ...core.errors import DataError, ModelError
from ...core.files import open_regular
from ...core.samples import NO_VERSION, Group, Prompt, Sample, check_sample
from ..buffer.dumps import DumpedGroup, group_of, read_header
from ..daemon_thread import in_daemon_thread
from ..models.hf_folder import read_config
from ..workflows.episode import WorkflowContext
from .row_file import Columns, Row, RowError

KEPT_GROUPS = 64
"""In memory: their samples are asked for side by side."""
ANY = 1 << 31
"""In place of a limit that only the model knows."""


@dataclass(frozen=True, slots=True)
class RecordedTerms:
    """See the module's head."""

    num_samples: int
    context_length: int
    vocab_size: int
    wants_reference: bool = False
    """Whether the reference log-probs are those that are recorded."""


def terms_of(config: RunConfig) -> RecordedTerms | None:
    """Of this run; None if an engine generates its answers. A model that cannot be read is reported elsewhere, and
    recordings are not checked against it."""
    if config.roles.rollout.kind != "recorded":
        return None
    vocab_size, context_length = ANY, config.engine.context_length
    with contextlib.suppress(ModelError):
        model = read_config(config.model.path)
        vocab_size, context_length = model.vocab_size, context_length or model.context_length
    return RecordedTerms(
        num_samples=config.rollout.num_samples,
        context_length=context_length or ANY,
        vocab_size=vocab_size,
        wants_reference=config.algo.ref_urls == RECORDED_REFERENCE,
    )


RECORDED = "recorded"
"""Key of the metadata that describes the recording."""
UNCHANGED = "use the file as `myxa dump` wrote it"


class RecordedGroups:
    """The groups of one dump, in its order. A `RowFile`, whose rows can be read at any time too."""

    def __init__(self, path: str, terms: RecordedTerms | None = None) -> None:
        """`terms`: where the recordings answer; None: only the prompts are used. Raises DataError if it is no dump."""
        self._path = path
        self._terms = terms
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
        for wrong in _wrongs(group, self._terms):
            raise wrong
        return dumped, group


def _wrongs(group: Group, terms: RecordedTerms | None) -> Iterator[RowError]:
    if len(group.rewards) != len(group.samples) or not bool(np.isfinite(group.rewards).all()):
        yield RowError(f"{len(group.samples)} samples have rewards {group.rewards.tolist()}", UNCHANGED)
    if terms is None:
        return
    num_samples = len({sample.index for sample in group.samples})
    if num_samples < terms.num_samples:
        yield RowError(
            f"the group has {num_samples} samples, fewer than rollout.num_samples = {terms.num_samples}",
            f"set rollout.num_samples = {num_samples}",
        )
    for sample in group.samples:
        for cause, remedy in _unfit(sample, terms):
            yield RowError(f"sample {sample.index}: {cause}", remedy)


def _unfit(sample: Sample, terms: RecordedTerms) -> Iterator[tuple[str, str]]:
    """What no sample looks like that an engine finished, or this run cannot have as it is; with remedies."""
    try:
        check_sample(sample)
        check_sample(sample, terms.vocab_size)
    except ValueError as error:
        yield str(error), f"{UNCHANGED}, or name the model that it was recorded with: model.path"
    if sample.finish == "abort":
        yield "it was not finished", UNCHANGED
    if sample.num_tokens > terms.context_length:
        yield (
            f"{sample.num_tokens} tokens, with the prompt, are more than the context of {terms.context_length}",
            "raise engine.context_length, or name the model that the groups were recorded with",
        )
    if terms.wants_reference and sample.reference_logprobs is None and bool(sample.loss_mask.any()):
        yield (
            'it was recorded without reference log-probs, which algo.ref_urls = ["recorded"] wants',
            "record it in a run with algo.ref_urls, or name servers here too",
        )


class RecordedAnswers:
    """The workflow of a run whose answers are recorded: each sample as it was finished, but for the number of its group
    and the stamps of its engine, which takes no part in this run."""

    def __init__(self, config: RunConfig) -> None:
        """Raises DataError for a file that is no dump."""
        self._terms = terms = terms_of(config)
        self._sources: dict[str, tuple[RecordedGroups, range]] = {}
        for _, value in config.data_files():
            for source in parse_sources(value):
                file = RecordedGroups(source.path, terms)
                self._sources[str(source)] = file, source.rows(file.num_rows)
        self._kept: dict[tuple[str, int], Group] = {}
        self._reading = asyncio.Lock()

    async def __call__(self, ctx: WorkflowContext, prompt: Prompt) -> tuple[Sample, ...]:
        file, rows = self._sources[prompt.source]
        row = rows[prompt.row]
        try:
            group = await self._group(file, row)
        except RowError as error:
            raise DataError(f"{file.place(row)}: {error.cause}", remedy=error.remedy) from error
        found = [sample for sample in group.samples if sample.index == ctx.index]
        if not found:
            raise DataError(
                f"{file.place(row)}: no sample {ctx.index} is recorded", remedy="lower the knob num_samples"
            )
        asked = ctx.episode.sample().prompt_ids
        if not np.array_equal(asked, found[0].prompt_ids):
            raise DataError(
                f"{file.place(row)}: its prompt was asked by other tokens than this run asks by",
                remedy="name the model that it was recorded with (model.path), and the same data.apply_chat_template "
                "and data.chat_template_kwargs",
            )
        has_reference = self._terms is not None and self._terms.wants_reference
        return tuple(
            replace(
                sample,
                group_id=prompt.group_id,
                versions=np.full_like(sample.versions, NO_VERSION),
                reference_logprobs=sample.reference_logprobs if has_reference else None,
            )
            for sample in found
        )

    async def _group(self, file: RecordedGroups, row: int) -> Group:
        async with self._reading:
            key = file.place(row), row
            if key not in self._kept:
                self._kept[key] = await in_daemon_thread(lambda: file.group(row), "recording")
                if len(self._kept) > KEPT_GROUPS:
                    del self._kept[next(iter(self._kept))]
            return self._kept[key]
