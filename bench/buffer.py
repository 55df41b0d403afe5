"""What the buffer's store costs beside its file: groups from draw to trained, against bare SQLite.

    python bench/buffer.py [--groups 6400] [--growth 100000] [--rounds 5]

"ours" is what the buffer does for its callers, without the messages: groups are drawn eight at a time, put sixteen at
a time (checked, filtered, encoded), claimed and trained a step at a time, with a checkpoint every tenth step.
"bare" writes the same bytes: the statements and values that ours gave to SQLite, in the same transactions, in a file
with the same schema and settings, and nothing else. Both take turns; a ratio compares two turns that follow each other.
`--growth`: groups after which the file of one ledger is measured; 0: not at all.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from myxa.actors.buffer.filters import load_group_filters
from myxa.actors.buffer.finished_groups import FinishedGroups
from myxa.actors.buffer.groups import Groups
from myxa.actors.buffer.knobs import BufferKnobs, BufferLimits, BufferValues
from myxa.actors.ledger.file import SCHEMA
from myxa.actors.ledger.ledger import Ledger
from myxa.algos.staleness import Admission
from myxa.core.messages import Assignment, DrawRequest, SamplingParams
from myxa.core.samples import Group, Message, Prompt, Sample

BATCH = 32
NUM_SAMPLES = 8
PROMPT_TOKENS, RESPONSE_TOKENS = 64, 256
DRAW_AT_ONCE, PUT_AT_ONCE = 8, 16
CHECKPOINT_STEPS = 10
ROLLOUT = "rollout/0"


@dataclass
class Rows:
    """Numbered rows without end."""

    fingerprint: str = "numbers"

    @property
    def by_name(self) -> dict[str, Rows]:
        return {"": self}

    @property
    def weights(self) -> dict[str, float]:
        return {}

    def __len__(self) -> int:
        return 1 << 20

    def row_of(self, draw: int) -> int:
        return draw % len(self)

    def prompt(self, draw: int) -> Prompt:
        said = (Message(role="user", content=f"What is {draw} + {draw}?"),)
        return Prompt(group_id=draw, row=self.row_of(draw), pass_index=draw // len(self), messages=said)

    def num_held_out(self, name: str = "") -> int:
        return 0

    def eval_prompts(self, limit: int, name: str = "") -> tuple[Prompt, ...]:
        return ()


class Store:
    """A buffer's groups in a file of their own."""

    def __init__(self, path: Path) -> None:
        sampling, limits, filters = SamplingParams(), BufferLimits(), load_group_filters("zero_variance")
        admission = Admission("pace", max_staleness=1, batch_size=BATCH)
        first = BufferValues.first(admission, sampling, NUM_SAMPLES, filters.chosen, {}, limits.difficulty)
        self.ledger = Ledger(path, run="bench", fingerprint=Rows().fingerprint, wall=time.time)
        knobs = BufferKnobs(
            "buffer", self.ledger, admission, first, sampling, filters=tuple(filters.by_name), limits=limits
        )
        self.groups = Groups(
            Rows(),
            knobs,
            filters,
            limits,
            finished=FinishedGroups(),
            tell=lambda kind, text: None,
            log=logging.getLogger("bench"),
            started_s=-1e6,
        )

    def train(self, num_groups: int, step: int = 0) -> float:
        """From draw to trained; `step` is the first. Seconds, without those that the groups are made in."""
        took_s = 0.0
        for at in range(step, step + num_groups // BATCH):
            began_s = time.perf_counter()
            assignments: list[Assignment] = []
            for _ in range(BATCH // DRAW_AT_ONCE):
                request = DrawRequest(rollout=ROLLOUT, epoch=1, version=at, max_groups=DRAW_AT_ONCE, wait_s=0.0)
                assignments += self.groups.draw(request, time.monotonic())[0]
            took_s += time.perf_counter() - began_s
            made = [group_of(one, at) for one in assignments]
            began_s = time.perf_counter()
            for first in range(0, BATCH, PUT_AT_ONCE):
                with self.ledger.together():
                    for group in made[first : first + PUT_AT_ONCE]:
                        result, _ = self.groups.put(group, 1, ROLLOUT)
                        assert result.outcome == "ready", result
            assert len(self.groups.claim(at)) == BATCH
            assert self.groups.trained(at)
            if (at + 1) % CHECKPOINT_STEPS == 0:
                self.ledger.durable(at + 1)
            took_s += time.perf_counter() - began_s
        return took_s


_random = np.random.default_rng(0)
_TOKENS = _random.integers(0, 150_000, RESPONSE_TOKENS, dtype=np.int32)
_LOGPROBS = -_random.random(RESPONSE_TOKENS, dtype=np.float32)


def group_of(assignment: Assignment, version: int) -> Group:
    """What an engine would have made; some rewards differ."""
    prompt = assignment.prompt
    samples = tuple(
        Sample(
            group_id=prompt.group_id, index=index, prompt_ids=_TOKENS[:PROMPT_TOKENS], response_ids=_TOKENS,
            logprobs=_LOGPROBS, loss_mask=np.ones(RESPONSE_TOKENS, np.uint8),
            versions=np.full(RESPONSE_TOKENS, version, np.int32), finish="stop", text="It is that.",
        )
        for index in range(assignment.num_samples)
    )  # fmt: skip
    rewards = (np.arange(len(samples)) % 2).astype(np.float32)
    return Group(prompt=prompt, samples=samples, rewards=rewards, knobs=assignment.knobs)


Written = list[tuple[str, Any]]
"""Statements with their values, as one connection was given them."""


class Recorder:
    """A connection that also notes what is written."""

    def __init__(self, db: sqlite3.Connection, written: Written) -> None:
        self._db, self._written = db, written

    def execute(self, sql: str, values: Any = ()) -> sqlite3.Cursor:
        if not sql.startswith(("SELECT", "PRAGMA")):
            self._written.append((sql, values))
        return self._db.execute(sql, values)

    def executemany(self, sql: str, values: Any) -> sqlite3.Cursor:
        self._written.append((sql, list(values)))
        return self._db.executemany(sql, values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)


def recorded(path: Path, num_groups: int) -> Written:
    """What ours gives to SQLite."""
    store, written = Store(path), list[tuple[str, Any]]()
    store.ledger._db = Recorder(store.ledger._db, written)  # type: ignore[assignment]
    store.train(num_groups)
    store.ledger.close()
    return written


def bare(path: Path, written: Written) -> float:
    """Seconds for writing the same."""
    db = sqlite3.connect(path, isolation_level=None)
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL"):
        db.execute(f"PRAGMA {pragma}")
    db.executescript(SCHEMA)
    began = time.perf_counter()
    for sql, values in written:
        (db.executemany if isinstance(values, list) else db.execute)(sql, values)
    took = time.perf_counter() - began
    db.close()
    return took


def ours(path: Path, num_groups: int) -> float:
    """Seconds for the same groups."""
    store = Store(path)
    took = store.train(num_groups)
    store.ledger.close()
    return took


def grow(path: Path, num_groups: int) -> None:
    """Print the size of one ledger as it grows, in ten parts."""
    store, before = Store(path), 0
    part = max(1, num_groups // BATCH // 10)
    print("\ngroups | groups/s | file MB | bytes a group since the row above")
    for number in range(10):
        took = store.train(part * BATCH, step=number * part)
        store.ledger.query("PRAGMA wal_checkpoint(TRUNCATE)")
        size = path.stat().st_size
        done = (number + 1) * part * BATCH
        print(f"{done:,} | {part * BATCH / took:,.0f} | {size / 1e6:.1f} | {(size - before) / (part * BATCH):,.0f}")
        before = size
    store.ledger.close()


def each(rounds: int, folder: Path, *runs: Callable[[Path], float]) -> list[tuple[float, ...]]:
    """Seconds of every run, by round; each gets a file of its own."""
    found: list[tuple[float, ...]] = []
    for number in range(rounds):
        took: list[float] = []
        for index, run in enumerate(runs):
            path = folder / f"{number}-{index}.sqlite"
            took.append(run(path))
            path.unlink()
        found.append(tuple(took))
    return found


def main() -> None:
    """Print the machine, the rates, the ratio and the growth."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=6400)
    parser.add_argument("--growth", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where the files are written")
    args = parser.parse_args()
    if args.groups < BATCH:
        sys.exit(f"--groups must be at least {BATCH}, a batch")
    with tempfile.TemporaryDirectory(prefix="buffer-", dir=args.folder) as name:
        folder = Path(name)
        num_groups = args.groups // BATCH * BATCH
        written = recorded(folder / "recorded.sqlite", num_groups)
        size = sum(len(row[2]) for sql, rows in written if "INTO payloads" in sql for row in rows)
        print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; Python {platform.python_version()}, "
              f"SQLite {sqlite3.sqlite_version}; {num_groups:,} groups of {NUM_SAMPLES} samples of {RESPONSE_TOKENS} "
              f"tokens, {size / num_groups:,.0f} bytes each; {args.rounds} rounds, medians (range)")  # fmt: skip
        took = each(args.rounds, folder, lambda path: ours(path, num_groups), lambda path: bare(path, written))
        for label, index in (("ours", 0), ("bare", 1)):
            rates = sorted(num_groups / one[index] for one in took)
            print(f"{label}: {statistics.median(rates):,.0f} groups/s ({rates[0]:,.0f}-{rates[-1]:,.0f})")
        ratios = sorted(theirs / mine for mine, theirs in took)
        print(f"ours / bare: {statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f}); goal 0.5")
        written.clear()
        if args.growth:
            grow(folder / "growth.sqlite", args.growth)


if __name__ == "__main__":
    main()
