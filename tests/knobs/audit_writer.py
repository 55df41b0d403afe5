"""A process that appends to an audit log: path, how many records, and a mark for them."""

from __future__ import annotations

import sys
from pathlib import Path

from myxa.actors.coordinator.audit import AuditLog
from myxa.core.knobs import AuditRecord, Operator

if __name__ == "__main__":
    log, mark = AuditLog(Path(sys.argv[1])), sys.argv[3]
    for index in range(int(sys.argv[2])):
        log.append(
            AuditRecord(
                number=0, wall_s=0.0, verb="set", who=Operator(), arguments={}, result="done", reason=f"{mark} {index}"
            )
        )
