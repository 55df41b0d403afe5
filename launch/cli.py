"""The command `myxa`: reads flags, calls one function per command, turns errors into exit statuses.

0 done   1 failed   2 configuration   3 nodes did not meet, or no run to speak to   4 restart budget spent
5 data or reward   129 terminal closed   130 Ctrl-C

A command imports what it needs when it runs: the command line starts in milliseconds.
"""

from __future__ import annotations

import argparse
import errno
import io
import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, TextIO

from .. import __version__
from ..core.errors import ConfigError, DiskRefused, MyxaError
from .commands import knobs, offline, processes, run_life, views
from .commands.parser import Parser, command, flag, mistaken_command, mistaken_flag

BASH = """\
{zsh}_myxa() {{
  local words=""
  case "${{COMP_WORDS[COMP_CWORD-1]}}:${{COMP_WORDS[1]}}:$COMP_CWORD:$2" in
    *:1:*) words="{commands}" ;;
    --set:*) words="${{_myxa_keys:=$(myxa completion keys)}}" ;;
    *:[gs]et:*:|*:[gs]et:*:[!-]*) words="${{_myxa_knobs:=$(myxa completion knobs)}}" ;;
{cases}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$2"))
}}
complete -o default -F _myxa myxa
"""
"""Keys and knobs take longer to find: a shell asks for them once, when they are needed."""
ZSH = "autoload -U +X bashcompinit && bashcompinit\n"


@command(
    "completion", "commands, flags, keys and knobs for a shell to complete",
    flag("what", choices=("bash", "zsh", "fish", "keys", "knobs"), metavar="SHELL",
         help='bash or zsh, in ~/.bashrc: eval "$(myxa completion bash)"; fish, in config.fish: myxa completion fish | '
         "source; keys or knobs: the words after --set and set"),
)  # fmt: skip
def completion(options: argparse.Namespace) -> int:
    if options.what == "knobs":
        print("\n".join(knob.name for knob in knobs.declared()))
    elif options.what == "keys":
        from ..core.config import RunConfig
        from ..core.config.section import ANY_NAME, named_section_of, section_of, walk

        keys = ((path, section_of(field) or named_section_of(field)) for path, field in walk(RunConfig))
        print("\n".join(f"{'.'.join(path)}=" for path, below in keys if below is None and ANY_NAME not in path))
    else:
        print(script(options.parser, options.what), end="")
    return 0


def script(parser: Parser, shell: str) -> str:
    if shell == "fish":
        lines = [f"complete -c myxa -n __fish_use_subcommand -xa '{' '.join(parser.commands)}'"]
        for name, command in parser.commands.items():
            values = {"--set": " -xa '(myxa completion keys)'"}
            completions = [f"-l {flag[2:]}{values.get(flag, '')}" for flag in command.flags]
            completions += [f"-a '{word}'" for word in command.choices]
            completions += ["-xa '(myxa completion knobs)'"] if name in ("get", "set") else []
            condition = f"complete -c myxa -n '__fish_seen_subcommand_from {name}'"
            lines += [f"{condition} {completion}" for completion in completions]
        return "\n".join(lines) + "\n"
    offered_words = {name: " ".join((*command.flags, *command.choices)) for name, command in parser.commands.items()}
    cases = "\n".join(f'    *:{name}:*) words="{offered}" ;;' for name, offered in offered_words.items())
    return BASH.format(zsh=ZSH if shell == "zsh" else "", commands=" ".join(parser.commands), cases=cases)


COMMANDS = (
    run_life.UP, run_life.on_several, run_life.demo, run_life.init,
    offline.plan, offline.schema, offline.doctor, offline.convert, offline.render, offline.migrate, offline.engine,
    views.ls, views.compare, views.PS, views.top, views.DASHBOARD, views.WHY,
    *knobs.COMMANDS, *run_life.COMMANDS, *processes.COMMANDS,
    views.dump, views.samples, views.MEM, views.report, processes.gateway, processes.where, completion,
)  # fmt: skip
"""In the order in which `myxa --help` lists them."""

INTERRUPTED = 130
UNBUILT_REMEDY = (
    "this Python was built without it: take another one, or install what it needs (Debian: libsqlite3-dev libffi-dev "
    "libssl-dev libbz2-dev liblzma-dev) and build it again"
)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status; with the process's own arguments it ends with one that is not 0."""
    _open_standard_streams()
    if argv is None:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # as in `die_with_parent`
    try:
        status = _run(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        status = INTERRUPTED
    except BrokenPipeError:  # the reader of the output has closed it (`myxa logs -f | head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python would report it again at exit
        sys.exit(0)
    if status and argv is None:
        _end_at_once(status)
    return status


def _run(arguments: list[str]) -> int:
    _write_all_letters(sys.stdout)
    parser = make_parser()
    is_json = "--json" in arguments
    mistaken = mistaken_command(parser, arguments)
    if mistaken:
        return _tell(ConfigError(mistaken), is_json=is_json)
    try:
        options, unknown = parser.parse_known_args(arguments)
        if unknown:
            raise ConfigError(mistaken_flag(parser, arguments, unknown))
        options.words, options.parser = arguments, parser
        status = options.run(options)
        sys.stdout.flush()
    except MyxaError as error:
        return _tell(error, is_json=is_json)
    except ModuleNotFoundError as error:
        remedy = UNBUILT_REMEDY
        if error.name == "torch":
            from .checks.node import TORCH_REMEDY

            remedy = TORCH_REMEDY
        elif error.name not in sys.stdlib_module_names:
            raise
        return _tell(ConfigError(f'{sys.executable} has no module "{error.name}"', remedy=remedy), is_json=is_json)
    except OSError as error:
        disk_error = _of_a_file(error)
        return _tell(disk_error, is_json=is_json and not isinstance(disk_error, DiskRefused))
    return status


def make_parser() -> Parser:
    parser = Parser(
        prog="myxa",
        description="Reinforcement learning for language models: trainer and rollout engines at the same time.",
        epilog="exit status: 0 done, 1 failed, 2 configuration, 3 nodes did not meet, no run to speak to or no "
        "checkpoint to resume from, 4 restart budget spent, 5 data or reward, 129 terminal closed, "
        "130 Ctrl-C, 143 SIGTERM before the end",
    )
    parser.add_argument("--version", action="version", version=f"myxa {__version__}")
    parser.add_commands(COMMANDS)
    return parser


def _tell(error: MyxaError, *, is_json: bool) -> int:
    if is_json:
        print(json.dumps({"error": error.facts()}), flush=True)
    print(f"myxa: {error}", file=sys.stderr)
    return error.exit_code


def _open_standard_streams() -> None:
    """A program that starts commands may have closed them; a socket that got such a number would get what is said."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "w" if number else "r"))


def _write_all_letters(file: TextIO) -> None:
    """A terminal that lacks a letter is no reason to end: it gets a plainer one."""
    if isinstance(file, io.TextIOWrapper) and not file.encoding.lower().startswith("utf"):
        from .views.numbers import PLAIN

        file.reconfigure(errors=PLAIN)


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG)


def _of_a_file(error: OSError) -> MyxaError:
    """Of a file that a command was to read or write, and of which nothing nearer knows more. Raises what is no such."""
    try:
        Path.cwd()
    except OSError:
        return ConfigError("the current folder is gone", remedy="change into one that is there")
    if error.filename is None and error.errno in FULL:
        return DiskRefused(f"standard output: {error.strerror}", remedy="what it holds is cut off: make room there")
    if error.filename is not None and error.strerror:
        return ConfigError(f"{error.filename}: {error.strerror}", remedy="check the path, its rights and its disk")
    raise error


def _end_at_once(status: int) -> NoReturn:
    """Python would wait for threads of a library that download."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(status)
