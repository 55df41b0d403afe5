"""`myxa chaos`: make actors of a run fail on purpose, to see that the run outlives it. Only with `run.chaos = true`."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

from .output import Verbs, add_run_flags, show, table
from .stretch import stretch_s
from .which_run import client_of

if TYPE_CHECKING:
    from rich.console import RenderableType

ACTS = ("kill", "stop", "cont", "delay", "partition", "fill-disk", "random", "end", "points")


def add(verbs: Verbs) -> None:
    """The command and its flags."""
    chaos = verbs.add_parser(
        "chaos",
        help="make actors fail on purpose (runs with run.chaos = true)",
        description="Without ACT: what was made to fail so far. random: one fault every --every, drawn by --seed, "
        "until `myxa chaos end`.",
    )
    chaos.add_argument("act", nargs="?", choices=ACTS, metavar="ACT", help=", ".join(ACTS))
    chaos.add_argument("target", nargs="?", default="", metavar="TARGET", help="rollout/1, rollout, node:1, ...")
    chaos.add_argument("--for", type=stretch_s, default=2.0, metavar="T", dest="for_s",
                       help="how long: delay a process, partition connections, fill-disk the space (2s)")  # fmt: skip
    chaos.add_argument("--from", default="", metavar="OTHERS", dest="others",
                       help="of partition: 'launcher', or actors like TARGET (everybody)")  # fmt: skip
    chaos.add_argument("--mb", type=int, default=0, metavar="N", help="of fill-disk: MiB of the run's file system")
    chaos.add_argument("--every", type=stretch_s, default=10.0, metavar="T", dest="every_s", help="of random (10s)")
    chaos.add_argument("--seed", type=int, default=1, metavar="N", help="of random (%(default)s)")
    chaos.add_argument("--faults", default="kill", metavar="LIST",
                       help="of random: kill,stop,delay,partition (%(default)s)")  # fmt: skip
    chaos.add_argument("--targets", default="", metavar="LIST",
                       help="of random: patterns such as 'rollout/*,buffer' (those of the run file)")  # fmt: skip
    chaos.add_argument("-m", "--reason", default="", metavar="WHY", help="your own words, for the audit log")
    chaos.set_defaults(run=_chaos)
    add_run_flags(chaos)


def _chaos(options: argparse.Namespace) -> int:
    if options.act == "points":  # also where no run goes on: they are named in the run file
        from ...core.chaos import POINTS

        show(options, dict(POINTS), lambda told: table(("point", "what is true there"), [*told.items()]))
        return 0
    client = client_of(options, changes=options.act is not None)
    if options.act is None:
        show(options, client.ask("chaos-acts"), _page)
        return 0
    show(options, client.ask("chaos", **_arguments(options)), _done)
    return 0


def _arguments(options: argparse.Namespace) -> dict[str, Any]:
    """What the act at hand takes."""
    given: dict[str, Any] = {"act": options.act, "reason": options.reason}
    if options.act == "fill-disk":
        given |= {"size_mb": options.mb, "for_s": options.for_s}
    elif options.act == "random":
        given |= {"every_s": options.every_s, "seed": options.seed, "for_s": options.for_s}
        given |= {"faults": options.faults.split(","), "targets": [t for t in options.targets.split(",") if t]}
    elif options.act != "end":
        given |= {"target": options.target, "for_s": options.for_s}
    if options.act == "partition":
        given["others"] = options.others
    return given


def _done(told: dict[str, Any]) -> str:
    match told["act"]:
        case "random":
            return f"from now on, every {told['every_s']:g} s, seed {told['seed']}: {', '.join(told['targets'])}"
        case "end":
            return "no more random faults" if told["was_on"] else "there were no random faults"
        case "fill-disk":
            return f"{told['num_bytes']} bytes are taken, for {told['for_s']:g} s"
        case "partition":
            whom = ", ".join(told["others"]) or "everybody"
            return f"{', '.join(told['actors']) or 'nobody'} cut off from {whom}, for {told['for_s']:g} s"
        case act:
            return f"{act}: {', '.join(told['actors']) or 'nobody'}"


def _page(told: dict[str, Any]) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    rows = [(act["wall_s"], act["fault"], ", ".join(act["actors"]), act["detail"]) for act in told["acts"]]
    rows += [(mark["wall_s"], mark["strike"], mark["actor"], "") for mark in told["struck"]]
    shown = [(time.strftime("%H:%M:%S", time.localtime(at)), *rest) for at, *rest in sorted(rows)]
    parts: list[RenderableType] = [Text("this run may be made to fail" if told["may_fail"] else "run.chaos = false")]
    if told["has_series"]:
        parts.append(Text("random faults go on; `myxa chaos end` ends them"))
    if shown:
        parts.append(table(("at", "fault", "actor", "detail"), shown))
    if waiting := told["planned"][len(told["struck"]) :]:
        parts.append(Text(f"still to come: {', '.join(waiting)}"))
    return Group(*parts)
