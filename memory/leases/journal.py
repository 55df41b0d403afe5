"""The journal of a memory manager, written before it acts: its successor reads the known tenants and the used epochs.

One line of JSON an entry, appended and written to the kernel at once. It survives the process; it need not survive the
machine, whose devices are empty after a restart. Opening rewrites the file to the entries that still matter. SQLite was
considered: there are no queries, and the worst that a dying writer leaves is a torn last line.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from ...core.device_memory import MemoryCommand, TenantReport
from ...core.errors import MemoryFault

REWRITE_BYTES = 4 << 20
"""Beyond this size the file is rewritten."""


class _Line(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    epoch: int = 0
    report: TenantReport | None = None
    gone: str = ""
    command: MemoryCommand | None = None
    to: str = ""


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(_Line)


class Journal:
    """One file, one writer. `last_epoch`, `known` and `unanswered` are those of the manager before this one."""

    def __init__(self, path: Path) -> None:
        """MemoryFault if it cannot be written."""
        self.path = path
        self.last_epoch = 0
        self._reports: dict[str, TenantReport] = {}
        self._last_command: dict[str, MemoryCommand] = {}
        try:
            self._read()
            self._rewrite()
        except OSError as error:
            raise MemoryFault(f"{path}: {error.strerror}", remedy="use a run directory that can be written") from error
        self.known = tuple(self._reports.values())
        self.commands = dict(self._last_command)
        """Tenant -> the last command that was sent, or was about to be."""

    def _read(self) -> None:
        try:
            lines = self.path.read_bytes().splitlines()
        except FileNotFoundError:
            return
        for text in lines:
            try:
                line = _DECODER.decode(text)
            except (msgspec.DecodeError, msgspec.ValidationError):
                continue  # torn by the end of its writer, or by another version: the tenant is asked again
            self.last_epoch = max(self.last_epoch, line.epoch)
            if line.report is not None:
                self._reports[line.report.tenant] = line.report
            if line.gone:
                self._reports.pop(line.gone, None)
            if line.command is not None:
                self.last_epoch = max(self.last_epoch, line.command.epoch)
                self._last_command[line.to] = line.command

    def _rewrite(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.path.with_name(self.path.name + ".new")
        lines = [_Line(epoch=self.last_epoch), *(_Line(report=r) for r in self._reports.values())]
        fresh.write_bytes(b"".join(_ENCODER.encode(line) + b"\n" for line in lines))
        fresh.replace(self.path)
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def _append(self, line: _Line) -> None:
        os.write(self._file, _ENCODER.encode(line) + b"\n")
        if os.fstat(self._file).st_size > REWRITE_BYTES:
            os.close(self._file)
            self._rewrite()

    def epoch(self, epoch: int) -> None:
        """This one is used from now on."""
        self.last_epoch = max(self.last_epoch, epoch)
        self._append(_Line(epoch=epoch))

    def report(self, report: TenantReport) -> None:
        """A tenant reported its state."""
        if self._reports.get(report.tenant) != report:
            self._reports[report.tenant] = report
            self._append(_Line(report=report))

    def gone(self, tenant: str) -> None:
        """Its memory is proven free."""
        if self._reports.pop(tenant, None) is not None:
            self._append(_Line(gone=tenant))

    def command(self, tenant: str, command: MemoryCommand) -> None:
        """About to be sent."""
        self.last_epoch = max(self.last_epoch, command.epoch)
        self._append(_Line(command=command, to=tenant))

    def close(self) -> None:
        """No more lines."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
