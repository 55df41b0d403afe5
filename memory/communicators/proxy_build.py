"""The proxy backend's C++, compiled against the torch that is installed and kept for the next process.

torch promises no binary interface for `c10d::Backend` (its virtual functions change with each version), so nothing
built is shipped. Considered: `torch.utils.cpp_extension`, which includes all of torch's headers (80 s instead of 15),
wants ninja, and leaves its lock behind when it is killed.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch

from ...core.errors import MemoryFault
from ...core.files import lock_within

MODULE = "myxa_proxy_backend"
SOURCE = Path(__file__).with_name("proxy_backend.cpp")
FLAGS = ("-O1", "-std=c++20", "-fPIC", "-shared", "-w")
COMPILERS = ("c++", "g++", "clang++")
REMEDY = 'install what is missing, or set memory.communicators = "keep"'


def default_cache() -> Path:
    """Shared by all processes of a user on one machine."""
    return Path.home() / ".cache" / "myxa" / "communicators"


def missing_for_build(compiler: str = "") -> str:
    """What a build lacks on this machine, in words; empty: nothing."""
    if not find_compiler(compiler):
        return f"no C++ compiler ({compiler or ', '.join(COMPILERS)}) is on PATH"
    if not (_python_headers() / "Python.h").exists():
        return f"Python's headers are not in {_python_headers()}"
    if not (_torch_root() / "include/torch/csrc/distributed/c10d/Backend.hpp").exists():
        return f"torch's headers are not in {_torch_root() / 'include'}"
    return ""


def built_path(cache: Path, compiler: str = "") -> Path:
    """Where the module for this source, torch, Python and compiler lies, or will lie."""
    facts = (
        SOURCE.read_text(encoding="utf-8"), *FLAGS, torch.__version__, str(torch.version.git_version),
        str(sysconfig.get_config_var("SOABI")), _compiler_version(find_compiler(compiler)),
    )  # fmt: skip
    key = hashlib.sha256("\0".join(facts).encode()).hexdigest()[:20]
    return cache / key / f"{MODULE}.so"


def load(cache: Path | None = None, *, compiler: str = "", timeout_s: float = 600.0) -> ModuleType:
    """The module with `ReloadableBackend`; compiled first where the cache has none. Raises MemoryFault naming what
    is missing. A process has one: its type is known to torch under one name."""
    if MODULE in sys.modules:
        return sys.modules[MODULE]
    path = built_path(cache or default_cache(), compiler)
    if not path.exists():
        build(path, compiler, timeout_s)
    loader = importlib.machinery.ExtensionFileLoader(MODULE, str(path))
    spec = importlib.util.spec_from_file_location(MODULE, path, loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise MemoryFault(
            f"the proxy backend {path} does not load: {error}", remedy="remove that folder; it is built again"
        ) from error
    sys.modules[MODULE] = module
    return module


def find_compiler(name: str = "") -> str:
    """Path of the compiler; empty when there is none."""
    found = (shutil.which(each) for each in ((name,) if name else COMPILERS))
    return next((path for path in found if path), "")


def build(path: Path, compiler: str, timeout_s: float) -> None:
    lacking = missing_for_build(compiler)
    if lacking:
        raise MemoryFault(f"the proxy backend of communicators cannot be built: {lacking}", remedy=REMEDY)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MemoryFault(
            f"the proxy backend cannot be kept under {path.parent}: {error}", remedy="another cache"
        ) from error
    with _only_one(path.with_suffix(".lock"), timeout_s):
        if path.exists():  # another process was faster
            return
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            draft = Path(folder) / path.name
            _compile(draft, find_compiler(compiler), timeout_s)
            os.replace(draft, path)  # noqa: PTH105  # the atomic one, by its name


def _compile(target: Path, compiler: str, timeout_s: float) -> None:
    include, libraries = _torch_root() / "include", _torch_root() / "lib"
    command = [
        compiler, *FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{include}", f"-I{include / 'torch/csrc/api/include'}", f"-I{_python_headers()}",
        str(SOURCE), "-o", str(target), f"-L{libraries}", "-lc10", "-ltorch_cpu",
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MemoryFault(f"{compiler} did not build the proxy backend: {error}", remedy=REMEDY) from error
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line][:5] or done.stderr.splitlines()[-5:]
        raise MemoryFault(
            f"{compiler} cannot compile the proxy backend against torch {torch.__version__}: " + " | ".join(errors),
            remedy=REMEDY,
        )


@contextmanager
def _only_one(path: Path, timeout_s: float) -> Generator[None]:
    """The kernel lets the lock go when its holder ends, however it ends."""
    with path.open("w") as file:
        if not lock_within(file.fileno(), timeout_s):
            raise MemoryFault(f"another process builds under {path} for {timeout_s:.0f} s")
        yield


@functools.cache
def _compiler_version(compiler: str) -> str:
    if not compiler:
        return ""
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MemoryFault(f"{compiler} does not answer: {error}", remedy=REMEDY) from error
    return done.stdout.split("\n", 1)[0]


def _python_headers() -> Path:
    return Path(sysconfig.get_path("include"))


def _torch_root() -> Path:
    return Path(str(torch.__file__)).parent
