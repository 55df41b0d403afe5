"""What a command is made of: argparse that knows its sub-commands and suggests the nearest one, flags of a verb from
its declaration, argument types; which run it speaks to, and how an answer is shown.

click and typer were considered: argparse is in the standard library, imports in a few milliseconds and suffices.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from ...core.errors import ConfigError, LaunchError
from ...core.suggestion import nearest
from ..control.client import RUNS, ControlClient, ControlNote, SeveralLiveRuns, find_run
from ..run_dir import CONFIG
from ..verbs import WHO, Verb, argument_names

if TYPE_CHECKING:
    from msgspec.inspect import Field
    from rich.console import RenderableType

OTHER_WORDS: Mapping[str, str] = {
    "status": "ps", "info": "ps", "control": "where", "apply": "set", "config": "get", "suggest": "why", "watch": "top",
    "list": "ls", "runs": "ls", "diff": "compare",
    "stats": "top", "metrics": "top", "events": "top", "tail": "logs",
    "show": "get", "explain": "get", "trace": "report",
    "checkpoint": "ckpt", "run": "up", "start": "up", "train": "up", "stop": "down", "end": "down",
    "quit": "down", "exit": "down", "shutdown": "down",
    "export": "convert", "evaluate": "eval", "validate": "plan", "check": "plan", "new": "init", "create": "init",
}  # fmt: skip
"""Names in other programs -> our command. The nearest name by letters would be wrong: top for stop."""


Flag = tuple[tuple[str, ...], dict[str, Any]]


def flag(*names: str, **options: Any) -> Flag:
    """A flag, or a word, as argparse's `add_argument` takes it."""
    return names, options


RUN = flag("--run", type=Path, default=None, metavar="RUN", dest="run_path",
           help="run directory (the only live run, or runs/latest where that can answer)")  # fmt: skip
JSON = flag("--json", action="store_true", help="print the answer as JSON, errors too")
SET = flag("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="overrides",
           help="overrule a value of the file; may be repeated")  # fmt: skip
FILE_WORDS = {"metavar": "RUN.TOML", "help": "run file; of several, later ones win key by key"}

Run = Callable[[argparse.Namespace], int]


@dataclass(frozen=True, slots=True)
class Command:
    """One command. Its parser gets flags only when it is used: those of the verb's arguments, then its own."""

    name: str
    help: str
    run: Run
    flags: Sequence[Flag] = ()
    description: str = ""
    verb: Verb[Any] | None = None


def command(name: str, help: str, *flags: Flag, description: str = "") -> Callable[[Run], Command]:
    """Makes a command of the function below."""
    return lambda run: Command(name, help, run, flags, description)


class Parser(argparse.ArgumentParser):
    """One command, or the whole line. Its sub-commands are parsers of the same class."""

    def __init__(self, *args: Any, command: Command | None = None, **kwargs: Any) -> None:
        # An abbreviated flag would change its meaning when another flag is added.
        super().__init__(*args, allow_abbrev=False, **kwargs)
        self._command = command
        self.commands: dict[str, Parser] = {}

    def add_commands(self, commands: Sequence[Command]) -> None:
        subparsers: Any = self.add_subparsers(title="commands", metavar="COMMAND", required=True)
        for command in commands:
            texts = {"help": command.help, "description": command.description or None}
            subparsers.add_parser(command.name, command=command, **texts)
        self.commands = subparsers.choices

    def ready(self) -> Parser:
        command, self._command = self._command, None
        if command is not None:
            of_verb = verb_flags(command.verb) if command.verb is not None else ()
            for names, options in (*of_verb, *command.flags):
                self.add_argument(*names, **options)
            self.set_defaults(run=command.run)
        return self

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        """As argparse; a sub-command gets its flags only now."""
        self.ready()
        return super().parse_known_args(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Raises as every other mistake does, so that `--json` applies; argparse would print its usage and exit."""
        if self.commands and message.endswith(": COMMAND"):
            raise ConfigError("a command is missing", remedy=f"there are: {', '.join(self.commands)}")
        raise ConfigError(f"{self.prog.removeprefix('myxa ')}: {message}", remedy=f"`{self.prog} --help`")

    @property
    def flags(self) -> tuple[str, ...]:
        return tuple(name for name in self.ready()._option_string_actions if name.startswith("--"))

    @property
    def choices(self) -> tuple[str, ...]:
        """Words other than flags that are declared."""
        actions = (action for action in self.ready()._actions if not action.option_strings)
        return tuple(str(word) for action in actions for word in action.choices or ())


def mistaken_command(parser: Parser, words: Sequence[str]) -> str:
    """A sentence about a command that does not exist, or nothing."""
    word = words[0] if words else "-"
    if word.startswith("-") or word in parser.commands:
        return ""
    other = OTHER_WORDS.get(word.lower())
    near = other if other in parser.commands else nearest(word, parser.commands)
    hint = f"did you mean {near!r}?" if near else f"there are: {', '.join(parser.commands)}"
    return f"{word!r} is no command -- {hint}"


def mistaken_flag(parser: Parser, words: Sequence[str], unknown: Sequence[str]) -> str:
    name = words[0] if words and words[0] in parser.commands else ""
    command, flag = parser.commands.get(name, parser), unknown[0].partition("=")[0]
    near = nearest(flag, command.flags) if flag.startswith("--") else None
    hint = f"did you mean {near}?" if near else f"`{command.prog} --help` shows what it takes"
    return f"{name or 'myxa'} does not take {' '.join(unknown)} -- {hint}"


def verb_flags(verb: Verb[Any]) -> Iterator[Flag]:
    """A flag, or a word, for every argument of the verb that a person may give."""
    about: Any = msgspec.inspect.type_info(verb.arguments)
    for field in about.fields:  # its type is Metadata(type, extra_json_schema, extra)
        if field.name != WHO and field.type.extra["flag"] != "":
            yield _flag_of(field, field.type, field.type.extra)


def _flag_of(field: Field, field_type: Any, extra: Mapping[str, Any]) -> Flag:
    options: dict[str, Any] = {"help": field_type.extra_json_schema["description"]}
    if extra["metavar"]:
        options["metavar"] = extra["metavar"]
    type_name = type(field_type.type).__name__
    if extra["is_time"]:
        options["type"] = partial(stretch_s, most=field_type.type.le)
    elif type_name == "IntType":
        options["type"] = at_least(field_type.type.ge)
    elif type_name == "FloatType":
        options["type"] = float
    elif type_name == "LiteralType":
        options["choices"] = field_type.type.values
    if extra["is_word"]:
        of_one = None if field.required else "?"
        nargs = {"VarTupleType": "*", "DictType": "+"}.get(type_name, of_one)
        options |= {} if nargs is None else {"nargs": nargs}
        options |= {} if field.required or nargs == "*" else {"default": field.default}
        return flag(field.name, **options)
    if type_name == "BoolType":
        options["action"] = "store_false" if field.default else "store_true"
    elif type_name == "DictType":
        options |= {"action": "append", "default": []}
    else:
        options["default"] = field.default
    name = extra["flag"] or f"--{field.name.replace('_', '-')}"
    return flag(*filter(None, (extra["short"], name)), dest=field.name, **options)


def at_least(least: int, most: float = math.inf) -> Callable[[str], int]:
    """For argparse: what reads such a number. Raises ArgumentTypeError."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            until = "on" if most == math.inf else f"to {most}"
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} {until}")
        return value

    return read


def positive(unit: str) -> Callable[[str], float]:
    """The same for a number of `unit`, above 0."""

    def read(text: str) -> float:
        with suppress(ValueError):
            if 0 < (value := float(text)) < 1e6:
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of {unit}")

    return read


_STRETCH = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>s|sec|m|min|h)?")
_SECONDS = {None: 1.0, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def stretch_s(text: str, most: float | None = None) -> float:
    """Seconds, at most `most`. For argparse: raises ArgumentTypeError."""
    match = _STRETCH.fullmatch(text.strip())
    seconds = float(match["number"]) * _SECONDS[match["unit"]] if match is not None else 0.0
    if seconds <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no stretch of time; write 60s, 5min or 1h")
    if most is not None and seconds > most:
        raise argparse.ArgumentTypeError(f"{text!r} is more than {most / 60:g}min")
    return seconds


# -- the run that is meant, and its answer -----------------------------------------------------------------------------

_to_say: list[str] = []
"""What goes to stderr before the answer; nothing if there is none, for then the error alone is said."""


def say_first(text: str) -> None:
    """A line on stderr before the answer, so that an answer for programs stays whole."""
    _to_say.append(text)


def say_now() -> None:
    while _to_say:
        print(f"myxa: {_to_say.pop(0)}", file=sys.stderr, flush=True)


def show(options: argparse.Namespace, value: Any, render: Callable[[Any], RenderableType | str]) -> None:
    say_now()
    if options.json:
        print(json.dumps(value), flush=True)
        return
    try:
        drawn = render(value)
    except msgspec.ValidationError as error:
        cause = f"the run's answer is not of this version of myxa: {error}"
        raise LaunchError(cause, remedy="use the myxa that started the run, or --json") from error
    if isinstance(drawn, str):
        if drawn:
            print(drawn, flush=True)
        return
    draw(drawn)


def draw(drawn: RenderableType) -> None:
    """By rich. A pipe gets all columns: nothing is cut or wrapped there."""
    from rich.console import Console  # slow to import, and not needed for --json

    console = Console(highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PIPE_COLUMNS)
    console.print(drawn)


PIPE_COLUMNS = 200


def table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, right: Sequence[str] = ()) -> RenderableType:
    """A plain table; columns named in `right` are aligned to the right. Text is shown as it is, without markup."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in columns:
        drawn.add_column(name, justify="right" if name in right else "left", no_wrap=name == columns[0])
    for row in rows:
        drawn.add_row(*(Text("" if cell is None else str(cell)) for cell in row))
    return drawn


def note_of(options: argparse.Namespace, *, changes: bool = False) -> ControlNote:
    """Of the run that the command means. `changes`: the command changes the run. Raises LaunchError."""
    note = find_run(options.run_path, command=shlex.join(["myxa", *getattr(options, "words", ())]) if changes else "")
    say_first(f"run {Path(note.run_dir).name} in {note.run_dir}")
    return note


def client_or_folder(options: argparse.Namespace, *, changes: bool = False) -> ControlClient | Path:
    """The run's client; of a run that has ended its folder, whose files answer: the newest run here goes before a live
    one elsewhere. `changes`: see `note_of`. Raises LaunchError."""
    try:
        if options.run_path is None and (RUNS / "latest" / CONFIG).is_file():
            find_run(None, is_elsewhere_meant=False)
        return ControlClient(note_of(options, changes=changes))
    except LaunchError as error:
        folder = options.run_path if options.run_path is not None else RUNS / "latest"
        if not (folder / CONFIG).is_file() or isinstance(error, SeveralLiveRuns):
            raise
        folder = folder.resolve()
        say_first(f"run {folder.name} in {folder} is over: this is from its files")
        return folder


def folder_of(options: argparse.Namespace) -> Path:
    """The folder of the run that the command means, live or ended. Raises LaunchError."""
    run = client_or_folder(options)
    return run if isinstance(run, Path) else run.run_dir


Page = Callable[[Any], "RenderableType | str"]


def verb_command(
    verb: Verb[Any],
    page: Page,
    *flags: Flag,
    more: Callable[[argparse.Namespace], dict[str, Any]] | None = None,
    run: Callable[[argparse.Namespace], int] | None = None,
    from_files: Callable[[Path, argparse.Namespace], Any] | None = None,
    check: Callable[[argparse.Namespace, Any], int] | None = None,
    description: str = "",
) -> Command:
    """The command of a verb: asks it and shows the answer as `page`. `flags`: beside those of the verb's arguments,
    `more`: arguments made from these. `from_files`: the answer for a run that is over. `check`: exit status of an
    answer. `run`: instead of all that."""

    def ask_and_show(options: argparse.Namespace) -> int:
        instead = more(options) if more is not None else {}
        if from_files is None:
            answer = ask(options, verb, **instead)
        elif isinstance(run := client_or_folder(options, changes=verb.effect == "change"), Path):
            answer = from_files(run, options)
        else:
            answer = run.ask(verb.name, **arguments_of(options, verb, **instead))
        status = 0 if check is None else check(options, answer)
        show(options, answer, page)
        return status

    return Command(verb.name, verb.help, run or ask_and_show, (*flags, RUN, JSON), description, verb)


def ask(options: argparse.Namespace, verb: Verb[Any], **instead: Any) -> Any:
    """The run's answer to the verb, with the arguments that the command line gave. `instead`: of its own flags."""
    client = ControlClient(note_of(options, changes=verb.effect == "change"))
    return client.ask(verb.name, **arguments_of(options, verb, **instead))


def arguments_of(options: argparse.Namespace, verb: Verb[Any], **instead: Any) -> dict[str, Any]:
    values = {name: getattr(options, name) for name in argument_names(verb) if hasattr(options, name)}
    return values | instead
