"""Joining a weight group: what is left behind when it does not come about. Nobody sends anything."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, cast

import pytest

from myxa.actors.engines.sglang.weight_routes import DeviceRouteOptions, GroupRoute
from myxa.actors.engines.sglang.wire import ServerAnswer
from myxa.core.errors import EngineError, RequestRefused
from myxa.core.messages import WeightManifest
from myxa.core.weight_channel import JoinOffer, JoinRequest, LeaveOrder, PlanReply

INIT, DESTROY = "/init_weights_update_group", "/destroy_weights_update_group"


class Senders:
    """Two trainer ranks that are well."""

    def __init__(self) -> None:
        self.left: list[str] = []

    async def ask(self, sender: str, order: Any) -> Any:
        if isinstance(order, LeaveOrder):
            self.left.append(order.channel)
        elif isinstance(order, JoinRequest):
            return JoinOffer(address="127.0.0.1", port=1, backend="gloo")
        return PlanReply(digest="", buckets=(), has_channel=False)


class Server:
    """Is slow to join trainer/0's group, and cannot join trainer/1's."""

    place, url = "rollout/0 at http://here", "http://here"

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.leaving_s = 0.0

    async def get(self, path: str) -> Mapping[str, Any]:
        return {"tp_size": 1}

    async def answer(self, route: str, within_s: float) -> ServerAnswer:
        return ServerAnswer(route, 404)

    async def post(self, path: str, body: Mapping[str, Any], *, within_s: float = 0.0) -> Mapping[str, Any]:
        name = body["group_name"]
        self.asked.append((path, name))
        if path == DESTROY:
            await asyncio.sleep(self.leaving_s)
            if name.endswith("trainer/1"):
                raise RequestRefused("it does not exist")
            return {"success": True}
        while name.endswith("trainer/0"):
            await asyncio.sleep(0.01)
        while not any(name.endswith("trainer/0") for _, name in self.asked):
            await asyncio.sleep(0.01)
        return {"success": False, "message": "no route to host"}


def manifest() -> WeightManifest:
    return WeightManifest(
        version=1, channel="nccl", location="trainer/0,trainer/1", num_bytes=0, tensors=(), digest="",
        host="",
    )  # fmt: skip


def route_of(server: Server, senders: Senders) -> GroupRoute:
    return GroupRoute(cast(Any, server), senders, DeviceRouteOptions(host="here"))


def destroyed(server: Server) -> list[str]:
    return sorted(name.rpartition("-")[2] for path, name in server.asked if path == DESTROY)


async def test_a_join_that_another_ones_failure_ended_is_undone_on_both_sides():
    server, senders = Server(), Senders()
    async with asyncio.timeout(20):
        with pytest.raises(EngineError, match="join with trainer/1: no route to host"):
            await route_of(server, senders).prepare(manifest())
    assert destroyed(server) == ["trainer/0", "trainer/1"], "the server would keep a group that nobody knows"
    assert sorted(senders.left) == sorted(name for path, name in server.asked if path == INIT)


async def test_it_is_undone_even_if_whoever_waits_is_cancelled_again_and_again():
    server, senders = Server(), Senders()
    server.leaving_s = 0.3
    route = route_of(server, senders)
    async with asyncio.timeout(20):
        preparing = asyncio.ensure_future(route.prepare(manifest()))
        while not destroyed(server):
            await asyncio.sleep(0.01)
        while not preparing.done():
            preparing.cancel()
            await asyncio.sleep(0.02)
        await route.close()
    assert destroyed(server) == ["trainer/0", "trainer/1"]
    assert len(senders.left) == 2
