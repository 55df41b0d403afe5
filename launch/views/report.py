"""`myxa report RUN`: one self-contained HTML page about a run, made from the files in its directory.

Knows: the run's files and the template beside this module. Must not know: actors; it works long after they are gone.
The page asks nobody for anything: style, script and charts are inside it, and a content policy forbids the rest. It can
be read without JavaScript; the script only adds values under the pointer and a filter.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import os
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from ...core.activity import ACTIVITY_KINDS
from ...core.errors import ConfigError
from .advice import facts_of_file, num_cores, what_to_try
from .bottleneck import Filtered, engines_look_full, judge
from .changes import when_text
from .findings import findings
from .numbers import duration
from .report_charts import learning_charts, speed_charts, staleness_charts, step_marks, time_bars, timelines
from .report_facts import (
    SLOW_COLUMNS,
    config_text,
    event_counts,
    event_lines,
    outcome,
    run_name,
    settings,
    slow_steps,
    tiles,
)
from .run_files import RunFiles, load_run
from .sample_log import sample_page

REPORT_FILE = "report.html"

_FOLDER = Path(__file__).parent


def write_report(run_dir: Path, out: Path | None = None) -> Path:
    """Write the report of a run and return where it is (`<run_dir>/report.html` unless `out` says otherwise).

    Raises ConfigError when `run_dir` is not a run directory or `out` cannot be written. Damaged or missing files of the
    run are no error: the page says what is missing.
    """
    return write_page(load_run(Path(run_dir)), Path(out) if out is not None else Path(run_dir) / REPORT_FILE)


def write_page(run: RunFiles, path: Path) -> Path:
    """The same of what was read already. Raises ConfigError when `path` cannot be written."""
    page = render_report(run)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(page, encoding="utf-8", errors="replace")
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        why = error.strerror or str(error)
        raise ConfigError(f"the report cannot be written to {path}: {why}", remedy="name a file with --out") from error
    return path


@functools.cache
def page_template() -> Template:
    """Compiled once: that takes longer than to fill it in."""
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.jinja")


def render_report(run: RunFiles) -> str:
    """The page as text."""
    script = (_FOLDER / "report_script.jinja").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    span = run.wall_range_s
    gauges, shares = run.gauges(), run.shares()
    num_rollouts = sum(name.startswith("rollout/") for name in shares)
    verdict = judge(shares, engines_are_full=engines_look_full(gauges), filtered=Filtered.of(gauges))
    return page_template().render(
        name=run_name(run),
        style=Markup((_FOLDER / "report_style.jinja").read_text(encoding="utf-8")),
        script=Markup(script),
        script_hash=f"sha256-{digest}",
        outcome=outcome(run),
        tiles=tiles(run),
        settings=settings(run),
        verdict=verdict,
        to_try=what_to_try(verdict, facts_of_file(run.config, num_rollouts, num_cores())),
        findings=findings(run),
        learning=learning_charts(run),
        samples=sample_page(run.run_dir),
        staleness=staleness_charts(run),
        speed=speed_charts(run),
        time_bars=time_bars(run),
        kinds=ACTIVITY_KINDS,
        timelines=timelines(run),
        marks=step_marks(run),
        changes=[(when_text(change, span[0] if span else 0.0), change) for change in run.changes],
        slow_columns=SLOW_COLUMNS,
        slow_steps=slow_steps(run),
        events=event_lines(run),
        num_events=len(run.events),
        event_counts=list(event_counts(run)),
        config_text=config_text(run),
        notes=run.notes,
        length=duration(span[1] - span[0]) if span else "",
    )
