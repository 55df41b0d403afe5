"""`myxa up`: run everything on this machine. Also the flags that it has in common with `myxa launch`."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from ..supervisor.patience import Patience
from .output import Verbs

if TYPE_CHECKING:
    from ..launcher import LaunchOptions

PATIENCE = Patience()


def add(verbs: Verbs) -> None:
    """The command and its flags."""
    up = verbs.add_parser("up", help="run on this machine", description="Run everything on this machine.")
    add_start_flags(up)
    up.set_defaults(run=_up)


def add_start_flags(parser: argparse.ArgumentParser, files: str = "+") -> None:
    """The run file, and how the run is started. `files`: how many there must be, as argparse says it."""
    parser.add_argument("file", nargs=files, metavar="RUN.TOML", help="run file; of several, later ones win key by key")
    add_common_flags(parser)


def add_common_flags(parser: argparse.ArgumentParser) -> None:
    """How a run is started, whatever is known of it."""
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="overrides",
                        help="overrule a value of the file; may be repeated")  # fmt: skip
    parser.add_argument("--program", default="", metavar="MODULE:FUNCTION",
                        help="your own composition root: (ActorSpec, RunConfig, run directory) -> Actor")  # fmt: skip
    parser.add_argument("--quiet", action="store_true", help="print only how the run ended")
    parser.add_argument("--start-timeout", type=seconds, default=PATIENCE.start_s, metavar="S",
                        help="seconds an actor may take to start (%(default)g)")  # fmt: skip
    parser.add_argument("--finish-timeout", type=seconds, default=PATIENCE.finish_s, metavar="S",
                        help="seconds to end in good order after Ctrl-C or SIGTERM (%(default)g)")  # fmt: skip
    parser.add_argument("--stop-timeout", type=seconds, default=PATIENCE.end_s, metavar="S",
                        help="seconds a process may take to end before it is killed (%(default)g)")  # fmt: skip


def seconds(text: str) -> float:
    """A positive number of seconds."""
    value = float(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds")
    return value


def start(options: argparse.Namespace, base: LaunchOptions) -> int:
    """Read the run file and run this node's part to its end."""
    from ...core.config import load_config
    from ..launcher import launch

    config = load_config(options.file, options.overrides)
    return launch(config, chosen_by(options, base)).exit_code


def chosen_by(options: argparse.Namespace, base: LaunchOptions) -> LaunchOptions:
    """What the flags say of how to launch; the rest as in `base`."""
    patience = Patience(
        gather_s=getattr(options, "rdzv_timeout", PATIENCE.gather_s),
        start_s=options.start_timeout,
        finish_s=options.finish_timeout,
        end_s=options.stop_timeout,
        lost_s=getattr(options, "lost_timeout", PATIENCE.lost_s),
    )
    return replace(base, program=options.program or base.program, is_quiet=options.quiet, patience=patience)


def _up(options: argparse.Namespace) -> int:
    from ..launcher import LaunchOptions
    from ..node_place import find_place

    return start(options, LaunchOptions(place=find_place(1, 0, None, {})))
