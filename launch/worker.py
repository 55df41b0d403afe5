"""Entry of every actor process: `python -m myxa.launch.worker`, with MYXA_WORKER_SPEC naming its description.

Serves until its launcher sends ORDERLY_END. Exit status 0 then, else that of the error; the last line of the log is the
error's message. SIGTERM is the launcher's to act on, as is what else Slurm and systemd send to every process of a job.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import faulthandler
import gc
import logging
import math
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, cast

import uvloop

from ..actors.hub import cached
from ..actors.user_code.functions import Expected, named_code
from ..core.actor import Actor
from ..core.config import RunConfig, load_config
from ..core.errors import ConfigError, LaunchError, MyxaError, UserCodeError
from ..core.process import SCHEDULERS, die_with_parent
from ..transport.descriptors import raise_limit
from ..transport.node import CHOSEN_BY, keep_freed_memory
from .actor_spec import ActorSpec
from .contracts import process_name
from .nodes.child import ORDERLY_END
from .nodes.rendezvous import attach_worker
from .process_actor import LoopWatch, ProcessActor
from .run_dir import RunDir
from .worker_spec import SPEC_VARIABLE, ProcessSpec, read_spec

BuildActor = Callable[[ActorSpec, RunConfig, Path], Actor]
PROGRAM = Expected("program", 3, "def build(spec: ActorSpec, config: RunConfig, run_dir: Path) -> Actor")

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
CLOSE_S = 5.0
PATIENCE_S: dict[str, float] = {"rollout": 5.0, "buffer": 30.0}
"""How long the loops of actors that run users' code may be held up at least, whatever rollout.timeout_s says."""

_log = logging.getLogger("myxa.worker")


async def serve(spec: ProcessSpec) -> None:
    """Run the actor until it is asked to end. Raises what failed it."""
    config = cached(load_config(RunDir(Path(spec.run_dir)).config))
    build = cast("BuildActor", named_code(spec.program, PROGRAM))
    actor = build(spec.actor, config, Path(spec.run_dir))
    # Before this line the signals end the process at once, so that an import of torch delays no end.
    loop = asyncio.get_running_loop()
    stop_requested: asyncio.Future[None] = loop.create_future()
    loop.add_signal_handler(ORDERLY_END, lambda: stop_requested.done() or stop_requested.set_result(None))
    for number in SCHEDULERS:
        loop.add_signal_handler(number, _log.info, "%s is the launcher's to act on", number.name)
    node = await attach_worker(spec)
    watch = _watch_for_users_code(spec.actor, config, lambda: node.busy_s)
    try:
        beside = ProcessActor(spec.actor.name, spec.actor.node, Path(spec.run_dir))
        await node.start(beside, name=process_name(spec.actor.name))
        await node.start(actor, name=spec.actor.name)
        watch.start()
        _log.info("%s serves as attempt %d, epoch %d", spec.actor.name, spec.actor.attempt, node.epoch)
        await asyncio.wait({stop_requested, node.failed}, return_when=asyncio.FIRST_COMPLETED)
        if node.failed.done():
            raise node.failed.result()
        _log.info("%s got the order to stop", spec.actor.name)
    finally:
        watch.stop()
        await node.close(grace_s=CLOSE_S)


def end(code: int, message: str) -> NoReturn:
    """Leave at once, the message as the log's last line: a thread stuck in a collective must not hold the end."""
    print(f"myxa: {message}", file=sys.stderr, flush=True)
    os._exit(code)


def leave(status: int = 0) -> NoReturn:
    """End in an orderly way: Python's exit functions run, destructors of native libraries do not. There Gloo's threads
    have aborted processes whose work was done ("terminate called without an active exception")."""
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]  # there is no public name
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _watch_for_users_code(actor: ActorSpec, config: RunConfig, busy_s: Callable[[], float]) -> LoopWatch:
    """`async` rewards and group filters run on the loop and may block it."""
    limit_s = max(config.reward.timeout_s, PATIENCE_S.get(actor.role, math.inf))

    def give_up(line: str) -> None:
        error = UserCodeError(
            f"{actor.name} was held up for {limit_s:g} s by {line}",
            remedy="await what takes long in an async function; what cannot be awaited belongs into a plain def",
        )
        end(error.exit_code, str(error))

    return LoopWatch(limit_s, give_up, busy_s)


SWITCH_INTERVAL_S = 0.0005
"""An engine's or a trainer's thread takes the interpreter lock back after every kernel; with Python's 5 ms each of
those waits lasts as long as the event loop is busy. Set here because this process is ours; an embedded actor's host
decides for itself."""


GC_THRESHOLD = 50_000
"""Net allocations between two looks for cycles. Hundreds of calls under way are thousands of living objects; with
Python's 700 the collector looks through them several times per turn of the loop, a fifth of what a call costs."""


def set_up_interpreter() -> None:
    """The settings above, and an allocator that keeps what was freed: for a process whose every thread is the run's."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.set_threshold(GC_THRESHOLD, 10, 10)
    if not any(name in os.environ for name in CHOSEN_BY):
        keep_freed_memory()


def main() -> int:
    path = os.environ.get(SPEC_VARIABLE, "")
    if not path:
        print(f"{SPEC_VARIABLE} is not set: workers are started by `myxa up`", file=sys.stderr)
        return LaunchError.exit_code
    set_up_interpreter()
    raise_limit()
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, stream=sys.stderr)
    faulthandler.enable(all_threads=False)  # into the log, where native code crashed
    faulthandler.register(signal.SIGQUIT, all_threads=True)  # by which the launcher asks where the process hangs
    try:
        spec = read_spec(path)
        die_with_parent(spec.launcher_pid)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(spec))
    except Exception as error:  # noqa: BLE001 - logged, and reported by the exit status
        _log.exception("failed")
        if isinstance(error, ImportError):  # another attempt would lack it too
            is_missing = isinstance(error, ModuleNotFoundError) and error.name
            missing = (
                f'has no module "{error.name}"' if is_missing else f"cannot import {error.name or 'a module'}: {error}"
            )
            remedy = "install what is missing, or set roles.<role>.python to an interpreter that has it"
            error = ConfigError(f"{sys.executable} {missing}", remedy=remedy)
        if isinstance(error, MyxaError):
            end(error.exit_code, str(error))
        end(1, f"{type(error).__name__}: {error}")
    with contextlib.suppress(OSError):
        Path(path).unlink()
    leave()


if __name__ == "__main__":
    sys.exit(main())
