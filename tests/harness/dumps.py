"""Dumps of groups, written and read as a test needs it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import numpy as np

from myxa.actors.buffer.dumps import FORMAT, DumpedGroup, DumpHeader, group_of, read_header
from myxa.core.samples import Group


def write_groups(path: Path, groups: Iterable[Group], step_of: Callable[[int], int] = lambda number: 0) -> str:
    """A dump of the run "first"."""
    arrays = msgspec.json.Encoder(enc_hook=np.ndarray.tolist)
    lines: list[DumpHeader | DumpedGroup] = [DumpHeader(format=FORMAT, run="first")]
    lines += [
        DumpedGroup(group_id=number, state="READY", step=step_of(number), attempt=1, rollout="rollout/0", group=group)
        for number, group in enumerate(groups)
    ]
    path.write_bytes(b"".join(arrays.encode(line) + b"\n" for line in lines))
    return str(path)


def read_groups(path: Path) -> list[DumpedGroup]:
    """All groups, in order; the first line is the header."""
    read_header(path)
    return [group_of(line) for line in path.read_bytes().splitlines()[1:]]
