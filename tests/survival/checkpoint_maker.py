"""Run directories with checkpoints and ledgers as runs write them, without a trainer: small files, real formats."""

from __future__ import annotations

import copy
import os
import shutil
import sqlite3
import time
from pathlib import Path
from typing import Any

from myxa.actors.checkpoints.folder import Manifest, RunPart, begin, commit, rank_file, write_run_part, writer_of
from myxa.actors.ledger.file import LEDGER, Row, copy_ledger
from myxa.actors.ledger.ledger import Ledger
from myxa.core.files import describe_file

BATCH = 2
DATASET = "eight prompts"


def make_checkpoint(folder: Path, version: int, *, extra: dict[str, Any] | None = None, fill: bytes = b"") -> Path:
    """The trainer's part, as two ranks write it."""
    told = {"version": version} if extra is None else extra
    partial = begin(folder, writer_of(told))
    for rank in range(2):
        (partial / rank_file(rank)).write_bytes(fill + bytes([version, rank]) * 500)
    files = tuple(describe_file(partial / rank_file(rank)) for rank in range(2))
    commit(folder, Manifest(format=1, model={}, world_size=2, num_updates=version, files=files, extra=told))
    return folder


def add_run_part(folder: Path, ledger: Path, version: int, *, is_kept: bool = False, run: str = "small") -> None:
    draft = folder.with_name(f".partial-{folder.name}-{LEDGER}")
    entry = copy_ledger(ledger, draft)
    named = type(entry)(name=LEDGER, num_bytes=entry.num_bytes, sha256=entry.sha256)
    part = RunPart(run=run, version=version, ledger=named, is_kept=is_kept)
    write_run_part(folder, part, draft)


class RunOnDisk:
    """A run that trained some steps, one checkpoint each `every`, and then ended or died."""

    def __init__(self, folder: Path, *, steps: int, every: int = 1, name: str = "small") -> None:
        self.path = folder / name
        self.path.mkdir(parents=True)
        (self.path / "config.toml").write_text("")
        ledger = self.open()
        for step in range(steps):
            ids = [self.draw(ledger) for _ in range(BATCH)]
            for group in ids:
                ledger.finish(group, b"whole", version=step, num_tokens=3)
            ledger.claim(step, ids)
            ledger.trained(step)
            if (step + 1) % every == 0:
                make_checkpoint(self.place(step + 1), step + 1)
                add_run_part(self.place(step + 1), self.ledger, step + 1)
                ledger.durable(step + 1)
        self.half_done = self.draw(ledger)
        ledger.requeue([(self.half_done, b"some tokens", steps)], "its engine died")
        ledger.close()

    def copied(self, folder: Path) -> RunOnDisk:
        made = copy.copy(self)
        made.path = folder / self.path.name
        shutil.copytree(self.path, made.path, symlinks=True)
        return made

    def open(self) -> Ledger:
        return Ledger(self.ledger, run=self.path.name, fingerprint=DATASET, wall=time.time)

    def draw(self, ledger: Ledger) -> int:
        number = ledger.draws.next_id
        row = Row(number, ledger.draws.next_draw, -1, 1, rollout="rollout/0", epoch=1, version=0)
        ledger.dispatch([row])
        return number

    def place(self, version: int) -> Path:
        return self.path / "checkpoints" / f"version_{version:08d}"

    @property
    def ledger(self) -> Path:
        return self.path / LEDGER


# -- what may become of a file


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    """Some bytes in its middle; nothing but a digest tells."""
    data = bytearray(path.read_bytes())
    for place in range(len(data) // 2, min(len(data) // 2 + 200, len(data))):
        data[place] ^= 0xFF
    path.write_bytes(data)


def remove(path: Path) -> None:
    path.unlink()


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"more")


def garble(path: Path) -> None:
    path.write_bytes(b"}{ not what was here \xff\xfe" * 9)


def states(path: Path) -> dict[str, int]:
    db = sqlite3.connect(path)
    try:
        return dict(db.execute("SELECT state, COUNT(*) FROM groups GROUP BY state"))
    finally:
        db.close()
