"""`myxa drain`: an actor hands its work back and leaves the run for good."""

from __future__ import annotations

import argparse

from .output import Verbs, show
from .scale import ANSWER_S, add_order_flags, state_of
from .which_run import client_of


def add(verbs: Verbs) -> None:
    """The command and its flags."""
    drain = verbs.add_parser("drain", help="hand a rollout actor's work back and end it for good")
    drain.add_argument("target", metavar="TARGET", help="rollout/1, rollout/* or node:1")
    drain.set_defaults(run=_drain)
    add_order_flags(drain)


def _drain(options: argparse.Namespace) -> int:
    answer = client_of(options, changes=True).ask(
        "drain", options.wait_s + ANSWER_S, target=options.target, wait_s=options.wait_s, reason=options.reason
    )
    show(options, answer, lambda told: f"leaving: {', '.join(told['leaving'])}{state_of(told)}")
    return 0 if answer["is_done"] or not options.wait_s else 1
