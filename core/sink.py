"""The seam between the monitor and whatever stores or shows telemetry.

A sink is plain blocking code: the monitor calls all of them from its own thread, so a slow disk never holds an
actor up. A sink that raises in `write` or `flush` is switched off with one event; the others keep working.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from .clock import Clock
from .messages import Telemetry


@dataclass(frozen=True, slots=True)
class SinkContext:
    """What a sink may use."""

    run_dir: Path
    """Exists; a sink keeps its files in here."""
    run_name: str
    clock: Clock
    emit: Callable[[str, str], None]
    """`emit(kind, text)`: send an event to all sinks, e.g. the address that was bound."""
    settings: Mapping[str, str | int | float | bool] = field(default_factory=dict[str, str | int | float | bool])
    """The run file by dotted keys, without what looks like a secret."""


@runtime_checkable
class Sink(Protocol):
    """A place where telemetry goes. All methods are called from one thread, `open` first and `close` last."""

    @property
    def name(self) -> str: ...

    def open(self, context: SinkContext) -> None:
        """Raise ConfigError or LaunchError to refuse the run's start; any other exception switches this sink off."""
        ...

    def write(self, bundle: Telemetry) -> None:
        """Take a bundle. May buffer until `flush`."""
        ...

    def flush(self) -> None:
        """Make everything visible to readers; called at least once a second while bundles arrive."""
        ...

    def close(self) -> None:
        """Flush and release everything. Called once, also after a failed `write`, never before `open`."""
        ...
