"""The pitfalls of asynchronous training that concern admission, one named test each, and the rules one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.algos.staleness_sim import Scenario, simulate

from myxa.algos.staleness import (
    POLICIES,
    Admission,
    LineEntry,
    LineStage,
)
from myxa.core.errors import StalenessError


def _dispatch(admission: Admission, count: int, version: int, first: int = 0) -> list[int]:
    ids = list(range(first, first + count))
    for group_id in ids:
        assert admission.may_dispatch(version)
        admission.dispatched(group_id, version)
    return ids


def _claim(admission: Admission, step: int) -> tuple[int, ...] | None:
    selection = admission.select(step)
    assert not selection.overdue
    return selection.claim


def test_pitfall_02_eta_0_is_on_policy() -> None:
    """With eta 0 nothing starts before the batch is trained *and* adopted; every lag is 0."""
    admission = Admission(max_staleness=0, batch_size=4)
    for step in range(5):
        ids = _dispatch(admission, 4, version=step, first=4 * step)
        assert not admission.may_dispatch(step), "a fifth group would be trained one step off"
        for group_id in ids:
            admission.ready(group_id, step)
        assert _claim(admission, step) == tuple(ids)
        assert not admission.may_dispatch(step)
        admission.trained(step)
        assert not admission.may_dispatch(step), "this engine has not adopted the new version"
        assert admission.may_dispatch(step + 1)
    for policy in POLICIES:
        assert set(simulate(Scenario(policy=policy, max_staleness=0, num_steps=20, batch_size=8)).lags) == {0}


def test_pitfall_02_eta_1_is_one_step_off() -> None:
    """With equal lengths, the batch of step s + 1 is made by version s while step s trains: lag 1 from then on."""
    scenario = Scenario(max_staleness=1, batch_size=8, num_steps=20, sigma=0.0, step_s=5.0, adopt_s=0.0)
    lags = simulate(scenario).lags
    assert lags[:8] == [0] * 8
    assert lags[8:] == [1] * (8 * 19)


@pytest.mark.parametrize("policy", POLICIES)
def test_pitfall_03_no_burst_after_recovery(policy: str) -> None:
    """A run that resumes at version 50 admits what a run at version 0 admits, not 50 batches more."""
    fresh = Admission(policy, max_staleness=2, batch_size=4)
    resumed = Admission(policy, max_staleness=2, batch_size=4, next_step=50)
    restored = Admission(policy, max_staleness=2, batch_size=4)
    assert restored.restore((), next_step=50, newest_version=50) == ()
    counts: list[int] = []
    for admission, version in ((fresh, 0), (resumed, 50), (restored, 50)):
        count = 0
        while admission.may_dispatch(version):
            admission.dispatched(count, version)
            count += 1
        counts.append(count)
        assert admission.slots_used == count == admission.slots_total
    assert counts[0] == counts[1] == counts[2]


def test_pitfall_03_an_engine_from_before_a_rewind_gets_no_burst() -> None:
    """The trainer went back from 9 to 5; an engine still announces 9. It counts as 5, and so do its stamps."""
    admission = Admission(max_staleness=1, batch_size=2)
    admission.restore((), next_step=5, newest_version=5)
    _dispatch(admission, admission.slots_total, version=9)
    assert not admission.may_dispatch(9)
    admission.ready(0, 9)
    admission.ready(1, 9)
    assert _claim(admission, 5) == (0, 1)
    admission.trained(5)
    admission.ready(2, 9)
    admission.ready(3, 9)
    assert _claim(admission, 6) == (2, 3)
    assert admission.may_dispatch(6)


@pytest.mark.parametrize(("policy", "is_fair"), [("pace", True), ("wait", True), ("drop", False)])
def test_pitfall_04_trained_lengths_follow_the_drawn_lengths(policy: str, is_fair: bool) -> None:
    """Kolmogorov-Smirnov against the law that lengths are drawn from: only `drop` favours the short."""
    outcome = simulate(Scenario(policy=policy, max_staleness=2, batch_size=8, num_steps=600, step_s=5.0, seed=7))
    trained = torch.tensor(outcome.trained, dtype=torch.float64).sort().values
    law, share = torch.special.ndtr(trained.log()) ** 8, torch.arange(len(trained) + 1) / len(trained)
    gap = float(torch.maximum((share[1:] - law).max(), (law - share[:-1]).max()))
    assert (gap < 1.36 * len(trained) ** -0.5) == is_fair, (
        f"seed 7: {gap:.4f}, {len(outcome.dropped)} dropped"
    )  # p 0.05
    assert (not outcome.dropped) == is_fair
    if outcome.dropped:
        assert np.mean(outcome.dropped) > 1.5 * np.mean(outcome.trained)


@pytest.mark.parametrize("policy", POLICIES)
def test_pitfall_06_consumption_is_in_order_of_dispatch(policy: str) -> None:
    """Ready groups are taken oldest first, in whatever order they finished; never the freshest first."""
    admission = Admission(policy, max_staleness=2, batch_size=3)
    ids = _dispatch(admission, 6, version=0)
    for group_id in reversed(ids):
        admission.ready(group_id, 0)
    assert _claim(admission, 0) == (0, 1, 2)
    assert _claim(admission, 1) == (3, 4, 5)


def test_pitfall_06_groups_are_taken_in_dispatch_order_not_in_ready_order() -> None:
    """While the oldest group is under way, groups near it are taken before those that finished earlier."""
    admission = Admission(max_staleness=2, batch_size=2)
    ids = _dispatch(admission, 3, version=0)
    for group_id in reversed(ids[1:]):
        admission.ready(group_id, 0)
    assert _claim(admission, 0) == (1, 2)


def test_d05_one_slow_group_holds_no_ready_batch_back_until_its_step_is_due() -> None:
    """Group 0 of version 0 is due at step eta; the batches of the steps before do without it, that of eta waits."""
    eta, size = 2, 4
    admission = Admission(max_staleness=eta, batch_size=size)
    next_id = 0
    for step in range(eta + 1):
        while admission.may_dispatch(step):
            admission.dispatched(next_id, step)
            if next_id:
                admission.ready(next_id, step)
            next_id += 1
        claim = _claim(admission, step)
        assert (claim is None) == (step == eta), "it is due now, and would be too old a step later"
        if claim is None:
            break
        assert 0 not in claim
        admission.trained(step)
    admission.ready(0, 0)
    claim = _claim(admission, eta)
    assert claim is not None and 0 in claim


def test_d05_raising_the_bound_helps_at_once() -> None:
    """A step that waits for a slow group which is due is formed without it as soon as the bound is raised."""
    admission = Admission(max_staleness=1, batch_size=2)
    for group_id in _dispatch(admission, 4, version=0)[1:]:
        admission.ready(group_id, 0)
    assert _claim(admission, 0) == (1, 2)
    admission.trained(0)
    for group_id in _dispatch(admission, 2, version=1, first=4):
        admission.ready(group_id, 1)
    assert _claim(admission, 1) is None, "group 0 must be trained by step 1"
    assert admission.retune(max_staleness=2) == ()
    assert _claim(admission, 1) == (3, 4)


def test_pitfall_08_an_engine_that_stamps_older_than_announced_is_found_out() -> None:
    """The stamp counts, not the announcement; a group that breaks the bound by it is dropped."""
    admission = Admission(max_staleness=1, batch_size=1)
    admission.restore((), next_step=5, newest_version=5)
    _dispatch(admission, 2, version=5)
    admission.ready(0, 1)
    admission.ready(1, 5)
    selection = admission.select(5)
    assert selection.overdue == (0,)
    assert selection.claim == (1,)


def test_c_after_a_rewind_no_prompt_without_a_token_overtakes_those_that_are_drawn_again() -> None:
    """Resumed at 5 of 7: the batches of 6 and the one under way are too old once 5 is claimed; what was handed back
    without a token keeps no place behind them, or its draw would come before theirs."""
    admission = Admission(max_staleness=0, batch_size=2)
    places = [LineEntry(group_id, 5 + group_id // 2, LineStage.READY) for group_id in range(4)]
    places += [LineEntry(4, 7, LineStage.WAITING), LineEntry(5, -1, LineStage.WAITING)]
    assert admission.restore(places, next_step=5, newest_version=5) == ()
    selection = admission.select(5)
    assert selection.claim == (0, 1)
    assert selection.overdue == (2, 3, 4, 5)


def test_c_without_a_rewind_a_prompt_without_a_token_keeps_its_place() -> None:
    admission = Admission(max_staleness=0, batch_size=2)
    places = [LineEntry(0, 5, LineStage.READY), LineEntry(1, 5, LineStage.READY), LineEntry(2, -1, LineStage.WAITING)]
    assert admission.restore(places, next_step=5, newest_version=5) == ()
    assert admission.select(5).overdue == ()


@pytest.mark.parametrize("policy", POLICIES)
def test_c_a_prompt_that_starts_again_after_a_restore_counts_the_versions_of_its_new_tokens(policy: str) -> None:
    admission = Admission(policy, max_staleness=3, batch_size=1)
    admission.restore([LineEntry(0, -1, LineStage.WAITING)], next_step=1, newest_version=1)
    for step in range(1, 4):
        _dispatch(admission, 1, version=step, first=step)
        admission.ready(step, step)
        assert _claim(admission, step) == (step,)
        admission.trained(step)
    admission.dispatched(0, 4)
    admission.ready(0, 4)
    assert admission.version_of(0) == 4


@pytest.mark.parametrize("eta", range(5))
@pytest.mark.parametrize("batch_size", [1, 2, 7, 32])
def test_all_batches_that_the_bound_allows_may_be_under_way(batch_size: int, eta: int) -> None:
    """eta + 1 batches before any is trained; each that is trained makes room for one more."""
    admission = Admission(max_staleness=eta, batch_size=batch_size)
    ids = _dispatch(admission, (eta + 1) * batch_size, version=0)
    assert not admission.may_dispatch(0)
    for group_id in ids[:batch_size]:
        admission.ready(group_id, 0)
    assert _claim(admission, 0) == tuple(ids[:batch_size])
    assert not admission.may_dispatch(0), "its weights are not there yet"
    admission.trained(0)
    _dispatch(admission, batch_size, version=1, first=len(ids))
    assert not admission.may_dispatch(1)


def test_the_trainer_does_not_wait_for_answers_of_equal_length_within_the_bound() -> None:
    """Generation takes 1.3 to 1.9 steps, which eta = 2 covers: every slot is needed for that."""
    for factor in (1.3, 1.6, 1.9):
        scenario = Scenario(max_staleness=2, batch_size=16, num_engines=1, step_s=10, generate_s=10 * factor - 1,
                            sigma=0, adopt_s=0.1)  # fmt: skip
        assert simulate(scenario).waiting_share < 0.01, factor


def test_resume_with_another_batch_size_drops_only_what_cannot_make_it() -> None:
    """Forty ready groups of versions 0 to 4 at step 5 with batches of two: the bound is kept group by group."""
    admission = Admission(max_staleness=4, batch_size=2)
    places = [LineEntry(g, g // 8, LineStage.READY) for g in range(40)]
    overdue = list(admission.restore(places, next_step=5, newest_version=5))
    num_trained = 0
    while admission.num_open:
        step = admission.next_step
        selection = admission.select(step)
        assert selection.claim is not None
        overdue += selection.overdue
        num_trained += len(selection.claim)
        assert all(step - group_id // 8 <= 4 for group_id in selection.claim)
    assert num_trained == 8
    assert num_trained + len(overdue) == 40


@pytest.mark.parametrize("policy", POLICIES)
def test_demonstrations_count_as_of_their_dispatch(policy: str) -> None:
    """Groups without any engine token: an actor without an engine announces "newest", and is paced by training."""
    newest = (1 << 31) - 1
    admission = Admission(policy, max_staleness=0, batch_size=2)
    for step in range(3):
        ids = _dispatch(admission, 2, version=newest, first=2 * step)
        assert not admission.may_dispatch(newest)
        for group_id in ids:
            admission.ready(group_id, -1)
        assert _claim(admission, step) == tuple(ids)
        admission.trained(step)


def test_events_out_of_order_are_refused() -> None:
    """The line refuses what a ledger would refuse."""
    admission = Admission(max_staleness=1, batch_size=2)
    admission.dispatched(3, 0)
    with pytest.raises(StalenessError, match="ids must grow"):
        admission.dispatched(2, 0)
    with pytest.raises(StalenessError, match="expected waiting"):
        admission.dispatched(3, 0)
    with pytest.raises(StalenessError, match="not in the line"):
        admission.ready(9, 0)
    admission.ready(3, 0)
    with pytest.raises(StalenessError, match="is ready, expected"):
        admission.requeued(3, 0)
    with pytest.raises(StalenessError, match="no batch of it"):
        admission.trained(1)
    with pytest.raises(StalenessError, match="the next step is 0"):
        admission.select(5)
