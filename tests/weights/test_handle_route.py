"""Handles for a server on the trainer's own GPU: what is asked of whom, and when. No GPU is needed to look at that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from myxa.actors.engines.sglang_weights import DeviceRouteOptions, HandleRoute
from myxa.core.errors import EngineError
from myxa.core.messages import WeightManifest
from myxa.core.weight_channel import ShareReply, ShareRequest

PAYLOADS = {"trainer/0": ShareReply(payloads=(("a",), ("b",))), "trainer/1": ShareReply(payloads=(("c",),))}


class Senders:
    """Answers `share`; whatever else is asked for is not there."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ShareRequest]] = []

    async def share(self, sender: str, request: ShareRequest) -> ShareReply:
        self.asked.append((sender, request))
        return PAYLOADS[sender]


class Server:
    """Notes what comes; SGLang's words."""

    place, url = "rollout/0 at http://here", "http://here"

    def __init__(self, refuses: str = "") -> None:
        self.calls: list[tuple[str, Mapping[str, Any]]] = []
        self._refuses = refuses

    async def get(self, path: str) -> Mapping[str, Any]:
        self.calls.append((path, {}))
        return {"tp_size": 1}

    async def post(self, path: str, body: Mapping[str, Any], *, within_s: float = 0.0) -> Mapping[str, Any]:
        self.calls.append((path, body))
        if body["serialized_named_tensors"] == [self._refuses]:
            return {"success": False, "message": "no such tensor"}
        version = body.get("weight_version")
        return {"success": True, "message": "Success" + (f" Weight version updated to {version}." if version else "")}

    async def ask(self, path: str, body: Mapping[str, Any]) -> Any:
        raise NotImplementedError


def manifest(version: int) -> WeightManifest:
    return WeightManifest(
        version=version, channel="cuda_ipc", location="trainer/0,trainer/1", generation=0, num_bytes=0, tensors=(),
        digest="", host="",
    )  # fmt: skip


def route(server: Server, senders: Senders) -> HandleRoute:
    return HandleRoute(server, senders, DeviceRouteOptions(host="here"))  # pyright: ignore[reportArgumentType]


@pytest.mark.asyncio
async def test_all_handles_are_fetched_before_and_the_last_bucket_announces():
    server, senders = Server(), Senders()
    way = route(server, senders)
    for version in (3, 4):
        server.calls.clear()
        await way.prepare(manifest(version))
        assert [path for path, _ in server.calls] == (["/server_info"] if version == 3 else []), (
            "nothing is asked twice"
        )
        assert [sender for sender, _ in senders.asked[-2:]] == ["trainer/0", "trainer/1"]
        assert senders.asked[-1][1] == ShareRequest(version=version, num_ranks=1)
        server.calls.clear()
        assert await way.load(manifest(version)), "the server's own answer says the version"
        assert [body["serialized_named_tensors"] for _, body in server.calls] == [["a"], ["b"], ["c"]]
        assert [body.get("weight_version") for _, body in server.calls] == [None, None, str(version)]


@pytest.mark.asyncio
async def test_a_bucket_that_is_refused_is_named_and_the_rest_is_not_sent():
    server = Server(refuses="b")
    way = route(server, Senders())
    await way.prepare(manifest(3))
    server.calls.clear()
    with pytest.raises(EngineError, match="rollout/0 at http://here: bucket 2 of 3: no such tensor"):
        await way.load(manifest(3))
    assert len(server.calls) == 2
