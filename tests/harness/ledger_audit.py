"""What a ledger file proves about its run, read from outside during or after the run.

Independent of `actors/ledger/file.py`, which checks what its owner is about to rely on. Here every group's transitions are walked
from the beginning, and their result is compared with the rows. Opens the file read-only and takes no lock.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from myxa.actors.ledger.file import AT_REST, REWIND, STALE, TRANSITIONS, State
from myxa.core.errors import LedgerError

_DONE = (State.TRAINED, State.DURABLE)
_WITH_PAYLOAD = (State.READY, State.CLAIMED, State.TRAINED)
_GROUPS = (
    "SELECT group_id, draw, redraw_of, state, step, reason, "
    "group_id IN (SELECT group_id FROM payloads WHERE is_whole) FROM groups ORDER BY group_id"
)
_SOURCES = "SELECT source, source_draw, redraw_of FROM groups WHERE source != '' ORDER BY group_id"
_MOVES = "SELECT group_id, from_state, to_state FROM transitions ORDER BY seq"

BUSY_S = 10.0
"""How long a writer may keep a reader out."""


@dataclass(frozen=True, slots=True)
class LedgerAudit:
    """See the module's head."""

    num_draws: int
    """Prompts taken from the source: the cursor."""
    states: dict[State, int]
    """Groups by state."""
    trained: Counter[int]
    """Draw -> how often it counts as trained in the lineage that the ledger ends with."""
    dropped: dict[str, int]
    """Reason -> groups."""
    num_waiting: int
    """Draws whose group was given up for its age and that are not drawn again yet: none once the data has run out."""
    num_rewound: int
    """Times that a group's training was undone."""
    problems: tuple[str, ...]
    """What is wrong, one sentence each; empty: every draw is in one group, or was given up, or waits to be drawn again
    (`num_waiting`); none was trained twice; and what may still be trained is there."""


@dataclass(frozen=True, slots=True)
class _Group:
    group_id: int
    draw: int
    redraw_of: int
    state: str
    step: int
    reason: str
    has_payload: int
    """Whether all of it is there."""


@dataclass(frozen=True, slots=True)
class _Move:
    group_id: int
    came_from: str
    went_to: str


def audit_ledger(path: Path) -> LedgerAudit:
    """Read and judge a ledger. Raises LedgerError if it cannot be read as one."""
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=BUSY_S)) as db:
            db.execute("BEGIN")  # one moment of a run that may still write
            groups = [_Group(*values) for values in db.execute(_GROUPS)]
            moves = [_Move(*values) for values in db.execute(_MOVES)]
            draws: list[tuple[str, int, int]] = db.execute(_SOURCES).fetchall()
            marks = dict(db.execute("SELECT key, value FROM meta"))
            durable, floor = int(marks["durable_version"]), int(marks["payload_floor"])
    except (sqlite3.Error, KeyError, ValueError) as error:
        raise LedgerError(f"{path} cannot be read as a ledger: {error}", remedy="name a run's ledger.sqlite") from error
    done = [group for group in groups if group.state in _DONE]
    known = {str(state): state for state in State}
    again = {group.redraw_of for group in groups}
    problems = (
        *_row_problems(groups), *_draw_problems(groups), *_source_problems(draws), *_step_problems(done),
        *_walk(groups, moves),
    )  # fmt: skip
    return LedgerAudit(
        num_draws=len({group.draw for group in groups}),
        states=dict(Counter(known[group.state] for group in groups if group.state in known)),
        trained=Counter(group.draw for group in done),
        dropped=dict(Counter(group.reason for group in groups if group.state == State.DROPPED)),
        num_waiting=sum(group.reason == STALE and group.group_id not in again for group in groups),
        num_rewound=sum(move.came_from in _DONE and move.went_to == State.READY for move in moves),
        problems=(*problems, *_payload_problems(groups, durable, floor)),
    )


def _row_problems(groups: Sequence[_Group]) -> Iterator[str]:
    for group in groups:
        if group.state not in AT_REST:
            yield f"group {group.group_id} is in {group.state}, where none can rest"
    if [group.group_id for group in groups] != list(range(len(groups))):
        yield "group ids are not counted without a gap"


def _draw_problems(groups: Sequence[_Group]) -> Iterator[str]:
    """Every draw up to the cursor was taken once, again only after its group was given up, and is in one group at most
    that was not."""
    by_id = {group.group_id: group for group in groups}
    draws = sorted({group.draw for group in groups})
    if draws != list(range(len(draws))):
        yield f"draws up to {draws[-1]}, but only {len(draws)} of them are known"
    for draw, count in Counter(group.draw for group in groups if group.redraw_of < 0).items():
        if count > 1:
            yield f"draw {draw} was taken from the source {count} times"
    for group in groups:
        before = by_id.get(group.redraw_of)
        if group.redraw_of >= 0 and (before is None or before.draw != group.draw or before.reason != STALE):
            yield f"group {group.group_id} draws {group.draw} again although group {group.redraw_of} was not given up"
    living = Counter(group.draw for group in groups if group.state != State.DROPPED)
    for draw, count in living.items():
        if count > 1:
            yield f"draw {draw} is in {count} groups at once"


def _source_problems(draws: Sequence[tuple[str, int, int]]) -> Iterator[str]:
    """Every source was drawn from in the order of its draws, each once but for those that are drawn again."""
    taken: Counter[str] = Counter()
    for source, number, redraw_of in draws:
        if redraw_of < 0 and number != taken[source]:
            yield f"draw {number} of {source} was taken after {taken[source]} draws of it"
        taken[source] += redraw_of < 0


def _step_problems(done: Sequence[_Group]) -> Iterator[str]:
    """Steps were trained without a gap, and a draw in one of them."""
    steps = sorted({group.step for group in done})
    if steps and steps != list(range(steps[0], steps[-1] + 1)):
        yield f"steps trained are {steps}: there is a gap"
    for draw, count in Counter(group.draw for group in done).items():
        if count > 1:
            yield f"draw {draw} was trained {count} times"


def _payload_problems(groups: Sequence[_Group], durable: int, floor: int) -> Iterator[str]:
    """What a trainer may still ask for is there, after going back to the oldest checkpoint that it may go back to as
    well; and what counts as durable is covered by one."""
    for group in groups:
        is_kept = group.state in _WITH_PAYLOAD or (group.state == State.DURABLE and group.step >= floor)
        if is_kept and not group.has_payload:
            yield f"group {group.group_id} is {group.state} (step {group.step}), and its samples are gone"
        if group.state == State.DURABLE and group.step >= durable:
            yield f"group {group.group_id} of step {group.step} is durable, but checkpoints reach {durable} only"


def _walk(groups: Sequence[_Group], moves: Sequence[_Move]) -> Iterator[str]:
    """Every group's way from DRAWN to where its row says it is, by hops that exist."""
    at: dict[int, str] = {}
    for move in moves:
        where = at.get(move.group_id, str(State.DRAWN))
        if move.came_from != where:
            yield f"group {move.group_id} went from {move.came_from} while it was in {where}"
        if not _exists(move):
            yield f"group {move.group_id} went from {move.came_from} to {move.went_to}, which cannot be"
        at[move.group_id] = move.went_to
    for group in groups:
        if at.pop(group.group_id, None) != group.state:
            yield f"group {group.group_id} is in {group.state}, but that is not where its transitions end"
    for group_id in at:
        yield f"group {group_id} has transitions and no row"


def _exists(move: _Move) -> bool:
    known = {str(state): state for state in State}
    came_from, went_to = known.get(move.came_from), known.get(move.went_to)
    return came_from is not None and any(went_to in table.get(came_from, ()) for table in (TRANSITIONS, REWIND))
