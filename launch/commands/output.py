"""What the commands have in common: which run they speak to, how a verb is asked, and how an answer is shown."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.errors import LaunchError
from ..control.client import CONFIG, RUNS, ControlClient, ControlNote, SeveralLiveRuns, find_run
from ..control.verbs import Verb, argument_names
from .parser import Command, Parser, add_arguments, add_run_flags

if TYPE_CHECKING:
    from rich.console import RenderableType


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
    drawn = render(value)
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


def client_of(options: argparse.Namespace, *, changes: bool = False, view: bool = False) -> ControlClient:
    """Of the run that the command means. `changes`: the command changes the run. Raises LaunchError."""
    return ControlClient(note_of(options, changes=changes), view=view)


def note_of(options: argparse.Namespace, *, changes: bool = False) -> ControlNote:
    """The run's own note; see `client_of`."""
    note = find_run(options.run_path, command=shlex.join(["myxa", *getattr(options, "words", ())]) if changes else "")
    say_first(f"run {Path(note.run_dir).name} in {note.run_dir}")
    return note


def client_or_folder(options: argparse.Namespace, *, view: bool = False) -> ControlClient | Path:
    """The run's client; of a run that has ended its folder, whose files answer. Raises LaunchError."""
    try:
        return client_of(options, view=view)
    except LaunchError as error:
        folder = options.run_path if options.run_path is not None else RUNS / "latest"
        if not (folder / CONFIG).is_file() or isinstance(error, SeveralLiveRuns):
            raise
        folder = folder.resolve()
        say_first(f"run {folder.name} in {folder} is over: this is from its files")
        return folder


def folder_of(options: argparse.Namespace) -> Path:
    """The folder of the run that the command means, live or ended. Raises LaunchError."""
    found = client_or_folder(options)
    return found if isinstance(found, Path) else found.run_dir


Page = Callable[[Any], "RenderableType | str"]


def verb_command(
    verb: Verb[Any],
    page: Page,
    *,
    add: Callable[[Parser], None] | None = None,
    more: Callable[[argparse.Namespace], dict[str, Any]] | None = None,
    run: Callable[[argparse.Namespace], int] | None = None,
    from_files: Callable[[Path, argparse.Namespace], Any] | None = None,
    check: Callable[[argparse.Namespace, Any], int] | None = None,
    description: str = "",
) -> Command:
    """The command of a verb: asks it and shows the answer as `page`. `add`: flags beside those of the verb's arguments,
    `more`: arguments made from these. `from_files`: the answer for a run that is over. `check`: exit status of an
    answer. `run`: instead of all that."""

    def add_flags(parser: Parser) -> None:
        add_arguments(parser, verb)
        if add is not None:
            add(parser)
        add_run_flags(parser)

    def ask_and_show(options: argparse.Namespace) -> int:
        if from_files is not None and isinstance(found := client_or_folder(options), Path):
            answer = from_files(found, options)
        else:
            answer = ask(options, verb, **(more(options) if more is not None else {}))
        status = 0 if check is None else check(options, answer)
        show(options, answer, page)
        return status

    return Command(verb.name, verb.help, run or ask_and_show, add_flags, description)


def ask(options: argparse.Namespace, verb: Verb[Any], **instead: Any) -> Any:
    """The run's answer to the verb, with the arguments that the command line gave. `instead`: of its own flags."""
    client = client_of(options, changes=verb.effect == "change")
    return client.ask(verb.name, **arguments_of(options, verb, **instead))


def arguments_of(options: argparse.Namespace, verb: Verb[Any], **instead: Any) -> dict[str, Any]:
    given = {name: getattr(options, name) for name in argument_names(verb) if hasattr(options, name)}
    return given | instead
