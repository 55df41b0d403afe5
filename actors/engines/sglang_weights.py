"""Weights from the trainer's device into an SGLang server (0.5.17 or later, or our own): two `WeightRoute`s.

    nccl       prepare   plan from every sender; once per server incarnation: both sides join a process group
               load      per sender, at the same time: it broadcasts its buckets, the server is told of each in turn
    cuda_ipc   prepare   memory handles from every sender
               load      the server is handed the handles of each bucket in turn

Every sender (a trainer rank; one per pipeline stage) has a channel of its own with this server, so that stages add up
and nobody waits for a lock. The version is announced when the last bucket is in. What fails is named: phase, bucket,
server and sender. A channel that failed is given up on both sides and never built again under its name; the version is
then sent once more, whole, through a new one, for a server that is alive can always be made whole again.

Knows SGLang's routes and the `WeightSenders` protocol; must not know torch or the trainer.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

from ...core.errors import EngineError, MyxaError, RequestRefused
from ...core.messages import WeightManifest
from ...core.protocols import WeightSenders
from ...core.weight_channel import JoinRequest, SendOrder, ShareRequest
from ..weights.beacon import Beacon
from .sender_plans import SenderPlans
from .weight_bodies import tensor_body
from .weight_route import FolderRoute, Routes, ServerControl, WeightRoute, announces

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
    verify_every: int = 0
    """After every so many versions some of the server's weights are read back; 0: never."""


def device_routes(senders: WeightSenders, options: DeviceRouteOptions) -> Routes:
    """Folders, and both channels between devices."""

    def routes(server: ServerControl) -> Mapping[str, WeightRoute]:
        return {
            "disk": FolderRoute(server, verify_every=options.verify_every),
            "nccl": GroupRoute(server, senders, options),
            "cuda_ipc": HandleRoute(server, senders, options),
        }

    return routes


class GroupRoute:
    """Channel "nccl": broadcasts in a process group (gloo where there is no GPU)."""

    def __init__(self, server: ServerControl, senders: WeightSenders, options: DeviceRouteOptions) -> None:
        self._server = server
        self._senders = senders
        self._options = options
        self._plans = SenderPlans(server, senders, verify_every=options.verify_every)
        self._channels: dict[str, str] = {}
        """Sender -> channel that stands."""
        self._leavings: set[asyncio.Future[bool]] = set()
        self.beacon = Beacon()

    async def prepare(self, manifest: WeightManifest) -> None:
        """Plans, and groups where there are none yet."""
        senders = _senders_of(manifest)
        await _together([self._look(senders), *(self._ask(sender, manifest.version) for sender in senders)])
        await _together(self._join(sender) for sender in senders if sender not in self._channels)

    async def _look(self, senders: list[str]) -> None:
        """Is it the server that we know, and does it hold what we sent?"""
        if not self._channels:
            return
        if await self._plans.is_same_server():
            await self._plans.verify(senders)
        else:
            await self._leave(list(self._channels), "the server is another incarnation", tells_server=False)

    async def _ask(self, sender: str, version: int) -> None:
        """The sender's plan, and whether it still has its end of the channel."""
        channel = self._channels.get(sender, "")
        reply = await self._named("plan", sender, self._plans.ask(sender, version, channel))
        if channel and not reply.has_channel:
            await self._leave([sender], "the sender has given it up")

    async def _join(self, sender: str) -> None:
        """Both sides, at the same time: the server connects while the sender waits for it."""
        channel = f"myxa-{uuid.uuid4().hex[:12]}-{sender}"
        num_ranks, limit_s = await self._plans.num_ranks(), self._options.join_s
        request = JoinRequest(
            channel=channel,
            engine=self._server.place,
            num_ranks=num_ranks,
            engine_host=urlsplit(self._server.url).hostname or "localhost",
            asker_host=self._options.host,
            timeout_s=limit_s,
        )
        offer = await self._named("join", sender, self._senders.join(sender, request))
        body = {
            "master_address": offer.address,
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
            # The server may have joined, or be about to: both sides are told, even if whoever waits is cancelled again.
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
        self._plans.loaded(manifest.version)
        return is_announced

    async def _transfer(self, version: int, senders: list[str]) -> bool:
        """Everything; whether the server's last answer says that it bears the version."""
        is_alone = len(senders) == 1
        announced = await _together(self._take(sender, version, is_alone=is_alone) for sender in senders)
        if is_alone:
            return announced[0]
        body = {"new_version": str(version), "abort_all_requests": False}
        answer = await self._server.post("/update_weight_version", body)
        _require(answer, self._server.place, "announce")
        return announces(answer, version)

    async def _take(self, sender: str, version: int, *, is_alone: bool) -> bool:
        """One sender's part: its broadcasts here, the server's receptions there; whether the version is announced."""
        order = SendOrder(channel=self._channels[sender], version=version, timeout_s=self._options.send_s)
        both: list[Awaitable[object]] = [
            self._named("send", sender, self._senders.send(sender, order)),
            self._receive(sender, order, is_alone=is_alone),
        ]
        return (await _together(both))[1] is True

    async def _receive(self, sender: str, order: SendOrder, *, is_alone: bool) -> bool:
        known = self._plans.of(sender)
        bodies = known.bodies
        answer: Mapping[str, Any] = {}
        for number, bucket in enumerate(bodies, start=1):
            is_last = number == len(bodies)
            body = bucket.distributed(order.channel, str(order.version) if is_alone and is_last else None)
            what = f"bucket {number} of {len(bodies)}"
            answer = await self._named(
                f"receive {what}",
                sender,
                self._server.post("/update_weights_from_distributed", body, within_s=order.timeout_s),
            )
            _require(answer, self._server.place, f"{what} from {sender}", digest=known.digests[number - 1])
        return announces(answer, order.version)

    async def _leave(self, senders: Iterable[str], reason: str, *, tells_server: bool = True) -> bool:
        """Give channels up on both sides; never raises, never waits long. False: the server is deaf."""
        hears = True
        for sender in senders:
            channel = self._channels.pop(sender, None)
            if channel is None:
                continue
            await self._senders.leave(sender, channel, reason)
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

    async def _named(self, phase: str, sender: str, work: Awaitable[T]) -> T:
        self.beacon.step(f"{phase} from {sender}")
        return await _named(phase, sender, self._server.place, work)

    async def close(self) -> None:
        """See the protocol."""
        await self._leave(list(self._channels), f"{self._server.place} is not used any more")
        await asyncio.gather(*self._leavings)


class HandleRoute:
    """Channel "cuda_ipc": memory handles, for a server on the sender's GPU."""

    def __init__(self, server: ServerControl, senders: WeightSenders, options: DeviceRouteOptions) -> None:
        self._server = server
        self._senders = senders
        self._options = options
        self._plans = SenderPlans(server, senders, verify_every=options.verify_every)
        self._bodies: list[dict[str, Any]] = []
        self.beacon = Beacon()

    async def prepare(self, manifest: WeightManifest) -> None:
        """Handles of all buckets of all senders."""
        senders = _senders_of(manifest)
        request = ShareRequest(version=manifest.version, num_ranks=await self._plans.num_ranks())
        await _together([self._look(senders, manifest.version), self._share(senders, request)])

    async def _look(self, senders: list[str], version: int) -> None:
        """At what was loaded before, if some of it is to be read back; that needs the plans, loading does not."""
        if not self._options.verify_every:
            return
        if await self._plans.is_same_server():
            await self._plans.verify(senders)
        await _together(self._named("plan", sender, self._plans.ask(sender, version)) for sender in senders)

    async def _share(self, senders: list[str], request: ShareRequest) -> None:
        replies = await _together(
            self._named("share", sender, self._senders.share(sender, request)) for sender in senders
        )
        self._bodies = [tensor_body(payloads, None) for reply in replies for payloads in reply.payloads]
        self._bodies[-1]["weight_version"] = str(request.version)

    async def load(self, manifest: WeightManifest) -> bool:
        """Hand the handles over; each may be used once."""
        bodies, self._bodies = self._bodies, []
        answer: Mapping[str, Any] = {}
        for number, body in enumerate(bodies, start=1):
            what = f"bucket {number} of {len(bodies)}"
            answer = await self._named(
                f"receive {what}",
                manifest.location,
                self._server.post("/update_weights_from_tensor", body, within_s=self._options.send_s),
            )
            _require(answer, self._server.place, what)
        self._plans.loaded(manifest.version)
        return announces(answer, manifest.version)

    async def _named(self, phase: str, sender: str, work: Awaitable[T]) -> T:
        self.beacon.step(f"{phase} from {sender}")
        return await _named(phase, sender, self._server.place, work)

    async def close(self) -> None:
        """Handles that were not used go; the memory is the sender's."""
        self._bodies = []


def _senders_of(manifest: WeightManifest) -> list[str]:
    senders = [name for name in manifest.location.split(",") if name]
    if not senders:
        raise EngineError(
            f"weight version {manifest.version} names no sender", remedy="this is a bug in the publishing trainer"
        )
    return senders


async def _named(phase: str, sender: str, place: str, work: Awaitable[T]) -> T:
    """Whatever goes wrong becomes an EngineError that says in which phase, where and with whom."""
    try:
        return await work
    except MyxaError as err:
        raise EngineError(
            f"{place}: weights from {sender}: {phase}: {err.message}", remedy=err.remedy or "see both logs"
        ) from err


def _require(answer: Mapping[str, Any], place: str, what: str, *, digest: str = "") -> None:
    """Raises EngineError unless the server says yes, and the digest that was sent if it says any (our own does)."""
    if not answer.get("success"):
        raise EngineError(f"{place}: {what}: {answer.get('message')}", remedy="see the server's log")
    if digest and answer.get("digest", digest) != digest:
        raise EngineError(
            f"{place}: {what}: digest {answer['digest']} arrived, {digest} was sent",
            remedy="the transfer is repeated; if it happens again, look at the network",
        )


async def _together(jobs: Iterable[Awaitable[T]]) -> list[T]:
    """All at once, answers in their order; the first error ends the others, and is raised as it is once they have
    ended."""
    running = [asyncio.ensure_future(job) for job in jobs]  # noqa: TID251 -- awaited here, below
    try:
        return await asyncio.gather(*running)
    finally:
        for one in running:
            one.cancel()
        await asyncio.gather(*running, return_exceptions=True)
