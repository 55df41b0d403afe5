"""`myxa control keygen`: keys for speaking to a run from another host."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import cast

from ...core.errors import ConfigError
from ..control.live_runs import ControlNote, find_run
from .output import Verbs, add_json_flag, add_run_flags, show
from .parser import Parser


def add(verbs: Verbs) -> None:
    """The command, its sub-command and flags."""
    control = cast(Parser, verbs.add_parser("control", help="keys of the control endpoint")).add_commands()
    keygen = control.add_parser(
        "keygen",
        help="make a key pair",
        description="Write a new key pair into FILE (0600) and print its public half, for the allow-list of a run "
        "(control.allow_file) or as the key of its endpoint (control.key_file).",
    )
    keygen.add_argument("file", type=Path, metavar="FILE", help="a new file; an old one is not touched")
    add_json_flag(keygen)
    keygen.set_defaults(run=_keygen)
    where = control.add_parser("where", help="where the sockets of the run are, for curl and nc")
    where.add_argument("--view", action="store_true", help="the socket that only shows")
    add_run_flags(where)
    where.set_defaults(run=_where)
    remote = control.add_parser(
        "remote",
        help="write a file with which commands reach a run on another host",
        description="Write FILE, which every command takes as --run FILE.",
    )
    remote.add_argument("file", type=Path, metavar="FILE", help="where to write; an old one is replaced")
    remote.add_argument("--at", required=True, metavar="HOST:PORT", help="the run's control.tcp")
    remote.add_argument(
        "--server", required=True, metavar="KEY", help='its public key (--server=KEY if that begins with "-")'
    )
    remote.add_argument(
        "--key", type=Path, required=True, metavar="FILE", help="our own pair, by `myxa control keygen`"
    )
    add_json_flag(remote)
    remote.set_defaults(run=_remote)


def _remote(options: argparse.Namespace) -> int:
    import msgspec

    note = ControlNote(
        run_dir=f"tcp://{options.at}", control="", view="", pid=0, tcp=options.at, tcp_key=options.server,
        key_file=str(options.key.absolute()),
    )  # fmt: skip
    try:
        options.file.write_bytes(msgspec.json.encode(note))
    except OSError as error:
        raise ConfigError(f"{options.file} cannot be written: {error.strerror}", remedy="name another file") from error
    show(options, note.facts(), lambda _: f"say --run {options.file}")
    return 0


def _where(options: argparse.Namespace) -> int:
    note = find_run(options.run_path)
    show(options, note.facts(), lambda told: told["view" if options.view else "control"])
    return 0


def _keygen(options: argparse.Namespace) -> int:
    from ...transport.security import JobKey  # zmq makes the pair

    pair = JobKey.generate()
    try:
        pair.save(options.file)
    except FileExistsError:
        raise ConfigError(f"{options.file} is there already", remedy="name a new file") from None
    except OSError as error:
        raise ConfigError(f"{options.file} cannot be written: {error.strerror}", remedy="name another file") from error
    show(options, {"file": str(options.file), "public": pair.public}, lambda told: told["public"])
    return 0
