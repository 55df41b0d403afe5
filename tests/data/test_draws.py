"""Draw numbers become prompts deterministically, each row once a pass, whatever was drawn before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.opened import open_prompts, run_on, write_rows

from myxa.actors.data import PromptDataset
from myxa.actors.data.prompts import RowOrder
from myxa.core.config.data import Source, parse_source, parse_sources


def dataset(folder: Path, num_rows: int, seed: int = 1, text: str = "q", **data: Any) -> PromptDataset:
    file = write_rows(folder / "rows.jsonl", *({"prompt": f"{text}{i}", "label": str(i)} for i in range(num_rows)))
    return open_prompts(run_on(file, run={"seed": seed}, data=data))


@given(st.integers(1, 60), st.integers(0, 2**70), st.integers(0, 2**33))
def test_every_pass_is_a_permutation_and_depends_on_seed_and_pass_only(rows: int, seed: int, first: int) -> None:
    order, again = (RowOrder(rows, seed, is_shuffled=True) for _ in range(2))
    forward = [order.row(p, at) for p in range(first, first + 4) for at in range(rows)]
    backward = [again.row(p, at) for p in reversed(range(first, first + 4)) for at in reversed(range(rows))]
    assert forward == backward[::-1]
    for number in range(4):
        assert sorted(forward[number * rows : (number + 1) * rows]) == list(range(rows))


def test_the_order_of_rows_never_changes_between_releases() -> None:
    order = RowOrder(8, seed=1, is_shuffled=True)
    assert [order.row(0, at) for at in range(8)] == [6, 2, 3, 7, 1, 4, 5, 0]
    assert [order.row(1, at) for at in range(8)] == [2, 0, 3, 4, 1, 6, 7, 5]


def test_passes_differ_and_seeds_differ(tmp_path: Path) -> None:
    one, other = dataset(tmp_path, 30, seed=1), dataset(tmp_path, 30, seed=2)
    orders = {
        tuple(p.row for d in range(30) if (p := data.prompt(start + d))) for data in (one, other) for start in (0, 30)
    }
    assert len(orders) == 4


def test_draws_carry_their_pass_and_end_with_the_last(tmp_path: Path) -> None:
    data = dataset(tmp_path, 3, max_passes=2, shuffle=False)
    drawn = [data.prompt(draw) for draw in range(6)]
    assert [(p.group_id, p.pass_index, p.row) for p in drawn if p] == [(d, d // 3, d % 3) for d in range(6)]
    assert data.prompt(6) is None
    assert data.prompt(600) is None
    endless = dataset(tmp_path, 3).prompt(3 * 10**9 + 1)
    assert endless is not None
    assert endless.pass_index == 10**9
    with pytest.raises(ValueError, match="draws count from 0, not -1"):
        data.prompt(-1)


def test_the_fingerprint_changes_with_anything_that_changes_a_draw(tmp_path: Path) -> None:
    same = dataset(tmp_path, 5).fingerprint
    assert dataset(tmp_path, 5).fingerprint == same
    assert dataset(tmp_path, 5, max_passes=3).fingerprint == same
    others = [
        dataset(tmp_path, 6), dataset(tmp_path, 5, seed=2), dataset(tmp_path, 5, text="Q"),
        dataset(tmp_path, 5, shuffle=False), dataset(tmp_path, 5, system="s"),
        dataset(tmp_path, 5, label_key="prompt"),
    ]  # fmt: skip
    assert len({same, *(other.fingerprint for other in others)}) == 7


bounds = st.none() | st.integers(-30, 30)


@settings(max_examples=40)
@given(
    st.text(min_size=1).filter(lambda text: "@[" not in text and "\0" not in text), bounds, bounds, st.integers(0, 20)
)
def test_slices_are_pythons(path: str, start: int | None, stop: int | None, num_rows: int) -> None:
    source = Source(path, start, stop)
    text = f"{path}@[{'' if start is None else start}:{'' if stop is None else stop}]"
    assert parse_source(text) == source
    assert list(source.rows(num_rows)) == list(range(num_rows))[start:stop]
    assert parse_source(str(source)) == source
    assert parse_source(path) == Source(path)


@pytest.mark.parametrize(
    "text", ["f@[3]", "f@[a:b]", "f@[1:2:3]", "f@[1:2", "f@[-:2]", "f@[1:2]x", "@[1:2]", "f@[1.0:2]", ""]
)
def test_slices_that_are_not(text: str) -> None:
    with pytest.raises(ValueError, match="must"):
        parse_source(text)


def test_one_name_or_several() -> None:
    assert parse_sources("") == ()
    assert parse_sources(("a@[1:]", "b")) == (Source("a", 1, None), Source("b"))
