"""Rolling adoption: bookkeeping without IO, and a random walk that never frees bytes somebody still reads."""

from __future__ import annotations

import random

import pytest

from myxa.actors.adoption import Adoption
from myxa.core.messages import WeightManifest


def manifest(version: int) -> WeightManifest:
    return WeightManifest(
        version=version,
        channel="shm",
        location="",
        generation=2 * version,
        num_bytes=0,
        tensors=(),
        digest="",
        host="",
    )


def test_engines_adopt_one_by_one_the_one_furthest_behind_first() -> None:
    adoption = Adoption()
    adoption.joined("rollout/0", 1)
    adoption.published(manifest(0))
    first = adoption.next()
    assert first is not None and first.engine == "rollout/0"
    adoption.adopted("rollout/0", 1, 0)
    adoption.joined("rollout/1", 2)
    adoption.published(manifest(1))
    second = adoption.next()
    assert second is not None and (second.engine, second.manifest.version) == ("rollout/1", 1)


def test_versions_in_between_are_skipped_and_released() -> None:
    adoption = Adoption()
    adoption.joined("rollout/0", 1)
    for version in range(4):
        adoption.published(manifest(version))
    assert adoption.releasable() == (0, 1, 2)
    instruction = adoption.next()
    assert instruction is not None and instruction.manifest.version == 3


def test_bytes_being_adopted_are_not_released() -> None:
    adoption = Adoption()
    adoption.joined("rollout/0", 1)
    adoption.published(manifest(0))
    assert adoption.next() is not None
    adoption.published(manifest(1))
    assert adoption.releasable() == ()
    adoption.adopted("rollout/0", 1, 0)
    assert adoption.releasable() == (0,)


def test_a_dead_incarnation_has_no_say() -> None:
    adoption = Adoption()
    adoption.joined("rollout/0", 1)
    adoption.published(manifest(0))
    assert adoption.next() is not None
    adoption.joined("rollout/0", 2)
    adoption.adopted("rollout/0", 1, 0)
    assert adoption.serving == {}
    instruction = adoption.next()
    assert instruction is not None and instruction.epoch == 2


def test_a_fenced_engine_gets_nothing_until_it_is_born_again() -> None:
    adoption = Adoption()
    adoption.joined("rollout/0", 1)
    adoption.published(manifest(0))
    assert adoption.next() is not None
    adoption.fenced("rollout/0", 1)
    assert adoption.next() is None and adoption.serving == {}
    adoption.joined("rollout/0", 2)
    assert adoption.next() is not None


def test_an_engine_cannot_serve_what_it_was_not_told_to_adopt() -> None:
    adoption = Adoption()
    adoption.joined("rollout/0", 1)
    adoption.published(manifest(0))
    with pytest.raises(ValueError, match="cannot go from joined to serving"):
        adoption.adopted("rollout/0", 1, 0)


@pytest.mark.parametrize("seed", range(20))
def test_random_walk_never_frees_what_is_read_and_always_catches_up(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    adoption = Adoption()
    busy: dict[str, tuple[int, int]] = {}
    epochs: dict[str, int] = {}
    freed: set[int] = set()
    published = -1
    for _ in range(400):
        event = rng.randrange(6)
        name = f"rollout/{rng.randrange(3)}"
        if event == 0:
            published += 1
            adoption.published(manifest(published))
        elif event == 1 and name not in epochs:
            epochs[name] = rng.randrange(10_000)
            adoption.joined(name, epochs[name])
        elif event == 2 and name in epochs:
            adoption.gone(name, epochs[name])
            busy.pop(name, None)
            del epochs[name]
        elif event == 3 and (instruction := adoption.next()) is not None:
            assert instruction.manifest.version not in freed
            busy[instruction.engine] = (instruction.epoch, instruction.manifest.version)
        elif event == 4 and busy:
            engine = rng.choice(sorted(busy))
            epoch, version = busy.pop(engine)
            assert version not in freed
            adoption.adopted(engine, epoch, version)
        else:
            freed |= set(adoption.releasable())
    for engine, (epoch, version) in busy.items():
        adoption.adopted(engine, epoch, version)
    while (instruction := adoption.next()) is not None:
        adoption.adopted(instruction.engine, instruction.epoch, instruction.manifest.version)
    assert all(v == published for v in adoption.serving.values())
    assert set(adoption.serving) == set(epochs) or published < 0
