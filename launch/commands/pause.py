"""`myxa pause`, `step`: hold the run, let it do so many steps. `resume.py` lets it go on."""

from __future__ import annotations

import argparse

from .output import Verbs, add_run_flags, show
from .which_run import client_of
from .whole import at_least

ASK_S = 45.0
"""More than the run waits for its own parts, so that it can say which of them did not answer."""


def add(verbs: Verbs) -> None:
    """The commands and their flags."""
    pause = verbs.add_parser("pause", help="no new work and no new step; the step in hand ends")
    pause.set_defaults(run=_pause)
    step = verbs.add_parser("step", help="so many training steps, then pause")
    step.add_argument("num_steps", nargs="?", type=at_least(1), default=1, metavar="N", help="how many (%(default)s)")
    step.set_defaults(run=_step)
    for parser in (pause, step):
        parser.add_argument("-m", "--reason", default="", metavar="WHY", help="your own words, for the audit log")
        add_run_flags(parser)


def _pause(options: argparse.Namespace) -> int:
    answer = client_of(options, changes=True).ask("pause", ASK_S, reason=options.reason)
    show(options, answer, lambda told: f"paused: the trainer rests at version {told['rests_at']}")
    return 0


def _step(options: argparse.Namespace) -> int:
    answer = client_of(options, changes=True).ask("step", ASK_S, reason=options.reason, num_steps=options.num_steps)
    show(options, answer, lambda told: f"the run goes on to version {told['pauses_at']}, then pauses")
    return 0
