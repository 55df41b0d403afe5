"""Reads logs of this node in bounded pieces: the last lines, then what is added, attempt after attempt.

A library that follows files (`watchfiles`, inotify) was considered: logs are requested from another process twice a
second, and checking a file's size is cheap.
"""

from __future__ import annotations

import glob
from pathlib import Path

from msgspec.structs import replace

from ...core.errors import ConfigError
from ..contracts import LogChunk
from ..run_dir import RunDir
from ..verbs import LogsArguments

SERVER = ".sglang.log"
"""Ends the name of a launched server's log."""
CHUNK_BYTES = 128 * 1024
TAIL_BYTES = 4 * 1024 * 1024
"""Looked through from the end for the last lines that hold a text."""
MAX_LINE = 4000
"""Characters of a line; the rest is cut off."""


def read_logs(run_dir: RunDir, node: int, request: LogsArguments) -> tuple[LogChunk, ...]:
    """See `AgentContract.read_logs`. Raises ConfigError for a log that is not there."""
    requests = [request]
    if request.engine:
        pattern = f"{glob.escape(request.target.replace('/', '.'))}.*{SERVER}"
        names = sorted(path.name.removesuffix(SERVER) for path in run_dir.logs.glob(pattern))
        servers = [f"{request.target}/{name[len(request.target) + 1 :]}" for name in names]
        requests = [replace(request, target=name) for name in servers] or requests
    return tuple(_read(run_dir, node, log) for log in requests)


def _read(run_dir: RunDir, node: int, request: LogsArguments) -> LogChunk:
    path, (file, offset) = _newest(run_dir, node, request), request.after.get(request.target, ("", 0))
    if file == path.name:
        return _read_next(path, request, path, offset)
    if file:  # a new attempt has begun; the old file first, to its end
        old = run_dir.logs / Path(file).name
        chunk = _read_next(old, request, path, offset) if old.is_file() else None
        if chunk is not None and chunk.offset > offset:
            return chunk
        return _read_next(path, request, path, 0)
    return _tail(path, request)


def _newest(run_dir: RunDir, node: int, request: LogsArguments) -> Path:
    stem = request.target.replace("/", ".")
    if request.target == "launcher":
        path = run_dir.logs / f"launcher.{node}.log"
    elif request.engine:
        path = run_dir.logs / f"{stem}{SERVER}"
    else:
        path = run_dir.logs / "latest" / f"{stem}.log"
    try:
        path = path.resolve()
        is_ours = path.parent == run_dir.logs.resolve() and path.is_file()
    except (OSError, ValueError):  # a name that no file can have
        is_ours = False
    if not is_ours:
        name = request.target[:64]
        subject = f"the server of {name!r}" if request.engine else repr(name)
        raise ConfigError(f"{subject} has no log on node {node}", remedy=f"see {run_dir.logs} there")
    return path


def _read_next(path: Path, request: LogsArguments, newest: Path, offset: int) -> LogChunk:
    """Whole lines from that position."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        start = offset if offset <= size else 0
        file.seek(start)
        data = file.read(CHUNK_BYTES)
    end = data.rfind(b"\n") + 1
    if end == 0 and (len(data) == CHUNK_BYTES or path != newest):  # a very long line, or one without an end
        end = len(data)
    lines = _lines(data[:end], request.grep)
    is_more = start + end < size or path != newest
    return LogChunk(name=request.target, file=path.name, offset=start + end, lines=tuple(lines), is_more=is_more)


def _tail(path: Path, request: LogsArguments) -> LogChunk:
    """The last lines; a last one that is not ended yet is left for later."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        start = max(0, size - TAIL_BYTES)
        file.seek(start)
        data = file.read(TAIL_BYTES)
    end = data.rfind(b"\n") + 1
    lines = _lines(data[:end], request.grep)
    tail = _fitting(lines[-request.num_lines :] if request.num_lines else [])
    return LogChunk(name=request.target, file=path.name, offset=start + end, lines=tuple(tail))


def _fitting(lines: list[str]) -> list[str]:
    """The last of these that together are no more than one answer should be."""
    room, first = CHUNK_BYTES, len(lines)
    while first > 0 and room >= len(lines[first - 1]):
        first -= 1
        room -= len(lines[first])
    return lines[first:]


def _lines(data: bytes, grep: str) -> list[str]:
    lines = data.decode("utf-8", errors="replace").splitlines()
    return [line if len(line) <= MAX_LINE else f"{line[:MAX_LINE]} ..." for line in lines if grep in line]
