"""The coordinator's engines by incarnation: news of one that is over must not touch the next one, in whatever order the
registry's news and the engine's own words arrive."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from tests.harness.manifests import manifest_of

from myxa.actors.coordinator.coordinator import EngineFleet
from myxa.actors.coordinator.run_state import RunState
from myxa.actors.weights.rollout_update import Adoption
from myxa.core.actor import PeerEvent
from myxa.core.messages import EngineStatus

NAME = "rollout/0"


class Conductor:
    """`gate` holds an actor that joins."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()

    async def joined(self, owner: str) -> None:
        await self.gate.wait()


class Adopter:
    def look_again(self) -> None:
        """Nobody waits."""


class Place:
    def __init__(self) -> None:
        self.adoption, self.told = Adoption(), list[str]()
        conductor: Any = Conductor()
        adopter: Any = Adopter()
        self.conductor: Conductor = conductor
        context: Any = SimpleNamespace(
            state=RunState(), options=SimpleNamespace(has_engines=True), keep=self._keep,
            tell=lambda kind, text: self.told.append(kind),
        )  # fmt: skip
        self.fleet = EngineFleet(context, {}, conductor, self.adoption, adopter, lambda: None)

    async def _keep(self) -> None:
        """Durable."""

    async def ready(self, epoch: int, version: int = -1) -> None:
        await self.fleet.ready(EngineStatus(rollout=NAME, version=version, running=0, waiting=0), epoch)


each_news = pytest.mark.parametrize(
    "news", [PeerEvent("restarted", NAME, 8, "it died"), PeerEvent("down", NAME, 7, "it died")], ids=lambda e: e.kind
)


@each_news
async def test_news_of_the_old_one_do_not_make_the_new_one_forgotten(news: PeerEvent) -> None:
    place = Place()
    await place.ready(7)
    await place.ready(8)  # it was faster than the registry's news
    place.fleet.gone(news)
    assert list(place.fleet.present) == [NAME]
    place.fleet.offered(manifest_of(3))
    instruction = place.adoption.next()
    assert instruction is not None and instruction.epoch == 8, "it is given weights"
    assert "engine-gone" not in place.told


@each_news
async def test_one_that_ended_is_forgotten_until_the_next_one_reports_in(news: PeerEvent) -> None:
    place = Place()
    await place.ready(7, version=2)
    place.fleet.gone(news)
    assert not place.fleet.present and not place.adoption.serving
    assert "engine-gone" in place.told
    await place.ready(8)
    assert list(place.fleet.present) == [NAME] and place.adoption.epoch_of(NAME) == 8


async def test_what_an_old_one_brought_in_is_not_the_new_one_s() -> None:
    place = Place()
    await place.ready(7)
    await place.ready(8)
    place.fleet.adopted(NAME, 7, 5)
    assert place.fleet.present[NAME].version == -1
    place.fleet.adopted(NAME, 8, 5)
    assert place.fleet.present[NAME].version == 5


@each_news
async def test_one_that_ends_before_its_report_is_heard_is_not_there_and_the_next_one_is(news: PeerEvent) -> None:
    """While it is given the knobs."""
    place = Place()
    place.conductor.gate.clear()
    joining = asyncio.create_task(place.ready(7))
    await asyncio.sleep(0)
    place.fleet.gone(news)
    place.conductor.gate.set()
    await joining
    assert not place.fleet.present and place.adoption.epoch_of(NAME) == -1
    await place.ready(8)
    assert list(place.fleet.present) == [NAME] and place.adoption.epoch_of(NAME) == 8


async def test_a_word_of_an_old_one_that_comes_last_changes_nothing() -> None:
    place = Place()
    await place.ready(8, version=4)
    await place.ready(7, version=1)
    assert place.fleet.present[NAME].version == 4 and place.adoption.epoch_of(NAME) == 8
