"""The engine that answers from dumps: what was recorded comes back token by token, or it is said why it cannot."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.harness import group_runner as harness
from tests.harness.dumps import write_groups
from tests.harness.manifests import manifest_of

from myxa.actors.data import PromptDataset, open_prompts
from myxa.actors.engines.embedded.engine import EmbeddedEngine, EmbeddedOptions
from myxa.actors.engines.recorded import RecordedReference
from myxa.actors.models.chat_template import template_of
from myxa.actors.models.hf_folder import read_config
from myxa.actors.models.tokenizer import load_tokenizer
from myxa.actors.rewards.rewarder import FixedReward, make_rewarder
from myxa.actors.rollout.group_runner import GroupRunner
from myxa.actors.stream_checks import StreamChecks
from myxa.actors.workflows import named
from myxa.actors.workflows.episode import Workflow, WorkflowContext
from myxa.core.config import RunConfig
from myxa.core.errors import DataError, EngineError, ReferenceFailed, RequestRefused
from myxa.core.messages import Assignment, SamplingParams
from myxa.core.protocols import Engine, GenerateRequest
from myxa.core.samples import Group, Prompt, Sample
from myxa.launch.composition.rollout_parts import recorded_engine

SAMPLING = SamplingParams(max_new_tokens=7)
NUM_SAMPLES = 3


async def two_turns(ctx: WorkflowContext, prompt: Prompt) -> Sample:
    turn = await ctx.episode.generate()
    assert ctx.episode.reply("user", "shorter" if turn.finish == "length" else "longer")
    await ctx.episode.generate()
    return ctx.episode.sample(metadata={"first": turn.text})


WORKFLOWS: dict[str, Workflow] = {"one turn": named.answer_once, "two turns": two_turns}


def runner_of(engine: Engine, folder: Path, workflow: Workflow, scorer: Any) -> GroupRunner:
    config = read_config(folder)
    checks = StreamChecks("rollout/0", may_be_older=False, on_lie=lambda lie: None)
    checks.vocab_size = config.vocab_size
    checks.loading(5)
    checks.loaded()
    is_live = isinstance(engine, EmbeddedEngine)
    generate = engine.generate if is_live else checks.watch(engine.generate)
    return harness.runner_of(workflow, scorer, load_tokenizer(folder), generate, context_length=config.context_length)


def every(dataset: PromptDataset) -> list[Prompt]:
    return [prompt for draw in range(len(dataset)) if (prompt := dataset.prompt(draw)) is not None]


async def answered(runner: GroupRunner, prompts: list[Prompt]) -> list[Group]:
    given = [Assignment(prompt=prompt, attempt=1, num_samples=NUM_SAMPLES, sampling=SAMPLING) for prompt in prompts]
    return list(await asyncio.gather(*(runner.run(one) for one in given)))


@dataclass(frozen=True)
class Recording:
    """A dump of what the embedded engine answered, and the run that is to be answered from it."""

    folder: Path
    workflow: str
    groups: list[Group]
    config: RunConfig

    @property
    def path(self) -> str:
        assert isinstance(self.config.data.train, str)
        return self.config.data.train

    @asynccontextmanager
    async def engine(self) -> AsyncIterator[Engine]:
        """Started, and serving version 5."""
        tokenizer = load_tokenizer(self.folder, template_of(self.folder, self.config.data))
        engine = recorded_engine("rollout/0", self.config, read_config(self.folder), tokenizer)
        await engine.start()
        await serve(engine, 5)
        try:
            yield engine
        finally:
            await engine.close()

    def asks(self, row: int = 1, index: int = 0, num_done: int = 0, **changes: Any) -> GenerateRequest:
        """For the turn that begins there."""
        sample = self.groups[row].samples[index]
        request = GenerateRequest(
            request_id="r", input_ids=np.concatenate([sample.prompt_ids, sample.response_ids[:num_done]]),
            sampling=SAMPLING, source=self.path, row=row, index=index,
        )  # fmt: skip
        return msgspec.structs.replace(request, **changes)


async def serve(engine: Engine, version: int) -> None:
    await engine.prepare_weights(manifest_of(version, channel="shm"))
    await engine.commit_weights(version)


@pytest.fixture(scope="module")
def recordings(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Recording]:
    place = tmp_path_factory.mktemp("recorded")
    return {workflow: asyncio.run(record(folders[0], place / workflow, workflow)) for workflow in WORKFLOWS}


@pytest.fixture(params=WORKFLOWS)
def recording(request: pytest.FixtureRequest, recordings: dict[str, Recording]) -> Recording:
    return recordings[request.param]


@pytest.fixture
def simple(recordings: dict[str, Recording]) -> Recording:
    return recordings["two turns"]


async def record(folder: Path, place: Path, workflow: str) -> Recording:
    """Four groups, of which two are of the same prompt, and other answers."""
    place.mkdir()
    rows = place / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "{text}", "label": "2"}}\n' for text in ("1+1?", "hi", "1+1?", "end")))
    sections: dict[str, Any] = {
        "model": {"path": str(folder)},
        "rollout": {"num_samples": NUM_SAMPLES, "max_new_tokens": SAMPLING.max_new_tokens},
    }
    first = RunConfig.model_validate({**sections, "data": {"train": str(rows), "shuffle": False}})
    engine = EmbeddedEngine(folder, EmbeddedOptions(max_running=8, seed=3))
    await engine.start()
    try:
        groups = await answered(
            runner_of(engine, folder, WORKFLOWS[workflow], FixedReward()), every(open_prompts(first))
        )
    finally:
        await engine.close()
    rewards = np.arange(NUM_SAMPLES, dtype=np.float32)
    groups = [msgspec.structs.replace(one, rewards=rewards + number) for number, one in enumerate(groups)]
    path = write_groups(place / "dump.jsonl", groups)
    recorded = {"data": {"train": path}, "roles": {"rollout": {"kind": "recorded"}}, "reward": {"fn": "recorded"}}
    if workflow == "two turns":
        sections["rollout"]["workflow"] = "flows.py:two_turns"
    return Recording(folder, workflow, groups, RunConfig.model_validate({**sections, **recorded}))


def same(found: Sample, recorded: Sample) -> None:
    """All but the number of the draw, and the stamps."""
    for name in ("prompt_ids", "response_ids", "logprobs", "loss_mask"):
        assert np.array_equal(getattr(found, name), getattr(recorded, name)), name
    for name in ("index", "finish", "num_turns", "text", "turns", "replies", "temperature", "metadata"):
        assert getattr(found, name) == getattr(recorded, name), name
    assert found.versions.tolist() == np.where(recorded.loss_mask == 1, 5, -1).tolist()


async def test_a_run_from_a_dump_has_its_very_samples_and_rewards(recording: Recording) -> None:
    prompts = every(open_prompts(recording.config))
    scorer = make_rewarder(recording.config)
    async with recording.engine() as engine:
        runner = runner_of(engine, recording.folder, WORKFLOWS[recording.workflow], scorer)
        found = await answered(runner, list(reversed(prompts)))
        again = await answered(runner, prompts)  # another pass
    await scorer.close()
    assert len(found) == len(recording.groups) == 4
    for given in (list(reversed(found)), again):
        for group, recorded in zip(given, recording.groups, strict=True):
            assert group.rewards.tolist() == recorded.rewards.tolist()
            for sample, was in zip(group.samples, recorded.samples, strict=True):
                same(sample, was)
    answers = [[sample.response_ids.tolist() for sample in group.samples] for group in recording.groups]
    assert answers[0] != answers[2], "the same prompt was recorded twice, with other answers"


async def test_a_group_that_was_begun_elsewhere_goes_on_with_its_tokens(recording: Recording) -> None:
    """After the death of another actor, in the middle of any turn."""
    prompts = every(open_prompts(recording.config))
    async with recording.engine() as engine:
        runner = runner_of(engine, recording.folder, WORKFLOWS[recording.workflow], FixedReward())
        for number, prompt in enumerate(prompts):
            partial: list[Sample] = []
            for was in recording.groups[number].samples:
                kept = 1 + (number + was.index) % len(was.response_ids)
                cut = {name: getattr(was, name)[:kept] for name in ("response_ids", "logprobs", "loss_mask")}
                versions = np.where(was.loss_mask[:kept] == 1, 5, -1).astype(np.int32)
                partial.append(msgspec.structs.replace(was, **cut, versions=versions, finish="abort"))
            given = Assignment(
                prompt=prompt, attempt=2, num_samples=NUM_SAMPLES, sampling=SAMPLING, partial=tuple(partial)
            )
            for sample, was in zip((await runner.run(given)).samples, recording.groups[number].samples, strict=True):
                same(sample, was)


async def test_a_pause_holds_answers_and_they_are_stamped_with_what_is_served_when_they_come(simple: Recording) -> None:
    async with simple.engine() as engine:
        await engine.pause("in_place")
        task = asyncio.ensure_future(collect(engine, simple.asks()))
        while not (await engine.info()).running:
            await asyncio.sleep(0)
        await serve(engine, 6)
        done, _ = await asyncio.wait([task], timeout=0.05)
        assert not done
        await engine.resume()
        (delta,) = await task
        assert set(delta.versions.tolist()) == {6} and delta.finish in ("length", "stop")
        info = await engine.info()
        assert (info.kind, info.version, info.running, info.vocab_size, info.context_length) == (
            "recorded", 6, 0, 320, 128
        )  # fmt: skip


async def test_what_waits_in_a_pause_can_be_ended(simple: Recording) -> None:
    for end in ("one", "all", "pause", "close"):
        async with simple.engine() as engine:
            await engine.pause("retract")
            task = asyncio.ensure_future(collect(engine, simple.asks()))
            while not (await engine.info()).running:
                await asyncio.sleep(0)
            await engine.abort("another")
            assert (await engine.info()).running == 1
            if end == "close":
                await engine.close()
                await fails(task, "rollout/0 is closed")
                break
            await {"one": lambda: engine.abort("r"), "all": engine.abort, "pause": lambda: engine.pause("abort")}[end]()
            (delta,) = await task
            assert (delta.finish, delta.output_ids.size, delta.logprobs.size, delta.versions.size) == ("abort", 0, 0, 0)


async def collect(engine: Engine, request: GenerateRequest) -> list[Any]:
    return [delta async for delta in engine.generate(request)]


def wrong_asks(made: Recording) -> list[tuple[GenerateRequest, str]]:
    """What is asked, and the place or the key that the refusal names."""
    return [
        (made.asks(source="held.jsonl"), "no answer to row 1 of held.jsonl is recorded"),
        (made.asks(row=1, source=""), "no answer to row 1 of no data is recorded"),
        (msgspec.structs.replace(made.asks(), row=4), "no answer to row 4 of"),
        (msgspec.structs.replace(made.asks(), index=3), "dump.jsonl:3: 3 samples are recorded, number 3 is asked for"),
        (made.asks(sampling=SamplingParams(max_new_tokens=7, temperature=0.5)), "dump.jsonl:3: sample 0 was drawn at"),
        (made.asks(sampling=SamplingParams(max_new_tokens=2)), "rollout.max_new_tokens"),
        (
            made.asks(input_ids=made.groups[0].samples[0].prompt_ids),
            "dump.jsonl:3: what is asked differs from sample 0",
        ),
        (made.asks(input_ids=np.append(made.asks().input_ids, np.int32(319))), "dump.jsonl:3: what is asked differs"),
        (made.asks(num_done=len(made.groups[1].samples[0].response_ids)), "dump.jsonl:3: sample 0 has no turn"),
        (made.asks(input_ids=made.asks().input_ids[:2]), "dump.jsonl:3: sample 0 has no turn of the model that cont"),
    ]


async def test_what_is_not_recorded_is_refused_by_place_and_remedy(simple: Recording) -> None:
    async with simple.engine() as engine:
        for request, expected in wrong_asks(simple):
            with pytest.raises(RequestRefused) as caught:
                await collect(engine, request)
            assert expected in str(caught.value) and caught.value.remedy
            assert (await engine.info()).running == 0
        assert await collect(engine, simple.asks()), "and the others are served"


async def test_a_file_that_changes_under_the_run_is_told(simple: Recording, tmp_path: Path) -> None:
    text = Path(simple.path).read_bytes()
    copy = tmp_path / "dump.jsonl"
    copy.write_bytes(text)
    data = simple.config.data.model_copy(update={"train": str(copy)})
    made = replace(simple, config=simple.config.model_copy(update={"data": data}))
    async with made.engine() as engine:
        copy.write_bytes(text[:200] + b"?" * (len(text) - 200))
        with pytest.raises(
            RequestRefused, match=r"dump.jsonl:3: is no dumped group: .* -- use the file as `myxa dump`"
        ):
            await collect(engine, made.asks())


async def test_versions_are_committed_as_they_were_prepared_and_nothing_after_the_end(simple: Recording) -> None:
    async with simple.engine() as engine:
        await fails(engine.start(), "rollout/0 was started before")
        await fails(engine.commit_weights(6), "version 6 cannot be committed, nothing is prepared")
        await serve(engine, 6)
        await fails(engine.commit_weights(6), "version 6 cannot be committed, nothing is prepared")
        lost = asyncio.ensure_future(engine.until_lost())
        done, _ = await asyncio.wait([lost], timeout=0.01)
        assert not done
        lost.cancel()
    await engine.close()
    for attempt in (engine.info(), collect(engine, simple.asks()), engine.pause("abort"), engine.commit_weights(6)):
        await fails(attempt, "rollout/0 is closed")


async def fails(attempt: Awaitable[Any], says: str) -> None:
    with pytest.raises(EngineError, match=says) as caught:
        await attempt
    assert caught.value.remedy


def test_prompts_that_this_run_would_write_otherwise_are_refused_before_it_starts(simple: Recording) -> None:
    data = simple.config.data.model_copy(update={"apply_chat_template": False})
    config = simple.config.model_copy(update={"data": data})
    tokenizer = load_tokenizer(simple.folder, template_of(simple.folder, data))
    with pytest.raises(DataError, match=r"dump.jsonl:2: its prompt was asked by \d+ tokens, this run would ask by \d+"):
        recorded_engine("rollout/0", config, read_config(simple.folder), tokenizer)


# -- reference log-probs


async def test_recorded_reference_log_probs_go_with_their_tokens(simple: Recording, tmp_path: Path) -> None:
    told = [msgspec.structs.replace(s, reference_logprobs=s.logprobs - 1) for s in simple.groups[0].samples]
    both = [msgspec.structs.replace(simple.groups[0], samples=tuple(told)), simple.groups[1]]
    path = write_groups(tmp_path / "told.jsonl", both)
    raw = simple.config.model_dump(by_alias=True)
    config = RunConfig.model_validate({**raw, "data": {**raw["data"], "train": path}})
    engine = recorded_engine(
        "rollout/0", config, read_config(simple.folder),
        load_tokenizer(simple.folder, template_of(simple.folder, config.data)),
    )  # fmt: skip
    await engine.start()
    try:
        asked, prompts = RecordedReference(engine), every(open_prompts(config))
        for sample in both[0].samples:
            bare = msgspec.structs.replace(sample, reference_logprobs=None)
            found = (await asked.judged(prompts[0], bare)).reference_logprobs
            assert found is not None
            assert found.tolist() == np.where(sample.loss_mask != 0, sample.logprobs - 1, 0).tolist()
            cut = {name: getattr(bare, name)[:3] for name in ("response_ids", "logprobs", "loss_mask", "versions")}
            part = (await asked.judged(prompts[0], msgspec.structs.replace(bare, **cut))).reference_logprobs
            assert part is not None and part.tolist() == found[:3].tolist()
            other = msgspec.structs.replace(bare, response_ids=bare.response_ids + 1)
            for prompt, wrong in ((prompts[0], other), (prompts[1], bare)):
                with pytest.raises(ReferenceFailed, match="no reference log-probs of these tokens are recorded"):
                    await asked.judged(prompt, wrong)
        gone = msgspec.structs.replace(prompts[0], row=99)
        with pytest.raises(ReferenceFailed):
            await asked.judged(gone, both[0].samples[0])
    finally:
        await engine.close()
    wants = {**raw, "data": {**raw["data"], "train": path}, "algo": {"ref_urls": ["recorded"], "kl_coef": 0.1}}
    with pytest.raises(DataError, match=r"told.jsonl:3: sample 0: it was recorded without reference log-probs"):
        open_prompts(RunConfig.model_validate(wants))
