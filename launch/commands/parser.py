"""The command line's parser: argparse that knows its sub-commands and suggests the nearest one; flags of a verb, from
its declaration; argument types.

click and typer were considered: argparse is in the standard library, imports in a few milliseconds and suffices.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from ...core.errors import ConfigError
from ...core.suggestion import nearest
from ..control.verbs import WHO, Verb

if TYPE_CHECKING:
    from msgspec.inspect import Field

OTHER_WORDS: Mapping[str, str] = {
    "status": "ps", "info": "ps", "list": "ls", "runs": "ls", "diff": "compare",
    "stats": "top", "metrics": "top", "events": "top", "tail": "logs",
    "show": "get", "checkpoint": "ckpt", "run": "up", "start": "up", "train": "up", "stop": "down", "end": "down",
    "quit": "down", "exit": "down", "shutdown": "down",
}  # fmt: skip
"""Names in other programs -> our command. The nearest name by letters would be wrong: top for stop."""
FORMER: Mapping[str, str] = {
    "chaos": "`myxa kill` makes a process of the run fail",
    "apply": "`myxa set NAME=VALUE NAME=VALUE` changes several knobs, all or none",
    "config": "`myxa get --toml` prints what differs from the run file",
    "suggest": "`myxa why` names the knob to turn",
    "engine": "start a server of your own: `python -m sglang.launch_server`; the demo's model runs in the actor itself",
    "watch": "`myxa top` shows the run; `tail -F RUN/metrics.jsonl`, events.jsonl or audit.jsonl follows its files",
}
"""Commands that are gone -> what to do instead."""
FORMER_FLAGS: Mapping[str, str] = {"--py-spy": "`py-spy dump --pid PID` on its node does that; `myxa ps` shows both"}
"""Flags that are gone -> what to do instead."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command. `add` gives its parser flags, only when it is used."""

    name: str
    help: str
    run: Callable[[argparse.Namespace], int]
    add: Callable[[Parser], None]
    description: str = ""
    parts: tuple[Command, ...] = ()
    """Sub-commands, of which one must be given; a command with parts has no `run` and no flags of its own."""


class Parser(argparse.ArgumentParser):
    """One command, or the whole line. Its sub-commands are parsers of the same class."""

    def __init__(self, *args: Any, command: Command | None = None, **kwargs: Any) -> None:
        # An abbreviated flag would change its meaning when another flag is added.
        super().__init__(*args, allow_abbrev=False, **kwargs)
        self._command = command
        self._is_ready = command is None
        self.commands: dict[str, Parser] = {}

    def add_commands(self, commands: Sequence[Command]) -> None:
        made: Any = self.add_subparsers(title="commands", metavar="COMMAND", required=True)
        for each in commands:
            made.add_parser(each.name, help=each.help, description=each.description or None, command=each)
        self.commands = made.choices

    def ready(self) -> Parser:
        if not self._is_ready and self._command is not None:
            self._is_ready = True
            if self._command.parts:
                self.add_commands(self._command.parts)
            else:
                self._command.add(self)
                self.set_defaults(run=self._command.run)
        return self

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        """As argparse; a sub-command gets its flags only now."""
        self.ready()
        return super().parse_known_args(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Raises as every other mistake does, so that `--json` applies; argparse would print its usage and exit."""
        if self.commands and message.endswith(": COMMAND"):
            raise ConfigError(
                f"a command is missing after {self.prog!r}", remedy=f"there are: {', '.join(self.commands)}"
            )
        raise ConfigError(f"{self.prog.removeprefix('myxa ')}: {message}", remedy=f"`{self.prog} --help`")

    @property
    def flags(self) -> tuple[str, ...]:
        return tuple(name for name in self.ready()._option_string_actions if name.startswith("--"))


def path_of(parser: Parser, words: Sequence[str]) -> Iterator[tuple[Parser, str]]:
    """The parsers that the words lead through, each with the word that is looked for in it; ends at a flag."""
    for word in words:
        if not parser.ready().commands or word.startswith("-"):
            return
        yield parser, word
        if word not in parser.commands:
            return
        parser = parser.commands[word]


def mistaken_command(parser: Parser, words: Sequence[str]) -> str:
    """A sentence about a command that does not exist, or nothing."""
    above: list[str] = []
    for place, word in path_of(parser, words):
        if word not in place.commands:
            if not above and word in FORMER:
                return f"{word!r} is no command any more -- {FORMER[word]}"
            other = OTHER_WORDS.get(word.lower())
            near = other if other in place.commands else nearest(word, place.commands)
            hint = f"did you mean {near!r}?" if near else f"there are: {', '.join(place.commands)}"
            return f"{' '.join([*above, word])!r} is no command -- {hint}"
        above.append(word)
    return ""


def mistaken_flag(parser: Parser, words: Sequence[str], unknown: Sequence[str]) -> str:
    command = parser
    name: list[str] = []
    for place, word in path_of(parser, words):
        command = place.commands[word]
        name.append(word)
    first = unknown[0].partition("=")[0]
    near = nearest(first, command.flags) if first.startswith("--") else None
    hint = FORMER_FLAGS.get(first) or (
        f"did you mean {near}?" if near else f"`myxa {' '.join([*name, '--help'])}` shows what it takes"
    )
    return f"{' '.join(name) or 'myxa'} does not take {' '.join(unknown)} -- {hint}"


def add_arguments(parser: argparse.ArgumentParser, verb: Verb[Any]) -> None:
    """A flag, or a word, for every argument of the verb."""
    about: Any = msgspec.inspect.type_info(verb.arguments)
    for field in about.fields:
        _add_argument(parser, field)


def _add_argument(parser: argparse.ArgumentParser, field: Field) -> None:
    about: Any = field.type  # Metadata(type, extra_json_schema, extra)
    way: dict[str, Any] = getattr(about, "extra", None) or {}
    if field.name == WHO or way["flag"] == "":
        return
    how: dict[str, Any] = {"help": about.extra_json_schema["description"]}
    if way["metavar"]:
        how["metavar"] = way["metavar"]
    kind = type(about.type).__name__
    if way["is_time"]:
        how["type"] = partial(stretch_s, most=about.type.le)
    elif kind == "IntType":
        how["type"] = at_least(about.type.ge)
    elif kind == "FloatType":
        how["type"] = float
    elif kind == "LiteralType":
        how["choices"] = about.type.values
    if way["is_word"]:
        many = "*" if kind == "VarTupleType" else "+" if kind == "DictType" else None if field.required else "?"
        how |= {} if many is None else {"nargs": many}
        how |= {} if field.required or many == "*" else {"default": field.default}
        parser.add_argument(field.name, **how)
        return
    if kind == "BoolType":
        how["action"] = "store_false" if field.default else "store_true"
    elif kind == "DictType":
        how |= {"action": "append", "default": []}
    else:
        how["default"] = field.default
    flag = way["flag"] or f"--{field.name.replace('_', '-')}"
    parser.add_argument(*filter(None, (way["short"], flag)), dest=field.name, **how)


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    """`--run RUN` and `--json`."""
    parser.add_argument("--run", type=Path, default=None, metavar="RUN", dest="run_path",
                        help="run directory (the only live run)")  # fmt: skip
    add_json_flag(parser)


def add_json_flag(parser: argparse.ArgumentParser) -> None:
    """`--json` alone, for commands that speak to no run."""
    parser.add_argument("--json", action="store_true", help="the answer for programs; errors too")


def at_least(least: int) -> Callable[[str], int]:
    """For argparse: what reads such a number. Raises ArgumentTypeError."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} on")
        return value

    return read


_STRETCH = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>s|sec|m|min|h)?")
_SECONDS = {None: 1.0, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def stretch_s(text: str, most: float | None = None) -> float:
    """Seconds, at most `most`. For argparse: raises ArgumentTypeError."""
    found = _STRETCH.fullmatch(text.strip())
    seconds = float(found["number"]) * _SECONDS[found["unit"]] if found is not None else 0.0
    if seconds <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no stretch of time; write 60s, 5min or 1h")
    if most is not None and seconds > most:
        raise argparse.ArgumentTypeError(f"{text!r} is more than {most / 60:g}min")
    return seconds
