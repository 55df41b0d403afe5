"""The contract's part about requests: tokens, log-probs, ends, refusals, aborts."""

from __future__ import annotations

import asyncio
import math

import numpy as np
from tests.engines.contract import (
    CONTEXT,
    MAX_RUNNING,
    VOCAB,
    Subject,
    ask,
    check_logprobs,
    collect,
    endless,
    fails,
    later,
    scenario,
    started,
)  # fmt: skip

from myxa.core.errors import EngineError, RequestRefused


@scenario
async def start_tells_what_the_engine_is(subject: Subject) -> None:
    info = await subject.engine.info()
    assert (info.vocab_size, info.context_length, info.max_running) == (VOCAB, CONTEXT, MAX_RUNNING)
    assert (info.version, info.running, info.waiting) == (0, 0, 0)
    await fails(subject.engine.start(), EngineError)


@scenario
async def tokens_come_with_the_logprobs_of_a_full_forward(subject: Subject) -> None:
    requests = [
        ask(f"p{i}", 3 + 4 * i, max_new_tokens=4 + 3 * i, temperature=(1.0, 0.0, 0.7)[i % 3], ignore_eos=i % 2 == 0)
        for i in range(9)
    ]
    results = await asyncio.gather(*(collect(subject.engine, r) for r in requests))
    for request, got in zip(requests, results, strict=True):
        check_logprobs(subject, request, got)
        assert got.versions.tolist() == [0] * len(got.ids)
        limit = request.sampling.max_new_tokens
        assert 0 < len(got.ids) <= limit
        assert (got.finish == "length" and len(got.ids) == limit) or (
            got.finish == "stop" and got.matched == got.ids[-1]
        )
        assert got.finish == "stop" or got.matched is None


@scenario
async def top_p_and_top_k_report_the_logprob_of_the_whole_distribution(subject: Subject) -> None:
    requests = [ask("narrow", 9, max_new_tokens=12, top_p=0.5, top_k=20, ignore_eos=True),
                ask("one", 9, max_new_tokens=6, top_k=1, ignore_eos=True)]  # fmt: skip
    narrow, got = [await collect(subject.engine, r) for r in requests]
    check_logprobs(subject, requests[0], narrow)
    check_logprobs(subject, requests[1], got)
    greedy = await collect(subject.engine, ask("greedy", requests[1].input_ids, max_new_tokens=6, temperature=0.0, ignore_eos=True))  # fmt: skip
    assert np.array_equal(greedy.ids, got.ids), "the best one of one is the greedy choice"


@scenario
async def greedy_answers_do_not_depend_on_company(subject: Subject) -> None:
    request = ask("g", 12, max_new_tokens=16, temperature=0.0, ignore_eos=True)
    alone = await collect(subject.engine, request)
    again = await collect(subject.engine, request)
    company = [ask(f"c{i}", 5 + i, max_new_tokens=8, ignore_eos=True) for i in range(5)]
    crowd = await asyncio.gather(*(collect(subject.engine, r) for r in [request, *company]))
    for got in (again, crowd[0]):
        assert np.array_equal(got.ids, alone.ids)


@scenario
async def a_stop_token_ends_the_answer_and_is_part_of_it(subject: Subject) -> None:
    whole = await collect(subject.engine, ask("w", 12, max_new_tokens=16, temperature=0.0, ignore_eos=True))
    stop = int(whole.ids[-1])
    first = whole.ids.tolist().index(stop)
    prompt = ask("w", 12).input_ids
    got = await collect(
        subject.engine, ask("s", prompt, max_new_tokens=16, temperature=0.0, stop_token_ids=(300, stop))
    )
    assert (got.finish, got.matched) == ("stop", stop)
    assert np.array_equal(got.ids, whole.ids[: first + 1])
    got = await collect(
        subject.engine, ask("i", prompt, max_new_tokens=16, temperature=0.0, stop_token_ids=(stop,), ignore_eos=True)
    )
    assert (got.finish, len(got.ids)) == ("length", 16), "ignore_eos means that no token stops"


@scenario
async def a_limit_of_one_gives_one_token(subject: Subject) -> None:
    got = await collect(subject.engine, ask("one", [7], max_new_tokens=1, ignore_eos=True))
    assert (len(got.ids), got.finish, got.matched) == (1, "length", None)


@scenario
async def requests_that_cannot_be_served_are_refused_and_harm_nobody(subject: Subject) -> None:
    wrong = [
        ([], {}), ([VOCAB], {}), ([-1], {}), ([7, 2**31 - 1], {}), (CONTEXT + 90, {}),
        (CONTEXT - 20, {"max_new_tokens": 21}), (4, {"max_new_tokens": 0}), (4, {"max_new_tokens": -3}),
        (4, {"temperature": -1.0}), (4, {"temperature": math.nan}), (4, {"temperature": math.inf}),
        (4, {"top_p": 0.0}), (4, {"top_p": math.nan}), (4, {"top_p": 7.0}), (4, {"top_k": 0}), (4, {"top_k": -3}),
        (4, {"stop_token_ids": (7, 1000)}),
    ]  # fmt: skip
    good = ask("good", 5, max_new_tokens=30, ignore_eos=True)
    async with started(subject.engine, good) as (stream,):
        for prompt, sampling in wrong:
            bad = ask("bad", prompt, **({"max_new_tokens": 5} | sampling))
            await fails(collect(subject.engine, bad), RequestRefused, "'bad'")
        await fails(collect(subject.engine, ask("", 4, max_new_tokens=5)), RequestRefused)
        assert len((await stream).ids) == 30


@scenario
async def an_abort_ends_one_stream_whose_tokens_can_be_continued(subject: Subject) -> None:
    other = endless("r10", max_new_tokens=50)
    request = endless("r1")
    async with started(subject.engine, request, other) as (stream, untouched):
        await asyncio.sleep(subject.runs_s)
        await subject.engine.abort("r1")
        part = await stream
        assert part.finish == "abort"
        assert len(part.ids) < request.sampling.max_new_tokens
        check_logprobs(subject, request, part)
        context = np.concatenate([request.input_ids, part.ids])
        rest = endless("r1", context, max_new_tokens=12)
        continued = await collect(subject.engine, rest)
        check_logprobs(subject, rest, continued)
        whole = await collect(subject.engine, endless("whole", request.input_ids, max_new_tokens=len(part.ids) + 12))
        assert np.array_equal(np.concatenate([part.ids, continued.ids]), whole.ids)
        kept = await untouched
        assert (kept.finish, len(kept.ids)) == ("length", 50), '"r1" begins "r10", and is another request'
    await subject.engine.abort("nobody")


@scenario
async def an_abort_before_the_first_token_ends_the_stream(subject: Subject) -> None:
    async with started(subject.engine, endless("early")) as (stream,):
        await subject.engine.abort("early")
        assert (await stream).finish == "abort"
    task = later(subject.engine, endless("earlier"))
    await asyncio.sleep(0)
    await subject.engine.abort()
    assert (await task).finish == "abort"


@scenario
async def an_abort_of_all_ends_running_and_waiting(subject: Subject) -> None:
    count = MAX_RUNNING + 6
    async with started(subject.engine, *(endless(f"r{i}", 3) for i in range(count))) as streams:
        await subject.engine.abort()
        finishes = [result.finish for result in await asyncio.gather(*streams)]
        assert finishes == ["abort"] * count
        info = await subject.engine.info()
        assert (info.running, info.waiting) == (0, 0)
    assert (await collect(subject.engine, ask("next", max_new_tokens=2, ignore_eos=True))).finish == "length"


@scenario
async def more_requests_than_rows_all_get_their_answers(subject: Subject) -> None:
    requests = [ask(f"m{i}", 1 + i % 5, max_new_tokens=1 + i % 4, ignore_eos=True) for i in range(3 * MAX_RUNNING)]
    results = await asyncio.gather(*(collect(subject.engine, r) for r in requests))
    for request, got in zip(requests, results, strict=True):
        assert (got.finish, len(got.ids)) == ("length", request.sampling.max_new_tokens)
        check_logprobs(subject, request, got)


@scenario
async def a_cancelled_reader_frees_its_row_and_the_name(subject: Subject) -> None:
    async with started(subject.engine, *(endless(f"gone{i}", 3) for i in range(MAX_RUNNING))) as streams:
        for stream in streams:
            stream.cancel()
        await asyncio.wait(streams)
        assert all(stream.cancelled() for stream in streams)
    while True:
        try:
            got = await collect(subject.engine, ask("gone0", max_new_tokens=3, ignore_eos=True))
            break
        except RequestRefused:  # a server learns of the broken connection a moment later
            await asyncio.sleep(0.05)
    assert len(got.ids) == 3


@scenario
async def after_close_everything_is_refused(subject: Subject) -> None:
    engine = subject.engine
    async with started(engine, endless("r")) as (stream,):
        await engine.close()
        await fails(stream, EngineError)
        await engine.close()
        for attempt in (collect(engine, ask("x")), engine.info(), engine.abort()):
            await fails(attempt, EngineError)
