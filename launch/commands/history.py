"""`myxa history`: what people and rules changed. Read from the run's audit log, so it works after the run, too."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError, LedgerError
from ..control.client import ControlClient
from ..control.live_runs import find_run
from .explain import change_line
from .output import Verbs, add_run_flags, show
from .which_run import client_of, client_or_folder
from .whole import at_least


def add(verbs: Verbs) -> None:
    """The command and its flags."""
    parser = verbs.add_parser("history", help="what was changed, by whom and why")
    parser.add_argument(
        "-n", "--limit", type=at_least(1), default=50, metavar="N", help="newest N records (%(default)s)"
    )
    parser.add_argument("--verify", action="store_true", help="check the chain of digests of the whole log")
    parser.add_argument("--replay", type=Path, default=None, metavar="OTHER",
                        help="change the knobs of the live run as they were changed in that run")  # fmt: skip
    add_run_flags(parser)
    parser.set_defaults(run=_history)


def _history(options: argparse.Namespace) -> int:
    if options.replay is not None:
        return _replay(options)
    from ...actors.audit import AUDIT_FILE

    run: Path | None = options.run_path
    found = run if run is not None and run.is_dir() else client_or_folder(options)
    if isinstance(found, ControlClient) and found.note.is_remote:
        return _list_remote(options, found)  # its files are not here
    path = (found if isinstance(found, Path) else found.run_dir) / AUDIT_FILE
    return _verify(options, path) if options.verify else _list(options, path)


def _list_remote(options: argparse.Namespace, client: ControlClient) -> int:
    if options.verify:
        raise ConfigError("the log is not on this host", remedy="verify it where the run directory is")
    show(options, client.ask("history", limit=options.limit), _lines)
    return 0


def _lines(records: list[dict[str, Any]]) -> str:
    return "\n".join(map(change_line, records)) or "nothing was changed"


def _list(options: argparse.Namespace, path: Path) -> int:
    import msgspec

    from ...actors.audit import read_audit

    records = msgspec.to_builtins(read_audit(path, options.limit))
    show(options, records, _lines)
    return 0


def _verify(options: argparse.Namespace, path: Path) -> int:
    from dataclasses import asdict

    from ...actors.audit import verify_audit

    verdict = verify_audit(path)
    if verdict.complaint:
        raise LedgerError(
            f"{path}: {verdict.complaint}; {verdict.num_records} records before it hold",
            remedy="somebody changed the file, or the disk lost a part of it",
        )
    show(options, asdict(verdict), _verdict_text)
    return 0


def _verdict_text(told: dict[str, Any]) -> str:
    torn = "; the last line was never finished and does not count" if told["is_torn"] else ""
    head = f"; digest {told['head']['digest']}" if told["head"] else ""
    return f"{told['num_records']} records, the chain holds{torn}{head}"


def _log_of(run: Path) -> Path:
    from ...actors.audit import AUDIT_FILE

    folder = run if run.is_dir() else Path(find_run(run).run_dir)
    return folder / AUDIT_FILE


def _replay(options: argparse.Namespace) -> int:
    from .replay import replay

    told = replay(client_of(options, changes=True), _log_of(options.replay))
    show(options, told, lambda told: "\n".join(told["done"] + told["refused"]) or "nothing was changed there")
    return 0 if not told["refused"] else 1
