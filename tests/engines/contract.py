"""What every engine owes the rollout: the terms of the contract that its scenarios share.

A scenario is an async function of one `Subject`, an engine that was started on the first of three weight versions and
that nobody else uses. It raises AssertionError, or what the engine raises. Scenarios know nothing of pytest, so that the
same ones run on a GPU host that has none (`run_sglang.py`); `test_contract.py` runs them on every engine of this machine
and on the recorded answers of real servers. They never depend on how fast an engine is.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from myxa.actors.engines.sglang.server_args import SglangNeeds
from myxa.core.errors import MyxaError
from myxa.core.messages import SamplingParams, WeightManifest
from myxa.core.protocols import Delta, Engine, GenerateRequest

VOCAB = 320
CONTEXT = 512
MAX_RUNNING = 16
Penalties = Literal["exact", "any order", "late"]


class Scoring(Protocol):
    """transformers' full forward of one model folder."""

    def logits(self, prompt: Any, output: Any) -> np.ndarray:
        """float32 [R, vocabulary]: what each output token was drawn from."""
        ...

    def logprobs(self, prompt: Any, output: Any, temperature: float) -> np.ndarray:
        """float32 [R]: what each output token should have been given."""
        ...


@dataclass(frozen=True, slots=True)
class Subject:
    """An engine under test and what is known of it."""

    engine: Engine
    versions: Sequence[Path]
    """Model folders of weight versions 0, 1 and 2."""
    publish: Callable[[int, Path], WeightManifest]
    """Publishes a folder's weights as a version on the disk channel."""
    score: Callable[[Path], Scoring]
    tolerance: float
    """Largest difference of a log-prob to transformers' in float32."""
    tells_spans: bool
    """Whether the engine knows which version each token is of; SGLang 0.5.17 does not, and its client stamps tokens
    no newer than they are."""
    penalties: Penalties = "exact"
    """"exact", or as SGLang 0.5.17 applies them, which forgets at a retraction what the answer had before: "any order"
    without its overlap schedule (each process has an order of its own), "late" with it (the last token of the prompt
    counts, the newest of the answer not yet; where another request joins, one token more is missed and one counts
    twice)."""
    runs_s: float = 0.15
    """How long a long request is left alone so that some of its tokens exist."""


Scenario = Callable[[Subject], Awaitable[None]]
SCENARIOS: dict[str, Scenario] = {}
NEEDS: dict[str, SglangNeeds] = {}
"""Of the scenarios that not every server can serve, by the way it was started."""


def scenario(run: Scenario) -> Scenario:
    """Make it part of the contract."""
    SCENARIOS[run.__name__] = run
    return run


def scenario_with(needs: SglangNeeds) -> Callable[[Scenario], Scenario]:
    """Make it part of the contract with servers that meet `needs`."""

    def register(run: Scenario) -> Scenario:
        NEEDS[run.__name__] = needs
        return scenario(run)

    return register


def ask(name: str, prompt: Any = 8, **sampling: Any) -> GenerateRequest:
    """A request; `prompt` is its ids, or how many random ones (always the same for a name)."""
    if isinstance(prompt, int):
        prompt = np.random.default_rng(zlib.crc32(name.encode())).integers(0, 256, prompt)
    return GenerateRequest(
        request_id=name, input_ids=np.asarray(prompt, dtype=np.int32), sampling=SamplingParams(**sampling)
    )


def later(engine: Engine, request: GenerateRequest) -> asyncio.Task[Result]:
    return asyncio.get_running_loop().create_task(collect(engine, request))


def endless(name: str, prompt: Any = 10, **sampling: Any) -> GenerateRequest:
    """A request that only a pause, an abort or a long time can end; greedy."""
    return ask(name, prompt, **({"max_new_tokens": 480, "ignore_eos": True, "temperature": 0.0} | sampling))


class Result:
    """All deltas of one request, joined and checked."""

    def __init__(self, deltas: list[Delta]) -> None:
        self.deltas = deltas
        self.ids = np.concatenate([d.output_ids for d in deltas])
        self.logprobs = np.concatenate([d.logprobs for d in deltas])
        self.versions = np.concatenate([d.versions for d in deltas])
        self.finish = deltas[-1].finish
        self.matched = deltas[-1].matched
        self.matched_text = deltas[-1].matched_text
        assert [d.finish for d in deltas[:-1]] == [None] * (len(deltas) - 1)
        assert self.ids.dtype == self.versions.dtype == np.int32
        assert self.logprobs.dtype == np.float32
        assert len(self.ids) == len(self.logprobs) == len(self.versions)


async def collect(engine: Engine, request: GenerateRequest) -> Result:
    got = Result([delta async for delta in engine.generate(request)])
    assert got.finish is not None
    assert np.array_equal(got.versions, np.sort(got.versions)), "versions never go back inside a generation"
    return got


@asynccontextmanager
async def started(engine: Engine, *requests: GenerateRequest) -> AsyncIterator[list[asyncio.Task[Result]]]:
    """Streams that are read in the background, once the engine has them all; nothing of them is left behind."""
    tasks = [later(engine, request) for request in requests]
    try:
        num_there = 0
        while num_there < len(tasks):
            await asyncio.sleep(0.005)
            info = await engine.info()
            num_waiting = 0 if info.kind == "sglang" else info.waiting  # a client's waiting ones are still on their way
            num_there = info.running + num_waiting + sum(task.done() for task in tasks)
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def fails(attempt: Awaitable[Any], kind: type[MyxaError], *says: str) -> MyxaError:
    """The error that `attempt` must raise: of that kind, with a remedy and these words."""
    error: MyxaError | None = None
    value: Any = None
    try:
        value = await attempt
    except kind as err:
        error = err
    assert error is not None, f"{kind.__name__} was not raised, the answer was {value!r}"
    assert error.remedy, f"no remedy: {error}"
    for word in says:
        assert word in str(error), f"{word!r} is not in: {error}"
    return error


def check_logprobs(subject: Subject, request: GenerateRequest, got: Result, version: int = 0) -> None:
    exact = subject.score(subject.versions[version]).logprobs(request.input_ids, got.ids, request.sampling.temperature)
    worst = float(np.abs(exact - got.logprobs).max()) if len(got.ids) else 0.0
    assert worst <= subject.tolerance, f"{request.request_id}: log-probs are off by {worst:.2e}"
