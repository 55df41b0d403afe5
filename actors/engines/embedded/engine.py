"""The embedded engine: continuous batching on the CPU inside the rollout's process, behind `core.protocols.Engine`.

It loads a model folder, runs the core in its own thread and reads new weights by the channel that each manifest names.
One turn of the thread is receive (commands), schedule, forward (`core.py`: `step`), deliver (events to the loop).

Commands run in the order in which they were posted, and the events that a command caused arrive in the loop before its
result. An exception of a command is the error of its caller. An exception of a step breaks the engine for good:
`on_broken` is called once, and every later command fails. asyncio's executor was considered: a step must not wait
behind other jobs, and the thread must end with the engine.

Stages of a weight version:

    prepare_weights   a worker thread copies the bytes into the spare set while the engine decodes
    commit_weights    between two steps the two sets change places; the next token is stamped with the new version

Libraries considered: transformers' continuous batching (2-5 times slower on a CPU, version stamps unknown to it),
vLLM and SGLang (their CPU builds are not on the package index), llama.cpp (weights must be converted and reloaded).
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from ....core.device_memory import Tag, TagReport
from ....core.errors import EngineError, MyxaError
from ....core.host_memory import available_bytes
from ....core.messages import WeightManifest
from ....core.protocols import Delta, EngineInfo, GenerateRequest, PauseMode
from ....core.weight_channel import WeightProgress
from ....memory.arenas.arena import Arena
from ...models.chat_template import PlainText
from ...models.hf_folder import check_values, open_weights, read_config
from ...models.model_config import ModelConfig
from ...models.tokenizer import load_tokenizer
from ...weights.beacon import Beacon, Counted
from ...weights.channels.host import read_version
from .core import EmbeddedOptions, EngineCore
from .model import DecoderWeights
from .tensors import PADDING_BYTES, EngineBudget, lent_zeros, plain_zeros, plan_engine

T = TypeVar("T")

LOOP_CHECK_S = 1.0
"""An idle thread looks that often whether its loop was closed without a word to it."""

Command = Callable[[EngineCore], None]


class DeltaQueue(asyncio.Queue[Delta | EngineError]):
    """The owner of a request: gets its events, as they come."""


class EngineThread:
    """Drives one core; the owners of its requests are `DeltaQueue`s. All methods belong to the loop's thread."""

    def __init__(
        self, core: EngineCore, on_broken: Callable[[EngineError], None], *, name: str, num_threads: int
    ) -> None:
        """`on_broken` is called in the loop that is running now; `num_threads` is torch's."""
        self._core = core
        self._on_broken = on_broken
        self._name = name
        self._num_threads = num_threads
        self._loop = asyncio.get_running_loop()
        self._changed = threading.Condition()
        self._commands: list[Command] = []
        self._is_stopping = False
        self._broken: EngineError | None = None
        self._unanswered: set[asyncio.Future[Any]] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, command: Command) -> None:
        """Run a command between two steps; one that raises breaks the engine. Raises EngineError if the engine is
        broken or closed."""
        if self._broken is not None:
            raise self._broken
        with self._changed:
            if self._is_stopping:
                raise EngineError(f"{self._name} is closed", remedy="build a new one")
            self._commands.append(command)
            self._changed.notify()

    async def call(self, function: Callable[[EngineCore], T]) -> T:
        result: asyncio.Future[T] = self._loop.create_future()

        def command(core: EngineCore) -> None:
            try:
                value = function(core)
            except Exception as err:  # noqa: BLE001 -- it is the caller's, the engine serves the others
                error = err
                if not isinstance(err, MyxaError):
                    why = f"{self._name}: a command failed: {type(err).__name__}: {err}"
                    error = EngineError(why, remedy="this is a bug; its cause is chained to this error")
                    error.__cause__ = err
                self._tell()
                self._in_loop(lambda: result.done() or result.set_exception(error))
            else:
                self._tell()
                self._in_loop(lambda: result.done() or result.set_result(value))

        self.post(command)
        self._unanswered.add(result)
        result.add_done_callback(self._unanswered.discard)
        return await result

    def stop(self) -> None:
        with self._changed:
            self._is_stopping = True
            self._changed.notify()

    async def join(self, timeout_s: float) -> bool:
        """Wait for the thread's end; False when it did not end in time."""
        deadline = self._loop.time() + timeout_s
        while self._thread.is_alive() and self._loop.time() < deadline:
            await asyncio.sleep(0.002)
        return not self._thread.is_alive()

    # -- in the thread

    def _run(self) -> None:
        if torch.get_num_threads() != self._num_threads:
            torch.set_num_threads(self._num_threads)
        try:
            while self._wait():
                if self._core.has_work:
                    self._core.step()
                self._tell()
        except BaseException as err:  # noqa: BLE001 -- the loop must learn of any error, a library's panic too
            why = f"{self._name} broke: {type(err).__name__}: {err}"
            broken = EngineError(why, remedy="restart it; the cause is chained to this error")
            broken.__cause__ = err
            self._in_loop(lambda: self._break(broken))

    def _wait(self) -> bool:
        """Sleep until there is something to do, run commands; False: stop."""
        with self._changed:
            while not (self._commands or self._is_stopping or self._core.has_work):
                self._changed.wait(LOOP_CHECK_S)
                self._is_stopping = self._is_stopping or self._loop.is_closed()
            commands, self._commands = self._commands, []
            is_stopping = self._is_stopping
        for command in commands:
            command(self._core)
        return not is_stopping

    def _tell(self) -> None:
        events = self._core.take_events()
        if events:
            self._in_loop(lambda: [owner.put_nowait(news) for owner, news in events])

    def _in_loop(self, function: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:  # the loop is closed: there is no receiver
            self._is_stopping = True

    # -- in the loop

    def _break(self, error: EngineError) -> None:
        self._broken = error
        for result in list(self._unanswered):
            if not result.done():
                result.set_exception(error)
        self._on_broken(error)


CPU_DTYPES = ("float32", "bfloat16")
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
    """One model, one thread. `memory`:
    where weights and cache lie if they may be taken back between steps."""

    def __init__(
        self,
        folder: str | Path,
        options: EmbeddedOptions | None = None,
        *,
        memory: Arena | None = None,
    ) -> None:
        self._folder = Path(folder)
        self._options = options or EmbeddedOptions()
        self._place = self._options.name
        self.pause_mode: PauseMode = self._options.pause_mode
        self._memory = memory
        self._state: _Started | None = None
        self._is_closed = False
        self._streams: set[DeltaQueue] = set()
        self._preparing = asyncio.Lock()
        self._starting = asyncio.Lock()
        self._broken: EngineError | None = None
        self._is_lost = asyncio.Event()
        self._beacon = Beacon()

    # -- start and end

    async def start(self) -> EngineInfo:
        """Check memory, load the folder, start the thread. Raises ModelError for a bad folder, EngineError for
        impossible settings or too little memory."""
        async with self._starting:
            if self._is_closed or self._state is not None:
                raise EngineError(f"{self._place} was started before", remedy="build a new one")
            worker = ThreadPoolExecutor(1, thread_name_prefix=f"{self._place} weights")
            try:
                config, budget, core = await asyncio.get_running_loop().run_in_executor(worker, self._load)
                if self._is_closed:
                    raise EngineError(f"{self._place} was closed while it started", remedy="build a new one")
            except BaseException as err:
                # Cancelled: the worker finishes the load and then ends; otherwise it is idle.
                worker.shutdown(wait=not isinstance(err, asyncio.CancelledError), cancel_futures=True)
                raise
            thread = EngineThread(core, self._on_broken, name=self._place, num_threads=self._options.num_threads)
            self._state = _Started(config=config, budget=budget, thread=thread, worker=worker)
            if self._memory is not None:  # all that it will ever hold, so that nothing has to grow later
                self._state.spare = self._new_weights(config)
            thread.start()
        return await self.info()

    def _load(self) -> tuple[ModelConfig, EngineBudget, EngineCore]:
        folder, options = self._folder, self._options
        if options.dtype not in CPU_DTYPES:
            raise EngineError(
                f"{options.name}: dtype {options.dtype} is not for CPUs", remedy=f"use {' or '.join(CPU_DTYPES)}"
            )
        config, budget = self._plan()
        tokenizer = load_tokenizer(folder, PlainText())
        weights = self._new_weights(config)
        with open_weights(folder, config) as tensors:
            check_values(config.tensor_shapes(), tensors, str(folder))
            weights.load(tensors, str(folder))
        core = EngineCore(
            config,
            weights,
            options,
            num_slots=budget.num_slots,
            context_length=budget.context_length,
            eos_token_ids=frozenset(tokenizer.eos_token_ids),
            decode=partial(tokenizer.decode, skip_special=False),
            allocate=None if self._memory is None else lent_zeros(self._memory, "kv_cache"),
        )
        core.check_logits()
        return config, budget, core

    def _plan(self) -> tuple[ModelConfig, EngineBudget]:
        config = read_config(self._folder)
        config.require_plain(self._place)
        config.require_window(self._place, self._options.context_length)
        room = available_bytes()
        budget = plan_engine(
            config,
            dtype=self._options.dtype,
            max_running=self._options.max_running,
            context_length=self._options.context_length,
            available_bytes=room if self._memory is None else min(room, self._memory.driver.capacity_bytes()),
            share=self._options.memory_share,
        )
        return config, budget

    def _new_weights(self, config: ModelConfig) -> DecoderWeights:
        allocate = plain_zeros if self._memory is None else lent_zeros(self._memory, "weights")
        return DecoderWeights(config, getattr(torch, self._options.dtype), allocate)

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
        state, self._state = self._state, None
        if state is None:
            return
        state.thread.stop()
        running_copy = asyncio.get_running_loop().run_in_executor(state.worker, int)
        is_idle = bool((await asyncio.wait([running_copy], timeout=JOIN_S))[0])
        state.worker.shutdown(wait=is_idle, cancel_futures=True)
        await state.thread.join(JOIN_S)
        if self._memory is not None and is_idle:
            self._memory.close()

    def _on_broken(self, error: EngineError) -> None:
        self._broken = error
        self._is_lost.set()
        self._fail_streams(error)

    def _fail_streams(self, error: EngineError) -> None:
        for stream in self._streams:
            stream.put_nowait(error)

    async def call(self, function: Callable[[EngineCore], T]) -> T:
        return await self._started().thread.call(function)

    async def until_lost(self) -> None:
        """Waits; raises the error that broke the thread."""
        await self._is_lost.wait()
        if self._broken is not None:
            raise self._broken

    # -- requests

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        """Raises RequestRefused for a request that cannot be served."""
        thread = self._started().thread
        stream = DeltaQueue()
        self._streams.add(stream)
        is_ended = False
        try:
            thread.post(lambda core: core.submit(request, stream))
            while not is_ended:
                news = await stream.get()
                if isinstance(news, EngineError):
                    raise news
                is_ended = news.finish is not None
                yield news
        finally:
            self._streams.discard(stream)
            if (
                not is_ended and not self._is_closed
            ):  # the caller closed the iterator early: its row is wanted by others
                with suppress(EngineError):  # broken or closing: nothing runs any more
                    thread.post(lambda core: core.abort(lambda running: running.owner is stream))

    async def abort(self, request_id: str | None = None) -> None:
        """Abort one request, or all. When it returns, their last deltas are in their streams."""
        await self.call(lambda core: core.abort(lambda running: request_id in (None, running.request_id)))

    # -- weights

    async def prepare_weights(self, manifest: WeightManifest) -> None:
        """Copy a published version beside the one that is served. Raises EngineError naming what is wrong with it."""
        name = f"weight version {manifest.version}"

        def load(weights: DecoderWeights) -> None:
            place = f"{name} from {manifest.channel}"
            self._beacon.step(f"{place}: digest", is_counted=False)
            with read_version(manifest) as tensors:
                weights.load(Counted(tensors, self._beacon, place), name)

        await self.prepare(manifest.version, load)

    async def prepare(self, version: int, load: Callable[[DecoderWeights], None]) -> None:
        """`load` fills a set of weights in a worker thread."""
        async with self._preparing:
            state = self._started()
            state.prepared = None  # its bytes are about to be overwritten
            weights = state.spare = state.spare or self._new_weights(state.config)
            await asyncio.get_running_loop().run_in_executor(state.worker, load, weights)
            state.prepared = version

    async def commit_weights(self, version: int) -> None:
        """Serve a prepared version from the next token on; running requests meet it as `pause_mode` says."""
        async with self._preparing:
            state = self._started()
            weights, prepared = state.spare, state.prepared
            if weights is None or prepared != version:
                held = "nothing" if prepared is None else f"version {prepared}"
                raise EngineError(
                    f"{self._place}: version {version} cannot be committed, {held} is prepared",
                    remedy="call prepare_weights with its manifest first",
                )
            # From here on the spare set may be the served one, whether or not our caller waits for the answer.
            state.spare = state.prepared = None
            mode = self.pause_mode
            state.spare = await state.thread.call(lambda core: core.swap(weights, version, mode))

    def weight_progress(self) -> WeightProgress:
        return self._beacon.progress()

    # -- memory: see `core.protocols.ReleasesMemory`

    def _lent(self) -> Arena:
        if self._memory is None:
            raise EngineError(f"{self._place}: its memory is its own", remedy='set memory.share = "switch"')
        return self._memory

    def memory_tags(self) -> tuple[TagReport, ...]:
        lent = self._lent()
        if self._state is not None:
            return lent.report()
        _, budget = self._plan()
        sizes: Mapping[Tag, int] = {"weights": budget.weight_bytes, "kv_cache": budget.kv_bytes}
        return tuple(TagReport(tag, size + PADDING_BYTES, "discard", "discarded") for tag, size in sizes.items())

    def memory_pids(self) -> tuple[int, ...]:
        return (os.getpid(),)

    async def park(self, within_s: float) -> None:
        """Between two steps nothing runs once no request is left."""
        try:
            async with asyncio.timeout(within_s):
                while await self.call(lambda core: core.num_running + core.num_waiting):
                    await asyncio.sleep(0.005)
        except TimeoutError as err:
            raise EngineError(
                f"{self._place}: was not idle within {within_s:g} s", remedy="abort its requests"
            ) from err

    async def unpark(self) -> None:
        pass

    async def release_memory(self, tags: Collection[Tag]) -> None:
        async with self._preparing:
            state, lent = self._started(), self._lent()
            if "weights" in tags:
                state.prepared = None
            await asyncio.get_running_loop().run_in_executor(state.worker, lent.release, tags)

    async def restore_memory(self, tags: Collection[Tag]) -> None:
        state, lent = self._started(), self._lent()
        await asyncio.get_running_loop().run_in_executor(state.worker, lent.restore, tags)

    # -- questions

    async def info(self) -> EngineInfo:
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
