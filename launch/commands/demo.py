"""`myxa demo`: train a small model from nothing, in minutes, on the CPU."""

from __future__ import annotations

import argparse
from datetime import datetime
from pathlib import Path

from .output import Verbs
from .whole import at_least


def add(verbs: Verbs) -> None:
    """The command and its flags."""
    demo = verbs.add_parser("demo", help="train a small model from nothing, in minutes, on the CPU")
    demo.add_argument("--dir", type=Path, metavar="DIR", dest="folder", help="where everything goes (runs/demo-<time>)")
    demo.add_argument("--seed", type=int, default=0, metavar="N", help="seed of model, data and sampling (%(default)s)")
    demo.add_argument("--engines", type=at_least(1), default=1, metavar="N", help="rollout engines (%(default)s)")
    demo.add_argument("--ranks", type=at_least(1), default=1, metavar="N", help="trainer ranks (%(default)s)")
    demo.add_argument("--quiet", action="store_true", help="print only how the runs ended")
    demo.set_defaults(run=_demo)


def _demo(options: argparse.Namespace) -> int:
    from ..demo.run import DemoOptions, run_demo  # the demo builds models: torch

    return run_demo(
        DemoOptions(
            folder=options.folder or DemoOptions.default_folder(datetime.now()),
            seed=options.seed,
            engines=options.engines,
            ranks=options.ranks,
            is_quiet=options.quiet,
        )
    )
