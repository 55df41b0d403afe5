"""`myxa stack`: where a process is, whether or not it answers."""

from __future__ import annotations

import argparse
from typing import Any

from .output import Verbs, add_run_flags, show
from .which_run import client_of

ANSWER_S = 60.0


def add(verbs: Verbs) -> None:
    """The command and its flags."""
    stack = verbs.add_parser("stack", help="where an actor's process is, also of one that hangs")
    stack.add_argument("target", metavar="TARGET", help="rollout/1, rollout, node:1, all")
    stack.add_argument("--py-spy", action="store_true", help="by py-spy, where it is installed and may look")
    stack.set_defaults(run=_stack)
    add_run_flags(stack)


def _stack(options: argparse.Namespace) -> int:
    answer = client_of(options).ask("stack", ANSWER_S, target=options.target, py_spy=options.py_spy)
    show(options, answer, _told)
    return 0


HOW = {
    "process": "told by the process",
    "signal": "it did not answer; written by a signal",
    "py-spy": "seen by py-spy",
    "refused": "cannot be looked at",
}


def _told(stacks: list[dict[str, Any]]) -> str:
    parts = [f"== {each['name']} (process {each['pid']}): {HOW[each['how']]}\n{each['text']}" for each in stacks]
    return "\n".join(parts)
