"""Several ranks of one program that share the time of its imports; a program for the tests.

    python forked_ranks.py NUM_RANKS LIMIT_S FOLDER PROGRAM [ARGUMENT ...]

Loads PROGRAM as a module, calls its `preload()` (imports only: torch's threads and process groups do not survive a fork),
forks, and runs it as `__main__` in each child with the rank as last argument. What rank r says goes to FOLDER/rank<r>.log,
its exit status to FOLDER/rank<r>.status. A rank that is not done within LIMIT_S says where it is and ends; when one
fails, the others are given GRACE_S, for they may wait for it for ever. The ranks end with this process.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import os
import runpy
import signal
import sys
import warnings
from pathlib import Path
from typing import NoReturn

from myxa.core.process import die_with_parent

GRACE_S = 10


def rank_of(program: Path, arguments: list[str], rank: int, log: Path, parent: int, limit_s: float) -> NoReturn:
    """The child."""
    status = 1
    try:
        die_with_parent(parent)
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(out, 1)
        os.dup2(out, 2)
        faulthandler.enable()
        faulthandler.dump_traceback_later(limit_s, exit=True)
        sys.argv = [str(program), *arguments, str(rank)]
        runpy.run_path(str(program), run_name="__main__")
        status = 0
    except SystemExit as told:
        status = told.code if isinstance(told.code, int) else 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    num_ranks, limit_s, folder, program = int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
    warnings.filterwarnings("ignore")
    sys.path.insert(0, str(program.parent))
    spec = importlib.util.spec_from_file_location(program.stem, program)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[program.stem] = module
    spec.loader.exec_module(module)
    if hasattr(module, "preload"):
        module.preload()
    parent, ranks = os.getpid(), dict[int, int]()
    for rank in range(num_ranks):
        child = os.fork()
        if child == 0:
            rank_of(program, sys.argv[5:], rank, folder / f"rank{rank}.log", parent, limit_s)
        ranks[child] = rank

    def end_all(signum: int, frame: object) -> None:
        for child in ranks:
            os.kill(child, signal.SIGABRT)  # faulthandler prints the stacks

    signal.signal(signal.SIGALRM, end_all)
    while ranks:
        child, status = os.wait()
        rank = ranks.pop(child)
        code = os.waitstatus_to_exitcode(status)
        (folder / f"rank{rank}.status").write_text(str(code))
        if code != 0:
            signal.alarm(GRACE_S)


if __name__ == "__main__":
    main()
