"""The contract's part about how tokens are drawn: penalties, least lengths, stop strings, min-p, seeds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tests.engines.contract import Result, Subject, ask, collect, endless, scenario, scenario_with

from myxa.actors.engines.sglang.server_args import SglangNeeds
from myxa.actors.models.tokenizer import load_tokenizer
from myxa.core.messages import SamplingParams
from myxa.core.protocols import GenerateRequest

TEXTS = SglangNeeds(tokenizer=True)
LONG = 32
HALF = "\N{REPLACEMENT CHARACTER}"
"""Stands in texts for half a character."""
ENDS = tuple(range(32))
"""Ids that stop some requests, beside the model's own; one of ten draws of a random model is of these."""
WISHES: dict[str, dict[str, float]] = {
    "repetition": {"repetition_penalty": 1.8},
    "frequency": {"frequency_penalty": -1.5},
    "presence": {"presence_penalty": 1.2, "temperature": 0.7},
    "all": {"repetition_penalty": 0.6, "frequency_penalty": -0.7, "presence_penalty": 1.1},
    "greedy": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "temperature": 0.0},
}
ORDERS = ("fpr", "frp", "prf", "rfp")
"""Frequency, presence and repetition; the first two only add up."""
Counted = Callable[[int], Sequence[int]]
"""Tokens that count against the token at a place of the answer."""


def penalised(
    logits: np.ndarray, request: GenerateRequest, counted: Counted, ends: Sequence[int] = (), order: str = ORDERS[0]
) -> np.ndarray:
    """float64 [R, vocabulary]: log-probs by the long way round, one token and one penalty after the other. `ends`: ids
    that are kept away before the least length."""
    sampling, found = request.sampling, np.array(logits, dtype=np.float64)
    for place, row in enumerate(found):
        before = list(counted(place))
        for token in set(before):
            for step in order:
                row[token] = one_penalty(step, float(row[token]), before.count(token), sampling)
        if place < sampling.min_new_tokens:
            row[list(ends)] = -np.inf
        row /= sampling.temperature or 1.0
        row -= row.max() + np.log(np.exp(row - row.max()).sum())
    return found


def one_penalty(step: str, logit: float, count: int, sampling: SamplingParams) -> float:
    if step == "r":
        return logit * sampling.repetition_penalty if logit < 0 else logit / sampling.repetition_penalty
    return logit - (sampling.frequency_penalty * count if step == "f" else sampling.presence_penalty)


def nobody(place: int) -> Sequence[int]:
    return ()


def counts(subject: Subject, last_of_prompt: int, ids: np.ndarray) -> Counted:
    """What counts for a request that nobody joins."""
    if subject.penalties != "late":
        return lambda place: ids[:place].tolist()
    return lambda place: [last_of_prompt, *ids[: place - 1].tolist()] if place else []


def drawn(rows: np.ndarray, got: Result) -> np.ndarray:
    """Of each token that was drawn."""
    return rows[np.arange(len(got.ids)), got.ids]


def off(expected: np.ndarray, got: Result) -> float:
    return float(np.abs(expected - got.logprobs).max())


def logits_of(subject: Subject, request: GenerateRequest, got: Result) -> np.ndarray:
    return subject.score(subject.versions[0]).logits(request.input_ids, got.ids)


@scenario
async def penalties_are_of_the_answers_tokens_and_logprobs_are_told_after_them(subject: Subject) -> None:
    def wishes(prefix: str) -> list[GenerateRequest]:
        usual = {"max_new_tokens": LONG, "ignore_eos": True}
        return [ask(prefix + name, 8, **(usual | wish)) for name, wish in WISHES.items()]

    company = [ask(f"c{i}", 5 + i, max_new_tokens=4 + 7 * i, ignore_eos=True) for i in range(4)]  # comes, and goes
    requests = wishes("")
    crowd = await asyncio.gather(*(collect(subject.engine, r) for r in [*requests, *company]))
    for request, got in zip(company, crowd[len(requests) :], strict=True):
        rows = penalised(logits_of(subject, request, got), request, nobody)
        assert off(drawn(rows, got), got) <= subject.tolerance, "penalised for what others want"
    results = crowd[: len(requests)]
    if subject.penalties == "late":  # what counts in a crowd hangs on who joins when
        requests = wishes("a")
        results = [await collect(subject.engine, request) for request in requests]
    possible = set(ORDERS if subject.penalties == "any order" else ORDERS[:1])
    for request, got in zip(requests, results, strict=True):
        logits = logits_of(subject, request, got)
        counted = counts(subject, int(request.input_ids[-1]), got.ids)
        tables = {order: penalised(logits, request, counted, order=order) for order in sorted(possible)}
        possible = {order for order, rows in tables.items() if off(drawn(rows, got), got) <= subject.tolerance}
        assert possible, f"{request.request_id}: of another distribution"
        plain, told = (drawn(rows, got) for rows in (penalised(logits, request, nobody), tables[min(possible)]))
        assert np.abs(told - got.logprobs).mean() < np.abs(plain - got.logprobs).mean() / 2, "told without them"
        if request.sampling.temperature == 0:
            best = tables[min(possible)].max(-1)
            assert (got.logprobs >= best - 2 * subject.tolerance).all(), "not the best after the penalties"


@scenario
async def an_end_as_the_last_token_allowed_is_told_by_one_reason_or_the_other(subject: Subject) -> None:
    """SGLang 0.5.17 looks at the limit first; the rollout looks at the tokens, and calls it an end (`Episode`)."""
    whole = await collect(subject.engine, ask("w", 8, max_new_tokens=8, temperature=0.0, ignore_eos=True))
    end = int(whole.ids[-1])
    num_tokens = whole.ids.tolist().index(end) + 1
    prompt = ask("w", 8).input_ids
    wish = ask("e", prompt, max_new_tokens=num_tokens, temperature=0.0, stop_token_ids=(end,))
    got = await collect(subject.engine, wish)
    assert np.array_equal(got.ids, whole.ids[:num_tokens])
    is_end = (got.finish, got.matched) == ("stop", end)
    assert is_end or (subject.penalties != "exact" and (got.finish, got.matched) == ("length", None))


@scenario_with(TEXTS)
async def no_end_is_drawn_before_the_least_length(subject: Subject) -> None:
    """Neither ids that the request names nor those of the model's configs; what stops nothing is kept away too."""
    eos = load_tokenizer(subject.versions[0]).eos_token_ids
    assert len(eos) > 1
    sampling: dict[str, Any] = {"max_new_tokens": LONG, "min_new_tokens": LONG // 2, "stop_token_ids": ENDS}
    requests = [ask(f"m{i}", **sampling) for i in range(12)]
    requests += [ask(f"i{i}", **sampling, ignore_eos=True) for i in range(3)]
    results = await asyncio.gather(*(collect(subject.engine, r) for r in requests))
    for request, got in zip(requests, results, strict=True):
        assert len(got.ids) >= LONG // 2
        assert not {*eos, *ENDS} & set(got.ids[: LONG // 2].tolist())
        rows = penalised(logits_of(subject, request, got), request, nobody, [*eos, *ENDS])
        assert off(drawn(rows, got), got) <= subject.tolerance
    assert any(got.finish == "stop" and got.matched == got.ids[-1] for got in results), "after that they may be drawn"


@scenario_with(TEXTS)
async def a_stop_string_ends_the_answer_with_the_token_that_completes_it(subject: Subject) -> None:
    """It spans tokens, special ones too, and may end inside of one; the first to be completed counts."""
    tokenizer = load_tokenizer(subject.versions[0])

    def text(ids: np.ndarray) -> str:
        return tokenizer.decode(ids.tolist(), skip_special=False)

    def wish(number: int, **more: Any) -> GenerateRequest:  # greedy, and hardly a token twice
        prompt = ask(f"s{number}", 8).input_ids
        return endless(f"{number}", prompt, max_new_tokens=LONG, presence_penalty=2.0, frequency_penalty=2.0, **more)

    free = [await collect(subject.engine, wish(number)) for number in range(4)]
    spans = [spans_in(whole.ids, text) for whole in free]
    assert all(len(found) > 1 for found in spans)
    assert any(text(free[n].ids[end - 1 : end])[-1] != string[-1] for n in range(4) for end, string in spans[n])
    for number, (whole, found) in enumerate(zip(free, spans, strict=True)):
        (end, string), (_, later) = found[0], found[-1]
        both = string[1:]  # the same token completes it, and the first of the list is told
        for stop, told in (
            (("never said", string), string), ((later, string), string), ((string, both), string), ((both, string), both),
        ):  # fmt: skip
            got = await collect(subject.engine, wish(number, stop=stop))
            assert np.array_equal(got.ids, whole.ids[:end]), "the token that completes it is the last one"
            assert (got.finish, got.matched, got.matched_text) == ("stop", None, told)
            assert off(whole.logprobs[:end], got) <= subject.tolerance
    got = await collect(subject.engine, wish(0, stop=("never said",)))
    assert (got.finish, got.matched_text) == ("length", "")
    assert np.array_equal(got.ids, free[0].ids)


def spans_in(ids: np.ndarray, text: Callable[[np.ndarray], str]) -> list[tuple[int, str]]:
    """Texts over three tokens that come once: the end of one, the whole next one and the beginning of a third; with the
    number of tokens up to and including that."""
    found: list[tuple[int, str]] = []
    for end in range(4, len(ids)):
        first, middle, last = (text(ids[at : at + 1]) for at in range(end - 3, end))
        string = first[-1:] + middle + last[:1]
        if HALF not in string and first and last and string[1:] not in text(ids[: end - 1]):
            found.append((end, string))
    return found


@scenario
async def min_p_keeps_to_tokens_that_are_nearly_as_likely_as_the_likeliest(subject: Subject) -> None:
    share = 0.5
    requests = [ask(f"p{i}", max_new_tokens=LONG, ignore_eos=True, min_p=share) for i in range(3)]
    requests += [ask("best", max_new_tokens=LONG, ignore_eos=True, min_p=1.0)]
    for request, got in zip(
        requests, await asyncio.gather(*(collect(subject.engine, r) for r in requests)), strict=True
    ):
        rows = penalised(logits_of(subject, request, got), request, nobody)
        assert off(drawn(rows, got), got) <= subject.tolerance, "log-probs are of all tokens, before the cut"
        least = rows.max(-1) + np.log(request.sampling.min_p)
        assert (drawn(rows, got) >= least - 2 * subject.tolerance).all()
        mass = np.where(rows >= least[:, None], np.exp(rows), 0).sum(-1)
        assert mass.prod() < 1e-6, "all of that would have been drawn without min_p too"


@scenario
async def requests_without_a_seed_are_drawn_independently(subject: Subject) -> None:
    prompt = ask("prompt", 8).input_ids
    requests = [ask(f"r{i}", prompt, max_new_tokens=LONG, ignore_eos=True) for i in range(4)]
    results = await asyncio.gather(*(collect(subject.engine, r) for r in requests))
    assert len({tuple(got.ids.tolist()) for got in results}) == len(results)


@scenario_with(SglangNeeds(seeds=True))
async def a_seed_draws_the_same_answer_again_and_another_seed_another(subject: Subject) -> None:
    prompt = ask("prompt", 8).input_ids

    def wish(name: str, seed: int, rest: Any = (), **more: Any) -> GenerateRequest:
        ids = np.concatenate([prompt, rest]).astype(np.int32)
        return ask(name, ids, **({"max_new_tokens": LONG - len(rest), "ignore_eos": True, "seed": seed} | more))

    seeds = (0, 1, 1 + 2**32, 2**63 - 1)
    alone = [await collect(subject.engine, wish(f"a{seed}", seed)) for seed in seeds]
    assert len({tuple(got.ids.tolist()) for got in alone}) == len(seeds)
    crowd = await asyncio.gather(*(collect(subject.engine, wish(f"c{seed}", seed)) for seed in seeds))
    for before, again in zip(alone, crowd, strict=True):
        assert np.array_equal(before.ids, again.ids)
    half = alone[0].ids[: LONG // 2]
    rest = await collect(subject.engine, wish("rest", seeds[0], half))
    assert np.array_equal(np.concatenate([half, rest.ids]), alone[0].ids), "numbers belong to places of the sequence"
    cut = [await collect(subject.engine, wish(f"cut{i}", 1, top_p=0.5, top_k=50)) for i in range(2)]
    assert np.array_equal(cut[0].ids, cut[1].ids)
