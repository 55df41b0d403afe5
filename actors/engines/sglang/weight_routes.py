"""How the bytes of a weight version get into an SGLang server: one `WeightRoute` per channel.

The engine (`engine.py`) does what is the same for all routes: it asks the route to prepare while tokens flow, then

    pause_generation -> route.load -> unless its answer says so: does it announce the version? -> continue_generation

and a server whose weights may be torn stays paused.

The headers of a weight folder are read before the server loads it, at the same cost for any model. SGLang
0.5.17 loads whatever tensors it finds: it calls an update from a folder that lacks half of the layers a success, and
ends with all its requests when a file is torn.

Weights from the trainer's device (SGLang 0.5.17 or later, or our own server) come by one of two routes:

    nccl       prepare   plan from every sender; once per server incarnation: both sides join a process group
               load      per sender, at the same time: it broadcasts its buckets, and the server gets one call for each
    cuda_ipc   prepare   memory handles of the whole model, for each rank of the server from the sender on its GPU
               load      the server gets the handles of each bucket, one call for each

Over nccl every sender (a trainer rank; one per pipeline stage) has its own channel with this server, so that
stages send in parallel without a lock. The version is announced when the last bucket is in. Errors name phase, bucket,
server and sender. A channel that failed is closed on both sides, and its name is not used again; the version is then
sent once more, whole, through a new channel, because a server that is alive can always be made whole again.

SGLang 0.5.23 takes both only between `/begin_weight_update`, which undoes how it had packed its weights, and
`/end_weight_update`. A server that has these routes is asked for them within the pause.

The calls always ask not to flush the cache: SGLang asserts that it could, which it cannot while requests are paused in
place; `wire.request_body` keeps versions apart.
"""

from __future__ import annotations

import asyncio
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

from ....core.config.run import LOCAL_HOSTS
from ....core.errors import CallError, EngineError, MyxaError, RequestRefused, WeightsRefused, raised_as
from ....core.messages import WeightManifest
from ....core.protocols import WeightSenders
from ....core.refs import all_or_first_error
from ....core.samples import NO_VERSION
from ....core.weight_channel import Bucket, JoinRequest, LeaveOrder, PlanRequest, SendOrder, ShareRequest
from ....transport.address import in_url
from ...weights.beacon import Beacon
from ...weights.channels.host import check_adapter, read_folder
from .http_client import SglangHttp
from .server_args import guesses_by
from .wire import version_number, whole_number


class WeightRoute(ABC):
    """One channel into one server."""

    def __init__(self, server: SglangHttp) -> None:
        self._server = server
        self.beacon = Beacon()
        """How far it is."""

    @abstractmethod
    async def prepare(self, manifest: WeightManifest) -> None:
        """Everything that can be done while the old weights serve: join groups, check or stage bytes."""

    @abstractmethod
    async def load(self, manifest: WeightManifest) -> bool:
        """Bring the prepared version in and have the server announce it (`weight_version`); the server is paused. True:
        its answer said that it does. Otherwise it has to be asked, which costs a round trip in the pause. Raises
        WeightsRefused only if the old weights are certainly whole: generation then continues with them. After any other
        error the server stays paused, because its weights are unknown."""

    async def close(self) -> None:  # noqa: B027 -- most hold nothing
        """Leave groups, free staging; never raises. A later version may come by it all the same."""


Routes = Callable[[SglangHttp], Mapping[str, WeightRoute]]
"""Channel name -> route, made for one server."""


def announces(answer: Mapping[str, Any], version: int) -> bool:
    """Whether the answer to an update (SGLang 0.5.17) says that the server bears this version now."""
    return f"Weight version updated to {version}." in f"{answer.get('message')}."


class FolderRoute(WeightRoute):
    """Channel "disk": the server reads a folder of safetensors itself (`update_weights_from_disk`)."""

    def __init__(self, server: SglangHttp) -> None:
        super().__init__(server)
        self._has_read = False

    async def prepare(self, manifest: WeightManifest) -> None:
        """Check that the version is a whole folder with an absolute path, and with the first one every byte."""
        folder = Path(manifest.location)
        place = f"{self._server.place}: weight version {manifest.version}"
        if not folder.is_absolute():
            raise EngineError(
                f"{place}: {folder} is no absolute path", remedy="the run directory must lie where the server reads it"
            )
        if urlsplit(self._server.url).hostname in LOCAL_HOSTS:  # else the path means something on another host
            self.beacon.step(f"checks {folder}", is_counted=False)
            with raised_as(EngineError, place, EngineError):
                await asyncio.to_thread(self._check, manifest)
            self._has_read = True

    def _check(self, manifest: WeightManifest) -> None:
        with read_folder(manifest, reads_all=bool(manifest.digest) and not self._has_read):
            return

    async def load(self, manifest: WeightManifest) -> bool:
        """Have the folder read. The cache is not flushed: that needs an idle server, and requests are separated by
        version (`wire.request_body`)."""
        self.beacon.step(f"the server reads {manifest.location}", is_counted=False)
        body = {"model_path": manifest.location, "weight_version": str(manifest.version), "flush_cache": False}
        if self._server.facts.get("load_format") == "dummy":  # as it was started, and else as it reads folders
            body["load_format"] = "auto"
        try:
            answer = await self._server.post("/update_weights_from_disk", body)
        except RequestRefused as err:
            raise self._refused(manifest, err.message) from err
        if not answer.get("success"):
            raise self._refused(manifest, str(answer.get("message")))
        return announces(answer, manifest.version)

    def _refused(self, manifest: WeightManifest, why: str) -> EngineError:
        """SGLang 0.5.17 says so before it loads anything, or after it has read the new folder a second time, to put
        its old weights back."""
        kind = EngineError if "Failed to update weights" in why else WeightsRefused
        return kind(
            f"{self._server.place}: refused weight version {manifest.version}: {why}", remedy="see the server's log"
        )


class AdapterRoute(FolderRoute):
    """Channel "disk" where versions are low-rank adapters (`lora.rollout = "adapter"`). Each is loaded, under a name of
    its own, beside those that serve. A commit only says which one requests name from then on: SGLang cannot change that
    of a running request, which so ends with the version that it began with. What no request names any more is unloaded
    before the next one is loaded. SGLang waits for such requests, and loads nothing meanwhile; of those that end in
    its queue, or whose connection was closed, 0.5.17 waits for ever. So no request is aborted there
    (`SglangEngine.abort`). Adapters are kept of what ends there all the same, because the server took its cache away or
    gave it up, and those that an earlier client left: nothing tells which requests named them."""

    def __init__(self, server: SglangHttp) -> None:
        super().__init__(server)
        self._self_id = uuid.uuid4().hex[:8]
        self._num_requests: Counter[str] = Counter()
        """Of every adapter that the server has, those that did not end well; "": of the model without any."""
        self._prepared = self._current = ""
        self._has_begun = False
        self._base = ""
        """Model folder that they belong to, where its path means the same here and there."""

    async def prepare(self, manifest: WeightManifest) -> None:
        """Load it. Raises EngineError also for a server whose own weights are not those that it was started with."""
        await super().prepare(manifest)
        facts = await self._server.get("/model_info")
        folder, version = str(facts.get("model_path")), facts.get("weight_version")
        if version_number(version) != NO_VERSION or (self._base and Path(folder).resolve() != Path(self._base)):
            raise EngineError(
                f"{self._server.place}: serves {folder} with weight_version {version}, and the adapters belong to "
                f"{self._base or 'model.path'} as it is",
                remedy="start the server with that folder, and without a weight_version",
            )
        names = () if self._has_begun else await self._names()
        self._num_requests.update(dict.fromkeys((name for name in names if name.startswith(ADAPTER_NAME)), 1))
        self._has_begun = True
        if len(self._num_requests) > MAX_ADAPTERS:
            raise EngineError(
                f"{self._server.place}: holds {len(self._num_requests)} adapters, which it cannot unload: requests "
                "that named them run, ended in its queue, or lost their client",
                remedy="restart the server",
            )
        for name in [
            name for name, count in self._num_requests.items() if not count and name not in ("", self._current)
        ]:
            self.beacon.step(f"unloads {name}", is_counted=False)
            with suppress(RequestRefused):  # a server that was started again has none
                await self._server.post("/unload_lora_adapter", {"lora_name": name})
            del self._num_requests[name]
        self._prepared = f"{ADAPTER_NAME}{self._self_id}.{manifest.lineage}.{manifest.version}.{uuid.uuid4().hex[:8]}"
        self._num_requests[self._prepared] = 0  # also where it is not known whether it arrived
        self.beacon.step(f"the server reads {manifest.location}", is_counted=False)
        try:
            body = {"lora_name": self._prepared, "lora_path": manifest.location}
            answer = await self._server.post("/load_lora_adapter", body)
        except RequestRefused as err:
            raise self._refused(manifest, err.message) from err
        if not answer.get("success"):
            raise self._refused(manifest, str(answer.get("error_message")))

    async def load(self, manifest: WeightManifest) -> bool:
        """Requests name it from now on."""
        self._current = self._prepared
        return True

    def begun(self) -> str:
        """What a request is to name, which begins."""
        self._num_requests[self._current] += 1
        return self._current

    def ended(self, name: str) -> None:
        """A request that named it has ended, and the server knows."""
        self._num_requests[name] -= 1

    async def is_served(self) -> bool:
        """Whether the server has what requests name: one that was started again has nothing."""
        return bool(self._current) and self._current in await self._names()

    async def _names(self) -> list[str]:
        models: Any = (await self._server.get("/v1/models")).get("data")
        entries = cast("list[Any]", models) if isinstance(models, list) else []
        return [str(cast("dict[str, Any]", entry).get("id")) for entry in entries if isinstance(entry, dict)]

    def _check(self, manifest: WeightManifest) -> None:
        self._base = str(Path(check_adapter(manifest)).resolve())


ADAPTER_NAME = "myxa."
"""Begins the names of adapters."""
MAX_ADAPTERS = 256
"""Held by a server at the same time, in its host's memory."""


def adapter_routes(server: SglangHttp) -> Mapping[str, WeightRoute]:
    return {"disk": AdapterRoute(server)}


def folder_routes(server: SglangHttp) -> Mapping[str, WeightRoute]:
    """Folders only: what every server can do."""
    return {"disk": FolderRoute(server)}


FLATTENED = "flattened_bucket"
BEGIN, END = "/begin_weight_update", "/end_weight_update"


def bucket_bodies(buckets: Sequence[Bucket]) -> tuple[dict[str, Any], ...]:
    """`/update_weights_from_distributed` of each bucket of a plan, without channel and version."""
    return tuple(
        {
            "names": [t.name for t in bucket.tensors],
            "dtypes": [t.dtype for t in bucket.tensors],
            "shapes": [list(t.shape) for t in bucket.tensors],
            "load_format": FLATTENED,
            "flush_cache": False,
        }
        for bucket in buckets
    )


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DeviceRouteOptions:
    """Settings of `[weights]`."""

    host: str
    """Boot id of this host."""
    join_s: float = 60.0
    send_s: float = 60.0
    leave_s: float = 5.0
    """Deadline for telling a server to leave a group that failed; it may be stuck in it, or dead."""
    same_gpu: tuple[str, ...] = ()
    """For each tensor-parallel rank of the server the trainer rank on its GPU; empty: the GPUs of the server
    are not known, so there can be one sender only."""


def device_routes(senders: WeightSenders, options: DeviceRouteOptions) -> Routes:

    def routes(server: SglangHttp) -> Mapping[str, WeightRoute]:
        return {
            "disk": FolderRoute(server),
            "nccl": GroupRoute(server, senders, options),
            "cuda_ipc": HandleRoute(server, senders, options),
        }

    return routes


class _DeviceRoute(WeightRoute):
    """What both have."""

    def __init__(self, server: SglangHttp, senders: WeightSenders, options: DeviceRouteOptions) -> None:
        super().__init__(server)
        self._senders = senders
        self._options = options
        self._facts: Mapping[str, Any] = {}
        self._has_sessions = False

    async def _num_ranks(self) -> int:
        """Processes of the server that take part: its tensor-parallel ranks."""
        if not self._facts:
            answer = await self._server.answer(BEGIN, self._options.join_s)
            self._has_sessions = answer.status == HTTPStatus.METHOD_NOT_ALLOWED  # a GET of what wants a POST
            self._facts = await self._server.get("/server_info")
        return whole_number(self._facts, "tp_size") or 1

    def _runners(self) -> Mapping[str, Any]:
        """Whose weights are updated, in the words of 0.5.17 and of 0.5.23: a draft model keeps its own."""
        arguments = {"disable_draft_model": True, "selector": "target"}
        return arguments if guesses_by(self._facts) in ("ngram", "model") else {}

    @asynccontextmanager
    async def _session(self) -> AsyncGenerator[None]:
        """Around all calls of one version. A session that an update left open, of this client or another, is ended
        before."""
        if self._has_sessions:
            try:
                await self._server.post(BEGIN, self._runners())
            except RequestRefused:
                await self._server.post(END, {})
                await self._server.post(BEGIN, self._runners())
        yield
        if self._has_sessions:
            await self._server.post(END, {})

    async def _named(self, phase: str, sender: str, work: Awaitable[T]) -> T:
        """Whatever goes wrong becomes an EngineError that says in which phase, where and with whom."""
        self.beacon.step(f"{phase} from {sender}")
        try:
            return await work
        except MyxaError as err:
            raise EngineError(
                f"{self._server.place}: weights from {sender}: {phase}: {err.message}",
                remedy=err.remedy or "see both logs",
            ) from err

    async def _update(
        self, path: str, bodies: Sequence[Mapping[str, Any]], sender: str, digests: Sequence[str] = ()
    ) -> Mapping[str, Any]:
        """One call for each bucket; the last answer. `digests`: of the buckets, if they are known here."""
        answer: Mapping[str, Any] = {}
        for number, body in enumerate(bodies, start=1):
            part = f"bucket {number} of {len(bodies)}"
            call = self._server.post(path, {**body, **self._runners()}, within_s=self._options.send_s)
            answer = await self._named(f"receive {part}", sender, call)
            digest, place = (digests[number - 1], f"{part} from {sender}") if digests else ("", part)
            _require(answer, self._server.place, place, digest=digest)
        return answer


class GroupRoute(_DeviceRoute):
    """Channel "nccl": broadcasts in a process group (gloo where there is no GPU)."""

    def __init__(self, server: SglangHttp, senders: WeightSenders, options: DeviceRouteOptions) -> None:
        super().__init__(server, senders, options)
        self._channels: dict[str, str] = {}
        """Sender -> open channel."""
        self._leavings: set[asyncio.Future[bool]] = set()
        self._plans: dict[str, tuple[tuple[dict[str, Any], ...], list[str]]] = {}
        """Sender -> bodies and digests of the prepared version's buckets."""
        self._loaded = -1
        """The version that was loaded last, by us and whole."""

    async def prepare(self, manifest: WeightManifest) -> None:
        """Plans, and groups where there are none yet."""
        senders = _senders_of(manifest)
        await all_or_first_error([self._look(), *(self._ask(sender, manifest.version) for sender in senders)])
        await all_or_first_error(self._join(sender) for sender in senders if sender not in self._channels)

    async def _look(self) -> None:
        """Is it the server that we loaded? Another incarnation does not announce our version."""
        if not self._channels:
            return
        served = version_number((await self._server.get("/model_info")).get("weight_version"))
        if self._loaded < 0 or served != self._loaded:
            await self._leave(list(self._channels), "the server is another incarnation", tells_server=False)

    async def _ask(self, sender: str, version: int) -> None:
        """The sender's plan, and whether it still has its end of the channel."""
        channel = self._channels.get(sender, "")
        request = PlanRequest(version=version, channel=channel)
        reply = await self._named("plan", sender, self._senders.ask(sender, request))
        self._plans[sender] = bucket_bodies(reply.buckets), reply.digest.split(".")
        if channel and not reply.has_channel:
            await self._leave([sender], "the sender has given it up")

    async def _join(self, sender: str) -> None:
        """Both sides, at the same time: the server connects while the sender waits for it."""
        channel = f"myxa-{uuid.uuid4().hex[:12]}-{sender}"
        num_ranks, limit_s = await self._num_ranks(), self._options.join_s
        request = JoinRequest(
            channel=channel,
            engine=self._server.place,
            num_ranks=num_ranks,
            engine_host=urlsplit(self._server.url).hostname or "localhost",
            asker_host=self._options.host,
            timeout_s=limit_s,
        )
        offer = await self._named("join", sender, self._senders.ask(sender, request))
        body = {
            "master_address": in_url(offer.address),
            "master_port": offer.port,
            "rank_offset": 1,
            "world_size": num_ranks + 1,
            "group_name": channel,
            "backend": offer.backend,
        }
        try:
            answer = await self._named(
                "join", sender, self._server.post("/init_weights_update_group", body, within_s=limit_s)
            )
            _require(answer, self._server.place, f"join with {sender}")
        except BaseException as err:
            # The server may have joined, or be about to: both sides leave, even if this task is cancelled again.
            self._channels[sender] = channel
            leaving = asyncio.ensure_future(  # noqa: TID251 -- awaited here, or in `close`
                self._leave([sender], f"{self._server.place} could not join: {err}")
            )
            self._leavings.add(leaving)
            leaving.add_done_callback(self._leavings.discard)
            await asyncio.shield(leaving)
            raise
        self._channels[sender] = channel

    async def load(self, manifest: WeightManifest) -> bool:
        """Transfer; once more through new channels if that fails and the server still answers."""
        senders = _senders_of(manifest)
        try:
            is_announced = await self._transfer(manifest.version, senders)
        except EngineError as err:
            if not await self._leave(senders, str(err)):
                raise
            try:
                await self.prepare(manifest)
                is_announced = await self._transfer(manifest.version, senders)
            except EngineError as again:
                await self._leave(senders, str(again))
                raise EngineError(f"{again.message}; at first: {err.message}", remedy=again.remedy) from again
        self._loaded = manifest.version
        return is_announced

    async def _transfer(self, version: int, senders: list[str]) -> bool:
        """Everything; whether the server's last answer says that it bears the version."""
        is_alone = len(senders) == 1
        async with self._session():
            announced = await all_or_first_error(self._take(sender, version, is_alone=is_alone) for sender in senders)
        if is_alone:
            return announced[0]
        body = {"new_version": str(version), "abort_all_requests": False}
        answer = await self._server.post("/update_weight_version", body)
        _require(answer, self._server.place, "announce")
        return announces(answer, version)

    async def _take(self, sender: str, version: int, *, is_alone: bool) -> bool:
        """One sender's part: its broadcasts here, the server's receptions there; whether the version is announced."""
        order = SendOrder(channel=self._channels[sender], version=version, timeout_s=self._options.send_s)
        both: list[Coroutine[Any, Any, object]] = [
            self._named("send", sender, self._senders.ask(sender, order)),
            self._receive(sender, order, is_alone=is_alone),
        ]
        return (await all_or_first_error(both))[1] is True

    async def _receive(self, sender: str, order: SendOrder, *, is_alone: bool) -> bool:
        plan, digests = self._plans[sender]
        bodies = [body | {"group_name": order.channel} for body in plan]
        if is_alone:  # a version only with the last one, when all is there
            bodies[-1]["weight_version"] = str(order.version)
        answer = await self._update("/update_weights_from_distributed", bodies, sender, digests)
        return announces(answer, order.version)

    async def _leave(self, senders: Iterable[str], reason: str, *, tells_server: bool = True) -> bool:
        """Give channels up on both sides; never raises, never waits long. False: the server is deaf."""
        hears = True
        for sender in senders:
            channel = self._channels.pop(sender, None)
            if channel is None:
                continue
            with suppress(CallError):  # a sender that is gone has left
                await self._senders.ask(sender, LeaveOrder(channel=channel, reason=reason))
            if tells_server and hears:
                try:
                    await self._server.post(
                        "/destroy_weights_update_group", {"group_name": channel}, within_s=self._options.leave_s
                    )
                except RequestRefused:
                    continue  # it has left by itself
                except EngineError:
                    hears = False
        return hears

    async def close(self) -> None:
        await self._leave(list(self._channels), f"{self._server.place} is not used any more")
        await asyncio.gather(*self._leavings)


class HandleRoute(_DeviceRoute):
    """Channel "cuda_ipc": memory handles. A handle of another GPU's memory costs the server a context there, and it has
    to see that GPU; a copy from it into memory that torch-memory-saver made is refused: that is mapped for its own GPU
    alone."""

    def __init__(self, server: SglangHttp, senders: WeightSenders, options: DeviceRouteOptions) -> None:
        super().__init__(server, senders, options)
        self._bodies: list[dict[str, Any]] = []

    async def prepare(self, manifest: WeightManifest) -> None:
        """Handles of all buckets, for every rank of the server."""
        givers = self._givers(_senders_of(manifest), await self._num_ranks())
        await self._share(givers, manifest.version)

    def _takes_parameters(self) -> bool:
        """Whether the server's parameters are whole and laid out as they are loaded."""
        usual = {
            "tp_size": (1,), "quantization": (None,), "moe_runner_backend": ("auto", "triton"), "ep_size": (1,),
            "fp8_gemm_runner_backend": ("auto", "triton", "deep_gemm"),
        }  # fmt: skip
        is_usual = all(self._facts.get(name, values[0]) in values for name, values in usual.items())
        return is_usual and guesses_by(self._facts) != "layers"  # those are loaded by their names in folders

    def _givers(self, senders: list[str], num_ranks: int) -> list[str]:
        """For each rank of the server, the sender on its GPU."""
        sender_names = self._options.same_gpu
        if not sender_names and len(senders) == 1:
            return senders * num_ranks
        if len(sender_names) != num_ranks:
            raise EngineError(
                f"{self._server.place}: its {num_ranks} tensor-parallel ranks are handed memory of their own GPUs, but "
                f"its actor has {len(sender_names)} GPUs that trainer ranks are on",
                remedy="set roles.rollout.devices to the GPUs of the servers, one server for each rollout actor",
            )
        return list(sender_names)

    async def _share(self, givers: list[str], version: int) -> None:
        counts, takes = Counter(givers), self._takes_parameters()

        replies = await all_or_first_error(
            self._named("share", sender, self._senders.ask(sender, ShareRequest(version, count, takes)))
            for sender, count in counts.items()
        )
        self._bodies = []
        for of_bucket in zip(*(reply.payloads for reply in replies), strict=True):
            remaining = {sender: iter(payloads) for sender, payloads in zip(counts, of_bucket, strict=True)}
            payloads = [next(remaining[sender]) for sender in givers]
            body = {"serialized_named_tensors": payloads, "load_format": replies[0].load_format, "flush_cache": False}
            self._bodies.append(body)
        self._bodies[-1]["weight_version"] = str(version)

    async def load(self, manifest: WeightManifest) -> bool:
        """Hand the handles over; each may be used once."""
        bodies, self._bodies = self._bodies, []
        async with self._session():
            answer = await self._update("/update_weights_from_tensor", bodies, manifest.location)
        return announces(answer, manifest.version)


def _senders_of(manifest: WeightManifest) -> list[str]:
    return manifest.location.split(",")


def _require(answer: Mapping[str, Any], place: str, part: str, *, digest: str = "") -> None:
    """Raises EngineError unless the server says yes, and the digest that was sent if it says any (our own does)."""
    if not answer.get("success"):
        raise EngineError(f"{place}: {part}: {answer.get('message')}", remedy="see the server's log")
    if digest and answer.get("digest", digest) != digest:
        raise EngineError(
            f"{place}: {part}: digest {answer['digest']} arrived, {digest} was sent",
            remedy="the transfer is repeated; if it happens again, look at the network",
        )
