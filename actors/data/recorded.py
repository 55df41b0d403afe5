"""A dump of groups as a data file: each finished group is a row whose prompt is drawn again, and a recording of its
answers, for the engine that replays them (`engines/recorded.py`).

A row is good if it has a prompt. Where recordings are to answer, this run must also be able to use them as they are:
its model's vocabulary and context, its temperature, as many samples as it asks for (`RecordedTerms`).
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import orjson

from ...core.config import RunConfig
from ...core.config.learning import RECORDED_REFERENCE
from ...core.config.run import WORKFLOW_BUILTINS
from ...core.errors import DataError, ModelError
from ...core.files import open_regular
from ...core.samples import Group, Sample, check_sample
from ..buffer.dumps import DumpedGroup, group_of, read_header
from ..models.hf_folder import read_config
from .row_file import Columns, Row, RowError

ANY = 1 << 31
"""In place of a limit that only the model knows."""


@dataclass(frozen=True, slots=True)
class RecordedTerms:
    """See the module's head."""

    num_samples: int
    temperature: float
    max_new_tokens: int
    """Of one turn; 0: a workflow of the user's says it."""
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
        temperature=config.rollout.temperature,
        max_new_tokens=config.rollout.max_new_tokens if config.rollout.workflow in WORKFLOW_BUILTINS else 0,
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
            "rewards": group.rewards.tolist(),
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
    if any(sample.branch for sample in group.samples):
        yield RowError(
            "it has a rollout of several samples, which cannot be replayed",
            'leave it out with data.on_bad_line = "skip"',
        )
        return
    if terms is None:
        return
    if len(group.samples) < terms.num_samples:
        yield RowError(
            f"the group has {len(group.samples)} samples, fewer than rollout.num_samples = {terms.num_samples}",
            f"set rollout.num_samples = {len(group.samples)}",
        )
    for index, sample in enumerate(group.samples):
        for cause in _torn(sample, group, index):
            yield RowError(f"sample {index}: {cause}", UNCHANGED)
        for wrong in _unfit(sample, terms):
            yield RowError(f"sample {index}: {wrong.cause}", wrong.remedy)


def _torn(sample: Sample, group: Group, index: int) -> Iterator[str]:
    """What no sample looks like that was finished by an engine."""
    if (sample.group_id, sample.index) != (group.group_id, index):
        yield f"it says that it is sample {sample.group_id}/{sample.index}, of group {group.group_id}"
    try:
        check_sample(sample)
    except ValueError as error:
        yield str(error)
        return
    if not np.array_equal(sample.prompt_ids, group.samples[0].prompt_ids) or not sample.prompt_ids.size:
        yield "its prompt has no tokens, or others than that of sample 0"
    if sample.finish == "abort":
        yield "it was not finished"
    made = sample.loss_mask == 1
    if not bool(made.any()) or bool((sample.loss_mask > 1).any()):
        yield "its loss mask is not 1 where the model spoke and 0 elsewhere, or the model said nothing"
    elif int(sample.versions[made].min()) < 0:
        yield "no engine generated it: it has no behaviour log-probs"


def _unfit(sample: Sample, terms: RecordedTerms) -> Iterator[RowError]:
    """What this run cannot have as it is."""
    try:
        check_sample(sample, terms.vocab_size)
    except ValueError as error:
        yield RowError(str(error), "name the model that the groups were recorded with: model.path")
    if sample.num_tokens > terms.context_length:
        yield RowError(
            f"{sample.num_tokens} tokens, with the prompt, are more than the context of {terms.context_length}",
            "raise engine.context_length, or name the model that the groups were recorded with",
        )
    if sample.temperature != terms.temperature:
        yield RowError(
            f"it was drawn at temperature {sample.temperature:g}, of which its log-probs are; rollout.temperature is "
            f"{terms.temperature:g}",
            f"set rollout.temperature = {sample.temperature!r}",
        )
    if terms.wants_reference and sample.reference_logprobs is None and bool(sample.loss_mask.any()):
        yield RowError(
            'it was recorded without reference log-probs, which algo.ref_urls = ["recorded"] wants',
            "record it in a run with algo.ref_urls, or name servers here too",
        )
    runs = sample.model_runs()
    # One that ended for lack of room may have had a last turn without a token.
    if len(runs) != sample.num_turns and not (len(runs) + 1 == sample.num_turns and sample.finish == "length"):
        yield RowError(
            f"its {sample.num_turns} turns are {len(runs)} runs of generated tokens: where each ended is not recorded",
            'leave it out with data.on_bad_line = "skip": nothing separates turns without a reply between them',
        )
    longest = max((end - start for start, end in runs), default=0)
    if 0 < terms.max_new_tokens < longest:
        yield RowError(
            f"a turn of {longest} tokens is longer than rollout.max_new_tokens = {terms.max_new_tokens}",
            f"set rollout.max_new_tokens = {longest}, or more",
        )
