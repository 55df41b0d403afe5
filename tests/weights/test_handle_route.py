"""Handles for a server on the trainer's own GPU: what is asked of whom, and when. No GPU is needed to look at that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from myxa.actors.engines.sglang.weight_routes import DeviceRouteOptions, HandleRoute
from myxa.actors.engines.sglang.wire import ServerAnswer
from myxa.core.errors import EngineError, RequestRefused
from myxa.core.messages import WeightManifest
from myxa.core.weight_channel import ShareReply, ShareRequest

BEGIN, END, UPDATE = "/begin_weight_update", "/end_weight_update", "/update_weights_from_tensor"


class Senders:
    """Answers with payloads that say whose they are: sender, bucket, number. Whatever else is asked for is not
    there."""

    def __init__(self, num_buckets: int = 2) -> None:
        self.asked: list[tuple[str, ShareRequest]] = []
        self._num_buckets = num_buckets

    async def ask(self, sender: str, request: ShareRequest) -> ShareReply:
        self.asked.append((sender, request))
        payloads = tuple(
            tuple(f"{sender} {bucket}.{number}" for number in range(request.num_ranks))
            for bucket in range(self._num_buckets)
        )
        return ShareReply(payloads=payloads)


class Server:
    """Notes what comes; SGLang's words."""

    place, url = "rollout/0 at http://here", "http://here"

    def __init__(self, tp_size: int = 1, refuses: str = "", *, has_sessions: bool = False, **facts: object) -> None:
        self.calls: list[tuple[str, Mapping[str, Any]]] = []
        self.has_sessions, self.is_open = has_sessions, False
        self._facts = {"tp_size": tp_size, **facts}
        self._refuses = refuses

    async def get(self, path: str) -> Mapping[str, Any]:
        self.calls.append((path, {}))
        return self._facts

    async def answer(self, route: str, within_s: float) -> ServerAnswer:
        return ServerAnswer(route, 405 if self.has_sessions else 404)

    async def post(self, path: str, body: Mapping[str, Any], *, within_s: float = 0.0) -> Mapping[str, Any]:
        self.calls.append((path, body))
        if path in (BEGIN, END):
            if self.is_open is (path == BEGIN):
                raise RequestRefused(f"{path} answered 400")
            self.is_open = path == BEGIN
            return {"success": True}
        if self.has_sessions and not self.is_open:
            return {"success": False, "message": "must run between begin_weight_update() and end_weight_update()"}
        if body["serialized_named_tensors"] == [self._refuses]:
            return {"success": False, "message": "no such tensor"}
        version = body.get("weight_version")
        return {"success": True, "message": "Success" + (f" Weight version updated to {version}." if version else "")}


def manifest(version: int, senders: str = "trainer/0,trainer/1,trainer/2,trainer/3") -> WeightManifest:
    return WeightManifest(
        version=version, channel="cuda_ipc", location=senders, num_bytes=0, tensors=(), digest="", host="",
    )  # fmt: skip


def route(server: Server, senders: Senders, *same_gpu: str) -> HandleRoute:
    options = DeviceRouteOptions(host="here", same_gpu=same_gpu)
    return HandleRoute(server, senders, options)  # pyright: ignore[reportArgumentType]


async def test_all_handles_are_fetched_before_from_the_rank_on_its_gpu_and_the_last_bucket_announces():
    server, senders = Server(), Senders()
    way = route(server, senders, "trainer/1")
    for version in (3, 4):
        server.calls.clear()
        await way.prepare(manifest(version))
        assert [path for path, _ in server.calls] == (["/server_info"] if version == 3 else []), (
            "nothing is asked twice"
        )
        wanted = ShareRequest(version=version, num_ranks=1, takes_parameters=True)
        assert senders.asked == [("trainer/1", wanted)], "no other GPU's"
        senders.asked.clear()
        server.calls.clear()
        assert await way.load(manifest(version)), "the server's own answer says the version"
        sent = [body["serialized_named_tensors"] for _, body in server.calls]
        assert sent == [["trainer/1 0.0"], ["trainer/1 1.0"]]
        assert [body.get("weight_version") for _, body in server.calls] == [None, str(version)]


async def test_each_rank_of_a_server_is_handed_memory_of_its_own_gpu():
    server, senders = Server(tp_size=2), Senders()
    way = route(server, senders, "trainer/3", "trainer/2")
    await way.prepare(manifest(3))
    assert sorted(sender for sender, _ in senders.asked) == ["trainer/2", "trainer/3"]
    server.calls.clear()
    await way.load(manifest(3))
    sent = [body["serialized_named_tensors"] for _, body in server.calls]
    assert sent == [["trainer/3 0.0", "trainer/2 0.0"], ["trainer/3 1.0", "trainer/2 1.0"]]


async def test_without_named_gpus_there_can_be_one_sender_only():
    server, senders = Server(tp_size=2), Senders(num_buckets=1)
    await route(server, senders).prepare(manifest(3, "trainer/0"))
    assert senders.asked == [("trainer/0", ShareRequest(version=3, num_ranks=2))], "a handle is for one reader"
    with pytest.raises(EngineError, match="2 tensor-parallel ranks are handed memory of their own GPUs, .* has 0 GPUs"):
        await route(server, senders).prepare(manifest(3))


async def test_what_does_not_fit_is_refused_before_the_server_hears_of_it():
    server, senders = Server(), Senders()
    with pytest.raises(EngineError, match="its 1 tensor-parallel ranks .* has 2 GPUs .* one server for each"):
        await route(server, senders, "trainer/0", "trainer/1").prepare(manifest(3))
    assert {path for path, _ in server.calls} == {"/server_info"}


async def test_a_bucket_that_is_refused_is_named_and_the_rest_is_not_sent():
    server = Server(refuses="trainer/0 1.0")
    way = route(server, Senders(num_buckets=3), "trainer/0")
    await way.prepare(manifest(3))
    server.calls.clear()
    with pytest.raises(EngineError, match="rollout/0 at http://here: bucket 2 of 3: no such tensor"):
        await way.load(manifest(3))
    assert len(server.calls) == 2


@pytest.mark.parametrize(("draft", "algorithm", "keeps_draft", "takes_parameters"), [
    (None, None, None, True), (None, "NGRAM", True, True), ("/d", "EAGLE", True, True), (None, "EAGLE3", True, True),
    ("/m", "EAGLE", None, False), (None, "nextn", None, False),
])  # fmt: skip
async def test_a_draft_model_is_left_alone_and_layers_that_guess_follow_by_their_names(
    draft: str | None, algorithm: str | None, keeps_draft: bool | None, takes_parameters: bool
):
    facts = {"speculative_algorithm": algorithm, "speculative_draft_model_path": draft, "model_path": "/m"}
    server, senders = Server(**facts), Senders()
    way = route(server, senders, "trainer/1")
    await way.prepare(manifest(3))
    assert [request.takes_parameters for _, request in senders.asked] == [takes_parameters]
    await way.load(manifest(3))
    assert [body.get("disable_draft_model") for _, body in server.calls[1:]] == [keeps_draft] * 2
    assert [body.get("selector") for _, body in server.calls[1:]] == ["target" if keeps_draft else None] * 2


async def test_a_server_with_sessions_gets_each_version_in_one_and_one_that_was_left_open_is_ended():
    server = Server(refuses="trainer/0 1.0", has_sessions=True)
    way = route(server, Senders(num_buckets=2), "trainer/0")
    await way.prepare(manifest(3))
    assert BEGIN not in [path for path, _ in server.calls], "tokens still flow"
    server.calls.clear()
    with pytest.raises(EngineError, match="no such tensor"):
        await way.load(manifest(3))
    assert [path for path, _ in server.calls] == [BEGIN, UPDATE, UPDATE]
    server._refuses = ""
    await way.prepare(manifest(4))
    server.calls.clear()
    assert await way.load(manifest(4))
    assert [path for path, _ in server.calls] == [BEGIN, END, BEGIN, UPDATE, UPDATE, END]
