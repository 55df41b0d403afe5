"""The command `myxa`: reads flags, calls one function per verb, turns errors into exit statuses.

0 done   1 failed   2 configuration   3 nodes did not meet   4 restart budget spent   5 data or reward   130 Ctrl-C
"""

from __future__ import annotations

import argparse
import asyncio
import difflib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from .. import __version__
from ..core.config import load_config
from ..core.errors import ConfigError, MyxaError
from .convert import add_convert
from .launcher import LaunchOptions, launch
from .node_place import find_place
from .port import check_port
from .run_supervisor import Patience
from .worker_spec import DEFAULT_PROGRAM

Verb = Callable[[argparse.Namespace], int]

INTERRUPTED = 130
PATIENCE = Patience()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = make_parser()
    mistaken = _mistaken_verb(arguments)
    if mistaken:
        print(f"myxa: {mistaken}", file=sys.stderr)
        return ConfigError.exit_code
    options = parser.parse_args(arguments)
    try:
        return options.run(options)
    except MyxaError as error:
        print(f"myxa: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED


def make_parser() -> argparse.ArgumentParser:
    """All verbs and flags."""
    parser = argparse.ArgumentParser(
        prog="myxa",
        description="Reinforcement learning for language models: trainer and rollout engines at the same time.",
        epilog="exit status: 0 done, 1 failed, 2 configuration, 3 nodes did not meet, 4 restart budget spent, "
        "5 data or reward, 130 Ctrl-C",
    )
    parser.add_argument("--version", action="version", version=f"myxa {__version__}")
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    up = verbs.add_parser("up", help="run on this machine", description="Run everything on this machine.")
    _add_run_flags(up)
    up.set_defaults(run=_up)
    spread = verbs.add_parser(
        "launch",
        help="run on several machines: this command on each of them",
        description="Run on several machines: the same command on each. Flags that are left out come from torchrun's "
        "(PET_*) or Slurm's variables.",
    )
    _add_run_flags(spread)
    _add_node_flags(spread)
    spread.set_defaults(run=_launch)
    _add_other_verbs(verbs)
    return parser


def _add_run_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="+", metavar="RUN.TOML", help="run file; of several, later ones win key by key")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="overrides",
                        help="overrule a value of the file; may be repeated")  # fmt: skip
    parser.add_argument("--program", default=DEFAULT_PROGRAM, metavar="MODULE:FUNCTION",
                        help="your own composition root: (ActorSpec, RunConfig, run directory) -> Actor")  # fmt: skip
    parser.add_argument("--quiet", action="store_true", help="print only how the run ended")
    parser.add_argument("--start-timeout", type=_seconds, default=PATIENCE.start_s, metavar="S",
                        help="seconds an actor may take to start (%(default)g)")  # fmt: skip
    parser.add_argument("--finish-timeout", type=_seconds, default=PATIENCE.finish_s, metavar="S",
                        help="seconds to end in good order after Ctrl-C or SIGTERM (%(default)g)")  # fmt: skip
    parser.add_argument("--stop-timeout", type=_seconds, default=PATIENCE.end_s, metavar="S",
                        help="seconds a process may take to end before it is killed (%(default)g)")  # fmt: skip


def _add_node_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nnodes", type=int, metavar="N", help="number of machines")
    parser.add_argument("--node-rank", type=int, metavar="R", help="number of this machine, from 0")
    parser.add_argument("--rdzv", metavar="HOST:PORT", help="where node 0 is met (on node 0: port 0 = any free port)")
    parser.add_argument("--rdzv-file", type=Path, metavar="FILE",
                        help="node 0 writes its HOST:PORT there, the others read it there")  # fmt: skip
    parser.add_argument("--rdzv-timeout", type=_seconds, default=PATIENCE.gather_s, metavar="S",
                        help="seconds to wait for the other machines (%(default)g)")  # fmt: skip
    parser.add_argument("--lost-timeout", type=_seconds, default=PATIENCE.lost_s, metavar="S",
                        help="seconds of silence after which another machine is lost (%(default)g)")  # fmt: skip
    parser.add_argument("--job-key", type=Path, metavar="FILE",
                        help="secret that lets machines join, the same on all; node 0 makes a missing one")  # fmt: skip


def _add_other_verbs(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage] - argparse has no public name for it
    demo = verbs.add_parser("demo", help="train a small model from nothing, in minutes, on the CPU")
    demo.add_argument("--dir", type=Path, metavar="DIR", dest="folder", help="where everything goes (runs/demo-<time>)")
    demo.add_argument("--seed", type=int, default=0, metavar="N", help="seed of model, data and sampling (%(default)s)")
    demo.add_argument("--engines", type=int, default=1, metavar="N", help="rollout engines (%(default)s)")
    demo.add_argument("--ranks", type=int, default=1, metavar="N", help="trainer ranks (%(default)s)")
    demo.add_argument("--quiet", action="store_true", help="print only how the runs ended")
    demo.set_defaults(run=_demo)
    report = verbs.add_parser("report", help="write report.html of a run")
    report.add_argument("folder", type=Path, metavar="RUN", help="run directory, e.g. runs/latest")
    report.set_defaults(run=_report)
    add_convert(verbs)
    mem = verbs.add_parser("mem", help="who holds which device memory in a run that goes on")
    mem.add_argument(
        "folder", type=Path, nargs="?", metavar="RUN", help="run directory (the only run of runs/ that goes on)"
    )
    mem.add_argument("--json", action="store_true", help="the same for programs")
    mem.set_defaults(run=_mem)
    engine = verbs.add_parser("engine", help="rollout engines by themselves")
    engine_verbs = engine.add_subparsers(title="commands", metavar="COMMAND", required=True)
    serve = engine_verbs.add_parser("serve", help="serve a model folder over HTTP, with SGLang's routes")
    serve.add_argument("folder", type=Path, metavar="DIR", help="HuggingFace model folder")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    serve.add_argument("--port", type=_port, default=30000, help="port to listen on, 0 = any (%(default)s)")
    serve.set_defaults(run=_serve_engine)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds")
    return value


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value < 65536:
        raise argparse.ArgumentTypeError(f"{text} is not a port: ports are 0 to 65535")
    return value


def _mistaken_verb(arguments: Sequence[str]) -> str:
    """A sentence about a verb that does not exist, or nothing. argparse itself only lists what exists."""
    verbs: dict[str, tuple[str, ...]] = {
        "": ("up", "launch", "demo", "report", "mem", "convert", "engine"),
        "engine": ("serve",),
    }
    above = ""
    for word in arguments:
        if word.startswith("-") or above not in verbs:
            return ""
        if word not in verbs[above]:
            close = difflib.get_close_matches(word, verbs[above], n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(verbs[above])}"
            return f"{' '.join(filter(None, (above, word)))!r} is no command -- {hint}"
        above = word
    return ""


def _up(options: argparse.Namespace) -> int:
    return _run(options, LaunchOptions(place=find_place(1, 0, None, {})))


def _launch(options: argparse.Namespace) -> int:
    has_file = options.rdzv_file is not None
    place = find_place(options.nnodes, options.node_rank, options.rdzv, os.environ, has_file=has_file)
    return _run(options, LaunchOptions(place=place, rdzv_file=options.rdzv_file, job_key=options.job_key))


def _run(options: argparse.Namespace, base: LaunchOptions) -> int:
    config = load_config(options.file, options.overrides)
    patience = Patience(
        gather_s=getattr(options, "rdzv_timeout", PATIENCE.gather_s),
        start_s=options.start_timeout,
        finish_s=options.finish_timeout,
        end_s=options.stop_timeout,
        lost_s=getattr(options, "lost_timeout", PATIENCE.lost_s),
    )
    chosen = replace(base, program=options.program, is_quiet=options.quiet, patience=patience)
    return launch(config, chosen).exit_code


def _demo(options: argparse.Namespace) -> int:
    from .demo.run import DemoOptions, run_demo  # the demo builds models: torch

    return run_demo(
        DemoOptions(
            folder=options.folder or DemoOptions.default_folder(datetime.now()),
            seed=options.seed,
            engines=options.engines,
            ranks=options.ranks,
            is_quiet=options.quiet,
        )
    )


def _mem(options: argparse.Namespace) -> int:
    from .mem_command import memory_page  # the node is needed here only

    print(asyncio.run(memory_page(options.folder, as_json=options.json)), end="")
    return 0


def _report(options: argparse.Namespace) -> int:
    from .views.report import write_report  # templates are needed here only

    print(write_report(options.folder))
    return 0


def _serve_engine(options: argparse.Namespace) -> int:
    check_port("--port", options.host, options.port, "choose another one, or 0 for any free one")
    from ..actors.engines.http_server import Served, serve_engine  # the engine needs torch

    def ready(served: Served) -> None:
        print(f"serving {options.folder} at {served.url}", flush=True)

    asyncio.run(serve_engine(options.folder, options.host, options.port, on_ready=ready))
    return 0
