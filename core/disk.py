"""A disk that refuses to be written: which errors say so, what to tell a person, and waiting until it can be written.

Full, over a quota, mounted read-only or failing: a person can mend each of these while the run waits, so none of them
is a reason to end a process. The event `disk-full` names file, file system, cause and remedy; `disk-has-room` follows
once it can be written again. Knows errors and file systems; must not know what is written.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TypeVar

from .activity import ActivityMeter
from .errors import DiskRefused, GatherError, MyxaError
from .messages import ActivityKind

T = TypeVar("T")
Tell = Callable[[str, str], None]
"""(kind, text) of an event."""

REFUSED_EVENT, WRITTEN_EVENT = "disk-full", "disk-has-room"
WAITS: tuple[ActivityKind, str] = ("paused", "disk")
"""What the time is booked as."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 5.0
"""Between two attempts; the pause doubles."""
MIN_FREE_BYTES = 1 << 20
"""Less than this, and the next attempt would be the last that succeeds."""
_MIB = 1 << 20

_REMEDIES = {
    errno.ENOSPC: "make room there",
    errno.EDQUOT: "raise the quota, or delete files",
    errno.EROFS: "mount it for writing again",
    errno.EIO: "see `dmesg`: the device, or the way to it, fails",
}
_UNCLEAR = "is it full, over its quota, mounted read-only or failing?"
_SQLITE = {13: errno.ENOSPC, 8: 0, 10: 0, 14: 0}
"""SQLITE_FULL, READONLY, IOERR, CANTOPEN; 0: they do not say what is wrong with the disk."""
_OF_RUST = re.compile(r"\(os error (\d+)\)")
"""In the text of what safetensors raises."""


def refusal(error: BaseException) -> int | None:
    """The errno by which a disk refused (0: not known), of the error or what it was raised from; None: no disk did."""
    for cause in _causes(error):
        if isinstance(cause, DiskRefused):
            return 0
        if isinstance(cause, OSError) and cause.errno in _REMEDIES:
            return cause.errno
        if (told := _OF_RUST.search(str(cause))) and int(told[1]) in _REMEDIES:
            return int(told[1])
        if (code := getattr(cause, "sqlite_errorcode", 0) & 0xFF) in _SQLITE:  # the rest says where in SQLite
            return _SQLITE[code]
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    waiting, seen = [error], set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        if one.__cause__ is not None:
            waiting.append(one.__cause__)
        if isinstance(one, GatherError):
            waiting += one.errors.values()


def refused(path: Path, error: BaseException) -> DiskRefused:
    """What to tell of `error`, by which the disk under `path` refused."""
    known = next((cause for cause in _causes(error) if isinstance(cause, DiskRefused)), None)
    if known is not None:
        return known
    number = refusal(error) or 0
    what = error.message if isinstance(error, MyxaError) else os.strerror(number) if number else str(error)
    if str(path) not in what:
        what = f"{path} cannot be written: {what}"
    remedy = f"{_REMEDIES.get(number, _UNCLEAR)}; the run waits, and goes on by itself when it can be written"
    return DiskRefused(f"{what} ({file_system(path)})", remedy=remedy)


@contextmanager
def naming_disk(path: Path) -> Generator[None]:
    """What is raised inside because the disk under `path` refused is raised as DiskRefused, for callers elsewhere."""
    try:
        yield
    except Exception as error:
        if isinstance(error, DiskRefused) or refusal(error) is None:
            raise
        raise refused(path, error) from error


def file_system(path: Path) -> str:
    """Type, mount point and room of the file system under a path that need not exist."""
    folder = path.absolute()
    try:
        while not folder.exists():
            folder = folder.parent
        while not folder.is_mount():
            folder = folder.parent
        space = os.statvfs(folder)
    except OSError as error:
        return f"its file system does not answer: {error.strerror}"
    free, size = space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize
    return f"{_kind(folder)} at {folder}, {free / _MIB:.1f} of {size / _MIB:.0f} MiB free"


def _kind(mount: Path) -> str:
    try:
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "file system"
    fields = (line.split(" ") for line in reversed(lines))  # the newest of several on one place is what is seen
    name = str(mount).replace(" ", "\\040")
    return next((words[2] for words in fields if len(words) > 2 and words[1] == name), "file system")


def may_have_room(path: Path) -> bool:
    """Whether the next attempt to write there is worth it: False while the file system has next to nothing free."""
    try:
        space = os.statvfs(path)
    except OSError:
        return True
    return space.f_bavail * space.f_frsize >= MIN_FREE_BYTES


def pauses() -> Iterator[float]:
    """Seconds before each further attempt."""
    pause_s = FIRST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


async def until_written(
    write: Callable[[], Awaitable[T]], *, path: Path, tell: Tell, meter: ActivityMeter | None = None
) -> T:
    """The result of `write()`, repeated while the disk under `path` refuses. Raises every other error. `meter`: of an
    actor that does nothing else meanwhile."""
    told = ""
    for pause_s in pauses():
        try:
            result = await write()
        except Exception as error:
            if refusal(error) is None:
                raise
            if not told:
                told = str(refused(path, error))
                tell(REFUSED_EVENT, told)
            with meter.during(*WAITS) if meter is not None else nullcontext():
                await asyncio.sleep(pause_s)
            continue
        if told:
            tell(WRITTEN_EVENT, f"{path} can be written again")
        return result
    raise AssertionError("pauses do not end")
