"""Experts that a server tells of its tokens: as bytes, over a whole episode, and from servers that lie."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tests.engines.test_sglang import DEADLINE_S, options
from tests.engines.test_sglang_wire import chunk
from tests.harness.fake_sglang import FakeSglang, experts_at, fake_sglang
from tests.harness.group_runner import runner_of
from tests.harness.waiting import until
from tests.workflows.test_episode import PROMPT, Letters, interrupted

from myxa.actors.engines.sglang.engine import SglangEngine
from myxa.actors.engines.sglang.wire import HeldTokens, ServerAnswer, attach_fault, routed_experts
from myxa.actors.ledger.file import decode_group, encode
from myxa.actors.models.tiny import make_tiny_model
from myxa.actors.models.tokenizer import load_tokenizer
from myxa.actors.rewards.rewarder import Rewarder
from myxa.actors.stream_checks import checked_rollout
from myxa.actors.workflows.episode import Episode, ModelAccess, split
from myxa.actors.workflows.pool import WorkflowPool
from myxa.actors.workflows.turn_renderer import TurnRenderer
from myxa.actors.workflows.worker_messages import PhaseLimits, WorkflowSpec
from myxa.core.config import RewardSettings
from myxa.core.errors import EngineError
from myxa.core.messages import Assignment, SamplingParams
from myxa.core.protocols import Delta
from myxa.core.samples import ExpertChoices, Sample, TrainSample

CHOICES = ExpertChoices(num_layers=3, layers=(1, 2), top_k=2, num_experts=8)


def as_sglang(rows: Any) -> str:
    """Its own way: an int32 tensor of its host cache, `item.numpy().tobytes()`, base64."""
    return base64.b64encode(torch.tensor(rows, dtype=torch.int32).numpy().tobytes()).decode("utf-8")


def told_by(server: int, first: int, end: int) -> list[list[list[int]]]:
    """Ids [end - first, layers with experts, top_k] of a `FakeSglang`."""
    return [experts_at(at, 3, 1, 2, 8, server)[1:] for at in range(first, end)]


@pytest.mark.parametrize(("num_experts", "row_bytes"), [(8, 4), (256, 4), (257, 8), (300, 8)])
def test_bytes_of_sglang_become_a_compact_row_per_token(num_experts: int, row_bytes: int):
    choices = ExpertChoices(3, (1, 2), 2, num_experts)
    cache = torch.zeros(5, 3, 2, dtype=torch.int32)
    cache[:, 1:] = torch.tensor([[num_experts - 1, 0], [3, num_experts - 2]])
    found = routed_experts(as_sglang(cache.tolist()), choices, 5)
    assert (found.dtype, found.shape) == (np.uint8, (5, row_bytes))
    assert choices.ids(found).tolist() == cache[:, 1:].tolist()
    assert routed_experts("", choices, 0).shape == (0, row_bytes)


GOOD = [[[0, 0], [1, 2], [3, 4]]] * 4


def changed(*place: int, value: int) -> str:
    rows = torch.tensor(GOOD, dtype=torch.int32)
    rows[place] = value
    return as_sglang(rows.tolist())


@pytest.mark.parametrize(
    ("told", "says"),
    [
        (None, r"0 characters, not the 128 of \[tokens, layers, top_k\] = \[4, 3, 2\]"), ("", "0 characters"),
        (7, "0 characters"), ([1], "0 characters"), (as_sglang(GOOD[:3]), "96 characters"),
        (as_sglang([*GOOD, GOOD[0]]), "160 characters"), (as_sglang([row[:2] for row in GOOD]), "64|88 characters"),
        ("!" * 128, "base64|Only"), ("é" * 128, "ascii|ASCII"), (as_sglang(GOOD)[:-1] + "\n", "base64|Only"),
        (changed(2, 1, 0, value=-1), r"an expert outside \[0, 8\)"), (changed(0, 2, 1, value=8), "an expert outside"),
        (changed(3, 1, 0, value=2), "one expert twice for token 3 in layer 1"),
        (as_sglang([[[0, 0]] * 3] * 4), "one expert twice for token 0 in layer 1: nothing was recorded there"),
    ],
)  # fmt: skip
def test_what_no_router_can_have_chosen_is_an_error_that_names_place_cause_and_remedy(told: Any, says: str):
    held = HeldTokens("http://h:1: request 'r'", 4, CHOICES, (1, 4))
    assert not list(held.feed(chunk([1], spans=[["4", 0, 1]]))), "tokens wait for their experts"
    with pytest.raises(EngineError, match=says) as caught:
        list(held.feed(chunk([1, 2], finish="stop", spans=[["4", 0, 2]], routed_experts=told, prompt_tokens=4)))
    assert "http://h:1: request 'r': routed_experts, of 2 tokens after 4 from token 1 on" in caught.value.message
    assert "--enable-return-routed-experts" in caught.value.remedy


@pytest.mark.parametrize(("new_ids", "told", "num_kept"), [
    ([1, 2], as_sglang(GOOD), 2), ([1, 2], None, 0), ([1, 2], as_sglang(GOOD[:2]), 0), ([], as_sglang(GOOD), 0),
])  # fmt: skip
def test_of_an_aborted_answer_stays_what_has_its_experts(new_ids: list[int], told: Any, num_kept: int):
    """Of a prompt that is not through no token has any."""
    held = HeldTokens("here", 4, CHOICES, (1, 4))
    (delta,) = held.feed(chunk(new_ids, finish="abort", routed_experts=told))
    assert (delta.finish, len(delta.output_ids), delta.experts is not None) == ("abort", num_kept, num_kept > 0)


def episode(engine: SglangEngine, recorded: Sequence[Sample] = (), **sampling: Any) -> Episode:
    limits: dict[str, Any] = {"max_new_tokens": 5} | sampling
    model = ModelAccess(generate=engine.generate, sampling=SamplingParams(**limits), context_length=64)
    return Episode(prompt=PROMPT, index=0, tokenizer=Letters(), model=model, recorded=recorded)


async def server_of(stack: AsyncExitStack, number: int, **habits: Any) -> tuple[SglangEngine, FakeSglang]:
    facts = {"enable_return_routed_experts": True, "context_length": 128}
    server = await stack.enter_async_context(
        fake_sglang(experts=(3, 1, 2, 8, number), facts=facts, version="4", **habits)
    )
    engine = SglangEngine(server.url, options(choices=CHOICES))
    stack.push_async_callback(engine.close)
    await engine.start()
    return engine, server


def asked(server: FakeSglang) -> list[tuple[int, int]]:
    bodies = [body for path, body in server.calls if path == "/generate"]
    assert all(body["return_routed_experts"] is True for body in bodies)
    return [(len(body["input_ids"]), body["routed_experts_start_len"]) for body in bodies]


async def test_turns_replies_and_branches_have_the_experts_of_all_that_was_fed():
    async with asyncio.timeout(DEADLINE_S), AsyncExitStack() as stack:
        engine, server = await server_of(stack, 0)
        ep = episode(engine)
        await ep.generate()
        assert ep.reply("tool", "4")
        await ep.generate()
        side = ep.branch(1)
        assert side.reply("tool", "5")
        await side.generate()
        first, branch = ep.sample(), side.sample()
        num = len(first.prompt_ids)
        assert asked(server) == [(num, 0), (num + 10, num + 4), (num + 10, 0)], "what is known is not asked for again"
    for sample in (first, branch):
        assert sample.experts is not None
        assert CHOICES.ids(sample.experts).tolist() == told_by(0, 0, sample.num_tokens - 1)
        assert not CHOICES.wrong_sample(sample)
    cut = Delta(
        output_ids=first.response_ids, logprobs=first.logprobs, versions=first.versions, experts=first.experts
    ).first(3)
    assert cut.experts is not None
    assert CHOICES.ids(cut.experts).tolist() == told_by(0, 0, num + 2), "a stop string cuts experts with the tokens"


async def test_what_another_server_began_keeps_its_experts():
    async with asyncio.timeout(DEADLINE_S), AsyncExitStack() as stack:
        engine, server = await server_of(stack, 0, every_s=0.05)
        ep = episode(engine, max_new_tokens=20)
        doing = asyncio.create_task(interrupted(ep.generate()))
        await until(lambda: bool(server.running))
        await asyncio.sleep(0.2)
        await engine.abort()
        partial = await doing
        begun = len(partial.response_ids)
        assert 0 < begun < 20
        second, other = await server_of(stack, 1)
        again = episode(second, (partial,), max_new_tokens=20)
        await again.generate()
        sample = again.sample()
        num_told = len(partial.prompt_ids) + begun - 1
        assert asked(other) == [(num_told + 1, num_told)]
    assert len(sample.response_ids) == 20
    assert sample.experts is not None
    whole = told_by(0, 0, num_told) + told_by(1, num_told, sample.num_tokens - 1)
    assert CHOICES.ids(sample.experts).tolist() == whole


async def test_experts_of_a_recorded_reply_leave_with_it():
    async with asyncio.timeout(DEADLINE_S), AsyncExitStack() as stack:
        engine, _ = await server_of(stack, 0)
        ep = episode(engine)
        await ep.generate()
        assert ep.reply("tool", "4")
        await ep.generate()
        recorded = ep.sample()
        assert recorded.experts is not None
        parts = split(recorded)
        assert sum(len(part.experts) for part in parts if part.experts is not None) == len(recorded.experts)
        second, other = await server_of(stack, 1)
        again = episode(second, (recorded,))
        await again.generate()
        assert again.reply("tool", "567")
        await again.generate()
        sample = again.sample()
        num = len(recorded.prompt_ids)
        assert asked(other) == [(num + 12, num + 4)]
    assert sample.experts is not None
    whole = told_by(0, 0, num + 4) + told_by(1, num + 4, sample.num_tokens - 1)
    assert CHOICES.ids(sample.experts).tolist() == whole


async def test_a_sample_without_experts_of_its_tokens_is_refused_where_it_was_made():
    async with asyncio.timeout(DEADLINE_S), AsyncExitStack() as stack:
        engine, _ = await server_of(stack, 0)
        ep = episode(engine)
        await ep.generate()
        sample = ep.sample()
    assert sample.experts is not None
    rules: dict[str, Any] = {"temperatures": {}, "vocab_size": None, "choices": CHOICES}
    assert checked_rollout([sample], PROMPT, 0, **rules)[0].experts is sample.experts
    shown = ep.demonstration([msgspec.structs.replace(PROMPT.messages[0], role="assistant")])
    taught: dict[str, Any] = rules | {"loss_parts": ("sft",)}
    assert checked_rollout([shown], PROMPT, 0, **taught), "nobody routed it"
    for wrong, says in (
        (None, "the experts of 0 of"), (sample.experts[:-1], "the experts of "), (sample.experts[:, :-1], "shape"),
        (sample.experts * 0, "one expert twice"),
    ):  # fmt: skip
        with pytest.raises(EngineError, match=says):
            checked_rollout([msgspec.structs.replace(sample, experts=wrong)], PROMPT, 0, **rules)


TWO_TURNS = """\
async def two(ctx, prompt):
    await ctx.episode.generate()
    assert ctx.episode.reply("tool", "4")
    await ctx.episode.generate()
    return ctx.episode.sample(reward=0.5)
"""


async def test_groups_of_worker_processes_keep_experts_up_to_the_trainer(tmp_path: Path):
    """One member has tokens of a life in which no experts were asked for: they are drawn again."""
    folder = tmp_path / "model"
    make_tiny_model(folder, "0p5m", vocab_size=320)
    tokenizer = load_tokenizer(str(folder))
    (tmp_path / "flow.py").write_text(TWO_TURNS)
    spec = WorkflowSpec(
        workflow=f"{tmp_path / 'flow.py'}:two", args={}, max_turns=4, max_block_s=1.0,
        tokenizer=tokenizer.parts(),
    )  # fmt: skip
    old = Sample(
        group_id=PROMPT.group_id, index=0, prompt_ids=TurnRenderer(tokenizer).prompt(PROMPT),
        response_ids=np.full(3, 300, np.int32), logprobs=np.full(3, -1, np.float32), loss_mask=np.ones(3, np.uint8),
        versions=np.full(3, 4, np.int32), finish="abort",
    )  # fmt: skip
    async with asyncio.timeout(DEADLINE_S), AsyncExitStack() as stack:
        engine, _ = await server_of(stack, 0)
        pool = WorkflowPool(spec, PhaseLimits(teardown_s=3.0), tokenizer, max_workers=1)
        stack.push_async_callback(pool.close)
        model = ModelAccess(generate=engine.generate, sampling=SamplingParams(max_new_tokens=6), context_length=128)
        runner = runner_of(pool, Rewarder(RewardSettings(fn="workflow")), tokenizer, model=model, choices=CHOICES)
        limits = SamplingParams(max_new_tokens=6)
        work = Assignment(prompt=PROMPT, attempt=1, num_samples=2, sampling=limits, partial=(old,))
        group = await runner.run(work)
    kept = decode_group(PROMPT.group_id, encode(group))
    assert len(kept.samples) == 2
    for sample in kept.samples:
        assert 300 not in sample.response_ids
        trained = TrainSample.of(sample, 1.0)
        assert trained.experts is not None
        assert CHOICES.ids(trained.experts).tolist() == told_by(0, 0, sample.num_tokens - 1)


@pytest.mark.parametrize("facts", [{}, {"enable_return_routed_experts": False}])
async def test_a_server_that_does_not_tell_experts_is_refused_before_it_serves(facts: dict[str, Any]):
    model = ServerAnswer("/model_info", 200, b'{"model_path": "m"}')
    known = ServerAnswer("/server_info", 200, msgspec.json.encode({"model_path": "m", **facts}))
    assert attach_fault(model, known) == ("", "")
    fault, remedy = attach_fault(model, known, tells_experts=True)
    assert "megatron.routing_replay" in fault
    assert "--enable-return-routed-experts" in remedy
    async with asyncio.timeout(DEADLINE_S), fake_sglang(facts={"context_length": 128, **facts}) as server:
        engine = SglangEngine(server.url, options(choices=CHOICES))
        with pytest.raises(EngineError, match="does not tell the experts"):
            await engine.start()


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"speculative_algorithm": "EAGLE"}, "it guesses tokens ahead"),
        ({"enable_hierarchical_cache": True}, "its cache comes back without experts"),
        ({"pp_size": 2}, "only the experts of its own layers"),
    ],
)
def test_a_server_that_tells_experts_of_some_tokens_only_is_refused(more: dict[str, Any], why: str) -> None:
    model = ServerAnswer("/model_info", 200, b'{"model_path": "m"}')
    told = {"model_path": "m", "enable_return_routed_experts": True, "speculative_algorithm": None, "pp_size": 1}
    whole, partial = (
        ServerAnswer("/server_info", 200, msgspec.json.encode(facts)) for facts in (told, {**told, **more})
    )
    assert attach_fault(model, whole, tells_experts=True) == ("", "")
    assert attach_fault(model, partial) == ("", "")
    fault, remedy = attach_fault(model, partial, tells_experts=True)
    assert why in fault
    assert "megatron.routing_replay = true" in remedy


async def test_a_server_that_forgets_them_is_an_error_of_that_request():
    async with asyncio.timeout(DEADLINE_S), AsyncExitStack() as stack:
        engine, server = await server_of(stack, 0)
        server.experts = None
        with pytest.raises(EngineError, match=r"request .*routed_experts.*0 characters"):
            await episode(engine).generate()
