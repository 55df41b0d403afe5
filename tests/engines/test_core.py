"""The synchronous core where the contract does not look: refusals, seeds, failures in a step, deltas, broken weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.engines.contract import Result, ask

from myxa.actors.engines.embedded import core as embedded_core
from myxa.actors.engines.embedded.model import PrefillAttention
from myxa.actors.models.tokenizer import load_tokenizer
from myxa.core.errors import EngineError, RequestRefused
from myxa.core.messages import SamplingParams
from myxa.core.protocols import GenerateRequest
from myxa.core.sampling import StopStrings

END_ID = 257
NAN, INF = float("nan"), float("inf")


def take(core) -> dict[Any, list[Any]]:
    """The core's events as {owner: [news]}."""
    found: dict[Any, list[Any]] = {}
    for event in core.take_events():
        found.setdefault(event.owner, []).append(event.news)
    return found


def finish(core) -> dict[Any, list[Any]]:
    found: dict[Any, list[Any]] = {}
    while core.has_work:
        core.step()
        for owner, news in take(core).items():
            found.setdefault(owner, []).extend(news)
    return found


def test_each_row_stops_at_its_own_tokens_wherever_it_moves(folders, make_core, run_core):
    requests = [ask(f"r{i}", max_new_tokens=20, stop_token_ids=(i,)) for i in range(30)]
    for i, got in enumerate(run_core(make_core(folders[0], num_slots=9), requests).values()):
        assert not {i, END_ID} & set(got.ids[:-1].tolist())
        assert (got.finish == "stop") == (got.ids[-1] in (i, END_ID))


def test_the_context_may_be_filled_to_the_last_token(folders, make_core, run_core):
    wishes = [ask("full", 100, max_new_tokens=28, ignore_eos=True), ask("one", 127, max_new_tokens=1)]
    results = run_core(make_core(folders[0]), wishes)
    assert [len(results[name].ids) for name in ("full", "one")] == [28, 1]


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (101, {"max_new_tokens": 28}, "context is 128"), (500, {"max_new_tokens": 1}, "500 prompt tokens"), ([], {}, "empty"),
    ([1, 320], {}, "token id 320"), ([-1, 5], {}, "token id -1"),
    *((4, {key: value}, key) for key, values in {
        "max_new_tokens": (0, -5, 2**63, "8"), "temperature": (-0.1, NAN, INF, 1e-300, 1e308, "hot", None),
        "top_p": (0.0, 1.5, NAN, True), "top_k": (0, 2**31, 2**63, 2**70, 1.5), "min_p": (1.5, NAN),
        "min_new_tokens": (-1, 9), "repetition_penalty": (0.0, 2.1, 1e-300, NAN), "frequency_penalty": (-2.5, NAN),
        "presence_penalty": (3.0, 1e308), "seed": ("x", 2**70),
    }.items() for value in values),
    *((4, {"stop_token_ids": value}, "stop") for value in ((5, 999), (2**63,), 7, ("a",), (5,) * 2000)),
    *((4, {"stop": value}, "stop") for value in (
        ("",), tuple(map(str, range(65))), ("x" * 2000,), ("\ud800",), (5,), "text", ("x",) * 65)),
]  # fmt: skip


def test_e03_requests_that_cannot_be_served_end_alone_and_name_what_is_wrong(folders, make_core, run_core):
    core = make_core(folders[0], decode=lambda ids: "")
    for prompt, sampling, says in REFUSED:
        core.submit(ask("bad", prompt, **({"max_new_tokens": 5} | sampling)), "owner")
        (news,) = take(core)["owner"]
        assert isinstance(news, RequestRefused) and news.remedy, sampling
        assert says in str(news)
    strange: tuple[Any, ...] = (np.zeros((2, 2), np.int32), np.zeros(3, np.float32))
    for name, ids in (*(("a", one) for one in strange), ("", np.ones(3, np.int32))):
        core.submit(GenerateRequest(request_id=name, input_ids=ids, sampling=SamplingParams(max_new_tokens=1)), "x")
    assert [type(n) for n in take(core)["x"]] == [RequestRefused] * 3
    assert not core.has_work
    assert len(run_core(core, [ask("good", 4, max_new_tokens=3, ignore_eos=True)])["good"].ids) == 3


def test_a_name_is_taken_while_its_request_runs(folders, make_core):
    core = make_core(folders[0])
    for owner in "xy":
        core.submit(ask("twin", max_new_tokens=5), owner)
    assert [type(news) for news in take(core)["y"]] == [RequestRefused]
    core.abort()
    take(core)
    core.submit(ask("twin", max_new_tokens=5), "z")
    assert take(core) == {}, "the name is free again"


def test_e03_values_at_the_bounds_are_served(folders, make_core, run_core):
    bounds = ({"top_k": 2**31 - 1}, {"temperature": 1e-6}, {"temperature": 1e6}, {"repetition_penalty": 1e-6},
              {"top_p": 1e-30}, {"min_p": 1.0}, {"seed": 2**64 - 1}, {"seed": -1})  # fmt: skip
    requests = [ask(f"r{i}", 4, max_new_tokens=3, ignore_eos=True, **wish) for i, wish in enumerate(bounds)]
    results = run_core(make_core(folders[0]), requests)
    assert [len(got.ids) for got in results.values()] == [3] * len(bounds)


class Panic(BaseException):
    """As libraries in Rust raise it."""


@pytest.mark.parametrize("kind", [RuntimeError, MemoryError, Panic])
def test_e03_a_request_that_fails_in_a_step_ends_alone(kind, folders, make_core, run_core):
    """The text of the third token of the request with a stop string cannot be decoded."""

    def decode(ids):
        if len(ids) >= 3:
            raise kind("no such text")
        return ""

    def good(name):
        return ask(name, 5, max_new_tokens=12, ignore_eos=True, temperature=0)

    wanted = run_core(make_core(folders[0]), [good("before"), good("after")])
    core = make_core(folders[0], num_slots=4, decode=decode, stream_interval=4)
    bad = ask("bad", 4, max_new_tokens=20, ignore_eos=True, stop=("x",))
    for request in (good("before"), bad, good("after")):
        core.submit(request, request.request_id)
    found = finish(core)
    assert isinstance(found["bad"][-1], EngineError)
    assert "no such text" in str(found["bad"][-1])
    for name in ("before", "after"):
        assert Result(found[name]).ids.tolist() == wanted[name].ids.tolist()
    assert run_core(core, [good("before")])["before"].ids.tolist() == wanted["before"].ids.tolist()


def test_e03_a_prompt_that_does_not_fit_into_memory_ends_alone(folders, make_core, run_core, monkeypatch):
    class Small(PrefillAttention):
        def __init__(self, cache, rows, lengths):
            if max(lengths) > 20:
                raise MemoryError("no room")
            super().__init__(cache, rows, lengths)

    def good(name):
        return ask(name, 5, max_new_tokens=12, ignore_eos=True, temperature=0)

    wanted = run_core(make_core(folders[0]), [good("before"), good("after")])
    monkeypatch.setattr(embedded_core, "PrefillAttention", Small)
    for requests in (
        [good("before"), ask("bad", 30, max_new_tokens=4), good("after")],
        [ask("bad", 30, max_new_tokens=4)],
        [ask("bad", 30, max_new_tokens=4), ask("bad too", 31, max_new_tokens=4)],
    ):
        core = make_core(folders[0], num_slots=4)
        for request in requests:
            core.submit(request, request.request_id)
        found = finish(core)
        bad = {name for name in found if name.startswith("bad")}
        assert all(isinstance(found[name][-1], EngineError) and "no room" in str(found[name][-1]) for name in bad)
        for name in found.keys() - bad:
            assert Result(found[name]).ids.tolist() == wanted[name].ids.tolist()
    core.submit(good("before"), "before")
    assert Result(finish(core)["before"]).ids.tolist() == wanted["before"].ids.tolist()


def test_unseeded_requests_depend_on_the_engines_seed_and_seeded_ones_do_not(folders, make_core, run_core):
    requests = [ask(f"r{i}", list(range(10)), max_new_tokens=20, ignore_eos=True) for i in range(4)]
    seeded = ask("seeded", 20, max_new_tokens=20, ignore_eos=True, seed=42, temperature=1.1, top_p=0.95)

    def ids(seed: int) -> list[tuple[int, ...]]:
        return [tuple(r.ids) for r in run_core(make_core(folders[0], seed=seed), [*requests, seeded]).values()]

    five, six = ids(5), ids(6)
    assert five == ids(5)
    assert len({*five[:4], *six[:4]}) == 8
    assert five[4] == six[4]


@pytest.mark.parametrize(("interval", "sizes"), [(1, [1] * 10), (4, [4, 4, 2]), (0, [10])])
def test_deltas_come_every_so_many_tokens(interval, sizes, folders, make_core, run_core):
    core = make_core(folders[0], stream_interval=interval)
    got = run_core(core, [ask("r", max_new_tokens=10, ignore_eos=True)])["r"]
    assert [len(d.output_ids) for d in got.deltas] == sizes


def test_nan_weights_fail_their_requests_and_do_not_linger(folders, make_core, run_core, load):
    core = make_core(folders[0])
    for i in range(3):
        core.submit(ask(f"r{i}", 10, max_new_tokens=30, ignore_eos=True), i)
    core.step()
    broken = load(folders[1])
    with torch.no_grad():
        broken.layers[0].gate_up[3, 5] = NAN
    core.swap(broken, 1, "in_place")
    take(core)
    core.step()
    for news in take(core).values():
        (error,) = news
        assert isinstance(error, EngineError)
        assert "weight version 1" in str(error)
    assert not core.has_work
    core.swap(load(folders[0]), 2, "in_place")
    longer = [ask(f"l{i}", 40, max_new_tokens=5, seed=i) for i in range(4)] + [ask("s", 3, max_new_tokens=60, seed=9)]
    again, fresh = run_core(core, longer), run_core(make_core(folders[0]), longer)
    for name, got in again.items():
        assert np.array_equal(got.ids, fresh[name].ids)
        assert np.isfinite(got.logprobs).all()


def test_a_stop_string_is_found_across_retractions(folders, make_core, run_core):
    tokenizer = load_tokenizer(folders[0])

    def decode(ids):
        return tokenizer.decode(ids, skip_special=False)

    usual: dict[str, Any] = {"max_new_tokens": 80, "ignore_eos": True}
    whole = run_core(make_core(folders[0], decode=decode), [ask(f"s{i}", seed=i, **usual) for i in range(8)])
    texts = [decode(got.ids.tolist()) for got in whole.values()]
    found = [
        next(t[k : k + 3] for k in range(20, 70) if "\N{REPLACEMENT CHARACTER}" not in t[k : k + 3]) for t in texts
    ]
    core = make_core(folders[0], decode=decode)
    asked = [ask(f"s{i}", seed=i, stop=("never said", found[i]), **usual) for i in range(8)]
    results = run_core(core, asked, lambda number: core.retract() if number in (15, 30) else None)
    for (name, got), stop in zip(results.items(), found, strict=True):
        assert np.array_equal(got.ids, whole[name].ids[: len(got.ids)])
        assert (got.finish, got.matched, got.matched_text) == ("stop", None, stop)
        assert stop in decode(got.ids.tolist())
        assert stop not in decode(got.ids[:-1].tolist())


def letters(ids):
    return bytes(ids).decode(errors="replace")


def test_a_match_is_the_first_token_that_completes_any_string_whatever_was_seen_before():
    text = "one two € three".encode()
    for strings in (("two",), ("three", "two"), ("€",), ("wo €", "zz"), ("o",)):
        stops = StopStrings(strings, letters)
        ends = [end for end in range(1, len(text) + 1) if any(s in letters(text[:end]) for s in strings)]
        for seen in range(ends[0]):
            match = stops.match(text, seen)
            assert match is not None
            assert match.end == ends[0], (strings, seen)
            assert match.text in strings
        assert stops.match(text[: ends[0] - 1]) is None
    assert StopStrings((), letters).match(text) is None
