"""Any server that speaks SGLang's HTTP (SGLang 0.5.17 or later, or our own) as an `Engine`.

    prepare_weights   the channel's route (`weight_routes.py`) gets everything ready while tokens flow
    commit_weights    pause_generation -> route.load -> verify the version -> continue_generation

The pause comes first because SGLang's update otherwise waits until all running requests have ended. A server whose
weights may be torn continues with the next whole version and not before. Weights may be torn because loading them
failed half-way, or because the server was paused when this client came: an earlier client may have died in a commit.
Version stamps are the server's; tokens are held back until theirs is certain (`wire.HeldTokens`).

`ServerSampling` keeps a request's sampling to what means the same on the server. Of SGLang 0.5.17; the first was seen
on a server, the others follow from its source:

* before `min_new_tokens`, it excludes the tokenizer's own end token and `stop_token_ids`, and ends nevertheless at
  every other end token of the model's configs (most models have two);
* when it draws by seeds, all requests without one have the same: the samples of a group would be equal;
* when it draws by seeds, a request with `min_p` fails an assertion in its sampler, which ends it with all its requests;
* when it draws by seeds, one request with `top_k` or `top_p` in a batch makes it sort the whole batch before it draws,
  and every row gets another token for the same seed. The server's own health check is such a request. So each request
  names a `top_k`, the vocabulary's size where it wants all: then all batches are sorted.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import uuid
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Generator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp
from msgspec.structs import replace

from ....core.device_memory import Tag, TagReport
from ....core.errors import EngineError, RequestRefused, WeightsRefused
from ....core.messages import NO_TOP_K, EngineUsage, WeightManifest
from ....core.protocols import Delta, EngineInfo, GenerateRequest, PauseMode
from ....core.samples import NO_VERSION, ExpertChoices
from ....core.tried_versions import UNTRIED_REMEDY, untried
from ....core.weight_channel import WeightProgress
from ...http_client import stream_timeout
from ..embedded.slots import check_request
from .http_client import LEAST_LOOK_S, LOOK_S, SglangHttp, SglangMemory, refusal
from .server_args import NO_NEEDS, SglangNeeds, guesses_by, reserved_tokens, stale_guesses
from .weight_routes import AdapterRoute, Routes, WeightRoute, folder_routes
from .wire import AT_REST, EMPTY, HeldTokens, request_body, version_number, whole_number

RID_END = "~"
"""Ends the request's own id on the wire, and the whole: SGLang aborts by prefix, and "r1" must not abort "r10". A
unique part is between them: two seconds after a stream SGLang 0.5.17 aborts whatever has its id by then, and of a
request whose reader left it gives the last tokens to the next of that id.
"""
_log = logging.getLogger("myxa.sglang")

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Open:
    """A request whose stream has not ended."""

    request_id: str
    rid: str
    """Its id on the wire."""
    has_arrived: asyncio.Event = field(default_factory=asyncio.Event)
    """The server answered, with a stream or with a refusal."""
    is_aborted: bool = False
    answer: aiohttp.ClientResponse | None = None


CALL_S = 120.0
NOT_WITH_GUESSES = ("min_p", "min_new_tokens", "repetition_penalty", "frequency_penalty", "presence_penalty")
LENGTH_RESERVE = 7
"""Tokens of its context that SGLang 0.5.17 keeps: it refuses a prompt that reaches into them, and cuts an answer that
would, without a word. What is shorter another such server can score."""
SEED_BITS = 63
"""Servers keep seeds as signed 64-bit numbers."""


@dataclass(frozen=True, slots=True)
class ServerSampling:
    """How one server draws."""

    end_token_ids: tuple[int, ...] = ()
    """By the model's configs."""
    is_seeded: bool = False
    """It draws by each request's seed: `min_p` ends it, and `top_k` changes its batch."""
    vocab_size: int = 0
    has_guesses: bool = False
    """Tokens are guessed ahead: `min_p` is left out, least lengths and penalties count passes in place of tokens."""

    @classmethod
    def of(cls, facts: Mapping[str, Any], end_token_ids: Collection[int], vocab_size: int) -> ServerSampling:
        """By its `/server_info`. End tokens outside the vocabulary are never drawn, and would end it."""
        ends = tuple(token for token in end_token_ids if 0 <= token < vocab_size)
        return cls(ends, facts.get("enable_deterministic_inference") is True, vocab_size, bool(guesses_by(facts)))

    def meant(self, request: GenerateRequest, place: str) -> GenerateRequest:
        """The request as the server must get it. Raises RequestRefused for one that would end the server."""
        sampling = request.sampling
        if sampling.min_p and self.is_seeded:
            raise RequestRefused(
                f"{place}: min_p is {sampling.min_p:g}, which ends a server that was started with "
                "--enable-deterministic-inference",
                remedy="use top_p or top_k, or start it without",
            )
        penalty = next((name for name in NOT_WITH_GUESSES if getattr(sampling, name) != getattr(AT_REST, name)), "")
        if penalty and self.has_guesses:
            raise RequestRefused(
                f"{place}: {penalty} is {getattr(sampling, penalty):g}, and servers that guess tokens draw otherwise",
                remedy="leave it out, or start it without --speculative-algorithm",
            )
        if sampling.min_new_tokens:
            ends = tuple(sorted({*sampling.stop_token_ids, *self.end_token_ids}))
            sampling = replace(sampling, stop_token_ids=ends)
        if sampling.seed is None and self.is_seeded:
            sampling = replace(sampling, seed=secrets.randbits(SEED_BITS))
        if sampling.top_k == NO_TOP_K and self.is_seeded:
            sampling = replace(sampling, top_k=self.vocab_size)
        return request if sampling is request.sampling else replace(request, sampling=sampling)


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangOptions:
    """Settings of the client."""

    vocab_size: int
    """Of the model folder; SGLang does not report it."""
    model_type: str = ""
    """Of the model folder; a server of another one is refused. Empty: any."""
    context_length: int = 0
    """Longest prompt plus answer; 0: what the server says, if it does."""
    model_context_length: int = 0
    """What the model allows; used when neither is known."""
    max_running: int = 256
    """Requests worth sending at once, if the server does not say."""
    pause_mode: PauseMode = "in_place"
    """How running requests meet a commit."""
    start_s: float = 600.0
    """How long `start` waits for a server that is still loading."""
    call_s: float = CALL_S
    """Deadline of control calls; a weight update reads a whole model."""
    stall_s: float = 600.0
    """Longest silence of a stream, pauses included."""
    health_every_s: float = 5.0
    """How often `until_lost` looks at the server."""
    lost_after_s: float = 60.0
    """Silence of `/health` after which the server counts as lost; while it loads weights it may be silent."""
    admin_key: str = ""
    """Bearer of all calls; empty: the server asks for none."""
    generate_url: str = ""
    """Where requests are sent, if not to the server itself: a router in front of it."""
    end_token_ids: tuple[int, ...] = ()
    """All that end an answer by the model's configs; SGLang itself keeps only the tokenizer's away before a least
    length."""
    needs: SglangNeeds = NO_NEEDS
    choices: ExpertChoices | None = None
    """Of the model, where the experts of tokens are to be told; the server must have been started for that."""
    name: str = "sglang"


class SglangEngine:
    """A client of one server."""

    def __init__(
        self, url: str, options: SglangOptions, routes: Routes = folder_routes, *, saves_memory: bool = False
    ) -> None:
        """`routes`: the channels by which weights may come; without more, folders. `saves_memory`: the server's memory
        will be taken back between steps, so it must have been started for that."""
        self._options = options
        self.name = options.name
        self.bootstrap_port = 0
        """Of a prefill server: where decode servers learn how its cache comes to them."""
        self.pause_mode: PauseMode = options.pause_mode
        self._http = SglangHttp(url, name=options.name, call_s=options.call_s, admin_key=options.admin_key)
        self._routes = routes(self._http)
        self._adapters = next((route for route in self._routes.values() if isinstance(route, AdapterRoute)), None)
        self._memory = SglangMemory(self._http) if saves_memory else None
        self._sampling = ServerSampling()
        self._has_begun = False
        self._is_parked = False
        self._looking = asyncio.Lock()
        """Held while the server is asked for its health, which may make it generate."""
        self._context_length = options.context_length
        self._max_running = 0
        self.version = -1
        """That the server announced last."""
        self._prepared: WeightManifest | None = None
        self._channel = ""
        """By which weights came last."""
        self._committing = asyncio.Lock()
        self._torn = ""
        """Why the server's weights are of no version; empty when they are."""
        self._open: list[_Open] = []
        self._leaving: set[asyncio.Future[None]] = set()
        self._self_id = uuid.uuid4().hex[:8]
        """Distinguishes this client from others of the server, and from its earlier incarnations."""
        self._num_sent = 0
        self._usage = EngineUsage()

    @property
    def _place(self) -> str:
        return self._http.place

    # -- start and end

    async def start(self) -> EngineInfo:
        """Wait until the server answers. Raises EngineError naming its address when it does not in time."""
        if self._has_begun:
            raise EngineError(f"{self._options.name}: was started before", remedy="build a new one")
        self._has_begun = True
        try:
            return await self._connect()
        except BaseException:
            await self.close()
            raise

    async def _connect(self) -> EngineInfo:
        self._http.open()
        if not await self._http.until_there(self._options.start_s):
            self._torn = "it was paused when this client came, and its weights may be of no version"
            _log.warning("%s: %s; it continues with the first version that it gets", self._place, self._torn)
        facts = await self._http.check(self._options.model_type, tells_experts=self._options.choices is not None)
        if text := untried("sglang", str(facts.get("version", ""))):
            _log.warning("%s: %s; %s", self._place, text, UNTRIED_REMEDY)
        needs = self._options.needs
        needs.check(facts, self._place)
        if why := stale_guesses(facts, needs.channel, trains_layers=needs.trains_layers):
            _log.warning("%s: %s", self._place, why)
        self._sampling = ServerSampling.of(facts, self._options.end_token_ids, self._options.vocab_size)
        if self._memory is not None:
            self._memory.check(facts)
        served_length = whole_number(facts, "context_length", "max_model_len")
        served_length = served_length or self._options.model_context_length or self._context_length
        self._context_length = min(self._context_length or served_length, served_length - reserved_tokens(facts))
        if (longest := whole_number(facts, "max_req_input_len") - 1) > 0:
            if longest + LENGTH_RESERVE < self._context_length:
                longest = max(longest - 2 * whole_number(facts, "page_size"), 1)
                _log.warning(
                    "%s: its cache has room for %d tokens; prompt and answer can have no more", self._place, longest
                )
            self._context_length = min(self._context_length, longest)
        self._max_running = whole_number(facts, "max_running_requests") or self._options.max_running
        if self._context_length < 1:
            raise EngineError(
                f"{self._place}: the server does not report its context length", remedy="set engine.context_length"
            )
        return await self.info()

    async def until_lost(self) -> None:
        """Look at the server's health from time to time; raises EngineError once it was silent for too long. A look at
        a server that hangs costs time itself, so it is cut to what is left. Two looks must have failed: an actor that
        was stopped itself finds that a minute has passed, which says nothing about its server."""
        clock, options = asyncio.get_running_loop().time, self._options
        heard_s, num_failed = clock(), 0
        while (left_s := options.lost_after_s - (clock() - heard_s)) > 0 or num_failed < 2:
            await asyncio.sleep(max(min(options.health_every_s, left_s), options.health_every_s / 10))
            async with self._looking:
                is_still = self._is_parked or self._torn or self._committing.locked()
                look_s = max(options.lost_after_s - (clock() - heard_s), min(LEAST_LOOK_S, options.lost_after_s))
                answer = await self._http.answer("/model_info" if is_still else "/health", min(LOOK_S, look_s))
            heard_s, num_failed = (clock(), 0) if answer.status == 200 else (heard_s, num_failed + 1)
        raise EngineError(
            f"{self._place}: no healthy answer for {clock() - heard_s:.0f} s",
            remedy="see the server's log; restart it",
        )

    async def close(self) -> None:
        """Close all connections; the server frees the rows of requests that were running. Never raises."""
        for stream in self._open:
            if stream.answer is not None:
                stream.answer.close()  # wakes its reader, which closing the session does not
        for leaving in self._leaving:
            leaving.cancel()
        await asyncio.gather(*self._leaving, return_exceptions=True)
        for route in self._routes.values():
            await route.close()
        await self._http.close()

    # -- requests

    @contextmanager
    def _register(self, request_id: str) -> Generator[_Open]:
        self._num_sent += 1
        stream = _Open(request_id, f"{request_id}{RID_END}{self._self_id}.{self._num_sent}{RID_END}")
        self._open.append(stream)
        try:
            yield stream
        finally:
            stream.has_arrived.set()
            self._open.remove(stream)

    async def _wait_for_arrival(self, streams: Sequence[_Open]) -> None:
        """Wait until the server has these: what it has not seen it can neither abort nor pause."""
        try:
            async with asyncio.timeout(self._options.call_s):
                for stream in streams:
                    await stream.has_arrived.wait()
        except TimeoutError as err:
            raise EngineError(
                f"{self._place}: did not answer {len(streams)} requests within {self._options.call_s:g} s",
                remedy="see the server's log",
            ) from err

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        """Raises RequestRefused when the server refuses the request, EngineError when it fails, is gone or falls
        silent."""
        await self.until_whole(request)
        async with aclosing(self.answer(request, self.version)) as stream:
            async for delta in stream:
                yield delta

    async def answer(
        self, request: GenerateRequest, version: int, pair: Mapping[str, Any] = EMPTY
    ) -> AsyncGenerator[Delta, None]:
        """As `generate`, of a server whose weights are whole. `version`: the one known when it is sent. `pair`: of a
        decode server, which prefill server sends the cache of the prompt, and as what."""
        span, is_certain = (request.num_routed, len(request.input_ids)), self._adapters is not None
        place = self._place_of(request)
        tokens = HeldTokens(place, version, self._options.choices, span, is_paired=bool(pair), is_certain=is_certain)
        async with self._open_answer(request, version, tokens, pair) as (sent, answer):
            async for delta in self._parts(sent, answer, tokens, tokens.feed, is_half=bool(pair)):
                if delta.finish is not None:
                    self._usage += tokens.usage
                yield delta

    async def read_prompt(self, request: GenerateRequest, version: int, pair: Mapping[str, Any]) -> None:
        """Have a prefill server read the prompt, draw the first token, and send both to the decode server; returns
        when that is done, or was aborted. Raises as `answer`."""
        tokens = HeldTokens(self._place_of(request), version)
        async with self._open_answer(request, version, tokens, pair) as (sent, answer):
            async for _ in self._parts(sent, answer, tokens, tokens.chunks, is_half=True):
                pass

    async def _parts(
        self,
        stream: _Open,
        answer: aiohttp.ClientResponse,
        tokens: HeldTokens,
        parsed: Callable[[bytes], Iterator[T]],
        *,
        is_half: bool,
    ) -> AsyncGenerator[T]:
        """What `parsed` makes of the stream, until `tokens` know its end. `is_half`: of a pair, whose servers give up
        what does not come from the other one; that raises EngineError."""
        async for data in answer.content.iter_any():
            for part in parsed(data):
                if is_half and tokens.finish == "abort" and not stream.is_aborted:
                    raise EngineError(f"{tokens.place}: was given up: {tokens.why}", remedy="see the server's log")
                yield part
                if tokens.finish:
                    return
            if stream.is_aborted:  # before the scheduler knew it, or it names an adapter
                await self._http.post("/abort_request", {"rid": stream.rid})

    def _place_of(self, request: GenerateRequest) -> str:
        return f"{self._place}: request {request.request_id!r}"

    @asynccontextmanager
    async def _open_answer(
        self, request: GenerateRequest, version: int, tokens: HeldTokens, pair: Mapping[str, Any]
    ) -> AsyncGenerator[tuple[_Open, aiohttp.ClientResponse]]:
        """The answer's stream, to be read until `tokens` know its end."""
        place, choices = self._place_of(request), self._options.choices
        sent_request = self._sampling.meant(request, place)
        adapter = "" if self._adapters is None else self._adapters.begun()
        fields = {**pair, "lora_path": adapter} if adapter else pair
        try:
            async with AsyncExitStack() as stack:
                sent = stack.enter_context(self._register(request.request_id))
                answer = await stack.enter_async_context(
                    self._http.session.post(
                        f"{(self._options.generate_url or self._http.url).rstrip('/')}/generate",
                        data=request_body(
                            sent_request, sent.rid, version, tells_experts=choices is not None, fields=fields
                        ),
                        headers=self._http.headers,
                        timeout=stream_timeout(self._options.call_s, self._options.stall_s),
                    )
                )
                sent.answer = answer
                sent.has_arrived.set()
                if answer.status != 200:
                    raise refusal(place, answer.status, await answer.content.read(2000))
                try:
                    yield sent, answer
                except (GeneratorExit, asyncio.CancelledError):
                    if adapter and not tokens.finish:
                        self._leave(self._read_out(stack.pop_all(), sent, answer, tokens, adapter))
                    raise
                if not tokens.finish:
                    raise EngineError(
                        f"{place}: {tokens.cut_words()}", remedy="see the server's log; it may have been stopped"
                    )
        except RequestRefused as err:
            if adapter and await self._served_version() == NO_VERSION:
                raise EngineError(
                    f"{place}: the server does not have the adapter of its version any more",
                    remedy="it was started again, and gets the next version",
                ) from err
            raise
        except (aiohttp.ClientError, TimeoutError) as err:
            raise EngineError(
                f"{place}: the stream broke after {tokens.num_tokens} tokens ({type(err).__name__}: {err})",
                remedy="see the server's log",
            ) from err
        finally:
            if self._adapters is not None and tokens.is_over:
                self._adapters.ended(adapter)

    def _leave(self, reading: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(reading)  # noqa: TID251 -- awaited in `close`
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _read_out(
        self, stack: AsyncExitStack, sent: _Open, answer: aiohttp.ClientResponse, tokens: HeldTokens, adapter: str
    ) -> None:
        """Abort a request whose reader left once it runs, and read its end: with its connection closed, SGLang 0.5.17
        keeps its adapter for ever."""
        assert self._adapters is not None
        sent.is_aborted = True
        async with stack:
            with suppress(EngineError, aiohttp.ClientError, TimeoutError):
                async for _ in self._parts(sent, answer, tokens, tokens.chunks, is_half=False):
                    pass
        if tokens.is_over:
            self._adapters.ended(adapter)

    async def until_whole(self, request: GenerateRequest) -> None:
        """Wait for a version that is being loaded. Raises EngineError if the server's weights are of none, or
        RequestRefused for what a server would not say clearly, or not at all: an id outside the vocabulary ends SGLang
        0.5.17."""
        place = self._place_of(request)
        check_request(
            request, vocab_size=self._options.vocab_size, context_length=self._context_length, place=self._place
        )
        if self._torn:
            async with self._committing:
                pass
        if self._torn:
            raise EngineError(f"{place}: {self._torn}", remedy="give it a version, or restart the server")

    async def abort(self, request_id: str | None = None) -> None:
        """Abort one request, or all; their streams end with finish "abort". One that names an adapter is aborted
        with its next tokens: SGLang 0.5.17 keeps the adapters of those that it aborts in its queue for ever."""
        streams = [stream for stream in self._open if request_id in (None, stream.request_id)]
        for stream in streams:
            stream.is_aborted = True
        await self._wait_for_arrival(streams)
        if self._adapters is not None:
            return
        for body in [{"abort_all": True}] if request_id is None else [{"rid": stream.rid} for stream in streams]:
            await self._http.post("/abort_request", body)

    # -- weights

    async def prepare_weights(self, manifest: WeightManifest) -> None:
        """Have the channel's route get ready. Raises EngineError if there is none, or if it cannot."""
        self._prepared = None
        route, self._channel = self._route(manifest), manifest.channel
        await route.prepare(manifest)
        self._prepared = manifest

    def _route(self, manifest: WeightManifest) -> WeightRoute:
        route = self._routes.get(manifest.channel)
        if route is None:
            raise EngineError(
                f"{self._place}: weight version {manifest.version} came by channel {manifest.channel!r}, this server "
                f"takes {sorted(self._routes)}",
                remedy=f"set weights.channel to one of {sorted(self._routes)}",
            )
        return route

    async def commit_weights(self, version: int) -> None:
        """Have the server load the prepared version, and make sure that it announces it. An adapter was loaded before:
        requests name it from now on, and nothing pauses."""
        if self._adapters is None:
            await commit_together((self,), version)
            return
        manifest = self._take_prepared(version)
        if self._torn:
            raise EngineError(f"{self._place}: {self._torn}", remedy="restart the server")
        await self._adapters.load(manifest)
        self.serve(version)

    def _take_prepared(self, version: int) -> WeightManifest:
        """The prepared version's manifest, once. Raises EngineError for another one."""
        manifest, self._prepared = self._prepared, None
        if manifest is not None and manifest.version == version:
            return manifest
        held, self._prepared = "nothing" if manifest is None else f"version {manifest.version}", manifest
        raise EngineError(
            f"{self._place}: version {version} cannot be committed, {held} is prepared",
            remedy="call prepare_weights with its manifest first",
        )

    @asynccontextmanager
    async def paused(self, version: int) -> AsyncGenerator[WeightManifest]:
        """The prepared version's manifest, while the server is paused; it continues if its weights are of a version."""
        async with self._committing:
            manifest = self._take_prepared(version)
            await self._wait_for_arrival(list(self._open))
            before = self._torn
            try:
                try:
                    await self._http.post("/pause_generation", {"mode": self.pause_mode})
                except EngineError as err:  # nothing was loaded; perhaps it is paused
                    raise WeightsRefused(err.message, remedy=err.remedy) from err
                yield manifest
            except WeightsRefused as err:
                self._torn = before
                if before:  # the old weights are back, and they are of no version
                    raise EngineError(f"{err.message}; {before}", remedy=err.remedy) from err
                raise
            finally:
                if not self._torn:  # emptying the cache costs milliseconds
                    await self._http.post("/continue_generation", {"torch_empty_cache": False})

    async def load(self, manifest: WeightManifest) -> None:
        """Bring it into the paused server. Raises EngineError if the server does not announce it then."""
        self._torn = f"version {manifest.version} was being loaded and did not arrive whole"
        if not await self._route(manifest).load(manifest) and await self._served_version() != manifest.version:
            raise EngineError(
                f"{self._place}: serves version {self.version} after version {manifest.version} was loaded",
                remedy="only this run may update the server; restart it",
            )

    def serve(self, version: int) -> None:
        """It was loaded: requests are of it from now on."""
        self.version, self._torn = version, ""

    def weight_progress(self) -> WeightProgress:
        return self._routes[self._channel].beacon.progress() if self._channel else WeightProgress(at="idle")

    # -- memory: see `core.protocols.ReleasesMemory`

    def _saver(self) -> SglangMemory:
        if self._memory is None:
            raise EngineError(f"{self._place}: its memory is its own", remedy='set memory.share = "switch"')
        return self._memory

    def memory_tags(self) -> tuple[TagReport, ...]:
        return self._saver().reports()

    def memory_pids(self) -> tuple[int, ...]:
        """None: this run did not start the server."""
        return ()

    async def park(self, within_s: float) -> None:
        """Health is no longer asked for by generating."""
        async with self._looking:
            self._is_parked = True
        await self._saver().until_idle(within_s)

    async def unpark(self) -> None:
        self._is_parked = not self._saver().is_whole

    async def release_memory(self, tags: Collection[Tag]) -> None:
        await self._saver().release(tags)

    async def restore_memory(self, tags: Collection[Tag]) -> None:
        await self._saver().resume(tags)

    # -- questions

    async def info(self) -> EngineInfo:
        """Current state; `running` counts this client's requests that the server has, `waiting` those on their way.
        `version` is -1 while the server has a name instead of a number, and while its weights may be of none."""
        version, num_arrived = await self._served_version(), sum(stream.has_arrived.is_set() for stream in self._open)
        return EngineInfo(
            kind="sglang", vocab_size=self._options.vocab_size, context_length=self._context_length,
            max_running=self._max_running, version=-1 if self._torn and not self._committing.locked() else version,
            running=num_arrived, waiting=len(self._open) - num_arrived, usage=self._usage,
        )  # fmt: skip

    async def _served_version(self) -> int:
        if self._adapters is not None:
            self.version = self.version if await self._adapters.is_served() else NO_VERSION
            return self.version
        self.version = version_number((await self._http.get("/model_info")).get("weight_version"))
        return self.version


async def commit_together(engines: Sequence[SglangEngine], version: int) -> None:
    """Have servers load the version that each has prepared: all are paused before any loads, and all have loaded before
    any continues. WeightsRefused leaves the old version in every server: one of several refused the pause, or one that
    is alone the weights. Of several that load, each other one has the new version by then: that is an EngineError."""
    async with AsyncExitStack() as stack:
        manifests = [await stack.enter_async_context(engine.paused(version)) for engine in engines]
        loads = (engine.load(manifest) for engine, manifest in zip(engines, manifests, strict=True))
        errors = [error for error in await asyncio.gather(*loads, return_exceptions=True) if error is not None]
        if errors and len(engines) > 1 and isinstance(errors[0], WeightsRefused):
            raise EngineError(errors[0].message, remedy=errors[0].remedy) from errors[0]
        if errors:
            raise errors[0]
        for engine in engines:
            engine.serve(version)
