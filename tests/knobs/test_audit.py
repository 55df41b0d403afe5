"""The audit log: a chain that shows every change to it but a clean cut at its end, by however many writers."""

from __future__ import annotations

import fcntl
import random
import subprocess
import sys
from pathlib import Path

import pytest
from tests.harness.waits import waits

from myxa.actors.coordinator import audit
from myxa.actors.coordinator.audit import append_audit, read_audit, verify_audit
from myxa.core.errors import ConfigError, LedgerError
from myxa.core.knobs import AuditRecord, KnobMove, Operator


def record(text: str = "", **arguments: object) -> AuditRecord:
    move = KnobMove(name="lr", owner="trainer/0", old=1e-3, new=1e-4, boundary="step")
    return AuditRecord(
        number=0, wall_s=1.5, verb="set", who=Operator(user="ann", uid=1000), arguments=arguments, result="done",
        reason=text, epoch=3, at=12, version=10, moves=(move,),
    )  # fmt: skip


def filled(path: Path, count: int = 6) -> list[bytes]:
    for index in range(count):
        append_audit(path, record(f"reason {index}", values={"lr": 1e-4}))
    return path.read_bytes().splitlines()


def test_records_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    assert read_audit(path) == ()
    assert verify_audit(path).complaint == ""
    first = append_audit(path, record("because", values={"lr": 1e-6, "name": "ü", "flag": True}))
    second = append_audit(path, record())
    assert (first.number, second.number, first.previous) == (1, 2, "")
    assert second.previous == first.digest
    assert read_audit(path) == (first, second)
    assert read_audit(path, 1) == (second,)
    verdict = verify_audit(path)
    assert (verdict.num_records, verdict.complaint, verdict.digest) == (2, "", second.digest)
    assert path.stat().st_mode & 0o077 == 0


def test_any_flipped_bit_shows_in_its_line(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    lines = filled(path, 4)
    data = path.read_bytes()
    chosen = random.Random(7)
    for _ in range(200):
        position, bit = chosen.randrange(len(data) - 1), 1 << chosen.randrange(8)
        broken = bytearray(data)
        broken[position] ^= bit
        path.write_bytes(broken)
        line = data[:position].count(b"\n") + 1
        verdict = verify_audit(path)
        assert verdict.complaint or verdict.is_torn, f"byte {position}, bit {bit}"
        assert verdict.bad_line in (line, line + 1) or verdict.is_torn
        assert verdict.num_records <= len(lines)


def test_removed_exchanged_and_foreign_lines_show(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    lines = filled(path)
    forged, _ = audit.seal(audit.msgspec.structs.replace(record("forged"), number=3, previous="0" * 64))
    cases = [([*lines[:gone], *lines[gone + 1 :]], gone + 1, "missing") for gone in range(5)]
    cases += [([lines[0], lines[2], lines[1], *lines[3:]], 2, ""), ([*lines[:2], forged, *lines[3:]], 3, "follow")]
    for kept, bad_line, word in cases:
        path.write_bytes(b"\n".join(kept) + b"\n")
        verdict = verify_audit(path)
        assert (verdict.bad_line, word in verdict.complaint) == (bad_line, True), verdict


def test_a_tail_cut_off_cleanly_shows_only_by_a_digest_that_was_noted(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    lines = filled(path)
    noted = verify_audit(path).digest
    path.write_bytes(b"\n".join(lines[:4]) + b"\n")
    assert verify_audit(path).complaint == "", "nothing in the file says that there was more"
    assert verify_audit(path).digest != noted


def test_a_line_without_its_end_is_told_and_the_next_append_removes_it(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    lines = filled(path, 3)
    path.write_bytes(b"\n".join(lines) + b"\n" + lines[2][:40])
    verdict = verify_audit(path)
    assert (verdict.is_torn, verdict.complaint, verdict.num_records) == (True, "", 3)
    assert len(read_audit(path)) == 3
    assert append_audit(path, record("after")).number == 4
    assert verify_audit(path).num_records == 4
    assert not verify_audit(path).is_torn


def test_what_is_no_audit_log_and_what_is_too_long_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    with pytest.raises(ConfigError):
        append_audit(path, record("x" * audit.MAX_LINE_BYTES))
    path.write_text("hello\n")
    for attempt in (lambda: append_audit(path, record()), lambda: read_audit(path)):
        with pytest.raises(LedgerError):
            attempt()
    assert path.read_text() == "hello\n"
    with pytest.raises(LedgerError):
        append_audit(tmp_path / "nowhere" / "audit.jsonl", record())


def test_a_writer_that_never_lets_go_is_an_error_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "TIMEOUTS", waits(coordinator={"lock_s": 0.1}))
    path = tmp_path / "audit.jsonl"
    filled(path, 1)
    with path.open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(LedgerError, match="another process has kept it locked"):
            append_audit(path, record())
    assert verify_audit(path).num_records == 1


WRITER = """
import sys
from pathlib import Path
from myxa.actors.coordinator.audit import append_audit
from myxa.core.knobs import AuditRecord, Operator
path, mark = Path(sys.argv[1]), sys.argv[2]
for index in range(25):
    append_audit(path, AuditRecord(number=0, wall_s=0.0, verb="set", who=Operator(), arguments={}, result="done",
                           reason=f"{mark} {index}"))
"""


def test_processes_that_write_at_once_make_one_chain(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    marks = ("one", "two", "three")
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), mark]) for mark in marks]
    assert [writer.wait(90) for writer in writers] == [0, 0, 0]
    verdict = verify_audit(path)
    assert (verdict.num_records, verdict.complaint) == (75, "")
    reasons = [r.reason for r in read_audit(path)]
    for mark in marks:
        assert [r for r in reasons if r.startswith(mark)] == [f"{mark} {n}" for n in range(25)]
