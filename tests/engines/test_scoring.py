"""Given tokens and their log-probs: in the core beside rows that decode, and over SGLang's /generate."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import aiohttp
import numpy as np
import pytest
from tests.engines.contract import ask

from myxa.actors.engines.embedded.engine import EmbeddedEngine, EmbeddedOptions
from myxa.actors.engines.embedded.request import Scoring
from myxa.actors.engines.http_server import serve
from myxa.actors.models.chat_template import PlainText
from myxa.actors.models.tokenizer import load_tokenizer
from myxa.core.errors import RequestRefused

OPTIONS = EmbeddedOptions(max_running=4, seed=5)
IDS = np.random.default_rng(7).integers(0, 256, 90).astype(np.int32)


@asynccontextmanager
async def asker(folder):
    async with asyncio.timeout(60), serve(folder, options=OPTIONS) as served, aiohttp.ClientSession() as session:

        async def post(**body):
            body = {"sampling_params": {"max_new_tokens": 0, "temperature": 1}, "return_logprob": True} | body
            async with session.post(f"{served.url}/generate", json=body) as answer:
                return answer.status, await answer.json()

        yield post, served


@pytest.mark.parametrize("first", [1, 30, 89, 90])
def test_a_core_scores_beside_rows_that_decode(first, folders, make_core, run_core, judge, monkeypatch):
    monkeypatch.setattr("myxa.actors.engines.embedded.model.LOGITS_AT_ONCE", 7 * 320)  # several rows at a time
    alone = run_core(make_core(folders[0]), [ask("row", max_new_tokens=20, seed=3)])["row"]
    core = make_core(folders[0], version=4)
    core.submit(ask("row", max_new_tokens=20, seed=3), "row")
    core.step()
    core.submit_scoring(Scoring("given", "given", IDS, first))
    found: dict = {}
    while core.has_work:
        core.step()
        for event in core.take_events():
            found.setdefault(event.owner, []).append(event.news)
    (told,) = found["given"]
    assert told.output_ids.tolist() == IDS[first:].tolist()
    assert (told.finish, told.versions.tolist()) == ("length", [4] * (90 - first))
    assert np.allclose(told.logprobs, judge(folders[0]).logprobs(IDS[:first], IDS[first:], 1.0), atol=1e-5)
    assert np.concatenate([one.output_ids for one in found["row"]]).tolist() == alone.ids.tolist()


def test_what_cannot_be_scored_is_refused_with_a_remedy(folders, make_core):
    core = make_core(folders[0])
    core.submit_scoring(Scoring("one", "first", IDS, 1))
    for scoring, words in (
        (Scoring("one", 0, IDS, 1), "running already"),
        (Scoring("two", 0, IDS, 0), "score from 1 on"),
        (Scoring("two", 0, IDS, 91), "score from 1 on"),
        (Scoring("two", 0, np.asarray([1, 9999], np.int32), 1), "token id 9999"),
        (Scoring("two", 0, np.zeros(129, np.int32), 1), "the engine's context is 128"),
        (Scoring("two", 0, np.zeros(0, np.int32), 1), "is empty"),
    ):
        core.submit_scoring(scoring)
        (event,) = core.take_events()
        assert isinstance(event.news, RequestRefused) and event.news.remedy
        assert words in str(event.news)
    assert core.num_waiting == 1


def test_scoring_waits_for_the_end_of_a_pause_and_is_aborted_like_anything(folders, make_core):
    core = make_core(folders[0])
    core.pause("in_place")
    for name in ("one", "two"):
        core.submit_scoring(Scoring(name, name, IDS, 1))
    assert not core.has_work
    core.abort(lambda asked: asked.request_id == "one")
    core.resume()
    core.step()
    news = {event.owner: event.news for event in core.take_events()}
    assert (news["one"].finish, news["one"].output_ids.size) == ("abort", 0)
    assert news["two"].output_ids.size == 89
    assert (core.has_work, core.num_waiting) == (False, 0)


async def test_weights_that_hold_nan_fail_the_scoring(folders):
    engine = EmbeddedEngine(folders[0], OPTIONS)
    await engine.start()
    try:
        await engine._started().thread.call(lambda core: core.weights.embedding.fill_(float("nan")))
        with pytest.raises(Exception, match="not finite after 90 tokens"):
            await engine.score("one", IDS, 1)
    finally:
        await engine.close()


async def test_prompts_are_scored_over_http_as_sglang_does_it(folders, judge):
    async with asker(folders[0]) as (post, served):
        status, answer = await post(input_ids=IDS.tolist(), logprob_start_len=29)
        told = answer["meta_info"]["input_token_logprobs"]
        assert (status, answer["output_ids"], answer["meta_info"]["finish_reason"]["type"]) == (200, [], "length")
        assert [one[1:] for one in told] == [[i, None] for i in IDS[29:].tolist()]
        assert told[0][0] is None
        exact = judge(folders[0]).logprobs(IDS[:30], IDS[30:], 1.0)
        assert np.allclose([one[0] for one in told[1:]], exact, atol=1e-5)
        hot = {"max_new_tokens": 0, "temperature": 3}  # of the prompt they are those at temperature 1
        for body, wanted in (
            ({"input_ids": IDS.tolist(), "logprob_start_len": 29, "sampling_params": hot}, told),
            ({"input_ids": IDS.tolist()}, []),
            ({"input_ids": [5, 6], "logprob_start_len": 1}, [[None, 6, None]]),
            ({"input_ids": [5, 6], "logprob_start_len": 2}, []),
        ):
            assert (await post(**body))[1]["meta_info"]["input_token_logprobs"] == wanted
        prompts = [[1, 2, 3], load_tokenizer(folders[0], PlainText()).encode("hello"), [300, 301]]
        wish = {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True}
        status, answers = await post(
            input_ids=prompts, logprob_start_len=[0, 2, -1], return_text_in_logprobs=True, sampling_params=wish
        )
        given = [answer["meta_info"]["input_token_logprobs"] for answer in answers]
        assert [[one[1] for one in each] for each in given] == [[1, 2, 3], prompts[1][2:], []]
        assert [one[2] for one in given[1]] == list("llo")
        assert all(len(answer["meta_info"]["output_token_logprobs"]) == 2 for answer in answers)
        for body, words in (
            ({"input_ids": [1, 2], "logprob_start_len": 3}, "logprob_start_len is 3"),
            ({"input_ids": [1, 2], "logprob_start_len": -2}, "logprob_start_len is -2"),
            ({"input_ids": [1, 9999], "logprob_start_len": 0}, "token id 9999"),
        ):
            status, answer = await post(**body)
            assert (status, words in answer["error"]["message"]) == (400, True)
        for bias, status in ({"2": 0.0}, 200), ({"2": 0.5}, 400):
            sampling = {"max_new_tokens": 0, "logit_bias": bias}
            assert (await post(input_ids=[1, 2], logprob_start_len=0, sampling_params=sampling))[0] == status
        assert (await served.engine.info()).waiting == 0
