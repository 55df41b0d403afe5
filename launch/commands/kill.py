"""`myxa kill`: a signal to an actor's process and all that it started. What follows is as for any other death."""

from __future__ import annotations

import argparse

from .output import Verbs, add_run_flags, show
from .which_run import client_of


def add(verbs: Verbs) -> None:
    """The command and its flags."""
    kill = verbs.add_parser("kill", help="send an actor's processes SIGKILL, SIGSTOP or SIGCONT")
    kill.add_argument("target", metavar="TARGET", help="rollout/1, rollout, node:1, ...")
    kill.add_argument("--signal", default="KILL", choices=("KILL", "STOP", "CONT"), help="which (%(default)s)")
    kill.add_argument("-m", "--reason", default="", metavar="WHY", help="your own words, for the audit log")
    kill.set_defaults(run=_kill)
    add_run_flags(kill)


def _kill(options: argparse.Namespace) -> int:
    answer = client_of(options, changes=True).ask(
        "kill", target=options.target, signal=options.signal, reason=options.reason
    )
    show(options, answer, lambda told: f"SIG{told['signal']} to {', '.join(told['sent']) or 'nobody'}")
    return 0
