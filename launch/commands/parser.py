"""The command line's parser: argparse that knows its sub-commands and suggests the nearest one; argument types.

click and typer were considered: argparse is in the standard library, imports in a few milliseconds and suffices.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from ...core.errors import ConfigError
from ...core.suggestion import nearest

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
    "watch": "`myxa top` shows the run; `tail -F RUN/metrics.jsonl`, events.jsonl or audit.jsonl follows its files",
}
"""Commands that are gone -> what to do instead."""


class Parser(argparse.ArgumentParser):
    """One command, or the whole line. Its sub-commands are parsers of the same class."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # An abbreviated flag would change its meaning when another flag is added.
        super().__init__(*args, allow_abbrev=False, **kwargs)
        self.commands: dict[str, Parser] = {}
        """By name; empty for a command without sub-commands."""

    def add_commands(self) -> argparse._SubParsersAction[argparse.ArgumentParser]:  # pyright: ignore[reportPrivateUsage] - argparse has no public name for it
        """Room for sub-commands, of which one must be given."""
        made: Any = self.add_subparsers(title="commands", metavar="COMMAND", required=True)
        self.commands = made.choices
        return made

    def error(self, message: str) -> NoReturn:
        """Raises as every other mistake does, so that `--json` applies; argparse would print its usage and exit."""
        if self.commands and message.endswith(": COMMAND"):
            raise ConfigError(
                f"a command is missing after {self.prog!r}", remedy=f"there are: {', '.join(self.commands)}"
            )
        raise ConfigError(f"{self.prog.removeprefix('myxa ')}: {message}", remedy=f"`{self.prog} --help`")

    @property
    def flags(self) -> tuple[str, ...]:
        """Every `--flag` of this command."""
        return tuple(name for name in self._option_string_actions if name.startswith("--"))


def path_of(parser: Parser, words: Sequence[str]) -> Iterator[tuple[Parser, str]]:
    """The parsers that the words lead through, each with the word that is looked for in it; ends at a flag."""
    for word in words:
        if not parser.commands or word.startswith("-"):
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
    """A sentence about arguments that the command does not take."""
    command = parser
    name: list[str] = []
    for place, word in path_of(parser, words):
        command = place.commands[word]
        name.append(word)
    first = unknown[0].partition("=")[0]
    near = nearest(first, command.flags) if first.startswith("--") else None
    hint = f"did you mean {near}?" if near else f"`myxa {' '.join([*name, '--help'])}` shows what it takes"
    return f"{' '.join(name) or 'myxa'} does not take {' '.join(unknown)} -- {hint}"


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


def stretch_s(text: str) -> float:
    """Seconds. For argparse: raises ArgumentTypeError."""
    found = _STRETCH.fullmatch(text.strip())
    seconds = float(found["number"]) * _SECONDS[found["unit"]] if found is not None else 0.0
    if seconds <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no stretch of time; write 60s, 5min or 1h")
    return seconds
