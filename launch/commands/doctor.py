"""`myxa doctor`: what of this machine will bite, and what to do about it."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from .output import Verbs, add_json_flag, show

if TYPE_CHECKING:
    from rich.text import Text

STYLES = {"FAIL": "bold red", "warn": "yellow"}


def add(verbs: Verbs) -> None:
    """The command and its flags."""
    doctor = verbs.add_parser(
        "doctor",
        help="what of this machine will bite",
        description="Python, driver, packages, memory, limits, ports, rights, leftovers of earlier runs; each with "
        "what to do. Exit status 1 if something must be mended.",
    )
    doctor.add_argument("--dir", default="runs", metavar="DIR", help="where run directories will be made (%(default)s)")
    add_json_flag(doctor)
    doctor.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    from ..doctor.gather import gather
    from ..doctor.judgement import checks_json, checks_text, judge

    checks = judge(gather(options.dir))

    def page(value: Any) -> Text | str:
        text = checks_text(checks)
        return _coloured(text) if sys.stdout.isatty() else text

    show(options, checks_json(checks), page)
    return 1 if any(check.status == "error" for check in checks) else 0


def _coloured(text: str) -> Text:
    from rich.text import Text

    return Text("\n").join(Text(line, style=STYLES.get(line[:4], "")) for line in text.splitlines())
