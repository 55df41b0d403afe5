"""A frozen model of a run's own, on a real node with real engines: who answers, when nobody does, how many at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from tests.harness.waiting import WAIT_S

from myxa.actors.engines.embedded.engine import EmbeddedEngine, EmbeddedOptions
from myxa.actors.gateway.clients import models_of_rollout
from myxa.actors.http_client import NoAnswer
from myxa.actors.models.tiny import make_tiny_model
from myxa.actors.models.tokenizer import load_tokenizer
from myxa.actors.rewards.call import CallFailed
from myxa.actors.rewards.judge import Judges
from myxa.actors.rewards.rewarder import Rewarder
from myxa.actors.rollout.other_models import ModelServer, OtherModel
from myxa.actors.workflows.episode import Episode, ModelSpec
from myxa.core.actor import Actor
from myxa.core.completions import Completion
from myxa.core.config import RewardSettings
from myxa.core.config.data import JudgeSettings
from myxa.core.errors import EngineError, MemberFailed, UserCodeError
from myxa.core.messages import SamplingParams
from myxa.core.protocols import Delta, GenerateRequest
from myxa.core.samples import Message, Prompt
from myxa.transport.node import Node

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True)
ASKED = np.asarray([5, 6, 7], np.int32)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_tiny_model(path, preset="0p5m", seed=0)
    return path


class Asker(Actor):
    """Stands for a rollout actor."""

    def __init__(self, model: OtherModel) -> None:
        self.model = model

    async def on_start(self) -> None:
        self.model.join(self.ctx)


@dataclass
class Floor:
    node: Node
    model: OtherModel
    engines: dict[str, EmbeddedEngine]

    async def serve(self, index: int, folder: Path) -> None:
        name = f"model/critic/{index}"
        engine = self.engines[name] = EmbeddedEngine(folder, EmbeddedOptions(max_running=4, context_length=512))
        await self.node.start(ModelServer(engine, load_tokenizer(folder)), name=name)
        while not await self.serves(engine):
            await asyncio.sleep(0.01)

    async def serves(self, engine: EmbeddedEngine) -> bool:
        try:
            return (await engine.info()).max_running > 0
        except EngineError:
            return False

    async def ask(self, sampling: SamplingParams = GREEDY, ids: Any = ASKED) -> Delta:
        request = GenerateRequest(request_id="same", input_ids=ids, sampling=sampling)
        return await anext(self.model.generate(request))

    async def running(self, index: int = 0) -> int:
        return (await self.engines[f"model/critic/{index}"].info()).running


@asynccontextmanager
async def floor(folder: Path, *, serves: int = 1, **options: Any) -> AsyncIterator[Floor]:
    settings: dict[str, Any] = {"max_requests": 8, "timeout_s": 30.0, "num_actors": max(serves, 1), **options}
    spec = ModelSpec(model_path=str(folder), chat_template_kwargs={}, date="", sampling=GREEDY, context_length=512)
    model = OtherModel("critic", spec, **settings)
    node = await Node.attach(name="models")
    try:
        await node.start(Asker(model), name="asker")
        made = Floor(node, model, {})
        for index in range(serves):
            await made.serve(index, folder)
        yield made
    finally:
        await node.close(grace_s=2.0)


async def test_it_answers_what_its_folder_says_and_stops_at_texts(folder: Path) -> None:
    alone = EmbeddedEngine(folder, EmbeddedOptions(max_running=4, context_length=512))
    await alone.start()
    request = GenerateRequest(request_id="a", input_ids=ASKED, sampling=GREEDY)
    parts = [one.output_ids async for one in alone.generate(request)]
    await alone.close()
    async with floor(folder) as there:
        answers = await asyncio.gather(*(there.ask() for _ in range(6)))  # ids of requests may be equal
        for one in answers:
            assert one.output_ids.tolist() == np.concatenate(parts).tolist() and one.finish == "length"
        text = there.model.reached.tokenizer.decode(answers[0].output_ids.tolist(), skip_special=False)
        stopped = await there.ask(replace(GREEDY, stop=(text[3:6],)))
        assert stopped.finish == "stop" and len(stopped.output_ids) < 24
        full = await there.ask(ids=np.ones(500, np.int32))
        assert (len(full.output_ids), full.finish) == (12, "length"), (
            "its server may have a shorter context than it says"
        )
        with pytest.raises(UserCodeError, match='the model "critic" refused'):
            await there.ask(ids=np.ones(600, np.int32))


async def test_what_an_actor_took_with_it_another_one_answers(folder: Path) -> None:
    long = replace(GREEDY, max_new_tokens=400)
    async with floor(folder, serves=2) as there:
        asking = [asyncio.ensure_future(there.ask(long)) for _ in range(4)]
        for index in (0, 1):
            while await there.running(index) < 2:
                await asyncio.sleep(0.005)
        await there.node.stop("model/critic/0", grace_s=0.0)
        answers = await asyncio.gather(*asking)
        assert len({tuple(one.output_ids.tolist()) for one in answers}) == 1 and len(answers[0].output_ids) == 400


async def test_it_is_waited_for_until_its_actor_is_back_and_no_longer_than_a_request_may_take(folder: Path) -> None:
    async with floor(folder, serves=0) as there:
        asking = asyncio.ensure_future(there.ask())
        await asyncio.sleep(0.5)
        assert not asking.done()
        await there.serve(0, folder)
        assert len((await asking).output_ids) == 24
    async with floor(folder, serves=0, timeout_s=1.0) as there:
        began_s = time.monotonic()
        with pytest.raises(MemberFailed, match='the model "critic" did not answer within 1 s: .*critic') as caught:
            await there.ask()
        assert caught.value.kind == "environment"
        with pytest.raises(NoAnswer, match="did not answer within 1 s"):
            await there.model.chat("Is it?", 0.0, 5)
        assert time.monotonic() - began_s < 10.0


async def test_only_so_many_are_under_way_and_one_that_is_given_up_ends(folder: Path) -> None:
    long = replace(GREEDY, max_new_tokens=400)
    async with floor(folder, max_requests=2) as there:
        asking = [asyncio.ensure_future(there.ask(long)) for _ in range(5)]
        most = 0
        while sum(one.done() for one in asking) < 2:
            most = max(most, await there.running())
            await asyncio.sleep(0.002)
        assert most == 2
        for one in asking:
            one.cancel()
        await asyncio.wait(asking)
        async with asyncio.timeout(WAIT_S):
            while await there.running():
                await asyncio.sleep(0.01)
        assert len((await there.ask()).output_ids) == 24, "the room is free again"


async def test_a_judge_may_be_a_model_of_the_run_itself(folder: Path) -> None:
    async with floor(folder) as there:
        said, num_tokens = await there.model.chat("Is it good?", 0.0, 7)
        assert said is not None and num_tokens > 7
        settings = JudgeSettings(model="critic", pattern="(?s)(.)", scores={said.strip()[:1]: 0.25}, max_tokens=7)
        judges = Judges(settings, models={"critic": there.model.chat})
        made = Rewarder(RewardSettings(fn="judge", args={"template": "Is it good?{answer}"}), judges=judges)
        try:
            one = Completion(group_id=0, index=0, messages=(), prompt="?", text="x")
            with pytest.raises(CallFailed, match="no room"):
                await there.model.chat("good " * 600, 0.0, 7)
            assert made.gauges()["reward/judge_requests"] == 0
            try:
                await made.score(one)
            except MemberFailed:  # a random model need not say that sign first
                assert made.gauges()["reward/judge_parse_failures"] == settings.tries
            assert made.gauges()["reward/judge_tokens"] > 0
        finally:
            await made.close()


async def test_in_a_rollout_its_words_are_no_tokens_of_the_policy(folder: Path) -> None:
    prompt = Prompt(group_id=1, row=0, pass_index=0, messages=(Message(role="user", content="3 1 2"),))
    async with floor(folder) as there:
        reached = {"critic": there.model.reached}
        policy = Episode(
            prompt=prompt, index=0, tokenizer=there.model.reached.tokenizer, model=there.model.reached.access
        )
        models = models_of_rollout(policy, reached, asyncio.get_running_loop())
        await policy.generate()
        talk = models["critic"].session(prompt.messages)
        turn = await talk.generate()
        assert talk.reply("user", "again") and (await talk.generate()).token_ids
        assert (await models["critic"].generate(prompt.messages)).token_ids == turn.token_ids
        async with models["critic"].openai as client:
            chat = await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "3 1 2"}])
        assert tuple(chat.choices[0].model_extra["token_ids"]) == turn.token_ids
        assert [one.branch for one in policy.so_far()] == [0] and policy.num_turns == 1
        with pytest.raises(UserCodeError, match='ctx.models\\["critik"\\].*did you mean "critic"'):
            models["critik"]
