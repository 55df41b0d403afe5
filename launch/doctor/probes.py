"""Two things that can only be known by trying them in a child process."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

from ...actors.engines.sglang_memory import saver_env
from .machine_facts import Preload

RESOLVE_S = 120.0
"""torch-memory-saver's resolver imports torch."""
TRY_S = 20.0
RESOLVER = (
    "from torch_memory_saver.utils import get_binary_path_from_package as find;"
    "print(); print(find('torch_memory_saver_hook_mode_preload'))"
)
"""Its own: by file name one takes the library of another CUDA."""
READER = (
    "import sys; sys.stdin.read(1); from myxa.transport.tensors.kernel import read_bytes;"
    "sys.stdout.buffer.write(read_bytes(int(sys.argv[1]), int(sys.argv[2]), 8))"
)
WORD = b"myxa/doc"


def preload_facts(*, is_installed: bool) -> Preload:
    """What torch-memory-saver would preload, and whether a process starts with it."""
    if not is_installed:
        return Preload("")
    try:
        done = _run([sys.executable, "-c", RESOLVER], dict(os.environ), RESOLVE_S)
    except (OSError, subprocess.SubprocessError) as error:
        return Preload("", trouble=f"its resolver could not be asked: {error}")
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return Preload("", trouble=last)
    return try_preload(done.stdout.strip().splitlines()[-1], saver_env(os.environ))


def try_preload(library: str, env: dict[str, str]) -> Preload:
    """Start /bin/true with the library in front of it, in the environment that a server would get."""
    try:
        done = _run(["/bin/true"], {**env, "LD_PRELOAD": library}, TRY_S)
    except (OSError, subprocess.SubprocessError) as error:
        return Preload(library, status=-1, said=str(error))
    return Preload(library, status=done.returncode, said=" ".join(done.stderr.split()))


def memory_read_trouble() -> str:
    """Why a child of ours cannot read our memory as actors read each other's; empty if it can."""
    from ...transport.tensors.kernel import admit_reader

    word = ctypes.create_string_buffer(WORD, len(WORD))
    command = [sys.executable, "-c", READER]
    command += [str(os.getpid()), str(ctypes.addressof(word))]
    try:
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
            admit_reader(child.pid)
            try:
                out, said = child.communicate(b"x", timeout=TRY_S)
            except subprocess.TimeoutExpired:
                child.kill()
                return f"a child did not answer within {TRY_S:g} s"
    except OSError as error:
        return str(error)
    if child.returncode == 0:
        return "" if out == WORD else "a child read something else"
    return (said.decode(errors="replace").strip().splitlines() or [f"exit status {child.returncode}"])[-1]


def _run(command: list[str], env: dict[str, str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)
