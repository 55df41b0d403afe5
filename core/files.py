"""Files: locks, entries with size and digest, durable writes, and waiting for a disk that refuses.

A lock (flock) ends with its process and keeps out only processes that ask for it. Over NFS, Linux makes it a lock on
the file's bytes at the server: processes of other machines see it unless the mount says `local_lock`, and an exclusive
lock needs the file open for writing. A server that cannot reach a machine gives that machine's locks to others.

A disk that is full, over a quota, read-only or failing can be repaired while the run waits. The event `disk-full` names
file, file system, cause and remedy; `disk-has-room` follows when it can be written again.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, BinaryIO, Literal, TypeVar

import msgspec

from .errors import DiskRefused, GatherError, MyxaError

if TYPE_CHECKING:
    from .activity import ActivityMeter
    from .messages import ActivityKind

_RETRY_S = 0.005
_HAS_NONE = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})


def take_lock(path: Path, mode: Literal["r", "r+", "w"] = "w", *, is_shared: bool = False) -> IO[str] | None:
    """Hold the file's lock until what is returned is closed; None: another process has it. `is_shared`: with others who
    share it. `mode`: of opening ("w": made if missing). Raises OSError: cannot be opened, no locks."""
    handle = path.open(mode)
    try:
        if lock_now(handle.fileno(), is_shared=is_shared):
            return handle
    except OSError:
        handle.close()
        raise
    handle.close()
    return None


def lock_now(descriptor: int, *, is_shared: bool = False) -> bool:
    """Lock an open file until it is closed; False: another process has it. Raises OSError if there are no locks."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock_within(descriptor: int, timeout_s: float) -> bool:
    """The same, waiting for others. Blocks, so a loop calls it in a thread."""
    deadline_s = time.monotonic() + timeout_s
    pause = threading.Event()
    while not lock_now(descriptor):
        if time.monotonic() >= deadline_s:
            return False
        pause.wait(_RETRY_S)
    return True


@contextmanager
def locked_folder(folder: Path, timeout_s: float) -> Generator[bool]:
    """Hold the lock of this folder, in which no file is made; False: another process had it for so long. Where the
    file system cannot lock folders (NFS) no process is kept out. Raises OSError if it cannot be opened."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            is_mine = lock_within(descriptor, timeout_s)
        except OSError as error:
            if not (has_no_locks(error) or error.errno in (errno.EBADF, errno.EINVAL)):
                raise
            is_mine = True
        yield is_mine
    finally:
        os.close(descriptor)


SCRATCH = "myxa-tmp-"
"""How the names of temporary folders begin that go with the process that has locked them."""
_SWEEP_S = 10.0


@contextmanager
def locked_scratch(purpose: str, base: str | None = None) -> Generator[tempfile.TemporaryDirectory[str]]:
    """A temporary folder with `purpose` in its name, removed at the end; by `remove_dead_scratch` if this process is
    killed. `base`: where; None: TMPDIR. Raises OSError."""
    with ExitStack() as stack:
        while True:
            prefix = f"{SCRATCH}{purpose}-"
            scratch = tempfile.TemporaryDirectory(prefix=prefix, dir=base, ignore_cleanup_errors=True)
            stack.callback(scratch.cleanup)
            with suppress(FileNotFoundError):  # it was taken for a dead process's before it was locked
                if stack.enter_context(locked_folder(Path(scratch.name), _SWEEP_S)) and Path(scratch.name).exists():
                    break
            stack.close()
        yield scratch


def remove_dead_scratch(base: str | None = None) -> None:
    """Delete the scratch folders that no process has locked: theirs were killed."""
    for path in Path(base or tempfile.gettempdir()).glob(f"{SCRATCH}*"):
        with suppress(OSError):  # such as: another user's, or a file system without locks
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if lock_now(descriptor):
                    shutil.rmtree(path)
            finally:
                os.close(descriptor)


def is_locked(path: Path) -> bool:
    """Whether another process has the file's exclusive lock now, or this cannot be tested; leaves nothing behind."""
    try:
        handle = take_lock(path, "r", is_shared=True)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    if handle is None:
        return True
    handle.close()
    return False


def has_no_locks(error: OSError) -> bool:
    """Whether a lock was refused because the file system has none."""
    return error.errno in _HAS_NONE


def lock_remedy(error: OSError, otherwise: str) -> str:
    """What to do about a lock that could not be taken."""
    if has_no_locks(error):
        return "its file system has no locks: mount it with them (flock), or use a place on another one"
    return otherwise


class FileEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file."""

    name: str
    num_bytes: int
    sha256: str


def describe_file(path: Path) -> FileEntry:
    """Size and digest of a file, whose bytes are on the disk afterwards. Raises OSError."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        size = os.fstat(file.fileno()).st_size
    return FileEntry(name=path.name, num_bytes=size, sha256=digest)


def open_regular(path: Path) -> BinaryIO:
    """A file opened for reading, at its start. Never waits. Raises OSError, also for a pipe, socket or device."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError("it is a folder, pipe, socket or device, not a regular file")
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_regular(path: Path, max_bytes: int) -> bytes:
    """All bytes of a regular file. Raises OSError, also when it has more than `max_bytes`, before it reads them."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(max_bytes + 1) if size <= max_bytes else b""
    if max(size, len(data)) > max_bytes:
        raise OSError(f"it has {max(size, len(data))} bytes, more than {max_bytes}")
    return data


def sync_folder(folder: Path) -> None:
    """Names in a folder are on the disk too, so that a power cut does not undo what was reported; if the file
    system can do that for folders (CIFS and some of FUSE cannot). Raises OSError."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
    finally:
        os.close(handle)


def write_durably(path: Path, data: bytes, mode: int = 0o666) -> None:
    """A file that is there whole or not at all, also after a power cut; an older one is replaced. Raises OSError."""
    draft = path.with_name(f".{path.name}.part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    with os.fdopen(os.open(draft, flags, mode), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    sync_folder(path.parent)


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
_UNCLEAR = "is it full, over its quota, mounted read-only, failing, or locked by another program (`fuser` names it)?"
_SQLITE = {13: errno.ENOSPC, 5: 0, 8: 0, 10: 0, 14: 0, 15: 0}
"""SQLITE_FULL, BUSY, READONLY, IOERR, CANTOPEN, PROTOCOL; 0: they do not say what is wrong."""
_OF_RUST = re.compile(r"\(os error (\d+)\)")
"""In the text of what safetensors raises."""


def refusal(error: BaseException) -> int | None:
    """The errno by which a disk refused (0: not known), of the error or what it was raised from; None: no disk did."""
    for cause in _causes(error):
        if isinstance(cause, DiskRefused):
            return 0
        if isinstance(cause, OSError) and cause.errno in _REMEDIES:
            return cause.errno
        if (match := _OF_RUST.search(str(cause))) and int(match[1]) in _REMEDIES:
            return int(match[1])
        if (code := getattr(cause, "sqlite_errorcode", 0) & 0xFF) in _SQLITE:  # the rest says where in SQLite
            return _SQLITE[code]
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    waiting, seen = [error], set[int]()
    while waiting:
        cause = waiting.pop()
        if id(cause) in seen:
            continue
        seen.add(id(cause))
        yield cause
        if cause.__cause__ is not None:
            waiting.append(cause.__cause__)
        if isinstance(cause, GatherError):
            waiting += cause.errors.values()


def refused(path: Path, error: BaseException) -> DiskRefused:
    """The error to raise for `error`, by which the disk under `path` refused."""
    refused_before = next((cause for cause in _causes(error) if isinstance(cause, DiskRefused)), None)
    if refused_before is not None:
        return refused_before
    number = refusal(error) or 0
    text = error.message if isinstance(error, MyxaError) else os.strerror(number) if number else str(error)
    if str(path) not in text:
        text = f"{path} cannot be written: {text}"
    remedy = f"{_REMEDIES.get(number, _UNCLEAR)}; the run waits, and continues by itself when it can be written"
    return DiskRefused(f"{text} ({file_system(path)})", remedy=remedy)


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
    """Mount point and room of the file system under a path that need not exist."""
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
    return f"file system at {folder}: {free / _MIB:.1f} of {size / _MIB:.0f} MiB free"


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
    """The result of `write()`, repeated while the disk under `path` refuses. Raises every other error."""
    reported = ""
    for pause_s in pauses():
        try:
            result = await write()
        except Exception as error:
            if refusal(error) is None:
                raise
            if not reported:
                reported = str(refused(path, error))
                tell(REFUSED_EVENT, reported)
            with meter.during(*WAITS) if meter is not None else nullcontext():
                import asyncio  # commands read files too, and start without it

                await asyncio.sleep(pause_s)
            continue
        if reported:
            tell(WRITTEN_EVENT, f"{path} can be written again")
        return result
    raise AssertionError("pauses do not end")
