"""The ledger: the only truth about where every drawn prompt is, from draw to durable checkpoint.

Each verb is one transaction that moves groups along the transition table; one that breaks the table raises LedgerError
and changes nothing. Draw numbers, group ids, next step and newest version are derived from the rows. Unfinished groups
are mirrored in memory. `GroupTally` and `Draws` are counts, updated change by change.
"""

from __future__ import annotations

import sqlite3
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from ...core.errors import LedgerError, raised_as
from ...core.files import refusal
from ...core.samples import Group, Sample
from .file import (
    COLUMNS,
    FORMAT,
    LEFTOVER,
    LIVE,
    OPEN,
    PASSED_OVER,
    REWIND,
    SCHEMA,
    STALE,
    TRANSITIONS,
    LedgerReader,
    Row,
    State,
    Terms,
    check_path,
    decode_group,
    decode_partial,
    lock_ledger,
)

TRAINED_LENGTH = "trained"
UNWRITABLE = (
    "is the disk full, the file system read-only or a network's (set run.dir to a local one), or the file locked by "
    "another program (`fuser` names it)?"
)
LOCKED_S = 0.5
"""By another program, at most: meanwhile the buffer's loop stands."""
MAX_LOG_BYTES = 64 << 20
"""What a reader (a copy, `sqlite3`) has made SQLite's log grow to goes back to the disk down to this."""
_VALUES = attrgetter(*COLUMNS)
_HELD = (State.DISPATCHED, State.REQUEUED)


class GroupTally:
    """Counts of groups by state and reason, and their lengths."""

    def __init__(self, file: LedgerReader) -> None:
        """Count what the file holds. Raises LedgerError if it cannot be read."""
        self._counts: dict[tuple[State, str], list[int]] = defaultdict(lambda: [0, 0, 0])
        """Groups; those of known length; response tokens of these."""
        for state, reason, *counts in file.query(
            "SELECT state, reason, COUNT(*), SUM(num_tokens >= 0), SUM(MAX(num_tokens, 0)) FROM groups "
            "GROUP BY state, reason"
        ):
            self._counts[State(state), reason] = counts

    def change(self, before: Row | None, after: Row) -> None:
        for row, sign in ((before, -1), (after, 1)):
            if row is not None:
                counts = self._counts[row.state, row.reason]
                for index, count in enumerate((1, row.num_tokens >= 0, max(row.num_tokens, 0))):
                    counts[index] += sign * count

    @property
    def states(self) -> dict[str, int]:
        """State -> number of groups; states without groups are left out."""
        totals = Counter[str]()
        for (state, _), (num_groups, *_) in self._counts.items():
            totals[str(state)] += num_groups
        return {state: num_groups for state, num_groups in totals.items() if num_groups}

    @property
    def dropped(self) -> dict[str, int]:
        """Reason -> number of dropped groups."""
        return {reason: counts[0] for (_, reason), counts in self._counts.items() if reason and counts[0]}

    @property
    def mean_tokens(self) -> dict[str, float]:
        """Mean response tokens of a group: "trained", and per reason for dropping, as far as lengths are known."""
        lengths, tokens = Counter[str](), Counter[str]()
        for (state, reason), (_, num_measured, num_tokens) in self._counts.items():
            if state in _IN_FILE:
                lengths[reason or TRAINED_LENGTH] += num_measured
                tokens[reason or TRAINED_LENGTH] += num_tokens
        return {name: tokens[name] / count for name, count in lengths.items() if count}


_MARK = "mix"


@dataclass(frozen=True, slots=True)
class Stretch:
    """Draws whose sources were chosen by the same shares, as long as nothing changes them."""

    mix: str = ""
    """The shares of the sources, as text; empty: there was no choice yet."""
    since: int = 0
    """First draw."""


class Draws:
    """What was drawn so far, and what is to be drawn once more. `next_draw` is the cursor."""

    def __init__(self, file: LedgerReader) -> None:
        """Count what the file holds. Raises LedgerError if it cannot be read."""
        self.next_id, self.next_draw = file.query(
            "SELECT COALESCE(MAX(group_id), -1) + 1, COALESCE(MAX(draw), -1) + 1 FROM groups"
        )[0]
        since, _, mix = file.meta().get(_MARK, "0 ").partition(" ")
        self.stretch = Stretch(mix, int(since))
        counting = "SELECT source, COUNT(*) FROM groups WHERE redraw_of < 0"
        self.taken: Counter[str] = Counter(dict(file.query(f"{counting} GROUP BY source")))
        """Source -> draws from it: the number of the next."""
        condition = f"draw >= ? AND reason NOT IN ({_marks(PASSED_OVER)})"
        counts = file.query(f"{counting} AND {condition} GROUP BY source", self.stretch.since, *PASSED_OVER)
        self.in_stretch: Counter[str] = Counter(dict(counts))
        """The same since the stretch began, without those that were passed over."""
        stale = file.select(
            "state = 'DROPPED' AND reason = ? AND group_id NOT IN (SELECT redraw_of FROM groups)", STALE
        )
        self.redraws = {row.group_id: row.draw for row in stale}
        """Dropped group -> its draw, which is to be drawn once more."""

    def begin(self, stretch: Stretch) -> None:
        """The draws that are noted next belong to that stretch."""
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
        elif row.reason == STALE and not before.reason:
            self.redraws[row.group_id] = row.draw


def _marks(values: Iterable[object]) -> str:
    return ", ".join("?" for _ in values)


_PUT_ROWS = f"INSERT OR REPLACE INTO groups({', '.join(COLUMNS)}) VALUES ({_marks(COLUMNS)})"
_FINISH = (State.FINISHED, State.REWARDED, State.READY)
_REFUSE = (State.FINISHED, State.REWARDED, State.DROPPED)
_IN_FILE = (State.TRAINED, State.DURABLE, State.DROPPED)
"""States whose groups are not mirrored."""
_CHECKED = "checked"
"""Remembered: the transition up to which histories are not checked again when the next buffer opens the file, since an
opening did, or the newest checkpoint covers them. A copy for another run has no such mark."""


@dataclass(slots=True)
class LedgerChange:
    """What one transaction writes."""

    wall_s: float
    rows: dict[int, Row] = field(default_factory=dict[int, Row])
    transitions: list[tuple[Any, ...]] = field(default_factory=list[tuple[Any, ...]])
    payloads: list[tuple[int, bool, bytes]] = field(default_factory=list[tuple[int, bool, bytes]])
    freed: list[tuple[int]] = field(default_factory=list[tuple[int]])
    meta: dict[str, str] = field(default_factory=dict[str, str])

    def move(
        self, row: Row, *path: State, detail: str = "", table: Mapping[State, frozenset[State]] = TRANSITIONS
    ) -> None:
        """A group goes that way, as `row` says otherwise. Raises LedgerError for a way that is not in the table."""
        check_path(row, path, table)
        for state, target in pairwise((row.state, *path)):
            self.transitions.append((row.group_id, state, target, row.attempt, self.wall_s, detail))
        self.rows[row.group_id] = replace(row, state=path[-1]) if path else row


class Ledger(LedgerReader):
    """The open ledger of one run over one dataset, locked, for reading and writing."""

    def __init__(self, path: Path, *, run: str, fingerprint: str, wall: Callable[[], float]) -> None:
        """Open or create the file, check it (what an earlier opening did not) and requeue what was under way when the
        last buffer ended. `run`: name of the run; `fingerprint`: of the prompt source; `wall`: seconds since the epoch,
        for the record. Raises LedgerError if the file is in use, damaged, or of another format, run or dataset."""
        self.path = path
        self.is_broken = False
        """The file could not be written: what was promised holds, nothing more can be promised."""
        self._traces = ExitStack()
        self._traces.enter_context(lock_ledger(path))
        self._wall = wall
        try:
            self._db = sqlite3.connect(path, timeout=LOCKED_S, isolation_level=None)
            self._traces.callback(self._db.close)
            self._prepare({"format": FORMAT, "run": run, "dataset": fingerprint})
            self.check(int(self.recall(_CHECKED) or 0))
            self._load()
        except sqlite3.Error as error:
            self._traces.close()
            remedy = UNWRITABLE if refusal(error) is not None else "is it another file?"
            raise LedgerError(f"{path} cannot be used as a ledger: {error}", remedy=remedy) from error
        except BaseException:
            self._traces.close()
            raise

    def _prepare(self, identity: dict[str, str]) -> None:
        for pragma in ("journal_mode=WAL", "synchronous=NORMAL", f"journal_size_limit={MAX_LOG_BYTES}"):
            self._db.execute(f"PRAGMA {pragma}")
        if not self._db.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone():
            if self._db.execute("SELECT 1 FROM sqlite_master").fetchone():
                raise LedgerError(f"{self.path} is a database of something else", remedy="name another ledger file")
            names = identity | dict.fromkeys(("base_version", "durable_version", "payload_floor"), "0")
            self._db.executescript(f"BEGIN IMMEDIATE; {SCHEMA}")
            self._db.executemany("INSERT INTO meta VALUES (?, ?)", names.items())
            self._db.execute("COMMIT")
            return
        meta = self.meta()
        for key, value in identity.items():
            if meta.get(key) != value:
                raise LedgerError(
                    f"{self.path} belongs to another {key}: {meta.get(key)!r}, this run has {value!r}",
                    remedy="resume with the run's own files and the version of myxa that began it, or start a run with "
                    "an empty directory",
                )

    def _load(self) -> None:
        meta = self.meta()
        self._durable, self._floor = int(meta["durable_version"]), int(meta["payload_floor"])
        self._rows: dict[State, dict[int, Row]] = {state: {} for state in State if state not in _IN_FILE}
        self._held: defaultdict[str, dict[int, Row]] = defaultdict(dict)
        self.running: Counter[str] = Counter()
        """Rollout actor -> groups that are DISPATCHED to it."""
        for row in self.select(f"state NOT IN ({_marks(_IN_FILE)})", *_IN_FILE):
            self._mirror(None, row)
        self.draws = Draws(self)
        """What was drawn from which source. To be looked at only."""
        newest = self.query("SELECT COALESCE(MAX(step), -1) + 1 FROM groups WHERE state IN ('TRAINED', 'DURABLE')")
        self.newest_version = max(int(meta["base_version"]), newest[0][0])
        claimed = max((row.step + 1 for row in self.rows(State.CLAIMED)), default=0)
        self.next_step = max(self.newest_version, claimed)
        """The first without a claim."""
        self.tally = GroupTally(self)
        with raised_as(LedgerError, "the terms of groups in the ledger are damaged", msgspec.MsgspecError):
            texts = self.query("SELECT id, data FROM terms")
            self._terms = {number: msgspec.json.decode(text, type=Terms) for number, text in texts}
        with self._change() as change:
            change.meta[LIVE + _CHECKED] = str(self.newest_transition())
            for row in self.rows(State.DISPATCHED):
                change.move(row, State.REQUEUED, detail="the buffer was restarted")

    def redraw(self) -> tuple[int, int] | None:
        """(dropped group, its draw number) of the first prompt that is to be drawn once more."""
        return min(self.draws.redraws.items(), key=lambda item: item[1], default=None)

    def find(self, group_id: int) -> Row | None:
        """Where a group is; None if it was never drawn."""
        for rows in self._rows.values():
            if group_id in rows:
                return rows[group_id]
        if not 0 <= group_id < self.draws.next_id:
            return None
        return next(iter(self.select("group_id = ?", group_id)), None)

    def dropped_for(self, reasons: Sequence[str]) -> list[Row]:
        """All groups that were dropped for one of these reasons, oldest first."""
        return self.select(f"state = 'DROPPED' AND reason IN ({_marks(reasons)})", *reasons)

    def mean_rewards(self) -> Iterator[tuple[int, str, int, float]]:
        """(group, source, draw of that source, mean reward) of all groups that were finished, oldest first."""
        draw = "CASE WHEN source_draw < 0 THEN draw ELSE source_draw END"
        sql = f"SELECT group_id, source, {draw}, reward FROM groups WHERE reward IS NOT NULL ORDER BY group_id"
        return iter(self.query(sql))

    def rows(self, *states: State) -> list[Row]:
        """Groups in these states (not TRAINED, DURABLE or DROPPED), oldest first."""
        return sorted((row for state in states for row in self._rows[state].values()), key=attrgetter("group_id"))

    def held_by(self, rollout: str) -> list[Row]:
        """Groups that the actor runs, or may run still."""
        return list(self._held[rollout].values()) if rollout in self._held else []

    def claim_of(self, step: int) -> list[Row]:
        """Groups claimed for a step and not trained yet, in the order of their draws, also after a resumption."""
        return sorted((row for row in self.rows(State.CLAIMED) if row.step == step), key=lambda row: row.draw)

    def line(self) -> list[Row]:
        """What admission has to know after a restart: groups that are not dropped, from the oldest open one on."""
        opened = self.rows(*OPEN)
        return self.select("group_id >= ? AND state != ?", opened[0].group_id, State.DROPPED) if opened else []

    def payload(self, group_id: int) -> bytes | None:
        """Bytes of a whole group (READY and later), else of its unfinished samples; None if there are none."""
        payload = self.stored(group_id)
        return None if payload is None else payload[1]

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
        number = next((number for number, entry in reversed(self._terms.items()) if entry == terms), 0)
        if not number:
            data = msgspec.json.encode(terms).decode()
            with self._writing():
                self._db.execute("INSERT OR IGNORE INTO terms(data) VALUES (?)", (data,))
            number = int(self.query("SELECT id FROM terms WHERE data = ?", data)[0][0])
            self._terms[number] = terms
        return number

    def recall(self, key: str) -> str:
        """What was remembered under that key; empty if nothing was."""
        return self.meta().get(LIVE + key, "")

    def remember(self, key: str, value: str) -> None:
        """Keep a setting for the next process of this run (not for a run that continues this one)."""
        with self._change() as change:
            change.meta[LIVE + key] = value

    def dispatch(self, rows: Iterable[Row], stretch: Stretch | None = None) -> list[Row]:
        """Groups start: new draws (ids in sequence), and requeued ones. Attempts are counted here. The given rows say
        `rollout`, `epoch` and `version` (lower bound of the oldest token); a new one that has a reason is given up at
        once. `stretch`: that new draws belong to, if sources are chosen at all. Returns those that started."""
        with self._change() as change:
            next_id = self.draws.next_id
            for row in rows:
                if (before := self.find(row.group_id)) is not None:
                    row = replace(before, rollout=row.rollout, epoch=row.epoch, version=row.version)
                elif row.group_id != next_id:
                    raise LedgerError(f"group {row.group_id} is drawn, but the next id is {next_id}")
                else:
                    next_id += 1
                if row.reason and before is None:
                    change.move(row, State.DROPPED)
                else:
                    change.move(replace(row, attempt=row.attempt + 1), State.DISPATCHED, detail=row.rollout)
            if stretch is not None and stretch != self.draws.stretch:
                change.meta[_MARK] = f"{stretch.since} {stretch.mix}"
                self.draws.begin(stretch)
        return [row for row in change.rows.values() if row.state is State.DISPATCHED]

    def reattach(self, group_ids: Iterable[int]) -> None:
        """The buffer was restarted, and the actors still hold these groups: the attempts continue."""
        with self._change() as change:
            for group_id in group_ids:
                change.move(self._get(group_id), State.DISPATCHED, detail="still held")

    def finish(self, group_id: int, data: bytes, *, version: int, num_tokens: int, reward: float | None = None) -> None:
        """A whole group is kept. `version`: of its oldest token (-1: no engine); `reward`: mean over its members."""
        with self._change() as change:
            change.payloads.append((group_id, True, data))
            row = replace(self._get(group_id), version=version, num_tokens=num_tokens, reward=reward)
            change.move(row, *_FINISH)

    def refuse(self, group_id: int, reason: str, *, detail: str, num_tokens: int, reward: float | None = None) -> None:
        """A whole group arrived and is not kept: filtered, or its samples are wrong, and then it has no reward."""
        with self._change() as change:
            change.freed.append((group_id,))
            row = replace(self._get(group_id), reason=reason or "unnamed", num_tokens=num_tokens, reward=reward)
            change.move(row, *_REFUSE, detail=detail)

    def drop(self, reasons: Iterable[tuple[int, str]], detail: str = "") -> None:
        """Groups are given up unfinished or too old. Leftovers keep their payload: the run may be continued."""
        with self._change() as change:
            for group_id, reason in reasons:
                if reason != LEFTOVER:
                    change.freed.append((group_id,))
                row = replace(self._get(group_id), reason=reason or "unnamed")
                change.move(row, State.DROPPED, detail=detail)

    def note_length(self, group_id: int, num_tokens: int) -> None:
        """Length of a group that was dropped under way, learnt when it arrived too late; for the bias report."""
        row = self.find(group_id)
        if row is not None and row.state is State.DROPPED and row.num_tokens < 0:
            with self._change() as change:
                change.rows[group_id] = replace(row, num_tokens=num_tokens)

    def requeue(self, returned: Iterable[tuple[int, bytes | None, int]], detail: str) -> None:
        """Groups go back: (group, unfinished samples or None to keep the ones known, version of the oldest token)."""
        with self._change() as change:
            for group_id, partial, version in returned:
                if partial is not None:
                    change.payloads.append((group_id, False, partial))
                row = replace(self._get(group_id), rollout="", epoch=-1, version=version)
                path = () if row.state is State.REQUEUED else (State.REQUEUED,)  # after a restart only the owner goes
                change.move(row, *path, detail=detail)

    def save_partial(self, group_id: int, partial: bytes) -> None:
        """Unfinished samples of a running group, for the next attempt should its actor die."""
        with self._change() as change:
            change.payloads.append((group_id, False, partial))

    def claim(self, step: int, group_ids: Sequence[int]) -> None:
        if step != self.next_step:
            raise LedgerError(f"step {step} is claimed, but the next step is {self.next_step}")
        with self._change() as change:
            for group_id in group_ids:
                change.move(replace(self._get(group_id), step=step), State.CLAIMED, detail=f"step {step}")
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
        with self._change() as change:
            for row in self.claim_of(step):
                change.move(row, State.TRAINED, detail=f"version {step + 1}")
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
        trained = self.select("state = 'TRAINED' AND step < ?", version)
        covered = self.query(  # what lies before the floor was freed with an earlier checkpoint
            "SELECT group_id FROM groups WHERE state = 'DURABLE' AND step >= ? AND step < ?", self._floor, floor
        )
        with self._change(trained) as change:
            change.meta |= {"durable_version": str(version), "payload_floor": str(floor)}
            change.meta[LIVE + _CHECKED] = str(self.newest_transition())
            for row in trained:
                change.move(row, State.DURABLE, detail=f"checkpoint {version}")
            change.freed.extend(covered)
        self._floor, self._durable = floor, version
        return len(trained)

    def rewind(self, version: int) -> int:
        """Training continues from `version`: what was trained after it is READY again. Returns the number of groups.
        Claims of earlier steps count as trained (the checkpoint holds them), a claim of step `version` stays, later
        ones are dissolved. What was left over at an earlier end of the run comes back. Raises LedgerError if payloads
        of groups trained after `version` are gone, or if its claims do not lead to `version`: those weights hold groups
        that would be trained on again. A ledger of which nothing was ever claimed begins at any version."""
        if version > self.next_step and self.query("SELECT 1 FROM transitions WHERE to_state = 'CLAIMED' LIMIT 1"):
            raise LedgerError(
                f"cannot continue from version {version}: the steps claimed lead to version {self.next_step} at most",
                remedy="the checkpoint is of another past: begin from one of this ledger's, or with the copy in it",
            )
        if version < self._floor:
            raise LedgerError(
                f"cannot go back to version {version}: groups trained up to version {self._floor} are given away",
                remedy="end the run and `myxa resume` it, with the copy of the ledger in that checkpoint",
            )
        durable = min(self._durable, version)
        rows = self.select("state IN ('CLAIMED', 'TRAINED', 'DURABLE') OR reason = ?", LEFTOVER)
        with self._change(rows) as change:
            change.meta |= {"base_version": str(version), "durable_version": str(durable)}
            for row in rows:
                self._rewind_row(change, row, version)
            num_ready = sum(row.state is State.READY for row in change.rows.values())
            for row in [*self.rows(*OPEN), *change.rows.values()]:
                if row.state in OPEN and row.version > version:  # stamps of versions that are undone
                    change.rows[row.group_id] = replace(row, version=version)
        self.newest_version, self._durable = version, durable
        self.next_step = version + 1 if self.claim_of(version) else version
        return num_ready

    def _rewind_row(self, change: LedgerChange, row: Row, version: int) -> None:
        back = f"rewind to {version}"
        if row.state is State.DROPPED:
            payload = self.stored(row.group_id)
            to = State.READY if payload is not None and payload[0] else State.REQUEUED
            change.move(replace(row, reason="", rollout="", epoch=-1), to, detail=back, table=REWIND)
        elif row.state is State.CLAIMED and row.step < version:
            change.move(row, State.TRAINED, detail=f"known from the checkpoint of {version}", table=REWIND)
        elif row.step > version or (row.step == version and row.state is not State.CLAIMED):
            change.move(replace(row, step=-1), State.READY, detail=back, table=REWIND)

    def _get(self, group_id: int) -> Row:
        row = self.find(group_id)
        if row is None:
            raise LedgerError(f"group {group_id} was never drawn")
        return row

    @contextmanager
    def together(self) -> Generator[None]:
        """What is changed meanwhile, up to an error that is not the file's, becomes durable by one commit at the end.
        Where that cannot be written, nothing of it is: this ledger `is_broken`, and counts what the file has."""
        try:
            with self._writing():
                self._db.execute("BEGIN IMMEDIATE")
                try:
                    yield
                finally:
                    if not self.is_broken:
                        self._db.execute("COMMIT")
        except LedgerError:
            if self.is_broken:
                with suppress(LedgerError, sqlite3.Error):
                    self._db.rollback()
                    self.tally = GroupTally(self)
            raise

    @contextmanager
    def _change(self, known: Iterable[Row] = ()) -> Generator[LedgerChange]:
        """Written at the end, all of it or nothing. `known`: rows of groups that are not mirrored."""
        change = LedgerChange(self._wall())
        yield change
        if not (change.rows or change.payloads or change.meta):
            return
        before = {row.group_id: row for row in known}
        before = {group_id: before.get(group_id) or self.find(group_id) for group_id in change.rows}
        batches: tuple[tuple[str, Sequence[Any]], ...] = (
            (_PUT_ROWS, list(map(_VALUES, change.rows.values()))),
            ("INSERT INTO transitions VALUES (NULL, ?, ?, ?, ?, ?, ?)", change.transitions),
            ("INSERT OR REPLACE INTO payloads VALUES (?, ?, ?)", change.payloads),
            ("DELETE FROM payloads WHERE group_id = ?", change.freed),
            ("INSERT OR REPLACE INTO meta VALUES (?, ?)", list(change.meta.items())),
        )
        with nullcontext() if self._db.in_transaction else self.together(), self._writing():
            for sql, values in batches:
                if values:
                    self._db.executemany(sql, values)
        for group_id, row in change.rows.items():
            was = before[group_id]
            self.tally.change(was, row)
            self.draws.note(was, row)
            self._mirror(was, row)

    def _mirror(self, was: Row | None, row: Row) -> None:
        if was is not None and was.state in self._rows:
            self._rows[was.state].pop(was.group_id, None)
            self._held[was.rollout].pop(was.group_id, None)
            self.running[was.rollout] -= was.state is State.DISPATCHED
        if row.state in self._rows:
            self._rows[row.state][row.group_id] = row
        if row.state in _HELD:
            self._held[row.rollout][row.group_id] = row
            self.running[row.rollout] += row.state is State.DISPATCHED

    @contextmanager
    def _writing(self) -> Generator[None]:
        if self.is_broken:
            raise LedgerError(f"{self.path} could not be written before", remedy=UNWRITABLE)
        try:
            yield
        except sqlite3.Error as error:
            self.is_broken = True
            raise LedgerError(f"{self.path} cannot be written: {error}", remedy=UNWRITABLE) from error
