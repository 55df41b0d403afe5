"""`myxa fork`: a new run from a checkpoint of another one, which may live and is not changed."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.errors import ConfigError
from .output import Verbs, add_json_flag, show
from .resume import add_point_flags, is_on_several, start_again

if TYPE_CHECKING:
    from ...core.config import RunConfig


def add(verbs: Verbs) -> None:
    """The command and its flags."""
    parser = verbs.add_parser(
        "fork",
        help="a new run from a checkpoint of another one, which may live",
        description="Make a new run directory with a checkpoint of RUN, and go on from there. RUN stays as it is.",
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="run directory; the run may live")
    parser.add_argument("--name", default="", metavar="NAME", help="of the new run (that of RUN)")
    parser.add_argument(
        "--no-start", action="store_true", help="only make the directory; `myxa resume DIRECTORY` starts it"
    )
    add_point_flags(parser)
    add_json_flag(parser)
    parser.set_defaults(run=_fork)


def _fork(options: argparse.Namespace) -> int:
    from datetime import datetime

    from ..lives.fork_run import fork_run

    if is_on_several(options) and not options.no_start:
        raise ConfigError(
            "fork makes a directory, on one machine", remedy="--no-start, then `myxa resume DIRECTORY` on each machine"
        )
    run_dir = fork_run(
        options.run_dir, options.version, options.name, options.overrides, datetime.now(), _check_of(options)
    )
    if options.no_start:
        show(
            options,
            {"run_dir": str(run_dir)},
            lambda told: f"made {told['run_dir']}; start it: myxa resume {told['run_dir']}",
        )
        return 0
    options.version, options.overrides = None, []
    return start_again(run_dir, options)


def _check_of(options: argparse.Namespace) -> Callable[[RunConfig], None]:
    """What can be seen to be wrong before a directory is made: all, or only what does not depend on the machine."""
    from ..launcher import LaunchOptions
    from ..lives.origin import Origin
    from ..node_place import find_place
    from ..nodes.launch_options import check_own
    from ..preflight.preflight import RESUME_CHECKS, check_node
    from ..supervisor.placement import place

    def check(config: RunConfig) -> None:
        actors = place(config, 1)
        if options.no_start:
            check_node(config, actors, RESUME_CHECKS)
            return
        program = options.program or Origin.load(options.run_dir).program
        check_own(config, actors, LaunchOptions(place=find_place(1, 0, None, {}), program=program), 0)

    return check
