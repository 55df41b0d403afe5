"""`metrics.jsonl` and `events.jsonl` on a disk that is full for a while, and for too long; the kernel's refusals are made up
here, a real file system that is full is in tests/survival/test_full_disk.py."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.monitor.sink_world import Told, bundle, context

from myxa.actors.sinks.jsonl import JsonlSink, LineFile

NO_ROOM = OSError(errno.ENOSPC, "No space left on device")


def room_for(num_bytes: int, refusal: OSError) -> Callable[[int, bytes], int]:
    """os.write on a disk with so much room: the kernel writes less when there is less."""
    real, room = os.write, [num_bytes]

    def write(file: int, data: bytes) -> int:
        if not room[0]:
            raise refusal
        written = real(file, data[: room[0]])
        room[0] -= written
        return written

    return write


def test_lines_wait_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = JsonlSink()
    sink.open(context(tmp_path))
    monkeypatch.setattr(os, "write", room_for(30, NO_ROOM))
    for step in range(3):
        sink.write(bundle(step))
        with pytest.raises(OSError, match="No space left"):
            sink.flush()
    monkeypatch.undo()
    sink.write(bundle(3))
    sink.flush()
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [0, 1, 2, 3]
    assert len([json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]) == 4
    sink.close()


def test_what_is_no_refusal_of_the_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = LineFile(tmp_path / "lines", Told())
    monkeypatch.setattr(os, "write", room_for(0, OSError(errno.EBADF, "Bad file descriptor")))
    lines.add(b"a line\n")
    with pytest.raises(OSError, match="Bad file descriptor"):
        lines.flush()
    with pytest.raises(OSError, match="Bad file descriptor"):
        lines.close()


def test_lines_that_wait_for_too_long_are_lost_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told()
    lines = LineFile(tmp_path / "lines", told)
    quota = OSError(errno.EDQUOT, "Disk quota exceeded")
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", room_for(6, quota))
        for number in range(50):
            lines.add(b"line %03d%s\n" % (number, b"." * (1 << 20)))
            with pytest.raises(OSError, match="quota"):
                lines.flush()
    lines.flush()
    kept = [line[:8] for line in (tmp_path / "lines").read_text().splitlines()]
    assert 12 < len(kept) < 20
    assert kept[0] == "line 000", "it was half written"
    assert kept[1:] == [f"line {number:03d}" for number in range(50 - len(kept) + 1, 50)]
    assert told.events == [("telemetry-gap", f"lines lacks {50 - len(kept)} lines: its disk refused them")]
    monkeypatch.setattr(os, "write", room_for(0, quota))
    lines.add(b"the last\n")
    with pytest.raises(OSError, match="quota"):
        lines.close()
