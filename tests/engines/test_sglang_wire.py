"""Chunks of SGLang's streams in all their shapes: cumulative, incremental, with and without spans, and broken."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from myxa.actors.engines.sglang import wire
from myxa.actors.engines.sglang.weight_routes import announces
from myxa.actors.engines.sglang.wire import HeldTokens, TokenSpan, version_number, versions_of
from myxa.core.errors import EngineError, RequestRefused
from myxa.core.messages import EngineUsage
from myxa.core.samples import NO_VERSION


def chunk(
    ids, total=None, *, finish=None, version="4", spans=None, logprobs=None, matched=None, abort=None, **meta: Any
):
    logprobs = [[-float(i), i, None] for i in ids] if logprobs is None else logprobs
    reason = None if finish is None else {"type": finish, **({} if matched is None else {"matched": matched})}
    if reason is not None and abort is not None:
        reason |= dict(zip(("message", "status_code"), abort, strict=True))
    value = {
        "text": "x", "output_ids": ids,
        "meta_info": {
            "id": "r", "finish_reason": reason, "prompt_tokens": 3,
            "completion_tokens": len(ids) if total is None else total, "weight_version": version,
            "output_token_logprobs": logprobs,
            **({} if spans is None else {"weight_versions": [dict(zip(("version", "start", "end"), s, strict=True)) for s in spans]}),
            **meta,
        },
    }  # fmt: skip
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def told(chunks, sent_version=4):
    held = HeldTokens("here", sent_version)
    deltas = [delta for one in chunks for delta in held.feed(one)]
    return (
        np.concatenate([d.output_ids for d in deltas]).tolist(), np.concatenate([d.logprobs for d in deltas]).tolist(),
        np.concatenate([d.versions for d in deltas]).tolist(), deltas,
    )  # fmt: skip


@pytest.mark.parametrize("is_incremental", [True, False])
@pytest.mark.parametrize("has_spans_everywhere", [True, False])
def test_every_way_of_streaming_gives_the_same_tokens(is_incremental, has_spans_everywhere):
    everything = [11, 12, 13, 14, 15]
    chunks = []
    for start, end in ((0, 2), (2, 3), (3, 5)):
        is_last = end == 5
        spans = [["4", 0, min(end, 3)]] + ([["5", 3, end]] if end > 3 else [])
        chunks.append(
            chunk(
                everything[start:end] if is_incremental else everything[:end], end,
                finish="length" if is_last else None, version="4" if end <= 3 else "5",
                spans=spans if has_spans_everywhere or is_last else None,
            )
        )  # fmt: skip
    ids, logprobs, versions, deltas = told(chunks)
    assert ids == everything
    assert logprobs == [-11.0, -12.0, -13.0, -14.0, -15.0]
    assert versions == [4, 4, 4, 5, 5]
    assert len(deltas) == (3 if has_spans_everywhere else 1), "tokens wait until their version is certain"
    assert [d.finish for d in deltas][-1] == "length"


def test_a_server_may_be_ahead_of_its_own_count():
    """SGLang passes the growing list by reference, so it may be longer when it is written than when it was counted."""
    ids, _, _, _ = told([chunk([1, 2, 3], 2), chunk([1, 2, 3], 3, finish="stop", spans=[["4", 0, 3]])])
    assert ids == [1, 2, 3]


def test_an_aborted_incremental_stream_repeats_its_last_token():
    last = chunk([2], 2, finish="abort", spans=[["4", 0, 2]], logprobs=[[-1, 2, None]])
    ids, _, _, deltas = told([chunk([1, 2], 2, spans=[["4", 0, 2]]), last])
    assert ids == [1, 2]
    assert deltas[-1].finish == "abort"
    assert len(deltas[-1].output_ids) == 0


def test_an_abort_in_the_queue_of_a_cumulative_stream_loses_no_token():
    """Such a request was retracted: its last chunk has one token, and the log-probs of all."""
    pairs = [[-float(i), i, None] for i in (1, 2, 3, 4)]
    last = chunk([4], 4, finish="abort", spans=[["4", 0, 4]], logprobs=pairs)
    for begin in ([], [chunk([1], 1)], [chunk([1, 2], 2)]):
        ids, logprobs, _, deltas = told([*begin, last])
        assert (ids, logprobs, deltas[-1].finish) == ([1, 2, 3, 4], [-1.0, -2.0, -3.0, -4.0], "abort")


@pytest.mark.parametrize(
    ("sent", "finished", "stamp"), [(4, "4", 4), (4, "5", 4), (6, "5", 5), (3, "default", -1), (-1, "7", -1)]
)
def test_without_spans_a_stamp_is_never_newer_than_the_truth(sent, finished, stamp):
    _, _, versions, _ = told([chunk([1], version=str(sent)), chunk([1, 2], finish="stop", version=finished)], sent)
    assert versions == [stamp, stamp]


def test_stop_by_an_id_is_told():
    assert told([chunk([1, 9], finish="stop", matched=9, spans=[["4", 0, 2]])])[3][-1].matched == 9
    assert told([chunk([1, 9], finish="stop", spans=[["4", 0, 2]])])[3][-1].matched == 9
    by_text = told([chunk([1, 9], finish="stop", matched="text", spans=[["4", 0, 2]])])[3][-1]
    assert (by_text.matched, by_text.matched_text) == (None, "text")
    assert told([chunk([1, 9], finish="length", spans=[["4", 0, 2]])])[3][-1].matched is None


@pytest.mark.parametrize(("chunks", "says"), [
    ([chunk([1, 2], logprobs=[])], "here: a chunk has 0 output_token_logprobs after 0 tokens and counts 2"),
    ([chunk([1, 2]), chunk([5], 5)], "1 output_ids after 2 tokens and counts 5"),
    ([chunk([1, 2]), chunk([1, 2], 1)], "2 output_ids after 2 tokens and counts 1"),
    ([chunk([1, 2], spans=[["4", 0, 1]])], "cover 1 of 2"),
    ([chunk([1, 2], spans=[["4", 0, 0], ["5", 1, 2]])], "leave a gap"),
    ([chunk([1, 2], spans=[["4", -1, 2]])], "leave a gap"),
    ([chunk([1]), chunk([1, 2], logprobs=[[-1.0, 1, None], [None, 2, None]])], "after 1 tokens is null: the logits are not finite -- the weights"),
])  # fmt: skip
def test_missing_logprobs_tokens_or_stamps_are_errors(chunks, says):
    with pytest.raises(EngineError, match=says):
        told(chunks)


def test_a_server_that_read_another_prompt_than_it_was_sent_is_caught():
    """As one does that cuts long prompts; of an aborted request it may tell anything."""
    for num_sent, finish, is_caught in (
        (3, "stop", False),
        (5, "abort", False),
        (5, "stop", True),
        (5, "length", True),
    ):
        held = HeldTokens("here", 4, None, (0, num_sent))
        assert not list(held.feed(chunk([1])))
        last = chunk([1, 2], finish=finish)
        if is_caught:
            with pytest.raises(EngineError, match="read a prompt of 3 tokens, 5 were sent -- .*--allow-auto-truncate"):
                list(held.feed(last))
        else:
            assert len(list(held.feed(last))) == 1


@pytest.mark.parametrize(
    "raw",
    [b"", b"[]", b"null", b"{}", b'{"output_ids": []}', b'{"output_ids": [1], "meta_info": {}}', b"\xff\xfe",
     b'{"output_ids": ["a"], "meta_info": {"completion_tokens": 1}}', b'{"output_ids": [4294967296], "meta_info": {"completion_tokens": 1}}',
     b'{"output_ids": [1], "meta_info": {"completion_tokens": 1, "finish_reason": {"type": "bored"}}}',
     b'{"output_ids": [1], "meta_info": {"completion_tokens": 1, "weight_versions": [{"version": 4}]}}',
     b'{"output_ids": [1], "meta_info": {"completion_tokens": 1, "output_token_logprobs": [[-1.0, 2, null]]}}'],
)  # fmt: skip
def test_what_is_no_chunk_is_an_error_that_shows_it(raw):
    with pytest.raises(EngineError, match="here: not an answer of SGLang"):
        told([b"data: " + raw + b"\n"])


@pytest.mark.parametrize(("piece", "kind", "says"), [
    (b'data: {"error": "out of memory"}\n', EngineError, "here: out of memory"), (b'data: {"error": null}\n', EngineError, "here: None"),
    (b'data: {"error": {"message": "no", "code": 400}}\n', RequestRefused, "here: no"),
    (b'data: {"error": {"message": "no", "code": 500}}\n', EngineError, "here: no"),
    (chunk([], finish="abort", abort=("too long", 400)), RequestRefused, "here: too long"),
    (chunk([1], finish="abort", abort=("queue is full", 503)), EngineError, "here: queue is full"),
])  # fmt: skip
def test_a_request_that_the_server_gives_up_is_refused_in_its_words(piece, kind, says):
    with pytest.raises(EngineError, match=says) as caught:
        told([piece])
    assert type(caught.value) is kind


def test_what_came_instead_of_a_stream_is_shown():
    held = HeldTokens("here", 4)
    assert not list(held.feed(b"<html>Log in</html>\n")) and "begins with '<html>Log in</html>'" in held.cut_words()
    assert (
        not list(held.feed(chunk([1])))
        and held.cut_words() == "the stream ended after 1 tokens without a finish reason"
    )


def test_spans_give_each_token_its_version():
    spans = [TokenSpan(version="3", start=0, end=2), TokenSpan(version="4", start=2, end=3)]
    assert versions_of(spans, 3, "here").tolist() == [3, 3, 4]
    assert versions_of([], 0, "here").tolist() == []


def test_lines_survive_any_cut_of_the_stream_and_an_endless_one_is_an_error(monkeypatch):
    stream = b": comment\r\n\n".join(
        [chunk([1], 1), chunk([1, 2], 2).replace(b"\n", b"\r\n"), chunk([1, 2, 3], 3, finish="length")]
    )
    stream += b"data: [DONE]\n\n"
    for size in (1, 2, 3, 7, 1000):
        assert told([stream[i : i + size] for i in range(0, len(stream), size)])[0] == [1, 2, 3]
    monkeypatch.setattr(wire, "MAX_LINE_BYTES", 100)
    with pytest.raises(EngineError, match="longer than 100 bytes"):
        told([b"data: aaaa"] * 20)


def test_what_a_server_says_of_its_cache_and_drafts_is_of_ended_requests():
    facts: dict[str, Any] = {
        "prompt_tokens": 100, "cached_tokens": 60, "spec_verify_ct": 10, "spec_num_proposed_drafts": 50,
        "spec_num_correct_drafts": 30,
    }  # fmt: skip
    held = HeldTokens("here", 4)
    assert not list(held.feed(chunk([2], **facts))) and held.usage == EngineUsage()
    assert list(held.feed(chunk([2], finish="stop", **facts)))
    assert held.usage == EngineUsage(
        prompt_tokens=100, cached_tokens=60, drafted_tokens=50, accepted_tokens=30, verified_steps=10, verified_tokens=1
    )
    lies = HeldTokens("here", 4)
    assert (
        list(lies.feed(chunk([2], finish="stop", prompt_tokens=-5, cached_tokens=1 << 70)))
        and lies.usage == EngineUsage()
    )
    total = held.usage + EngineUsage(prompt_tokens=300)
    assert total.rates_since(EngineUsage()) == {
        "rollout/prefix_cache_hit_rate": 0.15, "rollout/draft_acceptance_rate": 0.6, "rollout/draft_accepted_length": 0.1,
    }  # fmt: skip
    assert total.rates_since(total) == {}, "nothing ended since"
    assert EngineUsage().rates_since(total) == {}, "a server left with its sums"


@pytest.mark.parametrize(("answer", "names_it"), [
    ({"success": True, "message": "Success Weight version updated to 12."}, True),
    ({"success": True, "message": "Weight version updated to 12", "new_version": "12"}, True),
    ({"success": True, "message": "Success Weight version updated to 120."}, False),
    ({"success": True, "message": "Success Weight version updated to 1."}, False),
    ({"success": True, "message": "Succeeded to update parameter online."}, False),
    ({"success": True, "message": None}, False), ({}, False),
])  # fmt: skip
def test_only_an_answer_that_names_the_version_saves_the_question(answer: dict[str, object], names_it: bool):
    assert announces(answer, 12) is names_it


def test_unknown_versions_are_not_numbers():
    assert [version_number(v) for v in ("7", 7, "default", None, "")] == [7, 7, NO_VERSION, NO_VERSION, NO_VERSION]
    beyond = ("-7", str(1 << 31), "9" * 30, "9" * 10_000)
    assert {version_number(v) for v in beyond} == {NO_VERSION}, "no stamp of a token"
