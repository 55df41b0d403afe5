"""Whole numbers of the command line that have a least value, such as 5 of `myxa step 5`."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def at_least(least: int) -> Callable[[str], int]:
    """For argparse: what reads such a number. Raises ArgumentTypeError."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} on")
        return value

    return read
