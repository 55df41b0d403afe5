"""After the trainer went back, engines that still serve a version that was undone keep the bound, whatever number they
tell; and numbers may go down."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.buffer.conftest import make_group

from myxa.actors.weights.engine_versions import ALWAYS_NEWEST, EngineVersions, ServedWeights
from myxa.core.messages import Assignment

ETA, BATCH, NUM_ENGINES, NUM_EVENTS = 2, 2, 3, 250


async def trained_to(desk: Any, version: int) -> None:
    for step in range(version):
        await desk.adopted("rollout/0", 1, step)
        await desk.fill(BATCH, version=step, versions=(step, step))
        await desk.train(step)
    await desk.adopted("rollout/0", 1, version)


async def test_an_engine_goes_down_with_the_trainer(shop: Any) -> None:
    async with shop.open(max_staleness=ETA) as desk:
        await trained_to(desk, 6)
        (before,) = (await desk.draw(1, version=6)).assignments
        assert await desk.rewind(3) == 3 * BATCH
        assert (await desk.put(before, (6, 6))).outcome == "ready"
        claims = [await desk.ref.claim(3, 0.0)]
        assert set(claims[0].groups.values()) == {3}
        await desk.ref.trained(3)
        await desk.adopted("rollout/0", 1, 3)
        for step in (4, 5):
            claims.append(await desk.ref.claim(step, 0.0))
            await desk.ref.trained(step)
        assert {oldest for claim in claims for oldest in claim.groups.values()} == {3}
        assert not (await desk.draw(1, version=3)).assignments, "too old for what comes next"
        await desk.adopted("rollout/0", 1, 6)
        fresh = (await desk.draw(2, version=6)).assignments
        for assignment in fresh:
            await desk.put(assignment, (6, 6))
        claim = await desk.ref.claim(6, 0.0)
        assert claim.groups == {a.prompt.group_id: 6 for a in fresh}
        assert before.prompt.row == fresh[0].prompt.row, "its tokens grew too old in the new lineage: drawn once more"


def test_weights_from_before_a_rewind_and_not_above_it_count_as_what_they_are() -> None:
    versions = EngineVersions()
    versions.rewound(4, lineage=2)
    versions.rewound(3, lineage=5)
    versions.rewound(6, lineage=7)
    assert [one.version for one in versions.rewinds] == [3, 6], "what the first says the second says too"
    worth = {
        weights: versions.serving("e", 1, ServedWeights(*weights), newest=9).version
        for weights in ((1, 2), (1, 4), (2, 5), (5, 5), (5, 8), (7, 8))
    }
    assert worth == {(1, 2): 2, (1, 4): 3, (2, 5): 3, (5, 5): 5, (5, 8): 6, (7, 8): 8}
    versions.rewound(2, lineage=1)
    assert [one.lineage for one in versions.rewinds] == [1], "epochs are counted anew: another launch, other engines"


def test_a_draw_from_before_and_a_new_incarnation_and_no_engine() -> None:
    versions = EngineVersions()
    before = ServedWeights(1, 5)
    versions.reported("e", 1, before)
    versions.rewound(3, lineage=2)
    assert versions.serving("e", 1, before, newest=5).version == 3
    versions.reported("e", 1, ServedWeights(2, 4))
    assert versions.serving("e", 1, before, newest=5).version == 4, "not what the draw told in another lineage"
    versions.reported("e", 2, ServedWeights(2, 5))
    assert versions.serving("e", 2, ServedWeights(2, 5), newest=5).version == 5
    assert not versions.reported("e", 1, ServedWeights(2, 6)), "that one is over"
    nothing = ServedWeights(0, ALWAYS_NEWEST)
    assert not versions.reported("none", 1, nothing)
    assert versions.serving("none", 1, nothing, newest=5).version == 5
    unheard = versions.serving("e", 2, ServedWeights(2, 8), newest=5)
    assert (unheard.version, unheard.is_undone) == (5, True), "nobody has trained that one"


async def test_a_buffer_that_was_restarted_knows_what_was_undone(shop: Any) -> None:
    """The engine serves an undone 5 all the while; the trainer went back to 3 and has made a 5 again."""
    async with shop.open(max_staleness=1) as desk:
        await trained_to(desk, 5)
        await desk.rewind(3)
        for step in (3, 4):
            await desk.adopted("rollout/1", 1, step)
            claim = await desk.ref.claim(step, 0.0)
            assert claim.groups
            await desk.ref.trained(step)
    async with shop.open(max_staleness=1) as desk:
        assert not (await desk.draw(version=5, lineage=1)).assignments, "it counts as version 3"
        assert (await desk.draw(version=5, lineage=2)).assignments


@dataclass
class Engine:
    name: str
    version: int = 0
    lineage: int = 1
    counted: int = 0
    """What its weights are worth in the trainer's lineage: undone ones, the version that it went back to."""
    holds: list[tuple[Assignment, list[int], list[int]]] = field(default_factory=list)
    """Assignment, stamps, what each is worth."""


@pytest.mark.parametrize("policy", ["pace", "wait", "drop"])
@pytest.mark.parametrize("seed", range(3))
async def test_the_bound_holds_for_what_weights_are_worth(shop: Any, policy: str, seed: int) -> None:
    """Random histories of engines that adopt late and of a trainer that goes back: what is trained is never older than
    the bound, undone weights counted as those that were gone back to."""
    lot = random.Random(seed)
    worth: dict[int, list[int]] = {}
    version = 0
    engines = [Engine(f"rollout/{i}") for i in range(NUM_ENGINES)]
    async with shop.open(max_staleness=ETA, policy=policy, batch_size=BATCH) as desk:
        for engine in engines:
            await desk.adopted(engine.name, 1, 0)
        steps = 0
        for _ in range(NUM_EVENTS):
            engine = lot.choice(engines)
            event = lot.choices(("draw", "token", "put", "adopt", "train", "back"), (4, 6, 4, 3, 4, 0.3))[0]
            if event == "draw":
                reply = await desk.draw(2, version=engine.version, rollout=engine.name, lineage=engine.lineage)
                engine.holds += [(assignment, [], []) for assignment in reply.assignments]
            elif event == "token":
                for _, stamps, values in engine.holds:
                    stamps.append(engine.version)
                    values.append(engine.counted)
            elif event == "put" and engine.holds:
                assignment, stamps, values = engine.holds.pop(lot.randrange(len(engine.holds)))
                if not stamps:
                    stamps, values = [engine.version], [engine.counted]
                worth[assignment.prompt.group_id] = values
                group = make_group(assignment, stamps)
                assert (await desk.put_group(group, assignment.attempt, engine.name)).outcome in (
                    "ready",
                    "stale-attempt",
                )
            elif event == "adopt":
                engine.version, engine.lineage, engine.counted = version, desk.lineage, version
                if lot.random() < 0.5:  # else nobody heard of it, and the next draw tells it
                    await desk.adopted(engine.name, 1, version)
            elif event == "train":
                claim = await desk.ref.claim(version, 0.0)
                for group_id, counted in claim.groups.items():
                    oldest = min(worth[group_id])
                    assert version - oldest <= ETA, f"seed {seed}: group {group_id} at step {version}"
                    assert version - counted <= ETA
                if claim.groups:
                    await desk.ref.trained(version)
                    version, steps = version + 1, steps + 1
            elif event == "back" and version:
                version = lot.randint(max(0, version - 4), version - 1)
                await desk.rewind(version)
                for each in engines:
                    each.counted = min(each.counted, version)
                    for _, _, values in each.holds:
                        values[:] = [min(value, version) for value in values]
                for values in worth.values():
                    values[:] = [min(value, version) for value in values]
        assert steps >= 5, "it stood still"
