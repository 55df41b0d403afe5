"""The difficulty window: what is known of a prompt, when it is passed over, when it comes back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.buffer.conftest import NumberedRows
from tests.buffer.mixed_rows import Desk, ShuffledRows, mixed
from tests.harness.ledger_audit import audit_ledger

from myxa.actors.buffer.cursor import NO_WINDOW, SKIPS, Window
from myxa.actors.ledger.file import OUT_OF_WINDOW, STALE, Row

HALF = Window(0.2, 0.8)
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


def test_after_so_many_passes_it_is_tried_again(desk: Desk) -> None:
    first_pass(desk, EASY, GOOD, GOOD, GOOD)
    desk.cursor.use("", HALF)
    drawn = desk.draw(3 * (SKIPS + 1) + 1)
    assert [row.draw // 4 for row in drawn if row.draw % 4 == 0] == [SKIPS + 1]


def test_where_nothing_is_inside_all_is_tried_again(desk: Desk) -> None:
    first_pass(desk, EASY, EASY, HARD, HARD)
    desk.cursor.use("", HALF)
    assert rows_of(desk.draw(4)) == [0, 1, 2, 3]
    assert desk.ledger.tally.dropped[OUT_OF_WINDOW] == 4 * SKIPS


@pytest.mark.parametrize("seed", range(2))
def test_a_few_prompts_inside_are_found_in_every_order_of_the_passes(tmp_path: Path, seed: int) -> None:
    desk = Desk(tmp_path / "ledger.sqlite", ShuffledRows(30, seed=seed))
    inside = {(7 * (k + seed)) % 30 for k in range(3)}
    for row in desk.draw(30):
        desk.finish(row, GOOD if desk.told[row.group_id].row in inside else EASY)
    desk.cursor.use("", HALF)
    for row in desk.draw(3 * SKIPS):
        assert desk.told[row.group_id].row in inside
        desk.finish(row, GOOD)
    desk.ledger.close()


def test_a_source_with_nothing_inside_does_not_stop_the_others(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "ledger.sqlite", mixed(a=3, b=3))
    for row in desk.draw(6):
        desk.finish(row, EASY if row.source == "a" else GOOD)
    desk.cursor.use("a:1,b:1", HALF)
    drawn = desk.draw(12)
    assert [row.source for row in drawn].count("b") == 6, "the shares hold"
    assert {row.source_draw // 3 for row in drawn if row.source == "a"} == {SKIPS + 1, SKIPS + 2}
    desk.ledger.close()
