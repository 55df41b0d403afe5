"""Sizes and quantiles as the memory benchmark tells them; no torch, so that a parent starts at once."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Sequence

from figures import FAILED, Report

MIB, GIB = 1 << 20, 1 << 30


def size(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.4g} GiB" if num_bytes >= GIB // 4 else f"{num_bytes / MIB:.4g} MiB"


def quantile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least `share` of them do not exceed."""
    if not values:
        return None
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)]


def tell_when_ended(report: Report, told: Callable[[], object] | None = None) -> None:
    """Ended from outside, at its time limit say: what `told` tells is, and the goals that were judged by then."""

    def ended(number: int, _frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        report.say(f"\nended by signal {number} before it was through")
        if told is not None:
            try:
                told()
            except Exception as error:  # noqa: BLE001 -- whatever was half done: the goals are to be told all the same
                report.say(f"what there was by then cannot be told: {type(error).__name__}: {error}")
        report.tell_goals()
        os._exit(FAILED)

    signal.signal(signal.SIGTERM, ended)
