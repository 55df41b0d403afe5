"""`myxa launch`: run on several machines, by the same command on each of them."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.errors import ConfigError
from .output import Verbs
from .up import PATIENCE, add_start_flags, chosen_by, seconds, start
from .whole import at_least

if TYPE_CHECKING:
    from ..launcher import LaunchOptions


def add(verbs: Verbs) -> None:
    """The command and its flags."""
    spread = verbs.add_parser(
        "launch",
        help="run on several machines: this command on each of them",
        description="Run on several machines: the same command on each. Flags that are left out come from torchrun's "
        "(PET_*) or Slurm's variables.",
    )
    add_start_flags(spread, files="*")
    add_node_flags(spread)
    _add_join_flags(spread)
    spread.set_defaults(run=_launch)


def add_node_flags(spread: argparse.ArgumentParser) -> None:
    """Which of several machines this is, and how they meet."""
    spread.add_argument("--nnodes", type=_num_nodes, metavar="N[:MAX]",
                        help="number of machines; N:MAX: others may come later, up to so many")  # fmt: skip
    spread.add_argument("--node-rank", type=at_least(0), metavar="R", help="number of this machine, from 0")
    spread.add_argument("--rdzv", metavar="HOST:PORT", help="where node 0 is met (on node 0: port 0 = any free port)")
    spread.add_argument("--rdzv-file", type=Path, metavar="FILE",
                        help="node 0 writes its HOST:PORT there, the others read it there")  # fmt: skip
    spread.add_argument("--rdzv-timeout", type=seconds, default=PATIENCE.gather_s, metavar="S",
                        help="seconds to wait for the other machines (%(default)g)")  # fmt: skip
    spread.add_argument("--lost-timeout", type=seconds, default=PATIENCE.lost_s, metavar="S",
                        help="seconds of silence after which another machine is lost (%(default)g)")  # fmt: skip
    spread.add_argument("--job-key", type=Path, metavar="FILE",
                        help="secret that lets machines join, the same on all; node 0 makes a missing one")  # fmt: skip


def _add_join_flags(spread: argparse.ArgumentParser) -> None:
    spread.add_argument("--join", nargs="?", const="", metavar="WHERE",
                        help="lend this machine to a run that goes on: its directory, HOST:PORT or --rdzv-file; "
                        "without a run file, that of the run is taken")  # fmt: skip
    spread.add_argument("--rollouts", type=at_least(0), default=0, metavar="K",
                        help="with --join: so many rollout actors here (roles.rollout.count)")  # fmt: skip
    spread.add_argument("--devices", default="", metavar="GPUS",
                        help="with --join: GPUs for them, e.g. 0-3 (roles.rollout.devices)")  # fmt: skip


def _num_nodes(text: str) -> tuple[int, int]:
    from ..node_place import parse_num_nodes

    try:
        return parse_num_nodes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _launch(options: argparse.Namespace) -> int:
    if options.join is not None:
        return _join(options)
    if not options.file:
        raise ConfigError("no run file is given", remedy="name one; only with --join that of the run is taken")
    if options.rollouts or options.devices:
        raise ConfigError("--rollouts and --devices are for --join", remedy="set roles.rollout in the run file")
    return start(options, options_of_node(options))


def options_of_node(options: argparse.Namespace) -> LaunchOptions:
    """What flags, torchrun or Slurm say of this machine. Raises ConfigError for what does not go together."""
    from ..launcher import LaunchOptions
    from ..node_place import find_place

    has_file = options.rdzv_file is not None
    place = find_place(options.nnodes, options.node_rank, options.rdzv, os.environ, has_file=has_file)
    return LaunchOptions(place=place, rdzv_file=options.rdzv_file, job_key=options.job_key)


def _join(options: argparse.Namespace) -> int:
    from ...core.config import load_config
    from ..contracts import LateWish
    from ..launcher import LaunchOptions, launch_late
    from ..nodes.late_meeting import find_meeting

    if options.nnodes is not None or options.node_rank is not None:
        raise ConfigError(
            "--join goes without --nnodes and --node-rank", remedy="the run gives this machine its number"
        )
    if options.join.endswith(".toml"):
        raise ConfigError(
            f"--join {options.join}: that is a run file, not where the run is met",
            remedy="name the run's directory, HOST:PORT or the rendezvous file; a run file goes before --join",
        )
    if options.rollouts < 0:
        raise ConfigError(f"--rollouts is {options.rollouts}", remedy="give a positive number, or leave it out")
    if options.overrides and not options.file:
        raise ConfigError("--set without a run file", remedy="leave it out: the run's own configuration is taken")
    met = find_meeting(options.join or options.rdzv or "", options.rdzv_file, options.job_key, os.environ)
    late = LateWish(num_rollouts=options.rollouts, devices=options.devices)
    base = LaunchOptions(place=met.place, rdzv_file=met.rdzv_file, job_key=met.job_key, late=late)
    config = load_config(options.file, options.overrides) if options.file else None
    return launch_late(config, chosen_by(options, base)).exit_code
