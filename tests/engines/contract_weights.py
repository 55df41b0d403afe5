"""The contract's part about pauses and weights: nothing runs in a pause, every token knows its version."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import numpy as np
from tests.engines.contract import (
    Result,
    Subject,
    ask,
    check_logprobs,
    collect,
    endless,
    fails,
    later,
    scenario,
    started,
)  # fmt: skip

from myxa.core.errors import EngineError


@scenario
async def tokens_around_a_commit_carry_their_version(subject: Subject) -> None:
    requests = [ask(f"r{i}", 8, max_new_tokens=60, ignore_eos=True) for i in range(3)]
    async with started(subject.engine, *requests) as streams:
        await asyncio.sleep(subject.runs_s / 3)
        await subject.engine.prepare_weights(subject.publish(3, subject.versions[1]))
        assert (await subject.engine.info()).version == 0
        await subject.engine.commit_weights(3)
        assert (await subject.engine.info()).version == 3
        mixed = await asyncio.gather(*streams)
    for request, got in zip(requests, mixed, strict=True):
        assert set(got.versions.tolist()) <= {0, 3}
        exact = subject.score(subject.versions[0]).logprobs(request.input_ids, got.ids, 1.0)
        is_old = np.abs(exact - got.logprobs) <= subject.tolerance
        assert is_old[got.versions == 3].mean() < 0.2 if 3 in got.versions else True, "a stamp is newer than its token"
        assert is_old[got.versions == 0].all() or not subject.tells_spans
    fresh = ask("r0", 8, max_new_tokens=12, ignore_eos=True)
    after = await collect(subject.engine, fresh)
    assert set(after.versions.tolist()) == {3}
    check_logprobs(subject, fresh, after, version=1)


@scenario
async def requests_that_come_during_a_commit_are_answered(subject: Subject) -> None:
    async with started(subject.engine, *(endless(f"old{i}", 3, max_new_tokens=40) for i in range(3))) as old:
        await subject.engine.prepare_weights(subject.publish(3, subject.versions[1]))
        commit = asyncio.get_running_loop().create_task(subject.engine.commit_weights(3))
        late: list[asyncio.Task[Result]] = []
        for i in range(8):
            late.append(later(subject.engine, ask(f"late{i}", 3, max_new_tokens=2, ignore_eos=True)))
            await asyncio.sleep(0.002)
        await commit
        assert {result.finish for result in await asyncio.gather(*old, *late)} == {"length"}


@scenario
async def nothing_the_old_weights_left_behind_answers_for_the_new_ones(subject: Subject) -> None:
    """The same long prompt before and after a commit: an answer out of a prefix cache would have the old keys."""
    prompt = ask("prompt", 40).input_ids
    before = ask("before", prompt, max_new_tokens=6, ignore_eos=True)
    check_logprobs(subject, before, await collect(subject.engine, before))
    for version, folder in ((5, 1), (6, 0)):
        await subject.engine.prepare_weights(subject.publish(version, subject.versions[folder]))
        await subject.engine.commit_weights(version)
        after = ask(f"after{version}", prompt, max_new_tokens=6, ignore_eos=True)
        got = await collect(subject.engine, after)
        assert set(got.versions.tolist()) == {version}
        check_logprobs(subject, after, got, version=folder)


@scenario
async def only_the_prepared_version_is_committed(subject: Subject) -> None:
    engine, publish = subject.engine, subject.publish
    await fails(engine.commit_weights(1), EngineError, "version 1 cannot be committed, nothing is prepared")
    await engine.prepare_weights(publish(1, subject.versions[1]))
    await fails(engine.commit_weights(2), EngineError, "version 2 cannot be committed, version 1 is prepared")
    await engine.prepare_weights(publish(2, subject.versions[2]))
    await fails(engine.commit_weights(1), EngineError, "version 1 cannot be committed, version 2 is prepared")
    await engine.commit_weights(2)
    await fails(engine.commit_weights(2), EngineError, "nothing is prepared")
    assert (await engine.info()).version == 2
    await engine.prepare_weights(publish(1, subject.versions[1]))  # a trainer that went back to a checkpoint
    await engine.commit_weights(1)
    assert (await engine.info()).version == 1


@scenario
async def bad_weights_are_refused_and_the_old_ones_stay(subject: Subject) -> None:
    engine = subject.engine
    request = ask("r", 8, max_new_tokens=8, ignore_eos=True, temperature=0.0)
    before = await collect(engine, request)

    async def attempt(location: Path) -> None:
        await engine.prepare_weights(msgspec.structs.replace(manifest, location=str(location)))
        await engine.commit_weights(1)

    manifest = subject.publish(1, subject.versions[1])
    weights = Path(manifest.location) / "model.safetensors"
    whole = weights.read_bytes()
    await fails(attempt(Path(manifest.location) / "no"), EngineError, "version 1")
    for torn in (whole[:-100], whole[: len(whole) // 2], b"\0" * 100, b""):
        weights.write_bytes(torn)
        await fails(attempt(Path(manifest.location)), EngineError)
    weights.unlink()
    await fails(attempt(Path(manifest.location)), EngineError)
    after = await collect(engine, request)
    assert np.array_equal(before.ids, after.ids)
    assert set(after.versions.tolist()) == {0}
    assert (await engine.info()).version == 0
