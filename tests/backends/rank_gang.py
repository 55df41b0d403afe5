"""The ranks of one gang, forked from a process that has their imports; a program for a command server (harness/commands).

    python rank_gang.py REQUEST

REQUEST is JSON: {"program", "arguments", "num_ranks", "limit_s", "folder"}. The program's module is loaded, and its
`preload()` called (imports only: torch's threads and process groups do not survive a fork). Then it runs as `__main__` in
a child per rank, with the rank as last argument. What rank r says goes to FOLDER/rank<r>.log. A rank that is not done
within `limit_s` says where it is and ends; when one fails, the others are given GRACE_S, for they may wait for it for
ever. What is printed is a line with all exit statuses.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import json
import os
import runpy
import signal
import sys
import warnings
from pathlib import Path
from typing import Any, NoReturn

from myxa.core.process import die_with_parent

GRACE_S = 10


def be_rank(program: Path, arguments: list[str], log: Path, parent: int, limit_s: float) -> NoReturn:
    """The child."""
    status = 1
    try:
        die_with_parent(parent)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(out, 1)
        os.dup2(out, 2)
        faulthandler.enable()
        faulthandler.dump_traceback_later(limit_s, exit=True)
        sys.argv = [str(program), *arguments]
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


def load(program: Path) -> None:
    sys.path.insert(0, str(program.parent))
    spec = importlib.util.spec_from_file_location(program.stem, program)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[program.stem] = module
    spec.loader.exec_module(module)
    if hasattr(module, "preload"):
        module.preload()


def run_gang(request: dict[str, Any]) -> list[int]:
    program, folder = Path(request["program"]), Path(request["folder"])
    load(program)
    parent, ranks, statuses = os.getpid(), dict[int, int](), [0] * request["num_ranks"]
    for rank in range(request["num_ranks"]):
        child = os.fork()
        if child == 0:
            words = [*request["arguments"], str(rank)]
            be_rank(program, words, folder / f"rank{rank}.log", parent, request["limit_s"])
        ranks[child] = rank

    def end_all(signum: int, frame: object) -> None:
        for child in ranks:
            os.kill(child, signal.SIGABRT)  # faulthandler prints the stacks

    signal.signal(signal.SIGALRM, end_all)
    while ranks:
        child, status = os.wait()
        code = statuses[ranks.pop(child)] = os.waitstatus_to_exitcode(status)
        if code != 0:
            signal.alarm(GRACE_S)
    signal.alarm(0)
    return statuses


def main() -> None:
    warnings.filterwarnings("ignore")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what imports say is no answer
    print(json.dumps(run_gang(json.loads(sys.argv[1]))), file=answers, flush=True)


if __name__ == "__main__":
    main()
