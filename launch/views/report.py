"""`myxa report RUN`: one self-contained HTML page about a run, made from the files in its directory.

It is the dashboard's page with the data of one run in it (or of several: `myxa compare --html`): style, scripts and
charts are in the file, and a content policy forbids everything else.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import os
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import orjson

from ...core.errors import ConfigError
from .page_data import past_table, state_table
from .run_files import RunFiles, load_run, sample_page
from .run_view import run_view_of_files

REPORT_FILE = "report.html"
STYLES = ("uPlot.min.css", "style.css")
SCRIPTS = ("uPlot.iife.min.js", "charts.js", "samples.js", "app.js")
"""In the order in which the page loads them."""
MAX_SAMPLE_BYTES = 1 << 20
_WEB = f"{__package__ or 'myxa.launch.views'}".rpartition(".")[0] + ".web"


def write_report(run_dir: Path, out: Path | None = None) -> Path:
    """Returns where it is (`<run_dir>/report.html`, or `out`). Raises ConfigError when `run_dir` is no run directory or
    `out` cannot be written. Damaged or missing files of the run are no error."""
    return write_page([load_run(Path(run_dir))], Path(out) if out is not None else Path(run_dir) / REPORT_FILE)


def write_page(runs: Sequence[RunFiles], path: Path) -> Path:
    """The same of what was read; of several runs a comparison. Raises ConfigError where it cannot be written."""
    page = render_report(runs)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(page, encoding="utf-8", errors="replace")
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        why = error.strerror or str(error)
        raise ConfigError(f"the report cannot be written to {path}: {why}", remedy="name a file with --out") from error
    return path


def render_report(runs: Sequence[RunFiles]) -> str:
    first = runs[0]
    data: dict[str, Any] = {
        "state": state_table(run_view_of_files(first), first),
        "history": past_table(first),
        "others": [past_table(run) for run in runs[1:]],
        "samples": sample_page(first.run_dir, MAX_SAMPLE_BYTES) if len(runs) == 1 else [],
    }
    # In JSON every "<" is inside of a string: written like this no text can end the element or begin a script.
    text = orjson.dumps(data, default=str).decode("utf-8", "replace").replace("<", "\\u003c")
    before, after = _frame()
    return f"{before}{text}{after}"


@functools.cache
def _frame() -> tuple[str, str]:
    """The page before and after its data."""
    licence = f"/*\n{page_file('uPlot.LICENSE').decode()}*/\n"
    scripts = [f"{licence * (name == SCRIPTS[0])}{page_file(name).decode()}" for name in SCRIPTS]
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src {hashes}; img-src data:; base-uri 'none'"
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}; form-action \'none\'">'
    style = "\n".join(page_file(name).decode() for name in STYLES)
    page = page_file("index.html").decode()
    head, _, after_head = page.partition("<!-- files: begin -->")
    _, _, after_head = after_head.partition("<!-- files: end -->")
    body, _, tail = after_head.partition("<!-- scripts -->")
    loaded = "".join(f"<script>{script}</script>\n" for script in scripts)
    data = '<script type="application/json" id="data">'
    return f"{head}{meta}\n<style>\n{style}\n</style>{body}{data}", f"</script>\n{loaded}{tail}"


def page_file(name: str) -> bytes:
    return (resources.files(_WEB) / name).read_bytes()
