"""C and C++ sources of this house, compiled by the machine's own compiler and kept for the next process.

A wheel serves every machine and needs no build at install time. A library is keyed by all that it depends on (`facts`),
machine and C library included: machines and containers may share a home. Two processes may build at the same time: a
lock file lets the second one wait (the kernel lets it go when its holder ends, however it ends), and a rename puts the
whole result in place. Where the file system has no locks each builds its own.
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

from ..core.errors import MemoryFault, raised_as
from ..core.files import has_no_locks, lock_within

CPP_COMPILERS = ("c++", "g++", "clang++")


def find_compiler(names: Sequence[str]) -> str:
    """Path of the first that is there; empty when there is none."""
    return next((path for path in map(shutil.which, names) if path), "")


def built(
    source: Path,
    compilers: Sequence[str],
    arguments: Sequence[str],
    *,
    facts: Sequence[str],
    cache_dir: Path | None,
    timeout_s: float,
    remedy: str,
) -> Path:
    """Path of the library made of `source`; compiles unless this was done with equal source, options and `facts`, which
    say what lies in the folders of `arguments`. `cache_dir` None: `~/.cache/myxa/native`. Raises MemoryFault naming
    the compilers looked for, with what the compiler said, or when a process keeps the lock for twice `timeout_s`."""
    compiler = find_compiler(compilers)
    if not compiler:
        looked = ", ".join(compilers)
        raise MemoryFault(f"{source.name} must be compiled, and none of {looked} is on the PATH", remedy=remedy)
    facts = (*facts, platform.machine(), *platform.libc_ver())
    parts = (source.read_bytes(), *(word.encode() for word in (*arguments, *facts) if os.sep not in word))
    key = hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]
    needed = "set HOME to a folder that can be written to"
    with raised_as(MemoryFault, f"{source.name} has no folder to be compiled into", RuntimeError, remedy=needed):
        folder = cache_dir or Path.home() / ".cache" / "myxa" / "native"
    target = folder / f"{source.stem}-{key}.so"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if target.exists():
            return target
        lock = os.open(target.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise MemoryFault(f"{source.name} cannot be compiled into {folder}: {error}", remedy=needed) from error
    try:
        if not _lock_within(lock, 2 * timeout_s):
            raise MemoryFault(
                f"{target}: another process has held its lock for {2 * timeout_s:g} s",
                remedy=f"see who has {target.with_suffix('.lock')} open (lsof), and end it",
            )
        if not target.exists():
            _compile(source, target, [compiler, *arguments], timeout_s, remedy)
    finally:
        os.close(lock)
    return target


def _lock_within(lock: int, timeout_s: float) -> bool:
    try:
        return lock_within(lock, timeout_s)
    except OSError as error:
        if not has_no_locks(error):
            raise
        return True


def _compile(source: Path, target: Path, command: list[str], timeout_s: float, remedy: str) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".building-") as folder:
        partial = Path(folder) / target.name
        try:
            result = subprocess.run(
                [*command, "-o", str(partial)], capture_output=True, text=True, timeout=timeout_s, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise MemoryFault(f"{command[0]} did not build {source.name}: {error}", remedy=remedy) from error
        if result.returncode:
            lines = result.stderr.splitlines()
            errors = [line for line in lines if "error" in line][:5] or lines[-5:]
            raise MemoryFault(
                f"{command[0]} cannot compile {source.name} ({result.returncode}): " + " | ".join(errors), remedy=remedy
            )
        partial.replace(target)
