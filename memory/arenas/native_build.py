"""A C source of ours made into a shared library by the machine's own compiler, once, in a cache keyed by its contents.

Wheels hold the source: one wheel serves every machine and needs no build at install time. setuptools' and torch's
extension builders make Python modules and want ninja or headers of theirs; this is one call of the compiler. Two
processes may build at the same time: a lock file lets the second one wait, and a rename puts the result in place whole.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ...core.errors import MemoryFault
from ...core.files import lock_within

COMPILERS = ("cc", "gcc", "clang", "g++", "c++")
FLAGS = ("-std=gnu11", "-O2", "-Wall", "-shared", "-fPIC", "-fvisibility=hidden")
LIBRARIES = ("-ldl", "-lpthread")
TIMEOUT_S = 120.0
"""For one call of the compiler."""
LOCK_S = 2 * TIMEOUT_S
"""For another process that builds the same."""


def built(source: Path, cache_dir: Path | None = None, *, compilers: Sequence[str] = COMPILERS) -> Path:
    """Path of the library made of `source`; compiles unless these very bytes were compiled on this kind of machine.

    `cache_dir` None: `.cache/myxa/native` in the user's home, or where that cannot be written a folder of this user
    alone among the temporary files. Raises MemoryFault naming the compilers that were looked for, or with what the
    compiler said, or when another process keeps the lock for LOCK_S.
    """
    text = source.read_bytes()
    key = hashlib.sha256(b"\0".join((text, " ".join(FLAGS).encode(), platform.machine().encode()))).hexdigest()[:24]
    name = f"{source.stem}-{key}"
    target, lock = _open_cache(_folders() if cache_dir is None else [cache_dir], name)
    if lock is None:
        return target
    try:
        if not lock_within(lock, LOCK_S):
            raise MemoryFault(
                f"{target}: another process has held its lock for {LOCK_S:g} s",
                remedy=f"see who has {target.with_suffix('.lock')} open (lsof), and end it",
            )
        if not target.exists():
            _compile(source, target, _compiler(source, compilers))
    finally:
        os.close(lock)
    return target


def _folders() -> list[Path]:
    shared = Path(tempfile.gettempdir()) / f"myxa-native-{os.getuid()}"
    return [Path.home() / ".cache" / "myxa" / "native", shared]


def _open_cache(folders: Sequence[Path], name: str) -> tuple[Path, int | None]:
    """Where the library is (no lock), or is to be made by whoever gets the lock: the first folder that can hold it."""
    refusals: list[str] = []
    for folder in folders:
        target = folder / f"{name}.so"
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if folder.stat().st_uid != os.getuid():
                raise PermissionError(f"{folder} belongs to somebody else")
            if target.exists():
                return target, None
            return target, os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            refusals.append(str(error))
    raise MemoryFault(
        f"no folder can hold what is compiled as {name}: {'; '.join(refusals)}",
        remedy="give a cache_dir that is writable",
    )


def _compiler(source: Path, compilers: Sequence[str]) -> str:
    for name in compilers:
        path = shutil.which(name)
        if path is not None:
            return path
    raise MemoryFault(
        f"{source.name} must be compiled and there is no compiler: none of {', '.join(compilers)} is on the PATH",
        remedy="install one (Debian: apt-get install gcc), or bring a cache_dir that a machine with one has filled",
    )


def _compile(source: Path, target: Path, compiler: str) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".building-") as folder:
        made = Path(folder) / target.name
        command = [compiler, *FLAGS, "-x", "c", "-o", str(made), str(source), *LIBRARIES]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise MemoryFault(f"{' '.join(command)} did not end within {TIMEOUT_S:g} s") from error
        if done.returncode:
            raise MemoryFault(
                f"{' '.join(command)} failed ({done.returncode}): {done.stderr.strip()[-2000:]}",
                remedy="see that the compiler works and has the C library's headers (Debian: libc6-dev)",
            )
        made.replace(target)
