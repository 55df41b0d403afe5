"""What is learnt is what the engine drew: random conversations through every dialect, and a pass of its own over them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from msgspec.structs import replace
from tests.engines.contract_subjects import EXACT, publisher
from tests.gateway.exact_lab import (
    CONTEXT,
    FAMILIES,
    MAX_NEW,
    Call,
    Talk,
    Tally,
    Witness,
    make_folder,
    open_session,
    runs,
)
from tests.gateway.scripted import serving
from tests.harness.engine_server import scores

from myxa.actors.engines.embedded.engine import EmbeddedEngine, EmbeddedOptions
from myxa.actors.gateway.server import Gateway
from myxa.core.messages import SamplingParams
from myxa.core.samples import Sample


@asynccontextmanager
async def engine_of(folder: Path, *, is_invariant: bool = False) -> AsyncGenerator[EmbeddedEngine]:
    engine = EmbeddedEngine(
        folder, EmbeddedOptions(stream_interval=3, seed=1, is_invariant=is_invariant, context_length=CONTEXT)
    )
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def conversed(
    folder: Path, name: str, num_turns: int, seed: int, *, is_seeded: bool = False, num_at_once: int = 3
) -> tuple[Tally, list[Sample], list[Call]]:
    """Sessions until there were so many turns. The weights change in the middle."""
    family, tally, samples, calls = FAMILIES[name], Tally(), list[Sample](), list[Call]()
    tokenizer = make_folder(folder / "v0", family)
    make_folder(folder / "v1", family, seed=1)
    sampling = SamplingParams(max_new_tokens=MAX_NEW, seed=5 if is_seeded else None)
    gateway, rng = Gateway(), random.Random(seed)
    async with (
        engine_of(folder / "v0", is_invariant=is_seeded) as engine,
        serving(gateway) as url,
        aiohttp.ClientSession() as http,
    ):

        async def session() -> None:
            while tally.turns < num_turns:
                witness = Witness(engine.generate)
                one, key = open_session(gateway, tokenizer, witness, sampling)
                talk = Talk(url, key, one, witness, tokenizer, family, random.Random(rng.random()), tally, http)
                for _ in range(12):
                    await talk.turn()
                samples.extend(await talk.end())
                calls.extend(witness.calls)
                await gateway.close(key)

        async def new_weights() -> None:
            while tally.turns < num_turns / 2:
                await asyncio.sleep(0.01)
            publish = publisher(folder / "weights", [folder / "v0"])
            await engine.prepare_weights(publish(1, folder / "v1"))
            await engine.commit_weights(1)

        async with asyncio.TaskGroup() as group:
            for _ in range(num_at_once):
                group.create_task(session())
            if not is_seeded:
                group.create_task(new_weights())
    return tally, samples, calls


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("num_turns", [30, pytest.param(1500, marks=[pytest.mark.soak, pytest.mark.timeout(1500)])])
async def test_random_conversations_are_learnt_as_they_were_drawn(name: str, num_turns: int, tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    tally, samples, _ = await conversed(tmp_path, name, num_turns, seed)
    print(tally)
    assert tally.continued > tally.turns / 8
    assert tally.naive_drift > 0
    assert sum(tally.refused.values()) < 0.5 * tally.requests
    assert {0, 1} <= {int(v) for one in samples for v in np.unique(one.versions[one.loss_mask == 1])}


async def test_a_pass_of_its_own_finds_the_same_log_probs(tmp_path: Path) -> None:
    """At version 0: of what is learnt, another engine finds the same log-probs to the bit, from a prefill of the
    sample's tokens before them. One forward pass over a whole sample finds them to 1e-5."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    _, samples, calls = await conversed(tmp_path, "qwen3", 12, seed, is_seeded=True, num_at_once=1)
    rng, num_tokens, worst = random.Random(seed), 0, 0.0
    requests = {(tuple(call.prompt), call.fact): call.request for call in calls}
    async with engine_of(tmp_path / "v0", is_invariant=True) as engine:
        for sample in samples:
            ids, at = np.concatenate([sample.prompt_ids, sample.response_ids]), len(sample.prompt_ids)
            if sample.temperature == 1.0:
                exact = await scores(engine, ids, at)
                worst = max(worst, float(np.abs(exact - sample.logprobs)[sample.loss_mask == 1].max()))
            for run, start in zip(runs(sample), starts(sample), strict=True):
                was = requests[tuple(ids[: at + start].tolist()), run]
                done = rng.randrange(len(run[0]))
                request = replace(
                    was, input_ids=ids[: at + start + done],
                    sampling=was.sampling.for_rest(num_done=done, limit=was.sampling.max_new_tokens - done),
                )  # fmt: skip
                parts = [delta async for delta in engine.generate(request)]
                found = np.concatenate([one.logprobs for one in parts])
                assert np.concatenate([one.output_ids for one in parts]).tolist() == list(run[0][done:])
                assert float(np.abs(found - np.float32(run[1][done:])).max()) == 0.0
                num_tokens += len(found)
    print(f"{num_tokens} tokens differ by 0; of one pass all by at most {worst:.1e}")
    assert num_tokens > 20
    assert worst < EXACT


def starts(sample: Sample) -> list[int]:
    """Where runs of learnt tokens begin."""
    return np.flatnonzero(np.diff(np.concatenate([[0], sample.loss_mask])) == 1).tolist()
