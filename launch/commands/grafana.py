"""`myxa grafana`: a dashboard for Grafana and a scrape configuration for Prometheus, made for a run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError
from .output import Verbs, add_run_flags, show
from .which_run import note_of

DASHBOARD = "dashboard.json"
SCRAPE = "prometheus.yml"


def add(verbs: Verbs) -> None:
    """The command and its flags."""
    parser = verbs.add_parser("grafana", help="a Grafana dashboard and a Prometheus configuration for a run")
    parser.add_argument("-o", type=Path, default=Path("grafana"), metavar="DIR", dest="to",
                        help="folder to write them to (%(default)s)")  # fmt: skip
    add_run_flags(parser)
    parser.set_defaults(run=_grafana)


def _grafana(options: argparse.Namespace) -> int:
    from ...actors.sinks.prometheus import PORT_FILE
    from ..views.grafana import dashboard, scrape_config

    run_dir = Path(note_of(options).run_dir)
    try:
        port = int((run_dir / PORT_FILE).read_text())
    except (OSError, ValueError):
        raise ConfigError(
            f"{run_dir.name} serves no metrics for Prometheus", remedy="set monitor.prometheus_port to 0 or a port"
        ) from None
    folder: Path = options.to
    folder.mkdir(parents=True, exist_ok=True)
    (folder / DASHBOARD).write_text(dashboard(f"myxa: {run_dir.name}"))
    (folder / SCRAPE).write_text(scrape_config(port, run_dir.name))
    show(options, {"dashboard": str(folder / DASHBOARD), "prometheus": str(folder / SCRAPE), "port": port}, _words)
    return 0


def _words(told: dict[str, Any]) -> str:
    return (
        f"prometheus --config.file={told['prometheus']}\n"
        f"Grafana: Dashboards, New, Import, {told['dashboard']}; its data source is that Prometheus"
    )
