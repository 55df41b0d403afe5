"""`myxa plan`: what a run file comes to, and everything that is wrong with it, without starting anything."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from .output import Verbs, add_json_flag, show

if TYPE_CHECKING:
    from rich.text import Text


def add(verbs: Verbs) -> None:
    """The command and its flags."""
    plan = verbs.add_parser(
        "plan",
        help="what a run file comes to, and all that is wrong with it; starts nothing",
        description="Placement, memory of each device, batch, staleness, disk, commands: without a GPU, without "
        "starting anything. Exit status 2 if the run could not start.",
    )
    plan.add_argument("file", nargs="+", metavar="RUN.TOML", help="run file; of several, later ones win key by key")
    plan.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="overrides",
                      help="overrule a value of the file; may be repeated")  # fmt: skip
    plan.add_argument("--nnodes", type=_positive, default=1, metavar="N", help="number of machines (%(default)s)")
    plan.add_argument("--device-gib", type=_gib, default=0.0, metavar="GIB",
                      help="memory of one GPU (what NVML says, where there is one)")  # fmt: skip
    plan.add_argument("--elsewhere", action="store_true",
                      help="the run will be started on another machine: do not look at this one's packages, "
                      "interpreters, devices, ports and disk")  # fmt: skip
    plan.add_argument("--brief", action="store_true", help="leave commands, ports and files out")
    add_json_flag(plan)
    plan.set_defaults(run=_plan)


def _positive(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 4096:
        raise argparse.ArgumentTypeError(f"{text} is not a number of machines")
    return int(text)


def _gib(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text} is not a size in GiB")
    return value


def _plan(options: argparse.Namespace) -> int:
    from ..plan.plan_page import plan_json, plan_text
    from ..plan.run_plan import PlanOptions, make_plan

    plan = make_plan(
        PlanOptions(
            files=tuple(options.file),
            overrides=tuple(options.overrides),
            num_nodes=options.nnodes,
            device_gib=options.device_gib,
            is_this_machine=not options.elsewhere,
        )
    )

    def page(value: Any) -> Text | str:
        text = plan_text(plan, shows_commands=not options.brief)
        return _coloured(text) if sys.stdout.isatty() else text

    show(options, plan_json(plan), page)
    return 2 if plan.errors else 0


def _coloured(text: str) -> Text:
    from rich.text import Text

    from ..plan.plan_page import styled_lines

    return Text("\n").join(Text(line, style=style) for line, style in styled_lines(text))
