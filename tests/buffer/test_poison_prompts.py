"""A prompt that ends whatever actor runs it is found out before the run has spent its restarts, and costs no other prompt;
what is killed by somebody else is never taken for one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.buffer.conftest import make_sample
from tests.harness.dumps import whole_groups

from myxa.actors.buffer.cursor import MAX_NEW_SUSPECTS, POISON, SUSPECT_AFTER, PoisonTracker
from myxa.actors.buffer.knobs import BufferLimits
from myxa.actors.ledger.file import Row
from myxa.actors.ledger.ledger import Ledger
from myxa.core.messages import Assignment
from myxa.core.timeouts import TIMEOUTS

MAX_DEATHS = 3


def ignore(kind: str, text: str) -> None:
    """Of what it tells."""


def open_ledger(folder: Path, num_groups: int) -> Ledger:
    ledger = Ledger(folder / "ledger.sqlite", run="r", fingerprint="rows", wall=lambda: 0.0)
    if not ledger.draws.next_id:
        ledger.dispatch([Row(number, number, -1, 2, rollout="a", epoch=1, version=0) for number in range(num_groups)])
    return ledger


def killed(tracker: PoisonTracker, group_ids: Sequence[int], *, num_tokens: int = 0) -> list[int]:
    """An attempt of these groups begins with so many tokens each, brings none and ends with its actor."""
    tracker.note_dispatched(("a", 1), dict.fromkeys(group_ids, num_tokens), 0.0)
    return tracker.note_deaths(dict.fromkeys(group_ids, ("a", 1)))


def test_only_a_death_alone_convicts_and_a_token_clears(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path, 4)
    told: list[str] = []
    tracker = PoisonTracker(ledger, MAX_DEATHS, lambda kind, text: told.append(text))
    assert not killed(tracker, [0, 1, 2]) and not tracker.must_be_alone(0) and not tracker
    tracker.note_dispatched(("a", 1), {2: 0}, 0.0)
    tracker.has_tokens(2, 1)
    assert not killed(tracker, [0, 1, 2], num_tokens=1) and tracker
    assert [tracker.must_be_alone(group_id) for group_id in range(4)] == [True, True, False, False]
    assert [text.partition(" was")[0] for text in told] == ["group 0", "group 1"]
    assert killed(tracker, [0]) == [0]
    ledger.close()


def test_one_death_makes_few_suspects_those_in_hand_longest(tmp_path: Path) -> None:
    """And the others are next, whichever way they were lost."""
    num = 3 * MAX_NEW_SUSPECTS
    ledger = open_ledger(tmp_path, num)
    tracker = PoisonTracker(ledger, MAX_DEATHS, ignore)
    order = list(reversed(range(num)))

    def alone() -> list[int]:
        return [group_id for group_id in order if tracker.must_be_alone(group_id)]

    killed(tracker, order)
    assert not alone() and all(group_id in tracker for group_id in order)
    killed(tracker, order)
    assert alone() == order[:MAX_NEW_SUSPECTS]
    rest, sick = order[MAX_NEW_SUSPECTS:], ("b", 1)
    tracker.note_dispatched(sick, dict.fromkeys(rest, 0), 0.0)
    for group_id in rest:  # an engine that is lost has them handed back one by one
        tracker.note_broken_engine(sick, 1.0)
        tracker.note_deaths({group_id: sick})
    assert alone() == order[: 2 * MAX_NEW_SUSPECTS]
    killed(tracker, order[2 * MAX_NEW_SUSPECTS :])
    assert alone() == order
    tracker.note_finished(("a", 1), order[0])
    assert alone() == order[1:]
    ledger.close()


def test_what_is_counted_outlives_the_buffer_and_not_the_group(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path, 3)
    tracker = PoisonTracker(ledger, MAX_DEATHS, ignore)
    for _ in range(SUSPECT_AFTER):
        killed(tracker, [0, 1])
    ledger.close()
    ledger = open_ledger(tmp_path, 3)
    again = PoisonTracker(ledger, MAX_DEATHS, ignore)
    assert again.must_be_alone(0) and again.must_be_alone(1)
    ledger.drop([(0, "workflow-error")])
    again.note_finished(("a", 1), 1)
    killed(again, [2])
    assert 0 not in again and 1 not in again
    ledger.close()


def test_a_suspect_is_served_to_one_that_has_nothing_else_and_one_runs_dry_for_it(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path, 4)
    tracker = PoisonTracker(ledger, MAX_DEATHS, ignore)
    assert tracker.turn(("a", 1), (), (2, 3), 8, 0.0) == ((2, 3), 8)
    for _ in range(SUSPECT_AFTER):
        killed(tracker, [0, 1])
    assert tracker.turn(("a", 1), (), (0, 1, 2), 8, 0.0) == ([0], 1), "alone"
    assert tracker.turn(("a", 1), (0,), (1, 2), 8, 0.0) == ((), 0), "and nothing comes to it"
    assert tracker.turn(("b", 1), (5, 6), (1, 2), 8, 1.0) == ((), 0), "that one shall have the next"
    assert tracker.turn(("c", 1), (7,), (1, 2), 8, 1.0) == ([2], 8), "others go on"
    assert tracker.turn(("b", 1), (6,), (1, 2), 8, 1.0 + TIMEOUTS.buffer.clearing_s) == ((), 0)
    assert tracker.turn(("b", 1), (), (1, 2), 8, 2.0 + TIMEOUTS.buffer.clearing_s) == ([1], 1)
    later_s = 3.0 + 3 * TIMEOUTS.buffer.clearing_s
    assert tracker.turn(("c", 1), (7,), (1, 2), 8, later_s) == ((), 0), "b was not heard of for too long"
    ledger.close()


async def test_a_prompt_that_kills_its_actor_is_set_aside_and_its_neighbours_are_not(shop: Any) -> None:
    """One actor, eight places; row 3 ends it whenever it has it in hand."""
    limits = BufferLimits(max_deaths=MAX_DEATHS)
    async with shop.open(max_staleness=8, batch_size=4, limits=limits) as desk:
        epoch, deaths, alone = 1, 0, 0
        for _ in range(40):
            in_hand = {a.prompt.group_id: a for a in (await desk.draw(8, epoch=epoch, holding=())).assignments}
            if any(a.prompt.row == 3 for a in in_hand.values()):
                deaths += 1
                alone += len(in_hand) == 1
                await desk.ref.rollout_gone("rollout/0", epoch)
                epoch += 1
                continue
            for assignment in in_hand.values():
                await desk.put(assignment)
            if (await desk.ref.stats()).states.get("READY", 0) >= 12:
                break
        assert (deaths, alone) == (MAX_DEATHS, 1)
        assert (await desk.ref.stats()).dropped == {POISON: 1}
        quarantine = desk.buffer._groups.cursor.quarantine
        assert [row for _, row in quarantine._held] == [3]
        ready = {group.prompt.row for _, group in whole_groups(shop.path)}
        assert {0, 1, 2, 4, 5, 6, 7} <= ready


async def test_groups_of_an_actor_that_is_killed_over_and_over_are_kept(shop: Any) -> None:
    """Killed by somebody else twenty times: whoever gets a little further each time stays what it is."""
    async with shop.open(max_staleness=8, batch_size=4, limits=BufferLimits(max_deaths=MAX_DEATHS)) as desk:
        for epoch in range(1, 21):
            in_hand: list[Assignment] = list((await desk.draw(8, epoch=epoch, holding=())).assignments)
            assert len(in_hand) == 8
            for assignment in in_hand:
                partial = (make_sample(assignment.prompt.group_id, 0, [0] * epoch),)
                await desk.give_back(assignment, partial=partial, goes_on=True)
            await desk.ref.rollout_gone("rollout/0", epoch)
        assert not (await desk.ref.stats()).dropped


def test_an_engine_that_fails_one_after_another_convicts_nobody(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path, 4)
    tracker = PoisonTracker(ledger, MAX_DEATHS, ignore)
    tracker.note_dispatched(("a", 1), {0: 0, 1: 0}, 0.0)
    for group_id in (0, 1):
        tracker.note_broken_engine(("a", 1), 1.0)
        tracker.note_deaths({group_id: ("a", 1)})
    assert 0 in tracker and 1 in tracker, "both were there when it began"
    for now_s in range(2, 50):
        tracker.note_dispatched(("a", 1), {0: 0, 2: 0}, float(now_s))
        tracker.note_broken_engine(("a", 1), float(now_s))
        assert not tracker.note_deaths(dict.fromkeys((0, 2), ("a", 1)))
    assert 2 not in tracker and not tracker.must_be_alone(0)
    tracker.note_dispatched(("b", 1), {0: 0}, 50.0)
    tracker.note_deaths({0: ("b", 1)})
    assert tracker.must_be_alone(0)
    assert tracker.turn(("a", 1), (), (0, 2), 8, 50.0) == ([2], 8), "no suspect for one in doubt"
    assert tracker.turn(("a", 2), (), (0, 2), 8, 50.0) == ([0], 1), "its next incarnation is not"
    tracker.note_finished(("a", 1), 3)
    assert tracker.turn(("a", 1), (), (0, 2), 8, 50.0) == ([0], 1)
    tracker.note_dispatched(("a", 1), {0: 0}, 50.0)
    assert tracker.note_deaths({0: ("a", 1)}) == [0]
    ledger.close()


async def test_streams_that_break_count_for_their_group_alone_and_drains_do_not(shop: Any) -> None:
    async with shop.open(max_staleness=8, batch_size=2, limits=BufferLimits(max_deaths=MAX_DEATHS)) as desk:
        for _ in range(12):
            for assignment in (await desk.draw(2, holding=())).assignments:
                await desk.give_back(assignment)
        assert not (await desk.ref.stats()).dropped, "drained twelve times"
        for _ in range(SUSPECT_AFTER):
            first, second = (await desk.draw(2, holding=())).assignments
            assert first.prompt.group_id == 0
            await desk.give_back(first, has_died=True)
            await desk.put(second)
        (alone,) = (await desk.draw(2, holding=())).assignments
        await desk.give_back(alone, has_died=True)
        assert (await desk.ref.stats()).dropped == {POISON: 1}


async def test_a_death_that_the_buffer_did_not_see_says_nothing(shop: Any) -> None:
    """Everything was killed, again and again: nobody knows what did it."""
    for epoch in range(1, 3 * MAX_DEATHS):
        async with shop.open(max_staleness=8, batch_size=4, limits=BufferLimits(max_deaths=MAX_DEATHS)) as desk:
            assert len((await desk.draw(8, epoch=epoch, holding=())).assignments) == 8
            assert not (await desk.ref.stats()).dropped


async def test_two_poisons_in_a_fleet_that_is_killed_at_random(shop: Any) -> None:
    """Three actors, one of which is killed now and then for no reason: both are found, no other group is lost, and
    nothing comes to stand."""
    lot = random.Random(0)
    poison = {2, 9}
    async with shop.open(max_staleness=50, batch_size=4, limits=BufferLimits(max_deaths=6)) as desk:
        epochs = {f"rollout/{i}": 1 for i in range(3)}
        hands: dict[str, dict[int, Assignment]] = {name: {} for name in epochs}
        for _ in range(600):
            name = lot.choice(list(epochs))
            hand = hands[name]
            room = 4 - len(hand)
            reply = await desk.draw(room, epoch=epochs[name], rollout=name, holding=tuple(hand))
            hand |= {a.prompt.group_id: a for a in reply.assignments}
            if any(a.prompt.row in poison for a in hand.values()) or lot.random() < 0.03:
                await desk.ref.rollout_gone(name, epochs[name])
                epochs[name] += 1
                hand.clear()
            elif hand:
                group_id = lot.choice(list(hand))
                assert (await desk.put(hand.pop(group_id), rollout=name)).outcome == "ready"
        stats = await desk.ref.stats()
        assert stats.dropped == {POISON: 2} and stats.states["READY"] >= 100


async def test_who_is_kept_free_for_a_suspect_is_told_so(shop: Any) -> None:
    """Not that the staleness bound holds it back: there is room for all that it could ask for."""
    async with shop.open(max_staleness=8, batch_size=4, limits=BufferLimits(max_deaths=2 * MAX_DEATHS)) as desk:
        for epoch in (1, 2):
            await desk.draw(1, epoch=epoch, holding=())
            await desk.ref.rollout_gone("rollout/0", epoch)
        first = await desk.draw(1, epoch=1, rollout="rollout/1")
        assert [a.prompt.group_id for a in first.assignments] == [0], "the suspect, to one that has nothing"
        alone = await desk.draw(4, epoch=1, rollout="rollout/1", holding=(0,))
        assert (alone.assignments, alone.blocked_by) == ((), "suspect"), "nothing comes to it"
        (other,) = (await desk.draw(1, epoch=1, rollout="rollout/2", holding=())).assignments
        await desk.ref.rollout_gone("rollout/1", 1)
        in_hand = (other.prompt.group_id,)
        dry = await desk.draw(4, epoch=1, rollout="rollout/2", holding=in_hand, blocked_by="")
        assert (dry.assignments, dry.blocked_by) == ((), "suspect"), "it is left to run dry"
        await desk.put(other, rollout="rollout/2")


async def test_an_engine_in_doubt_that_gets_no_suspect_is_told_so(shop: Any, rows: Any) -> None:
    """All prompts are drawn, and what waits is for others: no staleness bound holds it back."""
    limits = BufferLimits(max_deaths=2 * MAX_DEATHS)
    async with shop.open(max_staleness=50, batch_size=2, rows=rows(4, 1), limits=limits) as desk:
        for epoch in (1, 2):
            await desk.draw(1, epoch=epoch, holding=())
            await desk.ref.rollout_gone("rollout/0", epoch)
        (suspect,) = (await desk.draw(1, epoch=1, rollout="rollout/1", holding=())).assignments
        rest = (await desk.draw(100, epoch=1, rollout="rollout/2", holding=())).assignments
        assert rest
        await desk.give_back(suspect, "rollout/1", has_died=True)
        for holding in ((), None):
            reply = await desk.draw(4, epoch=1, rollout="rollout/1", holding=holding)
            assert (reply.assignments, reply.blocked_by) == ((), "suspect")
        (again,) = (await desk.draw(4, epoch=1, rollout="rollout/3", holding=())).assignments
        assert again.prompt.group_id == suspect.prompt.group_id, "another one gets it"


async def test_what_is_kept_for_another_actor_is_no_reason_to_speak_of_staleness(shop: Any, rows: Any) -> None:
    """The buffer was restarted, all prompts are drawn, and who has the last of them in hand has not said so yet."""
    async with shop.open(max_staleness=50, batch_size=2, rows=rows(6, 1)) as desk:
        num = len((await desk.draw(100, holding=())).assignments)
        assert num
    async with shop.open(max_staleness=50, batch_size=2, rows=rows(6, 1)) as desk:
        reply = await desk.draw(4, rollout="rollout/1", holding=())
        assert (reply.assignments, reply.blocked_by) == ((), "data-exhausted")
