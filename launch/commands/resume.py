"""`myxa resume`: a run that rests goes on; one that is over, or died, goes on from a checkpoint, in its directory."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.errors import ConfigError, LaunchError
from ..control.client import ControlClient
from ..control.live_runs import CONFIG, RUNS, ControlNote, find_run
from ..run_dir import is_run_folder
from .launch import add_node_flags, options_of_node
from .output import Verbs, add_run_flags, show
from .pause import ASK_S
from .up import add_common_flags, chosen_by
from .which_run import note_of
from .whole import at_least

if TYPE_CHECKING:
    from ..lives.resume_point import ResumePoint
    from ..nodes.launch_options import LaunchOptions
    from ..run_dir import RunDir

FIRST_OF_SIGNALS = 128
"""Exit statuses from here on say that somebody ended it."""


def add(verbs: Verbs) -> None:
    """The command and its flags."""
    parser = verbs.add_parser(
        "resume",
        help="go on: after a pause, or a run that is over or died from its newest checkpoint",
        description="A run that lives goes on after a pause. One that is over, or died, is started again in its own "
        "directory from its newest whole checkpoint.",
    )
    parser.add_argument("run_dir", nargs="?", type=Path, metavar="RUN", help="run directory; the same as --run")
    parser.add_argument("-m", "--reason", default="", metavar="WHY",
                        help="your own words, for the audit log of a run that lives")  # fmt: skip
    add_point_flags(parser)
    add_run_flags(parser)
    parser.set_defaults(run=_resume)


def add_point_flags(parser: argparse.ArgumentParser) -> None:
    """From which checkpoint, and how the run is started."""
    parser.add_argument("--from", type=at_least(0), default=None, metavar="VERSION", dest="version",
                        help="of the checkpoint (the newest whole one)")  # fmt: skip
    add_common_flags(parser)
    add_node_flags(parser)


def _resume(options: argparse.Namespace) -> int:
    named: Path | None = options.run_dir or options.run_path
    if options.run_dir is not None and options.run_path not in (None, options.run_dir):
        raise ConfigError(f"which run, {options.run_dir} or {options.run_path}?", remedy="name one of them")
    if named is not None and (_is_another_node(options) or _is_over(named)):
        return start_again(named, options)
    note = find_run(named) if named is not None else _only_live_run(options)
    if options.overrides or options.version is not None:
        raise ConfigError(
            f"the run in {note.run_dir} lives: --from and --set are for one that is over",
            remedy="turn knobs with `myxa set`, or go on beside it with `myxa fork`, or end it first with `myxa down`",
        )
    answer = ControlClient(note).ask("resume", ASK_S, reason=options.reason)
    show(options, answer, lambda _: "the run goes on")
    return 0


def is_on_several(options: argparse.Namespace) -> bool:
    """Whether several machines are meant: their number or where they meet was said. What a scheduler has in the
    environment does not mean it: whoever has several machines may well go on with one of them."""
    return any(said is not None for said in (options.nnodes, options.node_rank, options.rdzv, options.rdzv_file))


def _is_another_node(options: argparse.Namespace) -> bool:
    """Whether this machine joins a run that node 0 starts again, and may have started by now."""
    return is_on_several(options) and options_of_node(options).place.rank > 0


def _is_over(named: Path) -> bool:
    """Whether a run directory has no launcher any more. A socket alone says little: one that was killed left it."""
    from ..run_dir import LOCK, RunDir

    if not is_run_folder(named):
        return False
    note = ControlNote.load(named)
    is_spoken_to = note is not None and note.is_live
    return not (RunDir(named).is_held if (named / LOCK).exists() else is_spoken_to)


def _only_live_run(options: argparse.Namespace) -> ControlNote:
    try:
        return note_of(options, changes=True)
    except LaunchError as error:
        newest = RUNS / "latest"
        if "goes on here" in error.message and (newest / CONFIG).is_file():
            where = RUNS / newest.resolve().name
            raise LaunchError(error.message, remedy=f"one that is over is named: myxa resume {where}") from error
        raise


def start_again(named: Path, options: argparse.Namespace) -> int:
    """A run that is over, from a checkpoint of it; returns the exit status that it ends with."""
    from ..lives.next_life import no_longer_alive
    from ..lives.resume_point import choose_point
    from ..node_place import find_place
    from ..nodes.launch_options import LaunchOptions
    from ..run_dir import RunDir

    several = is_on_several(options)
    base = options_of_node(options) if several else LaunchOptions(place=find_place(1, 0, None, {}))
    run_dir = RunDir(named.resolve())
    if base.place.rank:  # node 0 chooses, and makes the directory ready; checkpoint and ledger are its business
        return _launch(run_dir, None, options, base)
    with no_longer_alive(run_dir):
        # whoever names one means that one: it is known to be whole before what is newer is put away for it
        point = choose_point(run_dir.path, options.version, reads_all=options.version is not None)
        return _launch(run_dir, point, options, base)


def _launch(run_dir: RunDir, point: ResumePoint | None, options: argparse.Namespace, base: LaunchOptions) -> int:
    """`point` None: node 0 has it."""
    from dataclasses import replace

    from ...core.config import load_config
    from ...core.config.dumping import toml_value
    from ..launcher import launch
    from ..lives.next_life import begin_next_life, put_config_back
    from ..lives.origin import Origin
    from ..lives.start_files import config_of

    place = f"trainer.resume={toml_value(str(run_dir.path))}"  # the same on all nodes; node 0 says which checkpoint
    text, torn = config_of(run_dir.path)
    origin, lost = Origin.found(run_dir.path)
    for said in filter(None, (torn, lost)):
        print(said, flush=True)
    config = load_config(run_dir.config, [*options.overrides, place], text=text)
    if config.run.name != load_config(run_dir.config, [place], text=text).run.name:
        raise ConfigError("run.name: a run that goes on keeps its name", remedy="`myxa fork` makes another run of it")
    base = replace(base, program=origin.program)
    chosen = replace(chosen_by(options, base), run_dir=run_dir)
    if point is not None:
        for text in point.passed_over:
            print(f"passed over: {text}", flush=True)
        print(f"from version {point.version} of {run_dir.path}, with {point.ledger_words}", flush=True)
        chosen = replace(chosen, start=point.place, prepare=lambda: begin_next_life(run_dir, point, text))
    ending = launch(config, chosen)
    came_to_nothing = 0 < ending.exit_code < FIRST_OF_SIGNALS and point is not None and ending.version <= point.version
    if came_to_nothing and put_config_back(run_dir):
        print(f"{run_dir.config} is again what it was: nothing was trained with the new values", flush=True)
    return ending.exit_code
