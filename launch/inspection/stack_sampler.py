"""Where the threads of this process spend their time: their stacks, looked at a hundred times a second.

By `sys._current_frames` in a thread of its own. Libraries were considered: py-spy and austin look from outside and need
ptrace, which containers forbid; viztracer, yappi and cProfile trace every call of every thread and slow an event loop
down several times; pyinstrument samples the thread that starts it only. Nothing runs here until somebody asks.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

MAX_DEPTH = 200
MAX_STACKS = 50_000
"""Different stacks that are told apart; more of them are counted as "(others)"."""

Place = tuple[CodeType, int]
"""A function and the line it is at."""


@dataclass(frozen=True, slots=True)
class Samples:
    """What was seen."""

    counts: Counter[tuple[str, tuple[Place, ...]]]
    """(thread, stack from the outermost function to the innermost) -> how often."""
    num_looks: int
    duration_s: float

    def top(self, limit: int) -> tuple[str, ...]:
        """The innermost functions, those seen most first: "43.0 %  MainThread  file.py:12 name"."""
        leaves: Counter[str] = Counter()
        for (thread, stack), count in self.counts.items():
            leaves[f"{thread}  {_where(stack[-1]) if stack else '(others)'}"] += count
        looks = max(1, self.num_looks)
        return tuple(f"{100 * count / looks:5.1f} %  {name}" for name, count in leaves.most_common(limit))

    def write(self, path: Path, title: str) -> None:
        """As speedscope's file format (speedscope.app, also offline), one profile per thread, equal stacks joined."""
        frames: dict[str, int] = {}
        places: list[dict[str, object]] = []

        def number(place: Place) -> int:
            name = _where(place)
            if name not in frames:
                frames[name] = len(places)
                code, line = place
                places.append({"name": code.co_qualname, "file": code.co_filename, "line": line})
            return frames[name]

        weight_s = self.duration_s / max(1, self.num_looks)
        by_thread: dict[str, tuple[list[list[int]], list[float]]] = {}
        for (thread, stack), count in self.counts.items():
            samples, weights = by_thread.setdefault(thread, ([], []))
            samples.append([number(place) for place in stack])
            weights.append(count * weight_s)
        profiles = [
            {"type": "sampled", "name": thread, "unit": "seconds", "startValue": 0.0, "endValue": sum(weights),
             "samples": samples, "weights": weights}
            for thread, (samples, weights) in sorted(by_thread.items())
        ]  # fmt: skip
        schema = "https://www.speedscope.app/file-format-schema.json"
        whole = {"$schema": schema, "name": title, "shared": {"frames": places}, "profiles": profiles}
        path.write_text(json.dumps(whole), encoding="utf-8")


def sample_stacks(duration_s: float, interval_s: float) -> Samples:
    """Blocks the calling thread, which is left out, for `duration_s`."""
    counts: Counter[tuple[str, tuple[Place, ...]]] = Counter()
    own = threading.get_ident()
    begun = time.monotonic()
    num_looks = 0
    while (passed := time.monotonic() - begun) < duration_s:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage] - documented, and there is no other way
        for ident, frame in frames.items():
            if ident != own:
                key = (names.get(ident, f"thread {ident}"), _stack(frame))
                counts[key if key in counts or len(counts) < MAX_STACKS else (key[0], ())] += 1
        del frames
        num_looks += 1
        threading.Event().wait(min(interval_s, max(0.0, duration_s - passed)))
    return Samples(counts, num_looks, time.monotonic() - begun)


def _stack(frame: FrameType | None) -> tuple[Place, ...]:
    places: list[Place] = []
    while frame is not None and len(places) < MAX_DEPTH:
        places.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(reversed(places))


def _where(place: Place) -> str:
    code, line = place
    return f"{code.co_filename}:{line} {code.co_qualname}"
