"""Rolling adoption: bookkeeping without IO, and a random walk that never frees bytes somebody still reads."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tests.harness.manifests import join, manifest_of

from myxa.actors.weights.rollout_update import Adoption
from myxa.core.messages import WeightManifest


def manifest(version: int) -> WeightManifest:
    return manifest_of(version, channel="shm")


def with_engines(*names: str, **options: Any) -> Adoption:
    adoption = Adoption(**options)
    for name in names:
        join(adoption, name, 1)
    return adoption


def adopt_one(adoption: Adoption) -> tuple[str, int]:
    instruction = adoption.next()
    assert instruction is not None
    adoption.adopted(instruction.engine, instruction.epoch, instruction.manifest.version)
    return instruction.engine, instruction.manifest.version


def test_the_engine_furthest_behind_is_first_and_versions_in_between_are_skipped_and_released() -> None:
    adoption = with_engines("rollout/0")
    adoption.published(manifest(0))
    assert adopt_one(adoption) == ("rollout/0", 0)
    join(adoption, "rollout/1", 2)
    for version in (1, 2, 3):
        adoption.published(manifest(version))
    assert adoption.releasable() == (0, 1, 2)
    assert [adopt_one(adoption), adopt_one(adoption)] == [("rollout/1", 3), ("rollout/0", 3)]


def test_a_dead_incarnation_has_no_say_and_a_fenced_one_gets_nothing_until_it_is_born_again() -> None:
    adoption = with_engines("rollout/0")
    adoption.published(manifest(0))
    with pytest.raises(ValueError, match="cannot go from joined to serving"):
        adoption.adopted("rollout/0", 1, 0)
    assert adoption.next() is not None
    join(adoption, "rollout/0", 2)
    adoption.adopted("rollout/0", 1, 0)
    assert adoption.serving == {}
    instruction = adoption.next()
    assert instruction is not None and instruction.epoch == 2
    adoption.fenced("rollout/0", 2)
    assert adoption.next() is None and adoption.serving == {}
    join(adoption, "rollout/0", 3)
    assert adoption.next() is not None


def test_words_of_an_old_incarnation_that_come_late_change_nothing() -> None:
    adoption = Adoption()
    join(adoption, "rollout/0", 7, 2)
    join(adoption, "rollout/0", 8, 4)  # it was faster than the registry's news of the old one's end
    assert not adoption.gone("rollout/0", 7) and not adoption.arrived("rollout/0", 7, 1)
    assert adoption.epoch_of("rollout/0") == 8 and adoption.serving == {"rollout/0": 4}
    assert adoption.gone("rollout/0", 8) and not adoption.present and not adoption.serving


def test_an_engine_that_reports_in_is_there_and_gets_no_weights_before_it_has_the_knobs() -> None:
    adoption = Adoption()
    adoption.published(manifest(3))
    assert adoption.arrived("rollout/0", 7, version=2)
    assert list(adoption.present) == ["rollout/0"] and [s.version for s in adoption.statuses()] == [2]
    assert adoption.serving == {} and adoption.next() is None
    assert adoption.joined("rollout/0", 7) and adoption.serving == {"rollout/0": 2}
    assert adopt_one(adoption) == ("rollout/0", 3)
    adoption.arrived("rollout/1", 1)
    adoption.gone("rollout/1", 1)
    assert not adoption.joined("rollout/1", 1), "it ended meanwhile"
    adoption.arrived("rollout/1", 2)
    adoption.fenced("rollout/1", 2)
    assert not adoption.joined("rollout/1", 2) and adoption.next() is None


def test_after_a_rewind_every_engine_is_behind_whatever_number_it_serves() -> None:
    adoption = with_engines("rollout/0", "rollout/1")
    adoption.published(manifest(5))
    while (instruction := adoption.next()) is not None:
        adoption.adopted(instruction.engine, 1, 5)
    adoption.rewound()
    assert adoption.releasable() == (), "the process that could release them is gone"
    assert adoption.serving == {"rollout/0": 5, "rollout/1": 5}, "they go on serving"
    assert adoption.engines_at(5) == [] and adoption.engines_at(None) == []
    assert adoption.next() is None, "nothing to be had yet"
    adoption.published(manifest(3))
    seen = [adopt_one(adoption), adopt_one(adoption)]
    assert seen == [("rollout/0", 3), ("rollout/1", 3)]
    assert adoption.next() is None and adoption.serving == {"rollout/0": 3, "rollout/1": 3}
    assert adoption.engines_at(3) == ["rollout/0", "rollout/1"]


def test_an_engine_that_was_told_by_an_earlier_coordinator_is_taken_as_serving() -> None:
    adoption = Adoption()
    join(adoption, "rollout/0", 1, version=4)
    join(adoption, "rollout/1", 1, version=5)
    join(adoption, "rollout/2", 1)
    assert adoption.serving == {"rollout/0": 4, "rollout/1": 5}
    adoption.published(manifest(5))
    assert adoption.engines_at(5) == ["rollout/1"]
    assert [adopt_one(adoption), adopt_one(adoption)] == [("rollout/2", 5), ("rollout/0", 5)]
    assert adoption.next() is None


def test_an_engine_that_says_it_serves_what_was_undone_adopts_again() -> None:
    ahead = Adoption()
    ahead.published(manifest(3))
    join(ahead, "rollout/0", 1, version=7)
    assert adopt_one(ahead) == ("rollout/0", 3), "the trainer has no version 7"
    late = Adoption()
    late.rewound()
    late.published(manifest(7))
    join(late, "rollout/0", 1, version=7)
    assert adopt_one(late) == ("rollout/0", 7), "nobody knows which version 7 that is"


def test_no_more_engines_adopt_at_once_than_may_also_once_the_number_was_lowered() -> None:
    adoption = with_engines(*(f"rollout/{index}" for index in range(4)), at_once=2)
    adoption.published(manifest(0))
    first, second = adoption.next(), adoption.next()
    assert first is not None and second is not None and adoption.next() is None
    adoption.at_once = 1
    adoption.fenced(first.engine, 1)
    assert adoption.next() is None
    adoption.adopted(second.engine, 1, 0)
    assert adoption.next() is not None


@pytest.mark.parametrize(("num", "at_once"), [(1, 1), (8, 1), (9, 2), (100, 13), (1000, 16)])
def test_one_in_eight_adopts_at_once_where_nothing_is_said(num: int, at_once: int) -> None:
    adoption = with_engines(*(f"rollout/{index}" for index in range(num)))
    adoption.published(manifest(0))
    while adoption.next() is not None:
        pass
    assert len(adoption.adopting) == at_once


@pytest.mark.parametrize("at_once", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_random_walk_never_frees_what_is_read_and_always_catches_up(seed: int, at_once: int) -> None:
    """Weights are named by lineage and version: what an engine serves is what the trainer published under that name."""
    print(f"seed {seed}, {at_once} at once")
    rng = random.Random(seed)
    adoption = Adoption(at_once=at_once)
    busy: dict[str, tuple[int, int, int]] = {}
    epochs: dict[str, int] = {}
    content: dict[str, tuple[int, int]] = {}
    freed: set[tuple[int, int]] = set()
    lineage, published = 0, -1
    for _ in range(600):
        event = rng.choices(range(8), weights=(3, 2, 1, 4, 4, 3, 1, 1))[0]
        name = f"rollout/{rng.randrange(5)}"
        if event == 0:
            published += 1
            adoption.published(manifest(published))
        elif event == 1 and name not in epochs:
            epochs[name] = rng.randrange(10_000)
            join(adoption, name, epochs[name])
        elif event == 2 and name in epochs:
            adoption.gone(name, epochs[name])
            for known in (busy, epochs, content):
                known.pop(name, None)
        elif event == 3 and (instruction := adoption.next()) is not None:
            assert (lineage, instruction.manifest.version) not in freed
            busy[instruction.engine] = (instruction.epoch, lineage, instruction.manifest.version)
        elif event == 4 and busy:
            engine = rng.choice(sorted(busy))
            epoch, of, version = busy.pop(engine)
            assert (of, version) not in freed, "freed while it was read"
            adoption.adopted(engine, epoch, version)
            content[engine] = (of, version)
        elif event == 6 and published >= 0:
            adoption.rewound()
            lineage, published = lineage + 1, rng.randrange(published + 1) - 1
        elif event == 7 and busy:
            engine = rng.choice(sorted(busy))
            adoption.fenced(engine, busy.pop(engine)[0])
            adoption.gone(engine, epochs.pop(engine))
            content.pop(engine, None)
        else:
            freed |= {(lineage, version) for version in adoption.releasable()}
        assert sorted(busy) == list(adoption.adopting) and len(busy) <= at_once
        for engine in adoption.engines_at(None):
            assert content[engine][0] == lineage, f"{engine} serves weights that were undone"
    published += 1
    adoption.published(manifest(published))
    for engine, (epoch, _, version) in busy.items():
        adoption.adopted(engine, epoch, version)
    while (instruction := adoption.next()) is not None:
        adoption.adopted(instruction.engine, instruction.epoch, instruction.manifest.version)
    assert adoption.serving == dict.fromkeys(epochs, published)
    assert sorted(adoption.engines_at(published)) == sorted(epochs)


def test_a_version_is_let_go_once_all_have_it_and_given_anew_to_who_lost_it() -> None:
    adoption = with_engines("a", "b", keeps_newest=False)
    adoption.published(manifest(3))
    for name in ("a", "b"):
        instruction = adoption.next()
        assert instruction is not None
        assert adoption.releasable() == (), f"{name} is about to read it"
        adoption.adopted(instruction.engine, 1, 3)
    assert adoption.releasable() == (3,)
    adoption.lost("a", 1)
    adoption.lost("b", 0)  # a word of another incarnation
    assert adoption.serving == {"b": 3}
    assert adoption.next() is None, "there is nothing to be had"
    adoption.published(manifest(3))
    assert adopt_one(adoption) == ("a", 3)
    assert adoption.next() is None
    assert adoption.releasable() == (3,)
