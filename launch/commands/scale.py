"""`myxa scale`: more or fewer rollout actors in a run that goes on."""

from __future__ import annotations

import argparse
from typing import Any

from .output import Verbs, add_run_flags, show
from .which_run import client_of

ANSWER_S = 30.0


def add(verbs: Verbs) -> None:
    """The command and its flags."""
    scale = verbs.add_parser("scale", help="more or fewer rollout actors", description="Have so many rollout actors.")
    scale.add_argument("wish", metavar="ROLE=N", type=_wish, help="e.g. rollout=4")
    scale.add_argument("--devices", default="", metavar="GPUS", help="GPUs of each node for new actors, e.g. 4-7")
    scale.add_argument("--attach", default="", metavar="URLS",
                       help="attached servers for new actors, http://host:port,...")  # fmt: skip
    scale.set_defaults(run=_scale)
    add_order_flags(scale)


def add_order_flags(parser: argparse.ArgumentParser) -> None:
    """What scale, drain and restart have in common."""
    parser.add_argument("--wait", type=float, default=0.0, metavar="S", dest="wait_s",
                        help="come back when it is done, after so many seconds at most (at once)")  # fmt: skip
    parser.add_argument("-m", "--reason", default="", metavar="WHY", help="your own words, for the audit log")
    add_run_flags(parser)


def _wish(text: str) -> tuple[str, int]:
    role, sign, number = text.partition("=")
    if not sign or not number.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r}: write ROLE=N with a whole number, e.g. rollout=4")
    return role, int(number)


def _scale(options: argparse.Namespace) -> int:
    role, count = options.wish
    answer = client_of(options, changes=True).ask(
        "scale", options.wait_s + ANSWER_S, role=role, count=count, devices=options.devices,
        attach=options.attach, wait_s=options.wait_s, reason=options.reason,
    )  # fmt: skip
    show(options, answer, _told)
    return 0 if answer["is_done"] or not options.wait_s else 1


def _told(answer: dict[str, Any]) -> str:
    lines = [f"{actor['name']} joins on node {actor['node']}" for actor in answer["joining"]]
    lines += [f"{name} hands its work back and leaves" for name in answer["leaving"]]
    return "\n".join(lines or [f"there are {answer['count']} {answer['role']} actors already"]) + state_of(answer)


def state_of(answer: dict[str, Any]) -> str:
    """A last line: whether all of it is done."""
    return "\ndone" if answer["is_done"] else "\nunder way; `myxa ps` shows it"
