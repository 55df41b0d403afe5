"""`myxa set`: change knobs of a run that goes on, all or none."""

from __future__ import annotations

import argparse

from .knob_words import add_change_flags, assignments, change_arguments, change_text, check_reply
from .output import Verbs, add_run_flags, show
from .which_run import client_of

CHANGE_S = 75.0


def add(verbs: Verbs) -> None:
    """The command and its flags."""
    parser = verbs.add_parser(
        "set",
        help="change knobs, all or none",
        description="Change knobs while the run goes on. All owners of all knobs agree, or nothing is changed; each "
        "knob takes effect at its boundary (`myxa explain NAME`).",
    )
    parser.add_argument("values", nargs="+", metavar="NAME=VALUE", help="such as lr=1e-4; values as in the run file")
    add_change_flags(parser)
    add_run_flags(parser)
    parser.set_defaults(run=_set)


def _set(options: argparse.Namespace) -> int:
    arguments = change_arguments(options, assignments(options.values, "set"))
    reply = client_of(options, changes=True).ask("set", CHANGE_S, **arguments)
    check_reply(reply)
    show(options, reply, change_text)
    return 0
