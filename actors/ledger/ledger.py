"""The ledger: the only truth about where every drawn prompt is, from draw to durable checkpoint.

Each verb is one transaction that moves groups along the transition table (`states.py`); a verb that breaks the table
raises LedgerError and changes nothing. Draw numbers, group ids, the next step and the newest version are derived from
the rows. Unfinished groups are mirrored in memory; trained and dropped ones are in the file alone, since a run without
checkpoints keeps all that it ever trained.

`GroupTally` and `Draws` are counts derived from the rows and updated change by change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import orjson
from msgspec.structs import replace

from ...core.errors import LedgerError
from ...core.samples import Group, Sample
from .file import LIVE, LedgerChange, LedgerFile, LedgerReader
from .states import (
    LEFTOVER,
    OPEN,
    PASSED_OVER,
    REDRAWN,
    REWIND,
    TRANSITIONS,
    Row,
    State,
    Terms,
    check_path,
    decode_group,
    decode_partial,
)

TRAINED_LENGTH = "trained"
_MASKED = "masked "


def masked_text(masked: Mapping[str, int]) -> str:
    """What a transition says of a group's members that nothing is learnt from: reasons, and how many for each."""
    return _MASKED + orjson.dumps(dict(masked), option=orjson.OPT_SORT_KEYS).decode() if masked else ""


class GroupTally:
    """Counts of groups by state and reason, and their lengths. Built once by SQL."""

    SQL = (
        "SELECT state, reason, COUNT(*), SUM(num_tokens >= 0), SUM(MAX(num_tokens, 0)) FROM groups "
        "GROUP BY state, reason"
    )

    MASKED_SQL = (
        "SELECT detail, COUNT(*) FROM transitions WHERE to_state = 'READY' AND detail LIKE 'masked {%' GROUP BY detail"
    )

    def __init__(self, found: Iterable[tuple[Any, ...]] = (), masked: Iterable[tuple[Any, ...]] = ()) -> None:
        self.masked: Counter[str] = Counter()
        """Reason -> members of groups that were kept, from which nothing is learnt."""
        for note, num_groups in masked:
            self.note_masked(note, num_groups)
        self._states: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._lengths: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        for state, reason, num_groups, num_known, num_tokens in found:
            self._add(State(state), reason, num_groups, num_known, num_tokens)

    def note_masked(self, note: str, num_groups: int = 1) -> None:
        """So many groups were kept with that `masked_text`."""
        for reason, count in orjson.loads(note.removeprefix(_MASKED)).items() if note else ():
            self.masked[reason] += count * num_groups

    def change(self, before: Row | None, after: Row) -> None:
        for row, sign in ((before, -1), (after, 1)):
            if row is not None:
                self._add(row.state, row.reason, sign, sign * (row.num_tokens >= 0), sign * max(row.num_tokens, 0))

    def _add(self, state: State, reason: str, num_groups: int, num_known: int, num_tokens: int) -> None:
        self._states[str(state)] += num_groups
        if state is State.DROPPED:
            self._reasons[reason] += num_groups
        name = reason if state is State.DROPPED else TRAINED_LENGTH
        if state in (State.DROPPED, State.TRAINED, State.DURABLE):
            self._lengths[name] += num_known
            self._tokens[name] += num_tokens

    @property
    def states(self) -> dict[str, int]:
        """State -> number of groups; states without groups are left out."""
        return {state: count for state, count in self._states.items() if count}

    @property
    def dropped(self) -> dict[str, int]:
        """Reason -> number of dropped groups."""
        return {reason: count for reason, count in self._reasons.items() if count}

    @property
    def mean_tokens(self) -> dict[str, float]:
        """Mean response tokens of a group: "trained", and per reason for dropping, as far as lengths are known."""
        return {name: self._tokens[name] / count for name, count in self._lengths.items() if count}


_MARK = "mix"


@dataclass(frozen=True, slots=True)
class Stretch:
    """Draws whose sources were chosen by the same shares, as long as nothing changes them."""

    mix: str = ""
    """The shares of the sources, as text; empty: there was no choice yet."""
    since: int = 0
    """First draw."""


class Draws:
    """What was drawn so far, and what is to be drawn once more."""

    def __init__(self, file: LedgerReader) -> None:
        """Count what the file holds. Raises LedgerError if it cannot be read."""
        self.next_id, self.next_draw = file.query(
            "SELECT COALESCE(MAX(group_id), -1) + 1, COALESCE(MAX(draw), -1) + 1 FROM groups"
        )[0]
        since, _, mix = file.meta().get(_MARK, "0 ").partition(" ")
        self.stretch = Stretch(mix, int(since))
        taken = "SELECT source, COUNT(*) FROM groups WHERE redraw_of < 0"
        self.taken: Counter[str] = Counter(dict(file.query(f"{taken} GROUP BY source")))
        """Source -> draws from it: the number of the next."""
        given = f"draw >= ? AND reason NOT IN ({', '.join('?' * len(PASSED_OVER))})"
        found = file.query(f"{taken} AND {given} GROUP BY source", self.stretch.since, *PASSED_OVER)
        self.in_stretch: Counter[str] = Counter(dict(found))
        """The same since the stretch began, without those that were passed over."""
        again = file.rows(
            f"state = 'DROPPED' AND reason IN ({', '.join('?' * len(REDRAWN))}) "
            "AND group_id NOT IN (SELECT redraw_of FROM groups)",
            *sorted(REDRAWN),
        )
        self.redraws = {row.group_id: row.draw for row in again}
        """Dropped group -> its draw, which is to be drawn once more."""

    def mark(self, stretch: Stretch) -> dict[str, str]:
        """What the file is to hold for a stretch that begins with the draws that are written now."""
        return {} if stretch == self.stretch else {_MARK: f"{stretch.since} {stretch.mix}"}

    def begin(self, stretch: Stretch) -> None:
        """It was written; its draws are noted after this."""
        if stretch != self.stretch:
            self.stretch, self.in_stretch = stretch, Counter()

    def note(self, before: Row | None, row: Row) -> None:
        """One group is as `row` says now."""
        if before is None:
            self.next_id = max(self.next_id, row.group_id + 1)
            self.next_draw = max(self.next_draw, row.draw + 1)
            self.redraws.pop(row.redraw_of, None)
            if row.redraw_of < 0:
                self.taken[row.source] += 1
                self.in_stretch[row.source] += row.draw >= self.stretch.since and row.reason not in PASSED_OVER
        elif row.reason in REDRAWN and not before.reason:
            self.redraws[row.group_id] = row.draw


_FINISH = (State.FINISHED, State.REWARDED, State.READY)
_REFUSE = (State.FINISHED, State.REWARDED, State.DROPPED)
_IN_FILE = (State.TRAINED, State.DURABLE, State.DROPPED)
"""States whose groups are not mirrored."""
_CHECKED = "checked"
"""Remembered: the transition up to which histories are not checked again when the next buffer opens the file, since an
opening did, or the newest checkpoint covers them. A copy for another run has no such mark."""


class Ledger:
    """An open ledger of one run over one dataset."""

    def __init__(self, path: Path, *, run: str, fingerprint: str, wall: Callable[[], float]) -> None:
        """Open or create the file, check it (what an earlier opening did not) and requeue what was under way when the
        last buffer ended. `run`: name of the run; `fingerprint`: of the prompt source; `wall`: seconds since the epoch,
        for the record. Raises LedgerError if the file is in use, damaged, or of another run or dataset."""
        self._file = LedgerFile(path, {"run": run, "dataset": fingerprint})
        try:
            self._wall = wall
            self._file.check(int(self.recall(_CHECKED) or 0))
            self._load()
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Release the file; never raises."""
        self._file.close()

    def _load(self) -> None:
        meta = self._file.meta()
        self._base = int(meta["base_version"])
        self._durable = int(meta["durable_version"])
        self._floor = int(meta["payload_floor"])
        movable = self._file.rows(f"state NOT IN ({', '.join('?' * len(_IN_FILE))})", *_IN_FILE)
        self._rows: dict[State, dict[int, Row]] = {state: {} for state in State if state not in _IN_FILE}
        for row in movable:
            self._rows[row.state][row.group_id] = row
        query = self._file.query
        self.draws = Draws(self._file)
        """What was drawn from which source. To be looked at only."""
        newest = query("SELECT COALESCE(MAX(step), -1) + 1 FROM groups WHERE state IN ('TRAINED', 'DURABLE')")[0][0]
        claimed = query("SELECT COALESCE(MAX(step), -1) + 1 FROM groups WHERE state = 'CLAIMED'")[0][0]
        self.newest_version = max(self._base, newest)
        self.next_step = max(self.newest_version, claimed)
        """The first without a claim."""
        self.tally = self._counted()
        try:
            texts = self._file.terms().items()
            self._terms = {number: msgspec.json.decode(text, type=Terms) for number, text in texts}
        except msgspec.MsgspecError as error:
            raise LedgerError(f"the terms of groups in the ledger are damaged: {error}") from error
        change = LedgerChange(meta={LIVE + _CHECKED: str(self._file.newest_transition())})
        for row in movable:
            if row.state is State.DISPATCHED:
                self._move(change, row, (State.REQUEUED,), detail="the buffer was restarted")
        self._commit(change)

    @contextmanager
    def together(self) -> Generator[None]:
        """What is done meanwhile becomes durable by one commit at the end. Where that cannot be written, this ledger
        `is_broken`, and counts what the file has."""
        try:
            with self._file.together():
                yield
        except LedgerError:
            with suppress(LedgerError):
                self.tally = self._counted()
            raise

    def _counted(self) -> GroupTally:
        return GroupTally(self._file.query(GroupTally.SQL), self._file.query(GroupTally.MASKED_SQL))

    @property
    def next_group_id(self) -> int:
        return self.draws.next_id

    @property
    def next_draw(self) -> int:
        """The cursor: the first draw that was not dispatched yet."""
        return self.draws.next_draw

    @property
    def is_broken(self) -> bool:
        """The file could not be written (disk full, read-only): the run cannot continue."""
        return self._file.is_broken

    def redraw(self, besides: Collection[int] = ()) -> tuple[int, int] | None:
        """(dropped group, its draw number) of the first prompt that is to be drawn once more, `besides` left out."""
        left = (item for item in self.draws.redraws.items() if item[0] not in besides)
        return min(left, key=lambda item: item[1], default=None)

    def find(self, group_id: int) -> Row | None:
        """Where a group is; None if it was never drawn."""
        for rows in self._rows.values():
            if group_id in rows:
                return rows[group_id]
        if not 0 <= group_id < self.draws.next_id:
            return None
        return next(iter(self._file.rows("group_id = ?", group_id)), None)

    def given_up(self, reasons: Sequence[str]) -> list[Row]:
        """All groups that were dropped for one of these reasons, oldest first."""
        return self._file.rows(f"state = 'DROPPED' AND reason IN ({', '.join('?' * len(reasons))})", *reasons)

    def judged(self) -> Iterator[tuple[int, str, int, float]]:
        """(group, source, draw of that source, mean reward) of all groups that were finished, oldest first."""
        draw = "CASE WHEN source_draw < 0 THEN draw ELSE source_draw END"
        sql = f"SELECT group_id, source, {draw}, reward FROM groups WHERE reward IS NOT NULL ORDER BY group_id"
        return iter(self._file.query(sql))

    def rows(self, *states: State) -> list[Row]:
        """Groups in these states (not TRAINED, DURABLE or DROPPED), oldest first."""
        found = (row for state in states for row in self._rows[state].values())
        return sorted(found, key=lambda row: row.group_id)

    def claim_of(self, step: int) -> list[Row]:
        """Groups claimed for a step and not trained yet, in the order of their draws, also after a resumption."""
        return sorted((row for row in self.rows(State.CLAIMED) if row.step == step), key=lambda row: row.draw)

    def line(self) -> list[Row]:
        """What admission has to know after a restart: groups that are not dropped, from the oldest open one on."""
        oldest = min((group_id for state in OPEN for group_id in self._rows[state]), default=None)
        return [] if oldest is None else self._file.rows("group_id >= ? AND state != ?", oldest, State.DROPPED)

    def payload(self, group_id: int) -> bytes | None:
        """Bytes of a whole group (READY and later), else of its unfinished samples; None if there are none."""
        found = self._file.payload(group_id)
        return None if found is None else found[1]

    def group(self, group_id: int) -> Group:
        """A whole group. Raises LedgerError naming it if it has none, or a damaged one."""
        row = self._get(group_id)
        if row.state not in (State.READY, State.CLAIMED, State.TRAINED):
            raise LedgerError(f"group {group_id} is {row.state}: it has no payload to fetch")
        return decode_group(group_id, self.payload(group_id) or b"")

    def partial(self, group_id: int) -> tuple[Sample, ...]:
        """Unfinished samples of a group. Raises LedgerError naming it if they are damaged."""
        data = self.payload(group_id)
        return () if data is None else decode_partial(group_id, data)

    def terms_of(self, row: Row) -> Terms:
        """Raises LedgerError for a group that was never dispatched."""
        if row.terms not in self._terms:
            raise LedgerError(f"group {row.group_id} was dispatched under unknown terms")
        return self._terms[row.terms]

    @property
    def newest_epoch(self) -> int:
        """Of the knobs that groups were dispatched under, also in a run that this one continues."""
        return max((terms.knobs for terms in self._terms.values()), default=0)

    def number_terms(self, terms: Terms) -> int:
        """The number under which these terms are kept, for the rows of `dispatch`."""
        number = next((known for known, other in reversed(self._terms.items()) if other == terms), 0)
        if not number:
            number = self._file.add_terms(msgspec.json.encode(terms).decode())
            self._terms[number] = terms
        return number

    def recall(self, key: str) -> str:
        """What was remembered under that key; empty if nothing was."""
        return self._file.meta().get(LIVE + key, "")

    def remember(self, key: str, value: str) -> None:
        """Keep a setting for the next process of this run (not for a run that continues this one)."""
        self._file.commit(LedgerChange(meta={LIVE + key: value}))

    def dispatch(self, new: Sequence[Row] = (), again: Sequence[Row] = (), stretch: Stretch | None = None) -> list[Row]:
        """Groups start: new draws (ids in sequence), and requeued ones. Attempts are counted here. The given rows say
        `rollout`, `epoch` and `version` (lower bound of the oldest token); a new one that has a reason is given up at
        once. `stretch`: that the newest draws belong to, if sources are chosen at all. Returns those that started."""
        change = LedgerChange()
        for offset, row in enumerate(new):
            if row.group_id != self.draws.next_id + offset:
                raise LedgerError(f"group {row.group_id} is drawn, but the next id is {self.draws.next_id + offset}")
            if row.reason:
                self._move(change, row, (State.DROPPED,))
            else:
                self._move(change, replace(row, attempt=1), (State.DISPATCHED,), detail=row.rollout)
        for row in again:
            at = self._get(row.group_id)
            wanted = replace(at, rollout=row.rollout, epoch=row.epoch, version=row.version, attempt=at.attempt + 1)
            self._move(change, wanted, (State.DISPATCHED,), detail=row.rollout)
        self._commit(change, stretch)
        return [row for row in change.rows.values() if row.state is State.DISPATCHED]

    def reattach(self, group_ids: Iterable[int]) -> None:
        """The buffer was restarted, and the actors still hold these groups: the attempts continue."""
        change = LedgerChange()
        for group_id in group_ids:
            self._move(change, self._get(group_id), (State.DISPATCHED,), detail="still held")
        self._commit(change)

    def finish(
        self, group_id: int, data: bytes, *, version: int, num_tokens: int, reward: float | None = None, note: str = ""
    ) -> None:
        """A whole group with rewards arrived and is kept. `version`: of its oldest token, -1 if no engine took part;
        `reward`: mean over its members; `note`: `masked_text` of those that nothing is learnt from."""
        change = LedgerChange()
        change.payloads.append((group_id, True, data))
        row = replace(self._get(group_id), version=version, num_tokens=num_tokens, reward=reward)
        self._move(change, row, _FINISH, detail=note)
        self._commit(change)
        self.tally.note_masked(note)

    def refuse(self, group_id: int, reason: str, *, detail: str, num_tokens: int, reward: float | None = None) -> None:
        """A whole group arrived and is not kept: filtered, or its samples are wrong, and then it has no reward."""
        change = LedgerChange()
        change.freed.append((group_id,))
        row = replace(self._get(group_id), reason=_named(reason), num_tokens=num_tokens, reward=reward)
        self._move(change, row, _REFUSE, detail=detail)
        self._commit(change)

    def drop(self, reasons: Iterable[tuple[int, str]], detail: str = "") -> None:
        """Groups are given up unfinished or too old. Leftovers keep their payload: the run may be continued."""
        change = LedgerChange()
        for group_id, reason in reasons:
            row = self._get(group_id)
            if reason != LEFTOVER:
                change.freed.append((group_id,))
            self._move(change, replace(row, reason=_named(reason)), (State.DROPPED,), detail=detail)
        self._commit(change)

    def note_length(self, group_id: int, num_tokens: int) -> None:
        """Length of a group that was dropped under way, learnt when it arrived too late; for the bias report."""
        row = self.find(group_id)
        if row is not None and row.state is State.DROPPED and row.num_tokens < 0:
            change = LedgerChange()
            change.rows[group_id] = replace(row, num_tokens=num_tokens)
            self._commit(change)

    def requeue(self, returned: Iterable[tuple[int, bytes | None, int]], detail: str) -> None:
        """Groups go back: (group, unfinished samples or None to keep the ones known, version of the oldest token)."""
        change = LedgerChange()
        for group_id, partial, version in returned:
            if partial is not None:
                change.payloads.append((group_id, False, partial))
            row = replace(self._get(group_id), rollout="", epoch=-1, version=version)
            path = () if row.state is State.REQUEUED else (State.REQUEUED,)  # after a restart only the owner goes
            self._move(change, row, path, detail=detail)
        self._commit(change)

    def save_partial(self, group_id: int, partial: bytes) -> None:
        """Unfinished samples of a running group, for the next attempt should its actor die."""
        self._file.commit(LedgerChange(payloads=[(group_id, False, partial)]))

    def claim(self, step: int, group_ids: Sequence[int]) -> None:
        if step != self.next_step:
            raise LedgerError(f"step {step} is claimed, but the next step is {self.next_step}")
        change = LedgerChange()
        for group_id in group_ids:
            self._move(change, replace(self._get(group_id), step=step), (State.CLAIMED,), detail=f"step {step}")
        self._commit(change)
        self.next_step = step + 1

    def trained(self, step: int) -> bool:
        """The batch of `step` was trained. False if that was known. Raises LedgerError if it was never claimed."""
        if step < self.newest_version:
            return False
        if step != self.newest_version or step >= self.next_step:
            raise LedgerError(
                f"step {step} was trained, but claimed are {self.newest_version} to {self.next_step - 1}",
                remedy="claim a step before training it; after a restart of the trainer call rewind",
            )
        change = LedgerChange()
        for row in self.claim_of(step):
            self._move(change, row, (State.TRAINED,), detail=f"version {step + 1}")
        self._commit(change)
        self.newest_version = step + 1
        return True

    def durable(self, version: int, oldest: int | None = None) -> int:
        """A checkpoint covers version `version`. Returns how many groups became durable. Payloads of what was trained
        since version `oldest`, of the oldest checkpoint that training may fall back to, stay; and in any case since the
        checkpoint before this one: the newest may turn out to be damaged."""
        if version > self.newest_version:
            raise LedgerError(f"a checkpoint of version {version} is reported, but the newest is {self.newest_version}")
        if version <= self._durable:
            return 0
        floor = max(self._floor, self._durable if oldest is None else min(self._durable, oldest))
        change = LedgerChange(meta={"durable_version": str(version), "payload_floor": str(floor)})
        change.meta[LIVE + _CHECKED] = str(self._file.newest_transition())
        before = {row.group_id: row for row in self._file.rows("state = 'TRAINED' AND step < ?", version)}
        for row in before.values():
            self._move(change, row, (State.DURABLE,), detail=f"checkpoint {version}")
        covered = self._file.query(  # what lies before the floor was freed with an earlier checkpoint
            "SELECT group_id FROM groups WHERE state = 'DURABLE' AND step >= ? AND step < ?", self._floor, floor
        )
        change.freed.extend((group_id,) for (group_id,) in covered)
        num_durable = len(change.rows)
        self._commit(change, before=before)
        self._floor, self._durable = floor, version
        return num_durable

    def rewind(self, version: int) -> int:
        """Training continues from `version`: what was trained after it is READY again. Returns the number of groups.
        Claims of earlier steps count as trained (the checkpoint holds them), a claim of step `version` stays, later
        ones are dissolved. What was left over at an earlier end of the run comes back. Raises LedgerError if payloads
        of groups trained after `version` are gone, or if its claims do not lead to `version`: those weights hold groups
        that would be trained on again. A ledger of which nothing was ever claimed begins at any version."""
        if version > self.next_step and self._file.query(
            "SELECT 1 FROM transitions WHERE to_state = 'CLAIMED' LIMIT 1"
        ):
            raise LedgerError(
                f"cannot continue from version {version}: the steps claimed lead to version {self.next_step} at most",
                remedy="the checkpoint is of another past: begin from one of this ledger's, or with the copy in it",
            )
        if version < self._floor:
            raise LedgerError(
                f"cannot go back to version {version}: groups trained up to version {self._floor} are given away",
                remedy="end the run and `myxa resume` it, with the copy of the ledger in that checkpoint",
            )
        change = LedgerChange(meta={"base_version": str(version), "durable_version": str(min(self._durable, version))})
        back = f"rewind to {version}"
        before = {
            row.group_id: row
            for row in self._file.rows("state IN ('CLAIMED', 'TRAINED', 'DURABLE') OR reason = ?", LEFTOVER)
        }
        for row in before.values():
            self._rewind_row(change, row, version, back)
        num_ready = sum(row.state is State.READY for row in change.rows.values())
        for row in [*self.rows(*OPEN), *change.rows.values()]:
            if row.state in OPEN and row.version > version:  # stamps of versions that are undone
                change.rows[row.group_id] = replace(row, version=version)
        self._commit(change, before=before)
        self._base = self.newest_version = version
        self._durable = min(self._durable, version)
        self.next_step = version + 1 if self.claim_of(version) else version
        return num_ready

    def _rewind_row(self, change: LedgerChange, row: Row, version: int, back: str) -> None:
        if row.state is State.DROPPED:
            found = self._file.payload(row.group_id)
            to = State.READY if found is not None and found[0] else State.REQUEUED
            self._move(change, replace(row, reason="", rollout="", epoch=-1), (to,), detail=back, table=REWIND)
        elif row.state is State.CLAIMED and row.step < version:
            self._move(change, row, (State.TRAINED,), detail=f"known from the checkpoint of {version}", table=REWIND)
        elif row.step > version or (row.step == version and row.state is not State.CLAIMED):
            self._move(change, replace(row, step=-1), (State.READY,), detail=back, table=REWIND)

    def _get(self, group_id: int) -> Row:
        row = self.find(group_id)
        if row is None:
            raise LedgerError(f"group {group_id} was never drawn")
        return row

    def _move(
        self,
        change: LedgerChange,
        row: Row,
        path: tuple[State, ...],
        detail: str = "",
        table: Mapping[State, frozenset[State]] = TRANSITIONS,
    ) -> None:
        check_path(row, path, table)
        now = self._wall()
        at = row.state
        for to in path:
            change.transitions.append((row.group_id, at, to, row.attempt, now, detail))
            at = to
        change.rows[row.group_id] = replace(row, state=at)

    def _commit(
        self, change: LedgerChange, stretch: Stretch | None = None, before: Mapping[int, Row] = MappingProxyType({})
    ) -> None:
        """`before`: rows as the file has them, as far as they were looked up."""
        if not (change.rows or change.meta):
            return
        if stretch is not None:
            change.meta |= self.draws.mark(stretch)
        known = {group_id: before.get(group_id) or self.find(group_id) for group_id in change.rows}
        self._file.commit(change)
        if stretch is not None:
            self.draws.begin(stretch)
        for group_id, row in change.rows.items():
            self._mirror(known[group_id], row)

    def _mirror(self, before: Row | None, row: Row) -> None:
        self.tally.change(before, row)
        if before is not None and before.state not in _IN_FILE:
            self._rows[before.state].pop(row.group_id, None)
        if row.state not in _IN_FILE:
            self._rows[row.state][row.group_id] = row
        self.draws.note(before, row)


def _named(reason: str) -> str:
    return reason or "unnamed"
