"""A descriptor that becomes readable at a given time. Linux; Python has it from 3.13 on, before that by `ctypes`."""

from __future__ import annotations

import ctypes
import math
import os
import time

from ...core.errors import LaunchError

_NONBLOCK_CLOEXEC = os.O_NONBLOCK | os.O_CLOEXEC
_SOONEST_S = 1e-9
"""Zero would disarm it."""


class _TimeSpec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class _TimerSpec(ctypes.Structure):
    _fields_ = [("interval", _TimeSpec), ("value", _TimeSpec)]


class TimerFd:
    """Readable from the moment it was armed for, until it is armed anew."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor: int = self._libc.timerfd_create(time.CLOCK_MONOTONIC, _NONBLOCK_CLOEXEC)
        if self._descriptor < 0:
            why = os.strerror(ctypes.get_errno())
            raise LaunchError(f"the kernel gives no timer descriptor: {why}", remedy="call poll() without fileno()")

    def fileno(self) -> int:
        return self._descriptor

    def arm(self, delay_s: float) -> None:
        """From now on readable in `delay_s` seconds (0: at once; inf: never)."""
        value = _TimeSpec(0, 0)
        if math.isfinite(delay_s):
            seconds, rest = divmod(max(delay_s, _SOONEST_S), 1.0)
            value = _TimeSpec(int(seconds), max(1, int(rest * 1e9)))
        spec = _TimerSpec(_TimeSpec(0, 0), value)
        self._libc.timerfd_settime(self._descriptor, 0, ctypes.byref(spec), None)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
