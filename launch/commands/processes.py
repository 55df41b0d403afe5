"""Processes of a run: `scale`, `drain`, `restart`, `kill`, `logs`, `stack`, `profile`, `gateway`, `where`."""

from __future__ import annotations

import argparse
import json
import shlex
import threading
from pathlib import Path
from typing import Any

import msgspec

from ...core.errors import ConfigError, LaunchError, PeerDied
from .. import verbs
from ..control.client import find_run
from .parser import JSON, RUN, arguments_of, client_or_folder, command, flag, note_of, say_now, show, verb_command


def _wish(text: str) -> dict[str, Any]:
    role, sign, number = text.partition("=")
    if not sign or not number.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r}: write ROLE=N with a whole number, e.g. rollout=4")
    return {"role": role, "count": int(number)}


def _is_done(options: argparse.Namespace, answer: dict[str, Any]) -> int:
    return 0 if answer["is_done"] or not options.wait_s else 1


def _scale_words(answer: dict[str, Any]) -> str:
    lines = [f"{actor['name']} joins on node {actor['node']}" for actor in answer["joining"]]
    lines += [f"{name} hands its work back and leaves" for name in answer["leaving"]]
    return "\n".join(lines or [f"there are {answer['count']} {answer['role']} actors already"]) + state_of(answer)


def state_of(answer: dict[str, Any]) -> str:
    return "\ndone" if answer["is_done"] else "\nunder way; `myxa ps` shows it"


FOLLOW_S = 0.5
"""Between two looks at a log that is followed."""


def _logs(options: argparse.Namespace) -> int:
    run = client_or_folder(options)
    if isinstance(run, Path):
        show(options, _logs_from_files(run, options), _logs_words)
        return 0
    arguments = arguments_of(options, verbs.LOGS)
    chunks = run.ask("logs", **arguments)
    if not options.follow:
        show(options, chunks, _logs_words)
        return 0
    say_now()
    after: dict[str, tuple[str, int]] = {}
    while True:
        after |= {chunk["name"]: (chunk["file"], chunk["offset"]) for chunk in chunks}
        for chunk in chunks:
            if chunk["lines"]:
                print(json.dumps(chunk) if options.json else _logs_lines(chunk, len(after) > 1), flush=True)
        if not any(chunk["is_more"] for chunk in chunks):
            threading.Event().wait(FOLLOW_S)
        try:
            chunks = run.ask("logs", **arguments, after=after)
        except (LaunchError, PeerDied, ConfigError):  # the run is over, or these logs are gone
            return 0


def _logs_from_files(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Of a run that is over; the logs of other nodes are there. Raises ConfigError for one that is not here."""
    from ..nodes.log_reader import read_logs
    from ..run_dir import RunDir

    run_dir, target = RunDir(folder), options.target.removesuffix("/*")
    actors = sorted(path.stem.replace(".", "/") for path in (run_dir.logs / "latest").glob("*.log"))
    names = [name for name in actors if target in (name, name.partition("/")[0], "all")] or [target]
    request = verbs.LogsArguments(**arguments_of(options, verbs.LOGS))
    requests = [msgspec.structs.replace(request, target=name) for name in names]
    return [msgspec.to_builtins(chunk) for request in requests for chunk in read_logs(run_dir, 0, request)]


def _logs_words(chunks: list[dict[str, Any]]) -> str:
    return "\n".join(filter(None, (_logs_lines(chunk, len(chunks) > 1) for chunk in chunks)))


def _logs_lines(chunk: dict[str, Any], is_one_of_several: bool) -> str:
    before = f"{chunk['name']}: " if is_one_of_several else ""
    return "\n".join(f"{before}{line}" for line in chunk["lines"])


HOW = {
    "process": "reported by the process",
    "signal": "it did not answer; written by a signal",
    "refused": "cannot be looked at",
}


def _stack_words(stacks: list[dict[str, Any]]) -> str:
    return "\n".join(
        f"== {stack['name']} (process {stack['pid']}): {HOW[stack['how']]}\n{stack['text']}" for stack in stacks
    )


def _profile_words(replies: list[dict[str, Any]]) -> str:
    lines: list[str] = []
    for reply in replies:
        result = f"not profiled: {reply['refused']}" if reply["refused"] else reply["path"]
        lines += [f"{reply['name']}: {result}", *(f"  {line}" for line in reply["top"])]
        if not reply["refused"] and not reply["top"]:
            lines.append("  nothing was seen in that time")
    return "\n".join(lines)


@command("where", "where the sockets of the run are, for curl", RUN, JSON)
def where(options: argparse.Namespace) -> int:
    note = find_run(options.run_path)
    show(options, msgspec.to_builtins(note), lambda facts: facts["control"])
    return 0


@command(
    "gateway", "the addresses at which the policy can be asked, and the eval key", RUN, JSON,
    description="Prints exports for a shell, with the run's eval key where gateway.eval_requests is set: "
    'eval "$(myxa gateway)" lets any OpenAI or Anthropic client talk to the policy as it is now.',
)  # fmt: skip
def gateway(options: argparse.Namespace) -> int:
    """From the files that gateways write for the run's owner."""
    folder = note_of(options).run_dir
    places = [json.loads(path.read_bytes()) for path in sorted(Path(folder).glob("agents*.json"))]
    if not places:
        raise ConfigError(f"{folder} has no gateway", remedy="set gateway.eval_requests = 4 for the next run")
    show(options, places, lambda places: "\n".join(map(exports, places)))
    return 0


def exports(place: dict[str, Any]) -> str:
    """For a shell: what SDKs look for."""
    url, key = place["base_url"], place["eval_key"]
    variables = {"OPENAI_BASE_URL": f"{url}/v1", "ANTHROPIC_BASE_URL": url}
    variables |= {"OPENAI_API_KEY": key, "ANTHROPIC_API_KEY": key} if key else {}
    return f"export {' '.join(f'{name}={shlex.quote(value)}' for name, value in variables.items())}"


COMMANDS = (
    verb_command(
        verbs.SCALE, _scale_words,
        flag("wish", metavar="ROLE=N", type=_wish, help="how many there shall be in all, e.g. rollout=4"),
        more=lambda options: options.wish, check=_is_done,
    ),
    verb_command(verbs.DRAIN, lambda facts: f"leaving: {', '.join(facts['leaving'])}{state_of(facts)}", check=_is_done),
    verb_command(verbs.RESTART, lambda facts: f"restarting: {', '.join(facts['restarting'])}{state_of(facts)}",
                 check=_is_done),
    verb_command(verbs.KILL, lambda reply: f"killed: {', '.join(reply['killed'])}"),
    verb_command(verbs.LOGS, _logs_words,
                 flag("-f", "--follow", action="store_true", help="also what is added, until Ctrl-C"), run=_logs),
    verb_command(verbs.STACK, _stack_words),
    verb_command(verbs.PROFILE, _profile_words, check=lambda _, replies: int(any(r["refused"] for r in replies))),
)  # fmt: skip
