"""The audit log `audit.jsonl`: a line for all that a person or a rule changed or tried to; journal of live knobs.

Append-only. Each line holds the digest of the line before it and its own, so that a changed, removed or exchanged line
shows; a tail that was cut off shows by the digests in the "knob" events of the run. Several processes may append: each
takes the file's lock, reads the last line, writes, and calls fsync. A line without its end was never acknowledged: the
next append removes it. Blocking; a loop calls it in a thread.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import msgspec

from ...core.errors import ConfigError, LedgerError
from ...core.files import lock_remedy, lock_within
from ...core.knobs import AuditRecord
from ...core.timeouts import TIMEOUTS

AUDIT_FILE = "audit.jsonl"
MAX_LINE_BYTES = 256 << 10
_DIGEST = re.compile(rb'"digest":"([0-9a-f]{64})"\}$')
_EMPTY_DIGEST = b'"digest":""}'


@dataclass(frozen=True, slots=True)
class AuditVerdict:
    """Whether the chain holds."""

    num_records: int
    """Good lines, from the first."""
    complaint: str = ""
    """What is wrong and in which line; empty: nothing."""
    bad_line: int = 0
    """From 1; 0: none."""
    is_torn: bool = False
    """The last line has no end: its writer died before it acknowledged the line."""
    digest: str = ""
    """Of the newest line."""


def append_audit(path: Path, record: AuditRecord) -> AuditRecord:
    """Write it durably; `number`, `previous` and `digest` are set here. Returns it as written. Raises ConfigError for a
    record that is too long, LedgerError when the file cannot be written or locked, or its last line is not one."""
    try:
        with _locked(path) as descriptor:
            return _append(descriptor, path, record)
    except OSError as error:
        remedy = lock_remedy(error, "check disk and rights; nothing was changed")
        raise LedgerError(f"{path}: {error.strerror or error}", remedy=remedy) from error


def _append(descriptor: int, path: Path, record: AuditRecord) -> AuditRecord:
    last, end = _last_line(descriptor, path)
    number, previous = 0, ""
    if last is not None:
        try:
            newest = msgspec.json.decode(last, type=AuditRecord)
        except msgspec.MsgspecError as error:
            text = f"{path}: the last line is no audit record"
            raise LedgerError(text, remedy="`myxa history --verify` says where it begins") from error
        number, previous = newest.number, newest.digest
    line, written = seal(msgspec.structs.replace(record, number=number + 1, previous=previous))
    if len(line) > MAX_LINE_BYTES:
        text = f"a record of {len(line)} bytes is too long for the audit log"
        raise ConfigError(text, remedy=f"at most {MAX_LINE_BYTES} bytes")
    os.ftruncate(descriptor, end)
    try:
        _write_all(descriptor, line + b"\n", end)
        os.fsync(descriptor)
    except OSError:
        os.ftruncate(descriptor, end)  # the caller learns that it is not recorded, so it must not be here
        raise
    return written


def seal(record: AuditRecord) -> tuple[bytes, AuditRecord]:
    """The record's line (without its end) and the record, both with the digest."""
    blank = msgspec.json.encode(msgspec.structs.replace(record, digest=""))
    digest = blake2b(blank, digest_size=32).hexdigest()
    line = blank.removesuffix(_EMPTY_DIGEST) + b'"digest":"' + digest.encode() + b'"}'
    return line, msgspec.structs.replace(record, digest=digest)


def read_audit(path: Path, limit: int = 0) -> tuple[AuditRecord, ...]:
    """The records, oldest first; with `limit` only the newest. Raises LedgerError naming a line that is not one; a last
    line without its end is left out. No file: nothing was recorded."""
    lines, _ = _lines(path)
    first = max(len(lines) - limit, 0) if limit > 0 else 0
    records: list[AuditRecord] = []
    for number, line in enumerate(lines[first:], start=first + 1):
        try:
            records.append(msgspec.json.decode(line, type=AuditRecord))
        except msgspec.MsgspecError as error:
            raise LedgerError(
                f"{path}, line {number}: {error}", remedy="`myxa history --verify` shows which records are sound"
            ) from error
    return tuple(records)


def verify_audit(path: Path) -> AuditVerdict:
    """Check the whole chain. Raises LedgerError only if it cannot be read."""
    lines, is_torn = _lines(path)
    digest = ""
    for number, line in enumerate(lines, start=1):
        complaint = _complaint(line, number, digest)
        if complaint:
            return AuditVerdict(number - 1, complaint, number, is_torn)
        digest = msgspec.json.decode(line, type=AuditRecord).digest
    return AuditVerdict(len(lines), is_torn=is_torn, digest=digest)


def _complaint(line: bytes, number: int, previous: str) -> str:
    match = _DIGEST.search(line)
    if match is None:
        return f"line {number} does not end in a digest"
    blank = line[: match.start()] + _EMPTY_DIGEST
    if blake2b(blank, digest_size=32).hexdigest() != match[1].decode():
        return f"line {number} was changed: its digest does not fit"
    try:
        record = msgspec.json.decode(line, type=AuditRecord)
    except msgspec.MsgspecError as error:
        return f"line {number} is no audit record: {error}"
    if record.number != number:
        return f"line {number} says that it is number {record.number}: lines are missing, added or exchanged before it"
    if record.previous != previous:
        return f"line {number} does not follow the line before it"
    return ""


def _lines(path: Path) -> tuple[list[bytes], bool]:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return [], False
    except OSError as error:
        raise LedgerError(f"{path}: {error.strerror or error}", remedy="check its rights") from error
    *lines, torn_line = data.split(b"\n")
    return lines, bool(torn_line)


@contextmanager
def _locked(path: Path) -> Generator[int]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not lock_within(descriptor, TIMEOUTS.coordinator.lock_s):
            raise LedgerError(
                f"{path}: another process has kept it locked for {TIMEOUTS.coordinator.lock_s:g} s",
                remedy="see which one holds it (`fuser` names it); it is stopped or stuck",
            )
        yield descriptor
    finally:
        os.close(descriptor)


def _last_line(descriptor: int, path: Path) -> tuple[bytes | None, int]:
    """The newest whole line, and where the next one begins."""
    size = os.fstat(descriptor).st_size
    start = max(0, size - 2 * MAX_LINE_BYTES - 2)
    tail = os.pread(descriptor, size - start, start)
    end = tail.rfind(b"\n")
    if end < 0:
        if start:
            raise LedgerError(f"{path} is no audit log: a line has no end", remedy="move it away")
        return None, 0
    begin = tail.rfind(b"\n", 0, end) + 1
    return tail[begin:end], start + end + 1


def _write_all(descriptor: int, data: bytes, position: int) -> None:
    while data:
        count = os.pwrite(descriptor, data, position)
        data, position = data[count:], position + count
