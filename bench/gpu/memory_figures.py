"""Sizes and quantiles as the memory benchmark tells them; no torch, so that a parent starts at once."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Sequence

from figures import FAILED, Report

MIB, GIB = 1 << 20, 1 << 30


def size(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.4g} GiB" if num_bytes >= GIB // 4 else f"{num_bytes / MIB:.4g} MiB"


def quantile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least `share` of them do not exceed."""
    if not values:
        return None
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)]


def tell_when_ended(report: Report) -> None:
    """Ended from outside, at its time limit say: the goals that were judged by then are told."""

    def told(number: int, _frame: object) -> None:
        report.say(f"\nended by signal {number} before it was through")
        report.tell_goals()
        os._exit(FAILED)

    signal.signal(signal.SIGTERM, told)
