"""What a part of the GPU benchmark found: markdown tables for people, JSON for later, an exit status for the script.

0: ran, all goals met   1: failed   3: something is missing here, nothing was measured   4: ran, a goal was missed
Figures go to `gpu.md` and, by part, to `gpu.json` in `$OUT`, or in `./bench-out` if that is not set.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

OK, FAILED, MISSING, MISSED = 0, 1, 3, 4
TELLING_S = 15.0


def out_folder() -> Path:
    folder = Path(os.environ.get("OUT") or "bench-out").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def work_folder() -> Path:
    """For models, data, run directories and logs; the script packs the logs of it."""
    folder = Path(os.environ.get("GPU_WORK") or out_folder() / "work").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextlib.contextmanager
def repeating(look: Callable[[], object], every_s: float) -> Generator[None]:
    """While it is open `look` is called in a thread, with so many seconds between."""
    is_over = threading.Event()

    def repeat() -> None:
        while not is_over.wait(every_s):
            look()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(30.0)


def used_mib() -> float:
    """Of the GPU that has most in use, all processes together; 0 without one."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    query = [
        "nvidia-smi",
        *(("-i", visible) if visible else ()),
        "--query-gpu=memory.used",
        "--format=csv,noheader,nounits",
    ]
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        return max(map(float, subprocess.run(query, capture_output=True, text=True, timeout=10).stdout.split()))
    return 0.0


@contextlib.contextmanager
def peak_memory() -> Generator[list[float]]:
    """MiB of the GPU in use, looked up while it is open."""
    seen = [0.0]
    with repeating(lambda: seen.append(used_mib()), 0.5):
        yield seen


def part_seconds(otherwise: float) -> float:
    """How long this part may take, as the script says (`PART_SECONDS`), less what telling its end takes."""
    told = os.environ.get("PART_SECONDS")
    return max(float(told) - TELLING_S, 5.0) if told else otherwise


def parser(doc: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run with tiny shapes")
    return made


def some_of(known: Iterable[str]) -> Callable[[str], str]:
    """For an option that names parts, divided by commas: an unknown one is refused, or it would pass unmeasured."""
    names = tuple(known)

    def check(text: str) -> str:
        unknown = [word for word in text.split(",") if word not in names]
        if unknown:
            raise argparse.ArgumentTypeError(f"there is no {', '.join(unknown)}; there are {', '.join(names)}")
        return text

    return check


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        if len(row) != len(head):
            raise ValueError(f"a row of {len(row)} cells under {len(head)} heads: {row}")
        lines.append("| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in row) + " |")
    return "\n".join(lines)


def number(value: float | None, digits: int = 3) -> str:
    """`12,345`, `1.23`, `0.0456`, `1.2e-05`; "-" for what was not measured."""
    if value is None or not math.isfinite(value):
        return "-"
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    if size == 0 or size >= 1e-4:
        decimals = max(0, digits - 1 - math.floor(math.log10(size))) if size else 0
        return f"{value:.{decimals}f}"
    return f"{value:.{digits - 2}e}"


def percent(share: float | None) -> str:
    return "-" if share is None or not math.isfinite(share) else f"{share:.1%}"


def _missed_by(value: float, limit: float) -> str:
    """As a share of the limit, if it is one that has shares."""
    return f"missed by {abs(value / limit - 1):.0%}" if limit else f"missed by {number(abs(value))}"


def median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


class Report:
    """One part's findings, told as they come."""

    def __init__(self, part: str, *, is_dry: bool = False) -> None:
        self._part = part
        self._out = out_folder()
        self._found: dict[str, Any] = {"is_dry": is_dry}
        self._goals: list[tuple[str, str, str, str]] = []
        self._is_dry = is_dry
        self._num_missed = 0
        self.say(f"\n## {part}{' (dry run, figures mean nothing)' if is_dry else ''}\n")

    def say(self, text: str) -> None:
        print(text, flush=True)
        with (self._out / "gpu.md").open("a", encoding="utf-8") as file:
            file.write(text + "\n")

    def table(self, title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self.say(f"{title}\n\n{markdown(head, rows)}\n")

    def keep(self, name: str, value: Any) -> None:
        """Into the JSON, at once: a part that is stopped later keeps what it had."""
        self._found[name] = value
        self._write()

    def goal(self, text: str, value: float | None, *, at_most: float | None = None, at_least: float | None = None):
        """Judge a figure; one that was not measured counts as missed."""
        limit = at_most if at_most is not None else at_least
        assert limit is not None
        is_met = value is not None and (value <= limit if at_most is not None else value >= limit)
        self._num_missed += not is_met
        sign = "<=" if at_most is not None else ">="
        verdict = "met" if is_met else "not measured" if value is None else _missed_by(value, limit)
        self._goals.append((text, f"{sign} {number(limit)}", number(value), verdict))
        self.keep("goals", [list(goal) for goal in self._goals])

    def tell_goals(self) -> None:
        """As far as they were judged."""
        if self._goals:
            self.table("Goals", ("goal", "limit", "found", ""), self._goals)

    def end(self) -> NoReturn:
        """Tell the goals and leave with the status."""
        self.tell_goals()
        status = MISSED if self._num_missed and not self._is_dry else OK
        self.keep("status", status)
        sys.exit(status)

    def missing(self, why: str) -> NoReturn:
        """Nothing can be measured here."""
        self.say(f"NOT RUN: {why}")
        self.keep("missing", why)
        sys.exit(MISSING)

    def failed(self, why: str) -> NoReturn:
        self.say(f"FAILED: {why}")
        self.keep("failed", why)
        sys.exit(FAILED)

    def _write(self) -> None:
        path = self._out / "gpu.json"
        try:
            whole = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            whole = {}
        whole[self._part] = self._found
        draft = path.with_suffix(".partial")
        draft.write_text(json.dumps(whole, indent=1, default=str) + "\n", encoding="utf-8")
        draft.replace(path)
