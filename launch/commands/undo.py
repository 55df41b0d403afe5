"""`myxa undo`: take a change of knobs back."""

from __future__ import annotations

import argparse

from .knob_words import change_text, check_reply
from .output import Verbs, add_run_flags, show
from .which_run import client_of
from .whole import at_least

CHANGE_S = 75.0


def add(verbs: Verbs) -> None:
    """The command and its flags."""
    parser = verbs.add_parser("undo", help="take the newest change of knobs back, or that of an epoch")
    parser.add_argument("--epoch", type=at_least(1), default=0, metavar="N", help="which change (the newest)")
    parser.add_argument("-m", "--reason", default="", metavar="WHY", help="your own words, for the audit log")
    add_run_flags(parser)
    parser.set_defaults(run=_undo)


def _undo(options: argparse.Namespace) -> int:
    reply = client_of(options, changes=True).ask("undo", CHANGE_S, epoch=options.epoch, reason=options.reason)
    check_reply(reply)
    show(options, reply, change_text)
    return 0
