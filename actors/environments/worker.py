"""A worker process for sessions of one environment, by the interpreter that has its package and this myxa.

It is a workflow's worker (`workflows/worker.py`) whose workflow is the environment. `python -m` this module reads an
`EnvironmentSpec` as JSON and prints the environment's rows.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Generator
from functools import partial

import msgspec

from ...core.errors import ConfigError, MyxaError, UserCodeError
from ..gateway.clients import SdkWorker
from ..user_code.functions import what_was_raised
from ..user_code.process import run_worker
from ..workflows.named import PHASES, OwnWorkflow
from .adapters import ENVIRONMENTS
from .session import EnvironmentSession, EnvironmentSpec, json_of


class EnvironmentWorker(SdkWorker):
    """The sessions of this process."""

    blames = "environment"

    def load(self) -> OwnWorkflow:
        self._of = of = msgspec.convert(self.spec.args, EnvironmentSpec)
        steps = {"run": "step"}
        self.phase_waits = {phase: ("environment", f"{of.name} {steps.get(phase, phase)}") for phase in PHASES}
        with loading(of):
            self._environment = ENVIRONMENTS[of.kind](of.id, of.args)
        return OwnWorkflow(partial(EnvironmentSession, self._environment, of), {}, is_class=True)

    async def begin(self, stack: contextlib.AsyncExitStack) -> None:
        with loading(self._of):
            await self._environment.start(stack)


@contextlib.contextmanager
def loading(of: EnvironmentSpec) -> Generator[None]:
    """Whatever is raised meanwhile says which environment it is about."""
    try:
        yield
    except MyxaError:
        raise
    except Exception as error:
        kind = ConfigError if isinstance(error, ImportError) else UserCodeError
        remedy = f"mend it; it was loaded by {sys.executable}"
        raise kind(f"{of.kind} {of.id}: raised {what_was_raised(error)}", remedy=remedy) from error


def print_rows() -> None:
    """Of the environment whose spec comes as JSON; what the environment prints becomes the log."""
    rows = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    of = msgspec.json.decode(sys.stdin.buffer.read(), type=EnvironmentSpec)
    try:
        with loading(of):
            for row in ENVIRONMENTS[of.kind](of.id, of.args).rows():
                rows.write(json_of(row) + b"\n")
    except MyxaError as error:
        sys.exit(error.message)
    rows.close()


def main() -> None:
    """Load what the first frame names, then run sessions until the input ends."""
    run_worker(EnvironmentWorker)


if __name__ == "__main__":
    print_rows()
