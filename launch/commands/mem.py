"""`myxa mem`: who holds which device memory in a run that goes on."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .output import Verbs, add_run_flags, show
from .which_run import client_of


def add(verbs: Verbs) -> None:
    """The command and its flags."""
    mem = verbs.add_parser("mem", help="who holds which device memory in a run that goes on")
    mem.add_argument("folder", type=Path, nargs="?", metavar="RUN", help="the same as --run")
    add_run_flags(mem)
    mem.set_defaults(run=_mem)


def _mem(options: argparse.Namespace) -> int:
    options.run_path = options.run_path or options.folder
    view = client_of(options).ask("mem")
    show(options, view, _page)
    return 0


def _page(view: Any) -> str:
    import msgspec

    from ...core.device_memory import MemoryView
    from ..views.memory_view import memory_text

    return memory_text(msgspec.convert(view, MemoryView)).rstrip("\n")
