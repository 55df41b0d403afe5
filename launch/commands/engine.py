"""`myxa engine serve`: a rollout engine by itself."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ...core.errors import ConfigError
from ...core.file_entry import read_regular
from ...transport.descriptors import raise_limit
from .output import Verbs
from .parser import Parser

if TYPE_CHECKING:
    from ...actors.engines.http_server import Served

MAX_KEY_BYTES = 4096


def add(verbs: Verbs) -> None:
    """The command, its sub-command and flags."""
    engine = cast(Parser, verbs.add_parser("engine", help="rollout engines by themselves"))
    serve = engine.add_commands().add_parser("serve", help="serve a model folder over HTTP, with SGLang's routes")
    serve.add_argument("folder", type=Path, metavar="DIR", help="HuggingFace model folder")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    serve.add_argument("--port", type=port, default=30000, help="port to listen on, 0 = any (%(default)s)")
    serve.add_argument("--key-env", default="", metavar="NAME", help="variable that holds the key to ask for")
    serve.add_argument("--key-file", type=Path, metavar="FILE", help="file that holds the key to ask for")
    serve.set_defaults(run=_serve)


def port(text: str) -> int:
    """A port; 0 means any free one."""
    value = int(text)
    if not 0 <= value < 65536:
        raise argparse.ArgumentTypeError(f"{text} is not a port: ports are 0 to 65535")
    return value


def read_key(options: argparse.Namespace) -> str:
    """The key to ask for; empty: none. It is no flag, since command lines can be read by other users.

    Raises ConfigError for a variable or a file that holds none.
    """
    if options.key_env and options.key_file:
        raise ConfigError("--key-env and --key-file were both given", remedy="leave one of them out")
    if options.key_env:
        place, text = f"--key-env: the variable {options.key_env}", os.environ.get(options.key_env, "")
    elif options.key_file:
        place = f"--key-file: {options.key_file}"
        try:
            text = read_regular(options.key_file, MAX_KEY_BYTES).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{place} cannot be read: {error}", remedy="name a file with one key in it") from error
    else:
        return ""
    key = text.strip()
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        why = "holds no key" if not key else "holds something else than one key of ASCII characters without spaces"
        raise ConfigError(f"{place} {why}", remedy="make one: openssl rand -hex 32")
    return key


def _serve(options: argparse.Namespace) -> int:
    import asyncio

    from ..preflight.port import check_port

    key = read_key(options)
    raise_limit()
    check_port("--port", options.host, options.port, "choose another one, or 0 for any free one")
    from ...actors.engines.http_server import serve_engine  # the engine needs torch

    def ready(served: Served) -> None:
        print(f"serving {options.folder} at {served.url}", flush=True)

    asyncio.run(serve_engine(options.folder, options.host, options.port, key=key, on_ready=ready))
    return 0
