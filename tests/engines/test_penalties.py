"""Penalties, least lengths and stop strings in the embedded engine: against the long way round, over every interruption."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from myxa.actors.models.tokenizer import load_tokenizer
from myxa.core.errors import RequestRefused
from myxa.core.sampling import StopStrings

END_ID = 257
WISHES = {
    "repetition": {"repetition_penalty": 1.8},
    "frequency": {"frequency_penalty": 1.5},
    "presence": {"presence_penalty": -1.2},
    "all": {"repetition_penalty": 0.6, "frequency_penalty": -0.7, "presence_penalty": 1.1, "temperature": 0.7},
}


def penalised_logprobs(judge, request, ids):
    """Log-prob of each token, its logits penalised for the tokens of the answer before it."""
    sampling, found = request.sampling, []
    for place, row in enumerate(judge.logits(request.input_ids, ids)):
        for token in set(ids[:place].tolist()):
            logit = float(row[token])
            logit -= sampling.frequency_penalty * ids[:place].tolist().count(token) + sampling.presence_penalty
            factor = sampling.repetition_penalty
            row[token] = logit * factor if logit < 0 else logit / factor
        if place < sampling.min_new_tokens:
            row[[END_ID, *sampling.stop_token_ids]] = -torch.inf
        found.append(float((row / sampling.temperature).log_softmax(-1)[ids[place]]))
    return np.asarray(found)


@pytest.mark.parametrize("retracts", [False, True])
def test_logprobs_are_of_the_penalised_distribution_and_tokens_too(folders, make_core, run_core, ask, judge, retracts):
    requests = [ask(name, 8, max_new_tokens=60, ignore_eos=True, seed=3, **wish) for name, wish in WISHES.items()]
    requests += [ask(f"plain{i}", 8, max_new_tokens=20 + 9 * i, seed=i) for i in range(4)]  # rows move when they end
    core = make_core(folders[0])

    def before_step(number):
        if retracts and number == 25:
            core.retract()

    results = run_core(core, requests, before_step)
    for request in requests:
        got = results[request.request_id]
        exact = penalised_logprobs(judge(folders[0]), request, got.ids)
        assert np.abs(exact - got.logprobs).max() <= 2e-5, request.request_id
    plain = run_core(make_core(folders[0]), [ask("repetition", 8, max_new_tokens=60, ignore_eos=True, seed=3)])
    assert len(set(results["repetition"].ids.tolist())) > len(set(plain["repetition"].ids.tolist()))


def test_end_tokens_wait_for_the_least_length(folders, make_core, run_core, ask, judge):
    requests = [
        ask(f"m{i}", max_new_tokens=80, min_new_tokens=40, seed=i, stop_token_ids=tuple(range(32))) for i in range(24)
    ]
    results = run_core(make_core(folders[0], num_slots=24), requests)
    assert all(len(got.ids) >= 40 for got in results.values())
    assert not {END_ID, *range(32)} & {i for got in results.values() for i in got.ids[:40].tolist()}
    assert any(got.finish == "stop" for got in results.values()), "after that they may be drawn"
    got = results["m0"]
    assert np.abs(penalised_logprobs(judge(folders[0]), requests[0], got.ids) - got.logprobs).max() <= 2e-5


@pytest.mark.parametrize("retracts", [False, True])
def test_a_stop_string_ends_an_answer_with_the_token_that_completes_it(folders, make_core, run_core, ask, retracts):
    tokenizer = load_tokenizer(folders[0])

    def decode(ids):
        return tokenizer.decode(ids, skip_special=False)

    def core():
        return make_core(folders[0], decode=decode)

    free = [ask(f"s{i}", max_new_tokens=80, ignore_eos=True, seed=i) for i in range(12)]
    whole = run_core(core(), free)
    texts = [decode(whole[r.request_id].ids.tolist()) for r in free]
    found = [
        next(t[k : k + 3] for k in range(20, 70) if "\N{REPLACEMENT CHARACTER}" not in t[k : k + 3]) for t in texts
    ]
    asked = [ask(f"s{i}", max_new_tokens=80, ignore_eos=True, seed=i, stop=("never said", found[i])) for i in range(12)]
    interrupted = core()

    def before_step(number):
        if retracts and number in (15, 30):
            interrupted.retract()

    results = run_core(interrupted, asked, before_step)
    for number, request in enumerate(asked):
        got, everything = results[request.request_id], whole[request.request_id].ids
        assert np.array_equal(got.ids, everything[: len(got.ids)])
        assert (got.finish, got.matched, got.matched_text) == ("stop", None, found[number])
        assert found[number] in decode(got.ids.tolist())
        assert found[number] not in decode(got.ids[:-1].tolist())


def test_without_a_tokenizer_stop_strings_are_refused(folders, make_core, run_core, ask):
    with pytest.raises(RequestRefused, match=r"request 's' has stop strings, and there is no tokenizer"):
        run_core(make_core(folders[0]), [ask("s", max_new_tokens=8, stop=("x",))])


@pytest.mark.parametrize(
    ("wish", "says"),
    [
        ({"min_p": 1.5}, "min_p is 1.5"), ({"min_p": float("nan")}, "min_p is nan"),
        ({"min_new_tokens": -1}, "min_new_tokens is -1"), ({"min_new_tokens": 9, "max_new_tokens": 8}, "is 9"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0"), ({"repetition_penalty": 2.1}, "penalty is 2.1"),
        ({"frequency_penalty": -2.5}, "frequency_penalty is -2.5"), ({"presence_penalty": 3.0}, "presence_penalty is 3"),
        ({"stop": ("",)}, "stop string '' is empty"), ({"stop": tuple(map(str, range(65)))}, "65 stop strings"),
        ({"stop": ("x" * 2000,)}, "longer than 1024 bytes"),
    ],
)  # fmt: skip
def test_wishes_that_mean_nothing_are_refused(folders, make_core, run_core, ask, wish, says):
    with pytest.raises(RequestRefused, match=says):
        run_core(make_core(folders[0], decode=lambda ids: ""), [ask("s", **({"max_new_tokens": 10} | wish))])


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
