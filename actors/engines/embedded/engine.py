"""The embedded engine: continuous batching on the CPU inside the rollout's process, behind `core.protocols.Engine`.

It loads a model folder, runs the core in its own thread and reads new weights through the reader it is given. Stages
of a weight version:

    prepare_weights   a worker thread copies the bytes into the spare set while the engine decodes
    commit_weights    between two steps the two sets change places; the next token is stamped with the new version

Libraries considered: transformers' continuous batching (2-5 times slower on a CPU, version stamps unknown to it),
vLLM and SGLang (their CPU builds are not on the package index), llama.cpp (weights must be converted and reloaded).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ....core.device_memory import MovedBytes, Tag, TagReport
from ....core.errors import EngineError
from ....core.messages import WeightManifest
from ....core.protocols import Delta, EngineInfo, GenerateRequest, NamedArray, PauseMode, WeightReader
from ....core.samples import I32
from ....core.weight_channel import WeightProgress
from ....memory.budget import EngineBudget, plan_engine
from ....memory.host import available_bytes
from ...models.chat_template import PlainText
from ...models.hf_folder import ModelConfig, check_values, open_weights, read_config
from ...models.tokenizer import load_tokenizer
from ...weights.beacon import Beacon, Counted
from .core import CoreOptions, EngineCore, RequestEvent
from .request import Running, Scoring
from .tensors import LentMemory, expected, plain_zeros
from .thread import EngineThread
from .weights import DTYPES, DecoderWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedOptions:
    """Settings of an embedded engine."""

    max_running: int = 256
    """Sequences decoded together; fewer if memory demands it."""
    context_length: int = 0
    """Longest prompt plus answer in tokens; 0: the model's own."""
    dtype: str = "float32"
    """float32 agrees with the trainer to 1e-5 per log-prob; bfloat16 halves the memory and does not."""
    seed: int = 0
    """Of the requests that bring none."""
    version: int = 0
    """Weight version that the folder holds."""
    pause_mode: PauseMode = "in_place"
    """What a commit does to running requests: in_place keeps their cache, retract rebuilds it under the new weights,
    abort ends them."""
    stream_interval: int = 16
    """Deltas come every so many tokens, and at the end."""
    num_threads: int = 1
    """Of torch. More than one pays on idle cores only: its barriers spin."""
    memory_share: float = 0.6
    """Part of the host's available memory to plan with; divide it by the number of engines on the host."""
    is_invariant: bool = False
    """Tokens and log-probs of a request depend on its tokens, its seed and the weights alone, to the bit: whatever
    shares its batch, and wherever it was continued. Slower: docs/benchmarks.md."""
    name: str = "embedded engine"


class DeltaStream:
    """Filled by the engine's events, emptied by one `generate` call."""

    def __init__(self) -> None:
        self._news: deque[Delta | EngineError] = deque()
        self._has_news = asyncio.Event()

    def put(self, news: Delta | EngineError) -> None:
        """New tokens, or the error that ended the request."""
        self._news.append(news)
        self._has_news.set()

    async def get(self) -> Delta:
        """The next news; raises it if it is an error."""
        while not self._news:
            self._has_news.clear()
            await self._has_news.wait()
        news = self._news.popleft()
        if isinstance(news, EngineError):
            raise news
        return news


CPU_DTYPES = ("float32", "bfloat16")


def load_core(
    folder: Path, options: EmbeddedOptions, memory: LentMemory | None
) -> tuple[ModelConfig, EngineBudget, EngineCore]:
    """Raises ModelError for a bad folder, EngineError for impossible settings or too little memory."""
    if options.dtype not in CPU_DTYPES:
        raise EngineError(
            f"{options.name}: dtype {options.dtype} is not for CPUs", remedy=f"use {' or '.join(CPU_DTYPES)}"
        )
    config, budget = plan_folder(folder, options, memory)
    tokenizer = load_tokenizer(folder, PlainText())
    weights = new_weights(config, options, memory)
    with open_weights(folder, config) as tensors:
        check_values(config.tensor_shapes(), tensors, str(folder))
        weights.load(tensors, str(folder))
    core_options = CoreOptions(
        num_slots=budget.num_slots,
        context_length=budget.context_length,
        eos_token_ids=frozenset(tokenizer.eos_token_ids),
        seed=options.seed,
        version=options.version,
        stream_interval=options.stream_interval,
        is_invariant=options.is_invariant,
        name=options.name,
        decode=partial(tokenizer.decode, skip_special=False),
    )
    allocate = None if memory is None else memory.allocate("kv_cache")
    core = EngineCore(config, weights, core_options, allocate)
    core.check_logits()
    return config, budget, core


def plan_folder(folder: Path, options: EmbeddedOptions, memory: LentMemory | None) -> tuple[ModelConfig, EngineBudget]:
    """How much room there is for what. Raises as `load_core`."""
    config = read_config(folder)
    config.require_plain(options.name)
    budget = plan_engine(
        config,
        dtype=options.dtype,
        max_running=options.max_running,
        context_length=options.context_length,
        available_bytes=available_bytes() if memory is None else min(available_bytes(), memory.device_bytes),
        share=options.memory_share,
    )
    return config, budget


def new_weights(config: ModelConfig, options: EmbeddedOptions, memory: LentMemory | None) -> DecoderWeights:
    """A set without values."""
    allocate = plain_zeros if memory is None else memory.allocate("weights")
    return DecoderWeights(config, DTYPES[options.dtype], allocate)


JOIN_S = 10.0
"""How long `close` waits for the current step."""


@dataclass(slots=True)
class _Started:
    """What exists between `start` and `close`."""

    config: ModelConfig
    budget: EngineBudget
    thread: EngineThread
    worker: ThreadPoolExecutor
    spare: DecoderWeights | None = None
    prepared: int | None = None
    """Version that the spare set holds."""


class EmbeddedEngine:
    """One model, one thread. `reader` opens the weight channel; without one, weights come from folders only. `memory`:
    where weights and cache lie if they may be taken back between steps."""

    def __init__(
        self,
        folder: str | Path,
        options: EmbeddedOptions | None = None,
        *,
        reader: WeightReader | None = None,
        memory: LentMemory | None = None,
    ) -> None:
        self._folder = Path(folder)
        self._options = options or EmbeddedOptions()
        self.pause_mode: PauseMode = self._options.pause_mode
        self._reader = reader
        self._memory = memory
        self._state: _Started | None = None
        self._is_closed = False
        self._streams: set[DeltaStream] = set()
        self._preparing = asyncio.Lock()
        self._starting = asyncio.Lock()
        self._broken: EngineError | None = None
        self._is_lost = asyncio.Event()
        self._beacon = Beacon()

    @property
    def _place(self) -> str:
        return self._options.name

    # -- start and end

    async def start(self) -> EngineInfo:
        """Check memory, load the folder, start the thread.

        Raises ModelError for a bad folder, EngineError for impossible settings or too little memory.
        """
        async with self._starting:
            if self._is_closed or self._state is not None:
                raise EngineError(f"{self._place} was started before", remedy="build a new one")
            worker = ThreadPoolExecutor(1, thread_name_prefix=f"{self._place} weights")
            try:
                config, budget, core = await asyncio.get_running_loop().run_in_executor(
                    worker, load_core, self._folder, self._options, self._memory
                )
                if self._is_closed:
                    raise EngineError(f"{self._place} was closed while it started", remedy="build a new one")
            except BaseException as err:
                # Cancelled: the worker finishes the load and then ends; otherwise it is idle.
                worker.shutdown(wait=not isinstance(err, asyncio.CancelledError), cancel_futures=True)
                raise
            thread = EngineThread(
                core,
                on_events=self._on_events,
                on_broken=self._on_broken,
                name=self._place,
                num_threads=self._options.num_threads,
            )
            self._state = _Started(config=config, budget=budget, thread=thread, worker=worker)
            if self._memory is not None:  # all that it will ever hold, so that nothing has to grow later
                self._state.spare = self._new_weights(config)
            thread.start()
        return await self.info()

    def _new_weights(self, config: ModelConfig) -> DecoderWeights:
        return new_weights(config, self._options, self._memory)

    def _started(self) -> _Started:
        if self._is_closed:
            raise EngineError(f"{self._place} is closed", remedy="build a new one")
        if self._state is None:
            raise EngineError(f"{self._place} was not started", remedy="await start() first")
        return self._state

    async def close(self) -> None:
        """End the threads; open streams end with EngineError. Never raises; a second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._fail_streams(EngineError(f"{self._place} was closed", remedy="nothing; its requests go elsewhere"))
        if self._state is not None:
            self._state.thread.stop()
            is_idle = await self._drain(self._state.worker)
            self._state.worker.shutdown(wait=is_idle, cancel_futures=True)
            await self._state.thread.join(JOIN_S)
            self._state = None
            if self._reader is not None and is_idle:
                self._reader.close()
            if self._memory is not None and is_idle:
                self._memory.close()

    async def _drain(self, worker: ThreadPoolExecutor) -> bool:
        """Wait for a running copy; False when it takes longer than `JOIN_S`."""
        idle = asyncio.get_running_loop().run_in_executor(worker, int)
        done, _ = await asyncio.wait([idle], timeout=JOIN_S)
        return bool(done)

    # -- requests

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        """Stream tokens; see `core.protocols.Engine`. Raises RequestRefused for a request that cannot be served."""
        return self._deltas(lambda core, stream: core.submit(request, stream))

    async def score(self, request_id: str, ids: I32, first: int) -> Delta:
        """Tokens `first` to the last of `ids`, int32 [T], with log-probs at temperature 1 under the weights that serve.
        Aborted, none. Raises RequestRefused for ids that cannot be scored."""

        def submit(core: EngineCore, stream: DeltaStream) -> None:
            core.submit_scoring(Scoring(request_id, stream, ids, first))

        async with aclosing(self._deltas(submit)) as deltas:
            return await anext(deltas)

    async def _deltas(self, submit: Callable[[EngineCore, DeltaStream], None]) -> AsyncGenerator[Delta, None]:
        thread = self._started().thread
        stream = DeltaStream()
        self._streams.add(stream)
        is_ended = False
        try:
            thread.post(lambda core: submit(core, stream))
            while not is_ended:
                delta = await stream.get()
                is_ended = delta.finish is not None
                yield delta
        finally:
            self._streams.discard(stream)
            if not is_ended and not self._is_closed:
                self._abandon(thread, stream)

    def _abandon(self, thread: EngineThread, stream: DeltaStream) -> None:
        """The caller closed the iterator early: its row is wanted by others."""

        def is_mine(running: Running | Scoring) -> bool:
            return running.owner is stream

        try:
            thread.post(lambda core: core.abort(is_mine))
        except EngineError:  # broken or closing: nothing runs any more
            return

    def _on_events(self, events: list[RequestEvent]) -> None:
        for event in events:
            if isinstance(event.owner, DeltaStream):
                event.owner.put(event.news)

    def _on_broken(self, error: EngineError) -> None:
        self._broken = error
        self._is_lost.set()
        self._fail_streams(error)

    async def until_lost(self) -> None:
        """Waits; raises the error that broke the thread."""
        await self._is_lost.wait()
        if self._broken is not None:
            raise self._broken

    def _fail_streams(self, error: EngineError) -> None:
        for stream in list(self._streams):
            stream.put(error)

    async def abort(self, request_id: str | None = None) -> None:
        """Abort one request, or all. When it returns, their last deltas are in their streams."""

        def is_meant(running: Running | Scoring) -> bool:
            return request_id in (None, running.request_id)

        await self._started().thread.call(lambda core: core.abort(is_meant))

    async def pause(self, mode: PauseMode) -> None:
        """Stop decoding; see `core.protocols.Engine`."""
        await self._started().thread.call(lambda core: core.pause(mode))

    async def resume(self) -> None:
        """Continue after a pause."""
        await self._started().thread.call(lambda core: core.resume())

    # -- weights

    async def prepare_weights(self, manifest: WeightManifest) -> None:
        """Copy a published version beside the one that is served. Raises EngineError naming what is wrong with it."""
        reader = self._reader
        if reader is None:
            raise EngineError(
                f"{self._place} was built without a reader for channel {manifest.channel!r}",
                remedy="pass reader=, or load a folder with prepare_folder",
            )

        def load(weights: DecoderWeights) -> None:
            what = f"weight version {manifest.version} from {manifest.channel}"
            self._beacon.step(f"{what}: digest", is_counted=False)
            with reader.open(manifest) as tensors:
                weights.load(Counted(tensors, self._beacon, what), f"weight version {manifest.version}")

        await self._prepare(manifest.version, load)

    async def prepare_folder(self, folder: str | Path, version: int) -> None:
        """Copy a model folder of the same shape beside the weights that are served, to be committed as `version`.

        Raises ModelError or EngineError naming what is wrong with it.
        """
        path = Path(folder)

        def load(weights: DecoderWeights) -> None:
            with open_weights(path, weights.config) as tensors:
                weights.load(tensors, str(path))

        await self._prepare(version, load)

    async def prepare_tensors(self, tensors: Mapping[str, NamedArray], version: int) -> None:
        """Copy weights that lie in this process's memory, to be committed as `version`. Raises EngineError naming what
        is missing or of another shape; the bytes are not needed afterwards."""
        await self._prepare(version, lambda weights: weights.load(tensors, f"weight version {version}"))

    async def weight_values(self, name: str, num_values: int) -> list[float]:
        """The first values of a weight that serves now. Raises RequestRefused for one that is not kept as it came."""
        return await self._started().thread.call(lambda core: core.weights.first_values(name, num_values))

    async def _prepare(self, version: int, load: Callable[[DecoderWeights], None]) -> None:
        async with self._preparing:
            state = self._started()
            state.prepared = None  # its bytes are about to be overwritten
            weights = state.spare or self._new_weights(state.config)
            state.spare = weights
            await asyncio.get_running_loop().run_in_executor(state.worker, load, weights)
            state.prepared = version

    async def commit_weights(self, version: int) -> None:
        """Serve a prepared version from the next token on; running requests meet it as `pause_mode` says."""
        async with self._preparing:
            state = self._started()
            weights, prepared = state.spare, state.prepared
            if weights is None or prepared != version:
                has = "nothing" if prepared is None else f"version {prepared}"
                raise EngineError(
                    f"{self._place}: version {version} cannot be committed, {has} is prepared",
                    remedy="call prepare_weights with its manifest first",
                )
            # From here on the spare set may be the served one, whether or not our caller waits for the answer.
            state.spare = state.prepared = None
            mode = self.pause_mode
            state.spare = await state.thread.call(lambda core: core.swap(weights, version, mode))

    def weight_progress(self) -> WeightProgress:
        """See `core.protocols.ReportsProgress`."""
        return self._beacon.progress()

    async def relabel(self, version: int) -> None:
        """Stamp the next tokens with another version, weights unchanged: the weights were known by another number."""
        await self._started().thread.call(lambda core: core.relabel(version))

    # -- memory

    def _lent(self) -> LentMemory:
        if self._memory is None:
            raise EngineError(f"{self._place}: its memory is its own", remedy='set memory.share = "switch"')
        return self._memory

    def memory_tags(self) -> tuple[TagReport, ...]:
        """See `core.protocols.ReleasesMemory`."""
        if self._state is not None:
            return self._lent().tags()
        _, budget = plan_folder(self._folder, self._options, self._memory)
        return expected(budget.weight_bytes, budget.kv_bytes)

    def memory_pids(self) -> tuple[int, ...]:
        """See `core.protocols.ReleasesMemory`."""
        return self._lent().pids

    async def park(self, within_s: float) -> None:
        """See `core.protocols.ReleasesMemory`; between two steps nothing runs once no request is left."""
        try:
            async with asyncio.timeout(within_s):
                while await self._started().thread.call(lambda core: core.num_running + core.num_waiting):
                    await asyncio.sleep(0.005)
        except TimeoutError as err:
            raise EngineError(
                f"{self._place}: was not idle within {within_s:g} s", remedy="abort its requests"
            ) from err

    async def unpark(self) -> None:
        """See `core.protocols.ReleasesMemory`."""

    async def release_memory(self, tags: Collection[Tag]) -> MovedBytes:
        """See `core.protocols.ReleasesMemory`."""
        async with self._preparing:
            state, lent = self._started(), self._lent()
            if "weights" in tags:
                state.prepared = None
            return await asyncio.get_running_loop().run_in_executor(state.worker, lent.release, tags)

    async def restore_memory(self, tags: Collection[Tag]) -> MovedBytes:
        """See `core.protocols.ReleasesMemory`."""
        state, lent = self._started(), self._lent()
        return await asyncio.get_running_loop().run_in_executor(state.worker, lent.restore, tags)

    # -- questions

    @property
    def config(self) -> ModelConfig:
        """Of the folder it serves. Raises EngineError before `start`."""
        return self._started().config

    async def info(self) -> EngineInfo:
        """Current state; answered between two steps."""
        state = self._started()
        running, waiting, version = await state.thread.call(lambda c: (c.num_running, c.num_waiting, c.version))
        return EngineInfo(
            kind="embedded",
            vocab_size=state.config.vocab_size,
            context_length=state.budget.context_length,
            max_running=state.budget.num_slots,
            version=version,
            running=running,
            waiting=waiting,
        )
