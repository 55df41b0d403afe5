"""`myxa history`: changes of knobs, from the run's audit log, so it works after the run, too."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.errors import LedgerError
from .knobs import change_line
from .output import Verbs, add_run_flags, client_or_folder, show
from .parser import at_least

if TYPE_CHECKING:
    pass


def add_history(verbs: Verbs) -> None:
    """The command and its flags."""
    parser = verbs.add_parser("history", help="what was changed, by whom and why")
    parser.add_argument(
        "-n", "--limit", type=at_least(1), default=50, metavar="N", help="newest N records (%(default)s)"
    )
    parser.add_argument("--verify", action="store_true", help="check the chain of digests of the whole log")
    add_run_flags(parser)
    parser.set_defaults(run=_history)


def _history(options: argparse.Namespace) -> int:
    from ...actors.coordinator.audit import AUDIT_FILE

    run: Path | None = options.run_path
    found = run if run is not None and run.is_dir() else client_or_folder(options)
    path = (found if isinstance(found, Path) else found.run_dir) / AUDIT_FILE
    return _verify(options, path) if options.verify else _history_list(options, path)


def _history_lines(records: list[dict[str, Any]]) -> str:
    return "\n".join(map(change_line, records)) or "nothing was changed"


def _history_list(options: argparse.Namespace, path: Path) -> int:
    import msgspec

    from ...actors.coordinator.audit import read_audit

    records = msgspec.to_builtins(read_audit(path, options.limit))
    show(options, records, _history_lines)
    return 0


def _verify(options: argparse.Namespace, path: Path) -> int:
    from dataclasses import asdict

    from ...actors.coordinator.audit import verify_audit

    verdict = verify_audit(path)
    if verdict.complaint:
        raise LedgerError(
            f"{path}: {verdict.complaint}; {verdict.num_records} records before it hold",
            remedy="the file was edited, or the disk lost a part of it",
        )
    show(options, asdict(verdict), _verdict_text)
    return 0


def _verdict_text(facts: dict[str, Any]) -> str:
    torn = "; the last line was never finished and does not count" if facts["is_torn"] else ""
    head = f"; digest {facts['head']['digest']}" if facts["head"] else ""
    return f"{facts['num_records']} records, the chain holds{torn}{head}"
