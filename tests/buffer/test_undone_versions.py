"""After the trainer went back, engines that still serve a version that was undone keep the bound, whatever number they
tell; and numbers may go down."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from myxa.actors.engine_versions import ALWAYS_NEWEST, EngineVersions
from myxa.core.messages import Assignment

ETA, BATCH, NUM_ENGINES, NUM_EVENTS = 2, 2, 3, 250


async def trained_to(desk: Any, version: int) -> None:
    """One engine that adopts every version at once."""
    for step in range(version):
        await desk.ref.adopted("rollout/0", 1, step)
        for assignment in (await desk.draw(BATCH, version=step)).assignments:
            await desk.put(assignment, (step, step))
        await desk.train(step)
    await desk.ref.adopted("rollout/0", 1, version)


@pytest.mark.asyncio
async def test_an_engine_goes_down_with_the_trainer(shop: Any) -> None:
    async with shop.open(max_staleness=ETA) as desk:
        await trained_to(desk, 6)
        (before,) = (await desk.draw(1, version=6)).assignments
        assert await desk.ref.rewind(3) == 3 * BATCH
        assert (await desk.put(before, (6, 6))).outcome == "ready"
        claims = [await desk.ref.claim(3, 0.0)]
        assert {meta.oldest_version for meta in claims[0].groups} == {3}
        await desk.ref.trained(3)
        await desk.ref.adopted("rollout/0", 1, 3)
        for step in (4, 5):
            claims.append(await desk.ref.claim(step, 0.0))
            await desk.ref.trained(step)
        assert {meta.oldest_version for claim in claims for meta in claim.groups} == {3}
        assert not (await desk.draw(1, version=3)).assignments, "too old for what comes next"
        await desk.ref.adopted("rollout/0", 1, 6)
        fresh = (await desk.draw(2, version=6)).assignments
        for assignment in fresh:
            await desk.put(assignment, (6, 6))
        claim = await desk.ref.claim(6, 0.0)
        assert {meta.group_id: meta.oldest_version for meta in claim.groups} == {a.prompt.group_id: 6 for a in fresh}
        assert before.prompt.row == fresh[0].prompt.row, "its tokens grew too old in the new lineage: drawn once more"


def test_the_same_number_again_is_believed_only_once_it_was_adopted() -> None:
    versions = EngineVersions()
    versions.drawing("e", 1, 5, newest=5)
    versions.rewound(3)
    lineage = versions.lineage

    def served(told: int, newest: int) -> tuple[int, bool]:
        versions.drawing("e", 1, told, newest)
        found = versions.serving("e", 1, told, lineage, newest)
        return found.version, found.is_undone

    assert served(5, newest=3) == (3, True)
    assert served(5, newest=5) == (3, True), "the trainer made a 5 again, this engine has the old one"
    assert not versions.adopted("e", 1, 5, newest=4), "an adoption that was under way ends late"
    assert served(5, newest=6) == (3, True)
    assert versions.adopted("e", 1, 5, newest=6)
    assert served(5, newest=6) == (5, False)


def test_a_draw_from_before_and_a_new_incarnation_and_no_engine() -> None:
    versions = EngineVersions()
    versions.drawing("e", 1, 5, newest=5)
    before = versions.lineage
    versions.rewound(3)
    assert versions.serving("e", 1, 5, before, newest=5).version == 3
    versions.adopted("e", 1, 4, newest=5)
    assert versions.serving("e", 1, 5, before, newest=5).version == 4, "not what the draw told in another lineage"
    versions.drawing("e", 2, 5, newest=5)
    assert versions.serving("e", 2, 5, versions.lineage, newest=5).version == 5
    assert not versions.adopted("e", 1, 3, newest=5), "that one is over"
    versions.drawing("none", 1, ALWAYS_NEWEST, newest=5)
    assert versions.serving("none", 1, ALWAYS_NEWEST, versions.lineage, newest=5).version == 5


@dataclass
class Engine:
    name: str
    version: int = 0
    counted: int = 0
    """What its weights are worth in the trainer's lineage: undone ones, the version that it went back to."""
    holds: list[tuple[Assignment, list[int], list[int]]] = field(default_factory=list)
    """Assignment, stamps, what each is worth."""


@pytest.mark.asyncio
@pytest.mark.parametrize("policy", ["pace", "wait", "drop"])
@pytest.mark.parametrize("seed", range(8))
async def test_the_bound_holds_for_what_weights_are_worth(shop: Any, make_group: Any, policy: str, seed: int) -> None:
    """Random histories of engines that adopt late and of a trainer that goes back: what is trained is never older than
    the bound, undone weights counted as those that were gone back to."""
    lot = random.Random(seed)
    worth: dict[int, list[int]] = {}
    version = 0
    engines = [Engine(f"rollout/{i}") for i in range(NUM_ENGINES)]
    async with shop.open(max_staleness=ETA, policy=policy, batch_size=BATCH) as desk:
        for engine in engines:
            await desk.ref.adopted(engine.name, 1, 0)
        steps = 0
        for _ in range(NUM_EVENTS):
            engine = lot.choice(engines)
            event = lot.choices(("draw", "token", "put", "adopt", "train", "back"), (4, 6, 4, 3, 4, 0.3))[0]
            if event == "draw":
                reply = await desk.draw(2, version=engine.version, rollout=engine.name)
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
                assert (await desk.ref.put_group(group, assignment.attempt, engine.name)).outcome in (
                    "ready",
                    "stale-attempt",
                )
            elif event == "adopt":
                engine.version = engine.counted = version
                await desk.ref.adopted(engine.name, 1, version)
            elif event == "train":
                claim = await desk.ref.claim(version, 0.0)
                for meta in claim.groups:
                    oldest = min(worth[meta.group_id])
                    assert version - oldest <= ETA, f"seed {seed}: group {meta.group_id} at step {version}"
                    assert version - meta.oldest_version <= ETA
                if claim.groups:
                    await desk.ref.trained(version)
                    version, steps = version + 1, steps + 1
            elif event == "back" and version:
                version = lot.randint(max(0, version - 4), version - 1)
                await desk.ref.rewind(version)
                for each in engines:
                    each.counted = min(each.counted, version)
                    for _, _, values in each.holds:
                        values[:] = [min(value, version) for value in values]
                for values in worth.values():
                    values[:] = [min(value, version) for value in values]
        assert steps >= 5, "it stood still"
