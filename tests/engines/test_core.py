"""The synchronous core: endings, pauses, seeds, deltas, hostile input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from myxa.core.errors import EngineError, RequestRefused

END_ID = 257


@pytest.fixture
def events(result):
    """Takes the core's events as {owner: [news]}."""

    def take(core):
        found: dict = {}
        for event in core.take_events():
            found.setdefault(event.owner, []).append(event.news)
        return found

    return take


def finish(core, events, found=None):
    found = found if found is not None else {}
    while core.has_work:
        core.step()
        for owner, news in events(core).items():
            found.setdefault(owner, []).extend(news)
    return found


# -- endings -------------------------------------------------------------------------------------------------------


def test_stop_tokens_end_a_request_and_are_its_last_token(folders, make_core, run_core, ask):
    core = make_core(folders[0], num_slots=64)
    requests = [ask(f"e{i}", max_new_tokens=100) for i in range(64)]
    requests += [ask(f"s{i}", max_new_tokens=100, stop_token_ids=tuple(range(64))) for i in range(64)]
    requests += [ask(f"i{i}", max_new_tokens=100, ignore_eos=True) for i in range(64)]
    results = run_core(core, requests)
    for name, got in results.items():
        stops = {"e": {END_ID}, "s": {END_ID, *range(64)}, "i": set()}[name[0]]
        if got.finish == "stop":
            assert got.matched == got.ids[-1] in stops
        else:
            assert got.finish == "length"
            assert got.matched is None
            assert len(got.ids) == 100
        assert not stops & set(got.ids[:-1].tolist())
    assert all(results[f"s{i}"].finish == "stop" for i in range(64))
    assert any(results[f"e{i}"].finish == "stop" for i in range(64))
    assert all(results[f"i{i}"].finish == "length" for i in range(64))
    assert any(END_ID in results[f"i{i}"].ids for i in range(64))


def test_many_distinct_stop_sets_are_kept_apart(folders, make_core, run_core, ask):
    """More sets than the table holds, with more requests than slots: every row still stops at its own token only."""
    requests = [ask(f"r{i}", max_new_tokens=60, stop_token_ids=(i,)) for i in range(200)]
    results = run_core(make_core(folders[0], num_slots=9), requests)
    for i in range(200):
        got = results[f"r{i}"]
        assert not {i, END_ID} & set(got.ids[:-1].tolist())
        assert (got.finish == "stop") == (got.ids[-1] in (i, END_ID))


def test_the_context_may_be_filled_to_the_last_token(folders, make_core, run_core, ask):
    results = run_core(
        make_core(folders[0]), [ask("full", 100, max_new_tokens=28, ignore_eos=True), ask("one", 127, max_new_tokens=1)]
    )
    assert len(results["full"].ids) == 28
    assert len(results["one"].ids) == 1


@pytest.mark.parametrize(
    ("prompt", "sampling", "says"),
    [
        (101, {"max_new_tokens": 28}, r"101 prompt tokens and max_new_tokens 28 make 129.*context is 128 -- .*to 27"),
        (500, {"max_new_tokens": 1}, r"500 prompt tokens"),
        ([], {}, "the prompt is empty"),
        ([1, 320], {}, r"token id 320 is outside the vocabulary \[0, 320\)"),
        ([-1, 5], {}, "token id -1"),
        (4, {"max_new_tokens": 0}, "max_new_tokens is 0"),
        (4, {"max_new_tokens": -5}, "max_new_tokens is -5"),
        (4, {"temperature": -0.1}, "temperature is -0.1"),
        (4, {"temperature": float("nan")}, "temperature is nan"),
        (4, {"temperature": float("inf")}, "temperature is inf"),
        (4, {"top_p": 0.0}, "top_p is 0.0"),
        (4, {"top_p": 1.5}, "top_p is 1.5"),
        (4, {"top_k": 0}, "top_k is 0"),
        (4, {"stop_token_ids": (5, 999)}, "stop token id 999"),
    ],
)
def test_requests_that_cannot_be_served_are_refused_with_numbers(
    prompt, sampling, says, folders, make_core, ask, events
):
    core = make_core(folders[0])
    core.submit(ask("bad", prompt, **({"max_new_tokens": 5} | sampling)), "owner")
    (news,) = events(core)["owner"]
    assert isinstance(news, RequestRefused)
    with pytest.raises(RequestRefused, match=says):
        raise news
    assert news.remedy
    assert not core.has_work


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("top_k", 2**31),
        ("top_k", 2**63),
        ("top_k", 2**70),
        ("max_new_tokens", 2**63),
        ("temperature", 1e-300),
        ("temperature", 1e308),
        ("repetition_penalty", 1e-300),
        ("repetition_penalty", float("nan")),
        ("frequency_penalty", float("nan")),
        ("presence_penalty", 1e308),
        ("top_p", float("nan")),
        ("min_p", float("nan")),
        ("stop_token_ids", (2**63,)),
    ],
)
def test_e03_values_beyond_what_the_engine_computes_with_end_their_request_only(
    key, value, folders, make_core, run_core, ask, events
):
    core = make_core(folders[0])
    core.submit(ask("bad", 4, **({"max_new_tokens": 5} | {key: value})), "owner")
    (news,) = events(core)["owner"]
    assert isinstance(news, RequestRefused)
    assert len(run_core(core, [ask("good", 4, max_new_tokens=3, ignore_eos=True)])["good"].ids) == 3


@pytest.mark.parametrize(
    "sampling",
    [
        {"top_k": 2**31 - 1},
        {"temperature": 1e-6},
        {"temperature": 1e6},
        {"repetition_penalty": 1e-6},
        {"top_p": 1e-30},
        {"min_p": 1.0},
        {"seed": 2**64},
        {"seed": -1},
    ],
)
def test_e03_values_at_the_bounds_are_served(sampling, folders, make_core, run_core, ask):
    asked = ask("edge", 4, max_new_tokens=3, ignore_eos=True, **sampling)
    assert len(run_core(make_core(folders[0]), [asked])["edge"].ids) == 3


class Panic(BaseException):
    """As libraries in Rust raise it."""


@pytest.mark.parametrize("kind", [RuntimeError, MemoryError, Panic])
def test_e03_a_request_that_fails_in_a_step_ends_and_the_others_go_on(kind, folders, make_core, run_core, ask, events):
    """The text of the third token of the request with a stop string cannot be told."""

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
    found = finish(core, events)
    assert isinstance(found["bad"][-1], EngineError)
    assert "no such text" in str(found["bad"][-1])
    for name in ("before", "after"):
        ids = np.concatenate([delta.output_ids for delta in found[name]])
        assert ids.tolist() == wanted[name].ids.tolist()
        assert found[name][-1].finish == "length"
    assert run_core(core, [good("before")])["before"].ids.tolist() == wanted["before"].ids.tolist()


def test_e03_a_model_that_computes_nothing_breaks_the_engine(folders, make_core, ask):
    """No request is to blame, so that the run must hear of it."""
    core = make_core(folders[0])
    core.submit(ask("one", 4, max_new_tokens=3), "owner")
    core._weights = None
    with pytest.raises(AttributeError):
        core.step()


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": "hot"},
        {"temperature": None},
        {"top_k": 1.5},
        {"top_p": True},
        {"max_new_tokens": "8"},
        {"seed": "x"},
        {"seed": 2**70},
        {"stop": ("\ud800",)},
        {"stop": (5,)},
        {"stop": "text"},
        {"stop": ("x",) * 65},
        {"stop_token_ids": 7},
        {"stop_token_ids": ("a",)},
        {"stop_token_ids": (5,) * 2000},
    ],
)
def test_e03_values_of_another_type_end_their_request_only(values, folders, make_core, run_core, ask, events):
    core = make_core(folders[0])
    core.submit(ask("bad", 4, **({"max_new_tokens": 5} | values)), "owner")
    (news,) = events(core)["owner"]
    assert isinstance(news, RequestRefused)
    assert news.remedy
    assert len(run_core(core, [ask("good", 4, max_new_tokens=3, ignore_eos=True)])["good"].ids) == 3


def test_strange_arrays_and_names_are_refused(folders, make_core, ask, events):
    from myxa.core.messages import SamplingParams
    from myxa.core.protocols import GenerateRequest

    core = make_core(folders[0])
    strange: list[tuple[str, Any]] = [
        ("a", np.zeros((2, 2), np.int32)), ("b", np.zeros(3, np.float32)), ("", np.ones(3, np.int32)),
    ]  # fmt: skip
    for name, ids in strange:
        core.submit(GenerateRequest(request_id=name, input_ids=ids, sampling=SamplingParams(max_new_tokens=1)), "x")
    core.submit(ask("twin", max_new_tokens=5), "x")
    core.submit(ask("twin", max_new_tokens=5), "y")
    found = events(core)
    assert [type(n) for n in found["x"]] == [RequestRefused] * 3
    assert "is running already" in str(found["y"][0])
    core.abort()
    events(core)
    core.submit(ask("twin", max_new_tokens=5), "z")
    assert events(core) == {}, "the name is free again"


# -- seeds ---------------------------------------------------------------------------------------------------------


def test_a_seeded_request_is_the_same_alone_and_in_a_crowd(folders, make_core, run_core, ask):
    wanted = ask("seeded", 20, max_new_tokens=50, ignore_eos=True, seed=42, temperature=1.1, top_p=0.95)
    alone = run_core(make_core(folders[0], seed=1), [wanted])["seeded"]
    crowd = [ask(f"c{i}", 3 + i, max_new_tokens=4 + 3 * i) for i in range(30)]
    crowded = run_core(make_core(folders[0], num_slots=11, seed=2), [*crowd[:15], wanted, *crowd[15:]])["seeded"]
    assert np.array_equal(alone.ids, crowded.ids)
    other = run_core(make_core(folders[0]), [ask("seeded", 20, max_new_tokens=50, ignore_eos=True, seed=43)])["seeded"]
    assert not np.array_equal(alone.ids, other.ids)


def test_unseeded_requests_depend_on_the_engines_seed(folders, make_core, run_core, ask):
    requests = [ask(f"r{i}", list(range(10)), max_new_tokens=20, ignore_eos=True) for i in range(4)]

    def ids(seed: int) -> list[tuple[int, ...]]:
        return [tuple(r.ids) for r in run_core(make_core(folders[0], seed=seed), requests).values()]

    assert ids(5) == ids(5)
    assert ids(5) != ids(6)
    assert len(set(ids(5))) == 4


# -- abort, continuation, pauses -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [{"seed": 7, "temperature": 1.2}, {"temperature": 0.0}])
def test_abort_and_continuation_equal_the_uninterrupted_run(
    sampling, folders, make_core, run_core, ask, events, result
):
    request = ask("whole", 12, max_new_tokens=40, ignore_eos=True, **sampling)
    whole = run_core(make_core(folders[0]), [request])["whole"]
    core = make_core(folders[0])
    core.submit(request, "first")
    for _ in range(17):
        core.step()
    core.abort()
    part = result(events(core)["first"])
    assert part.finish == "abort"
    assert len(part.ids) == 17, "every token drawn before the abort comes with its end"
    context = np.concatenate([request.input_ids, part.ids])
    core.submit(ask("rest", context, max_new_tokens=40 - len(part.ids), ignore_eos=True, **sampling), "second")
    rest = result(finish(core, events)["second"])
    assert np.array_equal(np.concatenate([part.ids, rest.ids]), whole.ids)
    assert np.abs(np.concatenate([part.logprobs, rest.logprobs]) - whole.logprobs).max() <= 1e-5


def test_abort_of_one_leaves_the_others_alone(folders, make_core, run_core, ask, events, result):
    requests = [ask(f"r{i}", 6, max_new_tokens=30, ignore_eos=True, seed=i) for i in range(8)]
    plain = run_core(make_core(folders[0], num_slots=5), requests)
    core = make_core(folders[0], num_slots=5)
    for request in requests:
        core.submit(request, request.request_id)
    for _ in range(4):
        core.step()
    core.abort(lambda running: running.request_id in ("r1", "r6"))
    found = events(core)
    assert result(found["r1"]).finish == "abort"
    assert len(result(found["r1"]).ids) == 4
    assert result(found["r6"]).finish == "abort"
    assert len(result(found["r6"]).ids) == 0, "it was still waiting"
    finish(core, events, found)
    for name in ("r0", "r2", "r3", "r4", "r5", "r7"):
        assert np.array_equal(result(found[name]).ids, plain[name].ids)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_pause_stands_still_and_loses_nothing(mode, folders, make_core, run_core, ask, events, result):
    requests = [ask(f"r{i}", 6, max_new_tokens=25, ignore_eos=True, seed=i) for i in range(6)]
    plain = run_core(make_core(folders[0], num_slots=4), requests)
    core = make_core(folders[0], num_slots=4)
    for request in requests[:5]:
        core.submit(request, request.request_id)
    core.step()
    core.step()
    core.pause(mode)
    found = events(core)
    assert all(len(result(found[f"r{i}"]).ids) == 2 for i in range(4)), "tokens so far are told"
    core.submit(requests[5], "r5")
    assert not core.has_work
    assert core.step() == 0
    assert (core.num_running, core.num_waiting) == ((4, 2) if mode == "in_place" else (0, 6))
    core.resume()
    finish(core, events, found)
    for name, wanted in plain.items():
        assert np.array_equal(result(found[name]).ids, wanted.ids)
        assert np.abs(result(found[name]).logprobs - wanted.logprobs).max() <= 1e-5


def test_a_pause_with_abort_ends_everything(folders, make_core, ask, events, result):
    core = make_core(folders[0], num_slots=2)
    for i in range(4):
        core.submit(ask(f"r{i}", max_new_tokens=25, ignore_eos=True), i)
    core.step()
    core.pause("abort")
    found = {owner: result(news) for owner, news in events(core).items()}
    assert {owner: (r.finish, len(r.ids)) for owner, r in found.items()} == {
        0: ("abort", 1), 1: ("abort", 1), 2: ("abort", 0), 3: ("abort", 0),
    }  # fmt: skip
    assert (core.num_running, core.num_waiting) == (0, 0)


def test_a_swap_tells_all_old_tokens_first_and_stamps_the_next_one(folders, make_core, ask, events, load, result):
    core = make_core(folders[0], stream_interval=0)
    core.submit(ask("r", max_new_tokens=20, ignore_eos=True), "r")
    for _ in range(5):
        core.step()
    assert events(core) == {}, "with interval 0 tokens come at the end only"
    core.swap(load(folders[1]), 1, "in_place")
    (before,) = events(core)["r"]
    assert before.versions.tolist() == [0] * 5
    core.swap(load(folders[2]), 7, "in_place")
    assert events(core) == {}
    after = result(finish(core, events)["r"])
    assert after.versions.tolist() == [7] * 15


@pytest.mark.parametrize(("interval", "sizes"), [(1, [1] * 10), (4, [4, 4, 2]), (0, [10])])
def test_deltas_come_every_so_many_tokens(interval, sizes, folders, make_core, run_core, ask):
    core = make_core(folders[0], stream_interval=interval)
    got = run_core(core, [ask("r", max_new_tokens=10, ignore_eos=True)])["r"]
    assert [len(d.output_ids) for d in got.deltas] == sizes


# -- broken weights ------------------------------------------------------------------------------------------------


def test_nan_weights_fail_their_requests_and_do_not_linger(folders, make_core, run_core, ask, events, load):
    core = make_core(folders[0])
    for i in range(3):
        core.submit(ask(f"r{i}", 10, max_new_tokens=30, ignore_eos=True), i)
    core.step()
    broken = load(folders[1])
    with torch.no_grad():
        broken.layers[0].gate_up[3, 5] = float("nan")
    core.swap(broken, 1, "in_place")
    events(core)
    core.step()
    for news in events(core).values():
        (error,) = news
        assert isinstance(error, EngineError)
        assert "weight version 1 are not finite after 11 tokens" in str(error)
    assert not core.has_work
    core.swap(load(folders[0]), 2, "in_place")
    longer = [ask(f"l{i}", 40, max_new_tokens=5, seed=i) for i in range(4)] + [ask("s", 3, max_new_tokens=60, seed=9)]
    again, fresh = run_core(core, longer), run_core(make_core(folders[0]), longer)
    for name, got in again.items():
        assert np.array_equal(got.ids, fresh[name].ids)
        assert np.isfinite(got.logprobs).all()
