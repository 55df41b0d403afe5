"""`myxa history`: changes of knobs, from the run's audit log, so it works after the run, too. `--replay` makes them
again.

A replay asks for changes with a numbered boundary ahead of time, so that they take effect at the same number as in
the other run. It asks for the others when the live run is at the version at which they were made.
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.errors import ConfigError, LaunchError, LedgerError
from ..control.client import ControlClient, find_run
from .knobs import change_line, shown
from .output import Verbs, add_run_flags, client_of, client_or_folder, show
from .parser import at_least

if TYPE_CHECKING:
    from ...core.knobs import AuditRecord, KnobMove, KnobValue


def add_history(verbs: Verbs) -> None:
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
    from ...actors.coordinator.audit import AUDIT_FILE

    run: Path | None = options.run_path
    found = run if run is not None and run.is_dir() else client_or_folder(options)
    if isinstance(found, ControlClient) and found.note.is_remote:
        return _list_remote(options, found)  # its files are not here
    path = (found if isinstance(found, Path) else found.run_dir) / AUDIT_FILE
    return _verify(options, path) if options.verify else _history_list(options, path)


def _list_remote(options: argparse.Namespace, client: ControlClient) -> int:
    if options.verify:
        raise ConfigError("the log is not on this host", remedy="verify it where the run directory is")
    show(options, client.ask("history", limit=options.limit), _history_lines)
    return 0


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


def _log_of(run: Path) -> Path:
    from ...actors.coordinator.audit import AUDIT_FILE

    folder = run if run.is_dir() else Path(find_run(run).run_dir)
    return folder / AUDIT_FILE


def _replay(options: argparse.Namespace) -> int:

    facts = replay(client_of(options, changes=True), _log_of(options.replay))
    show(options, facts, lambda facts: "\n".join(facts["done"] + facts["refused"]) or "nothing was changed there")
    return 0 if not facts["refused"] else 1


CHANGE_S = 75.0
LOOK_EVERY_S = 0.05
AHEAD = 200
"""Versions that a change is asked for before it is to be in force."""
NOT_YET = -AHEAD - 1


@dataclass(frozen=True, slots=True)
class ReplayedChange:
    """One change of the other run."""

    number: int
    """In its audit log."""
    values: dict[str, KnobValue]
    target: str
    version: int
    """At which it was made."""
    at: int
    """Boundary at which it was in force; 0: it had none with a number."""
    reason: str

    @property
    def due(self) -> int:
        """Live version from which on it may be asked for."""
        return self.at - AHEAD if self.at else self.version


def trajectory(records: Iterable[AuditRecord]) -> tuple[ReplayedChange, ...]:
    """Everything that moved a knob, in order: changes, undone ones, those that went back by themselves."""
    return tuple(turn for record in records if record.result == "done" for turn in _turns(record))


def _turns(record: AuditRecord) -> Iterator[ReplayedChange]:
    """One for all owners; one for each when they got different values."""
    from ...core.knobs import NUMBERED

    by_name: dict[str, set[KnobValue]] = {}
    for move in record.moves:
        by_name.setdefault(move.name, set()).add(move.new)
    if all(len(values) == 1 for values in by_name.values()):
        parts = {str(record.arguments.get("target") or ""): record.moves}
    else:
        parts = {owner: tuple(m for m in record.moves if m.owner == owner) for owner in {m.owner for m in record.moves}}
    for target, moves in parts.items():
        # Apart, because only those with a number can be asked for ahead of time.
        for is_numbered in (True, False):
            part = [move for move in moves if (record.at > 0 and move.boundary in NUMBERED) is is_numbered]
            if part:
                yield _turn(record, target, part, is_numbered=is_numbered)


def _turn(record: AuditRecord, target: str, moves: Sequence[KnobMove], *, is_numbered: bool) -> ReplayedChange:
    return ReplayedChange(
        number=record.number,
        values={move.name: move.new for move in moves},
        target=target,
        version=record.version,
        at=record.at if is_numbered else 0,
        reason=record.reason,
    )


def replay(client: ControlClient, log: Path) -> dict[str, Any]:
    """Ask for every change in order; returns what was done and what was refused, in words.

    Raises ConfigError for a log without changes, and whatever ends the run's answers.
    """
    from ...actors.coordinator.audit import read_audit

    turns = trajectory(read_audit(log))
    if not turns:
        raise ConfigError(f"{log} holds no change of knobs", remedy="name the directory of a run with changes")
    facts: dict[str, Any] = {"from": str(log), "done": [], "refused": []}
    pause = threading.Event()
    for turn in turns:
        while _version(client) < turn.due:
            pause.wait(LOOK_EVERY_S)
        reply = client.ask(
            "set", CHANGE_S, values=turn.values, target=turn.target, not_before=turn.at, force=True,
            reason=f"replay of #{turn.number}{': ' + turn.reason if turn.reason else ''}",
        )  # fmt: skip
        what = f"#{turn.number} {', '.join(f'{name} = {shown(value)}' for name, value in turn.values.items())}"
        if reply["refused"]:
            facts["refused"].append(f"{what}: {reply['refused']}")
        else:
            late = f", was {turn.at}" if turn.at and reply["at"] != turn.at else ""
            when = f", at {reply['at']}{late}" if reply["at"] else ""
            facts["done"].append(f"{what}: epoch {reply['epoch']}{when}")
    return facts


def _version(client: ControlClient) -> int:
    """Of the live run; below every version until it runs. Raises LaunchError once it is over."""
    status = client.ask("status")["status"]
    if status is None or status["phase"] == "starting":
        return NOT_YET
    if status["phase"] in ("finished", "failed"):
        raise LaunchError("the run is over", remedy="changes that were to come later were not made")
    return int(status["version"])
