"""`myxa profile`: where a process spends its time or its memory, written into the run directory."""

from __future__ import annotations

import argparse
from typing import Any

from .output import Verbs, add_run_flags, show
from .stretch import stretch_s
from .which_run import client_of

SPARE_S = 90.0
MAX_S = 600.0
MIB = 1 << 20


def add(verbs: Verbs) -> None:
    """The command and its flags."""
    profile = verbs.add_parser("profile", help="where an actor's process spends its time, or its memory")
    profile.add_argument("target", metavar="TARGET", help="rollout/1, trainer, node:1, ...")
    profile.add_argument("--for", type=_stretch_s, default=10.0, metavar="TIME", dest="for_s",
                         help="how long: 10s, 2min; at most 10min (10s)")  # fmt: skip
    kind = profile.add_mutually_exclusive_group()
    kind.add_argument("--memory", action="store_const", const="memory", dest="kind", help="Python memory, by line")
    kind.add_argument("--torch", action="store_const", const="torch", dest="kind", help="by torch's own profiler")
    kind.add_argument("--facts", action="store_const", const="facts", dest="kind",
                      help="at once: memory, descriptors, threads, tasks")  # fmt: skip
    profile.add_argument("--no-engine", action="store_false", dest="engine",
                         help="not of the SGLang server behind a rollout actor")  # fmt: skip
    profile.set_defaults(run=_profile, kind="stacks")
    add_run_flags(profile)


def _stretch_s(text: str) -> float:
    seconds = stretch_s(text)
    if seconds > MAX_S:
        raise argparse.ArgumentTypeError(f"{text!r} is more than {MAX_S / 60:g}min; profile several times")
    return seconds


def _profile(options: argparse.Namespace) -> int:
    client = client_of(options)
    if options.kind == "facts":
        show(options, client.ask("facts", target=options.target), _facts)
        return 0
    answer = client.ask(
        "profile",
        options.for_s + SPARE_S,
        target=options.target,
        kind=options.kind,
        for_s=options.for_s,
        engine=options.engine,
    )
    show(options, answer, _told)
    return 1 if any(each["refused"] for each in answer) else 0


def _told(replies: list[dict[str, Any]]) -> str:
    lines: list[str] = []
    for each in replies:
        lines.append(f"{each['name']}: {'not profiled: ' if each['refused'] else ''}{each['refused'] or each['path']}")
        lines += [f"  {line}" for line in each["top"]]
        if not each["refused"] and not each["num_samples"]:
            lines.append("  nothing was seen in that time")
    return "\n".join(lines)


def _facts(facts: list[dict[str, Any]]) -> str:
    lines: list[str] = []
    for each in facts:
        held = f"{each['rss_bytes'] / MIB:.0f} MiB, {each['num_fds']} descriptors, {each['num_threads']} threads"
        lines.append(f"{each['name']}: {held}, {each['num_tasks']} tasks, {each['num_objects']} objects")
        lines += [f"  {name}: {value / MIB:.0f} MiB" for name, value in each["cuda_bytes"].items()]
    return "\n".join(lines)
