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
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, cast

import uvloop

from ..actors.hub import cached
from ..actors.user_code.functions import Expected, named_code
from ..core.actor import Actor
from ..core.config import RunConfig, load_config
from ..core.daemon_thread import in_daemon_thread
from ..core.errors import ConfigError, LaunchError, MyxaError, UserCodeError
from ..core.process import SCHEDULERS, die_with_parent
from ..transport.descriptors import raise_limit
from ..transport.node import CHOSEN_BY, keep_freed_memory
from .actor_spec import ActorSpec
from .contracts import ProcessContract, ProfileReply, StackReply, process_name
from .nodes.child import ORDERLY_END
from .nodes.rendezvous import attach_worker
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


# -- what the process answers beside its actor: stacks, profiles -------------------------------------------------------
#
# Stacks of tasks go down to what a task waits for; `asyncio.Task.print_stack` shows the outermost function only.


class ProcessActor(ProcessContract):
    """Beside the actor `name` on node number `node`."""

    def __init__(self, name: str, node: int, run_dir: Path) -> None:
        self._name = name
        self._node = node
        self._folder = run_dir / "profiles"
        self._is_profiling = False

    async def stacks(self) -> StackReply:
        text = f"{task_stacks(asyncio.get_running_loop())}\n{thread_stacks()}"
        return StackReply(name=self._name, pid=os.getpid(), text=text, how="process")

    async def profile(self, duration_s: float) -> ProfileReply:
        if self._is_profiling:
            raise ConfigError(f"{self._name} is being profiled already", remedy="wait until that has ended")
        self._is_profiling = True
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / f"{self._name.replace('/', '.')}.{time.time_ns()}.torch.json"
            top = await in_daemon_thread(partial(profile_torch, duration_s, path), name="profile")
        except ConfigError as error:
            raise ConfigError(f"{self._name}: {error.message}", remedy=error.remedy) from error
        finally:
            self._is_profiling = False
        return ProfileReply(name=self._name, node=self._node, path=str(path), top=top)


NUM_OPS_SHOWN = 10


def profile_torch(duration_s: float, path: Path) -> tuple[str, ...]:
    """Record, write a Chrome trace; the operators that took most. Blocks. Raises ConfigError without torch."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        raise ConfigError("this process does not use torch", remedy="py-spy shows where it is: py-spy record --pid")
    import torch.profiler as profiler  # in memory already, or nearly

    activities = [profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        activities.append(profiler.ProfilerActivity.CUDA)
    try:  # without it only the thread that starts the profiler is seen, and that one does nothing
        config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    except TypeError as error:
        raise ConfigError(
            f"torch {torch.__version__} profiles its own thread only", remedy="use torch 2.8 or newer, or leave it out"
        ) from error
    with profiler.profile(activities=activities, experimental_config=config) as seen:
        threading.Event().wait(duration_s)
    seen.export_chrome_trace(str(path))
    rows: list[Any] = sorted(seen.key_averages(), key=lambda row: float(row.self_cpu_time_total), reverse=True)
    return tuple(
        f"{row.self_cpu_time_total / 1e3:10.1f} ms in {row.count:7d} calls  {row.key}" for row in rows[:NUM_OPS_SHOWN]
    )


MAX_TASKS = 2000
MAX_AWAITS = 100
MAX_TEXT = 512 * 1024


def thread_stacks() -> str:
    """Of all threads, the calling one last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage] - documented, and there is no other way
    order = sorted(frames, key=lambda ident: ident == threading.get_ident())
    parts = [f"thread {names.get(ident, ident)}\n{''.join(traceback.format_stack(frames[ident]))}" for ident in order]
    return _cut("\n".join(parts))


def task_stacks(loop: asyncio.AbstractEventLoop) -> str:
    """Of all tasks of that loop; equal ones are written once, with their number."""
    asking = asyncio.current_task(loop)
    by_stack: dict[str, list[str]] = {}
    tasks = sorted((task for task in asyncio.all_tasks(loop) if task is not asking), key=lambda task: task.get_name())
    for task in tasks[:MAX_TASKS]:
        lines = "".join(
            f'  File "{frame.f_code.co_filename}", line {frame.f_lineno}, in {frame.f_code.co_qualname}\n'
            for frame in _frames(task.get_coro())
        )
        by_stack.setdefault(lines or "  (has not begun)\n", []).append(task.get_name())
    parts = [f"task {_names(names)}\n{lines}" for lines, names in by_stack.items()]
    if len(tasks) > MAX_TASKS:
        parts.append(f"and {len(tasks) - MAX_TASKS} tasks more")
    return _cut("\n".join(parts))


def _frames(awaited: Any) -> Iterator[FrameType]:
    """From the task's own function to the innermost one that waits."""
    for _ in range(MAX_AWAITS):
        frame = next((f for name in ("cr_frame", "gi_frame", "ag_frame") if (f := getattr(awaited, name, None))), None)
        if frame is None:
            return
        yield frame
        inner = (getattr(awaited, name, None) for name in ("cr_await", "gi_yieldfrom", "ag_await"))
        awaited = next((part for part in inner if part is not None), None)


def _names(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more ({len(names)} of them)" if len(names) > 4 else "")


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}\n..."


TICK_S = 1.0
WARN_S = 10.0

OURS = str(Path(__file__).parent)
INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")} | {OURS})


class LoopWatch:
    """Watches the loop of the thread that makes it, from `start` to `stop`: a thread asks for a sign once a second and
    counts missing ones, not seconds, so that a process is not blamed for the time that it was stopped. `give_up` is
    called there, once, with the line that holds the loop up. `busy_s` says for how long it has been declared that this
    may be."""

    def __init__(
        self, limit_s: float, give_up: Callable[[str], object], busy_s: Callable[[], float] = lambda: 0.0
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._watched = threading.get_ident()
        self._limit_s = limit_s
        self._give_up = give_up
        self._busy_s = busy_s
        self._sign = threading.Event()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="loop watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join(TICK_S)

    def _watch(self) -> None:
        missed_s = 0.0
        self._ask()
        while not self._is_over.wait(TICK_S):
            if self._sign.is_set():
                missed_s = 0.0
                self._ask()
                continue
            if self._busy_s() > 0:
                continue
            missed_s += TICK_S
            if missed_s == WARN_S:
                _log.warning("the event loop has been held up for %g s:\n%s", missed_s, self._stack())
            if missed_s >= self._limit_s:
                _log.error("the event loop has been held up for %g s:\n%s", missed_s, self._stack())
                # the innermost line of a file that is neither ours nor installed; else the innermost of all
                places = [(frame.filename, frame.lineno) for frame in traceback.extract_stack(self._frame())]
                foreign = [place for place in places if not place[0].startswith((*INSTALLED, "<"))]
                filename, line = (foreign or places)[-1]
                self._give_up(f"{filename}:{line}")
                return

    def _ask(self) -> None:
        self._sign.clear()
        try:
            self._loop.call_soon_threadsafe(self._sign.set)
        except RuntimeError:  # the loop is closed
            self._is_over.set()

    def _stack(self) -> str:
        return "".join(traceback.format_stack(self._frame()))

    def _frame(self) -> FrameType | None:
        frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage] - documented, and there is no other way
        return frames.get(self._watched)


# -- the process -------------------------------------------------------------------------------------------------------

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
