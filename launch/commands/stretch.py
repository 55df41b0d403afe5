"""Stretches of time on the command line: 60s, 5min, 1h, or seconds. Pure."""

from __future__ import annotations

import argparse
import re

_STRETCH = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>s|sec|m|min|h)?")
_SECONDS = {None: 1.0, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def stretch_s(text: str) -> float:
    """Seconds. For argparse: raises ArgumentTypeError."""
    found = _STRETCH.fullmatch(text.strip())
    seconds = float(found["number"]) * _SECONDS[found["unit"]] if found is not None else 0.0
    if seconds <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no stretch of time; write 60s, 5min or 1h")
    return seconds
