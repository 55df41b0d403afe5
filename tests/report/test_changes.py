"""Changes made while running: from the audit log, on the report's plots and in its table."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import ModuleType

import pytest

from myxa.core.knobs import AuditRecord, KnobMove, Operator
from myxa.launch.views.changes import changes_of, moves_text
from myxa.launch.views.page_data import past_table
from myxa.launch.views.run_files import load_run


@pytest.fixture
def changed(planted: Path, planter: ModuleType, tmp_path: Path) -> Path:
    """A copy of the planted run, with an audit log."""
    run_dir = tmp_path / "sort-changed"
    shutil.copytree(planted, run_dir)
    planter.plant_changes(run_dir)
    return run_dir


def test_every_change_is_marked_at_its_step(changed: Path, planted: Path) -> None:
    run = load_run(changed)
    assert [(change.step, change.what) for change in run.changes if change.is_done] == [
        (10, "max_staleness 2 -> 4"), (10, "temperature 1 -> 0.9"), (20, "lr 0.0001 -> 5e-05"),
        (32, "max_staleness 4 -> 2"),
    ]  # fmt: skip
    past = past_table(run)
    refused = next(change for change in past["changes"] if not change["isDone"])
    assert (refused["result"], refused["detail"]) == ("refused", "more than 10 times the run file's 0.0001")
    assert past["bound"][1:3] == [(10.0, 2.0), (10.0, 4.0)], "the bound is a curve"
    assert past_table(load_run(planted))["changes"] == []


def test_a_damaged_audit_log_is_named_and_its_good_lines_are_shown(changed: Path) -> None:
    with (changed / "audit.jsonl").open("a") as file:
        file.write('{"number": 6, "verb": 3}\n{"num')
    run = load_run(changed)
    assert len(run.changes) == 5
    assert sum("audit.jsonl" in note for note in run.notes) == 2, "no record, and a torn line"


def test_owners_that_moved_alike_are_counted() -> None:
    moves = [KnobMove(name="max_groups", owner=f"rollout/{n}", old=16, new=32, boundary="request") for n in range(3)]
    assert moves_text(moves) == "max_groups 16 -> 32 (3 owners)"
    many = [KnobMove(name=f"k{n}", owner="buffer", old=False, new=True, boundary="now") for n in range(6)]
    assert moves_text(many).endswith("k3 false -> true and 2 more")


def test_a_verb_without_knobs_is_told_by_what_was_asked() -> None:
    record = AuditRecord(
        number=3, wall_s=5.0, verb="scale", who=Operator(user="ada"), version=12, result="done",
        arguments={"target": "rollout", "count": 4, "reason": "more", "dry_run": False}, reason="more",
    )  # fmt: skip
    (change,) = changes_of([record])
    assert (change.what, change.step, change.record.number) == ("scale target=rollout count=4", 12, 3)
    assert (change.who, change.record.reason) == ("ada", "more")


def test_f3_a_scale_that_changes_nothing_is_not_drawn_as_a_change() -> None:
    (change,) = changes_of([
        AuditRecord(number=1, wall_s=5.0, verb="scale", who=Operator(user="ada"), result="done", arguments={"count": 2},
                    detail='{"role":"rollout","count":2,"joining":[],"leaving":[],"is_done":true}')
    ])  # fmt: skip
    assert (change.is_done, change.result) == (False, "nothing to do")


def test_f3_marks_of_verbs_about_processes_are_at_the_step_of_their_time() -> None:
    """F3: the launcher, which notes them, knows no step."""
    records = [
        AuditRecord(number=number, wall_s=wall_s, verb=verb, who=Operator(user="ada"), result="done", arguments={})
        for number, wall_s, verb in ((1, 25.0, "scale"), (2, 65.0, "down"), (3, 5.0, "drain"))
    ]
    steps = [(10.0 * step, step) for step in range(1, 7)]
    assert [change.step for change in changes_of(records, steps)] == [2, 6, 0]
    assert [change.step for change in changes_of(records)] == [-1, -1, -1], "not known, not step 0"
