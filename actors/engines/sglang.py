"""Any server that speaks SGLang's HTTP (SGLang 0.5.17 or later, or our own) as an `Engine`.

Knows the wire format of generation and what is the same for all weight channels:

    prepare_weights   the channel's route gets everything ready while tokens flow
    commit_weights    pause_generation -> route.load -> verify the version -> continue_generation

How bytes travel is the routes' (`weight_route.py`), who started the server is the launcher's (`sglang_launched.py`).
The pause comes first because SGLang's update otherwise waits until all running requests have ended. A server whose
weights may be torn goes on with the next whole version and not before: because loading them failed half-way, or because
it stood paused when this client came, whose earlier life may have died in a commit.

Version stamps are the server's; tokens are held back until theirs is certain (`sglang_wire.HeldTokens`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Collection
from contextlib import suppress

import aiohttp

from ...core.device_memory import MovedBytes, MovedMemory, Tag, TagReport
from ...core.errors import EngineError, RequestRefused, WeightsRefused
from ...core.messages import WeightManifest
from ...core.protocols import Delta, EngineInfo, EngineTrace, GenerateRequest, PauseMode
from ...core.weight_channel import WeightProgress
from ..http_client import stream_timeout
from .embedded.request import check_request
from .head_start import HeadStart
from .open_request import OpenRequests
from .server_silence import Silence
from .sglang_http import Look, SglangHttp
from .sglang_memory import SglangMemory
from .sglang_options import SglangOptions
from .sglang_profile import SglangProfiler
from .sglang_sampling import ServerSampling
from .sglang_wire import DONE, HeldTokens, Lines, UsageTally, read_chunk, request_body, version_number, whole_number
from .weight_route import Routes, WeightRoute, close_others, folder_routes

MAX_LINE_BYTES = 256 << 20
_log = logging.getLogger("myxa.sglang")


class SglangEngine:
    """A client of one server."""

    def __init__(
        self, url: str, options: SglangOptions, routes: Routes = folder_routes, *, saves_memory: bool = False
    ) -> None:
        """`routes`: the channels by which weights may come; without more, folders. `saves_memory`: the server's memory
        will be taken back between steps, so it must have been started for that."""
        self._options = options
        self.pause_mode: PauseMode = options.pause_mode
        self._http = SglangHttp(url, name=options.name, call_s=options.call_s, admin_key=options.admin_key)
        self._generate_url = (options.generate_url or url).rstrip("/") + "/generate"
        self._routes = routes(self._http)
        self._memory = SglangMemory(self._http, call_s=options.call_s) if saves_memory else None
        self._profiler = SglangProfiler(self._http, name=options.name, folder=options.profile_dir)
        self._sampling = ServerSampling()
        self._is_parked = False
        self._looking = asyncio.Lock()
        """Held while the server is asked for its health, which may make it generate."""
        self._context_length = options.context_length
        self._max_running = 0
        self._version = -1
        self._prepared: WeightManifest | None = None
        self._channel = ""
        """By which weights came last."""
        self._commits: list[int] = []
        """All versions that it was told to load, the one that is being loaded included."""
        self._committing = asyncio.Lock()
        self._head_start = HeadStart()
        self._is_paused = False
        self._torn = ""
        """Why the server's weights are of no version; empty when they are."""
        self._lost = asyncio.Event()
        """The server is not the one that was given weights."""
        self._open = OpenRequests(self._place, options.call_s)
        self._tally = UsageTally()

    @property
    def _place(self) -> str:
        return self._http.place

    # -- life

    async def start(self) -> EngineInfo:
        """Wait until the server answers. Raises EngineError naming its address when it does not in time."""
        if self._http.is_open:
            raise EngineError(f"{self._place}: was started before", remedy="build a new one")
        self._http.open()
        try:
            if not await self._http.until_there(self._options.start_s):
                self._torn = "it stood paused when this client came, and what is in it may be of no version"
                _log.warning("%s: %s; it goes on with the first version that it is given", self._place, self._torn)
        except EngineError:
            await self.close()
            raise
        facts = await self._http.check(self._options.model_type)
        self._options.needs.check(facts, self._place)
        self._sampling = ServerSampling.of(facts, self._options.end_token_ids, self._options.vocab_size)
        if self._memory is not None:
            self._memory.check(facts)
        told = whole_number(facts, "context_length", "max_model_len")
        self._context_length = self._context_length or told or self._options.model_context_length
        self._max_running = whole_number(facts, "max_running_requests") or self._options.max_running
        if self._context_length < 1:
            raise EngineError(
                f"{self._place}: the server does not tell its context length", remedy="set engine.context_length"
            )
        return await self.info()

    async def until_lost(self) -> None:
        """Look at the server's health from time to time; raises EngineError once it was silent for too long."""
        clock = asyncio.get_running_loop().time
        silence = Silence(self._options.lost_after_s, self._options.health_every_s, clock())
        while not silence.is_over(clock()):
            with suppress(TimeoutError):
                async with asyncio.timeout(silence.wait_s(clock())):
                    await self._lost.wait()
                raise EngineError(f"{self._place}: {self._torn}", remedy="restart the server, or leave it to this run")
            async with self._looking:
                stands = self._is_paused or self._is_parked or self._torn or self._committing.locked()
                path = "/model_info" if stands else "/health"
                found = await self._http.look(path, within_s=silence.look_s(clock()))
            silence.looked(clock(), is_well=found is Look.WELL)
        raise EngineError(
            f"{self._place}: no healthy answer for {silence.lasts_s(clock()):.0f} s",
            remedy="see the server's log; restart it",
        )

    async def close(self) -> None:
        """Close all connections; the server frees the rows of requests that were running. Never raises."""
        self.cut()
        for route in self._routes.values():
            await route.close()
        await self._http.close()

    def cut(self) -> None:
        """End all streams here and now: whoever reads them gets an EngineError. For a server that is lost."""
        self._open.cut()

    # -- requests

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        """Stream tokens; see `core.protocols.Engine`.

        Raises RequestRefused when the server refuses the request, EngineError when it fails, is gone or falls silent.
        """
        place = f"{self._place}: request {request.request_id!r}"
        # What a server would not say clearly, or not at all: an id outside the vocabulary ends SGLang 0.5.17.
        check_request(
            request, vocab_size=self._options.vocab_size, context_length=self._context_length, place=self._place
        )
        asked = self._sampling.meant(request, place)
        await self._until_whole(place)
        timeout = stream_timeout(self._options.call_s, self._options.stall_s)
        sent_version, num_commits = self._version, len(self._commits)
        tokens = HeldTokens(place, sent_version, self._tally.add)
        lines = Lines(MAX_LINE_BYTES, place)
        try:
            with self._open.sent(request.request_id) as mine:
                body = request_body(asked, mine.rid, self._version)
                async with self._http.session.post(
                    self._generate_url, data=body, headers=self._http.headers, timeout=timeout
                ) as answer:
                    mine.answer = answer
                    mine.has_arrived.set()
                    if answer.status != 200:
                        raise await self._refused(answer, place)
                    async for data in answer.content.iter_any():
                        for payload in lines.feed(data):
                            if payload == DONE:
                                break
                            delta = tokens.add(read_chunk(payload, place))
                            if delta is not None:
                                self._check_stamps(delta, sent_version, num_commits, place)
                                yield delta
                                if delta.finish is not None:
                                    return
                        if mine.is_aborted:  # the abort came before the request was known to the scheduler
                            await self._http.post("/abort_request", {"rid": mine.rid})
        except (aiohttp.ClientError, TimeoutError) as err:
            raise EngineError(
                f"{place}: the stream broke after {tokens.num_tokens} tokens ({type(err).__name__}: {err})",
                remedy="see the server's log",
            ) from err
        raise EngineError(
            f"{place}: the stream ended after {tokens.num_tokens} tokens without a finish reason",
            remedy="see the server's log; it may have been stopped",
        )

    def _check_stamps(self, delta: Delta, sent_version: int, num_commits: int, place: str) -> None:
        """Versions only rise, unless a trainer that went back had us load an older one. A server that answers with one
        that is older still was started anew, behind our back; behind a router it may be another one, which is about to
        be given the version."""
        if self._options.generate_url:
            return
        least = min([sent_version, *self._commits[num_commits:]])
        oldest = int(delta.versions.min()) if delta.versions.size else least
        if oldest < least:
            self._torn = f"answered with weight version {oldest} after it was given {least}; it was restarted"
            self._lost.set()
            raise EngineError(f"{place}: {self._torn}", remedy="nobody else may restart or update this server")

    async def _until_whole(self, place: str) -> None:
        """Wait for a version that is being loaded. Raises EngineError if the server's weights are of none."""
        if self._torn:
            async with self._committing:
                pass
        if self._torn:
            raise EngineError(f"{place}: {self._torn}", remedy="give it a version, or restart the server")
        await self._head_start.over()

    async def abort(self, request_id: str | None = None) -> None:
        """Abort one request, or all; their streams end with finish "abort"."""
        meant = self._open.named(request_id)
        for one in meant:
            one.is_aborted = True
        await self._open.arrived(meant)
        for body in [{"abort_all": True}] if request_id is None else [{"rid": one.rid} for one in meant]:
            await self._http.post("/abort_request", body)

    async def pause(self, mode: PauseMode) -> None:
        """Stand still; see `core.protocols.Engine`."""
        await self._stand_still(mode)
        self._is_paused = True

    async def _stand_still(self, mode: PauseMode) -> None:
        await self._open.arrived(self._open.named(None))
        await self._http.post("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Go on after a pause. A server whose weights may be torn, or are being loaded, does so when they are whole."""
        if not self._torn:
            await self._go_on()
        self._is_paused = False

    async def _go_on(self) -> None:
        await self._http.post("/continue_generation", {"torch_empty_cache": False})  # it costs milliseconds
        self._head_start.begin()

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
        """Have the server load the prepared version, and make sure that it announces it."""
        async with self._committing:
            manifest = self._prepared
            if manifest is None or manifest.version != version:
                has = "nothing" if manifest is None else f"version {manifest.version}"
                raise EngineError(
                    f"{self._place}: version {version} cannot be committed, {has} is prepared",
                    remedy="call prepare_weights with its manifest first",
                )
            self._prepared = None
            if not self._is_paused:
                await self._stand_still(self.pause_mode)
            self._commits.append(version)
            before, self._torn = self._torn, f"version {version} was being loaded and did not arrive whole"
            try:
                if not await self._route(manifest).load(manifest):
                    await self._verify(manifest)
                self._version, self._torn = version, ""
            except WeightsRefused as err:
                self._torn = before
                if before:  # the old weights are back, and they are of no version
                    raise EngineError(f"{err.message}; {before}", remedy=err.remedy) from err
                raise
            finally:
                if not self._is_paused and not self._torn:
                    await self._go_on()
            await close_others(self._routes, manifest.channel)

    async def _verify(self, manifest: WeightManifest) -> None:
        served = await self._served_version()
        if served != manifest.version:
            raise EngineError(
                f"{self._place}: serves version {served} after version {manifest.version} was loaded",
                remedy="nobody else may update this server; restart it",
            )

    def weight_progress(self) -> WeightProgress:
        """See `core.protocols.TellsProgress`."""
        return self._routes[self._channel].beacon.told() if self._channel else WeightProgress(at="idle")

    # -- memory

    def _saver(self) -> SglangMemory:
        if self._memory is None:
            raise EngineError(f"{self._place}: its memory is its own", remedy='set memory.share = "switch"')
        return self._memory

    def memory_tags(self) -> tuple[TagReport, ...]:
        """See `core.protocols.ReleasesMemory`; sizes are the server's own."""
        return self._saver().reports()

    def memory_pids(self) -> tuple[int, ...]:
        """None: the server is somebody else's."""
        return ()

    async def park(self, within_s: float) -> None:
        """See `core.protocols.ReleasesMemory`. Health is no longer asked for by generating."""
        async with self._looking:
            self._is_parked = True
        await self._saver().until_idle(within_s)

    async def unpark(self) -> None:
        """See `core.protocols.ReleasesMemory`."""
        self._is_parked = not self._saver().is_whole

    async def release_memory(self, tags: Collection[Tag]) -> MovedBytes:
        """See `core.protocols.ReleasesMemory`."""
        return MovedMemory(dropped_bytes=await self._saver().release(tags))

    async def restore_memory(self, tags: Collection[Tag]) -> MovedBytes:
        """See `core.protocols.ReleasesMemory`."""
        return MovedMemory(dropped_bytes=await self._saver().resume(tags))

    # -- questions

    async def info(self) -> EngineInfo:
        """Current state; `running` counts this client's requests that the server has, `waiting` those on their way.
        `version` is -1 while the server has a name instead of a number, and while its weights may be of none."""
        served = await self._served_version()
        return EngineInfo(
            kind="sglang",
            vocab_size=self._options.vocab_size,
            context_length=self._context_length,
            max_running=self._max_running,
            version=-1 if self._torn and not self._committing.locked() else served,
            running=self._open.num_arrived,
            waiting=len(self._open) - self._open.num_arrived,
            usage=self._tally.total,
        )

    async def profile(self, duration_s: float) -> tuple[EngineTrace, ...]:
        """See `core.engine_profile.ProfilesItself`."""
        return (await self._profiler.record(duration_s),)

    async def _served_version(self) -> int:
        self._version = version_number((await self._http.get("/model_info")).get("weight_version"))
        return self._version

    async def _refused(self, answer: aiohttp.ClientResponse, place: str) -> EngineError:
        text = (await answer.content.read(2000)).decode(errors="replace")
        kind = RequestRefused if answer.status in (400, 413, 422) else EngineError
        return kind(f"{place}: the server answered {answer.status}: {text}", remedy="see the server's log")
