"""What the interpreter is seen doing while frames come in: nothing may be compiled, executed, started or unpickled."""

from __future__ import annotations

import ast
import contextlib
import sys
import traceback
import typing
from collections.abc import Iterator
from typing import Any

FORBIDDEN = (
    *("exec", "compile", "code.__new__", "pickle.find_class", "marshal.load", "marshal.loads", "marshal.dumps"),
    *("os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.remove", "os.rename"),
    *("os.mkdir", "os.rmdir", "os.chmod", "os.putenv", "subprocess.Popen", "shutil.rmtree", "ctypes.dlopen"),
    *("ctypes.dlsym", "socket.connect", "socket.bind", "socket.getaddrinfo", "import"),
)

seen: list[str] = []
_is_watching = False
_is_hooked = False


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if not _is_watching or not (event in FORBIDDEN or (event == "open" and _writes(args))):
        return
    if event not in ("compile", "exec") or not (_resolves_annotations() or _shows_a_traceback()):
        seen.append(f"{event}{args!r}"[:200])


def _resolves_annotations() -> bool:
    """`typing` reads the declared types of our own classes at their first use; they do not come from a wire."""
    frame = sys._getframe(2)
    return frame.f_code.co_filename == typing.__file__ and frame.f_code.co_name in ("__init__", "_evaluate")


def _shows_a_traceback() -> bool:
    """`traceback` parses lines of our own source, to say where in the line an error was; nothing of it is run."""
    frame = sys._getframe(2)
    caller = frame.f_back
    return (
        frame.f_code.co_filename == ast.__file__
        and caller is not None
        and caller.f_code.co_filename == traceback.__file__
    )


def _writes(args: tuple[Any, ...]) -> bool:
    mode = args[1] if len(args) > 1 else ""
    return isinstance(mode, str) and any(letter in mode for letter in "wax+")


@contextlib.contextmanager
def watched() -> Iterator[list[str]]:
    """While this lasts, forbidden deeds of this process are written into the list."""
    global _is_hooked, _is_watching
    if not _is_hooked:
        sys.addaudithook(_hook)
        _is_hooked = True
    seen.clear()
    _is_watching = True
    try:
        yield seen
    finally:
        _is_watching = False
