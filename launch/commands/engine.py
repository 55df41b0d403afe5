"""`myxa engine serve`: a rollout engine by itself."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, cast

from .output import Verbs
from .parser import Parser

if TYPE_CHECKING:
    from ...actors.engines.http_server import Served


def add(verbs: Verbs) -> None:
    """The command, its sub-command and flags."""
    engine = cast(Parser, verbs.add_parser("engine", help="rollout engines by themselves"))
    serve = engine.add_commands().add_parser("serve", help="serve a model folder over HTTP, with SGLang's routes")
    serve.add_argument("folder", type=Path, metavar="DIR", help="HuggingFace model folder")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    serve.add_argument("--port", type=port, default=30000, help="port to listen on, 0 = any (%(default)s)")
    serve.set_defaults(run=_serve)


def port(text: str) -> int:
    """A port; 0 means any free one."""
    value = int(text)
    if not 0 <= value < 65536:
        raise argparse.ArgumentTypeError(f"{text} is not a port: ports are 0 to 65535")
    return value


def _serve(options: argparse.Namespace) -> int:
    import asyncio

    from ..preflight.port import check_port

    check_port("--port", options.host, options.port, "choose another one, or 0 for any free one")
    from ...actors.engines.http_server import serve_engine  # the engine needs torch

    def ready(served: Served) -> None:
        print(f"serving {options.folder} at {served.url}", flush=True)

    asyncio.run(serve_engine(options.folder, options.host, options.port, on_ready=ready))
    return 0
