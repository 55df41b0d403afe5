"""The monitor with its sinks, from the run file and the environment, and the settings that sinks may publish.

Published settings are dotted keys and plain values; what looks like a secret is hidden.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from ...actors.monitor.monitor import Monitor
from ...actors.sinks.registry import choose_sinks
from ...core.actor import Actor
from ...core.clock import Clock
from ...core.config import RunConfig
from ..actor_spec import ActorSpec

Shown = str | int | float | bool
HIDDEN = "(hidden)"
_SECRET = re.compile(r"key|token|secret|passw|credential", re.IGNORECASE)
_SECRET_ADDRESS = re.compile(r"://.*[@?]")
"""One with a user, a password or a query."""
_FREE = re.compile(r".+[._]args|data\.chat_template_kwargs|sglang|megatron\.(model|ddp|optimizer)")
"""Tables whose keys are not ours: one that looks like a secret's is hidden."""
_LEFT_OUT = re.compile(r"roles\.[a-z]+\.env|monitor\.options")
"""Environments, and options of sinks."""


def shown_settings(config: RunConfig) -> dict[str, Shown]:
    """Key of the run file -> its value, defaults included; lists are written as text."""
    return dict(_flat("", config.model_dump(by_alias=True), is_free=False))


def _flat(place: str, table: Mapping[str, Any], *, is_free: bool) -> Iterator[tuple[str, Shown]]:
    for key, value in table.items():
        path = f"{place}.{key}" if place else key
        if _LEFT_OUT.fullmatch(path):
            continue
        if isinstance(value, Mapping):
            inner = cast("Mapping[str, Any]", value)
            yield from _flat(path, inner, is_free=is_free or bool(_FREE.fullmatch(path)))
        elif tables := _numbered(value):
            yield from _flat(path, tables, is_free=is_free)
        elif is_free and _SECRET.search(key):
            yield path, HIDDEN
        else:
            yield path, _plain(value)


def _numbered(value: object) -> dict[str, object]:
    """A list of tables, which have keys too; nothing of any other value."""
    items = cast("list[object]", value) if isinstance(value, list) else []
    has_tables = any(isinstance(one, Mapping) for one in items)
    return {str(number): one for number, one in enumerate(items)} if has_tables else {}


def _plain(value: object) -> Shown:
    if isinstance(value, (list, tuple)):
        return ", ".join(str(_plain(one)) for one in cast("tuple[object, ...]", value))
    if isinstance(value, (bool, int, float)):
        return value
    return HIDDEN if _SECRET_ADDRESS.search(text := str(value)) else text


METRICS_KEY_VARIABLE = "MYXA_METRICS_KEY"
"""Key that scrapers must send to the Prometheus page; empty or not set: any program of this machine may ask."""
MLFLOW_VARIABLE = "MLFLOW_ALLOW_FILE_STORE"
"""Newer versions of MLflow ask to be allowed their plain file store."""


def make_monitor(spec: ActorSpec, config: RunConfig, run_dir: Path, clock: Clock) -> Actor:
    """The monitor with every sink that is asked for. Raises ConfigError or UserCodeError for one that cannot be."""
    settings = config.monitor
    if "mlflow" in settings.sinks:
        os.environ.setdefault(MLFLOW_VARIABLE, "true")
    sinks = choose_sinks(settings, prometheus_key=os.environ.get(METRICS_KEY_VARIABLE, ""))
    written_s = _written_until(run_dir)
    return Monitor(
        run_dir,
        sinks,
        run_name=config.run.name,
        clock=clock,
        written_until_wall_s=written_s,
        settings=shown_settings(config),
    )


def _written_until(run_dir: Path) -> float:
    """When a monitor wrote into this run directory last, in seconds since 1970; 0: none did."""
    files = [path for name in ("metrics.jsonl", "events.jsonl") if (path := run_dir / name).exists()]
    return max((path.stat().st_mtime for path in files), default=0.0)
