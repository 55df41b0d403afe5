"""Several ranks of one program that share the time of its imports; a program for the tests.

    python forked_ranks.py NUM_RANKS FOLDER PROGRAM [ARGUMENT ...]

Loads PROGRAM as a module, calls its `preload()` (imports only: torch's threads and process groups do not survive a fork),
forks, and runs it as `__main__` in each child with the rank as last argument. What rank r says goes to FOLDER/rank<r>.log,
its exit status to FOLDER/rank<r>.status. The ranks end with this process.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
import warnings
from pathlib import Path
from typing import NoReturn

from myxa.core.lifeline import die_with_parent


def rank_of(program: Path, arguments: list[str], rank: int, log: Path, parent: int) -> NoReturn:
    """The child."""
    status = 1
    try:
        die_with_parent(parent)
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(out, 1)
        os.dup2(out, 2)
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
    num_ranks, folder, program = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
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
            rank_of(program, sys.argv[4:], rank, folder / f"rank{rank}.log", parent)
        ranks[child] = rank
    while ranks:
        child, status = os.wait()
        rank = ranks.pop(child)
        (folder / f"rank{rank}.status").write_text(str(os.waitstatus_to_exitcode(status)))


if __name__ == "__main__":
    main()
