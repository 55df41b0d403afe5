"""A Grafana dashboard and a Prometheus scrape configuration for a run, as files. Pure.

A test asks a real run for every metric named here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ...actors.sinks.prometheus import LOOPBACK, prometheus_name

DATASOURCE = "${datasource}"
_WIDTH, _HEIGHT = 12, 8


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart."""

    title: str
    metrics: tuple[str, ...]
    unit: str = "short"
    is_rate: bool = False
    """Of cumulative seconds: shown as a share of the time, by actor."""
    is_stacked: bool = False


PANELS: tuple[Panel, ...] = (
    Panel("Training reward: all finished groups, and those of the batch", ("reward/raw_mean", "reward/mean")),
    Panel("Finished groups", ("reward/pass_rate", "reward/all_right", "reward/all_wrong"), "percentunit"),
    Panel("Loss and gradient", ("train/loss", "train/grad_norm")),
    Panel("Disagreement of trainer and engines (nats)", ("train/logprob_diff_abs_mean",)),
    Panel("Entropy and approximate KL", ("train/entropy", "train/approx_kl")),
    Panel("Staleness of what is trained (versions)", ("lag/max", "lag/mean")),
    Panel("Tokens per second", ("rollout/tokens_per_s", "train/tokens_per_s")),
    Panel("Requests in the engines", ("rollout/running", "rollout/waiting")),
    Panel("Groups in the buffer", ("buffer/ready", "buffer/under_way", "buffer/slots_used", "buffer/slots_total")),
    Panel("Seconds per step and per weight update", ("train/step_s", "weights/publish_s", "weights/adopt_s"), "s"),
    Panel("Working", ("time/compute",), "percentunit", is_rate=True),
    Panel("Waiting for data", ("time/wait-data",), "percentunit", is_rate=True),
    Panel("Waiting for weights", ("time/wait-weights",), "percentunit", is_rate=True),
    Panel("Waiting for room", ("time/wait-capacity",), "percentunit", is_rate=True),
    Panel("Waiting for the environment", ("time/wait-env",), "percentunit", is_rate=True),
)


def dashboard(title: str = "myxa") -> str:
    """JSON for Grafana's import; the data source is asked for there."""
    panels = [_panel(index, panel) for index, panel in enumerate(PANELS)]
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    actor = {
        "name": "source",
        "type": "query",
        "label": "Actor",
        "datasource": {"type": "prometheus", "uid": DATASOURCE},
        "query": f"label_values({prometheus_name('time/compute')}, source)",
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "refresh": 2,
    }
    page = {
        "title": title,
        "uid": "myxa-run",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "5s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [source, actor]},
        "annotations": {"list": [_knob_changes()]},
        "panels": panels,
    }
    return json.dumps(page, indent=2) + "\n"


def scrape_config(port: int, run_name: str) -> str:
    """YAML for Prometheus: `prometheus --config.file=...`."""
    return (
        "global:\n"
        "  scrape_interval: 5s\n"
        "scrape_configs:\n"
        "  - job_name: myxa\n"
        "    static_configs:\n"
        f"      - targets: [{json.dumps(f'{LOOPBACK}:{port}')}]\n"
        f"        labels: {{run: {json.dumps(run_name)}}}\n"
    )


def _panel(index: int, panel: Panel) -> dict[str, Any]:
    custom: dict[str, Any] = {"lineWidth": 1, "fillOpacity": 20 if panel.is_stacked else 0, "showPoints": "never"}
    place = {"h": _HEIGHT, "w": _WIDTH, "x": _WIDTH * (index % 2), "y": _HEIGHT * (index // 2)}
    return {
        "id": index + 1,
        "type": "timeseries",
        "title": panel.title,
        "datasource": {"type": "prometheus", "uid": DATASOURCE},
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": custom}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "expr": _expression(metric, panel),
                "legendFormat": "{{source}}"
                if panel.is_rate or len(panel.metrics) == 1
                else f"{metric} {{{{source}}}}",
            }
            for number, metric in enumerate(panel.metrics)
        ],
    }


def _expression(metric: str, panel: Panel) -> str:
    chosen = f'{prometheus_name(metric)}{{source=~"$source"}}'
    return f"rate({chosen}[1m])" if panel.is_rate else chosen


def _knob_changes() -> dict[str, Any]:
    return {
        "name": "knobs",
        "enable": True,
        "iconColor": "orange",
        "datasource": {"type": "prometheus", "uid": DATASOURCE},
        "expr": 'changes(myxa_events_total{kind="knob"}[10s]) > 0',
        "titleFormat": "a knob was changed",
    }
