"""Views in, rows and pages out."""

from __future__ import annotations

import io
from types import ModuleType

import msgspec
import pytest
from rich.console import Console

from myxa.core.knobs import ChangeReply, KnobMove, KnobSheet, KnobState, KnobTable, Tunable
from myxa.launch.verbs import StatusArguments
from myxa.launch.views import knob_table
from myxa.launch.views.live import render
from myxa.launch.views.run_view import RunView, carried_over, notice_text, title_text


@pytest.fixture
def view(seat, planting: ModuleType) -> RunView:
    whole = seat.status(StatusArguments(whole=True))
    return msgspec.convert(msgspec.to_builtins(whole), RunView)


def test_actors_are_listed_by_node_and_role(view: RunView) -> None:
    assert [(actor.node, actor.name) for actor in view.actors] == [
        (0, "trainer/0"), (0, "trainer/1"), (0, "rollout/0"), (0, "rollout/1"), (0, "buffer"), (0, "coordinator"),
        (0, "monitor"), (1, "rollout/2"),
    ]  # fmt: skip
    assert view.troubles == ()


def test_a_knob_of_many_owners_is_one_row(view: RunView) -> None:
    table = {row.name: row for row in knob_table.knob_rows(view.knobs)}
    assert table["concurrency"].cells()[5] == "rollout/* (3)"
    assert table["temperature"].cells()[-1] == "back at step 160"
    assert next(iter(table)) in ("clip_low", "lr"), "the trainer's knobs come first"


def test_a_value_to_come_at_any_owner_is_shown() -> None:
    knob = Tunable(name="n", kind="int", boundary="step", owner="rollout", help="", unit="groups")
    sheets = tuple(
        KnobSheet(
            owner=f"rollout/{n}", knobs=(KnobState(tunable=knob, value=n + 1, first=1, pending=5 if n else None),)
        )
        for n in range(2)
    )
    (row,) = knob_table.knob_rows(KnobTable(sheets=sheets, epoch=1))
    assert row.cells()[1:3] == ("2", "groups")
    assert row.cells()[-1] == "file: 1; will be 5"


def test_a_reply_says_where_it_is_in_force() -> None:
    move = KnobMove(name="lr", owner="trainer/0", old=1e-4, new=2e-4, boundary="step")
    said = knob_table.reply_text(ChangeReply(epoch=3, at=41, moves=(move,), warnings=("below the current lag",)))
    assert said.splitlines() == [
        "lr  0.0001 -> 0.0002  trainer/0, at step 41", "warning: below the current lag", "epoch 3",
    ]  # fmt: skip
    assert (
        knob_table.reply_text(ChangeReply(epoch=0, at=0, moves=(), refused="trainer/0: no")) == "refused: trainer/0: no"
    )


def shown(view: RunView, width: int = 80) -> list[str]:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(render(view))
    return console.export_text().splitlines()


def test_every_page_fits_its_width(view: RunView) -> None:
    for width in (46, 60, 120):
        assert max(len(line) for line in shown(view, width)) <= width


def test_terminal_orders_in_names_are_not_obeyed(view: RunView) -> None:
    evil = msgspec.structs.replace(view.status, name="run\x1b[2Jx\nx")  # type: ignore[type-var]
    told = RunView(now_wall_s=1.0, started_wall_s=0.0, status=evil, why="a\x1b]0;b\x07")
    assert "\x1b" not in title_text(told) + notice_text(told) + "".join(shown(told))


def test_nothing_answered_is_a_picture_too() -> None:
    empty = RunView(now_wall_s=5.0, started_wall_s=5.0, troubles=("gone -- look there",))
    assert "gone" in notice_text(empty)
    assert "starting" in title_text(empty)
    assert shown(empty)


def test_what_is_not_told_any_more_stays_as_it_was(view: RunView) -> None:
    nobody = RunView(now_wall_s=9.0, started_wall_s=9.0, run_dir="/x")
    kept = carried_over(nobody, view)
    assert (kept.version, kept.phase, kept.buffer) == (120, "running", view.buffer)
    assert (kept.actors, kept.knobs, kept.why) == (view.actors, view.knobs, view.why)
    assert title_text(msgspec.structs.replace(kept, has_ended=True)).startswith("sort  ended  step 120")
    assert carried_over(view, nobody) == view
