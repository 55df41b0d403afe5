"""Start, end and change of runs: `up`, `launch`, `demo`, `init`, `resume`, `fork`, `pause`, `step` and others."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.errors import ConfigError, LaunchError
from ...core.timeouts import TIMEOUTS
from .. import verbs
from ..control.client import RUNS, ControlClient, ControlNote, NoLiveRun, find_run
from ..run_dir import CONFIG, RunDir, is_run_folder
from ..waiting import Waiting
from .parser import (
    FILE_WORDS,
    JSON,
    SET,
    Command,
    Flag,
    ask,
    at_least,
    command,
    flag,
    note_of,
    positive,
    show,
    table,
    verb_command,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ...core.config import RunConfig
    from ..launcher import LaunchOptions
    from ..node_place import NodePlace
    from ..run_lineage.resume_point import ResumePoint


PATIENCE = TIMEOUTS.launcher


def timeout(name: str, field: str, purpose: str) -> Flag:
    """Sets that field of the launcher's timeouts."""
    return flag(f"--{name}-timeout", dest=field, type=positive("seconds"), default=getattr(PATIENCE, field),
                metavar="S", help=f"seconds {purpose} (%(default)g)")  # fmt: skip


def _num_nodes(text: str) -> tuple[int, int]:
    from ..node_place import parse_num_nodes

    try:
        return parse_num_nodes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


START = (
    SET,
    flag("--program", default="", metavar="MODULE:FUNCTION",
         help="your own composition root: (ActorSpec, RunConfig, run directory) -> Actor"),
    flag("--quiet", action="store_true", help="print only how the run ended"),
    timeout("start", "start_s", "an actor may take to start"),
    timeout("finish", "finish_s", "for a clean end after Ctrl-C or SIGTERM"),
    timeout("stop", "end_s", "a process may take to end before it is killed"),
)  # fmt: skip
NODES = (
    flag("--nnodes", type=_num_nodes, metavar="N[:MAX]",
         help="number of machines; N:MAX: others may come later, up to so many"),
    flag("--node-rank", type=at_least(0), metavar="R", help="number of this machine, from 0"),
    flag("--rdzv", metavar="HOST:PORT", help="where node 0 is met (on node 0: port 0 = any free port)"),
    flag("--rdzv-file", type=Path, metavar="FILE", help="node 0 writes its HOST:PORT there, the others read it there"),
    timeout("rdzv", "gather_s", "to wait for another machine that says nothing new"),
    timeout("lost", "lost_s", "of silence after which another machine is lost"),
    flag("--job-key", type=Path, metavar="FILE",
         help="secret that lets machines join, the same on all; node 0 makes a missing one"),
)  # fmt: skip
POINT = (
    flag("--from", type=at_least(0), default=None, metavar="VERSION", dest="version",
         help="version of the checkpoint to begin at (of the newest whole one)"), *START, *NODES,
)  # fmt: skip
"""Of a run that begins at a checkpoint."""


def launch_options(
    options: argparse.Namespace, place: NodePlace | None, *, program: str = "", **more: Any
) -> LaunchOptions:
    """What the flags say of how to launch. `program`: where they do not name one; `more`: fields."""
    from ..launcher import LaunchOptions
    from ..node_place import ALONE
    from ..worker_spec import DEFAULT_PROGRAM

    timeouts = replace(PATIENCE, **{name: value for name, value in vars(options).items() if hasattr(PATIENCE, name)})
    program = options.program or program or DEFAULT_PROGRAM
    return LaunchOptions(place or ALONE, program=program, is_quiet=options.quiet, timeouts=timeouts, **more)


def start(options: argparse.Namespace, place: NodePlace | None = None) -> int:
    """This machine's part of a run: that of node 0, which reads the run file, or what it lends to node 0."""
    config, is_first = None, place is None or place.rank == 0
    if is_first and not options.file:
        raise ConfigError("no run file is given", remedy="name one; only node 0 needs it")
    with Waiting("reading the run file", sys.stdout, is_quiet=options.quiet or not is_first):
        from ...core.config import load_config
        from ..launcher import launch
        from ..node_place import check_is_one

        if place is None:
            env = os.environ if "TORCHELASTIC_RUN_ID" in os.environ else {**os.environ, "WORLD_SIZE": ""}
            check_is_one(env, remedy="`myxa up` starts all processes of this machine: start it once (srun --ntasks=1)")
        if is_first:
            config = load_config(options.file, options.overrides)
    return launch(config, launch_options(options, place)).exit_code


UP = Command(
    "up", "run on this machine", start, (flag("file", nargs="+", **FILE_WORDS), *START),
    "Run everything on this machine.",
)  # fmt: skip


@command(
    "launch", "run on several machines: this command on each of them", flag("file", nargs="*", **FILE_WORDS),
    *START, *NODES,
    flag("--join", metavar="WHERE", help="lend this machine to a live run: directory, HOST:PORT or file with that"),
    description="Run on several machines: the same command on each. Flags that are left out come from torchrun's "
    "(PET_*) or Slurm's variables.",
)  # fmt: skip
def on_several(options: argparse.Namespace) -> int:
    return start(options, place_of(options) if options.join is None else _late_place_of(options))


def place_of(options: argparse.Namespace) -> NodePlace:
    """What flags, torchrun or Slurm say of this machine. Raises ConfigError for what does not go together."""
    from ..node_place import find_place

    has_file = options.rdzv_file is not None
    place = find_place(options.nnodes, options.node_rank, options.rdzv, os.environ, has_file=has_file)
    return replace(place, file=options.rdzv_file, job_key=options.job_key)


def _late_place_of(options: argparse.Namespace) -> NodePlace:
    from ..nodes.rendezvous import find_late_rendezvous

    if is_on_several(options):
        raise ConfigError(
            "--join goes without --nnodes, --node-rank, --rdzv and --rdzv-file",
            remedy="name in it where the run is met; the run gives this machine its number",
        )
    if options.join.endswith(".toml"):
        raise ConfigError(
            f"--join {options.join}: that is a run file, not where the run is met",
            remedy="name the run's directory, HOST:PORT or the rendezvous file",
        )
    return find_late_rendezvous(options.join, options.job_key)


@command(
    "demo", "train a small model from nothing, in minutes, on the CPU",
    flag("--dir", type=Path, metavar="DIR", dest="folder", help="where everything goes (runs/demo-<time>)"),
    flag("--seed", type=at_least(0), default=0, metavar="N", help="seed of model, data and sampling (%(default)s)"),
    flag("--engines", type=at_least(1), default=1, metavar="N", help="rollout engines (%(default)s)"),
    flag("--ranks", type=at_least(1), default=1, metavar="N", help="trainer ranks (%(default)s)"),
    flag("--quiet", action="store_true", help="print only how the runs ended"),
)  # fmt: skip
def demo(options: argparse.Namespace) -> int:
    from ..demo.run import DemoOptions, run_demo  # the demo builds models: torch

    folder = options.folder or Path("runs") / f"demo-{datetime.now().strftime('%Y%m%d-%H%M%S')}"
    return run_demo(DemoOptions(folder, options.seed, options.engines, options.ranks, options.quiet))


@command(
    "init", "write a task of your own: reward, rows, run file",
    flag("folder", nargs="?", type=Path, default=Path("my-task"), metavar="FOLDER",
         help="folder to make (%(default)s)"),
    flag("--model", default="", help="folder or hub id of the model to train (a small one is made)"),
    description="Write a small task that learns at once, to be changed: my_task.py with reward and rows, run.toml, a "
    "model.",
)  # fmt: skip
def init(options: argparse.Namespace) -> int:
    print(f"writing a task into {options.folder}", flush=True)
    with Waiting(
        "looking at the model" if options.model else "loading what makes a small model", sys.stdout
    ) as waiting:
        from ..demo.run import begin_task

        return begin_task(options.folder, options.model, waiting.now)


FIRST_OF_SIGNALS = 128
"""Exit statuses from here on name the signal that ended the run."""


def _resume(options: argparse.Namespace) -> int:
    folder: Path | None = options.run_dir or options.run_path
    if options.run_dir is not None and options.run_path not in (None, options.run_dir):
        raise ConfigError(f"which run, {options.run_dir} or {options.run_path}?", remedy="name one of them")
    if is_on_several(options) and (place := place_of(options)).rank:
        return start(options, place)  # node 0 chooses, and makes the directory ready; it may have started by now
    if folder is not None and is_run_folder(folder) and not RunDir(folder).is_held:
        return start_again(folder, options)
    note = find_run(folder) if folder is not None else _only_live_run(options)
    if options.overrides or options.version is not None:
        raise ConfigError(
            f"the run in {note.run_dir} is live: --from and --set are for one that has ended",
            remedy="turn knobs with `myxa set`, or start a copy with `myxa fork`, or end it first with `myxa down`",
        )
    answer = ControlClient(note).ask("resume", reason=options.reason)
    show(options, answer, lambda _: "the run continues")
    return 0


def is_on_several(options: argparse.Namespace) -> bool:
    """Whether several machines are meant: the command line gives their number or their rendezvous. Variables of a
    scheduler do not count: a run of several machines may be resumed on one of them."""
    flags = options.nnodes, options.node_rank, options.rdzv, options.rdzv_file
    return any(value is not None for value in flags)


def _only_live_run(options: argparse.Namespace) -> ControlNote:
    try:
        return note_of(options, changes=True)
    except NoLiveRun as error:
        newest = RUNS / "latest"
        if (newest / CONFIG).is_file():
            remedy = f"one that is over is named: myxa resume {RUNS / newest.resolve().name}"
            raise LaunchError(error.message, remedy=remedy) from error
        raise


def start_again(folder: Path, options: argparse.Namespace) -> int:
    """A run that is over, from a checkpoint of it; returns the exit status that it ends with."""
    from ..run_lineage.next_run import no_longer_alive
    from ..run_lineage.resume_point import choose_point

    place = place_of(options) if is_on_several(options) else None
    run_dir = RunDir(folder.resolve())
    with no_longer_alive(run_dir):
        with Waiting("checking checkpoints", sys.stdout, is_quiet=options.quiet):
            # one that was named is verified in full before newer ones are put away for it
            point = choose_point(run_dir.path, options.version, reads_all=options.version is not None)
        return _resume_launch(run_dir, point, options, place)


def _resume_launch(run_dir: RunDir, point: ResumePoint, options: argparse.Namespace, place: NodePlace | None) -> int:
    from ...core.config import load_config
    from ...core.config.loading import toml_value
    from ..launcher import launch
    from ..run_lineage.next_run import begin_next_life, put_config_back
    from ..run_lineage.origin import RunOrigin, config_of

    start = f"trainer.resume={toml_value(str(point.place))}"
    text, torn = config_of(run_dir.path)
    origin, lost = RunOrigin.found(run_dir.path)
    config = load_config(run_dir.config, [*options.overrides, start], text=text)
    if config.run.name != load_config(run_dir.config, [start], text=text).run.name:
        raise ConfigError("run.name: a resumed run keeps its name", remedy="`myxa fork` makes another run of it")
    for line in (torn, lost, *(f"passed over: {checkpoint}" for checkpoint in point.passed_over)):
        print(line, end="\n" if line else "", flush=True)
    print(f"from version {point.version} of {run_dir.path}, with {point.ledger_words}", flush=True)
    prepare = partial(begin_next_life, run_dir, point, text)
    how = launch_options(options, place, program=origin.program, run_dir=run_dir, prepare=prepare)
    ending = launch(config, how)
    came_to_nothing = 0 < ending.exit_code < FIRST_OF_SIGNALS and ending.version <= point.version
    if came_to_nothing and put_config_back(run_dir):
        print(f"{run_dir.config} is again what it was: nothing was trained with the new values", flush=True)
    return ending.exit_code


@command(
    "fork", "a new run from a checkpoint of another one, which may live",
    flag("run_dir", type=Path, metavar="RUN", help="run directory; the run may live"),
    flag("--name", default="", metavar="NAME", help="name of the new run (that of RUN)"),
    flag("--no-start", action="store_true", help="only make the directory; `myxa resume DIRECTORY` starts it"),
    *POINT, JSON,
    description="Make a new run directory with a checkpoint of RUN, and continue from there. RUN stays as it is.",
)  # fmt: skip
def fork(options: argparse.Namespace) -> int:
    from ..run_lineage.next_run import fork_run

    if is_on_several(options) and not options.no_start:
        raise ConfigError(
            "fork makes a directory, on one machine", remedy="--no-start, then `myxa resume DIRECTORY` on each machine"
        )
    with Waiting("checking the checkpoint and what the new run needs", is_quiet=options.quiet):
        run_dir = fork_run(
            options.run_dir, options.version, options.name, options.overrides, datetime.now(), _check_of(options)
        )
    if options.no_start:
        show(options, {"run_dir": str(run_dir)}, lambda _: f"made {run_dir}; start it: myxa resume {run_dir}")
        return 0
    options.version, options.overrides = None, []
    return start_again(run_dir, options)


def _check_of(options: argparse.Namespace) -> Callable[[RunConfig], None]:
    """What can be seen to be wrong before a directory is made: all, or only what does not depend on the machine."""
    from ..checks.all_checks import RESUME_CHECKS, check_node
    from ..launcher import check_own
    from ..run_lineage.origin import RunOrigin
    from ..supervisor.placement import place

    def check(config: RunConfig) -> None:
        actors = place(config, 1)
        if options.no_start:
            check_node(config, actors, checks=RESUME_CHECKS)
            return
        program = options.program or RunOrigin.load(options.run_dir).program
        check_own(config, actors, program, 0)

    return check


def _ckpt(options: argparse.Namespace) -> int:
    if options.is_list:
        from ..run_lineage.resume_point import checkpoints_of

        with Waiting("reading checkpoints"):
            rows = checkpoints_of(options.run_path or Path(note_of(options).run_dir))
        show(options, rows, _ckpt_page)
        return 0
    show(options, ask(options, verbs.CKPT), lambda facts: facts["folder"])
    return 0


def _ckpt_page(rows: list[dict[str, Any]]) -> RenderableType:
    cells = [(row["version"], row["folder"], row["stays"], row["problem"] or row["lacks"] or "whole") for row in rows]
    return table(("version", "folder", "stays", "it is"), cells, right=("version",))


def _eval_page(facts: dict[str, float]) -> str:
    lines = [f"  {key.removeprefix('eval/')} {value:.4g}" for key, value in facts.items() if key != "eval_reward"]
    return "\n".join([f"held-out reward {facts['eval_reward']:.4g}", *lines])


RESUME = replace(
    verb_command(
        verbs.RESUME, str,
        flag("run_dir", nargs="?", type=Path, metavar="RUN", help="run directory; the same as --run"), *POINT,
        run=_resume, description="Continues a live run after a pause. A run that has ended, or died, is started again "
        "in its own directory from its newest whole checkpoint.",
    ),
    help="continue a paused run, or restart an ended or dead one from its newest checkpoint",
)  # fmt: skip
COMMANDS = (
    verb_command(verbs.PAUSE, lambda facts: f"paused: the trainer rests at version {facts['rests_at']}"),
    verb_command(verbs.STEP, lambda reply: f"the run continues to version {reply['pauses_at']}, then pauses"),
    RESUME,
    fork,
    verb_command(
        verbs.CKPT, str,
        flag("--list", action="store_true", dest="is_list",
             help="write none; check every byte of those that are there (also when it is over)"), run=_ckpt,
    ),
    verb_command(verbs.EVAL, _eval_page),
    verb_command(verbs.DOWN, lambda facts: f"the run ends: {facts['ending']}"),
)  # fmt: skip
