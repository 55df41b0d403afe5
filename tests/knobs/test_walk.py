"""Every knob and verb turned on one real run, seen in its samples and metrics; then the same knobs on a second run."""

from __future__ import annotations

import bisect
import statistics

import pytest
import torch  # noqa: F401  # what its import opens and starts is not the run's doing
from tests.harness.run_job import audit, make_job
from tests.knobs.walk import (
    COLD,
    FEW,
    FIRST_LR,
    HIGH,
    LOW,
    NEW_LR,
    ROWS,
    SKIPS,
    Walk,
    claimed,
    knobs_of_checkpoint,
    seated,
    steps,
    take,
)

from myxa.actors.coordinator.audit import AUDIT_FILE, read_audit, verify_audit
from myxa.launch.commands.history import replay, trajectory

pytestmark = pytest.mark.timeout(300)

BATCH = 4
MAX_EFFECT_S = 0.5
"""Of the median set-to-effect on a machine that does much else; the goal is 0.1 s on an idle one."""

SLACK_S = 0.01
"""Between two places of one process that look at the same clock."""


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Walk:
    """Taken once, looked at by all; the run is over."""
    job = make_job(tmp_path_factory.mktemp("walk"))
    with seated(job, "roles.rollout.count=2") as seat:
        walk = Walk(seat)
        take(walk)
    return walk


def newest(changes: list[tuple[int, float]], number: int) -> float:
    """The value that holds at `number`, of pairs (from, value) in order."""
    return changes[bisect.bisect_right([at for at, _ in changes], number) - 1][1]


def test_each_change_is_in_the_steps_from_its_number_on(walk: Walk) -> None:
    told = steps(walk.seat.run_dir)
    lr, undone = walk.replies["lr"], walk.replies["undo lr"]
    rates = [(0, FIRST_LR), (lr["at"], NEW_LR), (undone["at"], FIRST_LR)]
    epochs = [(0, 0), (lr["at"], lr["epoch"]), (undone["at"], undone["epoch"])]
    assert sorted(told) == list(range(len(told))), "every step once"
    for number, values in told.items():
        assert values["train/lr"] == pytest.approx(newest(rates, number)), number
        assert values["knobs/epoch"] == newest(epochs, number), number


def test_the_bound_of_staleness_holds_from_each_change_on(walk: Walk) -> None:
    told = steps(walk.seat.run_dir)
    looser, tighter = walk.versions["looser"], walk.versions["tighter"]
    raised_s, lowered_s = (
        next(e["wall_s"] for e in walk.seat.in_force("max_staleness") if e["data"]["new"] == eta) for eta in (4, 1)
    )
    assert raised_s < lowered_s
    before = [v["lag/max"] for n, v in told.items() if n < looser - 2]
    assert before and not any(before)
    assert 2 <= max(v["lag/max"] for v in told.values()) <= 4, "generation ran ahead, and no further than it may"
    # One batch may have been claimed before the change arrived.
    assert max(v["lag/max"] for n, v in told.items() if n > tighter + 1) == 1


def test_samples_tell_what_they_were_drawn_under(walk: Walk) -> None:
    """Each group by its epoch, whenever it was trained; and the metrics of a step are those of its groups."""
    told, by_step = steps(walk.seat.run_dir), claimed(walk.seat.run_dir)
    assert len(by_step) > 40
    assert min(by_step) <= walk.versions["dump"] + 2
    cold = 0
    for number, groups in by_step.items():
        assert len(groups) == BATCH
        for group in (g.group for g in groups):
            assert group is not None
            wanted = COLD if group.knobs >= walk.epoch("temperature") else 1.0
            assert {s.temperature for s in group.samples} == {wanted}, number
            cold += wanted == COLD
        if number not in told:
            continue  # it was claimed, and the run ended
        oldest = min(int(s.versions.min()) for g in groups if g.group is not None for s in g.group.samples)
        assert number - oldest == told[number]["lag/max"], number
        epochs = [g.group.knobs for g in groups if g.group is not None]
        assert (told[number]["batch/knobs_min"], told[number]["batch/knobs_max"]) == (min(epochs), max(epochs))
    assert cold
    assert told[max(told)]["batch/temperature_max"] == pytest.approx(COLD)


def test_engines_and_their_concurrency(walk: Walk) -> None:
    assert walk.crowd
    assert max(walk.crowd) <= FEW
    assert {name: v["concurrency"] for name, v in walk.newcomers.items()} == {"rollout/2": FEW, "rollout/3": FEW}
    [warning] = [w for w in walk.replies["crowded"]["warnings"] if w.startswith("rollout/1: ")]
    assert "others wait inside it" in warning, "what an owner that agrees has to say reaches the operator"
    last = claimed(walk.seat.run_dir)
    makers = {g.rollout for groups in last.values() for g in groups}
    assert makers >= {"rollout/0", "rollout/1"}
    assert {g.rollout for g in last[max(last)]} == {"rollout/0"}, "in the end one is left"


def test_the_filter_judges_from_its_change_to_its_undoing(walk: Walk) -> None:
    begun, ended = (e["wall_s"] for e in walk.seat.in_force("group_filter"))
    left_out = walk.seat.ledger(
        "SELECT wall_s FROM transitions JOIN groups USING (group_id) "
        "WHERE to_state = 'DROPPED' AND groups.reason = 'zero_variance'"
    )
    assert left_out
    for (wall_s,) in left_out:
        assert begun - SLACK_S <= wall_s <= ended + SLACK_S
    kept = walk.seat.ledger(
        f"SELECT group_id FROM transitions WHERE to_state = 'READY' "
        f"AND wall_s BETWEEN {begun + SLACK_S} AND {ended - SLACK_S}"
    )
    for group in (g for groups in claimed(walk.seat.run_dir).values() for g in groups):
        if (group.group_id,) in kept:
            assert group.group is not None
            assert len(set(group.group.rewards.tolist())) == 2, "what was kept meanwhile has both kinds of answers"


def test_pause_steps_and_checkpoint(walk: Walk) -> None:
    assert walk.versions["step"] == walk.versions["pause"] + 3
    assert walk.folder.endswith(f"version_{walk.versions['step']:08d}")
    kept = knobs_of_checkpoint(walk.folder)
    assert kept["lr"] == NEW_LR
    assert kept["temperature"] == COLD
    assert kept["max_staleness"] == 1
    assert kept["epoch"] == walk.epoch("undo filter")


def test_the_mix_of_sources_is_the_one_in_force(walk: Walk) -> None:
    """Half and half before the change; from its first draw on never further than half a prompt from what was asked."""
    groups = [g.group for groups in claimed(walk.seat.run_dir).values() for g in groups if g.group is not None]
    assert {g.prompt.metadata["data_source"] for g in groups} == {"left", "right"}
    assert all(g.prompt.source_name == g.prompt.metadata["data_source"] for g in groups)
    ((mark,),) = walk.seat.ledger("SELECT value FROM meta WHERE key = 'mix'")
    since, _, shares = mark.partition(" ")
    assert shares == "left:1,right:3"
    rows = walk.seat.ledger(
        "SELECT draw, source FROM groups WHERE redraw_of < 0 AND reason != 'out-of-window' ORDER BY draw"
    )
    for drawn, share in (
        ([name for draw, name in rows if draw < int(since)], 0.5),
        ([name for draw, name in rows if draw >= int(since)], 0.75),
    ):
        assert len(drawn) > 30
        for count in range(1, len(drawn) + 1):
            assert abs(drawn[:count].count("right") - share * count) <= 0.5
    later = [g.prompt.source_name for g in groups if g.knobs >= walk.epoch("mix")]
    assert later.count("right") / len(later) == pytest.approx(0.75, abs=0.1), "what was trained on is as it was drawn"
    told = [v for n, v in steps(walk.seat.run_dir).items() if n > walk.versions["mix"] + 3]
    assert sum(v["batch/source/right"] for v in told) / len(told) == pytest.approx(0.75, abs=0.1)
    assert all(v["batch/source/left"] + v["batch/source/right"] == 1 for v in told)
    assert {name for v in told for name in v if name.startswith("reward/source/")} == {
        "reward/source/left",
        "reward/source/right",
    }


def test_prompts_outside_the_window_are_passed_over_for_one_pass(walk: Walk) -> None:
    """By samples: what was dispatched under the window had a history inside it, none, or one that is two passes old."""
    rows = walk.seat.ledger(
        "SELECT g.group_id, source, source_draw, redraw_of, reason, reward, MIN(t.wall_s) FILTER (WHERE from_state = "
        "'DRAWN'), MIN(t.wall_s) FILTER (WHERE to_state = 'REWARDED') FROM groups g JOIN transitions t USING (group_id) "
        "GROUP BY g.group_id ORDER BY g.group_id"
    )
    dumped = [g.group for groups in claimed(walk.seat.run_dir).values() for g in groups if g.group is not None]
    means = {g.group_id: float(g.rewards.mean()) for g in dumped}
    begun = min(g.group_id for g in dumped if g.knobs >= walk.epoch("difficulty"))
    num_inside = num_outside = num_again = 0
    for group_id, source, draw, redraw_of, reason, reward, drawn_s, _ in rows:
        assert group_id not in means or reward == pytest.approx(means[group_id])
        if group_id < begun or redraw_of >= 0:
            continue
        before = [
            (other, was) for other, name, number, *_, was, _, done_s in rows
            if (name, number % ROWS) == (source, draw % ROWS) and other < group_id and done_s and done_s < drawn_s
        ]  # fmt: skip
        if not before:
            continue
        newest, was = max(before)
        is_old = draw // ROWS - rows[newest][2] // ROWS > SKIPS
        is_inside = LOW <= was <= HIGH
        assert (reason == "out-of-window") == (not is_inside and not is_old), (group_id, was)
        num_inside, num_again = num_inside + is_inside, num_again + (is_old and not is_inside)
        num_outside += reason == "out-of-window"
    assert num_inside > 5 and num_outside > 5
    assert num_again, "a prompt that was passed over comes back"


def test_bad_values_are_refused_with_the_reason(walk: Walk) -> None:
    for what, reason in {
        "range": "lr = -1: must be above 0",
        "greedy": "temperature = 0: must be above 0",
        "unknown": "learning_rat",
        "guard": "more than 10 times the run file's",
        "expect": "not 0.123 as expected",
        "half": "lr = -1: must be above 0",
        "source": "there is no source 'rigt'; did you mean \"right\"?",
        "window": "difficulty_low = 0.9 is above difficulty_high = 0.7: set both, or make them equal (no window)",
    }.items():
        assert reason in walk.refusals[what]


def test_no_sample_is_lost_or_doubled(walk: Walk) -> None:
    found, ids = audit(walk.seat.run_dir), walk.seat.ledger("SELECT group_id FROM groups ORDER BY group_id")
    assert [row[0] for row in ids] == list(range(len(ids))), (
        "every prompt that was drawn is in the ledger, in one state"
    )
    assert sum(found.states.values()) == len(ids)
    assert len(found.trained) == len(set(found.trained)) == len(steps(walk.seat.run_dir)) * BATCH
    dumped = [g.group_id for groups in claimed(walk.seat.run_dir).values() for g in groups]
    assert len(dumped) == len(set(dumped))


def test_what_is_set_now_is_used_now(walk: Walk) -> None:
    """From asking to the moment at which every engine's own process says that it uses the value."""
    used_s: dict[int, float] = {}
    for event in walk.seat.in_force("concurrency"):
        epoch = event["data"]["epoch"]
        if event["source"] in walk.newcomers:
            continue  # they were given what was in force when they came
        used_s[epoch] = max(used_s.get(epoch, 0.0), event["wall_s"])
    took_s = [used_s[epoch] - asked_s for epoch, asked_s in walk.asked_s.items()]
    assert len(took_s) >= 20
    median_s = statistics.median(took_s)
    print(f"set to effect: median {median_s * 1e3:.1f} ms, max {max(took_s) * 1e3:.1f} ms of {len(took_s)} changes")
    assert 0 < median_s < MAX_EFFECT_S


def test_the_audit_log_tells_it_all_and_its_replay_gives_the_same_trajectory(
    walk: Walk,
) -> None:
    log = walk.seat.run_dir / AUDIT_FILE
    assert verify_audit(log).complaint == ""
    records = read_audit(log)
    assert len(records) == walk.seat.num_orders
    assert sum(record.result == "refused" for record in records) == len(walk.refusals)
    with seated(walk.seat.job) as second:
        told = replay(second.client, log)
        second.goes_on(2)
    assert not told["refused"]
    before, after = trajectory(records), trajectory(read_audit(second.run_dir / AUDIT_FILE))
    assert [(t.values, t.target, t.at) for t in after] == [(t.values, t.target, t.at) for t in before]
    for turn, again in zip(before, after, strict=True):
        assert again.at or again.version >= turn.version, "not before the version at which it was made"
    lr, undone = walk.replies["lr"]["at"], walk.replies["undo lr"]["at"]
    for number, values in steps(second.run_dir).items():
        assert values["train/lr"] == pytest.approx(newest([(0, FIRST_LR), (lr, NEW_LR), (undone, FIRST_LR)], number))
