"""Engines that lie: recognised at the first wrong piece, given up, and their groups go on with the sound tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.actors.data_floor import GateEngine, data_floor
from tests.harness.dumps import whole_groups
from tests.harness.waiting import until

from myxa.actors.stream_checks import StreamChecks
from myxa.core.errors import EngineLied
from myxa.core.messages import SamplingParams
from myxa.core.protocols import Delta, GenerateRequest

VOCAB = 100


def delta(
    ids: Any = (5, 6), logprobs: Any = None, versions: Any = None, finish: Any = None, matched: int | None = None
) -> Delta:
    ids = np.asarray(ids, dtype=np.int32)
    return Delta(
        output_ids=ids,
        logprobs=np.asarray(np.full(ids.size, -0.5) if logprobs is None else logprobs, dtype=np.float32),
        versions=np.asarray(np.full(ids.size, 3) if versions is None else versions, dtype=np.int32),
        finish=finish,
        matched=matched,
    )


def checks_of(lies: list[EngineLied], *, told: tuple[int, ...] = (3,), may_be_older: bool = False) -> StreamChecks:
    checks = StreamChecks("rollout/0", may_be_older=may_be_older, on_lie=lies.append)
    checks.vocab_size = VOCAB
    for version in told:
        checks.loading(version)
        checks.loaded()
    return checks


def ask(limit: int = 6) -> GenerateRequest:
    return GenerateRequest(
        request_id="r1", input_ids=np.arange(3, dtype=np.int32), sampling=SamplingParams(max_new_tokens=limit)
    )


async def told_by(checks: StreamChecks, *deltas: Delta) -> list[Delta]:
    async def engine(request: GenerateRequest) -> AsyncIterator[Delta]:
        for one in deltas:
            yield one

    return [one async for one in checks.watch(engine)(ask())]


LIES: dict[str, tuple[Delta, str]] = {
    "a stamp of a version that it was never given": (delta(versions=(3, 4)), "stamped with weight version 4"),
    "a stamp of a version before the one it serves": (delta(versions=(2, 2)), "stamped with weight version 2"),
    "a stamp that is no version": (delta(versions=(3, -1)), "stamped with weight version -1"),
    "a token outside the vocabulary": (delta(ids=(5, VOCAB)), "token id 100 lies outside"),
    "a negative token": (delta(ids=(-1, 5)), "token id -1 lies outside"),
    "a log-prob that is no number": (delta(logprobs=(-0.1, np.nan)), "NaN or infinite"),
    "a log-prob without bound": (delta(logprobs=(-np.inf, -0.1)), "NaN or infinite"),
    "a positive log-prob": (delta(logprobs=(-0.1, 0.5)), "0.5, above 0"),
    "a token without log-prob": (delta(logprobs=(-0.1,)), "1 logprobs came for 2 tokens"),
    "a log-prob without token": (delta(logprobs=(-0.1,) * 3), "3 logprobs came for 2 tokens"),
    "a token without stamp": (delta(versions=(3,)), "1 versions came for 2 tokens"),
    "tokens in a table": (delta(ids=((5, 6), (7, 8)), versions=((3, 3), (3, 3))), r"shape \[2, 2\]"),
    "more tokens than were asked for": (delta(ids=range(1, 6)), "7 tokens came, 6 were asked for"),
    "an end by a token that is not the last": (
        delta(finish="stop", matched=9),
        "token 9 stopped it, the last one is 6",
    ),
}


@pytest.mark.parametrize("name", LIES)
async def test_each_lie_ends_the_stream_and_what_came_before_is_handed_on(name: str) -> None:
    lie, words = LIES[name]
    lies: list[EngineLied] = []
    got: list[Delta] = []

    async def engine(request: GenerateRequest) -> AsyncIterator[Delta]:
        yield delta()
        yield lie
        raise AssertionError("nobody reads on")

    with pytest.raises(EngineLied, match=words) as caught:
        async for one in checks_of(lies).watch(engine)(ask()):
            got.append(one)
    assert len(got) == 1, "the sound piece"
    assert lies == [caught.value]
    assert "rollout/0: request 'r1', after 2 tokens" in caught.value.message


async def test_nothing_may_come_after_the_end() -> None:
    lies: list[EngineLied] = []
    with pytest.raises(EngineLied, match="after its end"):
        await told_by(checks_of(lies), delta(finish="length"), delta())


async def test_a_truthful_stream_passes_through_commits_and_a_trainer_that_went_back() -> None:
    """Order of commits counts, not the size of their numbers."""
    lies: list[EngineLied] = []
    checks = checks_of(lies, told=(4, 5))
    checks.loading(3)
    seen = await told_by(
        checks, delta(versions=(5, 5)), delta(versions=(5, 3)), delta(finish="stop", matched=6, versions=(3, 3))
    )
    assert len(seen) == 3
    checks.loaded()
    with pytest.raises(EngineLied, match=r"stamped with weight version 5; its orders were \[3\]"):
        await told_by(checks, delta(versions=(5, 5)))
    with pytest.raises(EngineLied, match=r"stamped with weight version 3; its orders were \[5\]"):
        checks.loading(5)
        await told_by(checks, delta(versions=(3, 5)), delta(versions=(5, 3)))  # backwards within a stream
    assert len(lies) == 2


async def test_a_version_that_it_refused_must_not_be_stamped() -> None:
    checks = checks_of([], told=(3,))
    checks.loading(4)
    checks.kept()
    with pytest.raises(EngineLied, match=r"version 4; its orders were \[3\]"):
        await told_by(checks, delta(versions=(3, 4)))


async def test_behind_a_router_an_older_server_may_answer() -> None:
    checks = checks_of([], told=(2, 3), may_be_older=True)
    assert len(await told_by(checks, delta(versions=(2, 2)), delta(versions=(2, 3)))) == 2
    with pytest.raises(EngineLied, match="version 1"):
        await told_by(checks, delta(versions=(1, 1)))


TWISTS: dict[str, dict[str, Any]] = {
    "logprob": {"logprobs": np.full(5, np.nan, dtype=np.float32)},
    "stamp": {"versions": np.full(5, 9, dtype=np.int32)},
    "token": {"output_ids": np.full(5, 512, dtype=np.int32)},
}


@pytest.mark.parametrize("twist", TWISTS)
async def test_the_groups_of_a_liar_go_on_elsewhere_with_their_sound_tokens(tmp_path: Path, twist: str) -> None:
    """Every answer has one sound token; the liar's second piece is wrong. Nobody trains on that, nothing is lost."""
    honest = GateEngine()
    liar = GateEngine()
    truth = liar._delta

    def lies(count: int, finish: Any) -> Delta:
        told = truth(count, finish)
        return (
            told if finish is None else Delta(**{n: getattr(told, n) for n in told.__struct_fields__} | TWISTS[twist])
        )

    liar._delta = lies
    async with data_floor(tmp_path, batch_size=4) as floor:
        await floor.add("rollout/0", engine=liar, max_groups=2)
        await until(lambda: liar.open == 4, "two groups of two")
        liar.gate.set()
        async with asyncio.timeout(30):
            while (await floor.buffer.stats()).states.get("REQUEUED") != 2:
                await asyncio.sleep(0.01)
        assert floor.rollouts["rollout/0"].counts["num_lies"] >= 1
        await floor.add("rollout/1", engine=honest, max_groups=2)
        await until(lambda: honest.open == 4, "the same groups")
        assert {int(request.input_ids[-1]) for request in honest.requests} == {7}, "each begins with the sound token"
        assert {request.sampling.max_new_tokens for request in honest.requests} == {5}, "and needs five more"
        honest.gate.set()
        await floor.until_states(lambda states: states.get("READY", 0) >= 2, "both are ready")
        theirs = [found for found in whole_groups(tmp_path / "ledger.sqlite") if found[0].group_id < 2]
        assert len(theirs) == 2
        for row, group in theirs:
            assert [sample.response_ids.size for sample in group.samples] == [6, 6]
            assert all(set(sample.versions.tolist()) == {0} for sample in group.samples)
            assert (row.rollout, row.attempt) == ("rollout/1", 2)
