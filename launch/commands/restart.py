"""`myxa restart`: an actor ends in good order and is started anew; this spends none of its restarts."""

from __future__ import annotations

import argparse

from .output import Verbs, show
from .scale import ANSWER_S, add_order_flags, state_of
from .which_run import client_of


def add(verbs: Verbs) -> None:
    """The command and its flags."""
    restart = verbs.add_parser("restart", help="end an actor in good order and start it anew")
    restart.add_argument("target", metavar="TARGET", help="rollout/1, rollout (one after another), node:1, ...")
    restart.add_argument("--force", action="store_true", help="also where the run is known to end by it")
    restart.set_defaults(run=_restart)
    add_order_flags(restart)


def _restart(options: argparse.Namespace) -> int:
    answer = client_of(options, changes=True).ask(
        "restart", options.wait_s + ANSWER_S, target=options.target, force=options.force,
        wait_s=options.wait_s, reason=options.reason,
    )  # fmt: skip
    show(options, answer, lambda told: f"restarting: {', '.join(told['restarting'])}{state_of(told)}")
    return 0 if answer["is_done"] or not options.wait_s else 1
