"""Processes of a run: `scale`, `drain`, `restart`, `kill`, `logs`, `stack`, `profile`; and `control`, keys
for access from another host.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..control.client import find_run
from .output import Verbs, add_run_flags, client_of, client_or_folder, say_now, show
from .parser import Parser, at_least, stretch_s

if TYPE_CHECKING:
    pass


SCALE_S = 30.0


def add_scale(verbs: Verbs) -> None:
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
        "scale", options.wait_s + SCALE_S, role=role, count=count, devices=options.devices,
        attach=options.attach, wait_s=options.wait_s, reason=options.reason,
    )  # fmt: skip
    show(options, answer, _scale_words)
    return 0 if answer["is_done"] or not options.wait_s else 1


def _scale_words(answer: dict[str, Any]) -> str:
    lines = [f"{actor['name']} joins on node {actor['node']}" for actor in answer["joining"]]
    lines += [f"{name} hands its work back and leaves" for name in answer["leaving"]]
    return "\n".join(lines or [f"there are {answer['count']} {answer['role']} actors already"]) + state_of(answer)


def state_of(answer: dict[str, Any]) -> str:
    """A last line: whether all of it is done."""
    return "\ndone" if answer["is_done"] else "\nunder way; `myxa ps` shows it"


def add_drain(verbs: Verbs) -> None:
    """The command and its flags."""
    drain = verbs.add_parser("drain", help="hand a rollout actor's work back and end it for good")
    drain.add_argument("target", metavar="TARGET", help="rollout/1, rollout/* or node:1")
    drain.set_defaults(run=_drain)
    add_order_flags(drain)


def _drain(options: argparse.Namespace) -> int:
    answer = client_of(options, changes=True).ask(
        "drain", options.wait_s + SCALE_S, target=options.target, wait_s=options.wait_s, reason=options.reason
    )
    show(options, answer, lambda facts: f"leaving: {', '.join(facts['leaving'])}{state_of(facts)}")
    return 0 if answer["is_done"] or not options.wait_s else 1


def add_restart(verbs: Verbs) -> None:
    """The command and its flags."""
    restart = verbs.add_parser("restart", help="end an actor cleanly and start it again")
    restart.add_argument("target", metavar="TARGET", help="rollout/1, rollout (one after another), node:1, ...")
    restart.add_argument("--force", action="store_true", help="also where the run is known to end by it")
    restart.set_defaults(run=_restart)
    add_order_flags(restart)


def _restart(options: argparse.Namespace) -> int:
    answer = client_of(options, changes=True).ask(
        "restart", options.wait_s + SCALE_S, target=options.target, force=options.force,
        wait_s=options.wait_s, reason=options.reason,
    )  # fmt: skip
    show(options, answer, lambda facts: f"restarting: {', '.join(facts['restarting'])}{state_of(facts)}")
    return 0 if answer["is_done"] or not options.wait_s else 1


def add_kill(verbs: Verbs) -> None:
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
    show(options, answer, lambda reply: f"SIG{reply['signal']} to {', '.join(reply['sent']) or 'no process'}")
    return 0


def add_logs(verbs: Verbs) -> None:
    """The command and its flags."""
    logs = verbs.add_parser("logs", help="an actor's log, on whatever node it is")
    logs.add_argument("target", metavar="TARGET", help="rollout/1, rollout, node:1, all, launcher")
    logs.add_argument("-f", "--follow", action="store_true", help="also print what is added, until Ctrl-C")
    logs.add_argument("-n", "--lines", type=at_least(0), default=100, metavar="N", dest="num_lines",
                      help="so many of the last lines (%(default)s)")  # fmt: skip
    logs.add_argument("--grep", default="", metavar="TEXT", help="only lines that hold this text")
    logs.add_argument("--engine", action="store_true", help="of the server that the actor launched")
    logs.set_defaults(run=_logs)
    add_run_flags(logs)


def _logs(options: argparse.Namespace) -> int:
    client = client_or_folder(options)
    arguments = {
        "target": options.target, "num_lines": options.num_lines, "grep": options.grep, "engine": options.engine,
    }  # fmt: skip
    if isinstance(client, Path):
        show(options, _logs_from_files(client, options), _logs_words)
        return 0
    if not options.follow:
        show(options, client.ask("logs", **arguments), _logs_words)
        return 0
    say_now()
    names: set[str] = set()
    for chunk in client.follow("logs-follow", **arguments):
        names.add(chunk["name"])
        text = json.dumps(chunk) if options.json else _logs_lines(chunk, is_one_of_several=len(names) > 1)
        if text:
            print(text, flush=True)
    return 0


def _logs_from_files(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Of a run that is over; the logs of other nodes are there. Raises ConfigError for one that is not here."""
    import msgspec

    from ..contracts import LogRequest
    from ..nodes.log_reader import read_log
    from ..run_dir import RunDir

    run_dir, target = RunDir(folder), options.target.removesuffix("/*")
    there = sorted(path.stem.replace(".", "/") for path in (run_dir.logs / "latest").glob("*.log"))
    names = [name for name in there if target in (name, name.partition("/")[0], "all")] or [target]
    requests = [
        LogRequest(name=name, num_lines=options.num_lines, grep=options.grep, engine=options.engine) for name in names
    ]
    return [msgspec.to_builtins(read_log(run_dir, 0, request)) for request in requests]


def _logs_words(chunks: list[dict[str, Any]]) -> str:
    return "\n".join(filter(None, (_logs_lines(chunk, is_one_of_several=len(chunks) > 1) for chunk in chunks)))


def _logs_lines(chunk: dict[str, Any], *, is_one_of_several: bool) -> str:
    before = f"{chunk['name']}: " if is_one_of_several else ""
    return "\n".join(f"{before}{line}" for line in chunk["lines"])


STACK_S = 60.0


def add_stack(verbs: Verbs) -> None:
    """The command and its flags."""
    stack = verbs.add_parser("stack", help="where an actor's process is, also of one that hangs")
    stack.add_argument("target", metavar="TARGET", help="rollout/1, rollout, node:1, all")
    stack.add_argument("--py-spy", action="store_true", help="by py-spy, where it is installed and may look")
    stack.set_defaults(run=_stack)
    add_run_flags(stack)


def _stack(options: argparse.Namespace) -> int:
    answer = client_of(options).ask("stack", STACK_S, target=options.target, py_spy=options.py_spy)
    show(options, answer, _stack_words)
    return 0


HOW = {
    "process": "reported by the process",
    "signal": "it did not answer; written by a signal",
    "py-spy": "seen by py-spy",
    "refused": "cannot be looked at",
}


def _stack_words(stacks: list[dict[str, Any]]) -> str:
    parts = [f"== {each['name']} (process {each['pid']}): {HOW[each['how']]}\n{each['text']}" for each in stacks]
    return "\n".join(parts)


SPARE_S = 90.0
MAX_S = 600.0
MIB = 1 << 20


def add_profile(verbs: Verbs) -> None:
    """The command and its flags."""
    profile = verbs.add_parser("profile", help="where an actor's process spends its time, or its memory")
    profile.add_argument("target", metavar="TARGET", help="rollout/1, trainer, node:1, ...")
    profile.add_argument("--for", type=_profile_s, default=10.0, metavar="TIME", dest="for_s",
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


def _profile_s(text: str) -> float:
    seconds = stretch_s(text)
    if seconds > MAX_S:
        raise argparse.ArgumentTypeError(f"{text!r} is more than {MAX_S / 60:g}min; profile several times")
    return seconds


def _profile(options: argparse.Namespace) -> int:
    client = client_of(options)
    if options.kind == "facts":
        show(options, client.ask("facts", target=options.target), _profile_facts)
        return 0
    answer = client.ask(
        "profile",
        options.for_s + SPARE_S,
        target=options.target,
        kind=options.kind,
        for_s=options.for_s,
        engine=options.engine,
    )
    show(options, answer, _profile_words)
    return 1 if any(each["refused"] for each in answer) else 0


def _profile_words(replies: list[dict[str, Any]]) -> str:
    lines: list[str] = []
    for each in replies:
        lines.append(f"{each['name']}: {'not profiled: ' if each['refused'] else ''}{each['refused'] or each['path']}")
        lines += [f"  {line}" for line in each["top"]]
        if not each["refused"] and not each["num_samples"]:
            lines.append("  nothing was seen in that time")
    return "\n".join(lines)


def _profile_facts(facts: list[dict[str, Any]]) -> str:
    lines: list[str] = []
    for each in facts:
        held = f"{each['rss_bytes'] / MIB:.0f} MiB, {each['num_fds']} descriptors, {each['num_threads']} threads"
        lines.append(f"{each['name']}: {held}, {each['num_tasks']} tasks, {each['num_objects']} objects")
        lines += [f"  {name}: {value / MIB:.0f} MiB" for name, value in each["cuda_bytes"].items()]
    return "\n".join(lines)


def add_control(verbs: Verbs) -> None:
    """The command, its sub-command and flags."""
    control = cast(Parser, verbs.add_parser("control", help="where the control sockets are")).add_commands()
    where = control.add_parser("where", help="where the sockets of the run are, for curl and nc")
    where.add_argument("--view", action="store_true", help="the socket that only shows")
    add_run_flags(where)
    where.set_defaults(run=_where)


def _where(options: argparse.Namespace) -> int:
    note = find_run(options.run_path)
    show(options, note.facts(), lambda facts: facts["view" if options.view else "control"])
    return 0
