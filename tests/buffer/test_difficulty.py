"""The difficulty window: what is known of a prompt, when it is passed over, when it comes back, and when nothing is left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.buffer.conftest import NumberedRows
from tests.buffer.mixed_rows import Desk, ShuffledRows, mixed
from tests.harness.ledger_audit import audit_ledger

from myxa.actors.buffer.difficulty import NO_WINDOW, Window
from myxa.actors.ledger.states import OUT_OF_WINDOW, Row
from myxa.algos.staleness import STALE
from myxa.core.errors import DataError

HALF = Window(low=0.2, high=0.8, skips=0)
EASY, HARD, GOOD = 1.0, 0.0, 0.5


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    found = Desk(tmp_path / "ledger.sqlite", NumberedRows(4))
    yield found
    assert audit_ledger(found.path).problems == ()
    found.ledger.close()


def rows_of(drawn: list[Row], num_rows: int = 4) -> list[int]:
    return [row.draw % num_rows for row in drawn]


def first_pass(desk: Desk, *rewards: float) -> None:
    for row, reward in zip(desk.draw(len(rewards)), rewards, strict=True):
        desk.finish(row, reward, is_kept=reward == GOOD)


@pytest.mark.parametrize("is_restarted", [True, False])
def test_what_was_too_easy_or_too_hard_is_passed_over_from_the_next_pass_on(desk: Desk, is_restarted: bool) -> None:
    """Also groups that the filter left out, whose samples are gone; and a restarted buffer knows it."""
    first_pass(desk, EASY, GOOD, HARD, 0.8)
    if is_restarted:
        desk.restart()
    desk.cursor.use("", HALF)
    assert rows_of(desk.draw(5)) == [1, 3, 1, 3, 1]
    assert desk.ledger.tally.dropped[OUT_OF_WINDOW] == 5
    passed = [row for row in map(desk.ledger.find, range(14)) if row is not None and row.reason == OUT_OF_WINDOW]
    assert [(row.draw, row.attempt, row.state) for row in passed[:2]] == [(4, 0, "DROPPED"), (6, 0, "DROPPED")]
    desk.cursor.use("", NO_WINDOW)
    assert rows_of(desk.draw(3)) == [2, 3, 0], "everything is inside again"


def test_the_group_drawn_last_counts_whenever_it_was_finished(desk: Desk) -> None:
    older, newer = desk.draw(4), desk.draw(4)
    desk.cursor.use("", HALF)
    for row in newer:
        desk.finish(row, GOOD)
    for row in older:
        desk.finish(row, HARD)
    assert rows_of(desk.draw(4)) == [0, 1, 2, 3]
    desk.restart()
    desk.cursor.use("", HALF)
    assert rows_of(desk.draw(4)) == [0, 1, 2, 3], "and the ledger says the same"


def test_groups_that_were_given_up_tell_nothing(desk: Desk) -> None:
    desk.cursor.use("", HALF)
    for row in desk.draw(4):
        desk.ledger.drop([(row.group_id, "engine-error")])
    assert rows_of(desk.draw(4)) == [0, 1, 2, 3]


def test_a_prompt_that_is_drawn_again_for_its_age_keeps_its_place(desk: Desk) -> None:
    """Its older group was judged meanwhile: the draw had been given out before."""
    older, newer = desk.draw(4), desk.draw(4)
    desk.cursor.use("", HALF)
    for row in older:
        desk.finish(row, EASY)
    desk.ledger.drop([(newer[2].group_id, STALE)])
    (again,) = desk.draw(1)
    assert (again.redraw_of, again.draw) == (newer[2].group_id, newer[2].draw)


@pytest.mark.parametrize("skips", [1, 2])
def test_after_so_many_passes_it_is_tried_again(desk: Desk, skips: int) -> None:
    first_pass(desk, EASY, GOOD, GOOD, GOOD)
    desk.cursor.use("", Window(low=0.2, high=0.8, skips=skips))
    drawn = desk.draw(3 * (skips + 1) + 1)
    assert [row.draw // 4 for row in drawn if row.draw % 4 == 0] == [skips + 1]


def test_a_window_that_leaves_nothing_waits_for_what_is_under_way_and_then_ends_the_run(desk: Desk) -> None:
    first_pass(desk, EASY, EASY, HARD)
    (last,) = desk.draw(1)
    desk.cursor.use("", HALF)
    (again,) = desk.draw(1)
    assert again.draw == 7, "nothing is known of it yet"
    desk.finish(last, EASY)
    assert desk.draw(1) == []
    assert desk.cursor.is_waiting and desk.cursor.has_next
    num_draws = desk.ledger.draws.next_draw
    assert desk.draw(1) == [] and desk.ledger.draws.next_draw == num_draws, "it does not go round and round"
    desk.finish(again, GOOD)
    assert rows_of(desk.draw(1)) == [3], "what was learnt meanwhile opens it"
    desk.finish(_newest(desk), EASY)
    with pytest.raises(DataError) as caught:
        desk.draw(1)
    for word in ("all 4 prompts", "1 below", "3 above", "data.difficulty_low", "data.difficulty_skips", "`myxa set`"):
        assert word in str(caught.value)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("num_inside", [1, 3])
def test_a_few_prompts_inside_are_found_in_every_order_of_the_passes(
    tmp_path: Path, seed: int, num_inside: int
) -> None:
    """First in one pass and last in the next, there are nearly two passes between."""
    desk = Desk(tmp_path / "ledger.sqlite", ShuffledRows(30, seed=seed))
    inside = {(7 * (k + seed)) % 30 for k in range(num_inside)}
    for row in desk.draw(30):
        desk.finish(row, GOOD if desk.told[row.group_id].row in inside else EASY)
    desk.cursor.use("", HALF)
    for turn in range(30):
        (row,) = desk.draw(1)
        assert desk.told[row.group_id].row in inside
        desk.finish(row, GOOD if turn < 29 else HARD)
    for _ in range(num_inside - 1):
        desk.finish(desk.draw(1)[0], HARD)
    with pytest.raises(DataError, match=f"all 30 prompts lie .*: {num_inside} below it, {30 - num_inside} above"):
        desk.draw(1)
    desk.ledger.close()


def _newest(desk: Desk) -> Row:
    row = desk.ledger.find(desk.ledger.draws.next_id - 1)
    assert row is not None
    return row


@pytest.mark.parametrize("reward", [GOOD, HARD])
def test_passes_are_not_gone_through_while_groups_under_way_may_open_the_window(desk: Desk, reward: float) -> None:
    """A prompt that was inside, and is drawn again before the window moves away from it."""
    first_pass(desk, EASY, EASY, EASY, 0.9)
    desk.cursor.use("", Window(low=0.8, high=0.95, skips=50))
    (last,) = desk.draw(1)
    desk.cursor.use("", Window(low=0.2, high=0.8, skips=50))
    for _ in range(3):
        assert desk.draw(1) == []
    assert desk.cursor.is_waiting and desk.cursor.has_next
    assert desk.ledger.draws.next_draw == 8 + 7, "every row was looked at"
    desk.finish(last, reward)
    (found,) = desk.draw(1)
    assert found.draw == (15 if reward == GOOD else 4 * 51), "what is known now, or what is tried again"


def test_a_source_whose_groups_may_open_the_window_leaves_the_others_their_turn(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "ledger.sqlite", mixed(easy=3, good=5))
    first = desk.draw(6)
    for row in first:
        desk.finish(row, EASY if row.source == "easy" else GOOD)
    (last,) = [row for row in desk.draw(2) if row.source == "easy"]
    desk.cursor.use("easy:1,good:1", Window(low=0.2, high=0.8, skips=50))
    assert [row.source for row in desk.draw(6)] == ["good"] * 6
    assert desk.ledger.tally.dropped[OUT_OF_WINDOW] == 5 and desk.take_news() == []
    desk.finish(last, GOOD)
    drawn = desk.draw(6)
    assert sorted(row.source for row in drawn) == ["easy"] * 3 + ["good"] * 3
    desk.ledger.close()


def test_the_other_sources_go_on_without_one_that_has_nothing_inside(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "ledger.sqlite", mixed(easy=3, good=5))
    for row in desk.draw(8):
        desk.finish(row, EASY if row.source == "easy" else GOOD)
    desk.cursor.use("easy:1,good:1", HALF)
    assert {row.source for row in desk.draw(6)} == {"good"}
    ((kind, text),) = desk.take_news()
    assert kind == "source-outside" and "all 3 prompts of easy" in text
    assert desk.ledger.draws.stretch.mix == "good:1"
    desk.cursor.use("easy:1,good:1", Window(low=0.2, high=1.0, skips=0))
    assert [row.source for row in desk.draw(4)] == ["easy", "good", "easy", "good"]
    desk.ledger.close()


def test_a_source_that_ends_is_told_once_and_the_others_go_on_by_their_ratios(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "ledger.sqlite", mixed(a=(2, 2), b=10, c=10))
    desk.cursor.use("a:2,b:1,c:1", NO_WINDOW)
    drawn = [row.source for row in desk.draw(16)]
    assert [drawn.count(name) for name in "abc"] == [4, 6, 6]
    assert sorted(drawn[:4]) == ["a", "a", "b", "c"] and sorted(drawn[4:8]) == ["a", "a", "b", "c"]
    assert drawn[8:] == ["b", "c"] * 4
    assert [kind for kind, _ in desk.take_news()] == ["source-ended"]
    desk.draw(4)
    desk.restart()
    desk.cursor.use("a:2,b:1,c:1", NO_WINDOW)
    desk.draw(1)
    assert desk.take_news() == [], "once, also over a restart"
    desk.cursor.use("a:1,b:0,c:0", NO_WINDOW)
    assert desk.draw(1) == [] and not desk.cursor.has_next
    desk.ledger.close()
