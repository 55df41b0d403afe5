"""Servers of a reference model: what is asked, what is believed, who is asked instead, and what is told when nobody can
be had."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from msgspec.structs import replace
from tests.harness.waiting import until
from tests.reference.teachers import Letters, expected, made, only_once_known, out_of_order, teacher

from myxa.actors.http_client import key_from
from myxa.actors.reference.server import ReferenceServers, in_response, score_request
from myxa.actors.rewards.call import CallFailed
from myxa.core.errors import ConfigError
from myxa.core.samples import Sample

pytestmark = pytest.mark.timeout(30)


@asynccontextmanager
async def asking(*urls: str, **more: Any) -> AsyncIterator[ReferenceServers]:
    settings: dict[str, Any] = {"timeout_s": 5.0, "pause_s": 0.0, **more}
    found = ReferenceServers(urls, tokenizer=Letters(), model_path="models/policy", **settings)
    try:
        yield found
    finally:
        await found.close()


async def score(servers: ReferenceServers, sample: Sample) -> list[float]:
    request = score_request(sample)
    assert request is not None
    return in_response(sample, request, await servers.logprobs(request)).tolist()


@pytest.mark.parametrize(
    ("mask", "ids", "start"),
    [
        ("111", [10, 11, 12, 20, 21, 22], 2),
        ("110011000", [10, 11, 12, 20, 21, 22, 23, 24, 25], 2),
        ("0010", [10, 11, 12, 20, 21, 22], 4),
    ],
    ids=["one-turn", "two-turns", "tool-first"],
)
async def test_what_the_policy_drew_is_scored_and_lies_in_its_place(mask: str, ids: list[int], start: int) -> None:
    sample = made(mask)
    async with teacher() as there, asking(there.url + "/", key="sesame") as servers:
        assert await score(servers, sample) == expected(sample)
        (body,) = there.asked
        assert (body["input_ids"], body["logprob_start_len"]) == (ids, start)
        assert body["return_logprob"] is True and body["stream"] is False
        assert body["sampling_params"] == {"max_new_tokens": 0, "temperature": 1.0}, "a bias is for ids that are new"
        assert set(there.keys) == {"Bearer sesame"}
        await score(servers, sample)
        assert there.num_looks == 1, "its vocabulary is looked at once"
        assert there.biases == [{"199": 0.0}, None, None], "SGLang looks at ids that have a bias before its model does"
        await score(servers, replace(sample, response_ids=sample.response_ids + 300))
        assert there.biases[3:] == [{str(max(sample.response_ids[sample.loss_mask != 0]) + 300): 0.0}]


def lying(change: Any) -> Any:
    async def lie(request: web.Request, body: dict[str, Any], answer: dict[str, Any]) -> Any:
        change(answer["meta_info"]["input_token_logprobs"])
        return answer

    return only_once_known(lie)


def saying(text: str, status: int = 200) -> Any:
    async def answer(request: web.Request, body: dict[str, Any], right: dict[str, Any]) -> web.Response:
        return web.Response(text=text, status=status)

    return only_once_known(answer)


async def breaks_off(request: web.Request, body: dict[str, Any], answer: dict[str, Any]) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def says_nothing(request: web.Request, body: dict[str, Any], answer: dict[str, Any]) -> Any:
    await asyncio.Event().wait()


async def sends_elsewhere(request: web.Request, body: dict[str, Any], answer: dict[str, Any]) -> Any:
    raise web.HTTPFound("http://127.0.0.1:9/")


TRY_S = 1.0
FAULTS: dict[str, tuple[Any, str]] = {
    "too few": (lying(lambda told: told.pop()), "3 log-probs for 4 tokens"),
    "too many": (lying(lambda told: told.append([-1.0, 3, None])), "5 log-probs for 4 tokens"),
    "null": (lying(lambda told: told[2].__setitem__(0, None)), "token id 21 at place 2 is None"),
    "positive": (lying(lambda told: told[2].__setitem__(0, 0.5)), "token id 21 at place 2 is 0.5"),
    "other tokens": (lying(lambda told: told[1].__setitem__(1, 99)), "token id 99 at place 1, where 20 was sent"),
    "zeros": (lying(lambda told: told[1].__setitem__(1, 0)), "token id 0 at place 1, where 20 was sent"),
    "nan": (saying('{"meta_info": {"input_token_logprobs": [[NaN, 12, null]]}}'), "no log-probs of the prompt"),
    "no log-probs": (saying('{"meta_info": {}}'), "no log-probs of the prompt"),
    "no json": (saying("<html>"), "no log-probs of the prompt"),
    "endless": (saying("x" * (3 << 20)), "with more than"),
    "broken": (only_once_known(out_of_order), "answered 500: out of order"),
    "busy": (saying("later", 503), "answered 503: later"),
    "breaks off": (only_once_known(breaks_off), "cannot be asked: "),
    "silent": (only_once_known(says_nothing), "did not answer within 1 s"),
    "elsewhere": (only_once_known(sends_elsewhere), "answered 302"),
}


async def test_a_server_that_fails_or_lies_is_named_and_another_one_is_asked() -> None:
    """All at once: most of it is waiting for the next try."""

    async def is_named(name: str) -> None:
        fault, said = FAULTS[name]
        async with teacher(fault) as liar, teacher() as honest:
            async with asking(liar.url, timeout_s=TRY_S) as servers:
                with pytest.raises(CallFailed) as caught:
                    await score(servers, made())
                assert not caught.value.is_refusal
                assert f"{liar.url} " in str(caught.value) and said in str(caught.value), name
                assert "in 3 tries" in str(caught.value), name
                assert len(liar.asked) == 3, name
            async with asking(liar.url, honest.url, timeout_s=TRY_S) as servers:
                for _ in range(3):
                    assert await score(servers, made()) == expected(made()), name
                assert len(liar.asked) == 4, f"{name}: it is left alone for a while"

    await asyncio.gather(*map(is_named, FAULTS))


async def test_a_server_that_is_down_is_named_until_it_is_up() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        down = f"http://127.0.0.1:{taken.getsockname()[1]}"
        async with teacher() as there, asking(down) as alone, asking(down, there.url) as both:
            with pytest.raises(CallFailed, match=rf"{down} cannot be asked: .* in 3 tries"):
                await score(alone, made())
            assert await score(both, made()) == expected(made())


async def test_a_server_that_comes_back_is_asked_again() -> None:
    num_left = 2

    async def fails_twice(request: web.Request, body: dict[str, Any], answer: dict[str, Any]) -> Any:
        nonlocal num_left
        num_left -= 1
        return web.Response(status=503) if num_left >= 0 else answer

    async with teacher(fails_twice) as there, asking(there.url) as servers:
        assert await score(servers, made()) == expected(made())
        assert (there.num_looks, len(there.asked)) == (3, 1)


async def test_tokens_that_are_refused_are_asked_of_nobody_else() -> None:
    fault = saying('{"error": {"message": "the input is longer than the context"}}', 400)
    async with teacher(fault) as there, teacher(fault) as other, asking(there.url, other.url) as servers:
        with pytest.raises(CallFailed, match="refused: .* answered 400: .*longer than the context"):
            await score(servers, made())
        assert len(there.asked) + len(other.asked) == 1


@pytest.mark.parametrize(("status", "remedy"), [(401, "algo.ref_key_env"), (404, "without /v1")])
async def test_a_wrong_key_or_address_ends_it(status: int, remedy: str) -> None:
    async def locked(request: web.Request, body: dict[str, Any], answer: dict[str, Any]) -> web.Response:
        return web.Response(status=status, text="No")

    async with teacher(locked) as there, asking(there.url) as servers:
        with pytest.raises(ConfigError, match=rf"algo.ref_urls: {there.url} answered {status}: No.*{remedy}"):
            await score(servers, made())


def test_the_key_is_that_of_the_variable_and_what_was_not_drawn_is_not_asked_for() -> None:
    assert score_request(made("000")) is None and score_request(made("")) is None
    assert (key_from({}, "", "a.key"), key_from({"K": "sesame"}, "K", "a.key")) == ("", "sesame")
    with pytest.raises(ConfigError, match=r'algo.ref_key_env = "K": that variable is not set.* -- set it in'):
        key_from({"K": ""}, "K", "algo.ref_key_env")


async def test_a_model_of_another_vocabulary_is_found_out_before_it_is_believed() -> None:
    async def no(request: web.Request, body: dict[str, Any], answer: dict[str, Any]) -> web.Response:
        return web.Response(status=400, text="token id 199 is outside the vocabulary")

    async with teacher(text_of=lambda i: f"<{i + 1}>") as foreign, asking(foreign.url) as servers:
        with pytest.raises(
            ConfigError, match=r"its vocabulary is not that of models/policy: 48 of 48 .*'<5>' instead of"
        ):
            await score(servers, made())
        assert not foreign.asked
    async with teacher(no) as small, asking(small.url) as servers:
        with pytest.raises(ConfigError, match=r"does not know the tokens of models/policy: .*token id 199"):
            await score(servers, made())
    async with teacher(text_of=lambda i: None) as mute, asking(mute.url) as servers:
        assert await score(servers, made()) == expected(made())
    spelt = {4: "_4", 8: "<8> ", 12: "\ufffd"}
    async with teacher(text_of=lambda i: spelt.get(i, f"<{i}>")) as same, asking(same.url) as servers:
        assert await score(servers, made()) == expected(made())


async def test_the_last_id_of_the_vocabulary_may_be_told_as_0() -> None:
    async def clips(request: web.Request, body: dict[str, Any], answer: dict[str, Any]) -> Any:
        for one in answer["meta_info"]["input_token_logprobs"]:
            one[1] = 0 if one[1] in (22, 199) else one[1]
        return answer

    async with teacher(clips) as there, asking(there.url) as servers:
        assert await score(servers, made()) == expected(made())


async def test_calls_are_bounded_and_spread_over_the_servers() -> None:
    held = asyncio.Event()

    async def waits(request: web.Request, body: dict[str, Any], answer: dict[str, Any]) -> Any:
        await held.wait()
        return answer

    async with teacher(only_once_known(waits)) as one, teacher(only_once_known(waits)) as two:
        async with asking(one.url, two.url) as servers, asyncio.TaskGroup() as group:
            tasks = [group.create_task(score(servers, made())) for _ in range(100)]
            await until(lambda: one.at_once == two.at_once == 32)
            held.set()
        assert [task.result() for task in tasks] == [expected(made())] * 100
        assert (one.most_at_once, two.most_at_once) == (32, 32)


async def test_a_call_that_is_cancelled_leaves_its_place_to_others() -> None:
    async with teacher(only_once_known(says_nothing)) as there, asking(there.url) as servers:
        call = asyncio.ensure_future(score(servers, made()))
        await until(lambda: there.at_once and there.asked)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        there.fault = None
        assert await score(servers, made()) == expected(made())
    with pytest.raises(CallFailed, match="given up"):
        await score(servers, made())
