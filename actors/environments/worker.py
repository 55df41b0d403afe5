"""A worker process for sessions of one environment, by the interpreter that has its package and this myxa.

It is a workflow's worker (`workflows/worker.py`) whose workflow is the environment. `python -m` this module reads kind,
id and args as JSON and prints the environment's rows.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Generator, Mapping
from functools import partial
from typing import Any

from ...core.errors import ConfigError, MyxaError, UserCodeError
from ...core.process import die_with_parent
from ..gateway.clients import SdkWorker
from ..user_code.functions import what_was_raised
from ..user_code.process import run_worker
from ..workflows.named import PHASES, OwnWorkflow
from .adapters import ENVIRONMENTS
from .session import EnvironmentSession, json_of


class EnvironmentWorker(SdkWorker):
    """The sessions of this process."""

    blames = "environment"

    def load(self) -> OwnWorkflow:
        settings = self.spec.args
        name, steps = settings["name"], {"run": "step"}
        self.phase_waits = {phase: ("environment", f"{name} {steps.get(phase, phase)}") for phase in PHASES}
        with loading(settings):
            self._environment = ENVIRONMENTS[settings["kind"]](settings["id"], settings["args"])
        make = partial(EnvironmentSession, self._environment, name, settings["malformed_reward"])
        return OwnWorkflow(make, {}, is_class=True)

    async def begin(self, stack: contextlib.AsyncExitStack) -> None:
        with loading(self.spec.args):
            await self._environment.start(stack)


@contextlib.contextmanager
def loading(settings: Mapping[str, Any]) -> Generator[None]:
    """Whatever is raised meanwhile says which environment it is about."""
    try:
        yield
    except MyxaError:
        raise
    except Exception as error:
        kind = ConfigError if isinstance(error, ImportError) else UserCodeError
        remedy = f"mend it; it was loaded by {sys.executable}"
        raise kind(f"{settings['kind']} {settings['id']}: raised {what_was_raised(error)}", remedy=remedy) from error


def print_rows() -> None:
    """Of the environment whose spec comes as JSON; what the environment prints becomes the log."""
    die_with_parent(os.getppid())
    rows = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    settings = json.load(sys.stdin)
    try:
        with loading(settings):
            for row in ENVIRONMENTS[settings["kind"]](settings["id"], settings["args"]).rows():
                rows.write(json_of(row) + b"\n")
    except MyxaError as error:
        sys.exit(error.message)
    rows.close()


def main() -> None:
    """Load what the first frame names, then run sessions until the input ends."""
    run_worker(EnvironmentWorker)


if __name__ == "__main__":
    print_rows()
