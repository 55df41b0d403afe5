"""Reference log-probs of finished samples: those of the trainer's own reference model, and what becomes of a sample whose
servers cannot be had."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from msgspec.structs import replace
from tests.backends.gang_rank import scored
from tests.harness.engine_server import serve
from tests.harness.group_runner import runner_of
from tests.reference.teachers import PROMPT, Letters, expected, made, only_once_known, out_of_order, teacher

from myxa.actors.backends.rank_backend import RankSettings
from myxa.actors.backends.torch_backend.backend import TorchBackend
from myxa.actors.engines.embedded.engine import EmbeddedOptions
from myxa.actors.models.tiny import make_tiny_model
from myxa.actors.models.tokenizer import load_tokenizer
from myxa.actors.reference.server import ReferenceServers, ServedReference
from myxa.actors.rewards.guard import GroupBudget, Guarded
from myxa.actors.rewards.rewarder import FixedReward
from myxa.actors.rollout.group_runner import GroupRunner, drop_reason
from myxa.actors.trainer.step_plan import StepPlanOptions, plan_step
from myxa.actors.workflows.episode import Interrupted, WorkflowContext
from myxa.core.clock import SystemClock
from myxa.core.config import AlgoConfig, RewardSettings
from myxa.core.errors import ReferenceFailed, UserCodeError
from myxa.core.messages import Assignment, SamplingParams
from myxa.core.samples import Group, Prompt, Sample

pytestmark = pytest.mark.timeout(60)


@asynccontextmanager
async def reference(*urls: str, timeout_s: float = 5.0, **settings: Any) -> AsyncIterator[ServedReference]:
    servers = ReferenceServers(urls, tokenizer=Letters(), model_path="policy", timeout_s=timeout_s, pause_s=0.0)
    found = ServedReference(servers, RewardSettings(**settings), SystemClock())
    try:
        yield found
    finally:
        await found.close()


# -- the numbers


async def test_a_served_model_says_what_the_trainers_reference_model_says(tmp_path: Path) -> None:
    """Of a teacher of another shape, of samples with tool outputs between their turns, in float32."""
    make_tiny_model(tmp_path / "policy", "0p5m", seed=1, vocab_size=262, context_length=128)
    make_tiny_model(tmp_path / "teacher", "1m", seed=4, vocab_size=262, context_length=128)
    rng, masks = np.random.default_rng(3), ("1" * 60, "1110001101", "0011", "1", "0" * 5)
    samples = [
        replace(
            made(mask, index=i),
            prompt_ids=rng.integers(0, 262, 8).astype(np.int32),
            response_ids=rng.integers(0, 262, len(mask)).astype(np.int32),
        )
        for i, mask in enumerate(masks)
    ]
    async with serve(tmp_path / "teacher", options=EmbeddedOptions(max_running=4)) as served:
        servers = ReferenceServers(
            [served.url], tokenizer=load_tokenizer(tmp_path / "policy"), model_path="policy", timeout_s=20
        )
        asked = ServedReference(servers, RewardSettings(), SystemClock())
        judged = await asyncio.gather(*(asked.judged(PROMPT, sample) for sample in samples))
        await asked.close()
    group = Group(prompt=PROMPT, samples=tuple(judged), rewards=np.zeros(len(judged), np.float32))
    algo = AlgoConfig().model_copy(update={"ref_urls": ("http://teacher:1",)})
    options = StepPlanOptions(algo, num_ranks=1, max_tokens=500, minibatches=1)
    (shard,) = plan_step(0, [group], options)
    backend = TorchBackend(RankSettings(model_path=str(tmp_path / "teacher")))
    backend.setup()
    try:
        exact = scored(backend, shard.samples)
    finally:
        backend.close()
    for sample, wanted in zip(shard.samples, exact, strict=True):
        if sample.loss_mask.any():
            assert sample.reference_logprobs is not None
            assert sample.reference_logprobs.dtype == np.float32
            np.testing.assert_allclose(sample.reference_logprobs, wanted, atol=1e-4)
            assert not sample.reference_logprobs[sample.loss_mask == 0].any()
        else:
            assert sample.reference_logprobs is None


# -- what becomes of failures


async def test_a_sample_of_another_temperature_has_no_served_log_probs() -> None:
    async with teacher() as there, reference(there.url) as asked:
        for temperature in (1.0, 0.0):
            found = await asked.judged(PROMPT, made(temperature=temperature))
            assert found.reference_logprobs is not None
        with pytest.raises(UserCodeError, match=r"at temperature 0.7 \(group 5, sample 0\).* -- draw at temperature 1"):
            await asked.judged(PROMPT, made(temperature=0.7))
        assert len(there.asked) == 2


async def test_an_outage_is_waited_for_and_nothing_is_lost_by_it() -> None:
    said: list[tuple[str, str]] = []
    async with teacher() as there, reference(there.url, pause_after=2, cool_down_s=0.05) as asked:
        asked.listen(lambda kind, text: said.append((kind, text)))
        await asked.judged(PROMPT, made())
        there.fault = only_once_known(out_of_order)
        calls = [asyncio.ensure_future(asked.judged(replace(PROMPT, group_id=i), made())) for i in range(6)]
        async with asyncio.timeout(10):
            while asked.gauges()["reference/is_paused"] == 0 or asked.gauges()["reference/waiting"] < 5:
                await asyncio.sleep(0.005)
        there.fault = None
        found = await asyncio.gather(*calls, return_exceptions=True)
    lost = [one for one in found if isinstance(one, BaseException)]
    assert len(lost) <= 1, "the first group, before it was known to be an outage"
    assert all(isinstance(one, ReferenceFailed) for one in lost)
    assert [kind for kind, _ in said] == ["reference-paused", "reference-works-again"]
    assert there.url in said[0][1]
    values = asked.gauges()
    assert values["reference/num_errors"] >= 2
    assert values["reference/is_paused"] == 0
    assert values["reference/s_mean"] > 0
    assert "reference/s_mean" not in asked.gauges(), "nothing was asked since"


async def test_an_outage_that_lasts_and_a_foreign_vocabulary_end_the_run_with_the_servers_name() -> None:
    async with teacher() as there, reference(there.url, pause_after=1, cool_down_s=0.01, max_outage_s=0.05) as asked:
        await asked.judged(PROMPT, made())
        there.fault = only_once_known(out_of_order)
        found = await asyncio.gather(*(asked.judged(PROMPT, made()) for _ in range(3)), return_exceptions=True)
        assert all(isinstance(one, ReferenceFailed) for one in found)
        assert "reward.max_outage_s = 0.05" in asked.too_many_errors
        assert f"{there.url} answered 500: out of order" in asked.too_many_errors
    async with teacher(text_of=lambda i: "x") as there, reference(there.url) as asked:
        with pytest.raises(ReferenceFailed, match="its vocabulary is not that of policy"):
            await asked.judged(PROMPT, made())
        assert "name servers of a model of the same family" in asked.too_many_errors, "at once"


async def test_tokens_that_a_teacher_does_not_take_cost_their_group_and_no_pause() -> None:
    async def refuses(request: web.Request, body: dict[str, Any], answer: dict[str, Any]) -> Any:
        return web.Response(status=400, text="too long") if len(body["input_ids"]) > 6 else answer

    async with teacher(only_once_known(refuses)) as there, reference(there.url, pause_after=2) as asked:
        for _ in range(20):
            with pytest.raises(
                ReferenceFailed, match=r"refused: .*400: too long \(group 5, sample 0\) -- serve a model over"
            ):
                await asked.judged(PROMPT, made("1111"))
            await asked.judged(PROMPT, made("111"))
        assert asked.gauges()["reference/is_paused"] == 0
        assert "failed in 20 of the last 40 calls" in asked.too_many_errors
        asked.allow(0.6)
        assert not asked.too_many_errors


# -- groups


def runner(asked: Any, *, breaks: bool = False, mask: str = "111") -> GroupRunner:
    async def generate(ctx: WorkflowContext, prompt: Prompt) -> Sample:
        if breaks and ctx.index == 1:
            async with asyncio.timeout(10):
                while not any(one.reference_logprobs is not None for one in found.so_far(5)):
                    await asyncio.sleep(0.005)
            raise Interrupted((made("1", index=1),))
        return made(mask, index=ctx.index)

    found = runner_of(generate, FixedReward(), Letters())
    found.reference = asked
    return found


def assignment(**more: Any) -> Assignment:
    return Assignment(prompt=PROMPT, attempt=1, num_samples=2, sampling=SamplingParams(), **more)


async def test_every_sample_of_a_group_brings_its_own_and_an_evaluation_asks_nobody() -> None:
    async with teacher() as there, reference(there.url) as asked:
        group = await runner(asked, mask="1101").run(assignment())
        for sample in group.samples:
            assert sample.reference_logprobs is not None
            assert sample.reference_logprobs.tolist() == expected(sample)
        assert len(there.asked) == 2
        await runner(asked).judged_by(FixedReward()).run(assignment())
        assert len(there.asked) == 2
        await runner(asked, mask="000").run(assignment())
        assert len(there.asked) == 2, "nothing was drawn"


async def test_a_group_whose_teacher_cannot_be_had_is_given_up_and_an_actor_hears_of_it_and_closes_both() -> None:
    async with teacher(out_of_order) as there, reference(there.url) as asked:
        with pytest.raises(ReferenceFailed) as caught:
            await runner(asked).run(assignment())
        assert drop_reason(caught.value) == "reference-error"
        budget = GroupBudget(0.0)
        for _ in range(30):
            budget.note(caught.value)  # it has a budget of its own
        both = Guarded(FixedReward(), asked)
        assert set(both.gauges()) >= {"reference/num_errors", "reference/waiting"}
        for _ in range(20):
            with pytest.raises(ReferenceFailed):
                await asked.judged(PROMPT, made())
        assert "of the last" in both.too_many_errors
        both.allow(1.0)
        assert not both.too_many_errors
        await both.close()
        with pytest.raises(ReferenceFailed, match="given up"):
            await asked.judged(PROMPT, made())
