"""`myxa report`: write report.html of a run, live or over."""

from __future__ import annotations

import argparse
from pathlib import Path

from .output import Verbs, add_json_flag, show
from .which_run import folder_of


def add(verbs: Verbs) -> None:
    """The command and its flags."""
    report = verbs.add_parser("report", help="write report.html of a run")
    report.add_argument("folder", type=Path, nargs="?", metavar="RUN",
                        help="run directory (the only run that goes on, else the newest of this folder)")  # fmt: skip
    report.add_argument("--run", type=Path, default=None, metavar="RUN", dest="run_path", help="the same")
    report.add_argument("--out", type=Path, default=None, metavar="FILE", help="write there (RUN/report.html)")
    add_json_flag(report)
    report.set_defaults(run=_report)


def _report(options: argparse.Namespace) -> int:
    from ..views.report import write_report  # templates are needed here only

    folder = options.folder or options.run_path or folder_of(options)
    page = write_report(folder, options.out)
    show(options, {"report": str(page)}, lambda told: told["report"])
    return 0
