"""pass@k: equal to counting every choice of k answers."""

from __future__ import annotations

from itertools import combinations

import pytest

from myxa.algos.rewards.outcome import pass_at, pass_rates


@pytest.mark.parametrize(("solved", "answers"), [(0, 1), (1, 1), (0, 6), (1, 6), (3, 6), (5, 6), (6, 6)])
def test_it_is_the_share_of_choices_that_solve(solved: int, answers: int) -> None:
    marks = [True] * solved + [False] * (answers - solved)
    for k in range(1, answers + 1):
        choices = list(combinations(marks, k))
        assert pass_at(k, solved, answers) == pytest.approx(sum(map(any, choices)) / len(choices))


def test_means_are_over_prompts_up_to_the_fewest_answers() -> None:
    assert pass_rates([(1, 4), (0, 5)]) == {1: 0.125, 2: 0.25, 4: 0.5}
    assert pass_rates([(1, 1)]) == {1: 1.0}
    assert pass_rates([]) == {}


@pytest.mark.parametrize(("k", "solved", "answers"), [(0, 1, 2), (3, 1, 2), (1, 3, 2), (1, -1, 2)])
def test_numbers_that_cannot_be_are_refused(k: int, solved: int, answers: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k}"):
        pass_at(k, solved, answers)
