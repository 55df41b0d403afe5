"""What the composition root needs for the monitor: its sinks, from the run file and from the environment."""

from __future__ import annotations

import os
from pathlib import Path

from ...actors.monitor.monitor import Monitor
from ...actors.sinks.registry import choose_sinks
from ...core.actor import Actor
from ...core.clock import Clock
from ...core.config import RunConfig
from ..actor_spec import ActorSpec
from .shown_settings import shown_settings

OTLP_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
"""OpenTelemetry's own name for the collector's address; empty or not set: nothing is exported."""
METRICS_KEY_VARIABLE = "MYXA_METRICS_KEY"
"""Key that scrapers must send to the Prometheus page; empty or not set: any program of this machine may ask."""
MLFLOW_VARIABLE = "MLFLOW_ALLOW_FILE_STORE"
"""Newer versions of MLflow ask to be allowed their plain file store."""


def make_monitor(spec: ActorSpec, config: RunConfig, run_dir: Path, clock: Clock) -> Actor:
    """The monitor with every sink that is asked for. Raises ConfigError or UserCodeError for one that cannot be."""
    settings = config.monitor
    if "mlflow" in settings.sinks:
        os.environ.setdefault(MLFLOW_VARIABLE, "true")
    sinks = choose_sinks(
        tensorboard=settings.tensorboard,
        prometheus_port=settings.prometheus_port,
        prometheus_key=os.environ.get(METRICS_KEY_VARIABLE, ""),
        trace=settings.trace,
        extra=settings.sinks,
        options=settings.options,
        samples_bytes=settings.samples_mb << 20 if settings.samples_per_step else 0,
        otlp_endpoint=os.environ.get(OTLP_VARIABLE, ""),
    )
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
