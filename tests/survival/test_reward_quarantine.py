"""A prompt that fails too often is not drawn again: not in later passes, not by a restarted buffer. A resumed run tries it
again."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.buffer.conftest import NumberedRows
from tests.harness.inside import inside
from tests.harness.run_job import audit, events, make_job, metrics

from myxa.actors.buffer.cursor import PromptCursor, Quarantine, Sources
from myxa.actors.ledger.file import QUARANTINED, Row, State, begin_life
from myxa.actors.ledger.ledger import Ledger
from myxa.core.errors import DataError
from myxa.core.messages import RunStatus


class Shop:
    def __init__(self, folder: Path, source: NumberedRows, after: int) -> None:
        self.ledger = Ledger(folder / "ledger.sqlite", run="r", fingerprint="rows", wall=lambda: 0.0)
        sources = Sources(source)
        self.news: list[tuple[str, str]] = []
        self.quarantine = Quarantine(sources, self.ledger, after, self._tell)
        self.cursor = PromptCursor(sources, self.ledger, self.quarantine, self._tell)

    def _tell(self, kind: str, text: str) -> None:
        self.news.append((kind, text))

    def take_news(self) -> list[tuple[str, str]]:
        news, self.news = self.news, []
        return news

    def draw(self, num_groups: int) -> list[Row]:
        new: list[Row] = []
        while len(new) < num_groups and (drawn := self.cursor.draw(2)) is not None:
            new.append(drawn[0])
        return new

    def drop(self, row: Row, reason: str, detail: str = "it raised") -> None:
        self.ledger.drop([(row.group_id, reason)], detail)
        self.quarantine.note_failure(self.cursor.sources.prompt(row), reason, detail)

    def close(self) -> None:
        self.ledger.close()


@pytest.fixture
def shop(tmp_path: Path) -> Any:
    made: list[Shop] = []

    def open_shop(num_rows: int = 4, after: int = 2, passes: int = 0) -> Shop:
        if made:
            made[-1].close()
        made.append(Shop(tmp_path, NumberedRows(num_rows, passes, "rows.jsonl"), after))
        return made[-1]

    yield open_shop
    made[-1].close()


Open = Callable[..., Shop]


def row_numbers(rows: Sequence[Row], num_rows: int = 4) -> list[int]:
    return [row.draw % num_rows for row in rows]


def test_it_is_drawn_no_more_and_every_draw_is_accounted_for(shop: Open) -> None:
    here = shop()
    for number in range(2):
        for row in here.draw(4):
            here.drop(row, "reward-error" if row.draw % 4 == 2 else "engine-error", f"pass {number}")
    ((kind, news),) = here.take_news()
    assert kind == "prompt-quarantined"
    assert news == (
        "row 2 of rows.jsonl is not drawn again in this run: reward-error 2 times; the last one: pass 1 -- mend it; "
        "a resumed run tries it again"
    )
    assert here.take_news() == []
    assert row_numbers(here.draw(4)) == [0, 1, 3, 0]
    assert row_numbers(here.draw(2)) == [1, 3]
    assert here.ledger.tally.dropped[QUARANTINED] == 2
    passed_over, _ = [row for row in map(here.ledger.find, range(16)) if row is not None and row.reason == QUARANTINED]
    assert (passed_over.state, passed_over.attempt, passed_over.draw) == (State.DROPPED, 0, 10)
    assert len(here.quarantine) == 1
    again = shop()  # the ledger checks all its invariants
    assert len(again.quarantine) == 1
    again.draw(1)
    assert 2 not in row_numbers([row for row in again.ledger.rows(State.DISPATCHED) if row.draw >= 8])


def test_one_that_ended_its_worker_gets_no_second_chance(shop: Open) -> None:
    here = shop(after=5)
    here.drop(here.draw(1)[0], "reward-crash")
    assert "reward-crash once" in here.take_news()[0][1]
    assert row_numbers([row for _ in range(8) for row in here.draw(1)]) == [1, 2, 3, 1, 2, 3, 1, 2]


def test_a_resumed_run_tries_it_again(shop: Open, tmp_path: Path) -> None:
    here = shop()
    for row in here.draw(8):
        here.drop(row, "reward-error" if row.draw % 4 == 0 else "engine-error")
    here.close()
    begin_life(tmp_path / "ledger.sqlite", "r")
    here = shop()
    assert not len(here.quarantine)
    (row, *_) = here.draw(4)
    assert row.draw == 8, "row 0 is back"
    here.drop(row, "reward-error")
    assert not len(here.quarantine), "and its failures are counted anew"


def test_zero_heeds_no_list(shop: Open) -> None:
    here = shop(after=1)
    for row in here.draw(4):
        here.drop(row, "reward-error")
    here = shop(after=0)
    assert len(here.draw(4)) == 4


def test_f7_a_data_set_that_is_all_quarantined_ends_the_run(shop: Open) -> None:
    here = shop(after=1)
    for row in here.draw(4):
        here.drop(row, "reward-error")
    with pytest.raises(DataError, match="the last 1000 draws brought only the 4 prompts that are quarantined"):
        here.draw(4)
    here = shop(after=1, passes=5)
    assert here.draw(4) == [], "the data ends first"
    assert not here.cursor.has_next


REWARD = """
import os
from pathlib import Path

def deadly(completion):
    if completion.metadata.get("bad"):
        os._exit(9)
    return float(len(completion.text) % 3)
"""


async def test_a_run_goes_on_without_the_prompt_that_ends_its_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(make_job(tmp_path).folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "deadly.py").write_text(REWARD)
    lines = (tmp_path / "data" / "prompts.jsonl").read_text().splitlines()[:8]
    rows = [json.loads(line) for line in lines]
    rows[3]["metadata"] = {"bad": True}
    (tmp_path / "data" / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ("reward.fn=deadly.py:deadly", "run.num_steps=5", "rollout.max_groups=4")
    status, run_dir = await inside("run.toml", *flags)
    assert isinstance(status, RunStatus) and status.phase == "finished", status
    (event,) = events(run_dir, "prompt-quarantined")
    assert "row 3 of " in event["text"] and "reward-crash once" in event["text"]
    assert "ended its worker process (exit code 9)" in event["text"]
    ledger = audit(run_dir)
    assert len(set(ledger.trained)) == len(ledger.trained) == 5 * 4
    assert ledger.states["DROPPED"] >= 2, "nearly three passes"
    last = [point["values"] for point in metrics(run_dir) if "buffer/quarantined" in point["values"]][-1]
    assert last["buffer/quarantined"] == 1.0
