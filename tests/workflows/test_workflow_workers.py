"""Workflows of the user's run in worker processes: whatever they do, the actor's loop goes on, the episode is ended by
its limit, and its failure has a kind."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import textwrap
import time
import weakref
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tests.harness.group_runner import delta, runner_of
from tests.harness.waiting import until, wait_until

from myxa.actors.models.tiny import make_tiny_model
from myxa.actors.models.tokenizer import load_tokenizer
from myxa.actors.rewards.rewarder import Rewarder
from myxa.actors.rollout.group_runner import GroupLoad, Partial
from myxa.actors.user_code import process
from myxa.actors.workflows.episode import ModelAccess, WorkflowContext
from myxa.actors.workflows.pool import WorkflowPool
from myxa.actors.workflows.timeline import Timeline
from myxa.actors.workflows.worker_messages import PhaseLimits, WorkflowSpec
from myxa.algos.rewards.outcome import RewardOutcome
from myxa.core.completions import Completion
from myxa.core.config import RewardSettings
from myxa.core.errors import FailureKind, MemberFailed, PromptTooLong, UserCodeError
from myxa.core.messages import Assignment, SamplingParams
from myxa.core.protocols import Delta, GenerateRequest
from myxa.core.samples import Group, Message, Prompt, Sample

pytestmark = pytest.mark.timeout(120)

LIMIT_S: dict[str, Any] = {"run_s": 1.5, "block_s": 0.3}
FLOWS = """
import asyncio, copy, ctypes, msgspec, os, signal, threading, time
from pathlib import Path
from myxa.actors.workflows.failures import EnvironmentFailure, NetworkFailure, PolicyFailure, SandboxFailure

LOG = Path(__file__).with_name("log")

def note(*words):
    with LOG.open("a") as file:
        file.write(" ".join(map(str, words)) + chr(10))

async def plain(ctx, prompt, *, turns=2):
    for number in range(turns - 1):
        turn = await ctx.episode.generate()
        ctx.episode.reply("user", f"again {number}")
    turn = await ctx.episode.generate()
    return ctx.episode.sample(reward=1.0, metadata={"pid": os.getpid()})

def sync(ctx, prompt):
    turn = ctx.episode.generate()
    time.sleep(0.05)
    ctx.episode.reply("user", "again")
    other = ctx.episode.branch()
    own, text = ctx.episode.session(prompt.messages), ctx.episode.text("1 2")
    other.generate(), own.generate(), text.generate(), ctx.episode.generate()
    return [other.sample(), own.sample(), text.sample(), ctx.episode.sample(reward=0.25, metadata={"pid": os.getpid()})]

async def searches(ctx, prompt):
    await ctx.episode.generate()
    with ctx.episode.waits_for("tool", "search"):
        await asyncio.sleep(0.1)
    other = ctx.episode.branch()
    with other.waits_for("environment", "step"):
        await asyncio.sleep(0.05)
    ctx.episode.reply("user", "again")
    await ctx.episode.generate()
    return ctx.episode.sample(reward=1.0)

class Scored:
    def setup(self, ctx, prompt): time.sleep(0.1)
    def run(self, ctx, prompt):
        ctx.episode.generate()
        with ctx.episode.waits_for("tool", "x" * 1000): time.sleep(0.05)
        if prompt.metadata["modes"]:
            with ctx.episode.waits_for("weather"): pass
    def score(self, ctx, sample):
        time.sleep(0.1)
        return 1.0

class Env:
    async def step(self, mode):
        if mode == "block": time.sleep(60)
        if mode == "hang": await asyncio.sleep(3600)
        if mode == "thread": await asyncio.to_thread(time.sleep, 3600)
        if mode == "stubborn":
            while True:
                try: time.sleep(60)
                except BaseException: pass
        if mode == "deaf":
            while True:
                try: await asyncio.sleep(3600)
                except asyncio.CancelledError: pass
        if mode == "interpreter": ctypes.PyDLL(None).usleep(2_000_000_000)
        if mode == "raise": raise ConnectionError("sandbox gone")
        if mode == "environment": raise EnvironmentFailure("no answer")
        if mode == "sandbox": raise SandboxFailure("gone")
        if mode == "network": raise NetworkFailure("no route")
        if mode == "policy": raise PolicyFailure("illegal move")
        if mode == "bug": raise KeyError("level")
        if mode == "die": os.kill(os.getpid(), signal.SIGKILL)
        if mode == "copy": copy.copy(self.episode)

async def play(ctx, prompt):
    # What `modes` of the row says of this sample, in its first `times` attempts.
    note("begin", ctx.session_id, ctx.attempt, ctx.is_replay)
    await ctx.episode.generate()
    env, modes = Env(), prompt.metadata["modes"]
    env.episode = ctx.episode
    mode = modes[ctx.index] if ctx.index < len(modes) and ctx.attempt < prompt.metadata["times"] else ""
    try:
        note("step", ctx.session_id)
        await env.step(mode)
    finally:
        note("close", ctx.session_id, ctx.attempt)
    if mode == "forget": return None
    sample = ctx.episode.sample(reward=1.0)
    return msgspec.structs.replace(sample, loss_mask=sample.loss_mask[:-1]) if mode == "odd" else sample

async def gives_up(ctx, prompt):
    for number in range(20):
        try:
            async with asyncio.timeout(0.001 * number):
                await ctx.episode.generate()
        except TimeoutError:
            continue
    turn = await ctx.episode.generate()
    return ctx.episode.sample(reward=1.0, metadata={"turns": ctx.episode.num_turns})

async def leaves(ctx, prompt):
    await ctx.episode.generate()
    print("to the log")
    if ctx.index == 0: raise SystemExit(3)
    if ctx.index == 1: raise KeyboardInterrupt
    asyncio.get_running_loop().create_task(asyncio.sleep(3600))
    return ctx.episode.sample(reward=1.0)

class Shop:
    def __init__(self, price=1): self.price = price
    def setup(self, ctx, prompt): note("setup", ctx.session_id)
    async def run(self, ctx, prompt):
        await ctx.episode.generate()
        if ctx.index == 1: await asyncio.sleep(3600)
        if ctx.index == 2: time.sleep(3600)
    def finalize(self, ctx, sample): note("finalize", ctx.index)
    def score(self, ctx, sample): return float(self.price)
    def teardown(self): note("teardown", self.price)

class HangingSetup(Shop):
    def setup(self, ctx, prompt): time.sleep(3600)

class HangingInit(Shop):
    def __init__(self): time.sleep(3600)

class Gym:
    def __init__(self): self.pid = os.getpid()
    def step(self, of):
        note("step", of, self.pid)
        time.sleep(3600 if of == 0 else 0.3)
    def run(self, ctx, prompt):
        ctx.episode.generate()
        self.step(ctx.index)
        ctx.episode.reply("user", "again")
        ctx.episode.generate()
    def score(self, ctx, sample): return 1.0
    async def teardown(self):
        await asyncio.sleep(0.1)
        note("teardown", self.pid)

class SlowTeardown(Gym):
    def step(self, of): time.sleep(3600)
    async def teardown(self):
        await asyncio.sleep(1.0)
        note("teardown", self.pid)
"""

SDK_FLOWS = """
class BySdk:
    async def setup(self, ctx, prompt):
        messages = [{"role": "user", "content": "hello"}]
        async with ctx.openai as client:
            for _ in range(2):
                chat = await client.chat.completions.create(model="policy", messages=messages)
                messages += [chat.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "again"}]

    def run(self, ctx, prompt):
        with ctx.openai as client:
            client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hello"}])
        return ctx.samples(reward=1.0)
"""
"""In a file of its own: a worker imports the SDKs that it speaks of, which takes most of a second."""


class Words:
    """An engine that says one word a turn; `breaks`: turns that are aborted first."""

    def __init__(self, tokenizer: Any, aborts: int = 0) -> None:
        self.tokenizer, self.aborts = tokenizer, aborts
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        self.requests.append(request)
        ids = [*self.tokenizer.encode("12"), self.tokenizer.eos_token_ids[0]]
        if self.aborts:
            self.aborts -= 1
            yield delta(ids[:1], None)
            yield delta([], "abort")
            return
        for number, token in enumerate(ids):
            await asyncio.sleep(0)
            yield delta([token], "stop" if number == len(ids) - 1 else None)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder, preset="0p5m", seed=0)
    return folder


@pytest.fixture
def flows(tmp_path: Path) -> Path:
    path = tmp_path / "flows.py"
    path.write_text(textwrap.dedent(FLOWS))
    return path


class Bench:
    """A group runner with a pool."""

    def __init__(self, flows: Path, folder: Path, name: str, args: dict[str, Any], limits: dict[str, float]) -> None:
        self.flows = flows
        tokenizer = load_tokenizer(folder)
        spec = WorkflowSpec(
            workflow=f"{flows}:{name}", args=args, max_turns=4, max_block_s=limits.pop("block_s", 1.0),
            tokenizer=tokenizer.parts(),
        )  # fmt: skip
        self.engine = Words(tokenizer)
        self.pool = WorkflowPool(spec, PhaseLimits(**{"teardown_s": 3.0, **limits}), tokenizer, max_workers=2)
        self.loads: list[tuple[int, int, str]] = []
        self.told: list[tuple[str, str]] = []
        self.goes_on = True
        model = ModelAccess(
            generate=self.engine.generate, sampling=SamplingParams(), context_length=512, goes_on=lambda: self.goes_on
        )
        scorer = Rewarder(RewardSettings(fn="workflow"))
        self.runner = runner_of(
            self.pool, scorer, tokenizer, model=model, on_load=self._load,
            max_turns=4, timeout_s=limits.get("run_s", 60.0), run_dir="/runs/r1",
        )  # fmt: skip
        self.runner.on_failure = lambda kind, words: self.told.append((kind, words))

    def _load(self, load: GroupLoad) -> None:
        self.loads.append((load.generating, load.waiting, load.place))

    async def run(self, num: int = 3, modes: Sequence[str] = (), times: int = 99, **more: Any) -> Group:
        prompt = Prompt(
            group_id=5, row=7, pass_index=0, messages=(Message(role="user", content="3 1 2"),), label="1 2 3",
            source="d.jsonl", metadata={"modes": list(modes), "times": times},
        )  # fmt: skip
        assignment = Assignment(prompt=prompt, attempt=1, num_samples=num, sampling=SamplingParams(), **more)
        return await self.runner.run(assignment)

    def log(self) -> list[str]:
        return (self.flows.parent / "log").read_text().splitlines()


@asynccontextmanager
async def bench(
    flows: Path, model: Path, name: str, args: dict[str, Any] | None = None, **limits: float
) -> AsyncIterator[Bench]:
    made = Bench(flows, model, name, args or {}, limits)
    try:
        yield made
    finally:
        await made.pool.close()
        assert not made.pool.pids


@asynccontextmanager
async def never_held() -> AsyncIterator[list[float]]:
    """How late this loop was at most."""
    late: list[float] = [0.0]

    async def beat() -> None:
        while True:
            at = time.monotonic()
            await asyncio.sleep(0.05)
            late[0] = max(late[0], time.monotonic() - at - 0.05)

    task = asyncio.ensure_future(beat())
    try:
        yield late
    finally:
        task.cancel()


async def in_loop(ctx: WorkflowContext, prompt: Prompt) -> Sample:
    await ctx.episode.generate()
    return ctx.episode.sample(reward=1.0)


@pytest.mark.parametrize("where", ["loop", "worker"])
async def test_a_finished_group_goes_with_its_last_user(where: str, flows: Path, model: Path) -> None:
    """Its tokens are much memory; in a cycle they would wait for the collector."""
    async with bench(flows, model, "plain") as made:
        if where == "loop":
            made.runner.workflow = in_loop
        gc.collect()
        gc.disable()
        try:
            group = await made.run(num=4)
            kept = [weakref.ref(one.response_ids) for one in group.samples]
            made.engine.requests.clear()
            del group
            await until(lambda: not any(ref() is not None for ref in kept), "the end of all tokens")
        finally:
            gc.enable()


async def test_d01_an_async_workflow_runs_in_a_worker_and_gives_what_the_engine_drew(flows: Path, model: Path) -> None:
    """An interrupted episode is handed back with its tokens and is continued from them."""
    async with bench(flows, model, "plain") as made:
        group = await made.run()
        one = group.samples[0]
        assert [s.index for s in group.samples] == [0, 1, 2] and group.rewards.tolist() == [1, 1, 1]
        assert one.num_turns == 2 and one.metadata["pid"] != os.getpid()
        assert one.versions[one.loss_mask == 1].tolist() == [3] * int(one.loss_mask.sum())
        # The second request holds, verbatim, all that was drawn and said before.
        last = max((r for r in made.engine.requests if r.index == 0), key=lambda r: len(r.input_ids))
        drawn = np.concatenate([one.prompt_ids, one.response_ids])
        assert np.array_equal(last.input_ids, drawn[: len(last.input_ids)])
        made.engine.aborts = 1  # after its first token; the engine then says its words anew
        longer = [int(one.response_ids[0]), *one.response_ids.tolist()]
        assert (await made.run(1)).samples[0].response_ids.tolist() == longer
        made.goes_on, made.engine.aborts = False, 1
        with pytest.raises(Partial) as caught:
            await made.run(1)
        (partial,) = caught.value.samples
        assert partial.finish == "abort" and partial.response_ids.tolist() == one.response_ids[:1].tolist()
        made.engine.requests.clear()
        again = (await made.run(1, partial=(partial,))).samples[0]
        assert again.response_ids.tolist() == longer
        assert len(made.engine.requests[0].input_ids) == len(one.prompt_ids) + 1
        made.runner.model = ModelAccess(generate=made.engine.generate, sampling=SamplingParams(), context_length=4)
        with pytest.raises(PromptTooLong):
            await made.run(1)


async def test_d01_a_plain_def_is_a_workflow(flows: Path, model: Path) -> None:
    async with bench(flows, model, "sync") as made, never_held() as late:
        group = await made.run(8)
    last = [one for one in group.samples if one.branch == 0]
    assert len(group.samples) == 32 and [(one.reward, one.num_turns) for one in last] == [(0.25, 2)] * 8
    assert len({one.metadata["pid"] for one in last}) == 1 and late[0] < 1.0


async def test_what_an_episode_waits_for_is_told_with_its_turn(flows: Path, model: Path) -> None:
    async with bench(flows, model, "searches") as made:
        seen: list[Timeline] = []
        made.runner.on_end = lambda group: seen.extend(member.timeline for member in group.members)
        await made.run(2)
        for timeline in seen:
            own = [(one.label, one.turn) for one in timeline.stretches if one.branch == 0 and one.kind != "workflow"][
                :5
            ]
            assert own == [("engine", 1), ("generate", 1), ("tool search", 1), ("engine", 2), ("generate", 2)]
            spent = timeline.seconds()
            assert spent["tool"] > 0.07 and spent["environment"] > 0.03 and spent["judge"] == 0
            whole_s = max(one.ended_s for one in timeline.stretches) - timeline.began_s
            assert sum(spent.values()) == pytest.approx(whole_s, abs=0.04), "one thing at a time"
            assert timeline.doing is None
        assert ("tool search" in {place for _, _, place in made.loads}) and made.loads[-1][:2] == (0, 0)
        assert made.runner.lengths()["rollout/tool_s_max"] > 0.07
        assert made.runner.seconds()["rollouts/tool"] > 0.14


async def test_phases_of_a_workflow_are_waits_and_an_unknown_kind_is_refused(flows: Path, model: Path) -> None:
    async with bench(flows, model, "Scored") as made:
        await made.run(2)
        spent = made.runner.seconds()
        assert min(spent["rollouts/environment"], spent["rollouts/judge"]) > 0.02 < spent["rollouts/tool"]
        with pytest.raises(UserCodeError, match="waits_for.'weather'"):
            await made.run(1, modes=["x"])
        assert made.loads[-1][:2] == (0, 0)


async def test_workflows_with_the_openai_sdk(flows: Path, model: Path) -> None:
    flows.write_text(SDK_FLOWS)
    async with bench(flows, model, "BySdk") as made:
        group = await made.run(4)
        assert [(one.reward, one.num_turns) for one in group.samples] == [(None, 2), (1.0, 1)] * 4


async def test_a_sample_without_a_score_of_its_judge_is_masked_and_the_others_learn(flows: Path, model: Path) -> None:
    class Strict(Rewarder):
        async def score(self, completion: Completion) -> RewardOutcome:
            if completion.index < 2:
                raise MemberFailed("the judge gave no score", kind="environment")
            return RewardOutcome(0.5)

    async with bench(flows, model, "plain") as made:
        runner = made.runner.judged_by(Strict(RewardSettings(fn="workflow")))
        made.runner = runner
        group = await made.run(4)
        assert [one.index for one in group.samples] == [2, 3] and group.num_masked == 2
        assert group.rewards.tolist() == [0.5, 0.5] and runner.failures["rollout/num_masked"] == 2
        with pytest.raises(MemberFailed, match="no score"):
            await made.run(2)


async def test_d01_plain_phases_that_hang_cost_their_worker_only_after_the_others(flows: Path, model: Path) -> None:
    """Gym-style: they block one another neither while they step nor when one of them never ends."""
    async with bench(flows, model, "Gym", run_s=2.0, block_s=0.5) as made:
        made.runner.options.rollout = made.runner.options.rollout.model_copy(update={"max_retries": 0})
        group = await made.run(6)
        assert "Gym.step (flows.py)" in {place for _, _, place in made.loads}
        assert [one.index for one in group.samples] == [1, 2, 3, 4, 5] and group.num_masked == 1
        ((kind, words),) = made.told
        assert kind == "environment" and "did not finish within 2 s at Gym.step (flows.py:" in words
        await until(lambda: not made.pool.pids, "the hung call ends with its worker")
        group = await made.run(2)
        assert [one.index for one in group.samples] == [1]
    lines = made.log()
    pids = {line.split()[-1] for line in lines}
    assert len(pids) == 2 and [lines.count(f"teardown {pid}") for pid in sorted(pids)] in ([6, 2], [2, 6])


async def test_d01_what_swallows_its_cancellation_is_left_alone(flows: Path, model: Path) -> None:
    async with bench(flows, model, "play", **LIMIT_S) as made:
        made.runner.options.rollout = made.runner.options.rollout.model_copy(update={"max_retries": 0})
        began_s = time.monotonic()
        group = await made.run(3, ["deaf"])
        assert group.num_masked == 1 and time.monotonic() - began_s < 20.0
        await until(lambda: not made.pool.pids)


async def test_d01_c_code_that_holds_the_interpreter_is_seen(
    flows: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "SILENT_S", 2.0)
    async with bench(flows, model, "play", **LIMIT_S) as made:
        group = await made.run(3, ["interpreter"], times=1)
        assert len(group.samples) == 3
        assert made.told and made.told[0][0] == "environment" and "it said nothing for 3.5 s" in made.told[0][1]


async def test_d04_a_teardown_is_not_cut_by_the_end_of_the_actor(flows: Path, model: Path) -> None:
    async with bench(flows, model, "SlowTeardown") as made:
        run = asyncio.ensure_future(made.run(1))
        await until(lambda: any(load[2] == "SlowTeardown.step (flows.py)" for load in made.loads))
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        await made.pool.close()
        assert len(made.log()) == 1


async def test_d01_an_environment_that_blocks_or_hangs_ends_its_episode_only(flows: Path, model: Path) -> None:
    async with bench(flows, model, "play", **LIMIT_S) as made, never_held() as late:
        made.runner.options.rollout = made.runner.options.rollout.model_copy(update={"max_retries": 1})
        group = await made.run(4, ["block", "", "hang", "thread"])
        assert [s.index for s in group.samples] == [1] and group.num_masked == 3
        assert made.runner.failures["rollout/failures/environment"] >= 6
        assert (await made.run(2, ["block"])).num_masked == 1, "the pool works on"
        lines = made.log()
        assert [lines.count(f"close r1.5.{who}") for who in ("0 0", "0 1", "2 0", "2 1", "3 0", "3 1")] == [
            2, 2, 1, 1, 1, 1,
        ]  # fmt: skip
        assert (await made.run(4, ["stubborn"])).num_masked == 1, "it swallows every exception, and loses its worker"
        assert (await made.run(2)).num_masked == 0, "the pool works on"
    assert late[0] < 1.0
    assert any("Env.step (flows.py:" in words for _, words in made.told), made.told


async def test_d03_failures_have_a_kind_that_says_what_becomes_of_the_member(flows: Path, model: Path) -> None:
    modes = ["raise", "environment", "sandbox", "network"]
    kinds: dict[FailureKind, int] = {"network": 2, "environment": 1, "sandbox": 1}
    async with bench(flows, model, "play") as made:
        failures = made.runner.failures

        async def costs(mode: str, error: type[Exception], says: str) -> pytest.ExceptionInfo[Exception]:
            with pytest.raises(error, match=says) as caught:
                await made.run(3, [mode])
            return caught

        group = await made.run(5, modes, times=1)
        assert len(group.samples) == 5 and group.num_masked == 0, "each was retried"
        assert {kind: failures[f"rollout/failures/{kind}"] for kind in kinds} == kinds and failures[
            "rollout/num_retried"
        ] == 4
        assert {"begin r1.5.0 0 False", "begin r1.5.0 1 True"} <= set(made.log())
        made.runner.options.rollout = made.runner.options.rollout.model_copy(update={"max_retries": 0})
        group = await made.run(5, modes)
        assert [s.index for s in group.samples] == [4] and group.num_masked == 4
        with pytest.raises(MemberFailed, match=r"raised ConnectionError: sandbox gone at .*flows.py:\d+ .group 5, s"):
            await made.run(2, ["raise"] * 2)
        caught = await costs("policy", MemberFailed, "illegal move")
        assert getattr(caught.value, "kind", "") == "policy" and failures["rollout/num_retried"] == 4
        for mode, says in (
            ("bug", r"workflow raised KeyError: 'level' at .*flows.py:\d+ \(group 5, sam"), ("copy", "was copied"),
            ("forget", "returned a value of type NoneType, not a Sample"), ("odd", "loss_mask has shape"),
        ):  # fmt: skip
            await costs(mode, Exception, says)
        assert "user-code" in {kind for kind, _ in made.told}
        made.runner.options.reward = made.runner.options.reward.model_copy(update={"on_error": "zero"})
        group = await made.run(3, ["policy"])
        assert group.rewards.tolist() == [0, 1, 1] and int(group.samples[0].loss_mask.sum()) > 0
        made.runner.options.rollout = made.runner.options.rollout.model_copy(update={"max_retries": 3})
        group = await made.run(3, ["die"], times=1)
        assert len(group.samples) == 3 and made.told[-1][0] == "environment"


async def test_d04_phases_have_limits_and_teardown_always_runs(flows: Path, model: Path) -> None:
    async with bench(flows, model, "Shop", {"price": 2}, **LIMIT_S) as made:
        made.runner.options.rollout = made.runner.options.rollout.model_copy(update={"max_retries": 0})
        group = await made.run()
        assert [s.index for s in group.samples] == [0] and group.num_masked == 2
        assert group.rewards.tolist() == [2.0]
    lines = made.log()
    assert lines.count("teardown 2") == 3 and lines.count("finalize 0") == 1
    assert sorted(line for line in lines if line.startswith("setup")) == [f"setup r1.5.{i}" for i in range(3)]
    for name in ("HangingSetup", "HangingInit"):
        async with bench(flows, model, name, {}, setup_s=0.3) as made:
            made.runner.options.rollout = made.runner.options.rollout.model_copy(update={"max_retries": 0})
            with pytest.raises(MemberFailed, match=rf"did not finish setup within 0.3 s at {name}.\w+ \(flows.py:\d"):
                await made.run(1)
            await until(lambda made=made: not made.pool.pids, "the hung call ends with its worker")


async def test_d04_teardown_runs_when_the_actor_ends_and_when_a_group_is_given_up(flows: Path, model: Path) -> None:
    """While it waits for the environment, the load says where."""
    async with bench(flows, model, "play") as made:
        first = asyncio.ensure_future(made.run(2, ["hang"] * 2))
        await until(lambda: (0, 2, "Env.step (flows.py)") in made.loads and made.log().count("step r1.5.0") == 1)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        second = asyncio.ensure_future(made.run(1, ["hang"]))
        await until(lambda: made.log().count("step r1.5.0") == 2)
        await made.pool.close()
        with pytest.raises((MemberFailed, UserCodeError)):
            await second
    assert made.log().count("close r1.5.0 0") == 2


async def test_arguments_that_a_workflow_does_not_take_are_named(flows: Path, model: Path) -> None:
    async with bench(flows, model, "plain", {"tunrs": 2}) as made:
        with pytest.raises(Exception, match="tunrs"):
            await made.run(1)


async def test_a_turn_that_was_given_up_is_not_taken_for_the_next(flows: Path, model: Path) -> None:
    async with bench(flows, model, "gives_up") as made:
        group = await made.run(4)
    for one in group.samples:
        words = [turn.strip() for turn in one.turns]
        assert words == ["12"] * len(words) and len(words) == one.metadata["turns"]


async def test_d01_a_workflow_that_exits_costs_its_group_only(flows: Path, model: Path) -> None:
    async with bench(flows, model, "leaves") as made:
        for _ in range(2):
            with pytest.raises(UserCodeError, match=r"raised (SystemExit: 3|KeyboardInterrupt)"):
                await made.run(3)
        (pid,) = made.pool.pids
        assert psutil.pid_exists(pid)


SUBREAPER = "myxa.actors.subreaper"
ACTOR = """
import asyncio, sys
sys.path[:0] = [{root!r}]
from pathlib import Path
from tests.workflows.test_workflow_workers import bench

async def main():
    async with bench(Path({flows!r}), Path({model!r}), "play") as made:
        await made.run(2, ["hang"])

asyncio.run(main())
"""


def test_d04_teardown_runs_when_the_actor_is_killed(flows: Path, model: Path) -> None:
    log = flows.parent / "log"
    text = ACTOR.format(root=str(Path(__file__).parents[2]), flows=str(flows), model=str(model))
    actor = subprocess.Popen([sys.executable, "-c", text])

    def is_hanging() -> bool:
        assert actor.poll() is None
        return log.exists() and log.read_text().count("begin") >= 2 and log.read_text().count("close") >= 1

    try:
        wait_until(is_hanging)
    finally:
        actor.kill()
        actor.wait()
    wait_until(lambda: "close r1.5.0 0" in log.read_text())
    wait_until(lambda: not _orphaned_workers())


def _orphaned_workers() -> list[int]:
    """Worker processes are named by their subreaper's command only; those of other tests end with their pools."""
    workers = [one for one in psutil.process_iter(["ppid", "cmdline"]) if one.info["ppid"] in (1, os.getpid())]
    return [one.pid for one in workers if SUBREAPER in " ".join(one.info["cmdline"] or ())]
