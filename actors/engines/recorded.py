"""The engine that generates nothing: it answers with what was recorded in a dump of groups.

A request names the row of the data that its prompt was drawn from, which is a group of a dump, and a sample of it. The
request's tokens must be the beginning of that sample; the answer is the rest of the turn, with the log-probs of the
policy that drew these tokens. Version stamps are the version that this engine serves now, so staleness is what it would
be had the tokens been drawn now: for debugging a trainer the rest of the run stays as it is. The engine keeps no
position: after a restart, or in another actor, a row has the same answers. Weight updates are accepted and dropped.

`RecordedReference` answers `algo.ref_urls = ["recorded"]` with the reference log-probs recorded beside the answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from ...core.errors import EngineError, ReferenceFailed, RequestRefused
from ...core.messages import WeightManifest
from ...core.protocols import Delta, EngineInfo, GenerateRequest, PauseMode
from ...core.samples import F32, I32, FinishReason, Prompt, Sample
from ..daemon_thread import in_daemon_thread
from ..data.recorded import RecordedGroups
from ..data.row_file import RowError
from ..rewards.guard import Reference

KEPT_GROUPS = 64
"""In memory: their samples are asked for side by side, and turn by turn."""
REMEDY = (
    "ask as it was asked when it was recorded: by the same model folder, data.apply_chat_template, "
    "data.chat_template_kwargs and workflow"
)


@dataclass(frozen=True, slots=True)
class RecordedOptions:
    """Plain settings of the engine."""

    vocab_size: int
    context_length: int
    max_running: int
    end_ids: frozenset[int] = frozenset()
    """Tokens that end a turn, beside those that a request names."""
    name: str = "recorded"


@dataclass(frozen=True, slots=True)
class Recordings:
    """What the data of a run calls a source: some groups of a dump, by their number there."""

    file: RecordedGroups
    rows: range


class RecordedEngine:
    """See the module's head."""

    def __init__(self, sources: Mapping[str, Recordings], options: RecordedOptions) -> None:
        """`sources`: by the name that prompts have them by (`core.samples.Prompt.source`)."""
        self._sources = dict(sources)
        self._options = options
        self._version = 0
        self._prepared: int | None = None
        self._is_started = False
        self._is_closed = False
        self._is_paused = False
        self._running: dict[object, str] = {}
        """A request under way -> its id; those that are aborted are not in it any more."""
        self._news = asyncio.Event()
        self._kept: dict[tuple[str, int], tuple[Sample, ...]] = {}
        self._reading = asyncio.Lock()

    # -- start and end

    async def start(self) -> EngineInfo:
        """Nothing is loaded. Raises EngineError the second time."""
        if self._is_closed or self._is_started:
            raise EngineError(f"{self._options.name} was started before", remedy="build a new one")
        self._is_started = True
        return await self.info()

    def _check_started(self) -> None:
        if self._is_closed:
            raise EngineError(f"{self._options.name} is closed", remedy="build a new one")
        if not self._is_started:
            raise EngineError(f"{self._options.name} was not started", remedy="await start() first")

    async def until_lost(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        """Requests under way end with EngineError. Never raises; a second call does nothing."""
        self._is_closed = True
        self._tell()

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    # -- requests

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        """The rest of the turn, in one piece. Raises RequestRefused if no recorded turn continues the request."""
        self._check_started()
        mine = object()
        self._running[mine] = request.request_id
        try:
            rest = await self._rest_of_turn(request)
            while self._is_paused and mine in self._running and not self._is_closed:
                await self._news.wait()
            self._check_started()
            if mine not in self._running:
                rest = _Rest(rest.ids[:0], rest.logprobs[:0], "abort", kept=None)
            stamps = np.full(len(rest.ids), self._version, np.int32)
            yield Delta(
                output_ids=rest.ids, logprobs=rest.logprobs, versions=stamps, finish=rest.finish, matched=rest.matched,
                kept=rest.kept,
            )  # fmt: skip
        finally:
            self._running.pop(mine, None)

    async def _rest_of_turn(self, request: GenerateRequest) -> _Rest:
        source = self._sources.get(request.source)
        if source is None or not 0 <= request.row < len(source.rows):
            raise RequestRefused(
                f"{self._options.name}: no answer to row {request.row} of {request.source or 'no data'} is recorded, "
                f"there are those of {', '.join(self._sources)}",
                remedy="ask for prompts of recordings only",
            )
        place = source.file.place(source.rows[request.row])
        try:
            samples = await self._samples(request.source, request.row)
            if request.index >= len(samples):
                raise RowError(
                    f"{len(samples)} samples are recorded, number {request.index} is asked for (from 0)",
                    f"set rollout.num_samples, or the knob num_samples, to {len(samples)} or less",
                )
            return _rest(request, samples[request.index], self._options.end_ids)
        except RowError as wrong:
            raise RequestRefused(f"{place}: {wrong.cause}", remedy=wrong.remedy) from wrong

    async def sample(self, prompt: Prompt, index: int) -> Sample | None:
        """What is recorded of that sample of a prompt, whole; None: nothing."""
        source = self._sources.get(prompt.source)
        if source is None or not 0 <= prompt.row < len(source.rows):
            return None
        try:
            samples = await self._samples(prompt.source, prompt.row)
        except RowError:
            return None
        return samples[index] if index < len(samples) else None

    async def _samples(self, source: str, row: int) -> tuple[Sample, ...]:
        """Raises RowError if the line is not good any more."""
        recordings, key = self._sources[source], (source, row)
        async with self._reading:
            if key not in self._kept:
                group = await in_daemon_thread(lambda: recordings.file.group(recordings.rows[row]), "recording")
                self._kept[key] = group.samples
                if len(self._kept) > KEPT_GROUPS:
                    del self._kept[next(iter(self._kept))]
            return self._kept[key]

    async def abort(self, request_id: str | None = None) -> None:
        self._running = {mine: name for mine, name in self._running.items() if request_id not in (None, name)}
        self._tell()

    async def pause(self, mode: PauseMode) -> None:
        """Nothing is answered until `resume`; with "abort", requests under way end."""
        self._check_started()
        self._is_paused = True
        if mode == "abort":
            await self.abort()

    async def resume(self) -> None:
        self._check_started()
        self._is_paused = False
        self._tell()

    # -- weights

    async def prepare_weights(self, manifest: WeightManifest) -> None:
        self._check_started()
        self._prepared = manifest.version

    async def commit_weights(self, version: int) -> None:
        """Stamp answers with that version from now on. Raises EngineError if it was not prepared."""
        self._check_started()
        if self._prepared != version:
            has = "nothing" if self._prepared is None else f"version {self._prepared}"
            raise EngineError(
                f"{self._options.name}: version {version} cannot be committed, {has} is prepared",
                remedy="call prepare_weights with its manifest first",
            )
        self._version, self._prepared = version, None

    # -- questions

    async def info(self) -> EngineInfo:
        self._check_started()
        options = self._options
        return EngineInfo(
            kind="recorded",
            vocab_size=options.vocab_size,
            context_length=options.context_length,
            max_running=options.max_running,
            version=self._version,
            running=len(self._running),
        )


@dataclass(frozen=True, slots=True)
class _Rest:
    """Of a turn."""

    ids: I32
    logprobs: F32
    finish: FinishReason
    matched: int | None = None
    kept: I32 | None = None


def _rest(request: GenerateRequest, sample: Sample, end_ids: frozenset[int]) -> _Rest:
    """What was drawn after what the request holds. Raises RowError."""
    sampling, given = request.sampling, request.input_ids
    if sampling.temperature != sample.temperature:
        raise RowError(
            f"sample {sample.index} was drawn at temperature {sample.temperature:g}, of which its log-probs are; it is "
            f"asked for at {sampling.temperature:g}",
            f"set rollout.temperature, or the knob temperature, to {sample.temperature!r}",
        )
    whole = np.concatenate([sample.prompt_ids, sample.response_ids])
    common = min(len(given), len(whole))
    differ = np.flatnonzero(given[:common] != whole[:common])
    if differ.size or len(given) > common:
        at = int(differ[0]) if differ.size else common
        raise RowError(
            f"what is asked differs from sample {sample.index} from token {at} on, of a prompt of "
            f"{len(sample.prompt_ids)} and an answer of {len(sample.response_ids)}",
            REMEDY,
        )
    begun, runs = len(given) - len(sample.prompt_ids), sample.model_runs()
    end = next((end for start, end in runs if start <= begun < end), None)
    if end is None:
        raise RowError(f"sample {sample.index} has no turn of the model that continues at token {len(given)}", REMEDY)
    ids, kept = sample.response_ids[begun:end], None if sample.kept_rows is None else sample.kept_rows[begun:end]
    if len(ids) > sampling.max_new_tokens:
        raise RowError(
            f"the turn of sample {sample.index} has {len(ids)} more tokens, {sampling.max_new_tokens} are asked for",
            "raise rollout.max_new_tokens, or the knob max_new_tokens",
        )
    last = int(ids[-1])
    if not sampling.ignore_eos and (last in end_ids or last in sampling.stop_token_ids):
        return _Rest(ids, sample.logprobs[begun:end], "stop", last, kept)
    # Only how the whole sample ended is recorded: an earlier turn that is not as long as it may be met a stop string.
    earlier: FinishReason = "length" if len(ids) == sampling.max_new_tokens else "stop"
    return _Rest(ids, sample.logprobs[begun:end], sample.finish if end == runs[-1][1] else earlier, kept=kept)


class RecordedReference(Reference):
    """One per rollout actor."""

    def __init__(self, engine: RecordedEngine) -> None:
        super().__init__()
        self._engine = engine

    async def judged(self, prompt: Prompt, sample: Sample) -> Sample:
        """The sample with the log-probs of its recording, of which it may be the beginning. Raises ReferenceFailed."""
        found = await self._engine.sample(prompt, sample.index)
        size = len(sample.response_ids)
        logprobs = None if found is None else found.reference_logprobs
        if (
            found is None
            or logprobs is None
            or not np.array_equal(found.prompt_ids, sample.prompt_ids)
            or not np.array_equal(found.response_ids[:size], sample.response_ids)
        ):
            if not sample.loss_mask.any():
                return sample
            raise ReferenceFailed(
                f"group {prompt.group_id}, sample {sample.index}: no reference log-probs of these tokens are recorded",
                remedy="use a dump of a run with algo.ref_urls, and the workflow that it was recorded with",
            )
        return replace(sample, reference_logprobs=np.where(sample.loss_mask != 0, logprobs[:size], np.float32(0)))
