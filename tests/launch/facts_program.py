"""A composition root whose "actor" tells what kind of process it is in, as JSON, and does what its switch says."""

from __future__ import annotations

import ast
import ctypes
import gc
import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

VARYING = {"MYXA_WORKER_SPEC"}


def build(spec: Any, config: Any, run_dir: Path) -> None:
    facts = facts_of_process()
    if spec.threads > 1:
        facts["threads"] = threads_at_work()
    if "numpy.random" in sys.modules:
        facts["numpy_draw"] = float(sys.modules["numpy.random"].random())
    if (torch := sys.modules.get("torch")) is not None:
        facts["torch_draw"] = float(torch.rand(1))
        facts["cuda"] = torch.cuda.is_initialized()
    draft = run_dir / f"{spec.name.replace('/', '.')}.draft"
    draft.write_text(json.dumps(facts))
    draft.rename(draft.with_suffix(".facts"))
    print("out")
    print("err", file=sys.stderr)
    if spec.kind == "orphans":
        subprocess.Popen(["/bin/sh", "-c", "sleep 0.3 & exit 0"], start_new_session=True).wait()
    if spec.kind.startswith("exits "):
        sys.exit(ast.literal_eval(spec.kind.removeprefix("exits ")))
    if spec.kind != "sleeps":
        os._exit(7)
    time.sleep(600)


def facts_of_process() -> dict[str, Any]:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    environ = {word for word in Path("/proc/self/environ").read_text().split("\0") if word}
    return {
        "parent": os.getppid(), "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()], "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "cmdline": [word for word in Path("/proc/self/cmdline").read_text().split("\0") if word],
        "environ": sorted(word for word in environ if word.partition("=")[0] not in VARYING),
        "env": sorted(f"{key}={value}" for key, value in os.environ.items() if key not in VARYING),
        "main": getattr(sys.modules["__main__"].__spec__, "name", None), "path": sys.path, "cwd": str(Path.cwd()),
        "stdin": sys.stdin.read(),
        "descriptors": sorted(target for target in map(target_of, Path("/proc/self/fd").iterdir()) if target),
        "signals": {name: status[name].strip() for name in ("SigBlk", "SigIgn", "SigCgt")},
        "handlers": {number.name: str(signal.getsignal(number))[:60] for number in (signal.SIGINT, signal.SIGTERM)},
        "limits": resource.getrlimit(resource.RLIMIT_NOFILE),
        "gc": [gc.isenabled(), gc.get_threshold(), sys.getswitchinterval()], "modules": "torch" in sys.modules,
        "draw": random.random(), "num_tasks": int(status["Threads"]),
        "comm": Path("/proc/self/comm").read_text().strip(),
    }  # fmt: skip


def target_of(path: Path) -> str:
    """What a descriptor is, without what differs from process to process."""
    try:
        return str(path.readlink()).partition(":[")[0]
    except OSError:
        return ""


def threads_at_work() -> dict[str, Any]:
    """Threads that numeric libraries take for themselves, and how many they say they use."""
    import numpy as np
    import torch

    before = num_tasks()
    matrix = torch.ones(1500, 1500) @ torch.ones(1500, 1500)
    found: dict[str, Any] = {"torch": torch.get_num_threads(), "begun": num_tasks() - before}
    other = threading.Thread(target=lambda: found.update(elsewhere=torch.get_num_threads()))
    other.start()
    other.join()
    array = np.ones((1500, 1500)) @ np.ones((1500, 1500))
    assert float(matrix[0, 0]) == float(array[0, 0]) == 1500.0
    return found | {"numpy": openblas_threads()}


def openblas_threads() -> int:
    mapped = {line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    (library,) = [ctypes.CDLL(path) for path in mapped if "openblas" in Path(path).name]
    names = [f"{prefix}openblas_get_num_threads{suffix}" for prefix in ("", "scipy_") for suffix in ("", "64_")]
    return next(getattr(library, name)() for name in names if hasattr(library, name))


def num_tasks() -> int:
    return len(list(Path("/proc/self/task").iterdir()))
