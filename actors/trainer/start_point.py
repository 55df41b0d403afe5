"""Where a trainer rank begins. Plain values; whoever puts the rank together knows where checkpoints lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StartPoint:
    """The same for all ranks of an attempt."""

    checkpoint: str = ""
    """Folder to restore; empty: the model folder, which is version 0."""
    is_restart: bool = False
    """The gang was here before, in this run: what was trained after that version is undone."""
    passed_over: tuple[str, ...] = ()
    """Newer checkpoints that are not whole, each in words."""


FindStart = Callable[[], StartPoint]
"""Looks for it; may read every byte of a checkpoint. Raises TrainError when there is none where one must be."""


def anew() -> StartPoint:
    """From the model folder, for the first time."""
    return StartPoint()
