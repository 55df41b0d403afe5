"""The embedded engine: continuous batching on the CPU inside the rollout's process, behind `core.protocols.Engine`.

Knows its model folder, its thread and the reader it is given for new weights. Life of a weight version here:

    prepare_weights   a worker thread copies the bytes into the spare set while the engine goes on decoding
    commit_weights    between two steps the two sets change places; the next token is stamped with the new version

Libraries considered: transformers' continuous batching (2-5 times slower on a CPU, version stamps unknown to it),
vLLM and SGLang (their CPU builds are not on the package index), llama.cpp (weights must be converted and reloaded).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from ....core.device_memory import MovedBytes, Tag, TagReport
from ....core.errors import EngineError
from ....core.messages import WeightManifest
from ....core.protocols import Delta, EngineInfo, GenerateRequest, NamedArray, PauseMode, WeightReader
from ....core.samples import I32
from ....core.weight_channel import WeightProgress
from ....memory.budget import EngineBudget
from ...models.hf_folder import ModelConfig, open_weights
from ...weights.beacon import Beacon, Counted
from .core import EngineCore, Event
from .lent_memory import LentMemory, expected
from .loading import load_core, new_weights, plan_folder
from .options import EmbeddedOptions
from .request import Running, Scoring
from .stream import Stream
from .thread import EngineThread
from .weights import DecoderWeights

JOIN_S = 10.0
"""How long `close` waits for the step in hand."""


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
        self._streams: set[Stream] = set()
        self._preparing = asyncio.Lock()
        self._starting = asyncio.Lock()
        self._broken: EngineError | None = None
        self._is_lost = asyncio.Event()
        self._beacon = Beacon()

    @property
    def _place(self) -> str:
        return self._options.name

    # -- life

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
                # Cancelled: the load goes on in the worker, which ends after it; otherwise it is idle.
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
        """Wait for a copy in hand; False when it takes too long to wait for."""
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

        def submit(core: EngineCore, stream: Stream) -> None:
            core.submit_scoring(Scoring(request_id, stream, ids, first))

        async with aclosing(self._deltas(submit)) as deltas:
            return await anext(deltas)

    async def _deltas(self, submit: Callable[[EngineCore, Stream], None]) -> AsyncGenerator[Delta, None]:
        thread = self._started().thread
        stream = Stream()
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

    def _abandon(self, thread: EngineThread, stream: Stream) -> None:
        """The caller closed the iterator early: its row is wanted by others."""

        def is_mine(running: Running | Scoring) -> bool:
            return running.owner is stream

        try:
            thread.post(lambda core: core.abort(is_mine))
        except EngineError:  # broken or closing: nothing runs any more
            return

    def _on_events(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event.owner, Stream):
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
        """Stand still; see `core.protocols.Engine`."""
        await self._started().thread.call(lambda core: core.pause(mode))

    async def resume(self) -> None:
        """Go on after a pause."""
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
        """See `core.protocols.TellsProgress`."""
        return self._beacon.told()

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
