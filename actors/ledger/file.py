"""The ledger's SQLite file: schema, lock, invariants, copies. Knows rows; knows no rules of the run.

WAL with synchronous=NORMAL survives the death of the process at any moment; a power cut may lose the newest
transactions, never the order of the older ones. The file must lie on a local disk (WAL needs shared memory). A copy is
written beside its place and renamed; SQLite's own backup reads as of one moment while the buffer writes.
"""

from __future__ import annotations

import contextlib
import enum
import shutil
import sqlite3
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, Literal, TypeVar, cast, get_args

import msgspec
import numpy as np
from msgspec.structs import replace

from ...core.errors import LedgerError, raised_as
from ...core.files import FileEntry, describe_file, is_locked, lock_remedy, take_lock
from ...core.messages import Record, SamplingParams
from ...core.samples import Group, Sample

T = TypeVar("T")


class Terms(Record, frozen=True):
    """What a group is dispatched under first: a sample that continues on another engine keeps its temperature."""

    knobs: int
    """Epoch of the live knobs."""
    sampling: SamplingParams


class State(enum.StrEnum):
    """Where a drawn prompt is. Every group is in exactly one of them."""

    DRAWN = "DRAWN"
    DISPATCHED = "DISPATCHED"
    REQUEUED = "REQUEUED"
    FINISHED = "FINISHED"
    REWARDED = "REWARDED"
    READY = "READY"
    CLAIMED = "CLAIMED"
    TRAINED = "TRAINED"
    DURABLE = "DURABLE"
    DROPPED = "DROPPED"


_S = State

TRANSITIONS: Mapping[State, frozenset[State]] = {
    # DROPPED: its prompt is passed over, so it is never dispatched.
    _S.DRAWN: frozenset({_S.DISPATCHED, _S.DROPPED}),
    _S.DISPATCHED: frozenset({_S.FINISHED, _S.REQUEUED, _S.DROPPED}),
    # FINISHED: the buffer was restarted meanwhile, and the first worker delivers before anybody else got the group.
    _S.REQUEUED: frozenset({_S.DISPATCHED, _S.FINISHED, _S.DROPPED}),
    _S.FINISHED: frozenset({_S.REWARDED}),
    _S.REWARDED: frozenset({_S.READY, _S.DROPPED}),
    _S.READY: frozenset({_S.CLAIMED, _S.DROPPED}),
    _S.CLAIMED: frozenset({_S.TRAINED}),
    _S.TRAINED: frozenset({_S.DURABLE}),
    _S.DURABLE: frozenset(),
    _S.DROPPED: frozenset(),
}
"""Forward: what the verbs of a running run do."""

REWIND: Mapping[State, frozenset[State]] = {
    _S.CLAIMED: frozenset({_S.TRAINED, _S.READY}),
    _S.TRAINED: frozenset({_S.READY}),
    # The newest checkpoint turned out to be damaged and the trainer went back to the one before.
    _S.DURABLE: frozenset({_S.READY}),
    # Only what was left over at the end of a run that is now continued.
    _S.DROPPED: frozenset({_S.READY, _S.REQUEUED}),
}
"""Backward: what a rewind to a checkpoint does, and nothing else may do."""

AT_REST = frozenset(State) - {State.DRAWN, State.FINISHED, State.REWARDED}
"""States in which a group may be found between two transactions."""

OPEN = (State.DISPATCHED, State.REQUEUED, State.READY)
"""Drawn and neither given up nor claimed."""

LEFTOVER = "leftover"
"""Not enough groups were left for a whole batch when the run ended."""

STALE = "stale"
"""The reason for which the prompt is drawn once more: nothing was wrong with it, only its tokens grew old."""


QUARANTINED, OUT_OF_WINDOW = "quarantined", "out-of-window"
PASSED_OVER = (QUARANTINED, OUT_OF_WINDOW)
"""Reasons of groups that were drawn and given up at once, for what their prompts did before."""


class Row(msgspec.Struct, frozen=True):
    """One group in the ledger. -1 means "none" in numbers."""

    group_id: int
    draw: int
    """Number of the draw, over all sources; differs from `group_id` once a prompt had to be drawn again."""
    redraw_of: int
    """The dropped group whose prompt this one repeats."""
    num_samples: int
    state: State = State.DRAWN
    attempt: int = 0
    """Counts dispatches; fences puts."""
    rollout: str = ""
    """Who has or had it; empty once that incarnation is known to be gone."""
    epoch: int = -1
    version: int = -1
    """Of the oldest token; while it is under way, what the engine served when it started there."""
    step: int = -1
    """Claimed for, or trained in, this step (which made version `step + 1`)."""
    reason: str = ""
    num_tokens: int = -1
    """Response tokens of all members, once known."""
    terms: int = 0
    """Under which terms it was dispatched first, as the ledger numbers them; 0: it never was."""
    source: str = ""
    """Name of the source that was drawn from; empty: there is only one."""
    source_draw: int = -1
    """Number of the draw among those from that source; -1: the only source, so it is `draw`."""
    reward: float | None = None
    """Mean over its members, once it was finished; also of a group that was filtered then."""

    @property
    def draw_of_source(self) -> int:
        return self.draw if self.source_draw < 0 else self.source_draw


def check_path(row: Row, path: tuple[State, ...], table: Mapping[State, frozenset[State]] = TRANSITIONS) -> None:
    """Raise LedgerError naming group, from and to unless every hop of the path is in the table."""
    for state, target in pairwise((row.state, *path)):
        allowed = table.get(state, frozenset())
        if target not in allowed:
            raise LedgerError(
                f"group {row.group_id} (attempt {row.attempt}) cannot go from {state} to {target}",
                remedy=f"from {state} it may go to {', '.join(sorted(allowed)) or 'nowhere'}",
            )


def _array_out(value: Any) -> bytes | list[Any]:
    """Its bytes; of a matrix, how many columns it has, and they."""
    if isinstance(value, np.ndarray):
        array = cast("np.ndarray[Any, Any]", value)
        return array.tobytes() if array.ndim == 1 else [array.shape[1], array.tobytes()]
    raise NotImplementedError(f"{type(value).__name__} cannot be stored in the ledger")


def _array_in(kind: Any, value: bytes | list[Any]) -> np.ndarray[Any, Any]:
    columns, data = value if isinstance(value, list) else (0, value)
    array = np.frombuffer(bytearray(data), dtype=_dtype_of(kind))
    return array.reshape(-1, columns) if columns else array


@cache
def _dtype_of(kind: Any) -> Any:
    return get_args(get_args(kind)[1])[0]


_encoder = msgspec.msgpack.Encoder(enc_hook=_array_out)
_groups = msgspec.msgpack.Decoder(Group, dec_hook=_array_in)
_partials = msgspec.msgpack.Decoder(tuple[Sample, ...], dec_hook=_array_in)


def encode(value: Group | tuple[Sample, ...]) -> bytes:
    """Bytes of a group or of unfinished samples. Raises ValueError if the prompt's metadata cannot be written."""
    try:
        return _encoder.encode(value)
    except (NotImplementedError, OverflowError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"cannot be stored: {error}") from error


def decode_group(group_id: int, data: bytes) -> Group:
    """A group back from its bytes. Raises LedgerError naming the group when they are damaged."""
    return _decode(_groups, data, f"payload of group {group_id}")


def decode_partial(group_id: int, data: bytes) -> tuple[Sample, ...]:
    """Unfinished samples back from their bytes. Raises LedgerError naming the group when they are damaged."""
    return _decode(_partials, data, f"unfinished samples of group {group_id}")


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes, title: str) -> T:
    with raised_as(LedgerError, f"{title} is damaged", msgspec.MsgspecError, ValueError):
        return decoder.decode(data)


LEDGER = "ledger.sqlite"
"""Its name, in a run directory and in a checkpoint."""
FORMAT = "2"

LIVE = "live/"
"""Prefix of the keys of settings that were changed during the run."""

COLUMNS = Row.__struct_fields__
_KINDS = {"group_id": "INTEGER PRIMARY KEY", "reward": ""}
SCHEMA = f"""
CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE groups(
  {", ".join(f"{name} {_KINDS.get(name, 'NOT NULL')}" for name in COLUMNS)});
CREATE INDEX groups_by_state ON groups(state, step);
CREATE TABLE payloads(group_id INTEGER PRIMARY KEY, is_whole INTEGER NOT NULL, data BLOB NOT NULL);
CREATE TABLE transitions(
  seq INTEGER PRIMARY KEY, group_id INTEGER NOT NULL, from_state TEXT NOT NULL, to_state TEXT NOT NULL,
  attempt INTEGER NOT NULL, wall_s REAL NOT NULL, detail TEXT NOT NULL);
CREATE INDEX transitions_by_group ON transitions(group_id, seq);
CREATE TABLE terms(id INTEGER PRIMARY KEY, data TEXT NOT NULL UNIQUE);
"""
_MOVED = "(:since = 0 OR group_id IN (SELECT group_id FROM transitions WHERE seq > :since))"


def _rows_where(condition: str) -> str:
    return f"SELECT group_id, state FROM groups WHERE {condition} LIMIT 1"


_INVARIANTS: dict[str, str] = {
    "is at rest in a passing state": _rows_where(f"state NOT IN ({', '.join(repr(str(s)) for s in sorted(AT_REST))})"),
    "has no whole payload": _rows_where(
        "state IN ('READY', 'CLAIMED', 'TRAINED') AND group_id NOT IN (SELECT group_id FROM payloads WHERE is_whole)"
    ),
    "has a step although it was not claimed": _rows_where(
        "step >= 0 AND state NOT IN ('CLAIMED', 'TRAINED', 'DURABLE')"
    ),
    "has no step although it was claimed": _rows_where("step < 0 AND state IN ('CLAIMED', 'TRAINED', 'DURABLE')"),
    "is dropped without a reason, or has one and is not dropped": _rows_where("(state = 'DROPPED') != (reason != '')"),
    "was never dispatched": _rows_where(f"attempt < 1 AND reason NOT IN ({', '.join(repr(r) for r in PASSED_OVER)})"),
    "is durable without a checkpoint that covers it": _rows_where(
        "state = 'DURABLE' AND step >= (SELECT CAST(value AS INTEGER) FROM meta WHERE key = 'durable_version')"
    ),
    "repeats a draw that was not dropped": _rows_where(
        "redraw_of >= 0 AND (redraw_of, draw, source, source_draw) NOT IN "
        "(SELECT group_id, draw, source, source_draw FROM groups WHERE state = 'DROPPED')"
    ),
    "was dispatched under unknown terms": _rows_where("terms != 0 AND terms NOT IN (SELECT id FROM terms)"),
    "is in another state than its last transition says": _rows_where(
        "state IS NOT (SELECT to_state FROM transitions WHERE group_id = groups.group_id ORDER BY seq DESC LIMIT 1) "
        f"AND {_MOVED}"
    ),
    "has a gap in its transitions": (
        "SELECT group_id, from_state FROM (SELECT group_id, from_state, LAG(to_state, 1, 'DRAWN') OVER "
        f"(PARTITION BY group_id ORDER BY seq) AS before FROM transitions WHERE {_MOVED}) "
        "WHERE from_state != before LIMIT 1"
    ),
    "repeats the same dropped group as another": (
        "SELECT redraw_of, 'redrawn' FROM groups WHERE redraw_of >= 0 GROUP BY redraw_of HAVING COUNT(*) > 1"
    ),
    "is not numbered among its source's draws without a gap": (
        "SELECT MAX(group_id), source FROM groups WHERE source != '' GROUP BY source "
        "HAVING SUM(redraw_of < 0) != MAX(source_draw) + 1 OR COUNT(DISTINCT source_draw) != MAX(source_draw) + 1"
    ),
}
"""What is wrong -> a group, and its state, of which it is so. `:since`: the newest transition checked before."""


class LedgerReader:
    """A ledger without a writer, read without a lock. All failures of SQLite become LedgerError with the path."""

    def __init__(self, path: Path) -> None:
        """Raises LedgerError if it cannot be opened, or is no ledger."""
        self.path = path
        self._traces = ExitStack()
        try:
            self._db = sqlite3.connect(_reading(path, self._traces), timeout=10.0, uri=True)
        except (sqlite3.Error, OSError) as error:
            self._traces.close()
            raise LedgerError(f"{path} cannot be used as a ledger: {error}", remedy="is it another file?") from error

    def close(self) -> None:
        self._db.close()
        self._traces.close()

    def query(self, sql: str, *args: Any, **named: Any) -> list[tuple[Any, ...]]:
        remedy = "copy a ledger that is in use by `myxa dump`, or with the file beside it (-wal), which is newer"
        with raised_as(LedgerError, f"{self.path} cannot be read", sqlite3.Error, remedy=remedy):
            return self._db.execute(sql, named or args).fetchall()

    def meta(self) -> dict[str, str]:
        return dict(self.query("SELECT key, value FROM meta"))

    def select(self, condition: str, *args: Any) -> list[Row]:
        """Rows of groups, oldest first."""
        sql = f"SELECT {', '.join(COLUMNS)} FROM groups WHERE {condition} ORDER BY group_id"
        return [row_of(values) for values in self.query(sql, *args)]

    def newest_transition(self) -> int:
        """Number of the newest transition; 0: there is none."""
        return int(self.query("SELECT COALESCE(MAX(seq), 0) FROM transitions")[0][0])

    def stored(self, group_id: int) -> tuple[bool, bytes] | None:
        """(is it a whole group, bytes), or None."""
        rows = self.query("SELECT is_whole, data FROM payloads WHERE group_id = ?", group_id)
        return next(((bool(is_whole), data) for is_whole, data in rows), None)

    def check(self, since: int = 0) -> None:
        """Raise LedgerError naming the first broken invariant and a group that breaks it. `since`: the histories of
        groups that have not moved after that transition were checked before. All rows are looked at in any case."""
        for text, sql in _INVARIANTS.items():
            for group_id, state in self.query(sql, since=since):
                raise LedgerError(f"{self.path} is damaged: group {group_id} ({state}) {text}")
        for source, target in self.query("SELECT DISTINCT from_state, to_state FROM transitions WHERE seq > ?", since):
            if not any(target in table.get(State(source), ()) for table in (TRANSITIONS, REWIND)):
                raise LedgerError(f"{self.path} is damaged: it records a transition from {source} to {target}")
        first, distinct, highest = self.query(
            "SELECT SUM(redraw_of < 0), COUNT(DISTINCT draw), COALESCE(MAX(draw), -1) FROM groups"
        )[0]
        if not (first or 0) == distinct == highest + 1:
            raise LedgerError(
                f"{self.path} is damaged: draws up to {highest}, of which {distinct} are known and {first} drawn once"
            )


def _reading(path: Path, traces: ExitStack) -> str:
    """How SQLite opens the file to read. One that was closed well has nothing beside it and gets nothing. What a killed
    writer left beside it is read too, under another name of the same files, or as copies where nothing can be written:
    SQLite would write an index of it."""
    beside = path.with_name(path.name + "-wal")
    if not beside.exists() or not beside.stat().st_size:
        return f"{path.resolve().as_uri()}?mode=ro&immutable=1"
    try:
        scratch = TemporaryDirectory(prefix=".looked-at-", dir=path.parent)
    except OSError:  # another user's run, or a file system to read only
        scratch = TemporaryDirectory(prefix="myxa-looked-at-")
    folder = Path(traces.enter_context(scratch))
    for file in (path, beside):
        try:
            (folder / file.name).hardlink_to(file.resolve())
        except OSError:  # a file system without links, or another one
            shutil.copyfile(file, folder / file.name)
    return f"{(folder / path.name).as_uri()}?mode=ro"


def lock_ledger(path: Path) -> IO[str]:
    """Hold `<path>.lock` until this process ends: there is one writer, and a killed one leaves no lock behind."""
    try:
        handle = take_lock(_lock_of(path))
    except OSError as error:
        remedy = lock_remedy(error, "does the run directory exist?")
        raise LedgerError(f"{path} cannot be opened: {error}", remedy=remedy) from error
    if handle is None:
        raise LedgerError(f"{path} is in use by another process", remedy="end the other buffer first")
    return handle


def is_in_use(path: Path) -> bool:
    """Whether the ledger is locked now; leaves nothing behind."""
    return is_locked(_lock_of(path))


def _lock_of(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def row_of(values: Sequence[Any]) -> Row:
    """From its `COLUMNS`."""
    row = Row(*values)
    return replace(row, state=State(row.state))


WHOLE = "FROM groups g JOIN payloads p ON p.group_id = g.group_id AND p.is_whole ORDER BY g.step < 0, g.step, g.draw"
"""Finished groups whose payload is kept: in the order of their steps and draws, those without a step last."""


def dump_groups(path: Path, target: Path) -> int:
    """Copy the ledger, which may be in use; how many finished groups with tokens it holds. Raises LedgerError."""
    if not path.is_file():
        raise LedgerError(f"there is no ledger at {path}", remedy="name a run whose buffer has begun, by --run")
    with raised_as(LedgerError, f"{target} cannot be written", OSError, remedy="name another file"):
        target.touch(0o600, exist_ok=False)
    try:
        copy_ledger(path, target)
        target.chmod(0o600)
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    with contextlib.closing(LedgerReader(target)) as file:
        return len(file.query(f"SELECT g.group_id {WHOLE}"))


_one_at_a_time = threading.Lock()
"""A caller that timed out asks again while the copy is being made: two copies into one draft would destroy it, and
the first to begin must not be the last to replace the target."""


def copy_ledger(path: Path, target: Path) -> FileEntry:
    """Copy the ledger, which may be in use, to `target`, durably; any thread, one after another. A target belongs to
    one process, which replaces what a crash left of a draft. Raises LedgerError naming both files."""
    draft = target.with_name(f"{target.name}.part")
    with _one_at_a_time:
        try:
            draft.unlink(missing_ok=True)
            with (
                contextlib.closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as source,
                contextlib.closing(sqlite3.connect(draft, isolation_level=None)) as copy,
            ):
                source.backup(copy)
                copy.execute("PRAGMA journal_mode=DELETE")  # else the copy would be two files when opened
            entry = describe_file(draft)
            draft.replace(target)
        except (sqlite3.Error, OSError) as error:
            draft.unlink(missing_ok=True)
            raise LedgerError(
                f"{path} cannot be copied to {target}: {error}", remedy="is the disk full or the file system read-only?"
            ) from error
    return replace(entry, name=target.name)


@dataclass(frozen=True, slots=True)
class LedgerFacts:
    """How far an unused ledger goes."""

    run: str
    floor: int
    """The oldest version that it can go back to."""
    claimed: int
    """Versions that its claims lead to: a trainer cannot honestly be further."""

    def why_not(self, version: int) -> str:
        """Why training cannot continue from `version` with this ledger; empty if it can."""
        if version < self.floor:
            return f"it can go back to version {self.floor} at most: what was trained before is given away"
        if version > self.claimed:
            return f"it ends at version {self.claimed}: its newest part was lost"
        return ""


def read_facts(path: Path) -> LedgerFacts:
    """Read through the whole ledger, without its lock; it has no writer. Raises LedgerError if missing or damaged."""
    if not path.is_file():
        raise LedgerError(f"there is no ledger at {path}", remedy="without it a resumed run would repeat prompts")
    try:
        with contextlib.closing(LedgerReader(path)) as file:
            answer = file.query("PRAGMA quick_check(1)")
            if answer != [("ok",)]:
                raise LedgerError(f"{path} is damaged: {answer[0][0] if answer else 'nothing can be read'}")
            meta = file.meta()
            if meta["format"] != FORMAT:
                raise LedgerError(f"{path} has format {meta['format']}, this program reads {FORMAT}")
            file.check()
            claimed = int(file.query("SELECT COALESCE(MAX(step), -1) + 1 FROM groups WHERE step >= 0")[0][0])
            return LedgerFacts(
                run=meta["run"], floor=int(meta["payload_floor"]), claimed=max(int(meta["base_version"]), claimed)
            )
    except (KeyError, ValueError) as error:
        raise LedgerError(f"{path} is damaged: {error!r}") from error


def recorded(path: Path, name: Literal["payload_floor", "dataset"]) -> str:
    """Of an unused one: the oldest version that it can go back to, or the prompts' fingerprint. Raises LedgerError."""
    with raised_as(LedgerError, f"{path} is damaged", KeyError), contextlib.closing(LedgerReader(path)) as file:
        return file.meta()[name]


def continue_ledger(earlier: Path, path: Path, run: str) -> bool:
    """Copy `earlier` as the ledger of `run`; False: `path` is there. Raises LedgerError for one that is not fit."""
    if path.exists():
        return False
    if not earlier.is_file():
        raise LedgerError(f"there is no ledger at {earlier}", remedy="without it a resumed run would repeat prompts")
    with lock_ledger(earlier):
        adopt_copy(earlier, path, run)
    return True


def adopt_copy(earlier: Path, path: Path, run: str) -> None:
    """Copy a ledger without a writer for `run`, over an older file. Raises LedgerError."""
    draft = path.with_name(path.name + ".part")
    copy_ledger(earlier, draft)
    begin_life(draft, run)
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    draft.rename(path)


def begin_life(path: Path, run: str) -> None:
    """The ledger is `run`'s now and forgets set knobs, which come with a checkpoint. Raises LedgerError."""
    naming = raised_as(LedgerError, f"{path} cannot be used as a ledger", sqlite3.Error, remedy="is it another file?")
    with naming, contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE meta SET value = ? WHERE key = 'run'", (run,))
        db.execute("DELETE FROM meta WHERE key LIKE ?", (f"{LIVE}%",))
